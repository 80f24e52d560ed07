//! Finds the shards that can be read where they lie, inside an archive.
//!
//! An image has each large shard in a layer of its own, and neither that layer nor podman's plain tar is compressed. So
//! a restore on the archive's host can read them there, and they need not be unpacked first.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use super::{Source, SourceInner};
use crate::bytes::stream::Section;
use crate::bytes::tarread::TarReader;
use crate::error::Error;
use crate::format::compression::Compression;
use crate::format::entry::{Entry, Ledger};
use crate::format::limits::Limits;
use crate::format::names;

/// Shards with higher numbers are unpacked.
const MAX_SHARDS: usize = 4096;

/// A shard inside a larger file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InPlace {
    /// Its name in the archive: `checkpoint/vram-0000.img`.
    pub name: String,
    /// The file that it lies in. Device and inode tell whether it is still the same.
    pub path: PathBuf,
    pub device: u64,
    pub inode: u64,
    /// Offset of the shard in the file.
    pub at: u64,
    pub bytes: u64,
}

impl Source {
    /// Lists the shards that can be read in place. The archive's digests of them are not checked: the VRAM files' table
    /// has a digest of each chunk.
    pub fn shards_in_place(&self, limits: &Limits) -> Result<Vec<InPlace>, Error> {
        let shards: BTreeSet<String> = (0..MAX_SHARDS)
            .map(|n| format!("{}/{}", names::CHECKPOINT_DIR, names::vram_shard(n)))
            .collect();
        let wanted = |entry: &Entry| entry.is_file() && shards.contains(&entry.name);
        let mut ledger = Ledger::new(limits);
        let mut found = Vec::new();
        match &self.inner {
            SourceInner::Tar(tar) => {
                let all = tar.index(limits)?.into_iter().flatten();
                found.extend(all.filter(|(entry, _)| wanted(entry)));
            }
            SourceInner::Image(image) => {
                let plain = image
                    .layers()
                    .filter(|l| l.compression == Compression::None && !l.descriptor.is_encrypted());
                for layer in plain {
                    let files = layer.files();
                    let Some([file]) = files.as_deref() else {
                        continue;
                    };
                    let section = image.blobs.open(&layer.descriptor)?;
                    let mut tar = TarReader::new(section.clone(), limits, Some(layer.index));
                    let unreadable = |e| Error::from_io(&self.path, "read it", e);
                    while let Some(entry) = tar.next().map_err(unreadable)? {
                        ledger
                            .take(&entry)
                            .map_err(|bad| Error::bad(&self.path, bad))?;
                        if entry.name == *file && wanted(&entry) {
                            let content = section.part(tar.position(), entry.size);
                            found.push((entry, content));
                        }
                    }
                }
            }
            SourceInner::Directory(_) | SourceInner::Containerd(_) => {}
        }
        let found = found.into_iter().map(|(entry, content)| {
            let (path, device, inode) = place(&content)?;
            Some(InPlace {
                name: entry.name,
                path,
                device,
                inode,
                at: content.at(),
                bytes: content.left(),
            })
        });
        // Without a path it has to be unpacked.
        Ok(found.collect::<Option<_>>().unwrap_or_default())
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
