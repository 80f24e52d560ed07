//! GPUs: their UUIDs, and this host's as NVIDIA's driver lists them.

pub mod gpu;
pub mod nvidia;
