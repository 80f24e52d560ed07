//! State of this process alone.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

static CHILD: AtomicBool = AtomicBool::new(false);

/// Notes that this process is a forked child. It has no driver and no thread of this library.
pub fn forked() {
    CHILD.store(true, SeqCst);
}

/// Returns true in a forked child of a process that used the driver.
pub fn is_child() -> bool {
    CHILD.load(SeqCst)
}

/// State behind a lock. A forked child has another one, without anything in it: a thread that is not in the child may have
/// held the lock at the fork, and would never give it back.
pub struct PerProcess<T> {
    parent: Mutex<T>,
    child: Mutex<T>,
}

impl<T> PerProcess<T> {
    /// The same twice: for the process, and for its children.
    pub const fn new(parent: T, child: T) -> Self {
        Self {
            parent: Mutex::new(parent),
            child: Mutex::new(child),
        }
    }

    /// Locks the state of this process.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let state = match is_child() {
            true => &self.child,
            false => &self.parent,
        };
        state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_child_does_not_wait_for_a_thread_of_its_parent() {
        static STATE: PerProcess<Vec<u8>> = PerProcess::new(Vec::new(), Vec::new());
        STATE.lock().push(1);
        let held = STATE.lock();
        // SAFETY: the child locks, and ends by a system call.
        let child = unsafe { libc::fork() };
        if child == 0 {
            forked();
            let as_new = STATE.lock().is_empty();
            // SAFETY: takes a number.
            unsafe { libc::_exit(i32::from(!as_new)) };
        }
        assert!(child > 0);
        let mut status = -1;
        let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
        loop {
            // SAFETY: a child of this process, and a live local.
            let ended = unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) };
            if ended == child {
                break;
            }
            if std::time::Instant::now() > end {
                // SAFETY: the child has not been waited for.
                unsafe { libc::kill(child, libc::SIGKILL) };
                panic!("it waits");
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!((status, held.len()), (0, 1));
    }
}
