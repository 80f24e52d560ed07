//! Runs the low-level runtime and CRIU, and ends what would not end by itself.

pub mod abandoned;
pub mod action_script;
pub mod application;
pub mod child;
pub mod failure;
pub mod hidden_gpus;
pub mod log;
pub mod metrics;
pub mod mount_namespace;
pub mod operation;
pub mod progress;
pub mod runtime_log;
pub mod stuck_freeze;
pub mod stuck_kill;
pub mod stuck_restore;
