//! Files and directories with temporary names, locked by their owner: a later run removes those of the dead.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;

use cryopod_host::files::if_there;
use nix::fcntl::{Flock, FlockArg};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use tempfile::Builder;

use crate::format::limits::threads_or_cores;

/// Attempts to lock a new one before another process takes it for a leftover.
const TRIES: usize = 100;

/// A file or directory that is removed when this is dropped.
#[derive(Debug)]
pub struct Temporary {
    path: PathBuf,
    /// Locked, unless the file system has no locks: then nobody removes leftovers.
    file: File,
    is_kept: bool,
}

impl Temporary {
    /// Makes a directory that only its owner can open.
    ///
    /// # Errors
    /// The parent's.
    pub fn directory(parent: &Path, prefix: impl AsRef<OsStr>) -> io::Result<Self> {
        Self::make(|| {
            let mut new = Builder::new();
            let new = new.permissions(fs::Permissions::from_mode(0o700));
            let path = new.prefix(&prefix).tempdir_in(parent)?.keep();
            Ok((File::open(&path)?, path))
        })
    }

    /// Makes a file, to read and write.
    pub(crate) fn file(parent: &Path, prefix: impl AsRef<OsStr>) -> io::Result<Self> {
        Self::make(|| {
            let file = Builder::new().prefix(&prefix).tempfile_in(parent)?;
            file.keep().map_err(|e| e.error)
        })
    }

    fn make(new: impl Fn() -> io::Result<(File, PathBuf)>) -> io::Result<Self> {
        for _ in 0..TRIES {
            let (file, path) = new()?;
            // Another process may take it for a leftover until it is locked.
            let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
            let named = path.symlink_metadata().ok().map(|m| (m.dev(), m.ino()));
            let ours = file.metadata().map(|m| (m.dev(), m.ino()))?;
            if locked != Err(Errno::WOULDBLOCK) && named == Some(ours) {
                let is_kept = false;
                return Ok(Self {
                    path,
                    file,
                    is_kept,
                });
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn handle(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Returns its path; it is not removed any more, unless another run takes it for a leftover.
    pub fn keep(mut self) -> PathBuf {
        self.is_kept = true;
        self.path.clone()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.is_kept {
            remove(&self.path);
        }
    }
}

/// Files of at least this size are removed in parallel.
const LARGE: u64 = 64 << 20;

/// Removes a file or a directory. Says so if it cannot.
pub fn remove(path: &Path) {
    let removed = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => {
            remove_files(&large_files(path));
            fs::remove_dir_all(path)
        }
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    if let Err(e) = if_there(removed) {
        tracing::warn!("{}: cannot be removed: {e}", path.display());
    }
}

/// Finds the large files of a directory and of those in it.
fn large_files(dir: &Path) -> Vec<PathBuf> {
    let (mut large, mut below) = (Vec::new(), vec![dir.to_owned()]);
    while let Some(dir) = below.pop() {
        for item in fs::read_dir(dir).into_iter().flatten().flatten() {
            match item.metadata() {
                Ok(meta) if meta.is_dir() => below.push(item.path()),
                Ok(meta) if meta.is_file() && meta.len() >= LARGE => large.push(item.path()),
                _ => {}
            }
        }
    }
    large
}

/// Removes files with as many threads as there are cores: one takes a second for the pages of 20 GB on a tmpfs. What it
/// cannot remove stays.
pub(crate) fn remove_files(files: &[PathBuf]) {
    let next = AtomicUsize::new(0);
    let each = || {
        while let Some(path) = files.get(next.fetch_add(1, Relaxed)) {
            let _ = fs::remove_file(path);
        }
    };
    thread::scope(|scope| {
        for _ in 1..files.len().min(threads_or_cores(0)) {
            // Without a thread it takes longer.
            let _ = thread::Builder::new().spawn_scoped(scope, each);
        }
        each();
    });
}

/// Locks what this user's processes that have died have left in a directory.
///
/// # Errors
/// The directory's.
pub fn leftovers(
    parent: &Path,
    prefix: impl AsRef<OsStr>,
) -> io::Result<Vec<(PathBuf, Flock<File>)>> {
    let mut found = Vec::new();
    for item in fs::read_dir(parent)? {
        let item = item?;
        let (name, path) = (item.file_name(), item.path());
        let prefix = prefix.as_ref().as_encoded_bytes();
        let own = |m: fs::Metadata| m.uid() == nix::unistd::geteuid().as_raw();
        if name.as_encoded_bytes().starts_with(prefix)
            && item.metadata().is_ok_and(own)
            && let Some(lock) = abandoned(&path)
        {
            found.push((path, lock));
        }
    }
    Ok(found)
}

/// Locks a file or directory; `None`: somebody works with it, or it is a link.
pub(crate) fn abandoned(path: &Path) -> Option<Flock<File>> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(path);
    Flock::lock(opened.ok()?, FlockArg::LockExclusiveNonblock).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_files_are_removed_and_what_links_point_at_stays() {
        let dir = tempfile::tempdir().unwrap();
        let [gone, stays] = ["gone", "stays"].map(|name| dir.path().join(name));
        for dir in [&gone.join("a/b"), &stays] {
            fs::create_dir_all(dir).unwrap();
            for name in ["1", "2", "3"] {
                let file = File::create(dir.join(name)).unwrap();
                file.set_len(LARGE).unwrap();
            }
        }
        std::os::unix::fs::symlink(&stays, gone.join("a/link")).unwrap();
        std::os::unix::fs::symlink(stays.join("1"), gone.join("link")).unwrap();
        assert_eq!(large_files(&gone).len(), 3);
        remove(&gone);
        assert!(!gone.exists());
        assert_eq!(fs::read_dir(&stays).unwrap().count(), 3);
    }

    #[test]
    fn they_are_the_owners_alone_and_leftovers_once_he_is_dead() {
        let dir = tempfile::tempdir().unwrap();
        let new = [
            Temporary::directory(dir.path(), ".x-").unwrap(),
            Temporary::file(dir.path(), ".x-").unwrap(),
        ];
        let mode = |t: &Temporary| t.path().metadata().unwrap().mode() & 0o777;
        assert_eq!([mode(&new[0]), mode(&new[1])], [0o700, 0o600]);
        let found = || leftovers(dir.path(), ".x-").unwrap().len();
        assert_eq!(found(), 0);
        let [directory, file] = new;
        drop(file.keep());
        assert_eq!(found(), 1);
        drop(directory);
        assert_eq!(dir.path().read_dir().unwrap().count(), 1);
    }
}
