//! Creates temporary directories, locked by their owner so that another run can remove those of dead processes.
//!
//! The next process that needs such a directory in the same place removes leftover copies. It only reports leftover
//! checkpoints, because they may be all that is left of a container.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use cryopod_archive::temporary::{self, Temporary};
use cryopod_host::processes::named_by_a_process;
use cryopod_operations::images::handover;

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
pub struct LockedTempDir(Temporary);

impl LockedTempDir {
    /// Creates a directory beside `file`, on the file system of the result.
    pub fn beside(file: &Path, holds: Holds) -> anyhow::Result<Self> {
        let parent = file.parent().filter(|p| !p.as_os_str().is_empty());
        Self::within(parent.unwrap_or(Path::new(".")), holds)
    }

    /// Creates a directory in $TMPDIR, else in /var/tmp, for a result that is not a file.
    pub fn anywhere(holds: Holds) -> anyhow::Result<Self> {
        Self::within(&usual_parent(), holds)
    }

    /// Creates a directory in this one, and removes leftovers there, and copies in the usual place: no other run may need
    /// one there for long.
    pub fn within(parent: &Path, holds: Holds) -> anyhow::Result<Self> {
        clean(parent, holds);
        clean(&usual_parent(), Holds::Copy);
        let cannot = || {
            format!(
                "{}: cannot make a directory in it; choose another place",
                parent.display()
            )
        };
        let made = Temporary::directory(parent, holds.prefix());
        Ok(Self(made.with_context(cannot)?))
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// Returns its path; it is not removed any more.
    pub fn keep(self) -> PathBuf {
        self.0.keep()
    }
}

fn usual_parent() -> PathBuf {
    let named = std::env::var_os("TMPDIR").filter(|d| !d.is_empty());
    named.map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// Cleans up what killed processes have left in a directory.
fn clean(parent: &Path, holds: Holds) {
    for (path, _lock) in temporary::leftovers(parent, holds.prefix()).unwrap_or_default() {
        let name = path.file_name().unwrap_or_default().as_bytes();
        match holds {
            Holds::Checkpoint => tracing::warn!(
                "{}: a checkpoint that an export has left, which failed or was killed; go on with `cryopod bundle` or `cryopod pack`, or remove it",
                path.display()
            ),
            // An engine outlives the process that called it.
            Holds::Copy if named_by_a_process(name) => {}
            Holds::Copy => {
                let real = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
                handover::revoke(&real);
                temporary::remove(&path);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(dir: &Path, holds: Holds) -> PathBuf {
        LockedTempDir::within(dir, holds).unwrap().keep()
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
