//! Gives a restore a mount namespace of its own, whose mounts are slaves of the host's.
//!
//! runc binds each mount's source below CRIU's root and detaches it again (`prepareCriuRestoreMounts`). Where `/` is shared,
//! as systemd has it, that detaches what the host has mounted below the source, too: the bind mount is a peer of the
//! source, and unmounting propagates to peers. From a slave nothing propagates back. The host's later mounts still arrive,
//! and a volume with `rslave` is a slave of the same peer group as in a new container.
//!
//! An `rshared` volume comes back as `rslave` would, with a peer group of its own: so CRIU restores it, in any namespace.

use std::io;

/// Moves the calling process to such a namespace. Makes async-signal-safe calls only.
///
/// # Errors
/// The call that failed; the process must not go on as root.
pub fn enter() -> io::Result<()> {
    let none = std::ptr::null();
    // SAFETY: takes a number.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let flags = libc::MS_REC | libc::MS_SLAVE;
    // SAFETY: the path ends with 0; the other arguments are null or a number.
    match unsafe { libc::mount(none, c"/".as_ptr(), none, flags, none.cast()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
