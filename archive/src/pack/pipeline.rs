//! Compresses, hashes and writes streams, on all cores and in bounded memory.
//!
//! A stream is cut into chunks of [`CHUNK_BYTES`]. Each becomes its own zstd frame or gzip member. So workers compress
//! them in parallel, and the result depends only on content and level. Besides its producer, a stream has one thread,
//! which writes the output, and one that encrypts it. All streams share the workers, the hashing threads and the chunks.
//! A producer waits for a free chunk, which bounds memory.

use std::io::{self, Read, Write};
use std::ops::Deref;
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use super::entropy;
use crate::bytes::encryption::Recipients;
use crate::bytes::hash;
use crate::bytes::lease::{Lease, Spare};
use crate::format::compression::Compression;
use crate::format::digest::Digest;
use crate::format::limits::threads_or_cores;
use crate::progress::Progress;

/// Bytes of a chunk before compression. zstd's window at its default level is 2 MiB; at level 1 it is 512 KiB.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
/// Parts of 256 KiB that encryption may be ahead of writing.
const ENCRYPTED_AHEAD: usize = 4;
/// Up to this level speed counts more than size.
const FAST_LEVEL: i32 = 3;
/// Higher levels need tens of MiB per thread.
const HEAVY_LEVEL: i32 = 12;

/// A chunk's memory; returns to its pool when dropped.
struct PoolChunk {
    /// Always of [`CHUNK_BYTES`], so that it is cleared only once.
    data: Vec<u8>,
    len: usize,
    home: Sender<Vec<u8>>,
}

impl Deref for PoolChunk {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.data[..self.len]
    }
}

impl AsRef<[u8]> for PoolChunk {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for PoolChunk {
    fn drop(&mut self) {
        let _ = self.home.try_send(std::mem::take(&mut self.data));
    }
}

/// The compressed form of a chunk. Keeps the chunk, so that the pool bounds both.
type PackedOutput = Lease<Arc<PoolChunk>>;

struct PackJob {
    chunk: Arc<PoolChunk>,
    compression: Compression,
    reply: Sender<io::Result<PackedOutput>>,
}

/// Workers and memory that the streams of an operation share.
pub(crate) struct Pool<'p> {
    jobs: Sender<PackJob>,
    free: Receiver<Vec<u8>>,
    home: Sender<Vec<u8>>,
    encrypted: Spare,
    progress: &'p Progress,
    /// Input bytes count as progress.
    counts: bool,
    threads: usize,
}

pub(crate) fn with_pool<T>(
    threads: usize,
    level: i32,
    progress: &Progress,
    counts: bool,
    work: impl FnOnce(&Pool<'_>) -> T,
) -> T {
    let threads = threads_or_cores(threads);
    let workers = if level > HEAVY_LEVEL {
        threads.min(4)
    } else {
        threads
    };
    let spare = Spare::default();
    thread::scope(|scope| {
        let (jobs, queue) = unbounded::<PackJob>(); // bounded by the chunks
        let chunks = 8 + 3 * threads;
        let (home, free) = bounded(chunks);
        for _ in 0..chunks {
            let _ = home.send(Vec::new());
        }
        for _ in 0..workers {
            let (queue, spare) = (queue.clone(), spare.clone());
            scope.spawn(move || worker(&queue, level, &spare));
        }
        let pool = Pool {
            jobs,
            free,
            home,
            encrypted: Spare::default(),
            progress,
            counts,
            threads,
        };
        work(&pool)
    })
}

fn worker(queue: &Receiver<PackJob>, level: i32, spare: &Spare) {
    let mut zstd = ZstdFrames::new(level);
    for job in queue {
        let mut output = spare.lease(job.chunk);
        output.clear();
        let chunk = Arc::clone(&output.right);
        let done = match job.compression {
            Compression::Zstd => zstd.frame(&chunk, &mut output),
            _ => gzip_member(level, &chunk, &mut output),
        };
        let _ = job.reply.send(done.map(|()| output));
    }
}

struct ZstdFrames {
    level: i32,
    usual: Option<zstd::bulk::Compressor<'static>>,
    /// Finds repetitions like zstd's fastest level, and stores literals without entropy coding.
    plain: Option<zstd::bulk::Compressor<'static>>,
}

impl ZstdFrames {
    fn new(level: i32) -> Self {
        Self {
            level,
            usual: None,
            plain: None,
        }
    }

    fn frame(&mut self, input: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
        let in_vain = (1..=FAST_LEVEL).contains(&self.level) && entropy::even(input);
        let (place, level) = match in_vain {
            true => (&mut self.plain, -1),
            false => (&mut self.usual, self.level),
        };
        let compressor = match place {
            Some(compressor) => compressor,
            none => {
                let mut new = zstd::bulk::Compressor::new(level)?;
                new.include_checksum(true)?;
                none.insert(new)
            }
        };
        out.reserve(zstd::zstd_safe::compress_bound(input.len()));
        compressor.compress_to_buffer(input, out).map(drop)
    }
}

fn gzip_member(level: i32, input: &[u8], out: &mut Vec<u8>) -> io::Result<()> {
    let level = flate2::Compression::new(u32::try_from(level).unwrap_or(1).clamp(1, 9));
    let mut encoder = flate2::GzBuilder::new().write(std::mem::take(out), level);
    encoder.write_all(input)?;
    *out = encoder.finish()?;
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WrittenStream {
    pub(crate) input: u64,
    pub(crate) output: u64,
    /// Digest of the input, if the caller asked for it; of the output where that is encrypted.
    pub(crate) content: Option<Digest>,
    /// Digest of the output.
    pub(crate) blob: Option<Digest>,
}

/// What a stream is made of its content.
pub(crate) struct StreamFormat<'s> {
    pub(crate) compression: Compression,
    /// Its digests are wanted.
    pub(crate) hash: bool,
    /// Encrypts it for these.
    pub(crate) recipients: Option<&'s Recipients>,
}

impl StreamFormat<'static> {
    pub(crate) const PLAIN: Self = Self {
        compression: Compression::None,
        hash: true,
        recipients: None,
    };
}

enum PackedPiece {
    Plain(Arc<PoolChunk>),
    Coming(Receiver<io::Result<PackedOutput>>),
}

impl Pool<'_> {
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Writes what `produce` puts into its [`Input`]. Returns errors of `produce` and `out`.
    pub(crate) fn write<E: From<io::Error>>(
        &self,
        how: &StreamFormat<'_>,
        out: &mut (dyn Write + Send),
        produce: impl FnOnce(&mut Input<'_>) -> Result<(), E>,
    ) -> Result<WrittenStream, E> {
        let (compression, hash) = (how.compression, how.hash);
        thread::scope(|scope| {
            let (to_write, write_in) = unbounded::<PackedPiece>();
            // A digest of what is secret would tell who guesses it that the guess is right.
            let content = (hash && how.recipients.is_none()).then(hash::HashStream::new);
            let stored = hash && (compression != Compression::None || content.is_none());
            let writer = scope.spawn(move || match how.recipients {
                None => self.write_pieces(&write_in, stored, out),
                Some(recipients) => self.write_encrypted(&write_in, recipients, out),
            });
            let mut input = Input {
                pool: self,
                compression,
                chunk: None,
                bytes: 0,
                to_hash: content.as_ref(),
                to_write,
            };
            let produced = produce(&mut input).and_then(|()| input.flush().map_err(E::from));
            let bytes = input.bytes;
            drop(input);
            // If the writer failed, its error is the cause of the producer's.
            let written = writer.join().map_err(|_| panicked())?;
            let (output, blob) = match (written, produced) {
                (Err(e), _) => return Err(e.into()),
                (Ok(_), Err(e)) => return Err(e),
                (Ok(written), Ok(())) => written,
            };
            let content = content.map(hash::HashStream::finish).transpose()?;
            let blob = if stored { blob } else { content.clone() };
            let content = content.or_else(|| blob.clone());
            Ok(WrittenStream {
                input: bytes,
                output,
                content,
                blob,
            })
        })
    }

    fn write_encrypted(
        &self,
        pieces: &Receiver<PackedPiece>,
        recipients: &Recipients,
        out: &mut (dyn Write + Send),
    ) -> io::Result<(u64, Option<Digest>)> {
        let digest = hash::HashStream::new();
        let mut bytes = 0;
        let (to_write, encrypted) = bounded(ENCRYPTED_AHEAD);
        thread::scope(|scope| {
            let write = |out: &mut dyn Write| self.write_pieces(pieces, false, out);
            // For one large file encryption and writing are both slower than all else: each has a thread.
            let put = move |sealed| {
                let sent = to_write.send(Arc::new(sealed) as hash::SharedBytes);
                sent.map_err(|_| io::ErrorKind::BrokenPipe.into())
            };
            let made = scope.spawn(move || recipients.encrypt(&self.encrypted, put, write));
            let written = encrypted.iter().try_for_each(|piece| {
                bytes += (*piece).as_ref().len() as u64;
                out.write_all((*piece).as_ref())?;
                digest.feed(piece);
                Ok(())
            });
            // If writing failed, it is the cause of the other's error.
            drop(encrypted);
            let made = made.join().map_err(|_| panicked())?;
            written.and(made.map(drop))
        })?;
        out.flush()?;
        Ok((bytes, Some(digest.finish()?)))
    }

    fn write_pieces(
        &self,
        pieces: &Receiver<PackedPiece>,
        hash: bool,
        out: &mut dyn Write,
    ) -> io::Result<(u64, Option<Digest>)> {
        let digest = hash.then(hash::HashStream::new);
        let mut bytes = 0;
        let mut put = |data: &[u8]| {
            out.write_all(data)?;
            bytes += data.len() as u64;
            Ok::<_, io::Error>(())
        };
        for piece in pieces {
            match piece {
                PackedPiece::Plain(chunk) => put(&chunk)?,
                PackedPiece::Coming(reply) => {
                    let output = Arc::new(reply.recv().map_err(|_| panicked())??);
                    if let Some(digest) = &digest {
                        digest.feed(output.clone());
                    }
                    put(&output)?;
                }
            }
        }
        out.flush()?;
        Ok((bytes, digest.map(hash::HashStream::finish).transpose()?))
    }

    fn chunk(&self) -> io::Result<PoolChunk> {
        let mut data = self.free.recv().map_err(|_| panicked())?;
        if data.is_empty() {
            data = vec![0; CHUNK_BYTES];
        }
        Ok(PoolChunk {
            data,
            len: 0,
            home: self.home.clone(),
        })
    }
}

fn panicked() -> io::Error {
    io::Error::other("a worker thread ended unexpectedly")
}

/// The input side of a stream.
pub(crate) struct Input<'p> {
    pool: &'p Pool<'p>,
    compression: Compression,
    chunk: Option<PoolChunk>,
    bytes: u64,
    to_hash: Option<&'p hash::HashStream>,
    to_write: Sender<PackedPiece>,
}

impl Input<'_> {
    /// Copies exactly `size` bytes from a reader, straight into the chunks.
    ///
    /// # Errors
    /// `UnexpectedEof` if the reader ends too early.
    pub(crate) fn take(&mut self, reader: &mut (impl Read + ?Sized), size: u64) -> io::Result<()> {
        let mut left = size;
        while left > 0 {
            let chunk = self.current()?;
            let have = chunk.len;
            let want = usize::try_from(left)
                .unwrap_or(usize::MAX)
                .min(CHUNK_BYTES - have);
            reader.read_exact(&mut chunk.data[have..have + want])?;
            chunk.len += want;
            left -= want as u64;
            self.bytes += want as u64;
            if self.pool.counts {
                self.pool.progress.add_done(want as u64);
            }
            if have + want == CHUNK_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    pub(crate) fn zeros(&mut self, n: u64) -> io::Result<()> {
        io::copy(&mut io::repeat(0).take(n), self).map(drop)
    }

    fn current(&mut self) -> io::Result<&mut PoolChunk> {
        match &mut self.chunk {
            Some(chunk) => Ok(chunk),
            none => Ok(none.insert(self.pool.chunk()?)),
        }
    }
}

impl Write for Input<'_> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let chunk = self.current()?;
        let at = chunk.len;
        let n = data.len().min(CHUNK_BYTES - at);
        chunk.data[at..at + n].copy_from_slice(&data[..n]);
        chunk.len += n;
        let full = chunk.len == CHUNK_BYTES;
        self.bytes += n as u64;
        if full {
            self.flush()?;
        }
        Ok(n)
    }

    /// Submits the current chunk, full or not.
    fn flush(&mut self) -> io::Result<()> {
        let Some(chunk) = self.chunk.take() else {
            return Ok(());
        };
        let gone = || io::Error::from(io::ErrorKind::BrokenPipe);
        let chunk = Arc::new(chunk);
        if let Some(to_hash) = self.to_hash {
            to_hash.feed(chunk.clone());
        }
        let piece = match self.compression {
            Compression::None => PackedPiece::Plain(chunk),
            compression => {
                let (reply, coming) = bounded(1);
                self.pool
                    .jobs
                    .send(PackJob {
                        chunk,
                        compression,
                        reply,
                    })
                    .map_err(|_| gone())?;
                PackedPiece::Coming(coming)
            }
        };
        self.to_write.send(piece).map_err(|_| gone())
    }
}
