//! GPU memory that is copied while its process still works, so that it has little to wait for.
//!
//! Work that runs meanwhile changes what is copied. When the process has stopped, the GPU makes the digests of all chunks
//! once more: a chunk whose digest is that of its copy is as it was copied, a torn one is not.

use super::held::Taken;
use super::{MAX_HELD, Preloads, call_off, failed, told};
use crate::copy::{Copier, Digest, Imported, Way};
use crate::messages::protocol::{CopiedAhead, DriverError, ErrorKind, Hold, Op, Outcome, WriteTo};
use crate::preload::{Library, size};
use crate::vram::SharedBuffer;
use crate::vram::memory::Mapped;
use crate::vram::store::VramFiles;
use crate::vram::worker::State;
use cryopod_preload_wire::Request;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Largest chunk whose digest can be made: all pieces can be divided into such.
pub(super) const MAX_CHUNK: u32 = 2 << 20;
/// How long the library may take to export its pieces.
const EXPORT: Duration = Duration::from_secs(30);

/// What has been copied of a process.
pub(super) struct Ahead {
    pub(super) buffer: SharedBuffer,
    pub(super) bytes: u64,
    chunk: u64,
    /// Of each chunk's copy, by place.
    digests: BTreeMap<u64, blake3::Hash>,
}

impl Ahead {
    /// Returns the ranges of the buffer that do not have the contents of these pieces, in order.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn changed(
        &self,
        copier: &Copier,
        pieces: &[Imported],
    ) -> Result<Vec<Range<u64>>, DriverError> {
        let mut digests = copier.digests(pieces, self.chunk)?;
        digests.sort_unstable_by_key(|(place, _)| *place);
        Ok(differing(&digests, self.chunk, |place| {
            self.digests.get(&place).map(blake3::Hash::as_bytes)
        }))
    }
}

/// The ranges whose digests are not those that were `copied`, in order.
pub(super) fn differing<'a>(
    digests: &[(u64, Digest)],
    chunk: u64,
    copied: impl Fn(u64) -> Option<&'a Digest>,
) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for (at, now) in digests {
        if copied(*at) == Some(now) {
            continue;
        }
        let end = at + chunk;
        match ranges.last_mut() {
            Some(last) if last.end == *at => last.end = end,
            _ => ranges.push(*at..end),
        }
    }
    ranges
}

impl Preloads {
    /// Carries out [`Op::PreloadAhead`]; `None` for other requests.
    pub(super) fn perform_ahead(
        self: &Arc<Self>,
        op: &Op,
        files: &Arc<VramFiles>,
    ) -> Option<Outcome> {
        let Op::PreloadAhead {
            pids,
            threads,
            hold,
            write,
        } = op
        else {
            return None;
        };
        let each = (threads / pids.len().max(1)).max(1);
        let mut done = CopiedAhead::default();
        std::thread::scope(|scope| {
            let copy = |pid: &i32| {
                let pid = *pid;
                let copy = move || {
                    let copied = self.copy_ahead(pid, each, *hold, write, files);
                    if let Some(library) = Library::of(pid) {
                        library.let_go();
                    }
                    copied
                };
                (pid, scope.spawn(copy))
            };
            let copies: Vec<_> = pids.iter().map(copy).collect();
            for (pid, copy) in copies {
                match copy.join() {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => done.left_out.push((pid, error.message)),
                    Err(_) => done.left_out.push((pid, "a thread died".into())),
                }
            }
        });
        let ahead = self.ahead();
        let mut buffers = pids.iter().filter_map(|pid| ahead.get(pid));
        done.writes = buffers.any(|ahead| files.is_written_ahead(ahead.buffer.id));
        Some(Outcome::Ahead(done))
    }

    pub(super) fn ahead(&self) -> std::sync::MutexGuard<'_, BTreeMap<i32, Ahead>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room that is free until their processes' memory is taken out.
    pub(super) fn promised(&self) -> std::sync::MutexGuard<'_, BTreeMap<i32, Taken>> {
        self.promised.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copy_ahead(
        &self,
        pid: i32,
        threads: usize,
        hold: Hold,
        write: &WriteTo,
        files: &Arc<VramFiles>,
    ) -> Result<(), DriverError> {
        let joining = files.joining(Some(write));
        let Some(library) = Library::of(pid) else {
            return Ok(());
        };
        let chunk = write.config.chunk_bytes;
        if chunk > MAX_CHUNK {
            return Err(failed(
                ErrorKind::NotSupported,
                "chunks are larger than pieces",
            ));
        }
        let pieces = library.ask(Request::Export, None, EXPORT);
        let pieces = pieces.map_err(|error| told(&error))?;
        if pieces.is_empty() {
            return Ok(());
        }
        let copier = self.gpus.copier()?;
        let bytes = size(&pieces).map_err(|error| told(&error))?;
        let imported = copier.import(&pieces, bytes)?;
        drop(pieces);
        if hold == Hold::CopyLater
            && imported.len() <= MAX_HELD
            && let Some(room) = self.room.take(&copier.room(&imported)?)
        {
            // It waits for nothing of it.
            self.promised().insert(pid, room);
            return Ok(());
        }
        // Where digests cannot be made, nothing is gained.
        copier.digests(imported.get(..1).unwrap_or_default(), u64::from(chunk))?;
        let buffer = files.make_for(pid, bytes)?;
        files.set_state(buffer.id, State::Ahead);
        joining.with(buffer.id);
        let digests = Mutex::new(BTreeMap::new());
        let seen = |at: usize, bytes: &[u8]| {
            let chunks = bytes
                .chunks(chunk as usize)
                .zip((at as u64..).step_by(chunk as usize));
            let chunks: Vec<_> = chunks
                .map(|(bytes, at)| (at, blake3::hash(bytes)))
                .collect();
            let mut digests = digests.lock().unwrap_or_else(PoisonError::into_inner);
            digests.extend(chunks);
        };
        let copied = files.file(buffer.id).and_then(|file| {
            let mut map = Mapped::new(&file, bytes, true).map_err(|error| told(&error))?;
            let memory = map.bytes_mut().map_err(|error| told(&error))?;
            let filled = |bytes| files.has_filled(buffer.id, bytes);
            copier.copy(&imported, memory, Way::OutSeen(&filled, &seen), threads)
        });
        if let Err(error) = copied {
            files.forget(buffer.id);
            call_off(buffer.id, files);
            return Err(error);
        }
        let ahead = Ahead {
            buffer,
            bytes,
            chunk: u64::from(chunk),
            digests: digests.into_inner().unwrap_or_else(PoisonError::into_inner),
        };
        self.ahead().insert(pid, ahead);
        Ok(())
    }
}
