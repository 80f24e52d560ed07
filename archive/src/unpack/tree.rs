//! Fills a directory from an archive. Nothing is written outside of it.
//!
//! Every name is walked from the directory's descriptor, component by component, without following links, and every
//! file is created new. So another process that plants links meanwhile gains nothing.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

#[derive(Debug)]
pub(super) struct Tree {
    root: OwnedFd,
}

impl Tree {
    pub(super) fn new(root: impl Into<OwnedFd>) -> Self {
        Self { root: root.into() }
    }

    /// Creates a file, and the missing directories above it.
    pub(super) fn file(&self, name: &str, mode: u32) -> io::Result<File> {
        let (parent, last) = self.parent(name)?;
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
        open(&parent, last, flags, mode).map(File::from)
    }

    /// Creates a directory, if it is missing.
    pub(super) fn directory(&self, name: &str) -> io::Result<OwnedFd> {
        let (parent, last) = self.parent(name)?;
        enter(&parent, last)
    }

    pub(super) fn set_mode(&self, name: &str, mode: u32) -> io::Result<()> {
        let directory = self.directory(name)?;
        nix::sys::stat::fchmod(
            directory.as_fd(),
            nix::sys::stat::Mode::from_bits_truncate(mode),
        )?;
        Ok(())
    }

    pub(super) fn link(&self, name: &str, target: &str) -> io::Result<()> {
        let (parent, last) = self.parent(name)?;
        nix::unistd::symlinkat(target, parent.as_fd(), last)?;
        Ok(())
    }

    fn parent<'n>(&self, name: &'n str) -> io::Result<(OwnedFd, &'n str)> {
        let mut parts = name.split('/');
        let mut last = parts.next().unwrap_or_default();
        let mut dir = self.root.try_clone()?;
        for part in parts {
            dir = enter(&dir, last)?;
            last = part;
        }
        // Names were checked when they were read. This check is a safeguard against a mistake there.
        if matches!(last, "" | "." | "..") {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok((dir, last))
    }
}

fn enter(dir: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    if matches!(name, "" | "." | "..") {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    match nix::sys::stat::mkdirat(dir.as_fd(), name, nix::sys::stat::Mode::S_IRWXU) {
        Ok(()) | Err(nix::errno::Errno::EEXIST) => {}
        Err(e) => return Err(e.into()),
    }
    open(dir, name, libc::O_RDONLY | libc::O_DIRECTORY, 0)
}

fn open(dir: &OwnedFd, name: &str, flags: i32, mode: u32) -> io::Result<OwnedFd> {
    let name = CString::new(name)?;
    // SAFETY: an open descriptor, a string that ends with a zero, and a mode, as the call requires with O_CREAT.
    let fd = unsafe {
        libc::openat(
            dir.as_raw_fd(),
            name.as_ptr(),
            flags | libc::O_NOFOLLOW | libc::O_CLOEXEC,
            mode,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call just returned this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
