//! Shards that lie in an archive. A restore reads them there, so that nothing of them is unpacked or copied.
//!
//! `cryopod import` writes the file of places into a directory of its own, and the runtime searches it for this one
//! restore. Only a directory that nobody else can write to counts, and only the table that the places were made for. Each
//! chunk is compared with its digest in the table, even where the configuration turns that off: nothing else has checked
//! an archive that is read in place.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use cryopod_host::files::{own_directory, read_bounded_from};

use super::file::open_file;
use super::{ChunkDigest, VramError, VramIndex};
use crate::bytes::stream::Section;
use crate::format::names;
use crate::source::InPlace;

const MAX_BYTES: u64 = 16 << 20;

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Places {
    /// Digest of the VRAM files' table.
    table: String,
    /// By the shard's name in the image directory.
    shards: BTreeMap<String, InPlace>,
}

/// Writes the file of places into a directory, for the table of an image directory.
pub fn write(images: &Path, shards: &[InPlace], directory: &Path) -> Result<(), VramError> {
    let table = images.join(names::VRAM_INDEX);
    let index = VramIndex::read(&open_file(&table)?, &table)?;
    let shards = shards.iter().map(|shard| {
        let name = shard.name.rsplit('/').next().unwrap_or_default();
        (name.to_owned(), shard.clone())
    });
    let places = Places {
        table: index.digest.to_string(),
        shards: shards.collect(),
    };
    let path = directory.join(names::VRAM_PLACES);
    let text = serde_json::to_vec(&places).map_err(|e| VramError::Invalid(e.to_string()))?;
    fs::write(&path, text).map_err(VramError::io(&path, "cannot be written"))
}

/// Finds the places of a table's shards in the searched directories.
pub(super) fn find(search: &[PathBuf], table: ChunkDigest) -> Result<Option<Places>, VramError> {
    for directory in search {
        let path = directory.join(names::VRAM_PLACES);
        if path.symlink_metadata().is_err() || !own_directory(directory) {
            continue;
        }
        let text = read_bounded_from(open_file(&path)?, MAX_BYTES);
        let text = text.map_err(VramError::io(&path, "cannot be read"))?;
        let places: Places = serde_json::from_slice(&text)
            .map_err(|e| VramError::damaged(&path, format!("not a list of places: {e}")))?;
        if places.table == table.to_string() {
            return Ok(Some(places));
        }
    }
    Ok(None)
}

impl Places {
    pub(super) fn of(&self, shard: &str) -> Option<&InPlace> {
        self.shards.get(shard)
    }
}

impl InPlace {
    /// Opens the section of the file that is the shard, or the `age` stream with the shard.
    ///
    /// # Errors
    /// It is another file by now.
    pub(crate) fn open(&self) -> Result<Section, VramError> {
        let file = open_file(&self.path)?;
        let meta = file
            .metadata()
            .map_err(VramError::io(&self.path, "cannot be read"))?;
        let age = self.age.map(|age| (age.at, age.bytes));
        let (at, bytes) = age.unwrap_or((self.at, self.bytes));
        let end = at.checked_add(bytes);
        if (meta.dev(), meta.ino()) != (self.device, self.inode)
            || end.is_none_or(|end| end > meta.len())
        {
            return Err(VramError::Invalid(format!(
                "{}: the archive has changed while it was imported; import it again",
                self.path.display()
            )));
        }
        Ok(Section::new(Arc::new(file), at, bytes))
    }
}
