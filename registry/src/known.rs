//! Puts a blob together from what this host has of it and what the registry has.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use cryopod_archive::Error as ArchiveError;
use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::oci::{Descriptor, Manifest};
use cryopod_host::files::create_private;
use futures_util::stream::{self, StreamExt, TryStreamExt};

use crate::client::Registry;
use crate::text::causes;
use crate::transfer::{Flow, while_flowing};
use crate::{Error, RegistryOptions};

/// Smaller pieces than this are fetched with what is around them, in bytes.
const SMALLEST: u64 = 1 << 20;
/// Most pieces of a blob, each of which costs a request.
const MAX_PIECES: usize = 4096;
const BUFFER: usize = 1 << 20;

/// A part of a blob, and a file of this host that has it.
#[derive(Debug, Clone)]
pub struct BlobPiece {
    /// Offset in the blob.
    pub at: u64,
    pub bytes: u64,
    pub file: Arc<File>,
    /// Offset in the file.
    pub offset: u64,
}

/// Tells what this host has of an image.
pub trait KnownBlobs: Sync {
    /// Returns the pieces of its blobs. `first` is the image's first layer, which holds the small files. The result may
    /// be wrong: a blob whose digest is another is fetched whole.
    fn pieces(&self, first: &Path, manifest: &Manifest) -> BTreeMap<Digest, Vec<BlobPiece>>;
}

/// Nothing is known.
impl KnownBlobs for () {
    fn pieces(&self, _: &Path, _: &Manifest) -> BTreeMap<Digest, Vec<BlobPiece>> {
        BTreeMap::new()
    }
}

/// What of a blob is on this host, and what is not.
#[derive(Debug)]
pub(crate) struct BlobParts {
    pieces: Vec<BlobPiece>,
    gaps: Vec<Range<u64>>,
}

impl BlobParts {
    /// `None`: nothing that is worth a request.
    pub(crate) fn of(mut pieces: Vec<BlobPiece>, size: u64) -> Option<Self> {
        pieces.sort_by_key(|piece| piece.at);
        let mut joined: Vec<BlobPiece> = Vec::new();
        for piece in pieces {
            let end = joined.last().map_or(0, |last| last.at + last.bytes);
            let fits = piece.at.checked_add(piece.bytes).is_some_and(|e| e <= size);
            if piece.at < end || !fits {
                continue;
            }
            match joined.last_mut() {
                Some(last)
                    if piece.at == end
                        && Arc::ptr_eq(&last.file, &piece.file)
                        && piece.offset == last.offset + last.bytes =>
                {
                    last.bytes += piece.bytes;
                }
                _ => joined.push(piece),
            }
        }
        joined.retain(|piece| piece.bytes >= SMALLEST);
        joined.truncate(MAX_PIECES);
        let mut gaps = Vec::new();
        let mut at = 0;
        for piece in &joined {
            if piece.at > at {
                gaps.push(at..piece.at);
            }
            at = piece.at + piece.bytes;
        }
        if at < size {
            gaps.push(at..size);
        }
        (!joined.is_empty()).then_some(Self {
            pieces: joined,
            gaps,
        })
    }
}

/// Writes a blob to `partial`, which must not exist. Returns how many bytes came from the registry.
///
/// # Errors
/// The registry sends no parts, or the blob has another digest: it must be fetched whole. The file may be there.
pub(crate) async fn put_together(
    registry: &Registry,
    partial: &Path,
    blob: &Descriptor,
    parts: BlobParts,
    options: &RegistryOptions,
) -> Result<u64, Error> {
    let counted = AtomicU64::new(0);
    let count = |bytes| {
        counted.fetch_add(bytes, Ordering::Relaxed);
        options.progress.add_done(bytes);
    };
    let done = write(registry, partial, blob, parts, options, &count).await;
    done.inspect_err(|_| options.progress.take_back(counted.load(Ordering::Relaxed)))
}

async fn write(
    registry: &Registry,
    partial: &Path,
    blob: &Descriptor,
    parts: BlobParts,
    options: &RegistryOptions,
    count: &dyn Fn(u64),
) -> Result<u64, Error> {
    let step = format!("receiving parts of {}", blob.digest);
    let file = create_private(partial).map_err(ArchiveError::io(partial, "make it"))?;
    let file = Arc::new(file);
    let (to, pieces, size) = (Arc::clone(&file), parts.pieces, blob.size);
    let copied = tokio::task::spawn_blocking(move || {
        to.set_len(size)?;
        pieces.iter().try_for_each(|piece| copy(piece, &to))
    });
    let copied = copied
        .await
        .map_err(|e| registry.failed(&step, e.to_string()))?;
    copied.map_err(ArchiveError::io(partial, "write it"))?;
    let fetched: u64 = parts.gaps.iter().map(|gap| gap.end - gap.start).sum();
    count(size - fetched);
    let gaps = stream::iter(parts.gaps.into_iter().map(Ok));
    gaps.try_for_each_concurrent(options.parallel.max(1), |gap| {
        fetch(
            registry,
            &step,
            blob,
            gap,
            &file,
            options.stall_limit,
            count,
        )
    })
    .await?;
    let found = tokio::task::spawn_blocking(move || {
        file.sync_all()?;
        let mut whole = &*file;
        whole.rewind()?;
        Digest::of_reader(whole)
    });
    let found = found
        .await
        .map_err(|e| registry.failed(&step, e.to_string()))?;
    match found.map_err(ArchiveError::io(partial, "read it"))? {
        found if found == blob.digest => Ok(fetched),
        found => Err(registry.failed(&step, format!("put together it has the digest {found}"))),
    }
}

async fn fetch(
    registry: &Registry,
    step: &str,
    blob: &Descriptor,
    gap: Range<u64>,
    to: &File,
    stall_limit: Duration,
    count: &dyn Fn(u64),
) -> Result<(), Error> {
    let place = format!("blobs/{}", blob.digest);
    let asked = registry.session.get_part(step, &place, gap.clone());
    let mut stream = registry.within(step, asked).await?.bytes_stream();
    let flow = Flow::default();
    let receiving = async {
        let mut at = gap.start;
        while let Some(bytes) = stream.next().await {
            let bytes = bytes.map_err(|e| registry.failed(step, causes(&e)))?;
            let end = at + bytes.len() as u64;
            if end > gap.end {
                return Err(registry.failed(step, "more came than was asked for"));
            }
            to.write_all_at(&bytes, at)
                .map_err(|e| registry.failed(step, e.to_string()))?;
            at = end;
            flow.fetch_add(bytes.len() as u64, Ordering::Relaxed);
            count(bytes.len() as u64);
        }
        match at == gap.end {
            true => Ok(()),
            false => Err(registry.failed(step, "less came than was asked for")),
        }
    };
    let received = while_flowing(receiving, &flow, stall_limit).await;
    received.unwrap_or_else(|| Err(registry.failed(step, "nothing moved")))
}

fn copy(piece: &BlobPiece, to: &File) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    let mut done = 0;
    while done < piece.bytes {
        let n = usize::try_from(piece.bytes - done).map_or(BUFFER, |left| left.min(BUFFER));
        piece
            .file
            .read_exact_at(&mut buffer[..n], piece.offset + done)?;
        to.write_all_at(&buffer[..n], piece.at + done)?;
        done += n as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_join_and_leave_gaps() {
        const MIB: u64 = 1 << 20;
        let file = Arc::new(tempfile::tempfile().unwrap());
        let piece = |at: u64, bytes: u64, offset: u64| BlobPiece {
            at,
            bytes,
            file: Arc::clone(&file),
            offset,
        };
        let parts = |pieces: &[BlobPiece]| {
            let parts = BlobParts::of(pieces.to_vec(), 10 * MIB)?;
            let pieces: Vec<_> = parts.pieces.iter().map(|p| (p.at, p.bytes)).collect();
            Some((pieces, parts.gaps))
        };
        // Two that follow each other in both become one; order does not matter.
        let joined = parts(&[piece(3 * MIB, MIB, 8 * MIB), piece(2 * MIB, MIB, 7 * MIB)]);
        assert_eq!(
            joined,
            Some((
                vec![(2 * MIB, 2 * MIB)],
                vec![0..2 * MIB, 4 * MIB..10 * MIB]
            ))
        );
        let apart = parts(&[piece(0, MIB, 0), piece(MIB, 9 * MIB, 0)]);
        assert_eq!(apart, Some((vec![(0, MIB), (MIB, 9 * MIB)], vec![])));
        // One that is too small, overlaps, or does not fit is none.
        assert_eq!(parts(&[piece(0, MIB - 1, 0)]), None);
        assert_eq!(
            parts(&[piece(10 * MIB, MIB, 0), piece(u64::MAX, MIB, 0)]),
            None
        );
        let (pieces, gaps) = parts(&[piece(0, 2 * MIB, 0), piece(MIB, 2 * MIB, 0)]).unwrap();
        assert_eq!(pieces, [(0, 2 * MIB)]);
        assert_eq!(gaps.first(), Some(&(2 * MIB..10 * MIB)));
    }
}
