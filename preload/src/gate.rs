//! The gate in front of all calls that enqueue GPU work or change GPU memory: open, or shut during a checkpoint.
//!
//! Each thread says in a word of its own that it is in such a call. Whoever shuts the gate waits until no thread is. An
//! open gate costs a call one exchange on that word and one load.

use crate::process::PerProcess;
use rustix::thread::futex;
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

const OPEN: u32 = 0;
const SHUT: u32 = 1;
const TICK: Duration = Duration::from_micros(100);

static GATE: AtomicU32 = AtomicU32::new(OPEN);
static THREADS: PerProcess<Vec<Weak<AtomicU32>>> = PerProcess::new(Vec::new(), Vec::new());
/// Calls of threads that are ending, whose own word is gone.
static LATE: AtomicU32 = AtomicU32::new(0);

struct Thread {
    /// 1 while it is in a call.
    word: Arc<AtomicU32>,
    /// Calls within calls.
    depth: Cell<u32>,
}

thread_local! {
    static THREAD: Thread = Thread::new();
}

impl Thread {
    fn new() -> Self {
        let word = Arc::new(AtomicU32::new(0));
        let mut threads = THREADS.lock();
        threads.retain(|word| word.strong_count() > 0);
        threads.push(Arc::downgrade(&word));
        Self {
            word,
            depth: Cell::new(0),
        }
    }
}

fn enter(word: &AtomicU32) {
    loop {
        word.swap(1, SeqCst);
        if GATE.load(SeqCst) == OPEN {
            return;
        }
        word.store(0, SeqCst);
        let _ = futex::wait(&GATE, futex::Flags::PRIVATE, SHUT, None);
    }
}

/// A thread in a call that must not be made while the gate is shut.
struct Inside {
    late: bool,
}

impl Inside {
    fn new() -> Self {
        let counted = THREAD.try_with(|thread| {
            let depth = thread.depth.get();
            if depth == 0 {
                enter(&thread.word);
            }
            thread.depth.set(depth + 1);
        });
        let late = counted.is_err();
        if late {
            late_enter();
        }
        Self { late }
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if self.late {
            LATE.fetch_sub(1, SeqCst);
            return;
        }
        let _ = THREAD.try_with(|thread| {
            let depth = thread.depth.get() - 1;
            thread.depth.set(depth);
            if depth == 0 {
                thread.word.store(0, SeqCst);
            }
        });
    }
}

/// Makes a call that must not be made while the gate is shut; waits until it is open.
#[inline]
pub fn pass<T>(call: impl FnOnce() -> T) -> T {
    let _inside = Inside::new();
    call()
}

fn late_enter() {
    loop {
        LATE.fetch_add(1, SeqCst);
        if GATE.load(SeqCst) == OPEN {
            return;
        }
        LATE.fetch_sub(1, SeqCst);
        let _ = futex::wait(&GATE, futex::Flags::PRIVATE, SHUT, None);
    }
}

/// Shuts the gate and waits until no thread is in a call. False if that was not so by the deadline: the gate is open
/// then.
pub fn shut(deadline: Instant) -> bool {
    GATE.store(SHUT, SeqCst);
    while is_used() {
        if Instant::now() >= deadline {
            open();
            return false;
        }
        std::thread::sleep(TICK);
    }
    true
}

fn is_used() -> bool {
    let threads = THREADS.lock();
    LATE.load(SeqCst) > 0
        || threads
            .iter()
            .filter_map(Weak::upgrade)
            .any(|word| word.load(SeqCst) != 0)
}

/// Opens the gate and wakes all that wait.
pub fn open() {
    GATE.store(OPEN, SeqCst);
    let _ = futex::wake(&GATE, futex::Flags::PRIVATE, i32::MAX.unsigned_abs());
}

/// A stream of which a graph is being captured.
#[derive(Clone, Copy, PartialEq, Eq)]
struct CapturedStream {
    /// Its handle: each thread may have a stream of its own under the same.
    handle: usize,
    context: usize,
}

/// A capture cannot be interrupted.
static CAPTURES: PerProcess<Vec<CapturedStream>> = PerProcess::new(Vec::new(), Vec::new());
static UNHELD: AtomicU32 = AtomicU32::new(0);

/// Returns true while a graph is being captured on any stream.
pub fn is_capturing() -> bool {
    !CAPTURES.lock().is_empty()
}

/// Begins a capture of a stream, and notes it before: what other threads do meanwhile could end it.
pub fn capture(handle: usize, context: usize, begin: impl FnOnce() -> c_int) -> c_int {
    let stream = CapturedStream { handle, context };
    CAPTURES.lock().push(stream);
    let code = begin();
    if code != 0 {
        forget_capture(|one| *one == stream);
    }
    code
}

/// Notes that a stream is not captured any more, if it was. Each thread has a default stream of the same handle.
pub fn capture_ended(handle: usize, context: usize) {
    let stream = CapturedStream { handle, context };
    if !forget_capture(|one| *one == stream) {
        forget_capture(|one| one.handle == handle);
    }
}

/// Forgets the captures in a context that has ended: nobody will end them.
pub fn context_ended(context: usize) {
    CAPTURES.lock().retain(|one| one.context != context);
}

fn forget_capture(is_it: impl Fn(&CapturedStream) -> bool) -> bool {
    let mut captures = CAPTURES.lock();
    let at = captures.iter().position(is_it);
    at.map(|at| captures.swap_remove(at)).is_some()
}

/// Notes that the program has a function that may enqueue work and does not pass the gate.
pub fn cannot_hold_all() {
    UNHELD.store(1, SeqCst);
}

/// Returns true unless [`cannot_hold_all`] was called.
pub fn holds_all() -> bool {
    UNHELD.load(SeqCst) == 0
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::sync::atomic::AtomicU64;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(50)
    }

    /// One test, for there is one list.
    #[test]
    fn a_capture_ends_with_its_own_stream_or_context() {
        let own = [0, 0, 7];
        for stream in own {
            assert_eq!(capture(stream, 1, || i32::from(!is_capturing())), 0);
        }
        // It has begun already.
        assert_eq!(capture(7, 1, || 401), 401);
        // One that is destroyed, and was not captured.
        capture_ended(8, 1);
        for stream in own {
            assert!(is_capturing());
            capture_ended(stream, 1);
        }
        assert!(!is_capturing());
        for (stream, context) in [(0, 1), (5, 1), (0, 2)] {
            capture(stream, context, || 0);
        }
        context_ended(1);
        assert!(is_capturing(), "that of another context");
        context_ended(2);
        assert!(!is_capturing());
    }

    /// One test, for there is one gate.
    #[test]
    fn nobody_is_in_a_call_while_the_gate_is_shut() {
        assert!(!pass(|| shut(soon())), "this thread is in a call");
        assert_eq!(pass(|| pass(|| 7)), 7);
        let (calls, over) = (AtomicU64::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    while over.load(SeqCst) == 0 {
                        pass(|| {
                            calls.fetch_add(1, SeqCst);
                            std::hint::spin_loop();
                            calls.fetch_add(1, SeqCst);
                        });
                    }
                });
            }
            // On a busy machine all rounds may be over before the first of them runs.
            while calls.load(SeqCst) == 0 {
                std::thread::sleep(TICK);
            }
            for _ in 0..200 {
                assert!(shut(Instant::now() + Duration::from_secs(20)));
                let before = calls.load(SeqCst);
                assert_eq!(before % 2, 0, "a call is half-way");
                std::thread::yield_now();
                assert_eq!(calls.load(SeqCst), before, "a call was made");
                open();
                std::thread::yield_now();
            }
            over.store(1, SeqCst);
        });
    }
}
