//! Describes a Linux host and its containers. It sets no policy: other crates decide what follows from these facts.
//!
//! Everything that is read from `/proc`, `/sys` or `/dev` goes through [`files::Host`], whose root tests replace. Every
//! program that is started goes through [`programs::Tools`].
//!
//! - [`files`]: the host's files, bounded.
//! - [`mountinfo`]: mounts of a process; [`detached`]: mounts for another mount namespace.
//! - [`spec`]: a container's OCI spec; [`destinations`]: where its mounts end up inside the container's root.
//! - [`nodes`]: device nodes of GPUs, by the vendors' naming.
//! - [`processes`]: the processes of a container, examined once; [`sock_diag`]: their Unix sockets.
//! - [`pidfd`]: processes by descriptor.
//! - [`cgroups`]: the host's cgroup set-up, and cgroups of a container.
//! - [`containerd`]: its image directories.
//! - [`programs`], [`limited`]: other programs, within a time limit.

pub mod cgroups;
pub mod containerd;
pub mod destinations;
pub mod detached;
pub mod files;
pub mod limited;
pub mod mountinfo;
pub mod nodes;
pub mod pidfd;
pub mod processes;
pub mod programs;
pub mod sandbox;
pub mod shared;
pub mod sock_diag;
pub mod spec;

/// Returns a duration in whole microseconds, as metadata and reports have it.
pub fn micros(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
