//! Writes memory to shards.
//!
//! Each thread takes a run of chunks, finds those that are zero, hashes, compresses, and appends them to its own shard.
//! So hashing and writing overlap and no thread waits for another. The shards are synced before the table is written,
//! and the table is renamed into place last.
//!
//! Memory that another program fills from its start to its end can be written meanwhile ([`Writer::ahead`]). What was
//! taken too early does not fit its digest in the end, and is written again.

use cryopod_host::micros;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::codec::{Codec, Encoder, is_zero};
use super::index::{Chunk, ChunkDigest, ChunkKind, Region, VramIndex};
pub use super::shards::remove;
use super::shards::{Own, Shards};
use super::{DEFAULT_CHUNK, RUN, Vram, VramError, VramFacts, run_on, usual_threads};

/// With less work than this, a thread costs more than it gains.
const MIN_PER_THREAD: usize = 16 << 20;
/// Of so many chunks whose digests others have made, one is hashed here, too.
const COMPARED: u64 = 64;
/// How often a thread looks for more that has been filled.
const POLL: Duration = Duration::from_millis(1);

/// A thread's work. It has its own buffers and shards.
type WriteWork<'a> = dyn Fn(&mut Encoder, &mut Own) -> Result<(), VramError> + Sync + 'a;

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

/// Memory to write ahead.
#[derive(Debug, Clone, Copy)]
pub struct Ahead<'a> {
    pub bytes: &'a [u8],
    /// It changes no more: what is written of it needs no second look.
    pub complete: bool,
    /// Its chunks' digests, if they are made elsewhere, before any of it is filled. Chunks that are not
    /// [needed](Writer::needed) may then be missing. Only for memory that is complete.
    pub digests: Option<&'a OnceLock<Vec<ChunkDigest>>>,
}

/// A buffer to write. Its contents must not change during the write: a changed chunk would not match its digest.
#[derive(Debug, Clone, Copy)]
pub struct MemorySource<'a> {
    /// [`Region::id`].
    pub id: &'a str,
    pub bytes: &'a [u8],
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Written {
    pub facts: VramFacts,
    /// Chunks that were written ahead.
    pub ahead: u64,
    /// How many of these were written again, as they had changed.
    pub changed: u64,
    /// Hashing, compressing and writing in [`Writer::finish`], in microseconds.
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
    sources: &[MemorySource<'_>],
    options: &WriteOptions,
    parent: Option<&Vram>,
    cancel: &AtomicBool,
) -> Result<Written, VramError> {
    Writer::new(dir, options, parent, cancel).finish(sources, &[])
}

/// Writes VRAM files in two steps: ahead, what is being filled, and the rest.
pub struct Writer<'a> {
    dir: &'a Path,
    options: &'a WriteOptions,
    parent: Option<&'a Vram>,
    cancel: &'a AtomicBool,
    failed: AtomicBool,
    /// The first chunk with that digest, here or in the parent, and its length.
    known: Mutex<HashMap<ChunkDigest, (ChunkKind, u64, usize)>>,
    shards: Shards<'a>,
    /// Shards that a thread may append to.
    open: Mutex<Vec<Own>>,
    /// What was written ahead: for each memory its chunks, as far as they were taken.
    ahead: Vec<Vec<Option<Chunk>>>,
    /// Which memory was complete then.
    settled: Vec<bool>,
    /// The digests of each memory that others have made.
    digests: Vec<Vec<ChunkDigest>>,
    /// The digest of a whole chunk of zeros.
    zeros: OnceLock<ChunkDigest>,
    not_copied: AtomicUsize,
    complete: bool,
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        if !self.complete {
            remove(self.dir);
        }
    }
}

impl<'a> Writer<'a> {
    /// Removes older VRAM files from the directory. No VRAM files are left there if the writer is dropped before it has
    /// finished.
    pub fn new(
        dir: &'a Path,
        options: &'a WriteOptions,
        parent: Option<&'a Vram>,
        cancel: &'a AtomicBool,
    ) -> Self {
        remove(dir);
        Self {
            dir,
            options,
            parent: parent.filter(|vram| vram.index.chunk_bytes == options.chunk_bytes),
            cancel,
            failed: AtomicBool::new(false),
            known: Mutex::default(),
            shards: Shards::new(dir, options.shard_bytes, options.sync),
            open: Mutex::default(),
            ahead: Vec::new(),
            settled: Vec::new(),
            digests: Vec::new(),
            zeros: OnceLock::new(),
            not_copied: AtomicUsize::new(0),
            complete: false,
        }
    }

    /// Returns for each of these whole chunks whether its bytes are needed: neither zeros are, nor what the parent has.
    pub fn needed(
        options: &WriteOptions,
        parent: Option<&Vram>,
        digests: &[ChunkDigest],
    ) -> Vec<bool> {
        let size = options.chunk_bytes as usize;
        let known = known_of(parent.filter(|vram| vram.index.chunk_bytes == options.chunk_bytes));
        let zeros = ChunkDigest::of(&vec![0; size]);
        let needed = |digest: &ChunkDigest| {
            *digest != zeros
                && known
                    .get(digest)
                    .is_none_or(|(_, _, length)| *length != size)
        };
        digests.iter().map(needed).collect()
    }

    /// Writes memory while another program fills it, until `over`. `filled` tells for each memory how many bytes from its
    /// start are probably there. Memory that is not complete may change in any way.
    pub fn ahead(
        &mut self,
        memory: &[Ahead<'_>],
        filled: &[AtomicUsize],
        over: &AtomicBool,
    ) -> Result<(), VramError> {
        let size = self.chunk_bytes()?;
        self.known = Mutex::new(self.known_of_parent());
        let rows = Mutex::new(vec![Vec::new(); memory.len()]);
        let taken = Mutex::new(vec![0; memory.len()]);
        // A run of chunks that are complete: the memory's number, its bytes, and the first chunk's number.
        let next = || {
            let mut taken = lock(&taken);
            let mut each = memory.iter().zip(filled).zip(taken.iter_mut()).enumerate();
            let ready =
                |(_, ((ahead, filled), from)): &(_, ((&Ahead<'_>, &AtomicUsize), &mut usize))| {
                    (**from + RUN) * size <= filled.load(Relaxed).min(ahead.bytes.len())
                };
            let (m, ((ahead, _), from)) = each.find(ready)?;
            *from += RUN;
            Some((m, ahead, *from - RUN))
        };
        let digest_of = |ahead: &Ahead<'_>, i: usize| {
            let digests = ahead.digests.and_then(OnceLock::get);
            digests.and_then(|digests| digests.get(i)).copied()
        };
        self.on_threads(usize::MAX, &|encoder, own| {
            let mut copy = vec![0; size];
            loop {
                self.check_cancelled()?;
                let Some((m, ahead, from)) = next() else {
                    if over.load(Relaxed) {
                        return Ok(());
                    }
                    std::thread::sleep(POLL);
                    continue;
                };
                for i in from..from + RUN {
                    let mut piece = &ahead.bytes[i * size..][..size];
                    if !ahead.complete {
                        // So that what is hashed is what is written.
                        copy.copy_from_slice(piece);
                        piece = &copy;
                    }
                    let digest = digest_of(ahead, i);
                    let row = self.chunk(place_ahead(m, i), piece, digest, encoder, own)?;
                    let mut rows = lock(&rows);
                    if rows[m].is_empty() {
                        rows[m].resize(ahead.bytes.len().div_ceil(size), None);
                    }
                    rows[m][i] = Some(row);
                }
            }
        })?;
        self.ahead = rows.into_inner().unwrap_or_else(PoisonError::into_inner);
        self.settled = memory.iter().map(|m| m.complete).collect();
        let digests = memory
            .iter()
            .map(|m| m.digests.and_then(OnceLock::get).cloned());
        self.digests = digests.map(Option::unwrap_or_default).collect();
        Ok(())
    }

    /// Writes all that was not written ahead, or has changed since, and the table. `memory` tells for each source which
    /// memory it was in [`Writer::ahead`]; it may be shorter.
    pub fn finish(
        mut self,
        sources: &[MemorySource<'_>],
        memory: &[Option<usize>],
    ) -> Result<Written, VramError> {
        let start = Instant::now();
        let size = self.chunk_bytes()?;
        let pieces: Vec<&[u8]> = sources.iter().flat_map(|s| s.bytes.chunks(size)).collect();
        let known = self.known_of_parent();
        let mut rows = self.translated(sources, memory, size);
        // Whether a chunk cannot have changed since it was written, and its digest, if others have made it.
        let settled = of_chunks(sources, memory, size, |memory, _| {
            memory.and_then(|m| self.settled.get(m)).copied() == Some(true)
        });
        let digests = of_chunks(sources, memory, size, |memory, chunk| {
            memory
                .and_then(|m| self.digests.get(m)?.get(chunk))
                .copied()
        });
        let (ahead, changed) = self.drop_changed(&pieces, &settled, &mut rows)?;
        self.known = Mutex::new(known);
        lock(&self.known).extend(rows.iter().enumerate().filter_map(|(number, row)| {
            let row = row.filter(|row| {
                !matches!(
                    row.kind,
                    ChunkKind::Zero | ChunkKind::Same | ChunkKind::Parent
                )
            })?;
            let length = pieces.get(number)?.len();
            Some((row.digest, (ChunkKind::Same, number as u64, length)))
        }));
        let missing: Vec<usize> = (0..pieces.len()).filter(|n| rows[*n].is_none()).collect();
        let next = AtomicUsize::new(0);
        let table = Mutex::new(&mut rows);
        let bytes = missing.iter().map(|n| pieces[*n].len()).sum();
        self.on_threads(bytes, &|encoder, own| {
            loop {
                self.check_cancelled()?;
                let from = next.fetch_add(RUN, Relaxed).min(missing.len());
                let run = &missing[from..(from + RUN).min(missing.len())];
                if run.is_empty() {
                    return Ok(());
                }
                let mut done = [Chunk::ZERO; RUN];
                for (row, number) in done.iter_mut().zip(run) {
                    let (piece, digest) = (pieces[*number], digests[*number]);
                    *row = self.chunk(*number as u64, piece, digest, encoder, own)?;
                }
                let mut table = lock(&table);
                for (row, number) in done.iter().zip(run) {
                    table[*number] = Some(*row);
                }
            }
        })?;
        let write_us = micros(start.elapsed());
        let start = Instant::now();
        self.shards.sync(&lock(&self.open))?;
        let mut index = VramIndex {
            chunk_bytes: self.options.chunk_bytes,
            regions: sources.iter().map(region).collect(),
            shards: self.shards.take_sizes(),
            parent: None,
            parent_at: Vec::new(),
            chunks: rows.into_iter().flatten().collect(),
            digest: ChunkDigest::default(),
        };
        let builds_on_it = index
            .chunks
            .iter()
            .any(|chunk| chunk.kind == ChunkKind::Parent);
        if let Some(vram) = self.parent.filter(|_| builds_on_it) {
            index.parent = Some(vram.index.digest);
            index.parent_at = places(self.dir, vram.dir());
        }
        self.shards.put(&mut index)?;
        self.complete = true;
        Ok(Written {
            facts: VramFacts {
                not_copied: self.not_copied.load(Relaxed),
                ..VramFacts::of(&index)
            },
            ahead,
            changed,
            write_us,
            sync_us: micros(start.elapsed()),
        })
    }

    fn chunk_bytes(&self) -> Result<usize, VramError> {
        match self.options.chunk_bytes {
            0 => Err(VramError::Invalid("chunks of 0 bytes".into())),
            bytes => Ok(bytes as usize),
        }
    }

    fn zeros(&self) -> ChunkDigest {
        let size = self.options.chunk_bytes as usize;
        *self.zeros.get_or_init(|| ChunkDigest::of(&vec![0; size]))
    }

    fn check_cancelled(&self) -> Result<(), VramError> {
        match self.cancel.load(Relaxed) || self.failed.load(Relaxed) {
            true => Err(VramError::Cancelled),
            false => Ok(()),
        }
    }

    fn known_of_parent(&self) -> HashMap<ChunkDigest, (ChunkKind, u64, usize)> {
        known_of(self.parent)
    }

    /// What was written ahead, by the numbers of the sources' chunks.
    fn translated(
        &self,
        sources: &[MemorySource<'_>],
        memory: &[Option<usize>],
        size: usize,
    ) -> Vec<Option<Chunk>> {
        let counts: Vec<usize> = sources
            .iter()
            .map(|s| s.bytes.len().div_ceil(size))
            .collect();
        let starts = starts(&counts);
        let mut rows = Vec::new();
        // By its place ahead, a chunk's number now.
        let mut numbers: HashMap<u64, u64> = HashMap::new();
        for (s, count) in counts.iter().enumerate() {
            let taken = memory.get(s).copied().flatten();
            let taken = taken.and_then(|m| Some((m, self.ahead.get(m)?)));
            match taken.filter(|(_, taken)| taken.len() == *count) {
                Some((m, taken)) => {
                    let pairs = (0..*count).map(|i| (place_ahead(m, i), (starts[s] + i) as u64));
                    numbers.extend(pairs);
                    rows.extend_from_slice(taken);
                }
                None => rows.extend(std::iter::repeat_n(None, *count)),
            }
        }
        for row in &mut rows {
            if let Some(chunk) = row.filter(|chunk| chunk.kind == ChunkKind::Same) {
                *row = numbers.get(&chunk.place).map(|place| Chunk {
                    place: *place,
                    ..chunk
                });
            }
        }
        rows
    }

    /// Forgets what has changed since it was written, and what refers to that. Returns how many chunks there were, and
    /// how many of them are forgotten.
    fn drop_changed(
        &self,
        pieces: &[&[u8]],
        settled: &[bool],
        rows: &mut [Option<Chunk>],
    ) -> Result<(u64, u64), VramError> {
        let taken: Vec<(usize, Chunk)> = (rows.iter().enumerate())
            .filter_map(|(number, row)| Some((number, (*row)?)))
            .collect();
        let next = AtomicUsize::new(0);
        let changed = Mutex::new(Vec::new());
        let looked_at: Vec<_> = taken.iter().filter(|(n, _)| !settled[*n]).collect();
        let bytes = looked_at.iter().map(|(n, _)| pieces[*n].len()).sum();
        self.on_threads(bytes, &|_, _| {
            while let Some((number, row)) = looked_at.get(next.fetch_add(1, Relaxed)) {
                self.check_cancelled()?;
                let piece = pieces[*number];
                let same = match row.kind {
                    ChunkKind::Zero => is_zero(piece),
                    _ => ChunkDigest::of(piece) == row.digest,
                };
                if !same {
                    lock(&changed).push(*number);
                }
            }
            Ok(())
        })?;
        for number in lock(&changed).iter() {
            rows[*number] = None;
        }
        for (number, row) in &taken {
            let place = usize::try_from(row.place).unwrap_or(usize::MAX);
            if row.kind == ChunkKind::Same && rows.get(place).copied().flatten().is_none() {
                rows[*number] = None;
            }
        }
        let left = rows.iter().flatten().count();
        Ok((taken.len() as u64, (taken.len() - left) as u64))
    }

    /// Runs the same work on several threads, each with its shards; the first error ends all.
    fn on_threads(&self, bytes: usize, work: &WriteWork<'_>) -> Result<(), VramError> {
        let threads = self
            .options
            .threads
            .clamp(1, 256)
            .min(bytes / MIN_PER_THREAD + 1);
        let one = || {
            let mut own = lock(&self.open).pop().unwrap_or_default();
            let encoder = Encoder::new(
                self.options.codec,
                self.options.level,
                self.options.chunk_bytes as usize,
            );
            let done = encoder
                .map_err(|error| VramError::Invalid(format!("cannot compress: {error}")))
                .and_then(|mut encoder| work(&mut encoder, &mut own));
            self.failed.fetch_or(done.is_err(), Relaxed);
            lock(&self.open).push(own);
            done
        };
        run_on(threads, &one)
    }

    fn chunk(
        &self,
        number: u64,
        piece: &[u8],
        made: Option<ChunkDigest>,
        encoder: &mut Encoder,
        own: &mut Own,
    ) -> Result<Chunk, VramError> {
        let digest = match made {
            Some(digest) if digest == self.zeros() => {
                self.not_copied.fetch_add(1, Relaxed);
                return Ok(Chunk::ZERO);
            }
            Some(digest) => digest,
            None if is_zero(piece) => return Ok(Chunk::ZERO),
            None => ChunkDigest::of(piece),
        };
        let mut known = lock(&self.known);
        match known.get(&digest) {
            Some((kind, place, length)) if *length == piece.len() => {
                if made.is_some() && *kind == ChunkKind::Parent {
                    self.not_copied.fetch_add(1, Relaxed);
                }
                return Ok(Chunk {
                    kind: *kind,
                    place: *place,
                    digest,
                    ..Chunk::ZERO
                });
            }
            _ => known.insert(digest, (ChunkKind::Same, number, piece.len())),
        };
        drop(known);
        let compared = number.is_multiple_of(COMPARED) && ChunkDigest::of(piece) != digest;
        if made.is_some() && (compared || is_zero(piece)) {
            return Err(VramError::Invalid(
                "a chunk is not what the GPU has made its digest of".into(),
            ));
        }
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

fn known_of(parent: Option<&Vram>) -> HashMap<ChunkDigest, (ChunkKind, u64, usize)> {
    let chunks = parent.into_iter().flat_map(|vram| {
        let all = vram.index.chunks.iter().zip(vram.index.lengths());
        all.enumerate()
            .filter(|(_, (c, _))| c.kind != ChunkKind::Zero)
    });
    chunks
        .map(|(i, (chunk, length))| (chunk.digest, (ChunkKind::Parent, i as u64, length as usize)))
        .collect()
}

/// The place of a chunk that is written ahead, until the number of all chunks is known.
fn place_ahead(memory: usize, chunk: usize) -> u64 {
    (memory as u64) << 40 | chunk as u64
}

/// The number of the first of so many each.
/// Returns what `value` is of each of the sources' chunks, by the number of its memory and its own number in that.
fn of_chunks<T>(
    sources: &[MemorySource<'_>],
    memory: &[Option<usize>],
    size: usize,
    value: impl Fn(Option<usize>, usize) -> T,
) -> Vec<T> {
    let each = sources.iter().enumerate().flat_map(|(s, source)| {
        let memory = memory.get(s).copied().flatten();
        let count = source.bytes.len().div_ceil(size);
        (0..count).map(move |chunk| (memory, chunk))
    });
    each.map(|(memory, chunk)| value(memory, chunk)).collect()
}

fn starts(counts: &[usize]) -> Vec<usize> {
    let sum = |all: &mut usize, count: &usize| {
        let start = *all;
        *all += count;
        Some(start)
    };
    counts.iter().scan(0, sum).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Paths from one directory to another: relative where they have the parent in common or, as two names of a place, its
/// parent; and absolute.
fn places(from: &Path, to: &Path) -> Vec<String> {
    let (Ok(from), Ok(to)) = (from.canonicalize(), to.canonicalize()) else {
        return Vec::new();
    };
    let common = from.ancestors().skip(1).take(2).zip(["..", "../.."]);
    let mut relative = common.filter_map(|(above, up)| {
        let below = to.strip_prefix(above).ok()?;
        (!below.as_os_str().is_empty()).then(|| Path::new(up).join(below))
    });
    let all = relative.next().into_iter().chain([to.clone()]);
    all.filter_map(|path| path.into_os_string().into_string().ok())
        .collect()
}

fn region(source: &MemorySource<'_>) -> Region {
    Region {
        id: source.id.to_owned(),
        bytes: source.bytes.len() as u64,
    }
}
