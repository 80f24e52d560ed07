//! Wraps ptrace: stops, events, signal masks, and the system call that a thread is about to make.

use cryopod_host::limited::wait_until;
use std::io;
use std::time::{Duration, Instant};

const GETSIGMASK: libc::c_uint = 0x420a;
const SETSIGMASK: libc::c_uint = 0x420b;
const GET_SYSCALL_INFO: libc::c_uint = 0x420e;
/// Sets this bit in the signal of a syscall stop.
pub const O_TRACESYSGOOD: libc::c_ulong = 1;
/// `PTRACE_O_EXITKILL`: the thread's process dies with its tracer.
pub const O_EXITKILL: libc::c_ulong = 1 << 20;
/// Disables seccomp filters while the option is set.
pub const O_SUSPEND_SECCOMP: libc::c_ulong = 1 << 21;
/// The event of a stop that `PTRACE_INTERRUPT` asked for.
pub const EVENT_STOP: i32 = 128;
pub const SYSCALL_STOP: i32 = libc::SIGTRAP | 0x80;
const MASK_SIZE: libc::c_ulong = size_of::<u64>() as libc::c_ulong;
pub const ALL_BUT_TRAP: u64 = !(1 << (libc::SIGTRAP - 1));
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;

/// How long a thread may take from one stop to the next.
const STOP_LIMIT: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_micros(20);
pub fn ptrace(
    request: libc::c_uint,
    tid: i32,
    addr: libc::c_ulong,
    data: libc::c_ulong,
) -> io::Result<()> {
    // SAFETY: every request used here takes numbers, or the address of a value that outlives the call.
    match unsafe { libc::ptrace(request, tid, addr, data) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

pub fn signal_mask(tid: i32) -> io::Result<u64> {
    let mut mask = 0u64;
    ptrace(GETSIGMASK, tid, MASK_SIZE, (&raw mut mask) as libc::c_ulong)?;
    Ok(mask)
}

pub fn set_signal_mask(tid: i32, mask: u64) -> io::Result<()> {
    ptrace(
        SETSIGMASK,
        tid,
        MASK_SIZE,
        (&raw const mask) as libc::c_ulong,
    )
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    Ended,
    /// It stopped at the entry or the exit of a system call.
    Syscall,
    /// It has stopped as requested, or with its group.
    Interrupted,
    /// A signal, or another event (0).
    Signal(i32),
}

/// Returns the next event, if there is one. Never waits.
pub fn poll_event(tid: i32) -> Option<Event> {
    let mut status = 0;
    // SAFETY: writes one int; __WALL includes threads, WNOHANG never waits.
    let waited = unsafe { libc::waitpid(tid, &mut status, libc::WNOHANG | libc::__WALL) };
    if waited == 0 {
        return None;
    }
    if waited < 0 {
        let interrupted = io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
        return (!interrupted).then_some(Event::Ended);
    }
    if !libc::WIFSTOPPED(status) {
        return Some(Event::Ended);
    }
    Some(match (libc::WSTOPSIG(status), status >> 16) {
        (SYSCALL_STOP, _) => Event::Syscall,
        (_, EVENT_STOP) => Event::Interrupted,
        (signal, 0) => Event::Signal(signal),
        _ => Event::Signal(0),
    })
}

pub(super) fn wait_event(tid: i32) -> io::Result<Event> {
    let deadline = Instant::now() + STOP_LIMIT;
    let mut spins = 0u32;
    loop {
        match poll_event(tid) {
            Some(Event::Ended) => return Err(io::Error::other(format!("thread {tid} ended"))),
            Some(event) => return Ok(event),
            None if Instant::now() >= deadline => {
                let what = format!("thread {tid} does not stop");
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            None if spins < 200 => {
                spins += 1;
                std::thread::yield_now();
            }
            None => std::thread::sleep(TICK),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    pub nr: u64,
    pub args: [u64; 6],
}

#[repr(C)]
#[derive(Default)]
struct SyscallInfo {
    op: u8,
    pad: [u8; 3],
    arch: u32,
    ip: u64,
    sp: u64,
    words: [u64; 8],
}

/// At a syscall stop: returns the call, if it is the entry of a native one.
pub fn entered_call(tid: i32) -> Option<Call> {
    entered_call_at(tid).map(|(call, _)| call)
}

/// The same, and the address where the thread goes on after it.
pub(super) fn entered_call_at(tid: i32) -> Option<(Call, u64)> {
    const ENTRY: u8 = 1;
    let mut info = SyscallInfo::default();
    let size = size_of::<SyscallInfo>() as libc::c_ulong;
    ptrace(
        GET_SYSCALL_INFO,
        tid,
        size,
        (&raw mut info) as libc::c_ulong,
    )
    .ok()?;
    if info.op != ENTRY || info.arch != AUDIT_ARCH_X86_64 {
        return None;
    }
    let mut args = [0; 6];
    args.copy_from_slice(&info.words[1..7]);
    let nr = info.words[0];
    Some((Call { nr, args }, info.ip))
}

/// Stops a thread that nobody traces, for as long as this lives. Used when CRIU is gone.
pub struct Seized {
    tid: i32,
}

impl Seized {
    pub fn new(tid: i32) -> io::Result<Self> {
        ptrace(libc::PTRACE_SEIZE, tid, 0, O_TRACESYSGOOD)?;
        let seized = Self { tid };
        ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0)?;
        interrupted(tid)?;
        Ok(seized)
    }
}

/// Waits for the stop that `PTRACE_INTERRUPT` asked for.
pub(super) fn interrupted(tid: i32) -> io::Result<()> {
    loop {
        match wait_event(tid)? {
            Event::Interrupted => return Ok(()),
            Event::Signal(signal) => {
                ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0)?;
                ptrace(libc::PTRACE_CONT, tid, 0, signal as libc::c_ulong)?;
            }
            Event::Syscall => {
                ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0)?;
                ptrace(libc::PTRACE_CONT, tid, 0, 0)?;
            }
            Event::Ended => return Err(io::Error::other(format!("thread {tid} ended"))),
        }
    }
}

/// Waits for the end of threads that are about to end, in any order: the last thread of a PID namespace's init process
/// waits in the kernel until its tracer has learned of the others' end.
pub(super) fn ended(mut tids: Vec<i32>) -> io::Result<()> {
    wait_until(STOP_LIMIT, TICK, || {
        tids.retain(|tid| poll_event(*tid) != Some(Event::Ended));
        tids.is_empty()
    });
    tids.first().map_or(Ok(()), |tid| {
        let what = format!("thread {tid} does not end");
        Err(io::Error::new(io::ErrorKind::TimedOut, what))
    })
}

impl Drop for Seized {
    fn drop(&mut self) {
        let _ = ptrace(libc::PTRACE_DETACH, self.tid, 0, 0);
    }
}
