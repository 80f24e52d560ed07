//! Decompression on all cores, in bounded memory, with digests of both sides.
//!
//! zstd frames that say their size and are small, as cryopod writes them, are decompressed by workers at the same
//! time; anything else by one thread. Reading, both digests and the consumer have threads of their own.

use std::io::{self, Read};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use sha2::{Digest as _, Sha256};

use crate::error::{Bad, Cancelled};
use crate::frames::{Frame, MAX_FRAME, look};
use crate::oci::Digest;
use crate::pack::threads_or_cores;
use crate::progress::Progress;
use crate::stream::{Allowance, Compression, Decoded, Stream};

/// Bytes that are read, or come out of a decoder that works alone, at once.
const PIECE: usize = 1 << 20;

/// The right to hold a piece of memory; goes back when dropped.
struct Token {
    home: Sender<()>,
}

impl Drop for Token {
    fn drop(&mut self) {
        let _ = self.home.try_send(());
    }
}

struct Job {
    frame: Vec<u8>,
    content: usize,
    token: Token,
    reply: Sender<io::Result<Piece>>,
}

/// Decompressed bytes.
struct Piece {
    data: Vec<u8>,
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
    _token: Token,
}

impl Drop for Piece {
    fn drop(&mut self) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        if spare.len() < 64 {
            spare.push(std::mem::take(&mut self.data));
        }
    }
}

/// Workers and memory that several streams share.
pub(crate) struct Decoder<'p> {
    jobs: Sender<Job>,
    free: Receiver<()>,
    home: Sender<()>,
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
    progress: &'p Progress,
    threads: usize,
}

/// Runs `work` with workers.
pub(crate) fn with_decoder<T>(
    threads: usize,
    progress: &Progress,
    work: impl FnOnce(&Decoder<'_>) -> T,
) -> T {
    let threads = threads_or_cores(threads);
    thread::scope(|scope| {
        let (jobs, queue) = unbounded::<Job>(); // bounded by the tokens
        let tokens = 8 + 2 * threads;
        let (home, free) = bounded(tokens);
        for _ in 0..tokens {
            let _ = home.send(());
        }
        let spare = Arc::new(Mutex::new(Vec::new()));
        for _ in 0..threads {
            let (queue, spare) = (queue.clone(), Arc::clone(&spare));
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

fn buffer(spare: &Mutex<Vec<Vec<u8>>>) -> Vec<u8> {
    let mut data = spare
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .pop()
        .unwrap_or_default();
    data.clear();
    data
}

/// A buffer of a whole piece, cleared only where it has to grow.
fn piece_buffer(spare: &Mutex<Vec<Vec<u8>>>) -> Vec<u8> {
    let mut data = spare
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .pop()
        .unwrap_or_default();
    data.resize(PIECE, 0);
    data
}

fn worker(queue: &Receiver<Job>, spare: &Arc<Mutex<Vec<Vec<u8>>>>) {
    let mut decompressor = None;
    for Job {
        frame,
        content,
        token,
        reply,
    } in queue
    {
        let mut data = buffer(spare);
        let done = decompress(&mut decompressor, &frame, content, &mut data);
        let piece = done.map(|()| Piece {
            data,
            spare: Arc::clone(spare),
            _token: token,
        });
        let mut spare = spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.push(frame);
        drop(spare);
        let _ = reply.send(piece);
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

/// Which digests are taken of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hash {
    /// None.
    No,
    /// Of the bytes as they are stored. What comes out of them depends on nothing else.
    Stored,
    /// Of what comes out as well.
    Both,
}

enum Next {
    Ready(Piece),
    Coming(Receiver<io::Result<Piece>>),
    Failed(io::Error),
}

/// What is known of a stream when it was read to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Digests {
    /// Of the bytes as they are stored.
    pub(crate) blob: Option<Digest>,
    /// Of the decompressed bytes; `None` if it was not asked for.
    pub(crate) content: Option<Digest>,
}

impl Decoder<'_> {
    /// Threads that work at the same time.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// The counters of the operation.
    pub(crate) fn progress(&self) -> &Progress {
        self.progress
    }

    /// Decompresses a stream for a consumer, which should read it to its end; gives the digests that `hash` asks for.
    ///
    /// # Errors
    /// What the consumer returned. The stream's own errors reach it through its reader.
    pub(crate) fn read<T, E: From<io::Error>>(
        &self,
        raw: impl Read + Send,
        compression: Compression,
        allowance: Allowance,
        hash: Hash,
        consume: impl FnOnce(&mut Output) -> Result<T, E>,
    ) -> Result<(T, Digests), E> {
        thread::scope(|scope| {
            let plain = compression == Compression::None;
            let both = hash == Hash::Both || (plain && hash == Hash::Stored);
            let stored = !plain && hash != Hash::No;
            let (to_consumer, next) = unbounded::<Next>();
            let (content_hash, content_pieces) = unbounded::<Arc<Piece>>();
            let content = both.then(|| {
                scope.spawn(move || {
                    let mut sha = Sha256::new();
                    for piece in content_pieces {
                        sha.update(&piece.data);
                    }
                    Digest::from_hash(sha)
                })
            });
            let raw = Tee {
                inner: raw,
                hash: stored.then(Sha256::new),
                progress: self.progress,
            };
            let splitter = scope.spawn(move || {
                let mut raw = raw;
                let split = Splitter {
                    decoder: self,
                    allowance,
                    input: 0,
                    output: 0,
                    out: to_consumer,
                };
                split.run(&mut raw, compression);
                raw.hash.map(Digest::from_hash)
            });
            let mut output = Output {
                next,
                piece: None,
                at: 0,
                hash: both.then_some(content_hash),
            };
            let value = consume(&mut output)?;
            drop(output);
            let gone = || io::Error::other("a worker thread ended unexpectedly");
            let blob = splitter.join().map_err(|_| gone())?;
            let content = content.map(|h| h.join().map_err(|_| gone())).transpose()?;
            let blob = if plain { content.clone() } else { blob };
            Ok((value, Digests { blob, content }))
        })
    }

    fn token(&self) -> io::Result<Token> {
        if self.progress.is_cancelled() {
            return Err(io::Error::other(Cancelled));
        }
        self.free.recv().map_err(io::Error::other)?;
        Ok(Token {
            home: self.home.clone(),
        })
    }
}

/// Hashes what is read, for the blob's digest.
struct Tee<'p, R> {
    inner: R,
    hash: Option<Sha256>,
    progress: &'p Progress,
}

impl<R: Read> Read for Tee<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.progress.add_done(n as u64);
        if let Some(hash) = &mut self.hash {
            hash.update(&buf[..n]);
        }
        Ok(n)
    }
}

struct Splitter<'d> {
    decoder: &'d Decoder<'d>,
    allowance: Allowance,
    input: u64,
    output: u64,
    out: Sender<Next>,
}

/// The consumer is gone.
struct Gone;

enum Stop {
    Gone,
    Failed(io::Error),
}

impl From<io::Error> for Stop {
    fn from(e: io::Error) -> Self {
        Self::Failed(e)
    }
}

impl From<Gone> for Stop {
    fn from(_: Gone) -> Self {
        Self::Gone
    }
}

impl Splitter<'_> {
    fn run(mut self, raw: &mut (impl Read + Send), compression: Compression) {
        let done = match compression {
            Compression::Zstd => self.frames(raw),
            other => self.alone(raw, other),
        };
        if let Err(Stop::Failed(e)) = done {
            let _ = self.out.send(Next::Failed(e));
        }
    }

    /// Frame by frame, as long as they are small.
    fn frames(&mut self, raw: &mut (impl Read + Send)) -> Result<(), Stop> {
        // Room for the largest frame and a piece of the next.
        let mut buf = vec![0; MAX_FRAME + 2 * PIECE];
        let (mut at, mut end) = (0, 0);
        loop {
            match look(&buf[at..end]) {
                Frame::Whole { len, content } => {
                    self.input += len as u64;
                    self.output += content as u64;
                    self.allowance
                        .check(self.input, self.output)
                        .map_err(io::Error::from)?;
                    let token = self.decoder.token()?;
                    let mut frame = buffer(&self.decoder.spare);
                    frame.extend_from_slice(&buf[at..at + len]);
                    at += len;
                    let (reply, coming) = bounded(1);
                    let job = Job {
                        frame,
                        content,
                        token,
                        reply,
                    };
                    self.decoder.jobs.send(job).map_err(|_| Gone)?;
                    self.out.send(Next::Coming(coming)).map_err(|_| Gone)?;
                    continue;
                }
                Frame::Skip { len } if len <= (end - at) as u64 => {
                    self.input += len;
                    at += len as usize;
                    continue;
                }
                Frame::Skip { len } if len <= MAX_FRAME as u64 => {}
                Frame::Short if end - at <= MAX_FRAME => {}
                Frame::Short | Frame::Skip { .. } | Frame::Other => break,
            }
            buf.copy_within(at..end, 0);
            end -= at;
            at = 0;
            let n = read_some(raw, &mut buf[end..])?;
            end += n;
            if n == 0 {
                break;
            }
        }
        if at == end && at == 0 {
            return Ok(());
        }
        // The rest, with its errors, is the ordinary decoder's.
        buf.truncate(end);
        let rest = buf.split_off(at);
        drop(buf);
        self.alone(&mut io::Cursor::new(rest).chain(raw), Compression::Zstd)
    }

    /// One thread for all.
    fn alone(
        &mut self,
        raw: &mut (impl Read + Send),
        compression: Compression,
    ) -> Result<(), Stop> {
        let allowance = match self.allowance {
            Allowance::Exactly(bytes) => Allowance::Exactly(bytes.saturating_sub(self.output)),
            Allowance::Ratio { slack, ratio } => Allowance::Ratio {
                slack: slack
                    .saturating_add(self.input.saturating_mul(ratio))
                    .saturating_sub(self.output),
                ratio,
            },
        };
        let mut decoded = Decoded::new(raw, compression, allowance)?;
        loop {
            let token = self.decoder.token()?;
            let mut data = piece_buffer(&self.decoder.spare);
            let mut have = 0;
            while have < PIECE {
                let n = read_some(&mut decoded, &mut data[have..])?;
                if n == 0 {
                    break;
                }
                have += n;
            }
            if have == 0 {
                return Ok(());
            }
            data.truncate(have);
            let piece = Piece {
                data,
                spare: Arc::clone(&self.decoder.spare),
                _token: token,
            };
            self.out.send(Next::Ready(piece)).map_err(|_| Gone)?;
        }
    }
}

fn read_some(reader: &mut impl Read, buf: &mut [u8]) -> io::Result<usize> {
    loop {
        match reader.read(buf) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// The decompressed bytes, in order.
pub(crate) struct Output {
    next: Receiver<Next>,
    piece: Option<Arc<Piece>>,
    at: usize,
    hash: Option<Sender<Arc<Piece>>>,
}

impl Read for Output {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(piece) = &self.piece {
                let rest = &piece.data[self.at..];
                if !rest.is_empty() {
                    let n = rest.len().min(buf.len());
                    buf[..n].copy_from_slice(&rest[..n]);
                    self.at += n;
                    return Ok(n);
                }
            }
            self.piece = None;
            let piece = match self.next.recv() {
                Err(_) => return Ok(0), // the splitter has come to the end
                Ok(Next::Ready(piece)) => piece,
                Ok(Next::Coming(reply)) => reply.recv().map_err(io::Error::other)??,
                Ok(Next::Failed(e)) => return Err(e),
            };
            let piece = Arc::new(piece);
            if let Some(hash) = &self.hash {
                let _ = hash.send(Arc::clone(&piece));
            }
            self.at = 0;
            self.piece = Some(piece);
        }
    }
}

impl Stream for Output {}
