//! Custom storage of CUDA 13.4: at a checkpoint the driver maps a process's GPU memory in the agent, and the agent copies it
//! into a buffer; a restore the other way.
//!
//! Once the driver has mapped the memory there is no way back but to copy it and to complete the operation. So all that can
//! fail is made ready before: contexts, pinned buffers, host memory. It never ran on hardware.
//!
//! A buffer starts with a table of its GPUs, so that whoever has the buffer can restore from it.

use crate::copy::{Gpus, Span, Way};
use crate::driver::{Handed, HandedPart};
use crate::gpu::{GpuPair, GpuUuid, mapped};
use crate::inject::{Injection, Seized};
use crate::procfs;
use crate::protocol::{DriverError, ErrorKind, StorageTo};
use crate::vram::SharedBuffer;
use crate::vram::memory::Mapped;
use crate::vram::store::VramFiles;
use crate::vram::worker::State;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bytes of the table at a buffer's start.
const TABLE: usize = 4096;
const MAGIC: [u8; 8] = *b"CRYOSTOR";
const VERSION: u32 = 1;
/// Bytes of the table before its first GPU, and of each GPU.
const HEAD: usize = 16;
const ROW: usize = 24;
const MAX_GPUS: usize = 64;
const PAGE: u64 = 4096;

/// What a GPU had: a part of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    gpu: GpuUuid,
    bytes: u64,
}

/// The table of a buffer. The parts follow it in this order, each from a page's start.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Table(Vec<Part>);

impl Table {
    fn encode(&self) -> [u8; TABLE] {
        let mut bytes = [0; TABLE];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.0.len() as u32).to_le_bytes());
        for (row, part) in bytes[HEAD..].chunks_exact_mut(ROW).zip(&self.0) {
            row[..16].copy_from_slice(&part.gpu.0);
            row[16..].copy_from_slice(&part.bytes.to_le_bytes());
        }
        bytes
    }

    /// Reads a table. It may come from a stranger.
    fn decode(bytes: &[u8; TABLE]) -> Option<Self> {
        let number = |at: usize| -> Option<u32> {
            Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
        };
        let count = usize::try_from(number(12)?).ok()?;
        if bytes[..8] != MAGIC || number(8)? != VERSION || count > MAX_GPUS {
            return None;
        }
        let rows = bytes[HEAD..].chunks_exact(ROW).take(count);
        let part = |row: &[u8]| {
            Some(Part {
                gpu: GpuUuid(row[..16].try_into().ok()?),
                bytes: u64::from_le_bytes(row[16..].try_into().ok()?),
            })
        };
        let table = Self(rows.map(part).collect::<Option<_>>()?);
        table.bytes().map(|_| table)
    }

    /// Size of the whole buffer; `None` if it overflows.
    fn bytes(&self) -> Option<u64> {
        self.0.iter().try_fold(TABLE as u64, |sum, part| {
            sum.checked_add(part.bytes.checked_next_multiple_of(PAGE)?)
        })
    }

    /// The parts with their places behind the table.
    fn places(&self) -> impl Iterator<Item = (u64, Part)> {
        self.0.iter().scan(0, |at, part| {
            let place = *at;
            *at += part.bytes.next_multiple_of(PAGE);
            Some((place, *part))
        })
    }
}

fn failed(kind: ErrorKind, message: impl Into<String>) -> DriverError {
    DriverError {
        kind,
        code: None,
        message: format!("custom storage: {}", message.into()),
    }
}

fn told(error: &io::Error) -> DriverError {
    failed(ErrorKind::Vram, error.to_string())
}

/// Where the memory of a process is for a restore.
pub struct Source {
    file: File,
    table: Table,
    /// The agent's buffer, which may still be read into.
    buffer: Option<u64>,
}

/// What is in a buffer now.
#[derive(Debug)]
pub struct Taken {
    pub buffer: SharedBuffer,
    pub bytes: u64,
    pub writes: bool,
}

/// The processes whose GPU memory custom storage has taken.
#[derive(Default)]
pub struct Stores {
    gpus: Arc<Gpus>,
    /// The buffer of each process.
    out: Mutex<BTreeMap<i32, u64>>,
}

impl Stores {
    pub fn new(gpus: Arc<Gpus>) -> Self {
        let out = Mutex::default();
        Self { gpus, out }
    }

    fn out(&self) -> MutexGuard<'_, BTreeMap<i32, u64>> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets all: the processes keep their memory themselves, or it is in files.
    pub fn forget_all(&self) {
        self.out().clear();
    }

    pub fn note(&self, pid: i32, buffer: u64) {
        self.out().insert(pid, buffer);
    }

    pub fn forget(&self, pid: i32) {
        self.out().remove(&pid);
    }

    /// Makes ready what a checkpoint needs. From the driver's part on nothing may fail.
    ///
    /// # Errors
    /// It cannot be done with custom storage.
    pub fn prepare(&self, pid: i32, files: &VramFiles) -> Result<(), DriverError> {
        // The OOM killer must not take this process while it is the only one that can complete an operation.
        if let Err(error) = std::fs::write("/proc/self/oom_score_adj", "-1000") {
            tracing::debug!("oom_score_adj: {error}");
        }
        if !files.has_reserved(pid) {
            let expected = self.gpus.used(pid);
            if expected == 0 {
                let what = "how much host memory it takes is not known";
                return Err(failed(ErrorKind::OutOfMemory, what));
            }
            files.has_room(expected)?;
        }
        let by_minor: BTreeMap<u32, GpuUuid> = procfs::gpus_by_minor().into_iter().collect();
        let minors = procfs::open_gpu_minors(pid);
        let used = minors.iter().filter_map(|m| by_minor.get(m).copied());
        self.prepare_gpus(used.collect())
    }

    /// The driver wants a context on each GPU of the process.
    fn prepare_gpus(&self, mut used: Vec<GpuUuid>) -> Result<(), DriverError> {
        if used.is_empty() {
            used = (0..).map_while(|device| self.gpus.uuid(device)).collect();
        }
        self.gpus.prepare(&used)
    }

    /// Copies what the driver has handed over into a new buffer.
    ///
    /// # Errors
    /// It failed twice. The process cannot go on.
    pub fn copy_out(
        &self,
        pid: i32,
        handed: &Handed,
        to: &StorageTo,
        files: &Arc<VramFiles>,
    ) -> Result<Taken, DriverError> {
        let uuid = |device| self.gpus.uuid(device);
        let part = |one: &HandedPart| {
            let gpu = uuid(one.device)
                .ok_or_else(|| failed(ErrorKind::Driver, "it is on a GPU that is not known"))?;
            let bytes = one.bytes;
            Ok(Part { gpu, bytes })
        };
        let table = Table(
            handed
                .parts
                .iter()
                .map(part)
                .collect::<Result<_, DriverError>>()?,
        );
        let bytes = table.bytes().filter(|_| table.0.len() <= MAX_GPUS);
        let bytes = bytes.ok_or_else(|| failed(ErrorKind::Driver, "its sizes make no sense"))?;
        let buffer = files.make_regardless(pid, bytes)?;
        files.set_state(buffer.id, State::Filling);
        let writes = to.write.as_ref().is_some_and(|to| {
            let begun = files.write_ahead(&to.dir, &[buffer.id], &to.config);
            begun
                .inspect_err(|error| tracing::info!("it is written later: {error}"))
                .is_ok()
        });
        let filled = |bytes| files.has_filled(buffer.id, bytes + TABLE as u64);
        let copy = || {
            let file = files.file(buffer.id)?;
            let mut map = Mapped::new(&file, bytes, true).map_err(|error| told(&error))?;
            let memory = map.bytes_mut().map_err(|error| told(&error))?;
            let (head, memory) = memory.split_at_mut(TABLE);
            head.copy_from_slice(&table.encode());
            let places = table.places().zip(&handed.parts);
            let spans: Vec<Span> = places
                .map(|((offset, part), one)| Span {
                    device: one.device,
                    address: one.address,
                    offset,
                    bytes: part.bytes,
                })
                .collect();
            let copier = self.gpus.copier()?;
            copier.copy_spans(&spans, memory, Way::Out(&filled), to.threads)
        };
        let again = |error: DriverError| {
            tracing::warn!(pid, "{error}; once more");
            copy()
        };
        match copy().or_else(again) {
            Ok(()) => {
                files.set_state(buffer.id, State::Complete);
                Ok(Taken {
                    buffer,
                    bytes,
                    writes,
                })
            }
            Err(error) => {
                if writes {
                    files.call_off();
                }
                files.forget(buffer.id);
                Err(error)
            }
        }
    }

    /// Finds the memory of a process: in this buffer, in the one that this agent has filled, or in memory that the process
    /// keeps. `None`: the driver has it.
    ///
    /// # Errors
    /// It cannot be read, or is not what custom storage has taken.
    pub fn source(
        &self,
        pid: i32,
        buffer: Option<u64>,
        limit: Duration,
        files: &VramFiles,
    ) -> Result<Option<Source>, DriverError> {
        let own = self.out().get(&pid).copied();
        let Some(id) = buffer.or(own) else {
            return Ok(kept(pid).map(|kept| Source {
                file: kept.file,
                table: kept.table,
                buffer: None,
            }));
        };
        files.has_been_read(id, TABLE as u64, limit)?;
        let file = files.file(id)?;
        let table = table_of(&file).map_err(|error| told(&error))?;
        let table = table.ok_or_else(|| failed(ErrorKind::Vram, "its table is damaged"))?;
        Ok(Some(Source {
            file,
            table,
            buffer: Some(id),
        }))
    }

    /// Makes ready what a restore needs.
    ///
    /// # Errors
    /// The driver's.
    pub fn prepare_restore(&self, source: &Source, map: &[GpuPair]) -> Result<(), DriverError> {
        let parts = source.table.0.iter();
        self.prepare_gpus(parts.map(|part| mapped(part.gpu, map)).collect())
    }

    /// Copies a process's memory to where the driver has mapped it.
    ///
    /// # Errors
    /// The driver wants other memory than there is, it cannot be read, or the copy failed twice. The process cannot go on.
    pub fn copy_in(
        &self,
        source: &Source,
        handed: &Handed,
        map: &[GpuPair],
        threads: usize,
        limit: Duration,
        files: &VramFiles,
    ) -> Result<(), DriverError> {
        let wrong = || {
            failed(
                ErrorKind::Vram,
                "the driver wants other memory than was taken",
            )
        };
        let mut spans = Vec::new();
        for one in &handed.parts {
            let gpu = self.gpus.uuid(one.device).ok_or_else(wrong)?;
            let mut places = source.table.places();
            let (offset, part) = places
                .find(|(_, part)| mapped(part.gpu, map) == gpu && part.bytes == one.bytes)
                .ok_or_else(wrong)?;
            spans.push(Span {
                device: one.device,
                address: one.address,
                offset,
                bytes: part.bytes,
            });
        }
        if spans.len() != source.table.0.len() {
            return Err(wrong());
        }
        let bytes = source.table.bytes().ok_or_else(wrong)?;
        let ready = |bytes| match source.buffer {
            Some(id) => files.has_been_read(id, bytes + TABLE as u64, limit),
            None => Ok(()),
        };
        let copy = || {
            let mut mapping =
                Mapped::new(&source.file, bytes, true).map_err(|error| told(&error))?;
            let memory = mapping.bytes_mut().map_err(|error| told(&error))?;
            let copier = self.gpus.copier()?;
            copier.copy_spans(&spans, &mut memory[TABLE..], Way::In(&ready), threads)
        };
        match copy() {
            Err(error) if error.kind == ErrorKind::Driver => {
                tracing::warn!("{error}; once more");
                copy()
            }
            other => other,
        }
    }

    /// Maps a process's buffer into the process, which then keeps it. The process must not be traced.
    ///
    /// # Errors
    /// It has no buffer here, or the mapping failed.
    pub fn keep(&self, pid: i32, tid: i32, files: &VramFiles) -> Result<(), DriverError> {
        let Some(id) = self.out().get(&pid).copied() else {
            return Err(failed(ErrorKind::WrongState, "its GPU memory is its own"));
        };
        let file = files.file(id)?;
        let bytes = file.metadata().map_err(|error| told(&error))?.len();
        let map = || {
            let _seized = Seized::new(tid)?;
            let mut inject = Injection::begin(pid, tid, 0)?;
            let mapped = inject.map_anywhere(bytes, &file).map(drop);
            mapped.and(inject.end())
        };
        map().map_err(|error| told(&error))
    }

    /// Whether a process keeps its GPU memory.
    pub fn keeps(pid: i32) -> bool {
        kept(pid).is_some()
    }

    /// Unmaps memory that a process keeps and that is on its GPUs again. The process must not be traced.
    pub fn unmap_kept(pid: i32, tid: i32) {
        let Some(kept) = kept(pid) else { return };
        let unmap = || {
            let _seized = Seized::new(tid)?;
            let mut inject = Injection::begin(pid, tid, 0)?;
            let unmapped = inject.unmap(kept.address, kept.bytes);
            unmapped.and(inject.end())
        };
        if let Err(error) = unmap() {
            tracing::warn!(
                pid,
                "a copy of its GPU memory stays in host memory: {error}"
            );
        }
    }
}

fn table_of(file: &File) -> io::Result<Option<Table>> {
    let mut bytes = [0; TABLE];
    file.read_exact_at(&mut bytes, 0)?;
    let length = file.metadata()?.len();
    let table = Table::decode(&bytes);
    Ok(table.filter(|table| table.bytes().is_some_and(|bytes| bytes <= length)))
}

/// Memory that a process keeps.
struct Kept {
    address: u64,
    bytes: u64,
    file: File,
    table: Table,
}

/// Finds the memory that a process keeps, by its table: a shared mapping of a file that has no name.
fn kept(pid: i32) -> Option<Kept> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    maps.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        let (range, flags, offset) = (words.next()?, words.next()?, words.next()?);
        let whole = offset.bytes().all(|digit| digit == b'0');
        if !flags.ends_with('s') || !whole || !line.ends_with("(deleted)") {
            return None;
        }
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = range.split_once('-')?;
        let (address, end) = (number(start)?, number(end)?);
        let mut options = File::options();
        let options = options.read(true).write(true);
        let file = options
            .open(format!("/proc/{pid}/map_files/{range}"))
            .ok()?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        Some(Kept {
            address,
            bytes: end.checked_sub(address)?,
            table: table_of(&file).ok()??,
            file,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn table(sizes: &[u64]) -> Table {
        let part = |(n, bytes): (u8, &u64)| Part {
            gpu: GpuUuid([n; 16]),
            bytes: *bytes,
        };
        Table((1..).zip(sizes).map(part).collect())
    }

    #[test]
    fn parts_follow_each_other_by_pages() {
        let table = table(&[1, 8192, 5]);
        let places: Vec<u64> = table.places().map(|(at, _)| at).collect();
        assert_eq!(places, [0, 4096, 12288]);
        assert_eq!(table.bytes(), Some(4096 + 16384));
        assert_eq!(Table::decode(&table.encode()), Some(table));
    }

    #[test]
    fn nonsense_is_no_table() {
        assert_eq!(Table::decode(&[0; TABLE]), None);
        // Of a process without GPU memory.
        assert_eq!(Table::decode(&table(&[]).encode()), Some(table(&[])));
        assert_eq!(Table::decode(&table(&[u64::MAX]).encode()), None);
        assert_eq!(Table::decode(&table(&[1 << 63, 1 << 63]).encode()), None);
        let most = table(&[4096; MAX_GPUS]);
        assert_eq!(Table::decode(&most.encode()), Some(most));
        let mut many = table(&[4096]).encode();
        many[12..16].copy_from_slice(&(MAX_GPUS as u32 + 1).to_le_bytes());
        assert_eq!(Table::decode(&many), None);
        let mut later = table(&[4096]).encode();
        later[8] = 2;
        assert_eq!(Table::decode(&later), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_no_table_or_one_that_fits(at in 0usize..200, value: u8) {
            let mut bytes = table(&[4096, 1 << 40]).encode();
            bytes[at] = value;
            if let Some(table) = Table::decode(&bytes) {
                prop_assert!(table.bytes().is_some());
            }
        }
    }

    /// What a process keeps is found by its table, whatever else it has mapped.
    #[test]
    fn kept_memory_is_found() {
        let own = i32::try_from(std::process::id()).unwrap();
        let file = crate::vram::memory::new_file(2 << 20).unwrap();
        let _other = Mapped::new(&file, 2 << 20, true).unwrap();
        assert!(kept(own).is_none());
        let stored = table(&[8192]);
        let kept_file = crate::vram::memory::new_file(2 << 20).unwrap();
        let mut map = Mapped::new(&kept_file, 2 << 20, true).unwrap();
        map.bytes_mut().unwrap()[..TABLE].copy_from_slice(&stored.encode());
        let found = kept(own).unwrap();
        assert_eq!((found.table, found.bytes), (stored, 2 << 20));
    }
}
