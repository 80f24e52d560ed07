//! Records where the reference to an entry may be, so that a later run knows when nothing refers to it any more.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use cryopod_host::files::replace;
use serde::{Deserialize, Serialize};

use super::StoreError;

/// The record, in the entry.
const FILE: &str = "cryopod-store-origin.json";
const PARTIAL: &str = ".cryopod-store-origin.json.partial";
const MAX_BYTES: u64 = 64 << 10;

/// An engine's directory. Another one of the same name, as of a file system that is not mounted, says nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownOrigins {
    pub path: PathBuf,
    inode: u64,
}

impl KnownOrigins {
    /// Returns `None` if there is no such directory.
    pub fn of(path: &Path) -> Option<Self> {
        let inode = inode(path)?;
        let path = path.to_owned();
        Some(Self { path, inode })
    }

    /// Returns true if the path still leads to the directory that was recorded.
    pub fn is_there(&self) -> bool {
        inode(&self.path) == Some(self.inode)
    }
}

fn inode(path: &Path) -> Option<u64> {
    let meta = fs::metadata(path).ok()?;
    meta.is_dir().then(|| meta.ino())
}

/// Where an engine keeps the checkpoint of an entry. An entry without this record is never removed by itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Origin {
    /// containerd makes image directories here.
    pub temporary: Option<PathBuf>,
    /// containerd's content store.
    pub content: Option<KnownOrigins>,
    /// The engine's own directory of checkpoints, as docker's `containers`.
    pub directory: Option<KnownOrigins>,
    /// The engine has its checkpoint in a directory that nobody named: the entry is kept until it is seen somewhere.
    pub elsewhere: bool,
}

impl Origin {
    pub fn of(entry: &Path) -> Option<Self> {
        let text = cryopod_host::files::read_bounded(&entry.join(FILE), MAX_BYTES).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Removes the record from an entry, which then stays.
    pub(super) fn remove(entry: &Path) -> Result<(), StoreError> {
        let path = entry.join(FILE);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(StoreError::io(&path, "remove it")(error))
            }
            _ => Ok(()),
        }
    }

    /// Writes the record into an entry, in place of an earlier one.
    pub(super) fn write(&self, entry: &Path) -> Result<(), StoreError> {
        let path = entry.join(FILE);
        let text = serde_json::to_vec(self).unwrap_or_default();
        replace(&path, &entry.join(PARTIAL), 0o600, &text)
            .map_err(StoreError::io(&path, "write it"))
    }

    /// Returns the first of its directories that is not there as it was.
    pub fn lost(&self) -> Option<&Path> {
        let mut all = self.content.iter().chain(&self.directory);
        all.find(|k| !k.is_there()).map(|k| k.path.as_path())
    }
}
