//! Creates temporary directories, locked by their owner so that another run can remove those of dead processes.
//!
//! The next process that needs such a directory in the same place removes leftover copies. It only reports leftover
//! checkpoints, because they may be all that is left of a container.

use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use cryopod_operations::images::handover;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use tempfile::TempDir;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// Data that can be made again.
    Copy,
    /// Perhaps the only checkpoint of a container that no longer runs.
    Checkpoint,
}

impl Holds {
    fn prefix(self) -> &'static str {
        match self {
            Self::Copy => ".cryopod-temp-",
            Self::Checkpoint => ".cryopod-checkpoint-",
        }
    }
}

/// A directory that is removed when it is dropped.
#[derive(Debug)]
pub struct LockedTempDir {
    dir: TempDir,
    /// `None` if the file system has no locks: then nobody removes leftovers.
    _lock: Option<Flock<File>>,
}

impl LockedTempDir {
    /// Creates a directory beside `file`, on the file system of the result.
    pub fn beside(file: &Path, holds: Holds) -> anyhow::Result<Self> {
        let parent = file.parent().filter(|p| !p.as_os_str().is_empty());
        Self::within(parent.unwrap_or(Path::new(".")), holds)
    }

    /// Creates a directory in $TMPDIR, else in /var/tmp, for a result that is not a file.
    pub fn anywhere(holds: Holds) -> anyhow::Result<Self> {
        let dir = std::env::var_os("TMPDIR").filter(|d| !d.is_empty());
        Self::within(Path::new(&dir.unwrap_or_else(|| "/var/tmp".into())), holds)
    }

    /// Creates a directory in this one, and removes leftovers there.
    pub fn within(parent: &Path, holds: Holds) -> anyhow::Result<Self> {
        clean(parent, holds);
        let cannot = || {
            format!(
                "{}: cannot make a directory in it; choose another place",
                parent.display()
            )
        };
        for _ in 0..100 {
            let dir = tempfile::Builder::new()
                .prefix(holds.prefix())
                .tempdir_in(parent)
                .with_context(cannot)?;
            // In between, another process may remove a directory that nobody has locked.
            let lock = match lock(dir.path()) {
                Ok(Free::Locked(lock)) => Some(lock),
                Ok(Free::NoLocks) => None,
                Ok(Free::Taken) | Err(_) => continue,
            };
            if lock.as_ref().is_none_or(|lock| same(lock, dir.path())) {
                return Ok(Self { dir, _lock: lock });
            }
        }
        bail!(cannot())
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Returns its path; it is not removed any more.
    pub fn keep(self) -> PathBuf {
        self.dir.keep()
    }
}

enum Free {
    Locked(Flock<File>),
    Taken,
    NoLocks,
}

fn lock(dir: &Path) -> io::Result<Free> {
    match Flock::lock(File::open(dir)?, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Free::Locked(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(Free::Taken),
        Err(_) => Ok(Free::NoLocks),
    }
}

fn same(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// Cleans up what killed processes have left in a directory.
fn clean(parent: &Path, holds: Holds) {
    for item in fs::read_dir(parent).into_iter().flatten().flatten() {
        let (name, path) = (item.file_name(), item.path());
        let own = |m: fs::Metadata| m.is_dir() && m.uid() == nix::unistd::geteuid().as_raw();
        if !name.as_bytes().starts_with(holds.prefix().as_bytes())
            || !fs::symlink_metadata(&path).is_ok_and(own)
        {
            continue;
        }
        let Ok(Free::Locked(_lock)) = lock(&path) else {
            continue;
        };
        match holds {
            Holds::Checkpoint => tracing::warn!(
                "{}: a checkpoint that an export has left, which failed or was killed; go on with `cryopod pack`, or remove it",
                path.display()
            ),
            // An engine outlives the process that called it.
            Holds::Copy if named_by_a_process(name.as_bytes()) => {}
            Holds::Copy => {
                let real = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
                handover::revoke(&real);
                if let Err(error) = fs::remove_dir_all(&path) {
                    tracing::warn!("{}: cannot be removed: {error}", path.display());
                }
            }
        }
    }
}

/// Returns true if a process has this in its arguments.
fn named_by_a_process(name: &[u8]) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| fs::read(process.path().join("cmdline")).ok())
        .any(|line| line.windows(name.len()).any(|part| part == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(dir: &Path, holds: Holds) -> PathBuf {
        let LockedTempDir { dir, _lock } = LockedTempDir::within(dir, holds).unwrap();
        dir.keep()
    }

    #[test]
    fn copies_of_the_dead_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let alive = LockedTempDir::within(dir.path(), Holds::Copy).unwrap();
        let dead = left(dir.path(), Holds::Copy);
        fs::write(dead.join("large"), "x").unwrap();
        let strange = dir.path().join(".cryopod-temp-link");
        std::os::unix::fs::symlink(alive.path(), &strange).unwrap();
        let new = LockedTempDir::within(dir.path(), Holds::Copy).unwrap();
        assert!(!dead.exists());
        assert!(alive.path().exists() && new.path().exists() && strange.is_symlink());
        let path = alive.path().to_owned();
        drop(alive);
        assert!(!path.exists());
    }

    #[test]
    fn what_an_engine_still_reads_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let dead = left(dir.path(), Holds::Copy);
        let mut engine = std::process::Command::new("sleep");
        // A name of its own in the arguments, like podman with the file's name.
        let mut engine = std::os::unix::process::CommandExt::arg0(&mut engine, &dead)
            .arg("1000")
            .spawn()
            .unwrap();
        // The kernel releases the parent a moment before it shows the new program's arguments.
        let name = dead.file_name().unwrap().as_bytes();
        while !named_by_a_process(name) {
            assert!(engine.try_wait().unwrap().is_none());
            std::thread::yield_now();
        }
        drop(LockedTempDir::within(dir.path(), Holds::Copy).unwrap());
        assert!(dead.exists());
        engine.kill().unwrap();
        engine.wait().unwrap();
        drop(LockedTempDir::within(dir.path(), Holds::Copy).unwrap());
        assert!(!dead.exists());
    }

    #[test]
    fn checkpoints_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let dead = left(dir.path(), Holds::Checkpoint);
        drop(LockedTempDir::within(dir.path(), Holds::Checkpoint).unwrap());
        drop(LockedTempDir::within(dir.path(), Holds::Copy).unwrap());
        assert!(dead.exists());
    }

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = LockedTempDir::within(Path::new("/nowhere"), Holds::Copy).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere: cannot make a directory in it"));
    }
}
