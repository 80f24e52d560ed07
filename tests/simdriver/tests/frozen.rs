//! The process as CRIU holds it: every thread stopped by ptrace, and only the restore thread let
//! run, with its signals blocked, for the length of each call.
#![allow(clippy::unwrap_used, reason = "a test that fails should stop")]

mod common;

use std::fs;
use std::thread::sleep;
use std::time::Duration;

use common::{Client, Machine};
use nix::sys::ptrace::{self, Options};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// A process of which every thread is stopped.
struct Frozen {
    threads: Vec<Pid>,
    restore: Pid,
}

impl Frozen {
    fn new(m: &Machine, c: &Client) -> Self {
        let restore = m.ok(c.pid, "tid").parse().unwrap();
        let mut threads: Vec<Pid> = Vec::new();
        for entry in fs::read_dir(format!("/proc/{}/task", c.pid)).unwrap() {
            let tid = entry
                .unwrap()
                .file_name()
                .to_str()
                .unwrap()
                .parse()
                .unwrap();
            ptrace::seize(Pid::from_raw(tid), Options::empty()).unwrap();
            threads.push(Pid::from_raw(tid));
        }
        for t in &threads {
            interrupt(*t);
        }
        Self {
            threads,
            restore: Pid::from_raw(restore),
        }
    }

    /// Runs something while the restore thread alone runs.
    fn with_restore_thread<T>(&self, f: impl FnOnce() -> T) -> T {
        let mask = mask(self.restore);
        set_mask(self.restore, !(1 << (libc::SIGTRAP - 1)));
        ptrace::cont(self.restore, None).unwrap();
        let result = f();
        interrupt(self.restore);
        set_mask(self.restore, mask);
        result
    }

    fn thaw(self) {
        for t in self.threads {
            ptrace::detach(t, None).unwrap();
        }
    }
}

fn interrupt(t: Pid) {
    ptrace::interrupt(t).unwrap();
    let status = waitpid(t, Some(WaitPidFlag::__WALL)).unwrap();
    assert!(
        matches!(
            status,
            WaitStatus::PtraceEvent(..) | WaitStatus::Stopped(..)
        ),
        "{status:?}"
    );
}

const PTRACE_GETSIGMASK: u32 = 0x420a;
const PTRACE_SETSIGMASK: u32 = 0x420b;

fn mask(t: Pid) -> u64 {
    let mut mask = 0u64;
    // SAFETY: the kernel writes the eight bytes that it is told of.
    let r = unsafe { libc::ptrace(PTRACE_GETSIGMASK, t.as_raw(), 8usize, &mut mask) };
    assert_eq!(r, 0);
    mask
}

fn set_mask(t: Pid, mask: u64) {
    // SAFETY: the kernel reads the eight bytes that it is told of.
    let r = unsafe { libc::ptrace(PTRACE_SETSIGMASK, t.as_raw(), 8usize, &mask) };
    assert_eq!(r, 0);
}

#[test]
fn the_restore_thread_needs_no_other() {
    let mut m = Machine::new("");
    let c = m.client("--threads 6 --churn --interval-ms 1");
    for _ in 0..5 {
        m.ok(c.pid, "lock");
        // At dump: frozen after the lock, checkpointed by the restore thread alone.
        let frozen = Frozen::new(&m, &c);
        frozen.with_restore_thread(|| m.ok(c.pid, "checkpoint"));
        // At the end of a restore: restored and unlocked before anything else runs.
        frozen.with_restore_thread(|| m.ok(c.pid, "restore unlock"));
        frozen.thaw();
        c.goes_on();
    }
}

#[test]
fn without_it_nothing_happens() {
    let mut m = Machine::new("");
    let c = m.client("");
    m.ok(c.pid, "lock");
    let frozen = Frozen::new(&m, &c);
    // The thread's id is told all the same; a checkpoint waits.
    assert_eq!(m.ok(c.pid, "tid"), frozen.restore.to_string());
    let mut caller = m.step_command(c.pid, "checkpoint").spawn().unwrap();
    sleep(Duration::from_millis(300));
    assert!(caller.try_wait().unwrap().is_none());
    frozen.with_restore_thread(|| assert!(caller.wait().unwrap().success()));
    frozen.with_restore_thread(|| m.ok(c.pid, "restore"));
    frozen.thaw();
    m.ok(c.pid, "unlock");
    c.goes_on();
}
