//! Memory to shards.
//!
//! Each thread takes a run of chunks, looks whether they are zero, hashes, compresses, and appends them
//! to a shard of its own, so that hashing and writing overlap and no thread waits for another. The
//! shards are synced before the table is written, and the table is renamed into place last.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::codec::{Codec, Encoder, decide, is_zero};
use super::index::{Chunk, Digest, Index, Kind, MAX_SHARDS, Region};
use super::{DEFAULT_CHUNK, Lane, LaneError, LaneFacts, usual_threads};
use crate::names;

/// Chunks that a thread takes at a time.
const RUN: usize = 8;
/// A thread that has less than this to do costs more than it brings.
const MIN_PER_THREAD: usize = 16 << 20;

/// How to write.
#[derive(Debug, Clone)]
pub struct WriteOptions {
    /// Size of a chunk: a power of two between [`super::MIN_CHUNK`] and [`super::MAX_CHUNK`].
    pub chunk_bytes: u32,
    /// A shard is closed once it is this large.
    pub shard_bytes: u64,
    /// Threads.
    pub threads: usize,
    /// Compression.
    pub codec: Codec,
    /// zstd's level.
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

/// A buffer to write. Its contents must not change meanwhile; a chunk that does will not fit its digest.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// [`Region::id`].
    pub id: &'a str,
    /// The contents.
    pub bytes: &'a [u8],
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    /// In numbers.
    pub facts: LaneFacts,
    /// The compression that was decided on.
    pub codec: Codec,
    /// Hashing, compressing and writing, in microseconds.
    pub write_us: u64,
    /// Waiting for the disk, in microseconds.
    pub sync_us: u64,
}

/// Writes a lane into an image folder. Files of an earlier one there are replaced.
///
/// `parent` is the lane before this one: chunks that are in it are not stored again. `cancel` makes it
/// end early.
///
/// # Errors
/// [`LaneError`]; nothing of the lane is left in the folder.
pub fn write(
    dir: &Path,
    sources: &[Source<'_>],
    options: &WriteOptions,
    parent: Option<&Lane>,
    cancel: &AtomicBool,
) -> Result<Written, LaneError> {
    let job = Job::new(dir, sources, options, parent, cancel)?;
    let result = job.run();
    if result.is_err() {
        job.remove();
    }
    result
}

struct Job<'a> {
    dir: &'a Path,
    sources: &'a [Source<'a>],
    options: &'a WriteOptions,
    parent: Option<&'a Lane>,
    cancel: &'a AtomicBool,
    codec: Codec,
    pieces: Vec<&'a [u8]>,
    next: AtomicUsize,
    failed: AtomicBool,
    /// The first chunk with that digest, here or in the parent.
    known: Mutex<HashMap<Digest, (Kind, u64, usize)>>,
    shards: Mutex<Vec<u64>>,
}

impl<'a> Job<'a> {
    fn new(
        dir: &'a Path,
        sources: &'a [Source<'a>],
        options: &'a WriteOptions,
        parent: Option<&'a Lane>,
        cancel: &'a AtomicBool,
    ) -> Result<Self, LaneError> {
        let size = options.chunk_bytes as usize;
        if size == 0 {
            return Err(LaneError::Invalid("chunks of 0 bytes".into()));
        }
        let pieces: Vec<&[u8]> = sources.iter().flat_map(|s| s.bytes.chunks(size)).collect();
        let parent = parent.filter(|lane| lane.index.chunk_bytes == options.chunk_bytes);
        let mut known = HashMap::new();
        if let Some(lane) = parent {
            let lengths = lane.index.lengths();
            for (i, (chunk, length)) in lane.index.chunks.iter().zip(lengths).enumerate() {
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
            shards: Mutex::default(),
        };
        job.remove();
        Ok(job)
    }

    fn run(&self) -> Result<Written, LaneError> {
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
                    Ok(Ok(shards)) => open.extend(shards),
                    // What made the others stop is what there is to tell.
                    Ok(Err(error)) => match first {
                        None | Some(LaneError::Cancelled) => first = Some(error),
                        Some(_) => {}
                    },
                    Err(_) => {
                        first.get_or_insert(LaneError::Invalid("a thread died".into()));
                    }
                }
            }
        });
        if let Some(error) = first {
            return Err(error);
        }
        let write_us = micros(start);
        let start = Instant::now();
        self.sync(&open)?;
        let mut index = Index {
            chunk_bytes: self.options.chunk_bytes,
            regions: self.sources.iter().map(region).collect(),
            shards: std::mem::take(&mut *self.shards()),
            parent: None,
            chunks,
            digest: Digest::default(),
        };
        if index.chunks.iter().any(|chunk| chunk.kind == Kind::Parent) {
            index.parent = self.parent.map(|lane| lane.index.digest);
        }
        self.put(&mut index)?;
        Ok(Written {
            facts: LaneFacts::of(&index),
            codec: self.codec,
            write_us,
            sync_us: micros(start),
        })
    }

    fn shards(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.shards.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One thread.
    fn work(&self, table: &Mutex<&mut Vec<Chunk>>) -> Result<Vec<Shard>, LaneError> {
        let longest = self
            .pieces
            .iter()
            .map(|piece| piece.len())
            .max()
            .unwrap_or(0);
        let mut encoder = Encoder::new(self.codec, self.options.level, longest)
            .map_err(|error| LaneError::Invalid(format!("cannot compress: {error}")))?;
        let mut shards: Vec<Shard> = Vec::new();
        loop {
            if self.cancel.load(Relaxed) || self.failed.load(Relaxed) {
                return Err(LaneError::Cancelled);
            }
            let from = self.next.fetch_add(RUN, Relaxed);
            let to = (from + RUN).min(self.pieces.len());
            if from >= to {
                return Ok(shards);
            }
            let mut rows = [Chunk::ZERO; RUN];
            for (row, number) in rows.iter_mut().zip(from..to) {
                *row = self.chunk(number, &mut encoder, &mut shards)?;
            }
            let mut table = table.lock().unwrap_or_else(PoisonError::into_inner);
            table[from..to].copy_from_slice(&rows[..to - from]);
        }
    }

    fn chunk(
        &self,
        number: usize,
        encoder: &mut Encoder,
        shards: &mut Vec<Shard>,
    ) -> Result<Chunk, LaneError> {
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
        if shards
            .last()
            .is_none_or(|shard| shard.end >= self.options.shard_bytes)
        {
            shards.push(self.open()?);
        }
        let Some(shard) = shards.last_mut() else {
            return Err(LaneError::Cancelled);
        };
        shard
            .file
            .write_all_at(stored, shard.end)
            .map_err(LaneError::io(&shard.path, "cannot be written"))?;
        let chunk = Chunk {
            kind,
            shard: shard.number,
            stored: stored.len() as u32,
            place: shard.end,
            digest,
        };
        shard.end += stored.len() as u64;
        self.shards()[usize::from(shard.number)] = shard.end;
        Ok(chunk)
    }

    fn open(&self) -> Result<Shard, LaneError> {
        let mut shards = self.shards();
        if shards.len() >= MAX_SHARDS {
            return Err(LaneError::Invalid(
                "too many shards: make them larger".into(),
            ));
        }
        let number = shards.len();
        let path = self.dir.join(names::lane_shard(number));
        let file = create(&path)?;
        shards.push(0);
        Ok(Shard {
            file,
            path,
            number: number as u16,
            end: 0,
        })
    }

    fn sync(&self, shards: &[Shard]) -> Result<(), LaneError> {
        if !self.options.sync {
            return Ok(());
        }
        let sync = |shard: &Shard| {
            shard
                .file
                .sync_data()
                .map_err(LaneError::io(&shard.path, "cannot be written"))
        };
        std::thread::scope(|scope| {
            let each: Vec<_> = shards
                .iter()
                .map(|s| scope.spawn(move || sync(s)))
                .collect();
            each.into_iter().try_for_each(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(LaneError::Invalid("a thread died".into())))
            })
        })
    }

    /// The table, in one step.
    fn put(&self, index: &mut Index) -> Result<(), LaneError> {
        let partial = self.dir.join(names::LANE_INDEX_PARTIAL);
        let path = self.dir.join(names::LANE_INDEX);
        let bytes = index.encode()?;
        let put = || {
            let mut file = create(&partial)?;
            let failed = LaneError::io(&partial, "cannot be written");
            file.write_all(&bytes).map_err(failed)?;
            if self.options.sync {
                file.sync_all()
                    .map_err(LaneError::io(&partial, "cannot be written"))?;
            }
            fs::rename(&partial, &path).map_err(LaneError::io(&path, "cannot be written"))?;
            if self.options.sync {
                File::open(self.dir)
                    .and_then(|dir| dir.sync_all())
                    .map_err(LaneError::io(self.dir, "cannot be written"))?;
            }
            Ok(())
        };
        put()
    }

    /// Removes whatever of a lane is in the folder, the table first.
    fn remove(&self) {
        remove(self.dir);
    }
}

/// Removes whatever of a lane is in a folder, the table first.
pub fn remove(dir: &Path) {
    let _ = fs::remove_file(dir.join(names::LANE_INDEX));
    let _ = fs::remove_file(dir.join(names::LANE_INDEX_PARTIAL));
    for number in 0..MAX_SHARDS {
        if fs::remove_file(dir.join(names::lane_shard(number))).is_err() {
            break;
        }
    }
}

struct Shard {
    file: File,
    path: PathBuf,
    number: u16,
    end: u64,
}

fn region(source: &Source<'_>) -> Region {
    Region {
        id: source.id.to_owned(),
        bytes: source.bytes.len() as u64,
    }
}

fn create(path: &Path) -> Result<File, LaneError> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(LaneError::io(path, "cannot be made"))
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
