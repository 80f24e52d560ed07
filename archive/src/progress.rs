//! Counts an operation's progress.

use std::sync::atomic::{AtomicU64, Ordering};

use cryopod_host::shared::{Counters, Shared};

/// Counters that a caller reads while an operation runs on another thread, or in a child. All values are in bytes.
#[derive(Debug, Default)]
pub struct Progress {
    counts: Shared<Counts>,
}

#[derive(Debug, Default)]
struct Counts {
    total: AtomicU64,
    done: AtomicU64,
}

// SAFETY: atomic numbers only.
unsafe impl Counters for Counts {}

impl Progress {
    /// Stored bytes of the source; 0 while unknown.
    pub fn total(&self) -> u64 {
        self.counts.total.load(Ordering::Relaxed)
    }

    /// Returns how many bytes of the source are read so far.
    pub fn done(&self) -> u64 {
        self.counts.done.load(Ordering::Relaxed)
    }

    /// Sets the stored bytes of the source.
    pub fn set_total(&self, bytes: u64) {
        self.counts.total.store(bytes, Ordering::Relaxed);
    }

    /// Adds bytes that were read of the source.
    pub fn add_done(&self, bytes: u64) {
        self.counts.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Subtracts from [`Progress::done`] when a transfer starts again.
    pub fn take_back(&self, bytes: u64) {
        self.counts.done.fetch_sub(bytes, Ordering::Relaxed);
    }
}
