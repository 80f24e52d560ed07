//! Manages a store: a directory, local or shared, with the large files of checkpoints.
//!
//! containerd packs an image directory into one tar with one thread, and unpacks it for every restore. So the memory of
//! processes and GPUs can lie elsewhere. Each checkpoint has an entry in a store, a directory with a random name, and
//! its image directory has a [`Reference`] to the entry. A restore resolves the reference only in the stores that this
//! host's configuration names. Paths in the reference are only shown to users.
//!
//! References come from strangers, so nobody can guess the name of an entry. Files must have the names of CRIU's pages
//! or of VRAM shards. The reference has the digests of the pages; the VRAM files' table has those of the shards.
//!
//! * [`put`](fn@put): moves files from an image directory to a store
//! * [`find`](fn@find): finds the files of a reference
//! * [`gather`](fn@gather): moves them back
//! * [`list`](fn@list) and [`remove`]: the entries of a store
//! * [`Holders`]: what refers to them; [`clean`](fn@clean): removes those that nothing refers to
//!
//! docs/formats.md describes the reference.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use cryopod_host::files::{if_there, open_regular};
use serde::{Deserialize, Serialize};

use crate::format::names;

mod clean;
mod find;
mod gather;
mod holders;
mod list;
mod listing;
mod origin;
mod put;

pub use clean::clean;
pub use find::{Found, find, find_in};
pub use gather::gather;
pub use holders::{Holder, Holders};
pub use list::{StoreEntry, list, remove};
pub use listing::Listing;
pub use origin::{KnownOrigins, Origin};
pub use put::{About, put};

/// The version that this cryopod writes, and the newest that it reads.
pub const VERSION: u32 = 1;
const DIGITS: usize = 32;
pub const MAX_BYTES: u64 = 16 << 20;
const MAX_FILES: usize = 100_000;
/// Longest text that a restore does not interpret.
const MAX_TEXT: usize = 4096;

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error(transparent)]
    Archive(#[from] crate::Error),
    #[error("{path}: cannot {action}: {source}")]
    Io {
        path: PathBuf,
        /// Completes "cannot ...".
        action: &'static str,
        source: io::Error,
    },
    #[error(
        "{path}: not a reference to a store ({reason}); the checkpoint is damaged or was written by another tool"
    )]
    Reference { path: PathBuf, reason: String },
    #[error(
        "{path}: version {found} of the reference to a store; this cryopod reads {VERSION}: update it"
    )]
    Version { path: PathBuf, found: u64 },
    #[error(
        "{path}: the large files of this checkpoint ({what}) are not in it but in entry {id} of a store, which was {was}, and here {looked}. On the host that has the entry, make the checkpoint whole and copy it again: cryopod bundle --in-place DIRECTORY (an archive: cryopod bundle ARCHIVE -o ...); or name the directory of a shared store in [store] of the configuration"
    )]
    Missing {
        path: PathBuf,
        what: String,
        id: String,
        /// The store at the checkpoint.
        was: String,
        /// The stores that were searched, and what was found there.
        looked: String,
    },
    #[error(
        "{path}: {reason}; the store's entry of this checkpoint is damaged: restore it from a copy of the store, or use another checkpoint"
    )]
    Damaged { path: PathBuf, reason: String },
    #[error(
        "{path}: the large files of this checkpoint are not in it: it was made for one run of `cryopod import`, which is over; import the archive itself"
    )]
    Over { path: PathBuf },
    #[error("{path}: {reason}")]
    Unusable { path: PathBuf, reason: String },
}

impl StoreError {
    /// Completes "cannot ..." for an error of the system.
    pub fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io {
            path,
            action,
            source,
        }
    }

    /// Returns true if the medium has lost what was stored.
    fn is_unreadable(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.raw_os_error() == Some(libc::EIO))
    }

    fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_owned(),
            reason: reason.into(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stored {
    /// `pages-N.img` or `vram-NNNN.img`.
    pub name: String,
    pub bytes: u64,
    /// BLAKE3 of its contents, in hexadecimal. Absent for VRAM shards: the VRAM files' table has the digest of each of
    /// their chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
}

/// `cryopod-store.json`: where the large files of a checkpoint are, and their sizes and digests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reference {
    /// [`VERSION`].
    pub version: u32,
    pub id: String,
    /// The store's directory at the checkpoint. Shown to users, never opened.
    #[serde(default)]
    pub store: String,
    /// The container. Shown to users only.
    #[serde(default)]
    pub container: String,
    /// Time of the checkpoint, RFC 3339. Shown to users only.
    #[serde(default)]
    pub created: String,
    /// Sorted by name.
    pub files: Vec<Stored>,
    /// Its entry is for one run of `cryopod export` or `import`, in a store named [`names::HANDOVER`]. The pages have no
    /// digests: nothing but cryopod has had them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub handed: bool,
}

impl Reference {
    /// Reads the reference of an image directory; `None` if it has none. Fails with [`StoreError`] if it exists but is
    /// unusable.
    pub fn open(images: &Path) -> Result<Option<Self>, StoreError> {
        use std::io::Read;
        let path = images.join(names::STORE_REFERENCE);
        let opened = if_there(open_regular(&path)).map_err(StoreError::io(&path, "open it"))?;
        let Some(file) = opened else {
            return Ok(None);
        };
        let mut text = Vec::new();
        file.take(MAX_BYTES + 1)
            .read_to_end(&mut text)
            .map_err(StoreError::io(&path, "read it"))?;
        Self::parse(&text, &path).map(Some)
    }

    /// Parses a reference; `path` only appears in errors.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self, StoreError> {
        let invalid = |reason: String| StoreError::Reference {
            path: path.to_owned(),
            reason,
        };
        if text.len() as u64 > MAX_BYTES {
            return Err(invalid(format!("larger than {MAX_BYTES} bytes")));
        }
        // The version comes first: a newer one may have changed any other field.
        let value: serde_json::Value =
            serde_json::from_slice(text).map_err(|e| invalid(e.to_string()))?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            Some(version) if version == u64::from(VERSION) => {}
            Some(found) if found > u64::from(VERSION) => {
                let path = path.to_owned();
                return Err(StoreError::Version { path, found });
            }
            _ => return Err(invalid("no `version`".into())),
        }
        let reference: Self = serde_json::from_value(value).map_err(|e| invalid(e.to_string()))?;
        reference.check().map_err(invalid)?;
        Ok(reference)
    }

    fn check(&self) -> Result<(), String> {
        if !is_id(&self.id) {
            return Err(format!("`id` is not {DIGITS} hexadecimal digits"));
        }
        let told = [&self.store, &self.container, &self.created];
        let plain = |text: &&String| text.len() <= MAX_TEXT && !text.contains(char::is_control);
        if !told.iter().all(plain) {
            return Err("`store`, `container` or `created` is no plain text".into());
        }
        if self.files.is_empty() && !self.handed || self.files.len() > MAX_FILES {
            return Err(format!("{} files", self.files.len()));
        }
        let mut seen = BTreeSet::new();
        for file in &self.files {
            let pages = names::is_numbered(&file.name, names::PAGES);
            if !pages && !names::is_numbered(&file.name, names::VRAM_SHARD) {
                let name: String = file.name.chars().take(100).collect();
                return Err(format!("{name:?} is no large file of a checkpoint"));
            }
            let digest = file.blake3.as_deref().map(blake3::Hash::from_hex);
            let bare = !pages || self.handed;
            if !matches!((bare, digest), (_, Some(Ok(_))) | (true, None)) {
                return Err(format!("{}: no BLAKE3 digest", file.name));
            }
            if !seen.insert(&file.name) {
                return Err(format!("{} twice", file.name));
            }
        }
        let sum = self
            .files
            .iter()
            .try_fold(0u64, |n, f| n.checked_add(f.bytes));
        sum.map(drop)
            .ok_or_else(|| "sizes beyond all bounds".into())
    }

    /// Returns the size of all its files, in bytes.
    pub fn bytes(&self) -> u64 {
        self.files
            .iter()
            .map(|f| f.bytes)
            .fold(0, u64::saturating_add)
    }

    /// Bytes of CRIU's memory files.
    pub fn pages_bytes(&self) -> u64 {
        let pages = self
            .files
            .iter()
            .filter(|f| names::is_numbered(&f.name, names::PAGES));
        pages.map(|f| f.bytes).fold(0, u64::saturating_add)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.bytes().div_ceil(1 << 20);
        write!(f, "{} files, {mib} MiB", self.files.len())
    }
}

fn is_id(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests;
