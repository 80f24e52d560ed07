//! Writes memory to shards.
//!
//! Each thread takes a run of chunks, finds those that are zero, hashes, compresses, and appends them to its own shard.
//! So hashing and writing overlap and no thread waits for another. The shards are synced before the table is written,
//! and the table is renamed into place last.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::codec::{Codec, Encoder, decide, is_zero};
use super::index::{Chunk, Digest, Index, Kind, Region};
pub use super::shards::remove;
use super::shards::{Own, Shards};
use super::{DEFAULT_CHUNK, Vram, VramError, VramFacts, usual_threads};

/// Chunks that a thread takes at a time.
const RUN: usize = 8;
/// With less work than this, a thread costs more than it gains.
const MIN_PER_THREAD: usize = 16 << 20;

#[derive(Debug, Clone)]
pub struct WriteOptions {
    /// Size of a chunk: a power of two between [`super::MIN_CHUNK`] and [`super::MAX_CHUNK`].
    pub chunk_bytes: u32,
    /// A shard is closed once it is this large.
    pub shard_bytes: u64,
    pub threads: usize,
    pub codec: Codec,
    pub level: i32,
    /// Sync everything before the table is put in place.
    pub sync: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            chunk_bytes: DEFAULT_CHUNK,
            shard_bytes: 4 << 30,
            threads: usual_threads(),
            codec: Codec::Auto,
            level: 1,
            sync: true,
        }
    }
}

/// A buffer to write. Its contents must not change during the write: a changed chunk would not match its digest.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// [`Region::id`].
    pub id: &'a str,
    pub bytes: &'a [u8],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    pub facts: VramFacts,
    /// The resolved compression.
    pub codec: Codec,
    /// Hashing, compressing and writing, in microseconds.
    pub write_us: u64,
    /// Waiting for the disk, in microseconds.
    pub sync_us: u64,
}

/// Writes VRAM files into an image directory and replaces older ones there.
///
/// `parent` is the previous checkpoint's VRAM files: chunks that it has are not stored again. `cancel` makes it end
/// early. After a [`VramError`] no VRAM files are left in the directory.
pub fn write(
    dir: &Path,
    sources: &[Source<'_>],
    options: &WriteOptions,
    parent: Option<&Vram>,
    cancel: &AtomicBool,
) -> Result<Written, VramError> {
    let job = Job::new(dir, sources, options, parent, cancel)?;
    let result = job.run();
    if result.is_err() {
        remove(dir);
    }
    result
}

struct Job<'a> {
    dir: &'a Path,
    sources: &'a [Source<'a>],
    options: &'a WriteOptions,
    parent: Option<&'a Vram>,
    cancel: &'a AtomicBool,
    codec: Codec,
    pieces: Vec<&'a [u8]>,
    next: AtomicUsize,
    failed: AtomicBool,
    /// The first chunk with that digest, here or in the parent.
    known: Mutex<HashMap<Digest, (Kind, u64, usize)>>,
    shards: Shards<'a>,
}

impl<'a> Job<'a> {
    fn new(
        dir: &'a Path,
        sources: &'a [Source<'a>],
        options: &'a WriteOptions,
        parent: Option<&'a Vram>,
        cancel: &'a AtomicBool,
    ) -> Result<Self, VramError> {
        let size = options.chunk_bytes as usize;
        if size == 0 {
            return Err(VramError::Invalid("chunks of 0 bytes".into()));
        }
        let pieces: Vec<&[u8]> = sources.iter().flat_map(|s| s.bytes.chunks(size)).collect();
        let parent = parent.filter(|vram| vram.index.chunk_bytes == options.chunk_bytes);
        let mut known = HashMap::new();
        if let Some(vram) = parent {
            let lengths = vram.index.lengths();
            for (i, (chunk, length)) in vram.index.chunks.iter().zip(lengths).enumerate() {
                if chunk.kind != Kind::Zero {
                    known.insert(chunk.digest, (Kind::Parent, i as u64, length as usize));
                }
            }
        }
        let data: Vec<&[u8]> = sources.iter().map(|source| source.bytes).collect();
        let job = Self {
            dir,
            sources,
            options,
            parent,
            cancel,
            codec: decide(options.codec, &data),
            pieces,
            next: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
            known: Mutex::new(known),
            shards: Shards::new(dir, options.shard_bytes, options.sync),
        };
        remove(dir);
        Ok(job)
    }

    fn run(&self) -> Result<Written, VramError> {
        let start = Instant::now();
        let total: usize = self.sources.iter().map(|source| source.bytes.len()).sum();
        let threads = self
            .options
            .threads
            .clamp(1, 256)
            .min(total / MIN_PER_THREAD + 1);
        let mut chunks = vec![Chunk::ZERO; self.pieces.len()];
        let table = Mutex::new(&mut chunks);
        let mut open = Vec::new();
        let mut first = None;
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|_| {
                    scope.spawn(|| {
                        let done = self.work(&table);
                        self.failed.fetch_or(done.is_err(), Relaxed);
                        done
                    })
                })
                .collect();
            for worker in workers {
                match worker.join() {
                    Ok(Ok(own)) => open.push(own),
                    // Report the error that made the others stop.
                    Ok(Err(error)) => match first {
                        None | Some(VramError::Cancelled) => first = Some(error),
                        Some(_) => {}
                    },
                    Err(_) => {
                        first.get_or_insert(VramError::Invalid("a thread died".into()));
                    }
                }
            }
        });
        if let Some(error) = first {
            return Err(error);
        }
        let write_us = micros(start);
        let start = Instant::now();
        self.shards.sync(&open)?;
        let mut index = Index {
            chunk_bytes: self.options.chunk_bytes,
            regions: self.sources.iter().map(region).collect(),
            shards: self.shards.take_sizes(),
            parent: None,
            parent_at: Vec::new(),
            chunks,
            digest: Digest::default(),
        };
        let builds_on_it = index.chunks.iter().any(|chunk| chunk.kind == Kind::Parent);
        if let Some(vram) = self.parent.filter(|_| builds_on_it) {
            index.parent = Some(vram.index.digest);
            index.parent_at = places(self.dir, vram.dir());
        }
        self.shards.put(&mut index)?;
        Ok(Written {
            facts: VramFacts::of(&index),
            codec: self.codec,
            write_us,
            sync_us: micros(start),
        })
    }

    fn work(&self, table: &Mutex<&mut Vec<Chunk>>) -> Result<Own, VramError> {
        let longest = self
            .pieces
            .iter()
            .map(|piece| piece.len())
            .max()
            .unwrap_or(0);
        let mut encoder = Encoder::new(self.codec, self.options.level, longest)
            .map_err(|error| VramError::Invalid(format!("cannot compress: {error}")))?;
        let mut own = Own::default();
        loop {
            if self.cancel.load(Relaxed) || self.failed.load(Relaxed) {
                return Err(VramError::Cancelled);
            }
            let from = self.next.fetch_add(RUN, Relaxed);
            let to = (from + RUN).min(self.pieces.len());
            if from >= to {
                return Ok(own);
            }
            let mut rows = [Chunk::ZERO; RUN];
            for (row, number) in rows.iter_mut().zip(from..to) {
                *row = self.chunk(number, &mut encoder, &mut own)?;
            }
            let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
            table[from..to].copy_from_slice(&rows[..to - from]);
        }
    }

    fn chunk(
        &self,
        number: usize,
        encoder: &mut Encoder,
        own: &mut Own,
    ) -> Result<Chunk, VramError> {
        let piece = self.pieces[number];
        if is_zero(piece) {
            return Ok(Chunk::ZERO);
        }
        let digest = Digest::of(piece);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match known.get(&digest) {
            Some((kind, place, length)) if *length == piece.len() => {
                return Ok(Chunk {
                    kind: *kind,
                    place: *place,
                    digest,
                    ..Chunk::ZERO
                });
            }
            _ => known.insert(digest, (Kind::Same, number as u64, piece.len())),
        };
        drop(known);
        let (kind, stored) = encoder.encode(piece);
        let (shard, place) = self.shards.append(own, stored)?;
        Ok(Chunk {
            kind,
            shard,
            stored: stored.len() as u32,
            place,
            digest,
        })
    }
}

/// Paths from one directory to another: relative to its parent directory, and absolute.
fn places(from: &Path, to: &Path) -> Vec<String> {
    let (Ok(from), Ok(to)) = (from.canonicalize(), to.canonicalize()) else {
        return Vec::new();
    };
    let beside = match (from.parent(), to.parent(), to.file_name()) {
        (Some(a), Some(b), Some(name)) if a == b => Some(Path::new("..").join(name)),
        _ => None,
    };
    let all = beside.into_iter().chain([to]);
    all.filter_map(|path| path.into_os_string().into_string().ok())
        .collect()
}

fn region(source: &Source<'_>) -> Region {
    Region {
        id: source.id.to_owned(),
        bytes: source.bytes.len() as u64,
    }
}

pub(super) fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
