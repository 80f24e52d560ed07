//! Finds the VRAM files in the layers of an image.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use super::index::MAX_BYTES;
use super::{VramError, VramIndex};
use crate::bytes::stream::decompressed;
use crate::format::digest::Digest;
use crate::format::names;
use crate::format::oci::{Manifest, annotation, media};

/// The unit of a tar's headers and contents, in bytes.
const BLOCK: u64 = 512;
/// Two blocks of zeros end a tar.
const END: u64 = 2 * BLOCK;
/// A header, and at most three more for a long name.
const MAX_HEADER: u64 = 4 * BLOCK;

/// Reads the table of chunks in an image's first layer, which holds the small files. `None`: it has none.
pub fn index(first_layer: &Path) -> Result<Option<VramIndex>, VramError> {
    let unreadable = || VramError::io(first_layer, "cannot be read");
    let read = || -> io::Result<Option<Vec<u8>>> {
        let mut tar = tar::Archive::new(decompressed(File::open(first_layer)?)?);
        let wanted = Path::new(names::CHECKPOINT_DIR).join(names::VRAM_INDEX);
        for entry in tar.entries()? {
            let mut entry = entry?;
            if entry.path()? == wanted {
                let mut bytes = Vec::new();
                entry.by_ref().take(MAX_BYTES).read_to_end(&mut bytes)?;
                return Ok(Some(bytes));
            }
        }
        Ok(None)
    };
    let bytes = read().map_err(unreadable())?;
    bytes
        .map(|bytes| VramIndex::parse(&bytes, first_layer))
        .transpose()
}

/// A shard that is a layer of its own, as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardLayer {
    pub digest: Digest,
    pub shard: u16,
    /// Offset of the shard in the layer.
    pub at: u64,
}

/// Lists the shards that are layers of their own, uncompressed. What the manifest states is not verified: it is true if
/// the layer, put together by it, has its digest.
pub fn shards(manifest: &Manifest, index: &VramIndex) -> Vec<ShardLayer> {
    let name = |number: u16| {
        format!(
            "{}/{}",
            names::CHECKPOINT_DIR,
            names::vram_shard(number.into())
        )
    };
    let mut found = Vec::new();
    for layer in &manifest.layers {
        let files = layer.annotations.get(annotation::LAYER_FILES);
        let files: Option<Vec<String>> = files.and_then(|f| serde_json::from_str(f).ok());
        let Some([file]) = files
            .as_deref()
            .filter(|_| layer.media_type == media::LAYER)
        else {
            continue;
        };
        let numbered = index.shards.iter().zip(0u16..);
        let Some((bytes, shard)) = numbered.into_iter().find(|(_, n)| name(*n) == *file) else {
            continue;
        };
        let rest = bytes.checked_next_multiple_of(BLOCK);
        let rest = rest.and_then(|rest| rest.checked_add(END));
        let at = rest.and_then(|rest| layer.size.checked_sub(rest));
        if let Some(at) = at.filter(|at| (BLOCK..=MAX_HEADER).contains(at)) {
            found.push(ShardLayer {
                digest: layer.digest.clone(),
                shard,
                at,
            });
        }
    }
    found
}
