//! The gate that a checkpoint lock closes: API calls pass it, or wait.
//!
//! One atomic word and futex waits, no mutex: a thread may be frozen anywhere while the restore
//! thread runs alone, and must never be holding what the restore thread needs.

use rustix::thread::futex;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

/// The bit that says closed; the rest counts calls inside.
const CLOSED: u32 = 1 << 31;

pub struct Gate(AtomicU32);

impl Gate {
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Goes in, waiting while the gate is closed.
    pub fn enter(&self) -> Inside<'_> {
        loop {
            let s = self.0.load(SeqCst);
            if s & CLOSED != 0 {
                let _ = futex::wait(&self.0, futex::Flags::PRIVATE, s, None);
            } else if self.0.compare_exchange(s, s + 1, SeqCst, SeqCst).is_ok() {
                return Inside(self);
            }
        }
    }

    /// Closes the gate and waits until nobody is inside, or until the deadline: then the gate is
    /// open again and the answer is false.
    pub fn close(&self, deadline: Option<Instant>) -> bool {
        self.0.fetch_or(CLOSED, SeqCst);
        while self.0.load(SeqCst) != CLOSED {
            if deadline.is_some_and(|d| Instant::now() >= d) {
                self.open();
                return false;
            }
            thread::sleep(Duration::from_micros(500));
        }
        true
    }

    pub fn open(&self) {
        self.0.fetch_and(!CLOSED, SeqCst);
        let _ = futex::wake(&self.0, futex::Flags::PRIVATE, i32::MAX.unsigned_abs());
    }
}

pub struct Inside<'a>(&'a Gate);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn closes_after_the_last_leaves_and_holds_others() {
        let gate = Arc::new(Gate::new());
        let inside = gate.enter();
        assert!(!gate.close(Some(Instant::now() + Duration::from_millis(20))));
        drop(inside);
        assert!(gate.close(None));
        let passed = Arc::new(AtomicBool::new(false));
        let t = {
            let (gate, passed) = (Arc::clone(&gate), Arc::clone(&passed));
            thread::spawn(move || {
                let _inside = gate.enter();
                passed.store(true, SeqCst);
            })
        };
        thread::sleep(Duration::from_millis(50));
        assert!(!passed.load(SeqCst));
        gate.open();
        t.join().unwrap();
        assert!(passed.load(SeqCst));
    }
}
