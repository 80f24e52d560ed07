//! Mounts that are made apart and then attached, also in another mount namespace.
//!
//! A bind mount cannot reach from one mount namespace into another. A detached copy of a mount can: `open_tree(2)` makes
//! it, `mount_setattr(2)` (Linux 5.12) limits it, `move_mount(2)` attaches it. `fsopen(2)` makes a new file system.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::sched::{CloneFlags, setns, unshare};
use rustix::fs::CWD;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, move_mount, open_tree,
};

/// A mount that no directory shows yet. Dropped, it is gone.
#[derive(Debug)]
pub struct Detached(OwnedFd);

impl Detached {
    /// Copies the mount of `source`: that file, or that directory with all that is in it. `recursive`: also with what is
    /// mounted below it.
    pub fn of(source: &Path, recursive: bool) -> io::Result<Self> {
        let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        flags.set(OpenTreeFlags::AT_RECURSIVE, recursive);
        Ok(Self(open_tree(CWD, source, flags)?))
    }

    /// Copies the mount of an open file or directory, without what is mounted below it.
    pub fn of_opened(source: BorrowedFd<'_>) -> io::Result<Self> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE
            | OpenTreeFlags::OPEN_TREE_CLOEXEC
            | OpenTreeFlags::AT_EMPTY_PATH;
        Ok(Self(open_tree(source, c"", flags)?))
    }

    /// Makes a file system of this type, with options as `mount -o` takes them.
    pub fn new(fs_type: &CStr, options: &[(&CStr, &str)]) -> io::Result<Self> {
        let context = fsopen(fs_type, FsOpenFlags::FSOPEN_CLOEXEC)?;
        for (key, value) in options {
            fsconfig_set_string(&context, *key, *value)?;
        }
        fsconfig_create(&context)?;
        let flags = FsMountFlags::FSMOUNT_CLOEXEC;
        Ok(Self(fsmount(&context, flags, MountAttrFlags::empty())?))
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
        let flags =
            MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        Ok(move_mount(self.0, c"", over, c"", flags)?)
    }
}

impl AsFd for Detached {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sets attributes (`MOUNT_ATTR_*`) of the mount whose root this is.
pub fn limit(root: BorrowedFd<'_>, attributes: u64) -> io::Result<()> {
    set(root, attributes, 0, libc::AT_EMPTY_PATH)
}

/// The mount namespace of a container cannot be entered.
#[derive(Debug, thiserror::Error)]
#[error("the container's mount namespace: {0}")]
pub struct NamespaceError(#[from] io::Error);

/// Runs `what` in the mount namespace of the container with this init process, with its root, in a thread that ends
/// there. It logs nothing: the log's path would be the container's.
pub fn within<E: From<NamespaceError> + Send>(
    init: i32,
    what: impl FnOnce(&File) -> Result<(), E> + Send,
) -> Result<(), E> {
    let namespace = File::open(format!("/proc/{init}/ns/mnt")).map_err(NamespaceError)?;
    let enter = || {
        unshare(CloneFlags::CLONE_FS)?;
        setns(namespace, CloneFlags::CLONE_NEWNS)?;
        // The namespace's root, also where the init process has another one (chroot).
        File::open("/")
    };
    std::thread::scope(|scope| {
        let entered = || what(&enter().map_err(NamespaceError)?);
        let thread = std::thread::Builder::new().spawn_scoped(scope, entered);
        let ended = thread.map_err(NamespaceError)?.join();
        let panicked = |_| NamespaceError(io::Error::other("a thread has ended early"));
        ended.map_err(panicked)?
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
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
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
