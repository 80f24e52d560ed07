//! Makes VRAM files that build on others independent of them.
//!
//! Chunks are copied in their stored form, compressed or not, after their digests have been checked.

use cryopod_host::micros;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::index::{Chunk, ChunkDigest, ChunkKind, VramIndex};
use super::shards::{Own, Shards, remove};
use super::write::{WriteOptions, Written};
use super::{RUN, Vram, VramError, VramFacts};

/// Writes the complete `vram` into a directory. Of the options, it uses the threads, the size of shards, and whether to
/// sync. After a [`VramError`] no VRAM files are left in the directory.
pub fn flatten(
    vram: &Vram,
    dir: &Path,
    options: &WriteOptions,
    cancel: &AtomicBool,
) -> Result<Written, VramError> {
    let result = run(vram, dir, options, cancel);
    if result.is_err() {
        remove(dir);
    }
    result
}

fn run(
    vram: &Vram,
    dir: &Path,
    options: &WriteOptions,
    cancel: &AtomicBool,
) -> Result<Written, VramError> {
    let start = Instant::now();
    let shards = Shards::new(dir, options.shard_bytes, options.sync);
    // The first chunk of each content is stored; the others refer to it.
    let mut first: HashMap<(ChunkDigest, u32), usize> = HashMap::new();
    let mut chunks = vram.index.chunks.clone();
    let mut stored = Vec::new();
    for (number, (chunk, length)) in chunks.iter_mut().zip(vram.index.lengths()).enumerate() {
        if chunk.kind == ChunkKind::Zero {
            continue;
        }
        match first.get(&(chunk.digest, length)) {
            Some(other) => {
                *chunk = Chunk {
                    kind: ChunkKind::Same,
                    place: *other as u64,
                    digest: chunk.digest,
                    ..Chunk::ZERO
                };
            }
            None => {
                first.insert((chunk.digest, length), number);
                stored.push(number);
            }
        }
    }
    let table = Mutex::new(&mut chunks);
    let owns = Mutex::new(Vec::new());
    let queue = Mutex::new(stored.chunks(RUN));
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
    vram.on_threads(options.threads, cancel, &|failed, scratch| {
        let mut own = Own::default();
        let mut plain = Vec::new();
        for number in std::iter::from_fn(next).flatten() {
            if failed() {
                return Err(VramError::Cancelled);
            }
            let kind = vram.as_stored(*number, scratch, &mut plain)?;
            let (shard, place) = shards.append(&mut own, &scratch.stored)?;
            let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
            let row = &mut table[*number];
            *row = Chunk {
                kind,
                shard,
                stored: scratch.stored.len() as u32,
                place,
                digest: row.digest,
            };
        }
        owns.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(own);
        Ok(())
    })?;
    let write_us = micros(start.elapsed());
    let start = Instant::now();
    shards.sync(&owns.into_inner().unwrap_or_else(PoisonError::into_inner))?;
    let mut index = VramIndex {
        chunk_bytes: vram.index.chunk_bytes,
        regions: vram.index.regions.clone(),
        shards: shards.take_sizes(),
        parent: None,
        parent_at: Vec::new(),
        chunks,
        digest: ChunkDigest::default(),
    };
    shards.put(&mut index)?;
    Ok(Written {
        ahead: 0,
        changed: 0,
        facts: VramFacts::of(&index),
        write_us,
        sync_us: micros(start.elapsed()),
    })
}
