//! Decompresses on all cores, in bounded memory, and computes the digests of both sides.
//!
//! Workers decompress zstd frames in parallel if the frames are small and state their size, as cryopod writes them. One
//! thread decompresses anything else. Reading and the consumer have threads of their own; all digests share some.

mod split;

use std::io::{self, Read};
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};

use self::split::Splitter;
use crate::bytes::hash;
use crate::bytes::lease::{Lease, Spare};
use crate::bytes::stream::{Allowance, Stream};
use crate::error::Bad;
use crate::format::compression::Compression;
use crate::format::digest::Digest;
use crate::format::limits::threads_or_cores;
use crate::progress::Progress;

/// Bytes that are read, or that a single-threaded decoder emits, at once.
const PIECE: usize = 1 << 20;

/// The right to hold a piece of memory, or a frame and its output; returned when dropped.
struct Token {
    home: Sender<()>,
}

impl Drop for Token {
    fn drop(&mut self) {
        let _ = self.home.try_send(());
    }
}

/// A frame as it is stored, or a piece of what it holds.
type DecodedPiece = Lease<Arc<Token>>;

struct DecodeJob {
    frame: Arc<DecodedPiece>,
    content: usize,
    reply: Sender<io::Result<DecodedPiece>>,
}

pub(crate) struct Decoder<'p> {
    jobs: Sender<DecodeJob>,
    free: Receiver<()>,
    home: Sender<()>,
    spare: Spare,
    progress: &'p Progress,
    threads: usize,
}

pub(crate) fn with_decoder<T>(
    threads: usize,
    progress: &Progress,
    work: impl FnOnce(&Decoder<'_>) -> T,
) -> T {
    let threads = threads_or_cores(threads);
    thread::scope(|scope| {
        let (jobs, queue) = unbounded::<DecodeJob>(); // bounded by the tokens
        let tokens = 8 + 2 * threads;
        let (home, free) = bounded(tokens);
        for _ in 0..tokens {
            let _ = home.send(());
        }
        let spare = Spare::default();
        for _ in 0..threads {
            let (queue, spare) = (queue.clone(), spare.clone());
            scope.spawn(move || worker(&queue, &spare));
        }
        let decoder = Decoder {
            jobs,
            free,
            home,
            spare,
            progress,
            threads,
        };
        work(&decoder)
    })
}

fn worker(queue: &Receiver<DecodeJob>, spare: &Spare) {
    let mut decompressor = None;
    for job in queue {
        let mut piece = spare.lease(Arc::clone(&job.frame.right));
        piece.clear();
        let done = decompress(&mut decompressor, &job.frame, job.content, &mut piece);
        drop(job.frame);
        let _ = job.reply.send(done.map(|()| piece));
    }
}

fn decompress(
    decompressor: &mut Option<zstd::bulk::Decompressor<'static>>,
    frame: &[u8],
    content: usize,
    out: &mut Vec<u8>,
) -> io::Result<()> {
    let decompressor = match decompressor {
        Some(decompressor) => decompressor,
        None => decompressor.insert(zstd::bulk::Decompressor::new()?),
    };
    out.reserve_exact(content);
    let bad = |reason: String| {
        io::Error::from(Bad::Compression {
            format: "zstd",
            reason,
        })
    };
    let n = decompressor
        .decompress_to_buffer(frame, out)
        .map_err(|e| bad(e.to_string()))?;
    if n != content {
        return Err(bad(format!(
            "a frame of {n} bytes that should have {content}"
        )));
    }
    Ok(())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hash {
    No,
    /// Of the stored bytes. They determine the decompressed bytes.
    Stored,
    /// Of the decompressed bytes as well.
    Both,
}

enum Next {
    Ready(DecodedPiece),
    Coming(Receiver<io::Result<DecodedPiece>>),
    Failed(io::Error),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Digests {
    /// Of the stored bytes.
    pub(crate) blob: Option<Digest>,
    /// Of the decompressed bytes; `None` if the caller did not ask for it.
    pub(crate) content: Option<Digest>,
}

impl Decoder<'_> {
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    pub(crate) fn progress(&self) -> &Progress {
        self.progress
    }

    /// Decompresses a stream for a consumer, which should read it to its end. Returns the digests that `hash` asks for.
    ///
    /// # Errors
    /// What the consumer returned. Errors of the stream reach the consumer through its reader.
    pub(crate) fn read<T, E: From<io::Error>>(
        &self,
        raw: impl Read + Send,
        compression: Compression,
        allowance: Allowance,
        hash: Hash,
        consume: impl FnOnce(&mut DecodedOutput<'_>) -> Result<T, E>,
    ) -> Result<(T, Digests), E> {
        thread::scope(|scope| {
            let plain = compression == Compression::None;
            let both = hash == Hash::Both || (plain && hash == Hash::Stored);
            let stored = !plain && hash != Hash::No;
            let (to_consumer, next) = unbounded::<Next>();
            let content = both.then(hash::HashStream::new);
            let mut raw = CountedInput {
                inner: raw,
                progress: self.progress,
            };
            let splitter = scope.spawn(move || {
                let split = Splitter {
                    decoder: self,
                    allowance,
                    input: 0,
                    output: 0,
                    out: to_consumer,
                    hash: stored.then(hash::HashStream::new),
                };
                split.run(&mut raw, compression)
            });
            let mut output = DecodedOutput {
                next,
                piece: None,
                at: 0,
                hash: content.as_ref(),
            };
            let value = consume(&mut output)?;
            drop(output);
            let gone = || io::Error::other("a worker thread ended unexpectedly");
            let blob = splitter.join().map_err(|_| gone())??;
            let content = content.map(hash::HashStream::finish).transpose()?;
            let blob = if plain { content.clone() } else { blob };
            Ok((value, Digests { blob, content }))
        })
    }

    fn token(&self) -> io::Result<Token> {
        self.free.recv().map_err(io::Error::other)?;
        Ok(Token {
            home: self.home.clone(),
        })
    }
}

/// Counts what is read.
pub(crate) struct CountedInput<'p, R> {
    pub(crate) inner: R,
    pub(crate) progress: &'p Progress,
}

impl<R: Read> Read for CountedInput<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.progress.add_done(n as u64);
        Ok(n)
    }
}

pub(crate) struct DecodedOutput<'h> {
    next: Receiver<Next>,
    piece: Option<Arc<DecodedPiece>>,
    at: usize,
    hash: Option<&'h hash::HashStream>,
}

impl Read for DecodedOutput<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(piece) = &self.piece {
                let rest = &piece[self.at..];
                if !rest.is_empty() {
                    let n = rest.len().min(buf.len());
                    buf[..n].copy_from_slice(&rest[..n]);
                    self.at += n;
                    return Ok(n);
                }
            }
            self.piece = None;
            let piece = match self.next.recv() {
                Err(_) => return Ok(0), // the splitter is done
                Ok(Next::Ready(piece)) => piece,
                Ok(Next::Coming(reply)) => reply.recv().map_err(io::Error::other)??,
                Ok(Next::Failed(e)) => return Err(e),
            };
            let piece = Arc::new(piece);
            if let Some(hash) = self.hash {
                hash.feed(piece.clone());
            }
            self.at = 0;
            self.piece = Some(piece);
        }
    }
}

impl Stream for DecodedOutput<'_> {}
