//! Fills a directory from an archive. Nothing is written outside of it.
//!
//! Every name is walked from the directory's descriptor, component by component, without following links, and every
//! file is created new. So another process that plants links meanwhile gains nothing.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, fchmod, mkdirat};

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
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL;
        let mode = Mode::from_bits_truncate(mode);
        open(&parent, last, flags, mode).map(File::from)
    }

    /// Creates a directory, if it is missing.
    pub(super) fn directory(&self, name: &str) -> io::Result<OwnedFd> {
        let (parent, last) = self.parent(name)?;
        enter(&parent, last)
    }

    pub(super) fn set_mode(&self, name: &str, mode: u32) -> io::Result<()> {
        let directory = self.directory(name)?;
        Ok(fchmod(directory, Mode::from_bits_truncate(mode))?)
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
    match mkdirat(dir.as_fd(), name, Mode::S_IRWXU) {
        Ok(()) | Err(Errno::EEXIST) => {}
        Err(e) => return Err(e.into()),
    }
    open(dir, name, OFlag::O_DIRECTORY, Mode::empty())
}

fn open(dir: &OwnedFd, name: &str, flags: OFlag, mode: Mode) -> io::Result<OwnedFd> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    Ok(openat(dir, name, flags, mode)?)
}
