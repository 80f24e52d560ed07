//! Finds the GPUs of a container and of this host, and plans a checkpoint or restore.
//!
//! - [`plan`]: all of it put together, with the reasons for which a checkpoint is refused ([`refusal`]).
//! - [`live`]: what the running container really has: nodes made by hooks, processes using a driver.
//! - [`amd_gpus`]: the host's AMD GPUs (NVIDIA's: `cryopod_cuda::nvidia`).
//! - [`gpumap`]: which GPU replaces which at a restore; [`remap`]: where each device node then leads.
//! - [`ceiling`]: the limit of what an archive or annotation may ask for.
//! - [`compat`]: the requirements of a restore on this host, as data; [`nvidia_compat`]: NVIDIA's checks; [`switches`]:
//!   what relaxes a check.
//! - [`hazards`], [`mounts`], [`own_nodes`]: what else prevents a checkpoint, mounts that no spec names, and device
//!   nodes that the runtimes bind.

pub mod amd_gpus;
pub mod ceiling;
pub mod compat;
pub mod driver_files;
pub mod exec_processes;
pub mod gpumap;
pub mod hazards;
pub mod inventory;
pub mod live;
pub mod mounts;
pub mod nvidia_compat;
pub mod own_nodes;
pub mod plan;
pub mod refusal;
pub mod remap;
pub mod switches;
pub mod wish;
