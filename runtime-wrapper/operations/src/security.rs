//! Compares what a checkpoint asks for with what the engine's spec gives.

pub mod ceiling;
pub mod container_links;
pub mod decoder;
pub mod host_facts;
pub mod image_check;
pub mod lsm;
pub mod mount_limits;
pub mod openable;
pub mod privileges;
pub mod tar_end;
