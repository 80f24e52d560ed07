//! How far an operation is, and a way to stop it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counters that a caller reads while an operation runs on another thread. All values are bytes.
#[derive(Debug, Default)]
pub struct Progress {
    total: AtomicU64,
    done: AtomicU64,
    written: AtomicU64,
    cancelled: AtomicBool,
}

impl Progress {
    /// Bytes to process: of the source as it is stored. 0 while it is not known.
    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Bytes of the source that were processed.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Bytes written to the destination.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Stops the operation soon; it returns [`crate::error::Error::Cancelled`] and leaves nothing behind.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Was [`Progress::cancel`] called?
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Sets [`Progress::total`].
    pub fn set_total(&self, bytes: u64) {
        self.total.store(bytes, Ordering::Relaxed);
    }

    /// Adds to [`Progress::done`].
    pub fn add_done(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Adds to [`Progress::written`].
    pub fn add_written(&self, bytes: u64) {
        self.written.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Takes bytes off [`Progress::done`], of a transfer that begins again.
    pub fn take_back(&self, bytes: u64) {
        self.done.fetch_sub(bytes, Ordering::Relaxed);
    }
}
