//! Sets up the loopback device of a restored network namespace that runc has made.
//!
//! runc tells CRIU not to restore it ("Runc doesn't manage network devices") and leaves it down at a restore; a new
//! container has it up. Nothing in the restored container could reach 127.0.0.1. CRIU's hook sets it up before sockets
//! are restored.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::Path;

use nix::sched::{CloneFlags, setns};

/// File in an operation's directory that asks the hook for this.
pub const FILE: &str = "loopback";
/// The stage of CRIU's restore at which the network namespace exists, but no socket yet.
pub const STAGE: &str = "setup-namespaces";

/// Sets the loopback device up in the network namespace of this file. The calling thread stays in that namespace.
pub fn up(namespace: &Path) -> io::Result<()> {
    setns(File::open(namespace)?, CloneFlags::CLONE_NEWNET)?;
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: a plain structure of numbers, for which zeros are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    // SAFETY: reads and writes `request`, which the kernel fills in for the name there.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS as _, &mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the flags are what the call before has filled in; both are numbers in a union.
    unsafe { request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short };
    // SAFETY: reads `request`.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
