//! Opens processes by descriptor: a pidfd names its process even after the pid is used again.

use std::io;
use std::os::fd::{OwnedFd, RawFd};

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// Returns a descriptor of a process, which becomes readable when the process ends.
pub fn open(pid: i32) -> io::Result<OwnedFd> {
    let pid = (pid > 0).then(|| Pid::from_raw(pid)).flatten();
    let pid = pid.ok_or(io::ErrorKind::InvalidInput)?;
    Ok(pidfd_open(pid, PidfdFlags::empty())?)
}

/// Returns a copy of another process's descriptor.
pub fn take(pid: i32, fd: RawFd) -> io::Result<OwnedFd> {
    Ok(pidfd_getfd(open(pid)?, fd, PidfdGetfdFlags::empty())?)
}
