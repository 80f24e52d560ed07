//! Lets a stopped thread run that this thread traces, and stops it again.
//!
//! A thread of each process does the driver's work there. At a dump CRIU has stopped it with all the others, and is its
//! tracer. ptrace takes calls from the tracing thread alone, so everything here runs on CRIU's main thread. While the
//! thread runs, it gets no signal (its mask is saved and put back) and its seccomp filter is in force again.
//!
//! A thread can also be watched: it then stops at each system call. It is held where the driver asks for the memory
//! into which it will copy the GPU's.

use crate::inject::{
    ALL_BUT_TRAP, Call, Event, Injection, O_SUSPEND_SECCOMP, O_TRACESYSGOOD, entered_call,
    make_again, poll_event, ptrace, replace_entered, set_signal_mask, signal_mask,
};
use crate::procfs;
use crate::vram::memory::HUGE;
use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

const STOP_LIMIT: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_micros(200);
/// How long to wait for the next system call of a watched thread.
const NEXT_CALL: Duration = Duration::from_micros(100);
const PAGE: u64 = 4096;

#[derive(Debug)]
pub struct Released {
    pid: i32,
    tid: i32,
    mask: u64,
    ended: bool,
    killed: bool,
    /// The signal of a fault that has ended its process.
    fault: Option<i32>,
    /// Smallest size of mapping to hold at.
    watched: Option<u64>,
    /// Stopped at the entry of this call.
    held: Option<Call>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    Quiet,
    Busy,
    /// It is held where it asks for this much memory: call [`Released::pass`] or [`Released::substitute`].
    Asks(u64),
}

/// Returns true if the thread is stopped and this process is its tracer.
pub fn is_ours(tid: i32) -> bool {
    procfs::status(tid).is_ok_and(|status| status.tracer != 0 && Some(status.tracer) == own_pid())
        && procfs::stat(tid).is_some_and(|stat| stat.state == 't')
}

/// This process, as `/proc` numbers it.
pub fn own_pid() -> Option<i32> {
    let link = std::fs::read_link("/proc/self").ok()?;
    link.to_str()?.parse().ok()
}

fn criu_options(tid: i32) -> io::Result<libc::c_ulong> {
    let filtered = procfs::status(tid)?.seccomp != 0;
    Ok(O_TRACESYSGOOD | if filtered { O_SUSPEND_SECCOMP } else { 0 })
}

/// Begins system calls in a thread that CRIU has stopped. On error the thread is as it was.
pub fn inject(pid: i32, tid: i32) -> io::Result<Injection> {
    Injection::begin(pid, tid, criu_options(tid)?)
}

/// Returns the size if a call is the driver's for memory: anonymous, private, and all of it at once.
fn asked_memory(call: &Call) -> Option<u64> {
    let [address, bytes, prot, flags, fd, _] = call.args;
    let number = |value: i32| value as u64;
    let wanted = number(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE);
    let is = call.nr == libc::SYS_mmap as u64
        && address == 0
        && prot == number(libc::PROT_READ | libc::PROT_WRITE)
        && flags & !number(libc::MAP_NORESERVE) == wanted
        && fd as i32 == -1
        && bytes < 1 << 47;
    is.then(|| bytes.next_multiple_of(PAGE))
}

/// Returns true for the signals of a fault. They cannot be blocked, so that a fault ends its process. But the kernel does
/// not let it end the traced init process of a container: the thread would fault for ever.
fn is_fault(signal: i32) -> bool {
    matches!(
        signal,
        libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE
    )
}

impl Released {
    /// Lets the thread run; `watched` is the least size of a mapping at which it is to be held.
    pub fn new(pid: i32, tid: i32, watched: Option<u64>) -> io::Result<Self> {
        let mask = signal_mask(tid)?;
        let released = Self {
            pid,
            tid,
            mask,
            ended: false,
            killed: false,
            fault: None,
            watched,
            held: None,
        };
        let run = || {
            set_signal_mask(tid, ALL_BUT_TRAP)?;
            ptrace(libc::PTRACE_SETOPTIONS, tid, 0, released.options())?;
            released.resume(0)
        };
        if let Err(error) = run() {
            // Still stopped: as it was.
            let _ = released.put_back();
            return Err(error);
        }
        Ok(released)
    }

    fn options(&self) -> libc::c_ulong {
        if self.watched.is_some() {
            O_TRACESYSGOOD
        } else {
            0
        }
    }

    fn resume(&self, signal: i32) -> io::Result<()> {
        let how = if self.watched.is_some() {
            libc::PTRACE_SYSCALL
        } else {
            libc::PTRACE_CONT
        };
        ptrace(how, self.tid, 0, signal as libc::c_ulong)
    }

    fn put_back(&self) -> io::Result<()> {
        let options = criu_options(self.tid)?;
        ptrace(libc::PTRACE_SETOPTIONS, self.tid, 0, options)?;
        set_signal_mask(self.tid, self.mask)
    }

    pub fn ids(&self) -> (i32, i32) {
        (self.pid, self.tid)
    }

    /// Kills its process, which then need not be stopped again.
    pub fn kill(&mut self) {
        self.killed = true;
        // SAFETY: a signal to a process that this one traces, so that its pid is not reused.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
    }

    /// The signal of a fault (SIGSEGV, SIGBUS) that has ended the process.
    pub fn fault(&self) -> Option<i32> {
        self.fault
    }

    pub fn is_watched(&self) -> bool {
        self.watched.is_some()
    }

    /// Handles the thread's stops: continues each, except the one that is waited for.
    pub fn attend(&mut self) -> Attention {
        let mut last: Option<Instant> = None;
        while !self.ended && self.held.is_none() {
            let signal = match poll_event(self.tid) {
                None if last.is_some_and(|last| last.elapsed() < NEXT_CALL) => {
                    std::thread::yield_now();
                    continue;
                }
                None => break,
                Some(Event::Ended) => {
                    self.ended = true;
                    break;
                }
                Some(Event::Syscall) => {
                    last = Some(Instant::now());
                    let call = self.watched.and_then(|_| entered_call(self.tid));
                    let asked = call.as_ref().and_then(asked_memory);
                    if let (Some(bytes), Some(least)) = (asked, self.watched)
                        && bytes >= least
                    {
                        self.held = call;
                        return Attention::Asks(bytes);
                    }
                    0
                }
                Some(Event::Interrupted) => 0,
                Some(Event::Signal(signal)) if is_fault(signal) => {
                    self.fault = Some(signal);
                    self.kill();
                    self.ended = true;
                    return Attention::Busy;
                }
                Some(Event::Signal(signal)) => signal,
            };
            if self.resume(signal).is_err() {
                self.ended = procfs::stat(self.tid).is_none_or(|stat| stat.exiting);
                break;
            }
        }
        match last {
            Some(_) => Attention::Busy,
            None => Attention::Quiet,
        }
    }

    /// Lets the held call be made as it is, and holds no other.
    pub fn pass(&mut self) {
        if self.held.take().is_some() {
            self.watched = Some(u64::MAX);
            if self.resume(0).is_err() {
                self.ended = procfs::stat(self.tid).is_none_or(|stat| stat.exiting);
            }
        }
    }

    /// Answers the held call with this file's memory, at an address aligned to hugepages, and returns the address. On
    /// an error the call is made unchanged, and no other is held.
    pub fn substitute(&mut self, file: &File, bytes: u64) -> io::Result<u64> {
        let Some(call) = self.held else {
            return Err(io::Error::other("no call is held"));
        };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let room = bytes + HUGE;
        // It can be used as it is, should this program be killed before the file's memory is there.
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let args = [0, room, prot as u64, flags as u64, u64::MAX, 0];
        let area = replace_entered(self.tid, libc::SYS_mmap, args);
        // From here on the thread stands at the call's exit.
        self.held = None;
        let mut inject = match Injection::begin(self.pid, self.tid, self.options()) {
            Ok(inject) => inject,
            Err(error) => {
                self.watched = Some(u64::MAX);
                make_again(self.tid, &call)?;
                self.resume(0)?;
                return Err(error);
            }
        };
        let mapped = area.and_then(|area| {
            let at = area.next_multiple_of(HUGE);
            inject.promise(&call, Some(at));
            let mut map = || {
                inject.unmap(area, at - area)?;
                inject.unmap(at + bytes, area + room - at - bytes)?;
                inject.map_file(at, bytes, file)
            };
            let mapped = map();
            if mapped.is_err() {
                inject.promise(&call, None);
                inject.unmap(area, room)?;
            }
            mapped.map(|()| at)
        });
        match &mapped {
            Ok(at) => inject.end_as(&call, *at)?,
            Err(_) => {
                self.watched = Some(u64::MAX);
                inject.end_before(&call)?;
            }
        }
        self.resume(0)?;
        mapped
    }

    /// Stops the thread again, with its options and signal mask as CRIU left them.
    pub fn stop(mut self) -> io::Result<()> {
        self.pass();
        self.attend();
        if self.killed {
            return Ok(());
        }
        if self.ended {
            return Err(io::Error::other(format!("thread {} ended", self.tid)));
        }
        let interrupt = || ptrace(libc::PTRACE_INTERRUPT, self.tid, 0, 0);
        interrupt()?;
        let deadline = Instant::now() + STOP_LIMIT;
        loop {
            match poll_event(self.tid) {
                Some(Event::Ended) => {
                    return Err(io::Error::other(format!("thread {} ended", self.tid)));
                }
                Some(Event::Interrupted) => return self.put_back(),
                // Any stop clears the pending interrupt.
                Some(Event::Syscall) => {
                    interrupt()?;
                    ptrace(libc::PTRACE_CONT, self.tid, 0, 0)?;
                }
                Some(Event::Signal(signal)) => {
                    interrupt()?;
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_drivers_mapping_is_meant() {
        let flags = |flags: i32| Call {
            nr: libc::SYS_mmap as u64,
            args: [0, (128 << 20) + 16, 3, flags as u64, u64::MAX, 0],
        };
        let driver = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        let call = flags(driver);
        assert_eq!(asked_memory(&call), Some((128 << 20) + 4096));
        // A 32-bit -1.
        let mut short = call;
        short.args[4] = u64::from(u32::MAX);
        assert!(asked_memory(&short).is_some());
        for other in [
            driver & !libc::MAP_POPULATE,
            driver | libc::MAP_FIXED,
            driver | libc::MAP_LOCKED,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
        ] {
            assert_eq!(asked_memory(&flags(other)), None, "{other:#x}");
        }
        for (i, value) in [(0, 4096), (1, u64::MAX), (2, 1), (4, 5)] {
            let mut other = call;
            other.args[i] = value;
            assert_eq!(asked_memory(&other), None, "{other:?}");
        }
        assert_eq!(asked_memory(&Call { nr: 0, ..call }), None);
    }
}
