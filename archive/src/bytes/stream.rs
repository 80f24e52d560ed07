//! Reads byte streams: a section of a file, and decompression with bounds.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cryopod_host::files;
use sha2::{Digest as _, Sha256};

use crate::error::{Bad, Error};
use crate::format::compression::Compression;
use crate::format::digest::Digest;
use crate::format::limits::Limits;

const READ_BYTES: usize = 256 << 10;

pub(crate) trait Stream: Read {
    /// Skips `n` bytes.
    ///
    /// # Errors
    /// `UnexpectedEof` if there are fewer.
    fn skip(&mut self, n: u64) -> io::Result<()> {
        let mut buf = [0; 16 << 10];
        let mut left = n;
        while left > 0 {
            let len = usize::try_from(left).unwrap_or(usize::MAX).min(buf.len());
            match self.read(&mut buf[..len]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => left -= n as u64,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}

impl Stream for &[u8] {}
impl<S: Stream + ?Sized> Stream for Box<S> {
    fn skip(&mut self, n: u64) -> io::Result<()> {
        (**self).skip(n)
    }
}

/// Opens a regular file without following a link and without blocking on a fifo.
pub(crate) fn open_regular(path: &Path) -> Result<File, Error> {
    files::open_regular(path).map_err(|e| match e.kind() {
        io::ErrorKind::InvalidInput => Error::NotACheckpoint {
            path: path.into(),
            reason: e.to_string(),
        },
        _ => Error::from_io(path, "open it", e),
    })
}

/// A section of a file. Clones read independently of each other.
#[derive(Debug, Clone)]
pub(crate) struct Section {
    file: Arc<File>,
    at: u64,
    end: u64,
}

impl Section {
    pub(crate) fn new(file: Arc<File>, at: u64, len: u64) -> Self {
        Self {
            file,
            at,
            end: at.saturating_add(len),
        }
    }

    pub(crate) fn whole(file: File) -> io::Result<Self> {
        let len = file.metadata()?.len();
        Ok(Self::new(Arc::new(file), 0, len))
    }

    /// A part of what is left, `at` bytes from its start.
    pub(crate) fn part(&self, at: u64, len: u64) -> Self {
        let at = self.at.saturating_add(at).min(self.end);
        let end = at.saturating_add(len).min(self.end);
        Self {
            file: Arc::clone(&self.file),
            at,
            end,
        }
    }

    pub(crate) fn left(&self) -> u64 {
        self.end - self.at
    }

    /// Offset in the file.
    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    pub(crate) fn file(&self) -> &Arc<File> {
        &self.file
    }
}

impl Read for Section {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let len = usize::try_from(self.left())
            .unwrap_or(usize::MAX)
            .min(buf.len());
        let n = self.file.read_at(&mut buf[..len], self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

/// Positions are the file's.
impl Seek for Section {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let to = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.end.checked_add_signed(by),
        };
        let to = to.filter(|to| *to <= self.end);
        self.at = to.ok_or(io::ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}

impl Stream for Section {
    fn skip(&mut self, n: u64) -> io::Result<()> {
        if n > self.left() {
            self.at = self.end;
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += n;
        Ok(())
    }
}

pub(crate) struct Hashed<R> {
    inner: R,
    hash: Sha256,
}

impl<R> Hashed<R> {
    pub(crate) fn new(inner: R) -> Self {
        Self {
            inner,
            hash: Sha256::new(),
        }
    }

    pub(crate) fn digest(self) -> Digest {
        Digest::from_hash(self.hash)
    }
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.hash.update(&buf[..n]);
        Ok(n)
    }
}

impl<R: Read> Stream for Hashed<R> {}

/// Limit on the output of a stream.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Allowance {
    /// The size that the archive states.
    Exactly(u64),
    /// [`Limits::ratio`].
    Ratio { slack: u64, ratio: u64 },
}

impl Allowance {
    pub(crate) fn of(limits: &Limits) -> Self {
        Self::Ratio {
            slack: limits.ratio_slack_bytes,
            ratio: limits.ratio,
        }
    }

    pub(crate) fn check(self, input: u64, output: u64) -> Result<(), Bad> {
        match self {
            Self::Exactly(max) if output > max => Err(Bad::TooLarge(max)),
            Self::Ratio { slack, ratio }
                if output > slack.saturating_add(input.saturating_mul(ratio)) =>
            {
                Err(Bad::Ratio {
                    input,
                    out: output,
                    max: ratio,
                })
            }
            _ => Ok(()),
        }
    }
}

struct Counted<R> {
    inner: R,
    count: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.count.fetch_add(n as u64, Ordering::Relaxed);
        Ok(n)
    }
}

/// A decompressed stream, with bounds, whose errors name the format.
pub(crate) struct Decoded<'a> {
    inner: Box<dyn Read + Send + 'a>,
    compression: Compression,
    allowance: Allowance,
    input: Arc<AtomicU64>,
    output: u64,
}

impl<'a> Decoded<'a> {
    pub(crate) fn new(
        raw: impl Read + Send + 'a,
        compression: Compression,
        allowance: Allowance,
    ) -> io::Result<Self> {
        let input = Arc::new(AtomicU64::new(0));
        let raw = BufReader::with_capacity(
            READ_BYTES,
            Counted {
                inner: raw,
                count: Arc::clone(&input),
            },
        );
        let inner: Box<dyn Read + Send + 'a> = match compression {
            Compression::None => Box::new(raw),
            Compression::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(raw)),
            Compression::Zstd => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(raw)?;
                decoder.window_log_max(27)?; // 128 MiB, the largest window of any engine
                Box::new(decoder)
            }
        };
        Ok(Self {
            inner,
            compression,
            allowance,
            input,
            output: 0,
        })
    }
}

/// Reads a file, decompressed if it is gzip or zstd, within the default [`Limits`].
pub fn decompressed(mut file: File) -> io::Result<impl Read + Send> {
    let mut start = [0; 4];
    let n = file.read_at(&mut start, 0)?;
    file.rewind()?;
    let compression = Compression::detect(&start[..n]);
    Decoded::new(file, compression, Allowance::of(&Limits::default()))
}

impl Read for Decoded<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = match self.inner.read(buf) {
            Ok(n) => n,
            // An error of the file itself has an errno; all others come from the decoder.
            Err(e) if e.raw_os_error().is_some() || e.kind() == io::ErrorKind::Interrupted => {
                return Err(e);
            }
            Err(e) if e.get_ref().is_some_and(|i| i.is::<Bad>()) => return Err(e),
            Err(e) => {
                return Err(Bad::Compression {
                    format: self.compression.name(),
                    reason: e.to_string(),
                }
                .into());
            }
        };
        self.output += n as u64;
        if self.compression != Compression::None {
            self.allowance
                .check(self.input.load(Ordering::Relaxed), self.output)?;
        }
        Ok(n)
    }
}

impl Stream for Decoded<'_> {}
