//! Verbs that take the GPU memory from a running container, and give it back.

pub(crate) mod resume;
pub(crate) mod suspend;
