//! What GPUs a container uses, what GPUs this host has, and the plan of a checkpoint or restore.
//!
//! Everything that is read from `/proc`, `/sys` or `/dev` goes through [`host::Host`], whose root tests
//! replace; every process that is started goes through [`tools::Tools`].
//!
//! - [`spec`]: the container's OCI spec, and the GPU device nodes that it names.
//! - [`nodes`]: what a device path is, by the vendors' naming.
//! - [`live`]: what the running container really has: nodes made by hooks, processes using a driver.
//! - [`scan`]: its processes, looked at once.
//! - [`destinations`], [`own_nodes`]: where the spec's mounts are, and device nodes that the runtimes bind.
//! - [`hazards`], [`mounts`]: what stands in the way of a checkpoint beside GPUs, and mounts that no spec names.
//! - [`nvidia`], [`amd`]: the host's GPUs.
//! - [`gpumap`]: which GPU takes the place of which at a restore.
//! - [`remap`]: where each device node then leads.
//! - [`compat`]: what must hold for a restore on this host, as data.
//! - [`nvidia_compat`]: NVIDIA's checks; [`switches`]: what relaxes a check.
//! - [`criu_elf`]: what a CRIU plugin demands of CRIU.
//! - [`plan`]: all of it put together, with the reasons for which a checkpoint is refused.

pub mod amd;
pub mod ceiling;
pub mod compat;
pub mod criu_elf;
pub mod cuda;
pub mod destinations;
pub mod gpumap;
pub mod hazards;
pub mod host;
pub mod live;
pub mod mountinfo;
pub mod mounts;
pub mod nodes;
pub mod nvidia;
pub mod nvidia_compat;
pub mod own_nodes;
pub mod plan;
pub mod remap;
pub mod scan;
mod sock_diag;
pub mod spec;
pub mod switches;
pub mod tools;
