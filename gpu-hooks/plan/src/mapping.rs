//! Which GPU replaces which at a restore, and where each device node then leads.

pub mod gpumap;
pub mod remap;
pub mod wish;
