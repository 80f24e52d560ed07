//! Runs code that decodes strangers' bytes where it can do little: a child process, or the rest of this one, without
//! capabilities and new privileges, with the files that it was given and no other way out.
//!
//! Two walls. A seccomp filter knows every system call that decoders make; the kernel refuses all others with EPERM:
//! no program, no process, no socket, no ptrace, no mount, no signal to another process, no namespace. Landlock bounds
//! the files, where the kernel has it (Linux 5.13 with `landlock` in `lsm=`); without it only the calls are bounded.
//!
//! The user stays the same, so that the child reads and writes what this process may. Root loses its capabilities,
//! those over files too, unless what the child is given is another user's, or closed to its owner.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::fs::{File, Metadata};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use landlock::{
    ABI, Access, AccessFs, AccessNet, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetError, Scope,
};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::{set_no_new_privs, set_pdeathsig};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};

/// The newest version of Landlock whose rights are named. The crate leaves out what the kernel lacks.
const LANDLOCK: ABI = ABI::V6;
/// The most bytes of a result.
const MAX_RESULT: u64 = 2 << 30;
/// How long a child may take to end once it has said all.
const GRACE: Duration = Duration::from_secs(2);
/// The first byte of a result.
const DONE: u8 = 0;
const FAILED: u8 = 1;

/// What a decoder is given beside its open descriptors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sandbox {
    /// Files and directories to read. One that does not exist is left out.
    pub read: Vec<PathBuf>,
    /// Directories to read, write and change.
    pub write: Vec<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The work's own error.
    #[error("{0}")]
    Failed(String),
    #[error("the process that decodes it {0}")]
    Ended(String),
    #[error("the process that decodes it cannot be confined: {0}")]
    Confine(io::Error),
}

impl Sandbox {
    /// Does the work in a child and returns its result.
    pub fn run<E: Display>(
        &self,
        limit: Duration,
        work: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, SandboxError> {
        self.start(work)?.finish(limit)
    }

    /// Starts the work in a child: a copy of this process with standard input, output and error, and no other
    /// descriptors. Those that the work has from here are closed, so it opens its files itself. The child dies with the
    /// thread that made it.
    ///
    /// The child has one thread. A lock that another thread of this process holds is never released in it, so start it
    /// before there are others, or let the work take no lock but the allocator's, which the C library releases.
    pub fn start<E: Display>(
        &self,
        work: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Worker, SandboxError> {
        self.start_with(&[], work)
    }

    /// [`Self::start`], with more descriptors.
    pub fn start_with<E: Display>(
        &self,
        keep: &[i32],
        work: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Worker, SandboxError> {
        let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)
            .map_err(|e| SandboxError::Confine(e.into()))?;
        // What is buffered is this process's to write, once.
        let _ = io::stdout().flush();
        let parent = std::process::id();
        // SAFETY: the child runs only `child`, which does not return; its documentation says what it may do.
        match unsafe { fork() }.map_err(|e| SandboxError::Confine(e.into()))? {
            ForkResult::Parent { child } => Ok(Worker {
                pid: Some(child),
                result: read.into(),
            }),
            ForkResult::Child => self.child(parent, write, keep, work),
        }
    }

    /// What the child does.
    fn child<E: Display>(
        &self,
        parent: u32,
        write: OwnedFd,
        keep: &[i32],
        work: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> ! {
        // Nothing here may unwind into the copy of the caller's stack.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            let _ = set_pdeathsig(Signal::SIGKILL);
            if nix::unistd::getppid().as_raw() as u32 != parent {
                return;
            }
            close_others(&[&[write.as_raw_fd()], keep].concat());
            let done = match self.confine() {
                Ok(()) => work().map_err(|e| e.to_string()),
                Err(e) => Err(format!("the process that decodes cannot be confined: {e}")),
            };
            let _ = io::stdout().flush();
            let (first, bytes) = match done {
                Ok(bytes) => (DONE, bytes),
                Err(text) => (FAILED, text.into_bytes()),
            };
            let mut to = File::from(write);
            let _ = to.write_all(&[first]).and_then(|()| to.write_all(&bytes));
        }));
        // SAFETY: ends the process at once: what runs at the end of a program is the parent's.
        unsafe { libc::_exit(0) }
    }

    /// Confines this process for the rest of its life: all of its threads in their system calls, the calling thread and
    /// those that it makes in the files. It keeps its open descriptors.
    ///
    /// # Errors
    /// The kernel refuses. The process may be confined in part and should end.
    pub fn confine(&self) -> io::Result<()> {
        let capabilities = self.capabilities();
        let filters = filters(std::process::id())?;
        set_no_new_privs()?;
        self.landlock().map_err(io::Error::other)?;
        drop_capabilities(capabilities)?;
        for filter in &filters {
            seccompiler::apply_filter_all_threads(filter).map_err(io::Error::other)?;
        }
        Ok(())
    }

    fn landlock(&self) -> Result<(), RulesetError> {
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        let all = AccessFs::from_all(LANDLOCK);
        let mut rules = Ruleset::default()
            .handle_access(all)?
            .handle_access(AccessNet::from_all(LANDLOCK))?
            .scope(Scope::from_all(LANDLOCK))?
            .create()?;
        let write = all & !AccessFs::Execute;
        let grants = self.read.iter().map(|path| (path, read));
        for (path, access) in grants.chain(self.write.iter().map(|path| (path, write))) {
            let Ok(open) = PathFd::new(path) else {
                continue;
            };
            let access = match path.is_dir() {
                true => access,
                false => access & AccessFs::from_file(LANDLOCK),
            };
            rules = rules.add_rule(PathBeneath::new(open, access))?;
        }
        rules.restrict_self().map(drop)
    }

    /// The capabilities over files that root needs for what it is given: none, if that is its own.
    fn capabilities(&self) -> u64 {
        let uid = nix::unistd::geteuid().as_raw();
        // runc makes image directories that only capabilities enter (mode 0600).
        let closed = |m: Metadata| m.uid() != uid || m.is_dir() && m.mode() & 0o500 != 0o500;
        let closed = |path: &PathBuf| path.metadata().is_ok_and(closed);
        let read = self.read.iter().any(closed);
        let write = self.write.iter().any(closed);
        let mut needed = CapabilitySet::empty();
        needed.set(CapabilitySet::DAC_READ_SEARCH, read);
        needed.set(CapabilitySet::DAC_OVERRIDE, write);
        needed.bits()
    }
}

/// A child at work. Dropped before its end, it is killed.
#[derive(Debug)]
pub struct Worker {
    /// `None`: it was waited for.
    pid: Option<Pid>,
    result: File,
}

impl Worker {
    /// Waits for the result.
    ///
    /// # Errors
    /// The work's own; the child died, said nothing, or took longer than the limit.
    pub fn finish(mut self, limit: Duration) -> Result<Vec<u8>, SandboxError> {
        let ended = |what: String| SandboxError::Ended(what);
        let bytes = self.read(limit).map_err(|e| ended(e.to_string()))?;
        let status = self.end();
        match bytes.split_first() {
            Some((&DONE, bytes)) => Ok(bytes.to_vec()),
            Some((&FAILED, text)) => {
                let text = String::from_utf8_lossy(text).into_owned();
                Err(SandboxError::Failed(text))
            }
            _ => Err(ended(match status {
                Some(WaitStatus::Signaled(_, signal, _)) => format!("was killed by {signal}"),
                _ => "ended without an answer".into(),
            })),
        }
    }

    /// Waits for the end of a child that has said all, and kills one that goes on.
    fn end(&mut self) -> Option<WaitStatus> {
        let pid = self.pid.take()?;
        let end = Instant::now() + GRACE;
        loop {
            match waitpid(pid, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok(WaitStatus::StillAlive) => {
                    let _ = kill(pid, Signal::SIGKILL);
                    return waitpid(pid, None).ok();
                }
                status => return status.ok(),
            }
        }
    }

    fn read(&mut self, limit: Duration) -> io::Result<Vec<u8>> {
        let end = Instant::now() + limit;
        let mut bytes = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let wait = i32::try_from(left.as_millis()).unwrap_or(i32::MAX);
            let wait = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
            let mut fds = [PollFd::new(
                std::os::fd::AsFd::as_fd(&self.result),
                PollFlags::POLLIN,
            )];
            match poll(&mut fds, wait) {
                Ok(0) if Instant::now() >= end => {
                    let what = format!("took longer than {} s and was killed", limit.as_secs());
                    return Err(io::Error::new(io::ErrorKind::TimedOut, what));
                }
                Ok(0) | Err(nix::errno::Errno::EINTR) => continue,
                Ok(_) => {}
                Err(e) => return Err(e.into()),
            }
            let n = self.result.read(&mut buffer)?;
            if n == 0 {
                return Ok(bytes);
            }
            if (bytes.len() + n) as u64 > MAX_RESULT {
                return Err(io::Error::other("has too much to say"));
            }
            bytes.extend_from_slice(&buffer[..n]);
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(pid) = self.pid.take() {
            let _ = kill(pid, Signal::SIGKILL);
            let _ = waitpid(pid, None);
        }
    }
}

/// Closes all descriptors but the first three and these.
fn close_others(keep: &[i32]) {
    let mut keep: Vec<u32> = keep
        .iter()
        .filter_map(|fd| u32::try_from(*fd).ok())
        .collect();
    keep.sort_unstable();
    let mut from = 3;
    for fd in keep.into_iter().filter(|fd| *fd >= 3).chain([u32::MAX]) {
        if fd > from {
            // SAFETY: numbers. This process uses none of these descriptors any more, and never drops their owners.
            unsafe { libc::syscall(libc::SYS_close_range, from, fd - 1, 0) };
        }
        from = fd.saturating_add(1);
    }
}

/// Drops all capabilities but these, for good.
fn drop_capabilities(keep: u64) -> io::Result<()> {
    // Fails for a capability that the kernel does not have or that this process may not drop; no new privileges come
    // without exec, which the filter refuses.
    for capability in 0..u64::BITS {
        let one = CapabilitySet::from_bits_retain(1 << capability);
        let _ = remove_capability_from_bounding_set(one);
    }
    let _ = clear_ambient_capability_set();
    let permitted = capabilities(None)?.permitted & CapabilitySet::from_bits_retain(keep);
    let sets = CapabilitySets {
        effective: permitted,
        permitted,
        inheritable: CapabilitySet::empty(),
    };
    Ok(set_capabilities(None, sets)?)
}

/// The system calls of decoders: files by name and descriptor, memory, threads of this process, time.
const CALLS: &[libc::c_long] = &[
    libc::SYS_brk,
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_copy_file_range,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fadvise64,
    libc::SYS_fallocate,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_fcntl,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_fsync,
    libc::SYS_ftruncate,
    libc::SYS_futex,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_getuid,
    libc::SYS_linkat,
    libc::SYS_lseek,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_mkdirat,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_munmap,
    libc::SYS_nanosleep,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_openat2,
    libc::SYS_ppoll,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_pwritev,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_yield,
    libc::SYS_sendfile,
    libc::SYS_set_robust_list,
    libc::SYS_sigaltstack,
    libc::SYS_splice,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_symlinkat,
    libc::SYS_sync_file_range,
    libc::SYS_uname,
    libc::SYS_unlinkat,
    libc::SYS_utimensat,
    libc::SYS_write,
    libc::SYS_writev,
];

/// Their older names, where the architecture has them.
#[cfg(target_arch = "x86_64")]
const OLDER_CALLS: &[libc::c_long] = &[
    libc::SYS_access,
    libc::SYS_arch_prctl,
    libc::SYS_dup2,
    libc::SYS_getdents,
    libc::SYS_lstat,
    libc::SYS_mkdir,
    libc::SYS_open,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_rename,
    libc::SYS_rmdir,
    libc::SYS_stat,
    libc::SYS_time,
    libc::SYS_unlink,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_CALLS: &[libc::c_long] = &[];

/// Builds the filters: the first refuses what no decoder calls; the second sends the C library from `clone3`, whose
/// flags no filter can see, to `clone`.
fn filters(pid: u32) -> io::Result<[BpfProgram; 2]> {
    let of = |call: libc::c_long, argument: u8, compare: SeccompCmpOp, value: u64| {
        let width = SeccompCmpArgLen::Dword;
        let condition = SeccompCondition::new(argument, width, compare, value)?;
        Ok::<_, seccompiler::BackendError>((call, SeccompRule::new(vec![condition])?))
    };
    let equal = SeccompCmpOp::Eq;
    let thread = libc::CLONE_THREAD as u64;
    let some = [
        of(libc::SYS_clone, 0, SeccompCmpOp::MaskedEq(thread), thread),
        // The name of a thread.
        of(libc::SYS_prctl, 0, equal.clone(), libc::PR_SET_NAME as u64),
        // Its own limits, also by number.
        of(libc::SYS_prlimit64, 0, equal.clone(), 0),
        // An abort of this process.
        of(libc::SYS_tgkill, 0, equal.clone(), u64::from(pid)),
        // Is it a terminal, and how wide?
        of(libc::SYS_ioctl, 1, equal.clone(), libc::TCGETS),
        of(libc::SYS_ioctl, 1, equal, libc::TIOCGWINSZ),
    ];
    let mut rules: BTreeMap<libc::c_long, Vec<SeccompRule>> = BTreeMap::new();
    for rule in some {
        let (call, rule) = rule.map_err(io::Error::other)?;
        rules.entry(call).or_default().push(rule);
    }
    let all = CALLS.iter().chain(OLDER_CALLS);
    rules.extend(all.map(|call| (*call, Vec::new())));
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    // The second filter answers for it.
    rules.insert(libc::SYS_clone3, Vec::new());
    let first = program(rules, refuse, SeccompAction::Allow)?;
    let clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
    let absent = SeccompAction::Errno(libc::ENOSYS as u32);
    let second = program(clone3, SeccompAction::Allow, absent)?;
    // The kernel takes the sterner answer, so the order does not matter; the first would refuse the call that adds the
    // second.
    Ok([second, first])
}

fn program(
    rules: BTreeMap<libc::c_long, Vec<SeccompRule>>,
    other: SeccompAction,
    named: SeccompAction,
) -> io::Result<BpfProgram> {
    let arch = TargetArch::try_from(std::env::consts::ARCH).map_err(io::Error::other)?;
    let filter = SeccompFilter::new(rules, other, named, arch).map_err(io::Error::other)?;
    BpfProgram::try_from(filter).map_err(io::Error::other)
}

/// Returns true if the kernel bounds files, too.
pub fn has_landlock() -> bool {
    /// `LANDLOCK_CREATE_RULESET_VERSION`.
    const VERSION: libc::c_ulong = 1;
    // SAFETY: asks for the version; no memory is read.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            std::ptr::null::<u8>(),
            0usize,
            VERSION,
        )
    };
    version > 0
}

/// The real path, for a rule; the path itself if there is none.
pub fn real(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
#[path = "sandbox_tests.rs"]
mod tests;
