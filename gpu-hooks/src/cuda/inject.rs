//! System calls made by a stopped thread of another process, for its tracer.
//!
//! The thread is set onto a `syscall` instruction that its process has anyway (in the vDSO), runs from
//! one syscall stop to the next, and gets its registers and signal mask back; it never runs anything
//! else. The last stop is an interrupt's, in which a system call that the stop had cut short is
//! restarted by the kernel as if nothing had been.
//!
//! Everything here must be called on the thread that traces.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

const GETSIGMASK: libc::c_uint = 0x420a;
const SETSIGMASK: libc::c_uint = 0x420b;
const GET_SYSCALL_INFO: libc::c_uint = 0x420e;
/// A syscall stop's signal has this bit.
pub const O_TRACESYSGOOD: libc::c_ulong = 1;
/// No seccomp filter while the option is set.
pub const O_SUSPEND_SECCOMP: libc::c_ulong = 1 << 21;
/// The event of a stop that `PTRACE_INTERRUPT` asked for.
pub const EVENT_STOP: i32 = 128;
/// The signal of a syscall stop.
pub const SYSCALL_STOP: i32 = libc::SIGTRAP | 0x80;
const MASK_SIZE: libc::c_ulong = size_of::<u64>() as libc::c_ulong;
/// Every signal but SIGTRAP.
pub const ALL_BUT_TRAP: u64 = !(1 << (libc::SIGTRAP - 1));
const AUDIT_ARCH_X86_64: u32 = 0xc000_003e;

/// How long a thread may take from one stop to the next.
const STOP_LIMIT: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_micros(20);
/// Below the stack pointer: what the ABI lets a function use without saying so.
const RED_ZONE: u64 = 128;
/// Room on the stack for a message with one descriptor.
const SCRATCH: usize = 256;

/// One ptrace request.
///
/// # Errors
/// What the system says.
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

/// The thread's signal mask.
///
/// # Errors
/// What the system says.
pub fn signal_mask(tid: i32) -> io::Result<u64> {
    let mut mask = 0u64;
    ptrace(GETSIGMASK, tid, MASK_SIZE, (&raw mut mask) as libc::c_ulong)?;
    Ok(mask)
}

/// Sets the thread's signal mask.
///
/// # Errors
/// What the system says.
pub fn set_signal_mask(tid: i32, mask: u64) -> io::Result<()> {
    ptrace(
        SETSIGMASK,
        tid,
        MASK_SIZE,
        (&raw const mask) as libc::c_ulong,
    )
}

/// What the kernel has to say of a traced thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// It is gone.
    Ended,
    /// It stands at the entry or the exit of a system call.
    Syscall,
    /// It has stopped as it was asked to, or with its group.
    Interrupted,
    /// A signal, or another event (0).
    Signal(i32),
}

/// The next event, if there is one. Never waits.
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

/// Waits for the next event.
fn wait_event(tid: i32) -> io::Result<Event> {
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

/// A system call that a thread is about to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    /// Its number.
    pub nr: u64,
    /// Its arguments.
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

/// At a syscall stop: the call, if it is the entry of a native one.
pub fn entered_call(tid: i32) -> Option<Call> {
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
    Some(Call {
        nr: info.words[0],
        args,
    })
}

/// Whether this program can make other processes' threads do system calls: on x86-64.
pub const SUPPORTED: bool = cfg!(target_arch = "x86_64");

#[cfg(target_arch = "x86_64")]
mod arch {
    use super::*;

    /// A thread's registers.
    pub type Registers = libc::user_regs_struct;

    pub const SYSCALL: [u8; 2] = [0x0f, 0x05];

    pub fn get(tid: i32) -> io::Result<Registers> {
        // SAFETY: all bits zero are a valid value of a structure of integers.
        let mut regs: Registers = unsafe { std::mem::zeroed() };
        ptrace(
            libc::PTRACE_GETREGS,
            tid,
            0,
            (&raw mut regs) as libc::c_ulong,
        )?;
        Ok(regs)
    }

    pub fn set(tid: i32, regs: &Registers) -> io::Result<()> {
        ptrace(
            libc::PTRACE_SETREGS,
            tid,
            0,
            std::ptr::from_ref(regs) as libc::c_ulong,
        )
    }

    /// At a syscall's entry: another call in its place.
    pub fn replace_call(regs: &mut Registers, nr: u64, args: [u64; 6]) {
        regs.orig_rax = nr;
        [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9] = args;
    }

    /// The thread will make the call when it runs on.
    pub fn prepare_call(regs: &mut Registers, site: u64, nr: u64, args: [u64; 6]) {
        replace_call(regs, nr, args);
        regs.rip = site;
        regs.rax = nr;
        regs.orig_rax = u64::MAX;
    }

    pub fn result(regs: &Registers) -> u64 {
        regs.rax
    }

    /// At a syscall's exit: as if the call had been this one, and returned that.
    pub fn pretend(regs: &mut Registers, call: &Call, result: u64) {
        replace_call(regs, u64::MAX, call.args);
        regs.rax = result;
    }

    /// At a syscall's exit: the thread makes this call now, from where it made that one.
    pub fn again(regs: &mut Registers, call: &Call) {
        let site = regs.rip - SYSCALL.len() as u64;
        prepare_call(regs, site, call.nr, call.args);
    }

    pub fn stack(regs: &Registers) -> u64 {
        regs.rsp
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod arch {
    use super::*;

    /// Not known for this machine.
    #[derive(Debug, Clone, Copy)]
    pub struct Registers;

    pub const SYSCALL: [u8; 2] = [0, 0];

    pub fn get(_tid: i32) -> io::Result<Registers> {
        Err(io::ErrorKind::Unsupported.into())
    }
    pub fn set(_tid: i32, _regs: &Registers) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }
    pub fn replace_call(_regs: &mut Registers, _nr: u64, _args: [u64; 6]) {}
    pub fn prepare_call(_regs: &mut Registers, _site: u64, _nr: u64, _args: [u64; 6]) {}
    pub fn result(_regs: &Registers) -> u64 {
        0
    }
    pub fn pretend(_regs: &mut Registers, _call: &Call, _result: u64) {}
    pub fn again(_regs: &mut Registers, _call: &Call) {}
    pub fn stack(_regs: &Registers) -> u64 {
        0
    }
}

/// At a syscall's entry: lets another call be made in its place and returns at its exit, with what it
/// returned.
///
/// # Errors
/// What the system says; the thread is stopped.
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
///
/// # Errors
/// What the system says.
pub fn make_again(tid: i32, call: &Call) -> io::Result<()> {
    let mut regs = arch::get(tid)?;
    arch::again(&mut regs, call);
    arch::set(tid, &regs)
}

/// A result of a system call, in which small negative numbers are errors.
fn check(result: u64) -> io::Result<u64> {
    match i32::try_from(result as i64) {
        Ok(error) if (-4095..0).contains(&error) => Err(io::Error::from_raw_os_error(-error)),
        _ => Ok(result),
    }
}

/// A stopped thread that makes system calls for its tracer.
pub struct Injection {
    pid: i32,
    tid: i32,
    site: u64,
    regs: arch::Registers,
    mask: u64,
    options: libc::c_ulong,
    memory: File,
}

impl Injection {
    /// Begins with a thread that is stopped, and not at a syscall's entry. `options` are the tracer's
    /// own, set again at the end.
    ///
    /// # Errors
    /// What the system says; the thread is as it was.
    pub fn begin(pid: i32, tid: i32, options: libc::c_ulong) -> io::Result<Self> {
        if !SUPPORTED {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let memory = File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))?;
        let site = find_site(pid, &memory)?;
        let regs = arch::get(tid)?;
        let mask = signal_mask(tid)?;
        let injection = Self {
            pid,
            tid,
            site,
            regs,
            mask,
            options,
            memory,
        };
        set_signal_mask(tid, ALL_BUT_TRAP)?;
        let free = O_TRACESYSGOOD | O_SUSPEND_SECCOMP;
        // Without the privilege to suspend it, the filter may still let the calls pass.
        let set = |options| ptrace(libc::PTRACE_SETOPTIONS, tid, 0, options);
        if let Err(error) = set(free).or_else(|_| set(O_TRACESYSGOOD)) {
            let _ = set_signal_mask(tid, mask);
            return Err(error);
        }
        Ok(injection)
    }

    /// One system call.
    ///
    /// # Errors
    /// The call's own, or what keeps it from being made.
    pub fn call(&mut self, nr: libc::c_long, args: [u64; 6]) -> io::Result<u64> {
        let mut regs = self.regs;
        arch::prepare_call(&mut regs, self.site, nr as u64, args);
        arch::set(self.tid, &regs)?;
        for _ in 0..2 {
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
        }
        check(arch::result(&arch::get(self.tid)?))
    }

    /// The thread as it was at the beginning.
    ///
    /// # Errors
    /// What the system says.
    pub fn end(self) -> io::Result<()> {
        let regs = self.regs;
        self.end_with(&regs)
    }

    /// Begun at a syscall's exit: the thread as if it had made that call, with that result.
    ///
    /// # Errors
    /// What the system says.
    pub fn end_as(self, call: &Call, result: u64) -> io::Result<()> {
        let mut regs = self.regs;
        arch::pretend(&mut regs, call, result);
        self.end_with(&regs)
    }

    /// Begun at a syscall's exit: the thread makes that call next, by itself.
    ///
    /// # Errors
    /// What the system says.
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
                // Any stop clears the interrupt that is under way.
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

    /// `munmap`.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub fn unmap(&mut self, address: u64, bytes: u64) -> io::Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        self.call(libc::SYS_munmap, [address, bytes, 0, 0, 0, 0])
            .map(drop)
    }

    /// An empty mapping in place of whatever is there: CRIU has nothing to dump for it.
    ///
    /// # Errors
    /// As [`Self::call`].
    pub fn map_empty(&mut self, address: u64, bytes: u64) -> io::Result<()> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        self.map_at(address, bytes, libc::PROT_NONE, flags, -1)
    }

    /// Private memory in place of whatever is there.
    ///
    /// # Errors
    /// As [`Self::call`].
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

    /// A file of ours, shared, in place of whatever is there.
    ///
    /// # Errors
    /// As [`Self::call`]; what was there may be gone.
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

    /// Gives the process a descriptor of ours: over a socket of its own, of which we take one end.
    fn give(&mut self, file: &File) -> io::Result<RawFd> {
        let at = (arch::stack(&self.regs) - RED_ZONE - SCRATCH as u64) & !63;
        let mut saved = [0u8; SCRATCH];
        self.memory.read_exact_at(&mut saved, at)?;
        let given = self.give_at(file, at);
        let back = self.memory.write_all_at(&saved, at);
        given.and_then(|fd| back.map(|()| fd))
    }

    fn give_at(&mut self, file: &File, at: u64) -> io::Result<RawFd> {
        let kind = (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as u64;
        self.call(
            libc::SYS_socketpair,
            [libc::AF_UNIX as u64, kind, 0, at, 0, 0],
        )?;
        let mut pair = [0u8; 8];
        self.memory.read_exact_at(&mut pair, at)?;
        let ours = RawFd::from_ne_bytes([pair[0], pair[1], pair[2], pair[3]]);
        let theirs = RawFd::from_ne_bytes([pair[4], pair[5], pair[6], pair[7]]);
        let received = self.receive(file, at, ours, theirs);
        let closed = self.close(ours).and(self.close(theirs));
        received.and_then(|fd| closed.map(|()| fd))
    }

    fn receive(&mut self, file: &File, at: u64, ours: RawFd, theirs: RawFd) -> io::Result<RawFd> {
        send_descriptor(&take_descriptor(self.pid, ours)?, file)?;
        // A msghdr, an iovec, one byte, and room for one descriptor's control message.
        let (vector, byte, control) = (at + 64, at + 80, at + 96);
        let words: [u64; 10] = [0, 0, vector, 1, control, 24, 0, 0, byte, 1];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.memory.write_all_at(&bytes, at)?;
        self.memory.write_all_at(&[0; 24], control)?;
        let flags = (libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) as u64;
        self.call(libc::SYS_recvmsg, [theirs as u64, at, flags, 0, 0, 0])?;
        let mut message = [0u8; 24];
        self.memory.read_exact_at(&mut message, control)?;
        let word = |i: usize| {
            i32::from_ne_bytes([message[i], message[i + 1], message[i + 2], message[i + 3]])
        };
        if word(8) != libc::SOL_SOCKET || word(12) != libc::SCM_RIGHTS || word(16) < 0 {
            return Err(io::Error::other("the process did not get the descriptor"));
        }
        Ok(word(16))
    }
}

/// Where in the process a `syscall` instruction is: in the vDSO, else in any other code.
fn find_site(pid: i32, memory: &File) -> io::Result<u64> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let executable = |line: &&str| {
        line.split_whitespace()
            .nth(1)
            .is_some_and(|p| p.contains('x'))
    };
    let (vdso, rest): (Vec<&str>, Vec<&str>) = maps
        .lines()
        .filter(executable)
        .filter(|line| !line.ends_with("[vsyscall]"))
        .partition(|line| line.ends_with("[vdso]"));
    let mut bytes = vec![0; 4 << 20];
    for line in vdso.iter().chain(&rest) {
        let range = line
            .split(' ')
            .next()
            .and_then(|range| range.split_once('-'));
        let number = |text| u64::from_str_radix(text, 16).ok();
        let Some((Some(start), Some(end))) = range.map(|(a, b)| (number(a), number(b))) else {
            continue;
        };
        let len = usize::try_from(end - start)
            .unwrap_or(usize::MAX)
            .min(bytes.len());
        let Ok(read) = memory.read_at(&mut bytes[..len], start) else {
            continue;
        };
        if let Some(at) = bytes[..read]
            .windows(2)
            .position(|two| two == arch::SYSCALL)
        {
            return Ok(start + at as u64);
        }
    }
    Err(io::Error::other(
        "the process has no code that makes a system call",
    ))
}

/// A descriptor of another process, as one of ours.
fn take_descriptor(pid: i32, fd: RawFd) -> io::Result<OwnedFd> {
    let new = |fd: libc::c_long| match RawFd::try_from(fd) {
        // SAFETY: a descriptor that was just made and belongs to nobody else.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: takes numbers, returns a new descriptor or -1.
    let process = new(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })?;
    // SAFETY: as above.
    new(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) })
}

/// Sends one byte and a descriptor.
fn send_descriptor(socket: &OwnedFd, file: &File) -> io::Result<()> {
    let mut byte = [0u8; 1];
    let mut vector = libc::iovec {
        iov_base: byte.as_mut_ptr().cast(),
        iov_len: 1,
    };
    // Aligned as a control message must be.
    let mut control = [0u64; 3];
    // SAFETY: all bits zero are a valid msghdr.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &mut vector;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the control buffer is large enough for one header and one descriptor, and aligned; all
    // pointers in the message live during the call.
    let sent = unsafe {
        let header = libc::CMSG_FIRSTHDR(&message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<RawFd>() as u32) as usize;
        std::ptr::write_unaligned(libc::CMSG_DATA(header).cast::<RawFd>(), file.as_raw_fd());
        libc::sendmsg(
            socket.as_raw_fd(),
            &message,
            libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
        )
    };
    if sent == 1 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// Stops a thread that nobody traces, for as long as this lives. Used when CRIU is gone.
pub struct Seized {
    tid: i32,
}

impl Seized {
    /// Seizes and stops it.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(tid: i32) -> io::Result<Self> {
        ptrace(libc::PTRACE_SEIZE, tid, 0, O_TRACESYSGOOD)?;
        let seized = Self { tid };
        ptrace(libc::PTRACE_INTERRUPT, tid, 0, 0)?;
        loop {
            match wait_event(tid)? {
                Event::Interrupted => return Ok(seized),
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
}

impl Drop for Seized {
    fn drop(&mut self) {
        let _ = ptrace(libc::PTRACE_DETACH, self.tid, 0, 0);
    }
}

#[cfg(test)]
#[path = "inject_tests.rs"]
mod tests;
