//! Letting one thread of a stopped process run, and stopping it again.
//!
//! The driver's work in a process is done by a thread of that process, which CRIU has stopped with
//! all the others. CRIU is its tracer and ptrace takes calls from the tracing thread alone, so
//! everything here runs on CRIU's main thread. While it runs, the thread gets no signal (its mask
//! is saved and put back) and its seccomp filter is in force again.

use cryopod_gpu_hooks::cuda::procfs;
use std::io;
use std::time::{Duration, Instant};

// Not all of these are in the libc crate for every target.
const GETSIGMASK: libc::c_uint = 0x420a;
const SETSIGMASK: libc::c_uint = 0x420b;
const O_TRACESYSGOOD: libc::c_ulong = 1;
const O_SUSPEND_SECCOMP: libc::c_ulong = 1 << 21;
const EVENT_STOP: i32 = 128;
const MASK_SIZE: libc::c_ulong = size_of::<u64>() as libc::c_ulong;

const STOP_LIMIT: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_micros(200);

/// A thread that runs while its process is stopped.
#[derive(Debug)]
pub struct Released {
    tid: i32,
    mask: u64,
    seccomp: bool,
    ended: bool,
}

fn ptrace(
    request: libc::c_uint,
    tid: i32,
    addr: libc::c_ulong,
    data: libc::c_ulong,
) -> io::Result<()> {
    // SAFETY: every request used here takes numbers, or the address of a u64 that outlives the call.
    match unsafe { libc::ptrace(request, tid, addr, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn set_mask(tid: i32, mask: &u64) -> io::Result<()> {
    ptrace(
        SETSIGMASK,
        tid,
        MASK_SIZE,
        std::ptr::from_ref(mask) as libc::c_ulong,
    )
}

/// Whether the thread is stopped and this process is its tracer.
pub fn is_ours(tid: i32) -> bool {
    let own = std::fs::read_link("/proc/self")
        .ok()
        .and_then(|link| link.to_str()?.parse::<i32>().ok());
    procfs::status(tid).is_ok_and(|status| status.tracer != 0 && Some(status.tracer) == own)
        && procfs::stat(tid).is_some_and(|stat| stat.state == 't')
}

impl Released {
    /// Lets the thread run.
    pub fn new(tid: i32) -> io::Result<Self> {
        let seccomp = procfs::status(tid)?.seccomp != 0;
        let mut mask = 0u64;
        ptrace(
            GETSIGMASK,
            tid,
            MASK_SIZE,
            std::ptr::from_mut(&mut mask) as libc::c_ulong,
        )?;
        let released = Self {
            tid,
            mask,
            seccomp,
            ended: false,
        };
        let all_but_trap = !(1u64 << (libc::SIGTRAP - 1));
        let run = || {
            set_mask(tid, &all_but_trap)?;
            ptrace(libc::PTRACE_SETOPTIONS, tid, 0, 0)?;
            ptrace(libc::PTRACE_CONT, tid, 0, 0)
        };
        if let Err(error) = run() {
            // Still stopped: as it was.
            let _ = released.put_back();
            return Err(error);
        }
        Ok(released)
    }

    fn put_back(&self) -> io::Result<()> {
        let suspend = if self.seccomp { O_SUSPEND_SECCOMP } else { 0 };
        ptrace(
            libc::PTRACE_SETOPTIONS,
            self.tid,
            0,
            O_TRACESYSGOOD | suspend,
        )?;
        set_mask(self.tid, &self.mask)
    }

    /// Handles what the kernel has to say about the thread: any stop is continued. False when the
    /// thread has ended.
    pub fn attend(&mut self) -> bool {
        while !self.ended {
            match self.wait() {
                Some(Event::Ended) => self.ended = true,
                Some(Event::Stopped { signal, event }) => {
                    let inject = if event { 0 } else { signal };
                    if ptrace(libc::PTRACE_CONT, self.tid, 0, inject as libc::c_ulong).is_err() {
                        self.ended = procfs::stat(self.tid).is_none_or(|stat| stat.exiting);
                        break;
                    }
                }
                None => break,
            }
        }
        !self.ended
    }

    /// Stops the thread again, its options and signal mask as CRIU left them.
    pub fn stop(mut self) -> io::Result<()> {
        if !self.attend() {
            return Err(io::Error::other(format!("thread {} ended", self.tid)));
        }
        ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0)?;
        let deadline = Instant::now() + STOP_LIMIT;
        loop {
            match self.wait() {
                Some(Event::Ended) => {
                    return Err(io::Error::other(format!("thread {} ended", self.tid)));
                }
                Some(Event::Stopped { event: true, .. }) => return self.put_back(),
                Some(Event::Stopped { signal, .. }) => {
                    ptrace(libc::PTRACE_CONT, self.tid, 0, signal as libc::c_ulong)?;
                }
                None if Instant::now() >= deadline => {
                    let what = format!("thread {} did not stop", self.tid);
                    return Err(io::Error::new(io::ErrorKind::TimedOut, what));
                }
                None => std::thread::sleep(TICK),
            }
        }
    }

    fn wait(&self) -> Option<Event> {
        let mut status = 0;
        // SAFETY: writes one int; __WALL includes threads, WNOHANG never waits.
        let waited = unsafe { libc::waitpid(self.tid, &mut status, libc::WNOHANG | libc::__WALL) };
        if waited == 0 {
            return None;
        }
        if waited < 0 {
            let interrupted = io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
            return if interrupted {
                None
            } else {
                Some(Event::Ended)
            };
        }
        if libc::WIFSTOPPED(status) {
            let signal = libc::WSTOPSIG(status);
            return Some(Event::Stopped {
                signal,
                event: status >> 16 == EVENT_STOP,
            });
        }
        Some(Event::Ended)
    }
}

enum Event {
    Stopped { signal: i32, event: bool },
    Ended,
}
