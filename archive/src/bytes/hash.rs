//! Computes SHA-256 of streams, each on a thread of its own.

use std::io::{self, Read};
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};
use sha2::{Digest as _, Sha256};

use crate::format::digest::Digest;

/// Pieces that a stream may be ahead of its thread. They keep memory that others wait for.
const AHEAD: usize = 4;

/// Bytes that several threads read.
pub(crate) type SharedBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// The input side of a stream.
pub(crate) struct HashStream {
    pieces: Sender<SharedBytes>,
    digest: Receiver<Digest>,
}

impl HashStream {
    pub(crate) fn new() -> Self {
        let (pieces, to_hash) = bounded::<SharedBytes>(AHEAD);
        let (done, digest) = bounded(1);
        let work = move || {
            let mut hash = Sha256::new();
            for piece in to_hash {
                hash.update((*piece).as_ref());
            }
            let _ = done.send(Digest::from_hash(hash));
        };
        // Without a thread both channels are closed, and `finish` fails.
        let _ = thread::Builder::new().name("sha256".into()).spawn(work);
        Self { pieces, digest }
    }

    pub(crate) fn feed(&self, piece: SharedBytes) {
        // Fails only without a thread; `finish` reports that.
        let _ = self.pieces.send(piece);
    }

    /// Hashes a copy of data that the caller keeps.
    pub(crate) fn update(&self, data: &[u8]) {
        self.feed(Arc::new(data.to_vec()));
    }

    /// Waits for the digest. Fails if the thread could not be started or died.
    pub(crate) fn finish(self) -> io::Result<Digest> {
        drop(self.pieces);
        let lost = |_| {
            io::Error::other(
                "no thread to compute a digest could be started; free some processes and try again",
            )
        };
        self.digest.recv().map_err(lost)
    }
}

/// Hashes what is read, for the blob's digest.
pub(crate) struct Tee<'h, R> {
    pub(crate) inner: R,
    pub(crate) hash: Option<&'h HashStream>,
}

impl<R: Read> Read for Tee<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        if let Some(hash) = self.hash {
            hash.update(&buf[..n]);
        }
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_streams_at_once() {
        let content = |len: usize, seed: usize| -> Vec<u8> {
            (0..len).map(|i| (i * 31 + i / 251 + seed) as u8).collect()
        };
        thread::scope(|scope| {
            for n in 0..7 {
                scope.spawn(move || {
                    let stream = HashStream::new();
                    let mut all = Vec::new();
                    for piece in 0..40 {
                        let data = content((n * 7919 + piece * 104_729) % 300_000, n);
                        all.extend_from_slice(&data);
                        match piece % 5 {
                            4 => stream.update(&data),
                            _ => stream.feed(Arc::new(data)),
                        }
                    }
                    assert_eq!(stream.finish().unwrap(), Digest::of(&all));
                });
            }
        });
        assert_eq!(HashStream::new().finish().unwrap(), Digest::of(b""));
    }

    #[test]
    fn without_a_thread_there_is_no_digest() {
        let (pieces, _) = bounded(1);
        let (_, digest) = bounded(1);
        let stream = HashStream { pieces, digest };
        stream.update(b"data");
        assert!(stream.finish().is_err());
    }
}
