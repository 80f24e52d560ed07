//! Reserves disk space for the metadata before the freeze and writes it there afterwards.

use std::fs::{self, File};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};

use cryopod_host::files::{create_private, if_there, sync_directory};
use serde::Serialize;

use super::MetadataError;
use crate::format::names;

/// Disk space reserved for the metadata before a container is frozen, in bytes.
pub(super) const RESERVE_BYTES: u64 = 256 << 10;

/// The metadata's place in an image directory, reserved before the container is frozen.
///
/// Creating it proves that the directory is writable and has room for the metadata. So a full or read-only disk shows
/// while the container still runs. If dropped without [`MetadataSlot::commit`], it leaves nothing behind.
#[derive(Debug)]
pub struct MetadataSlot {
    file: File,
    partial: PathBuf,
    path: PathBuf,
    done: bool,
}

impl MetadataSlot {
    /// Reserves the place. First removes the metadata and the store reference of an earlier checkpoint in the
    /// directory: its images are about to be overwritten. Fails with [`MetadataError::Write`] if the directory cannot
    /// be written or is full.
    pub fn reserve(image_dir: &Path) -> Result<Self, MetadataError> {
        let partial = image_dir.join(names::METADATA_PARTIAL);
        let path = image_dir.join(names::METADATA);
        let write = |source| MetadataError::Write {
            path: path.clone(),
            source,
        };
        let reference = image_dir.join(names::STORE_REFERENCE);
        for old in [&partial, &path, &reference] {
            if_there(fs::remove_file(old)).map_err(write)?;
        }
        let file = create_private(&partial).map_err(write)?;
        let mut slot = Self {
            file,
            partial,
            path: path.clone(),
            done: false,
        };
        // Writes zeros to get real blocks instead of a sparse file; some file systems lack fallocate.
        let zeros = [0u8; 64 << 10];
        for _ in 0..RESERVE_BYTES / zeros.len() as u64 {
            slot.file.write_all(&zeros).map_err(write)?;
        }
        slot.file.sync_all().map_err(write)?;
        Ok(slot)
    }

    /// Returns the path of the file until it is committed.
    pub fn partial(&self) -> &Path {
        &self.partial
    }

    /// Writes the metadata under its final name, durably.
    ///
    /// # Errors
    /// [`MetadataError::Write`]; then nothing has the final name.
    pub fn commit(mut self, metadata: &impl Serialize) -> Result<(), MetadataError> {
        let write = |path: &Path| {
            let path = path.to_owned();
            move |source| MetadataError::Write { path, source }
        };
        let mut text = serde_json::to_vec_pretty(metadata)
            .map_err(|e| write(&self.path)(io::Error::other(e)))?;
        text.push(b'\n');
        self.file.rewind().map_err(write(&self.path))?;
        self.file.write_all(&text).map_err(write(&self.path))?;
        self.file
            .set_len(text.len() as u64)
            .and_then(|()| self.file.sync_all())
            .map_err(write(&self.path))?;
        fs::rename(&self.partial, &self.path).map_err(write(&self.path))?;
        self.done = true;
        if let Some(dir) = self.path.parent() {
            sync_directory(dir).map_err(write(&self.path))?;
        }
        Ok(())
    }
}

impl Drop for MetadataSlot {
    fn drop(&mut self) {
        if !self.done {
            let _ = fs::remove_file(&self.partial);
        }
    }
}
