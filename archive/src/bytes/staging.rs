//! Creates files and directories that get their names only when they are complete and on disk.
//!
//! During writing, the data lies beside its final name as `.NAME.cryopod-partial-RANDOM` (a long name is cut), locked by
//! its writer. When a writer is killed its lock goes, and the next writer of the same name removes the leftover.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use cryopod_host::files::sync_directory;
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use crate::error::Error;
use crate::temporary::{self, Temporary};

pub(crate) const MARK: &str = ".cryopod-partial-";

/// A file or directory being written. If dropped without [`Staging::commit`], it is removed.
#[derive(Debug)]
pub(crate) struct Staging {
    target: PathBuf,
    parent: PathBuf,
    partial: Temporary,
    replace: bool,
    directory: bool,
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
        // The rest of a name of 255 bytes is the dot, the mark and six random letters.
        let name = &name.as_bytes()[..name.len().min(254 - MARK.len() - 6)];
        let name = OsStr::from_bytes(name);
        let prefix: OsString = [".".as_ref(), name, MARK.as_ref()].into_iter().collect();
        let left = temporary::leftovers(&parent, &prefix).map_err(Error::io(&parent, "list it"))?;
        for (path, _lock) in left {
            temporary::remove(&path);
        }
        let partial = match directory {
            true => Temporary::directory(&parent, prefix),
            false => Temporary::file(&parent, prefix),
        };
        Ok(Self {
            partial: partial.map_err(Error::io(target, "create a temporary name beside it"))?,
            target: target.to_owned(),
            parent,
            replace,
            directory,
        })
    }

    pub(crate) fn path(&self) -> &Path {
        self.partial.path()
    }

    pub(crate) fn directory_above(&self) -> &Path {
        &self.parent
    }

    pub(crate) fn handle(&self) -> io::Result<File> {
        self.partial.handle()
    }

    /// Syncs it and gives it its name. The caller must sync the files inside a directory before.
    pub(crate) fn commit(self) -> Result<(), Error> {
        let fail = |action| Error::io(&self.target, action);
        self.handle()
            .and_then(|f| f.sync_all())
            .map_err(fail("write it to disk"))?;
        let rename = |flags| {
            renameat2(AT_FDCWD, self.path(), AT_FDCWD, &self.target, flags).map_err(io::Error::from)
        };
        let exists = fs::symlink_metadata(&self.target).is_ok();
        let renamed = match (exists, self.directory) {
            (false, _) => match rename(RenameFlags::RENAME_NOREPLACE) {
                // Not every file system supports the flag.
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                    fs::rename(self.path(), &self.target)
                }
                other => other,
            },
            (true, true) if empty_directory(&self.target, true) => {
                fs::rename(self.path(), &self.target)
            }
            (true, _) if !self.replace => Err(io::ErrorKind::AlreadyExists.into()),
            (true, false) => fs::rename(self.path(), &self.target),
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
        sync_directory(&self.parent).map_err(fail("write its directory to disk"))?;
        let partial = self.partial.keep();
        if exists && self.directory {
            // The replaced directory now has the temporary name.
            temporary::remove(&partial);
        }
        Ok(())
    }
}

fn empty_directory(path: &Path, directory: bool) -> bool {
    directory
        && fs::symlink_metadata(path).is_ok_and(|m| m.is_dir())
        && fs::read_dir(path).is_ok_and(|mut d| d.next().is_none())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_name() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("n".repeat(255));
        let killed = Staging::file(&target, false).unwrap();
        let left = killed.partial.keep();
        Staging::file(&target, false).unwrap().commit().unwrap();
        assert!(target.exists() && !left.exists());
    }
}
