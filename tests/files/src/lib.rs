//! Files that a unit test makes: a host's `/proc` and `/sys`, a bundle, a checkpoint.
#![allow(clippy::unwrap_used, reason = "tests report by failing")]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Makes files below a directory, each with its parents.
pub trait TestFiles: AsRef<Path> {
    fn put(&self, at: impl AsRef<Path>, content: impl AsRef<[u8]>) {
        fs::write(with_parents(self.as_ref().join(at)), content).unwrap();
    }

    fn link(&self, at: impl AsRef<Path>, target: impl AsRef<Path>) {
        symlink(target, with_parents(self.as_ref().join(at))).unwrap();
    }

    fn dir(&self, at: impl AsRef<Path>) {
        fs::create_dir_all(self.as_ref().join(at)).unwrap();
    }
}

impl<T: AsRef<Path> + ?Sized> TestFiles for T {}

fn with_parents(path: PathBuf) -> PathBuf {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    path
}
