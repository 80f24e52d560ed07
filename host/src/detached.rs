//! Mounts that are made apart and then attached, also in another mount namespace.
//!
//! A bind mount cannot reach from one mount namespace into another. A detached copy of a mount can: `open_tree(2)` makes
//! it, `mount_setattr(2)` (Linux 5.12) limits it, `move_mount(2)` attaches it. `fsopen(2)` makes a new file system.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::sched::{CloneFlags, setns, unshare};

/// A mount that no directory shows yet. Dropped, it is gone.
#[derive(Debug)]
pub struct Detached(OwnedFd);

impl Detached {
    /// Copies the mount of `source`: that file, or that directory with all that is in it. `recursive`: also with what is
    /// mounted below it.
    pub fn of(source: &Path, recursive: bool) -> io::Result<Self> {
        let path = CString::new(source.as_os_str().as_bytes())?;
        let mut flags = libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC;
        if recursive {
            flags |= libc::AT_RECURSIVE as libc::c_uint;
        }
        // SAFETY: reads the path, which ends with a zero.
        let fd =
            unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, path.as_ptr(), flags) };
        Ok(Self(opened(fd)?))
    }

    /// Copies the mount of an open file or directory, without what is mounted below it.
    pub fn of_opened(source: BorrowedFd<'_>) -> io::Result<Self> {
        let flags =
            libc::OPEN_TREE_CLONE | libc::OPEN_TREE_CLOEXEC | libc::AT_EMPTY_PATH as libc::c_uint;
        let (at, path) = (source.as_raw_fd(), c"".as_ptr());
        // SAFETY: reads an empty path.
        Ok(Self(opened(unsafe {
            libc::syscall(libc::SYS_open_tree, at, path, flags)
        })?))
    }

    /// Makes a file system of this type, with options as `mount -o` takes them.
    pub fn new(fs_type: &CStr, options: &[(&CStr, &str)]) -> io::Result<Self> {
        const SET_STRING: libc::c_uint = 1;
        const CREATE: libc::c_uint = 6;
        const CLOEXEC: libc::c_uint = 1;
        // SAFETY: reads the type, which ends with a zero.
        let context =
            opened(unsafe { libc::syscall(libc::SYS_fsopen, fs_type.as_ptr(), CLOEXEC) })?;
        let configure = |command: libc::c_uint,
                         key: *const libc::c_char,
                         value: *const libc::c_char| {
            let context = context.as_raw_fd();
            // SAFETY: the strings end with a zero, or are null where the command takes none.
            checked(unsafe { libc::syscall(libc::SYS_fsconfig, context, command, key, value, 0) })
        };
        for (key, value) in options {
            let value = CString::new(*value)?;
            configure(SET_STRING, key.as_ptr(), value.as_ptr())?;
        }
        configure(CREATE, std::ptr::null(), std::ptr::null())?;
        // SAFETY: takes numbers.
        let mount = unsafe { libc::syscall(libc::SYS_fsmount, context.as_raw_fd(), CLOEXEC, 0) };
        Ok(Self(opened(mount)?))
    }

    /// Sets attributes (`MOUNT_ATTR_*`) and the propagation (`MS_PRIVATE`, ...; 0: as it is), of all that is mounted below
    /// too.
    pub fn set(&self, attributes: u64, propagation: u64) -> io::Result<()> {
        let flags = libc::AT_EMPTY_PATH | libc::AT_RECURSIVE;
        set(self.0.as_fd(), attributes, propagation, flags)
    }

    /// Returns true if its root is a directory.
    pub fn is_directory(&self) -> io::Result<bool> {
        Ok(std::fs::File::from(self.0.try_clone()?)
            .metadata()?
            .is_dir())
    }

    /// Mounts it over a file or directory, of which a descriptor with `O_PATH` is enough.
    pub fn attach(self, over: BorrowedFd<'_>) -> io::Result<()> {
        let flags = libc::MOVE_MOUNT_F_EMPTY_PATH | libc::MOVE_MOUNT_T_EMPTY_PATH;
        // SAFETY: reads two empty paths.
        let done = unsafe {
            libc::syscall(
                libc::SYS_move_mount,
                self.0.as_raw_fd(),
                c"".as_ptr(),
                over.as_raw_fd(),
                c"".as_ptr(),
                flags,
            )
        };
        checked(done).map(drop)
    }
}

/// Sets attributes (`MOUNT_ATTR_*`) of the mount whose root this is.
pub fn limit(root: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    set(root, attributes, 0, libc::AT_EMPTY_PATH)
}

/// Runs `what` in the mount namespace of the container with this init process, with its root, in a thread that ends
/// there. It logs nothing: the log's path would be the container's.
pub fn within(
    init: i32,
    what: impl FnOnce(&File) -> Result<(), String> + Send,
) -> Result<(), String> {
    let failed = |e: io::Error| format!("the container's mount namespace: {e}");
    let namespace = File::open(format!("/proc/{init}/ns/mnt")).map_err(failed)?;
    let entered = move || {
        unshare(CloneFlags::CLONE_FS)
            .and_then(|()| setns(namespace, CloneFlags::CLONE_NEWNS))
            .map_err(|e| failed(e.into()))?;
        // The namespace's root, also where the init process has another one (chroot).
        what(&File::open("/").map_err(failed)?)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, entered);
        let ended = thread.map_err(failed)?.join();
        ended.unwrap_or_else(|_| Err("a thread has ended early".into()))
    })
}

fn set(mount: BorrowedFd<'_>, attributes: u64, propagation: u64, flags: i32) -> io::Result<()> {
    let attr = libc::mount_attr {
        attr_set: attributes,
        attr_clr: 0,
        propagation,
        userns_fd: 0,
    };
    // SAFETY: reads an empty path and the structure, whose size is given.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of_val(&attr),
        )
    };
    checked(done).map(drop)
}

/// The descriptor that a call has just opened, and nobody else has.
fn opened(result: libc::c_long) -> io::Result<OwnedFd> {
    let fd = RawFd::try_from(checked(result)?).map_err(io::Error::other)?;
    // SAFETY: see above.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};

    /// Needs root and a mount namespace that can be changed, as the test bed and CI have.
    #[test]
    fn a_read_only_copy() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("from"), dir.path().join("to"));
        fs::create_dir(&from).unwrap();
        fs::create_dir(&to).unwrap();
        fs::write(from.join("file"), "text").unwrap();
        let copy = match Detached::of(&from, true) {
            Ok(copy) => copy,
            Err(e) => return eprintln!("skipped: no mounts can be made here: {e}"),
        };
        copy.set(libc::MOUNT_ATTR_RDONLY, libc::MS_PRIVATE).unwrap();
        copy.attach(File::open(&to).unwrap().as_fd()).unwrap();
        assert_eq!(fs::read(to.join("file")).unwrap(), b"text");
        assert!(fs::write(to.join("file"), "").is_err());
        crate::mountinfo::unmount_below(&to);
        assert!(!to.join("file").exists());
        assert!(Detached::of(&from.join("none"), false).is_err());
    }
}
