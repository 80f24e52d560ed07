//! Threads with small stacks: they read and write frames.

use std::{io, thread};

/// Threads here read and write frames; their stacks need not be large.
const STACK_BYTES: usize = 256 << 10;

/// A thread of its own.
///
/// # Errors
/// The system has no more.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name(name.into())
        .stack_size(STACK_BYTES)
        .spawn(work)
        .map(drop)
}
