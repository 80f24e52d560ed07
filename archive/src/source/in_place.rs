//! Finds the shards that can be read where they lie, inside an archive.
//!
//! An image has each large shard in a layer of its own, and neither that layer nor podman's plain tar is compressed. So
//! a restore on the archive's host can read them there, and they need not be unpacked first. A layer that is encrypted
//! is decrypted in pieces, from any position.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::{Source, SourceInner};
use crate::bytes::stream::{Section, Stream};
use crate::bytes::tarread::TarReader;
use crate::error::Error;
use crate::format::compression::Compression;
use crate::format::entry::{Entry, Ledger};
use crate::format::limits::Limits;
use crate::format::names;

/// Shards with higher numbers are unpacked.
const MAX_SHARDS: usize = 4096;

/// A shard in an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FoundShard {
    /// Its name in the archive: `checkpoint/vram-0000.img`.
    name: String,
    /// The image's layer; `None` for a tar.
    layer: Option<usize>,
    /// Offset in the tar, or in the layer's.
    at: u64,
    bytes: u64,
}

/// A shard inside a larger file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InPlace {
    /// Its name in the archive.
    #[serde(skip)]
    pub name: String,
    /// The file that it lies in. Device and inode tell whether it is still the same.
    pub path: PathBuf,
    pub device: u64,
    pub inode: u64,
    /// Offset of the shard in the file, or in what the `age` stream holds.
    pub at: u64,
    pub bytes: u64,
    /// The stream that it lies in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age: Option<AgeSection>,
}

/// The part of a file that is an `age` stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgeSection {
    pub at: u64,
    pub bytes: u64,
}

impl Source {
    /// Finds the shards that can be read in place; for [`Source::shards_in_place`]. The archive's digests of them are not
    /// checked: the VRAM files' table has a digest of each chunk.
    pub fn find_shards(&self, limits: &Limits) -> Result<Vec<FoundShard>, Error> {
        let shards: BTreeSet<String> = (0..MAX_SHARDS)
            .map(|n| format!("{}/{}", names::CHECKPOINT_DIR, names::vram_shard(n)))
            .collect();
        let wanted = |entry: &Entry| entry.is_file() && shards.contains(&entry.name);
        let mut ledger = Ledger::new(limits);
        let mut found = Vec::new();
        match &self.inner {
            SourceInner::Tar(tar) => {
                let all = tar.index(limits)?.into_iter().flatten();
                let all = all.filter(|(entry, _)| wanted(entry));
                found.extend(all.map(|(entry, content)| FoundShard {
                    name: entry.name,
                    layer: None,
                    at: content.at().saturating_sub(tar.section().at()),
                    bytes: content.left(),
                }));
            }
            SourceInner::Image(image) => {
                for layer in image.layers() {
                    let files = layer.files();
                    let Some([file]) = files
                        .as_deref()
                        .filter(|_| layer.compression == Compression::None)
                    else {
                        continue;
                    };
                    if !shards.contains(file) {
                        continue;
                    }
                    let section = image.blobs.open(&layer.descriptor)?;
                    let content: Box<dyn Stream> = match layer.descriptor.is_encrypted() {
                        true => Box::new(image.identities.decrypt_parts(&section, &self.path)?),
                        false => Box::new(section),
                    };
                    let mut tar = TarReader::new(content, limits, Some(layer.index));
                    let unreadable = |e| Error::from_io(&self.path, "read it", e);
                    while let Some(entry) = tar.next().map_err(unreadable)? {
                        ledger
                            .take(&entry)
                            .map_err(|bad| Error::bad(&self.path, bad))?;
                        if entry.name == *file && wanted(&entry) {
                            found.push(FoundShard {
                                name: entry.name,
                                layer: Some(layer.index),
                                at: tar.position(),
                                bytes: entry.size,
                            });
                        }
                    }
                }
            }
            SourceInner::Directory(_) | SourceInner::Containerd(_) => {}
        }
        Ok(found)
    }

    /// Returns the files that these shards lie in. They may be what a decoder says that a stranger took over: what this
    /// archive does not have is left out.
    pub fn shards_in_place(&self, found: Vec<FoundShard>) -> Result<Vec<InPlace>, Error> {
        let mut places = Vec::new();
        for shard in found {
            let (section, encrypted) = match (&self.inner, shard.layer) {
                (SourceInner::Tar(tar), None) => (tar.section().clone(), false),
                (SourceInner::Image(image), Some(layer)) => {
                    let mut layers = image
                        .layers()
                        .filter(|l| l.compression == Compression::None);
                    let Some(layer) = layers.find(|l| l.index == layer) else {
                        continue;
                    };
                    let encrypted = layer.descriptor.is_encrypted();
                    (image.blobs.open(&layer.descriptor)?, encrypted)
                }
                _ => continue,
            };
            let content = section.part(shard.at, shard.bytes);
            if content.left() != shard.bytes {
                continue;
            }
            let Some((path, device, inode)) = place(&section) else {
                // Without a path all has to be unpacked.
                return Ok(Vec::new());
            };
            places.push(InPlace {
                name: shard.name,
                path,
                device,
                inode,
                at: if encrypted { shard.at } else { content.at() },
                bytes: shard.bytes,
                age: encrypted.then(|| AgeSection {
                    at: section.at(),
                    bytes: section.left(),
                }),
            });
        }
        Ok(places)
    }
}

/// The path of an open file, if it still leads to it.
fn place(content: &Section) -> Option<(PathBuf, u64, u64)> {
    let open = content.file().metadata().ok()?;
    let link = format!("/proc/self/fd/{}", content.file().as_raw_fd());
    let path = fs::read_link(link).ok()?;
    path.to_str()?;
    let there = fs::symlink_metadata(&path).ok()?;
    let same = (there.dev(), there.ino()) == (open.dev(), open.ino());
    same.then_some((path, open.dev(), open.ino()))
}
