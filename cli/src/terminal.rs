//! What the user sees: progress, numbers, results.

pub(crate) mod numbers;
pub(crate) mod output;
pub(crate) mod ui;
