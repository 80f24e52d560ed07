//! Finds the GPUs of a container and of this host, and plans a checkpoint or restore.
//!
//! - [`plan`]: all of it put together, with the reasons for which a checkpoint is refused ([`refusal`]).
//! - [`live`]: what the running container really has: nodes made by hooks, processes using a driver.
//! - [`gpus`]: the host's GPUs and their nodes (NVIDIA's: `cryopod_cuda::gpus`).
//! - [`mapping`]: which GPU replaces which at a restore, and where each device node then leads.
//! - [`ceiling`]: the limit of what an archive or annotation may ask for.
//! - [`checks`]: the requirements of a restore on this host, and what relaxes them.
//! - [`hazards`], [`mounts`]: what else prevents a checkpoint, and mounts that no spec names.

pub mod ceiling;
pub mod checks;
pub mod exec_processes;
pub mod gpus;
pub mod hazards;
pub mod live;
pub mod mapping;
pub mod mounts;
pub mod plan;
pub use cryopod_cuda::preflight::refusal;
