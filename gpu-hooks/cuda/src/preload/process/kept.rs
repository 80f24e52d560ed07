//! The copy of a process's GPU memory that stays in host memory from one suspend to the next.
//!
//! It is the file that the process keeps while it is suspended, with a table behind the contents: the digest of each
//! chunk, which the GPU made after the process had stopped. The library goes on to hold it after a resume
//! ([`Request::Spare`](cryopod_preload_wire::Request::Spare)), so it ends with the process. The next suspend copies the
//! chunks that have another digest.
//!
//! A copy is whole or gone: the library lets go of it when the process stops, and from then on only this agent has it,
//! until the process gets it again with all contents.

use super::ahead::differing;
use super::{DriverError, Piece, Preloads, State, TakenMemory, VramFiles, failed, give_up, told};
use crate::copy::{Digest, Way};
use crate::messages::protocol::ErrorKind;
use crate::preload::{Library, size};
use crate::vram::memory::{self, HUGE, Mapped};
use rustix::fs::{FallocateFlags, fallocate};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Every piece can be divided into such, and begins at a multiple.
const CHUNK: u64 = 1 << 20;
const MAGIC: [u8; 8] = *b"CRYOKEPT";
/// At the file's end: [`MAGIC`], the contents' size, and the table's digest.
const FOOTER: u64 = 48;
const DIGEST: u64 = size_of::<Digest>() as u64;
/// Largest table that is read, of 8 TiB of GPU memory: the process may have made a file of any size, without a byte in it.
const MAX_TABLE: u64 = 256 << 20;

/// A process's copy, taken from it.
pub(super) struct Kept {
    file: File,
    /// Room for contents; the table is behind it.
    room: u64,
    digests: BTreeMap<u64, Digest>,
}

impl Kept {
    /// Returns the copy of a process, if it is whole.
    pub(super) fn of(pid: i32) -> Option<Self> {
        let file = Library::of(pid)?.spare(pid)?;
        let (room, table) = read(&file)?;
        let digests = (0..).step_by(CHUNK as usize);
        let digests = digests.zip(
            table
                .as_chunks::<{ size_of::<Digest>() }>()
                .0
                .iter()
                .copied(),
        );
        Some(Self {
            file,
            room,
            digests: digests.filter(|(_, digest)| *digest != [0; 32]).collect(),
        })
    }
}

/// Whether the file has all contents and their table.
pub(super) fn is_whole(file: &File) -> bool {
    read(file).is_some()
}

/// Reads the size of the contents, and the table.
fn read(file: &File) -> Option<(u64, Vec<u8>)> {
    let end = file.metadata().ok()?.len().checked_sub(FOOTER)?;
    let mut footer = [0; FOOTER as usize];
    file.read_exact_at(&mut footer, end).ok()?;
    let rest = footer.strip_prefix(&MAGIC)?;
    let (room, digest) = rest.split_first_chunk::<8>()?;
    let room = u64::from_le_bytes(*room);
    // The process may have written anything there.
    let bytes = table_bytes(room);
    if !room.is_multiple_of(CHUNK) || room.checked_add(bytes)? > end || bytes > MAX_TABLE {
        return None;
    }
    let mut table = vec![0; usize::try_from(bytes).ok()?];
    file.read_exact_at(&mut table, room).ok()?;
    (blake3::hash(&table).as_bytes() == digest).then_some((room, table))
}

fn table_bytes(room: u64) -> u64 {
    room / CHUNK * DIGEST
}

/// Makes a file for contents of this size, with room for half as much again: a process that allocates more can go on
/// using it. What is not used takes no memory.
fn new_file(bytes: u64) -> io::Result<(File, u64)> {
    let room = bytes.saturating_add(bytes / 2).next_multiple_of(HUGE);
    let all = room.saturating_add(table_bytes(room) + FOOTER);
    Ok((memory::new_file(all)?, room))
}

/// Marks the file as not whole.
fn begin(file: &File) -> io::Result<()> {
    let end = file.metadata()?.len().saturating_sub(FOOTER);
    file.write_all_at(&[0; FOOTER as usize], end)
}

/// Writes the table, and marks the file as whole.
fn finish(file: &File, room: u64, digests: &[(u64, Digest)]) -> io::Result<()> {
    let len = usize::try_from(table_bytes(room)).map_err(io::Error::other)?;
    let mut table = vec![0; len];
    for (at, digest) in digests {
        let entry = usize::try_from(at / CHUNK * DIGEST).ok();
        let entry = entry.and_then(|at| table.get_mut(at..at + digest.len()));
        // It lies at no multiple of the chunks: the next suspend would not know it.
        let entry = entry.filter(|_| at.is_multiple_of(CHUNK));
        entry
            .ok_or(io::ErrorKind::InvalidInput)?
            .copy_from_slice(digest);
    }
    file.write_all_at(&table, room)?;
    let digest = blake3::hash(&table);
    let footer = [&MAGIC[..], &room.to_le_bytes(), digest.as_bytes()];
    let end = file.metadata()?.len().saturating_sub(FOOTER);
    file.write_all_at(&footer.concat(), end)
}

/// Frees the chunks of the copy that no piece has any more.
fn free_unused(kept: &Kept, digests: &[(u64, Digest)]) -> io::Result<()> {
    let used: BTreeMap<u64, &Digest> = digests.iter().map(|(at, digest)| (*at, digest)).collect();
    let unused = kept.digests.keys().filter(|at| !used.contains_key(at));
    for at in unused {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&kept.file, flags, *at, CHUNK)?;
    }
    Ok(())
}

impl Preloads {
    /// Copies the pieces into a buffer with a table; of what is `kept` already, what has changed.
    pub(super) fn copied_to_keep(
        &self,
        pid: i32,
        pieces: &[Piece],
        threads: usize,
        kept: Option<Kept>,
        files: &Arc<VramFiles>,
    ) -> Result<TakenMemory, DriverError> {
        let bytes = size(pieces).map_err(|error| told(&error))?;
        let copier = self.gpus.copier()?;
        let pieces = copier.import(pieces, bytes)?;
        let mut digests = copier.digests(&pieces, CHUNK)?;
        digests.sort_unstable_by_key(|(place, _)| *place);
        let kept = kept.filter(|kept| bytes <= kept.room);
        let ranges = match &kept {
            Some(kept) => differing(&digests, CHUNK, |at| kept.digests.get(&at)),
            None => std::iter::once(0..bytes).collect::<Vec<Range<u64>>>(),
        };
        let copied = ranges.iter().map(|range| range.end - range.start).sum();
        let prepared = match kept {
            Some(kept) => begin(&kept.file)
                .and_then(|()| free_unused(&kept, &digests))
                .map(|()| (kept.file, kept.room, copied)),
            None => new_file(bytes).map(|(file, room)| (file, room, bytes)),
        };
        let (file, room, missing) = prepared.map_err(|error| told(&error))?;
        let own = file.try_clone().map_err(|error| told(&error))?;
        let buffer = files.adopt(pid, own, bytes, missing)?;
        let fill = || {
            let mut map = Mapped::new(&file, bytes, true).map_err(|error| told(&error))?;
            let memory = map.bytes_mut().map_err(|error| told(&error))?;
            copier.copy_ranges(&pieces, &ranges, memory, Way::Out(&|_| {}), threads)?;
            finish(&file, room, &digests)
                .map_err(|error| failed(ErrorKind::Vram, format!("the table: {error}")))
        };
        if let Err(error) = fill() {
            give_up(buffer.id, files);
            return Err(error);
        }
        files.set_state(buffer.id, State::Complete);
        Ok(TakenMemory {
            buffer,
            bytes,
            pieces,
            copied,
            later: None,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_copy_is_whole_only_with_its_table() {
        let (file, room) = new_file(5 << 20).unwrap();
        assert!(!is_whole(&file));
        finish(&file, room, &[(0, [1; 32]), (3 << 20, [2; 32])]).unwrap();
        let (again, table) = read(&file).unwrap();
        assert_eq!(
            (again, &table[..32], &table[32..64]),
            (room, &[1; 32][..], &[0; 32][..])
        );
        assert_eq!(table[96..128], [2; 32]);
        file.write_all_at(&[3], room + 32).unwrap();
        assert!(!is_whole(&file));
        finish(&file, room, &[]).unwrap();
        begin(&file).unwrap();
        assert!(!is_whole(&file));
        finish(&file, room, &[(1, [1; 32])]).unwrap_err();
        // Whatever a process writes there.
        let end = file.metadata().unwrap().len() - FOOTER;
        for room in [u64::MAX, u64::MAX / CHUNK * CHUNK, end, 0] {
            file.write_all_at(&MAGIC, end).unwrap();
            file.write_all_at(&room.to_le_bytes(), end + 8).unwrap();
            assert!(!is_whole(&file));
        }
        let room = (MAX_TABLE / DIGEST + 1) * CHUNK;
        let all = room + table_bytes(room) + FOOTER;
        file.set_len(all).unwrap();
        file.write_all_at(&MAGIC, all - FOOTER).unwrap();
        file.write_all_at(&room.to_le_bytes(), all - FOOTER + 8)
            .unwrap();
        let empty = vec![0; usize::try_from(table_bytes(room)).unwrap()];
        let digest = blake3::hash(&empty);
        file.write_all_at(digest.as_bytes(), all - FOOTER + 16)
            .unwrap();
        assert!(!is_whole(&file));
    }
}
