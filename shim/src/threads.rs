//! Starts threads with small stacks.

use std::{io, thread};

/// Threads here read and write frames; they need no large stacks.
const STACK_BYTES: usize = 256 << 10;

/// Starts a thread with a small stack.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    thread::Builder::new()
        .name(name.into())
        .stack_size(STACK_BYTES)
        .spawn(work)
        .map(drop)
}
