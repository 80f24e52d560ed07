//! Verbs that take checkpoints from an engine or give them to one, and what they share.

pub(crate) mod carried;
pub(crate) mod container;
pub(crate) mod engine;
pub(crate) mod export;
pub(crate) mod import;
pub(crate) mod migrate;
