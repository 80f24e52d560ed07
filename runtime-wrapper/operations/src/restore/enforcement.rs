//! What the spec forbids a container, and CRIU's images do not.

pub mod closed_paths;
pub mod device_filter;
