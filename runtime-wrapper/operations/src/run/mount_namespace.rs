//! Gives a restore a mount namespace of its own, whose mounts are slaves of the host's.
//!
//! runc binds each mount's source below CRIU's root and detaches it again (`prepareCriuRestoreMounts`). Where `/` is shared,
//! as systemd has it, that detaches what the host has mounted below the source, too: the bind mount is a peer of the
//! source, and unmounting propagates to peers. From a slave nothing propagates back. The host's later mounts still arrive,
//! and a volume with `rslave` is a slave of the same peer group as in a new container.
//!
//! An `rshared` volume comes back as `rslave` would, with a peer group of its own: so CRIU restores it, in any namespace.

use std::ffi::CStr;
use std::io;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};

/// Moves the calling process to such a namespace. Makes async-signal-safe calls only.
///
/// # Errors
/// The call that failed; the process must not go on as root.
pub fn enter() -> io::Result<()> {
    let none = None::<&CStr>;
    unshare(CloneFlags::CLONE_NEWNS)?;
    let flags = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    Ok(mount(none, c"/", none, flags, none)?)
}
