//! Opens processes by descriptor: a pidfd names its process even after the pid is used again.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Returns a descriptor of a process, which becomes readable when the process ends.
pub fn open(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: takes numbers, returns a new descriptor or -1.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) })
}

/// Returns a copy of another process's descriptor.
pub fn take(pid: i32, fd: RawFd) -> io::Result<OwnedFd> {
    let process = open(pid)?;
    // SAFETY: takes numbers, returns a new descriptor or -1.
    owned(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) })
}

fn owned(fd: libc::c_long) -> io::Result<OwnedFd> {
    match RawFd::try_from(fd) {
        // SAFETY: a descriptor that was just made and belongs to nobody else.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}
