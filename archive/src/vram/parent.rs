//! Finds the VRAM files that others build on. Whatever paths a table names, only a table with the recorded digest is
//! accepted.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::VramError;
use super::file::open_file;
use super::index::{ChunkDigest, VramIndex};
use crate::format::names;

/// Most entries that are read of a searched directory.
const MAX_ENTRIES: usize = 100_000;

/// The parent upon which a table builds, by the table's own words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedParent {
    digest: String,
    places: Vec<PathBuf>,
}

impl WantedParent {
    /// Reads a table, and in which directory it is, if it is in one. `None`: it builds upon nothing.
    pub fn of(table: &[u8], dir: Option<&Path>) -> Result<Option<Self>, VramError> {
        let index = VramIndex::parse(table, Path::new(names::VRAM_INDEX))?;
        Ok(index.parent.map(|digest| Self {
            digest: digest.to_string(),
            places: named(&index, dir),
        }))
    }

    /// Finds the directory whose table has the digest, as [`parent_of`](super::read::parent_of) does. Reads no more than that.
    pub fn find(&self, search: &[PathBuf]) -> Option<PathBuf> {
        let digest: ChunkDigest = self.digest.parse().ok()?;
        let found = search.iter().flat_map(|place| below(place));
        let mut places = self.places.iter().cloned().chain(found);
        places.find(|place| table_digest(place) == Some(digest))
    }
}

/// The paths that are known without a search.
pub(super) fn named(index: &VramIndex, dir: Option<&Path>) -> Vec<PathBuf> {
    let link = dir.map(|dir| dir.join(names::PARENT_LINK));
    let link = link.filter(|link| fs::symlink_metadata(link).is_ok());
    let places = index.parent_at.iter().filter_map(|place| {
        let place = Path::new(place);
        match (place.is_absolute(), dir) {
            (true, _) => Some(place.to_owned()),
            (false, Some(dir)) => Some(from(dir, place)),
            (false, None) => None,
        }
    });
    link.into_iter().chain(places).collect()
}

/// Joins a path to a directory and resolves `..`.
fn from(dir: &Path, place: &Path) -> PathBuf {
    let mut path = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    for part in place.components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    path
}

/// A directory and the directories in it, with those of an unpacked export file.
pub(super) fn below(place: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(place).into_iter().flatten();
    let inner = entries.flatten().take(MAX_ENTRIES).map(|e| e.path());
    std::iter::once(place.to_owned())
        .chain(inner)
        .flat_map(|dir| [dir.join(names::CHECKPOINT_DIR), dir])
        .collect()
}

/// Reads the digest that a directory's table states; `None` if there is no table.
pub(super) fn table_digest(dir: &Path) -> Option<ChunkDigest> {
    let file = open_file(&dir.join(names::VRAM_INDEX)).ok()?;
    let mut digest = ChunkDigest::default();
    let at = file
        .metadata()
        .ok()?
        .len()
        .checked_sub(digest.0.len() as u64)?;
    file.read_exact_at(&mut digest.0, at).ok()?;
    Some(digest)
}
