//! Counts an operation's progress, and can cancel it.

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
    written: AtomicU64,
    /// Not 0: cancelled.
    cancelled: AtomicU64,
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

    /// Returns how many bytes are written so far.
    pub fn written(&self) -> u64 {
        self.counts.written.load(Ordering::Relaxed)
    }

    /// Stops the operation soon; it returns [`crate::error::Error::Cancelled`] and leaves nothing behind.
    pub fn cancel(&self) {
        self.counts.cancelled.store(1, Ordering::Relaxed);
    }

    /// Returns true once somebody has called [`Progress::cancel`].
    pub fn is_cancelled(&self) -> bool {
        self.counts.cancelled.load(Ordering::Relaxed) != 0
    }

    /// Sets the stored bytes of the source.
    pub fn set_total(&self, bytes: u64) {
        self.counts.total.store(bytes, Ordering::Relaxed);
    }

    /// Adds bytes that were read of the source.
    pub fn add_done(&self, bytes: u64) {
        self.counts.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds bytes that were written.
    pub fn add_written(&self, bytes: u64) {
        self.counts.written.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Subtracts from [`Progress::done`] when a transfer starts again.
    pub fn take_back(&self, bytes: u64) {
        self.counts.done.fetch_sub(bytes, Ordering::Relaxed);
    }
}
