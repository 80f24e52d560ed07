//! What the spec forbids a container, and CRIU has not: because the images do not say so, or because it does not do what
//! they say.

pub mod closed_paths;
pub mod device_filter;
pub mod mount_flags;
pub mod own_cgroup;
