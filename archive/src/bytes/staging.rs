//! Creates files and directories that get their names only when they are complete and on disk.
//!
//! During writing, the data lies beside its final name as `.NAME.cryopod-partial-PID-N`, locked by its writer. When a
//! writer is killed its lock goes, and the next writer of the same name removes the leftover.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::{AT_FDCWD, Flock, FlockArg, RenameFlags, renameat2};

use crate::error::Error;

pub(crate) const MARK: &str = ".cryopod-partial-";
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A file or directory being written. If dropped without [`Staging::commit`], it is removed.
#[derive(Debug)]
pub(crate) struct Staging {
    target: PathBuf,
    parent: PathBuf,
    partial: PathBuf,
    replace: bool,
    directory: bool,
    lock: Option<Flock<File>>,
    done: bool,
}

impl Staging {
    pub(crate) fn directory(target: &Path, replace: bool) -> Result<Self, Error> {
        Self::new(target, replace, true)
    }

    pub(crate) fn file(target: &Path, replace: bool) -> Result<Self, Error> {
        Self::new(target, replace, false)
    }

    fn new(target: &Path, replace: bool, directory: bool) -> Result<Self, Error> {
        let name = target.file_name().ok_or_else(|| Error::Unsupported {
            path: target.into(),
            reason: "not a name for a file or directory".into(),
        })?;
        let parent = match target.parent() {
            Some(parent) if parent != Path::new("") => parent.to_owned(),
            _ => PathBuf::from("."),
        };
        if !replace && fs::symlink_metadata(target).is_ok() && !empty_directory(target, directory) {
            return Err(Error::Exists {
                path: target.into(),
            });
        }
        sweep(&parent, name)?;
        for _ in 0..100 {
            let n = NEXT.fetch_add(1, Ordering::Relaxed);
            let mut partial = OsString::from(".");
            partial.push(name);
            partial.push(format!("{MARK}{}-{n}", std::process::id()));
            let partial = parent.join(partial);
            let create = Error::io(&partial, "create it");
            let opened = match directory {
                true => fs::DirBuilder::new()
                    .mode(0o700)
                    .create(&partial)
                    .and_then(|()| File::open(&partial)),
                false => OpenOptions::new()
                    .read(true)
                    .write(true)
                    .create_new(true)
                    .mode(0o600)
                    .open(&partial),
            };
            let file = match opened {
                Ok(file) => file,
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                Err(e) => return Err(create(e)),
            };
            // Another process may remove the file between creation and lock.
            let Ok(lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else {
                continue;
            };
            if !same_file(&lock, &partial) {
                continue;
            }
            let target = target.to_owned();
            return Ok(Self {
                target,
                parent,
                partial,
                replace,
                directory,
                lock: Some(lock),
                done: false,
            });
        }
        Err(Error::from_io(
            target,
            "create a temporary name beside it",
            io::ErrorKind::AlreadyExists.into(),
        ))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.partial
    }

    pub(crate) fn directory_above(&self) -> &Path {
        &self.parent
    }

    pub(crate) fn handle(&self) -> io::Result<File> {
        match &self.lock {
            Some(lock) => lock.try_clone(),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    /// Syncs it and gives it its name. The caller must sync the files inside a directory before.
    pub(crate) fn commit(mut self) -> Result<(), Error> {
        let fail = |action| Error::io(&self.target, action);
        self.handle()
            .and_then(|f| f.sync_all())
            .map_err(fail("write it to disk"))?;
        let rename = |flags| {
            renameat2(AT_FDCWD, &self.partial, AT_FDCWD, &self.target, flags)
                .map_err(io::Error::from)
        };
        let exists = fs::symlink_metadata(&self.target).is_ok();
        let renamed = match (exists, self.directory) {
            (false, _) => match rename(RenameFlags::RENAME_NOREPLACE) {
                // Not every file system supports the flag.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                    fs::rename(&self.partial, &self.target)
                }
                other => other,
            },
            (true, true) if empty_directory(&self.target, true) => {
                fs::rename(&self.partial, &self.target)
            }
            (true, _) if !self.replace => Err(io::ErrorKind::AlreadyExists.into()),
            (true, false) => fs::rename(&self.partial, &self.target),
            (true, true) => rename(RenameFlags::RENAME_EXCHANGE),
        };
        match renamed {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
                return Err(Error::Exists {
                    path: self.target.clone(),
                });
            }
            Err(e) => return Err(fail("give it its name")(e)),
        }
        File::open(&self.parent)
            .and_then(|d| d.sync_all())
            .map_err(fail("write its directory to disk"))?;
        self.done = true;
        if exists && self.directory && self.partial.exists() {
            // The replaced directory now has the temporary name.
            if let Err(e) = fs::remove_dir_all(&self.partial) {
                tracing::warn!(path = %self.partial.display(), error = %e, "cannot remove what was replaced");
            }
        }
        Ok(())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.done {
            remove(&self.partial);
        }
    }
}

fn remove(path: &Path) {
    let removed = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(e) => Err(e),
    };
    match removed {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(path = %path.display(), error = %e, "cannot remove an unfinished archive");
        }
        _ => {}
    }
}

fn empty_directory(path: &Path, directory: bool) -> bool {
    directory
        && fs::symlink_metadata(path).is_ok_and(|m| m.is_dir())
        && fs::read_dir(path).is_ok_and(|mut d| d.next().is_none())
}

fn same_file(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::symlink_metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// Removes what killed writers of the same name left.
fn sweep(parent: &Path, name: &OsStr) -> Result<(), Error> {
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(MARK);
    for item in fs::read_dir(parent).map_err(Error::io(parent, "list it"))? {
        let item = item.map_err(Error::io(parent, "list it"))?;
        if !item
            .file_name()
            .as_encoded_bytes()
            .starts_with(prefix.as_encoded_bytes())
        {
            continue;
        }
        let path = item.path();
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC)
            .open(&path);
        let Ok(file) = opened else { continue };
        if let Ok(_lock) = Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            remove(&path);
        }
    }
    Ok(())
}
