//! Held memory that is copied once its process goes on with other.

use super::{Later, Preloads, ahead, failed, told};
use crate::copy::{Copier, Imported, Way};
use crate::messages::protocol::{DriverError, ErrorKind};
use crate::preload::Library;
use crate::vram::memory::Mapped;
use crate::vram::store::VramFiles;
use cryopod_archive::vram::ChunkDigest;
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;

/// Pieces, and the library whose process waits for their memory: it is told when they are dropped.
struct Awaited {
    pieces: Vec<Imported>,
    library: Option<Library>,
}

impl Drop for Awaited {
    fn drop(&mut self) {
        self.pieces.clear();
        if let Some(library) = &self.library {
            library.let_go();
        }
    }
}

impl Preloads {
    /// Copies pieces into their buffer while their process goes on with others, if the buffer is to be written at all.
    pub(super) fn copy_later(
        self: &Arc<Self>,
        library: Option<Library>,
        buffer: u64,
        pieces: Vec<Imported>,
        file: File,
        later: Later,
        files: &Arc<VramFiles>,
    ) {
        let held = Awaited { pieces, library };
        if !files.is_awaited(buffer) {
            return;
        }
        let (own, files) = (Arc::clone(self), Arc::clone(files));
        let copy = {
            let files = Arc::clone(&files);
            move || {
                let copied = || {
                    let bytes = file.metadata().map_err(|error| told(&error))?.len();
                    let mut map = Mapped::new(&file, bytes, true).map_err(|error| told(&error))?;
                    let memory = map.bytes_mut().map_err(|error| told(&error))?;
                    let filled = |bytes| files.has_filled(buffer, bytes);
                    let copier = own.gpus.copier()?;
                    let chunk = later.chunk.filter(|chunk| *chunk <= ahead::MAX_CHUNK);
                    let needed = chunk.map(|chunk| {
                        needed(
                            &copier,
                            &held.pieces,
                            bytes,
                            u64::from(chunk),
                            buffer,
                            &files,
                        )
                    });
                    let ranges = match needed {
                        Some(Ok(ranges)) => ranges,
                        Some(Err(error)) => {
                            tracing::info!("all is copied: {error}");
                            later.ranges
                        }
                        None => later.ranges,
                    };
                    let (way, threads) = (Way::Out(&filled), later.threads);
                    copier.copy_ranges(&held.pieces, &ranges, memory, way, threads)
                };
                let copied = copied();
                drop(held);
                match copied {
                    Ok(()) => files.is_complete(buffer),
                    Err(error) => files.fail(&error.message),
                }
            }
        };
        let thread = std::thread::Builder::new().name("copy later".into());
        if let Err(error) = thread.spawn(copy) {
            files.fail(&format!("copying the GPU memory: {error}"));
        }
    }
}

/// Returns the ranges of these pieces that their writer needs: not those whose contents it has, by the digests that the GPU
/// makes.
///
/// # Errors
/// What is needed cannot be told.
fn needed(
    copier: &Copier,
    pieces: &[Imported],
    bytes: u64,
    chunk: u64,
    buffer: u64,
    files: &VramFiles,
) -> Result<Vec<Range<u64>>, DriverError> {
    let mut digests = copier.digests(pieces, chunk)?;
    digests.sort_unstable_by_key(|(place, _)| *place);
    let places = (0..bytes).step_by(usize::try_from(chunk).unwrap_or(usize::MAX));
    if !bytes.is_multiple_of(chunk) || !digests.iter().map(|(place, _)| *place).eq(places) {
        return Err(failed(ErrorKind::Vram, "some of it is elsewhere"));
    }
    let digests: Vec<ChunkDigest> = (digests.into_iter())
        .map(|(_, digest)| ChunkDigest(digest))
        .collect();
    let runs = files.needed(buffer, &digests)?;
    if runs
        .iter()
        .try_fold(0, |sum: u64, run| sum.checked_add(*run))
        != Some(digests.len() as u64)
    {
        return Err(failed(
            ErrorKind::Vram,
            "the writer has told of other chunks",
        ));
    }
    let mut at = 0;
    let ranges = runs.iter().map(|run| {
        let from = at;
        at += run * chunk;
        from..at
    });
    let ranges: Vec<Range<u64>> = ranges.step_by(2).collect();
    Ok(ranges
        .into_iter()
        .filter(|range| !range.is_empty())
        .collect())
}
