//! Waits for the GPU's work.

use crate::contexts;
use cryopod_preload_wire::Reason;
use std::ffi::c_int;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub const RELAXED: u32 = 2;
pub const STACK: usize = 256 << 10;

/// Blocks all signals in this thread: they are the program's.
pub fn block_signals() {
    // SAFETY: a set of this thread's own, filled and applied.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, std::ptr::null_mut());
    }
}

/// The wait that was given up last, if its thread has not ended yet.
static UNENDED: Mutex<Option<mpsc::Receiver<c_int>>> = Mutex::new(None);

/// Waits for the work in all contexts. A wait cannot be ended, so that a thread of its own does it, one at a time.
pub fn finished(until: Instant) -> Result<(), Reason> {
    let left = || until.saturating_duration_since(Instant::now());
    let mut unended = UNENDED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(earlier) = &*unended {
        // What it has seen is not what has been enqueued since.
        if earlier.recv_timeout(left()) == Err(RecvTimeoutError::Timeout) {
            return Err(Reason::Busy);
        }
        *unended = None;
    }
    let (sender, receiver) = mpsc::channel();
    let work = move || {
        block_signals();
        let mut mode = RELAXED;
        contexts::other_call(
            c"cuThreadExchangeStreamCaptureMode",
            [&raw mut mode as usize, 0, 0],
        );
        let codes = contexts::all().into_iter().map(contexts::synchronize);
        let _ = sender.send(codes.fold(0, |first, code| if first == 0 { code } else { first }));
    };
    std::thread::Builder::new()
        .name("cryopod-wait".into())
        .stack_size(STACK)
        .spawn(work)
        .map_err(|_| Reason::Busy)?;
    match receiver.recv_timeout(left()) {
        Ok(0) => Ok(()),
        Ok(code) => Err(Reason::Cuda(code.unsigned_abs())),
        Err(_) => {
            *unended = Some(receiver);
            Err(Reason::Busy)
        }
    }
}
