//! Makes system calls in a stopped thread of another process, for its tracer.
//!
//! The thread is set onto a `syscall` instruction that its process has anyway (in the vDSO). It runs from one syscall
//! stop to the next, and gets its registers and signal mask back; it never runs anything else. The last stop is an
//! interrupt's: there the kernel restarts a system call that the stop had cut short as if nothing had been. If its tracer
//! dies in between, the thread returns from that instruction into a signal's return, which does the same ([`frame`]).
//!
//! Everything here must be called on the thread that traces.

#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
#[cfg_attr(not(target_arch = "x86_64"), path = "other.rs")]
mod arch;
mod code;
mod frame;
mod give;
mod trace;

pub use give::{Descriptor, take_descriptor};
pub use trace::{
    ALL_BUT_TRAP, Call, EVENT_STOP, Event, O_EXITKILL, O_SUSPEND_SECCOMP, O_TRACESYSGOOD,
    SYSCALL_STOP, Seized, entered_call, poll_event, ptrace, set_signal_mask, signal_mask,
};

use code::Code;
use frame::Frame;
use std::fs::File;
use std::io;
use std::os::fd::RawFd;
use trace::{entered_call_at, wait_event};

/// True on x86-64: this program can make other processes' threads do system calls.
pub const SUPPORTED: bool = cfg!(target_arch = "x86_64");

/// At a syscall's entry: makes another call in its place. Returns the result at its exit, where the thread is stopped.
pub fn replace_entered(tid: i32, nr: libc::c_long, args: [u64; 6]) -> io::Result<u64> {
    let mut regs = arch::get(tid)?;
    arch::replace_call(&mut regs, nr as u64, args);
    arch::set(tid, &regs)?;
    ptrace(libc::PTRACE_SYSCALL, tid, 0, 0)?;
    match wait_event(tid)? {
        Event::Syscall => check(arch::result(&arch::get(tid)?)),
        event => Err(io::Error::other(format!(
            "thread {tid}: unexpected {event:?}"
        ))),
    }
}

/// At a syscall's exit: the thread makes this call next, by itself.
pub fn make_again(tid: i32, call: &Call) -> io::Result<()> {
    let mut regs = arch::get(tid)?;
    arch::again(&mut regs, call);
    arch::set(tid, &regs)
}

/// Has a process that nobody traces end by exit_group(2). It runs no other instruction, also if this process is killed meanwhile:
/// then the kernel kills it. Its cgroup may be frozen until `thaw`.
///
/// # Errors
/// The process has not ended. Threads of it are stopped until this process ends.
pub fn exit(pid: i32, code: i32, thaw: impl FnOnce()) -> io::Result<()> {
    let mut tids = Vec::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let name = thread?.file_name();
        tids.extend(name.to_str().and_then(|tid| tid.parse::<i32>().ok()));
    }
    for tid in &tids {
        ptrace(libc::PTRACE_SEIZE, *tid, 0, O_TRACESYSGOOD | O_EXITKILL)?;
        ptrace(libc::PTRACE_INTERRUPT, *tid, 0, 0)?;
    }
    thaw();
    for tid in &tids {
        trace::interrupted(*tid)?;
    }
    let injection = Injection::begin(pid, pid, O_EXITKILL)?;
    let code = u64::from(code.unsigned_abs());
    injection.enter(libc::SYS_exit_group, [code, 0, 0, 0, 0, 0])?;
    ptrace(libc::PTRACE_CONT, pid, 0, 0)?;
    trace::ended(tids)
}

/// Converts a system call's result, in which small negative numbers are errors.
fn check(result: u64) -> io::Result<u64> {
    match i32::try_from(result as i64) {
        Ok(error) if (-4095..0).contains(&error) => Err(io::Error::from_raw_os_error(-error)),
        _ => Ok(result),
    }
}

pub struct Injection {
    pid: i32,
    tid: i32,
    site: u64,
    regs: arch::Registers,
    mask: u64,
    options: libc::c_ulong,
    memory: File,
    /// What the thread stands on meanwhile, where there is room for it.
    frame: Option<Frame>,
}

impl Injection {
    /// Begins with a thread that is stopped, and not at a syscall's entry. `options` are the tracer's own, set again at
    /// the end. On error the thread is as it was.
    pub fn begin(pid: i32, tid: i32, options: libc::c_ulong) -> io::Result<Self> {
        if !SUPPORTED {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))?;
        let regs = arch::get(tid)?;
        let mask = signal_mask(tid)?;
        let code = Code::find(pid, &memory, &regs)?;
        let frame = Frame::new(tid, &code, &regs);
        let injection = Self {
            pid,
            tid,
            site: code.call,
            regs,
            mask,
            options,
            memory,
            frame,
        };
        injection.if_abandoned(&regs);
        set_signal_mask(tid, ALL_BUT_TRAP)?;
        if let Err(error) = injection.set_options(O_TRACESYSGOOD) {
            let _ = set_signal_mask(tid, mask);
            return Err(error);
        }
        Ok(injection)
    }

    /// Makes one system call.
    ///
    /// Other threads of the process may run and change its code. So this checks the thread where it enters the kernel:
    /// it must make this call, with these arguments, from where it was set to. Only from there to the call's exit is
    /// its seccomp filter off.
    ///
    /// # Errors
    /// The call's own, or what keeps it from being made: no other call is made in its place.
    pub fn call(&mut self, nr: libc::c_long, args: [u64; 6]) -> io::Result<u64> {
        let suspended = self.enter(nr, args)?;
        let stopped = self.next_stop();
        if suspended && stopped.is_ok() {
            self.set_options(O_TRACESYSGOOD)?;
        }
        stopped?;
        check(arch::result(&arch::get(self.tid)?))
    }

    /// Has the thread enter a system call. Returns true if its seccomp filter is off.
    fn enter(&self, nr: libc::c_long, args: [u64; 6]) -> io::Result<bool> {
        let mut regs = self.regs;
        if let Some(frame) = &self.frame {
            arch::set_stack(&mut regs, frame.address());
        }
        arch::prepare_call(&mut regs, self.site, nr as u64, args);
        arch::set(self.tid, &regs)?;
        self.next_stop()?;
        let entered = entered_call_at(self.tid);
        let wanted = Call {
            nr: nr as u64,
            args,
        };
        if entered != Some((wanted, arch::after(self.site))) {
            // No call at all, with the filter in force.
            let mut regs = arch::get(self.tid)?;
            arch::skip_call(&mut regs);
            arch::set(self.tid, &regs)?;
            self.next_stop()?;
            return Err(io::Error::other(format!(
                "thread {}: makes another system call than it was set to; something in its process changes its code",
                self.tid
            )));
        }
        // Without the privilege to suspend the filter, the filter may still let the call pass.
        Ok(self.set_options(O_TRACESYSGOOD | O_SUSPEND_SECCOMP).is_ok())
    }

    fn set_options(&self, options: libc::c_ulong) -> io::Result<()> {
        let options = options | self.options & O_EXITKILL;
        ptrace(libc::PTRACE_SETOPTIONS, self.tid, 0, options)
    }

    /// Lets the thread run to its next stop at a system call.
    fn next_stop(&self) -> io::Result<()> {
        ptrace(libc::PTRACE_SYSCALL, self.tid, 0, 0)?;
        // An interrupt or a group stop may come in between, nothing else.
        let mut event = wait_event(self.tid)?;
        for _ in 0..8 {
            if event != Event::Interrupted {
                break;
            }
            ptrace(libc::PTRACE_SYSCALL, self.tid, 0, 0)?;
            event = wait_event(self.tid)?;
        }
        if event != Event::Syscall {
            let what = format!("thread {}: unexpected {event:?}", self.tid);
            return Err(io::Error::other(what));
        }
        Ok(())
    }

    /// If begun at a syscall's exit: should its tracer die, the thread goes on as if it had made that call with that result,
    /// or, without one, makes it.
    pub fn promise(&self, call: &Call, result: Option<u64>) {
        let mut regs = self.regs;
        match result {
            Some(result) => arch::pretend(&mut regs, call, result),
            None => arch::again(&mut regs, call),
        }
        self.if_abandoned(&regs);
    }

    fn if_abandoned(&self, regs: &arch::Registers) {
        if let Some(frame) = &self.frame
            && let Err(error) = frame.write(&self.memory, regs, self.mask)
        {
            tracing::debug!(tid = self.tid, "nothing restores it if this ends: {error}");
        }
    }

    /// Puts the thread back as it was at the beginning.
    pub fn end(self) -> io::Result<()> {
        let regs = self.regs;
        self.end_with(&regs)
    }

    /// If begun at a syscall's exit: ends as if the thread had made that call, with that result.
    pub fn end_as(self, call: &Call, result: u64) -> io::Result<()> {
        let mut regs = self.regs;
        arch::pretend(&mut regs, call, result);
        self.end_with(&regs)
    }

    /// If begun at a syscall's exit: ends so that the thread makes that call next, by itself.
    pub fn end_before(self, call: &Call) -> io::Result<()> {
        let mut regs = self.regs;
        arch::again(&mut regs, call);
        self.end_with(&regs)
    }

    fn end_with(self, regs: &arch::Registers) -> io::Result<()> {
        let tid = self.tid;
        ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0)?;
        ptrace(libc::PTRACE_CONT, tid, 0, 0)?;
        loop {
            match wait_event(tid)? {
                Event::Interrupted => break,
                // Any stop clears the pending interrupt.
                Event::Syscall => {
                    ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0)?;
                    ptrace(libc::PTRACE_CONT, tid, 0, 0)?;
                }
                Event::Signal(signal) => {
                    ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0)?;
                    ptrace(libc::PTRACE_CONT, tid, 0, signal as libc::c_ulong)?;
                }
                Event::Ended => return Err(io::Error::other(format!("thread {tid} ended"))),
            }
        }
        arch::set(tid, regs)?;
        set_signal_mask(tid, self.mask)?;
        ptrace(libc::PTRACE_SETOPTIONS, tid, 0, self.options)
    }

    pub fn unmap(&mut self, address: u64, bytes: u64) -> io::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.call(libc::SYS_munmap, [address, bytes, 0, 0, 0, 0])
            .map(drop)
    }

    /// Puts an empty mapping in place of whatever is there: CRIU has nothing to dump for it.
    pub fn map_empty(&mut self, address: u64, bytes: u64) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        self.map_at(address, bytes, libc::PROT_NONE, flags, -1)
    }

    /// Puts private memory in place of whatever is there.
    pub fn map_private(&mut self, address: u64, bytes: u64) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        self.map_at(
            address,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            -1,
        )
    }

    fn map_at(
        &mut self,
        address: u64,
        bytes: u64,
        prot: i32,
        flags: i32,
        fd: i64,
    ) -> io::Result<()> {
        let flags = (flags | libc::MAP_FIXED) as u64;
        let args = [address, bytes, prot as u64, flags, fd as u64, 0];
        match self.call(libc::SYS_mmap, args)? {
            at if at == address => Ok(()),
            at => Err(io::Error::other(format!(
                "mapped at {at:#x} in place of {address:#x}"
            ))),
        }
    }

    /// Maps a file of ours, shared, in place of whatever is there. After an error that may be gone.
    pub fn map_file(&mut self, address: u64, bytes: u64, file: &File) -> io::Result<()> {
        let fd = self.give(file)?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let mapped = self.map_at(address, bytes, prot, libc::MAP_SHARED, i64::from(fd));
        let closed = self.close(fd);
        mapped.and(closed)
    }

    fn close(&mut self, fd: RawFd) -> io::Result<()> {
        self.call(libc::SYS_close, [fd as u64, 0, 0, 0, 0, 0])
            .map(drop)
    }
}

#[cfg(test)]
#[path = "../inject_tests.rs"]
mod tests;
