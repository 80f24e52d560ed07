//! Puts a process's GPU memory back where the plugin took it from, when the plugin could not.

use super::{Buffer, Place, VramFiles};
use crate::inject::{Injection, Seized};
use cryopod_host::files::Host;
use cryopod_host::processes::maps;
use rustix::fs::{FallocateFlags, fallocate};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

const COPY: usize = 16 << 20;

impl VramFiles {
    /// Maps a process's memory back if the plugin did not. The process must not be traced, and this thread becomes its
    /// tracer for a moment. After an error the driver must not restore the process.
    pub fn put_back(&self, pid: i32) -> io::Result<()> {
        let away: Vec<(Arc<Buffer>, Place)> = {
            let inner = self.inner();
            let of = |(id, place): (&u64, &Place)| Some((inner.buffers.get(id).cloned()?, *place));
            inner
                .places
                .iter()
                .filter(|(_, place)| place.pid == pid)
                .filter_map(of)
                .collect()
        };
        for (buffer, place) in away {
            if is_mapped(&buffer, place)? {
                continue;
            }
            let _seized = Seized::new(place.tid)?;
            let mut inject = Injection::begin(pid, place.tid, 0)?;
            let mut mapped = inject.map_file(place.address, buffer.bytes, &buffer.file);
            if mapped.is_err() {
                mapped = inject.map_private(place.address, buffer.bytes);
                mapped = mapped.and_then(|()| copy(&buffer, pid, place.address));
            }
            let ended = inject.end();
            mapped.and(ended)?;
            tracing::info!(pid, "GPU memory mapped back");
        }
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
/// two copies.
pub(super) fn copy(buffer: &Buffer, pid: i32, address: u64) -> io::Result<()> {
    let to = File::options()
        .write(true)
        .open(format!("/proc/{pid}/mem"))?;
    let mut piece = vec![0; COPY];
    let mut at = 0;
    while at < buffer.bytes {
        let len = piece
            .len()
            .min(usize::try_from(buffer.bytes - at).unwrap_or(usize::MAX));
        buffer.file.read_exact_at(&mut piece[..len], at)?;
        to.write_all_at(&piece[..len], address + at)?;
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = fallocate(&buffer.file, flags, at, len as u64);
        at += len as u64;
    }
    Ok(())
}
