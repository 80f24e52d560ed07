//! What the wrapper, the plugin and the agent write to each other, into the image directory, and into reports.

pub mod buffers;
pub mod config;
pub mod image;
pub mod protocol;
pub mod report;
