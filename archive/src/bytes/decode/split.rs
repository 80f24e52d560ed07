//! Splits a stored stream into pieces, and into frames for the workers.

use std::io::{self, Read};
use std::sync::Arc;

use crossbeam_channel::{Sender, bounded};

use super::{DecodeJob, DecodedPiece, Decoder, Next, PIECE, Token};
use crate::bytes::frames::{MAX_FRAME, ZstdFrame, look};
use crate::bytes::hash;
use crate::bytes::stream::{Allowance, Decoded};
use crate::format::compression::Compression;
use crate::format::digest::Digest;

pub(super) struct Splitter<'d> {
    pub(super) decoder: &'d Decoder<'d>,
    pub(super) allowance: Allowance,
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) out: Sender<Next>,
    /// Hash of the stored bytes.
    pub(super) hash: Option<hash::HashStream>,
}

/// The consumer has stopped reading.
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
    /// Reads to the end. Returns the digest of the stored bytes if the caller asked for it.
    pub(super) fn run(
        mut self,
        raw: &mut (impl Read + Send),
        compression: Compression,
    ) -> io::Result<Option<Digest>> {
        let done = match compression {
            Compression::Zstd => self.frames(raw),
            other => self.alone(raw, other),
        };
        if let Err(Stop::Failed(e)) = done {
            let _ = self.out.send(Next::Failed(e));
        }
        self.hash.map(hash::HashStream::finish).transpose()
    }

    /// Reads frame by frame, as long as they are small.
    fn frames(&mut self, raw: &mut (impl Read + Send)) -> Result<(), Stop> {
        // Room for the largest frame and a piece of the next.
        let mut buf = vec![0; MAX_FRAME + 2 * PIECE];
        let (mut at, mut end) = (0, 0);
        loop {
            match look(&buf[at..end]) {
                ZstdFrame::Whole { len, content } => {
                    self.input += len as u64;
                    self.output += content as u64;
                    self.allowance
                        .check(self.input, self.output)
                        .map_err(io::Error::from)?;
                    let token = self.decoder.token()?;
                    let frame = self.stored(&buf[at..at + len], token);
                    at += len;
                    let (reply, coming) = bounded(1);
                    let job = DecodeJob {
                        frame,
                        content,
                        reply,
                    };
                    self.decoder.jobs.send(job).map_err(|_| Gone)?;
                    self.out.send(Next::Coming(coming)).map_err(|_| Gone)?;
                    continue;
                }
                ZstdFrame::Skip { len } => {
                    self.input += len as u64;
                    if let Some(hash) = &self.hash {
                        hash.update(&buf[at..at + len]);
                    }
                    at += len;
                    continue;
                }
                ZstdFrame::Short if end - at <= MAX_FRAME => {}
                ZstdFrame::Short | ZstdFrame::Other => break,
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
        // The ordinary decoder handles the rest and reports its errors.
        buf.truncate(end);
        let rest = buf.split_off(at);
        drop(buf);
        self.alone(&mut io::Cursor::new(rest).chain(raw), Compression::Zstd)
    }

    fn stored(&self, part: &[u8], token: Token) -> Arc<DecodedPiece> {
        let mut stored = self.decoder.spare.lease(Arc::new(token));
        stored.clear();
        stored.extend_from_slice(part);
        let stored = Arc::new(stored);
        if let Some(hash) = &self.hash {
            hash.feed(stored.clone());
        }
        stored
    }

    /// Decompresses the rest with one thread.
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
        let hash = self.hash.as_ref();
        let mut decoded = Decoded::new(hash::Tee { inner: raw, hash }, compression, allowance)?;
        loop {
            let token = self.decoder.token()?;
            let mut piece = self.decoder.spare.lease(Arc::new(token));
            // Clears a buffer only where it has to grow.
            piece.resize(PIECE, 0);
            let mut have = 0;
            while have < PIECE {
                let n = read_some(&mut decoded, &mut piece[have..])?;
                if n == 0 {
                    break;
                }
                have += n;
            }
            if have == 0 {
                return Ok(());
            }
            piece.truncate(have);
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
