//! What must hold on this host for a restore, and what relaxes it.

pub mod compat;
pub mod cpu;
pub mod nvidia_compat;
pub mod switches;
