//! Checks the VRAM files of an archive chunk by chunk, as its shards stream by.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::Bad;
use crate::format::names;
use crate::metadata::Metadata;
use crate::vram::{Chunk, ChunkDigest, ChunkKind, VramIndex, codec};

/// The shards and chunks that the VRAM files' table lists.
#[derive(Debug)]
pub(super) struct SeenShards {
    table: VramIndex,
    by_name: BTreeMap<String, SeenShard>,
    checked: AtomicU64,
}

#[derive(Debug, Default)]
struct SeenShard {
    bytes: u64,
    /// The stored chunks by their position, and the decompressed length of each.
    chunks: Vec<(Chunk, u32)>,
}

impl SeenShards {
    pub(super) fn new(table: &[u8]) -> Result<Self, Bad> {
        let name = format!("{}/{}", names::CHECKPOINT_DIR, names::VRAM_INDEX);
        let bad = |reason: String| Bad::Content {
            name: name.clone(),
            reason,
        };
        let index = VramIndex::parse(table, Path::new(names::VRAM_INDEX))
            .map_err(|e| bad(e.to_string()))?;
        let mut shards: Vec<SeenShard> = index
            .shards
            .iter()
            .map(|bytes| SeenShard {
                bytes: *bytes,
                chunks: Vec::new(),
            })
            .collect();
        for (chunk, length) in index.chunks.iter().zip(index.lengths()) {
            if matches!(
                chunk.kind,
                ChunkKind::Raw | ChunkKind::Lz4 | ChunkKind::Zstd
            ) {
                let shard = shards.get_mut(usize::from(chunk.shard));
                shard
                    .ok_or_else(|| bad("a chunk of no shard".into()))?
                    .chunks
                    .push((*chunk, length));
            }
        }
        for shard in &mut shards {
            shard.chunks.sort_by_key(|(chunk, _)| chunk.place);
        }
        let place = |number| format!("{}/{}", names::CHECKPOINT_DIR, names::vram_shard(number));
        let by_name = shards
            .into_iter()
            .enumerate()
            .map(|(n, shard)| (place(n), shard))
            .collect();
        Ok(Self {
            table: index,
            by_name,
            checked: AtomicU64::new(0),
        })
    }

    /// Checks that the metadata has the digest of this table.
    pub(super) fn recorded(shards: Option<&Self>, metadata: &Metadata) -> Result<(), Bad> {
        let Some(vram) = &metadata.gpu.vram else {
            return Ok(());
        };
        let table = format!("{}/{}", names::CHECKPOINT_DIR, names::VRAM_INDEX);
        match shards {
            Some(shards) if shards.table.digest.to_string() == vram.digest => Ok(()),
            Some(shards) => Err(Bad::Content {
                name: table,
                reason: format!(
                    "the table of another checkpoint: its digest is {}, {} says {}",
                    shards.table.digest,
                    names::METADATA,
                    vram.digest
                ),
            }),
            None => Err(Bad::MissingFile(table)),
        }
    }

    pub(super) fn table(&self) -> &VramIndex {
        &self.table
    }

    /// Returns the parent's numbers of the chunks that are stored there.
    pub(super) fn in_parent(&self) -> Vec<usize> {
        let chunks = self.table.chunks.iter();
        let mut numbers: Vec<usize> = chunks
            .filter(|chunk| chunk.kind == ChunkKind::Parent)
            .map(|chunk| usize::try_from(chunk.place).unwrap_or(usize::MAX))
            .collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    pub(super) fn checked(&self) -> u64 {
        self.checked.load(Ordering::Relaxed)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &String> {
        self.by_name.keys()
    }

    /// Checks a shard's chunks; `false` if the file is not a shard of the VRAM files.
    pub(super) fn check(&self, name: &str, bytes: u64, reader: &mut dyn Read) -> io::Result<bool> {
        let Some(shard) = self.by_name.get(name) else {
            return Ok(false);
        };
        let bad = |reason: String| {
            io::Error::from(Bad::Content {
                name: name.into(),
                reason,
            })
        };
        if shard.bytes != bytes {
            return Err(bad(format!(
                "{bytes} bytes, the VRAM files' table says {}",
                shard.bytes
            )));
        }
        let (mut at, mut stored, mut content) = (0, Vec::new(), Vec::new());
        for (chunk, length) in &shard.chunks {
            let wrong = |what: &str| bad(format!("the chunk at {} {what}", chunk.place));
            let gap = chunk
                .place
                .checked_sub(at)
                .ok_or_else(|| wrong("lies over another"))?;
            io::copy(&mut (&mut *reader).take(gap), &mut io::sink())?;
            stored.resize(chunk.stored as usize, 0);
            reader.read_exact(&mut stored).map_err(|e| match e.kind() {
                io::ErrorKind::UnexpectedEof => wrong("lies beyond the end"),
                _ => e,
            })?;
            at = chunk.place + u64::from(chunk.stored);
            let plain = if chunk.kind == ChunkKind::Raw {
                &stored
            } else {
                content.resize(*length as usize, 0);
                codec::decode(chunk.kind, &stored, &mut content).map_err(|what| wrong(&what))?;
                &content
            };
            if ChunkDigest::of(plain) != chunk.digest {
                return Err(wrong("has another digest than the table says"));
            }
            self.checked.fetch_add(1, Ordering::Relaxed);
        }
        io::copy(reader, &mut io::sink())?;
        Ok(true)
    }
}
