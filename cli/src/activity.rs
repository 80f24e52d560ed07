//! What operations on this host do now, and what they took.

pub(crate) mod metrics;
pub(crate) mod top;
