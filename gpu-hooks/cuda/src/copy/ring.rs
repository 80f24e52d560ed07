//! Pinned buffers between the GPU and the host memory.

use super::{Functions, NO_TIMING, NON_BLOCKING, checked};
use crate::messages::protocol::DriverError;
use std::ffi::c_void;

/// Bytes of a buffer: no fewer than of a chunk whose digest is made as it is copied, and no more, as pinning is slow
/// (measured: 0.5 ms a MiB), and what fits into the processor's cache is copied faster.
pub(super) const BUFFER: usize = 2 << 20;
/// Buffers of a ring.
pub(super) const BUFFERS: usize = 32;
/// Buffers that the GPU reads at a time: enough to keep it busy, so that the others are there for threads to fill.
pub(super) const UNDER_WAY: usize = 6;

/// Pinned buffers, with an event for each, and a stream.
pub(super) struct Ring {
    functions: Functions,
    memory: *mut u8,
    pub(super) stream: *mut c_void,
    events: Vec<*mut c_void>,
}

// SAFETY: each buffer and its event are one thread's at a time; CUDA's objects may be used from any thread.
unsafe impl Sync for Ring {}
// SAFETY: as above.
unsafe impl Send for Ring {}

impl Ring {
    pub(super) fn new(functions: Functions) -> Result<Self, DriverError> {
        let mut ring = Self {
            functions,
            memory: std::ptr::null_mut(),
            stream: std::ptr::null_mut(),
            events: Vec::new(),
        };
        let mut memory = std::ptr::null_mut();
        // SAFETY: each call writes one pointer.
        unsafe {
            checked(
                "pinned memory",
                (functions.pin)(&mut memory, BUFFER * BUFFERS, 0),
            )?;
            ring.memory = memory.cast();
            checked(
                "a stream",
                (functions.stream)(&mut ring.stream, NON_BLOCKING),
            )?;
            for _ in 0..BUFFERS {
                let mut event = std::ptr::null_mut();
                checked("an event", (functions.event)(&mut event, NO_TIMING))?;
                ring.events.push(event);
            }
        }
        Ok(ring)
    }

    pub(super) fn buffer(&self, slot: usize) -> *mut u8 {
        self.memory.wrapping_add(slot * BUFFER)
    }

    /// Marks the moment at which a buffer's copy, the last on the stream, is done.
    pub(super) fn record(&self, slot: usize) -> Result<(), DriverError> {
        // SAFETY: the event and the stream are the ring's.
        checked("a copy", unsafe {
            (self.functions.record)(self.events[slot], self.stream)
        })
    }

    /// Waits for that moment; a buffer that was never copied is done.
    pub(super) fn wait(&self, slot: usize) -> Result<(), DriverError> {
        // SAFETY: an event of the ring's.
        checked("a copy", unsafe {
            (self.functions.wait)(self.events[slot])
        })
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: what this value holds; work on it is over, or the call waits for it.
        unsafe {
            for event in &self.events {
                (self.functions.end_event)(*event);
            }
            if !self.stream.is_null() {
                (self.functions.end_stream)(self.stream);
            }
            if !self.memory.is_null() {
                (self.functions.unpin)(self.memory.cast());
            }
        }
    }
}
