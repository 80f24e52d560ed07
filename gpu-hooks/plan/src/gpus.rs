//! The GPUs of a container and of this host, and their device nodes.

pub mod amd_gpus;
pub mod driver_files;
pub mod inventory;
pub mod own_nodes;
