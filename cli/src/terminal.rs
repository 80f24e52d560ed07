//! What the user sees: progress, numbers, results.

pub(crate) mod output;
pub(crate) mod ui;
