//! Puts a process's GPU memory back where the plugin took it from, when the plugin could not.

use super::work::Work;
use super::{Buffer, Place, VramFiles, failed};
use crate::inject::{Injection, Seized};
use crate::messages::protocol::DriverError;
use cryopod_host::files::Host;
use cryopod_host::processes::maps;
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

const COPY: usize = 16 << 20;

impl VramFiles {
    /// Maps a process's memory back if the plugin did not. The process must not be traced, and this thread becomes its
    /// tracer for a moment. After an error the driver must not restore the process.
    pub fn put_back(&self, pid: i32) -> io::Result<()> {
        let away: Vec<(u64, Arc<Buffer>, Place)> = {
            let inner = self.inner();
            let of =
                |(id, place): (&u64, &Place)| Some((*id, inner.buffers.get(id).cloned()?, *place));
            inner
                .places
                .iter()
                .filter(|(_, place)| place.pid == pid)
                .filter_map(of)
                .collect()
        };
        for (id, buffer, place) in away {
            if buffer.is_lost.load(Relaxed) {
                return Err(io::Error::other("a part of it could not be copied back"));
            }
            if is_mapped(&buffer, place)? {
                continue;
            }
            let _seized = Seized::new(place.tid)?;
            let mut inject = Injection::begin(pid, place.tid, 0)?;
            let mut mapped = inject.map_file(place.address, buffer.bytes, &buffer.file);
            if mapped.is_err() {
                mapped = inject.map_private(place.address, buffer.bytes);
                mapped = mapped.and_then(|()| self.move_to(id, &buffer, place, Duration::ZERO));
            }
            let ended = inject.end();
            mapped.and(ended)?;
            tracing::info!(pid, "GPU memory mapped back");
        }
        Ok(())
    }

    /// Moves a buffer's contents into private memory of its process.
    pub(super) fn make_private(
        &self,
        id: u64,
        pid: i32,
        address: u64,
        limit: Duration,
    ) -> Result<(), DriverError> {
        let buffer = self.buffer(id)?;
        let place = Place {
            pid,
            tid: pid,
            address,
        };
        let moved = self.move_to(id, &buffer, place, limit);
        moved.map_err(failed("copying the GPU memory"))
    }

    /// The same. A writer reads what is freed here: it has so long to end well; after that the checkpoint fails.
    fn move_to(&self, id: u64, buffer: &Buffer, to: Place, limit: Duration) -> io::Result<()> {
        if self.wait(limit).is_err() && matches!(self.inner().work, Work::Running { .. }) {
            self.cancel();
        }
        copy(buffer, to.pid, to.address)?;
        // Where it was, there is nothing to put back any more.
        self.inner().places.remove(&id);
        Ok(())
    }
}

fn is_mapped(buffer: &Buffer, place: Place) -> io::Result<bool> {
    let inode = buffer.file.metadata()?.ino();
    let mut found = false;
    maps::for_each(&Host::system(), place.pid, |mapping| {
        found |= mapping.addresses.start == place.address && mapping.inode == inode;
    })?;
    Ok(found)
}

/// Copies a buffer into private memory of the process; frees each piece as soon as it is there, so that there are never
/// two copies. After an error the buffer has all of it again, or is marked as lost.
fn copy(buffer: &Buffer, pid: i32, address: u64) -> io::Result<()> {
    let memory = File::options()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/mem"))?;
    let mut space = vec![0; COPY];
    let len = |at: u64| usize::try_from(buffer.bytes - at).map_or(COPY, |left| left.min(COPY));
    let mut at = 0;
    while at < buffer.bytes {
        let piece = &mut space[..len(at)];
        let copied = buffer.file.read_exact_at(piece, at);
        if let Err(error) = copied.and_then(|()| memory.write_all_at(piece, address + at)) {
            let back = (0..at).step_by(COPY).try_for_each(|at| {
                memory.read_exact_at(&mut space, address + at)?;
                buffer.file.write_all_at(&space, at)
            });
            buffer.is_lost.store(back.is_err(), Relaxed);
            return Err(error);
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = fallocate(&buffer.file, flags, at, piece.len() as u64);
        at += piece.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vram::memory::{self, Mapped};

    #[test]
    fn a_buffer_that_could_not_be_copied_is_whole_again() {
        // Behind the file's end, which is that of the first piece, nothing can be written.
        let there = memory::new_file(2 * COPY as u64).unwrap();
        let map = Mapped::new(&there, 2 * COPY as u64, true).unwrap();
        there.set_len(COPY as u64).unwrap();
        let bytes = COPY + 4096;
        let content: Vec<u8> = (0..bytes).map(|i| (i / 4096) as u8 | 1).collect();
        let buffer = Buffer {
            file: memory::new_file(bytes as u64).unwrap(),
            bytes: bytes as u64,
            pid: None,
            state: std::sync::Mutex::new(crate::vram::worker::State::Complete),
            is_lost: false.into(),
        };
        buffer.file.write_all_at(&content, 0).unwrap();
        let pid = std::process::id() as i32;
        copy(&buffer, pid, map.bytes().as_ptr() as u64).unwrap_err();
        let mut now = vec![0; bytes];
        buffer.file.read_exact_at(&mut now, 0).unwrap();
        assert!(now == content);
        assert!(!buffer.is_lost.load(Relaxed));
    }
}
