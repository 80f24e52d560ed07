//! Finds GPU memory that checkpoints in the cache have in common with one that is pulled.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::names;
use cryopod_archive::format::oci::Manifest;
use cryopod_archive::vram::{self, Chunk, ChunkKind, VramIndex, layers};
use cryopod_registry::{BlobPiece, KnownBlobs};

use super::directory::Cache;
use crate::archives::confined::Decoding;

/// Where the chunks of GPU memory are that the cache has, by their digest and how they are stored.
pub struct InCache {
    chunks: HashMap<(vram::ChunkDigest, u8, u32), (Arc<File>, u64)>,
}

impl InCache {
    /// Reads the tables of the checkpoints in the cache that came from this place. Those of others are not for its
    /// tenants: with the digest of a chunk they would get its contents, and the time would tell what there is. The
    /// opened shards stay readable if a checkpoint is removed.
    pub fn of(cache: &Cache, place: &str) -> Self {
        let mut chunks = HashMap::new();
        let entries = cache.entries().unwrap_or_default();
        for entry in entries.iter().filter(|e| e.record.origin.place == place) {
            let images = cache.path_of(&entry.key).join(names::CHECKPOINT_DIR);
            let path = images.join(names::VRAM_INDEX);
            let Some(index) = File::open(&path)
                .ok()
                .and_then(|file| VramIndex::read(&file, &path).ok())
            else {
                continue;
            };
            let shard =
                |number: u16| File::open(images.join(names::vram_shard(number.into()))).ok();
            let shards: Vec<_> = (0u16..)
                .take(index.shards.len())
                .map(|number| shard(number).map(Arc::new))
                .collect();
            for chunk in index.chunks.iter().filter(|chunk| is_stored(chunk)) {
                if let Some(Some(file)) = shards.get(usize::from(chunk.shard)) {
                    chunks
                        .entry(key(chunk))
                        .or_insert_with(|| (Arc::clone(file), chunk.place));
                }
            }
        }
        Self { chunks }
    }
}

impl KnownBlobs for InCache {
    fn pieces(&self, first: &Path, manifest: &Manifest) -> BTreeMap<Digest, Vec<BlobPiece>> {
        let secret = manifest.layers.first().is_some_and(|l| l.is_encrypted());
        if self.chunks.is_empty() || secret {
            return BTreeMap::new();
        }
        let decoded = || {
            let table = Decoding::of(first)?.run(|| match layers::index(first)? {
                Some(mut index) => Ok(index.encode()?),
                None => Ok(Vec::new()),
            })?;
            let index = (!table.is_empty()).then(|| VramIndex::parse(&table, first));
            Ok::<_, anyhow::Error>(index.transpose()?)
        };
        let index = match decoded() {
            Ok(Some(index)) => index,
            Ok(None) => return BTreeMap::new(),
            Err(e) => {
                tracing::warn!("all of the GPU memory is fetched: {e}");
                return BTreeMap::new();
            }
        };
        let of_layer = |layer: layers::ShardLayer| {
            let chunks = index.chunks.iter();
            let chunks = chunks.filter(|chunk| is_stored(chunk) && chunk.shard == layer.shard);
            let pieces = chunks.filter_map(|chunk| {
                let (file, offset) = self.chunks.get(&key(chunk))?;
                Some(BlobPiece {
                    at: layer.at.checked_add(chunk.place)?,
                    bytes: u64::from(chunk.stored),
                    file: Arc::clone(file),
                    offset: *offset,
                })
            });
            let pieces = pieces.collect();
            (layer.digest, pieces)
        };
        layers::shards(manifest, &index)
            .into_iter()
            .map(of_layer)
            .collect()
    }
}

fn is_stored(chunk: &Chunk) -> bool {
    matches!(
        chunk.kind,
        ChunkKind::Raw | ChunkKind::Lz4 | ChunkKind::Zstd
    )
}

fn key(chunk: &Chunk) -> (vram::ChunkDigest, u8, u32) {
    (chunk.digest, chunk.kind as u8, chunk.stored)
}
