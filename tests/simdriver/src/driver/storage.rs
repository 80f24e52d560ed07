//! Custom storage (CUDA 13.4): the caller of a checkpoint or restore gets the other process's memory mapped, and copies it
//! by itself. Here what the caller has.

use std::ffi::{c_int, c_uint, c_void};
use std::fs::File;

use super::caller::call;
use super::mailbox::{Remote, Word};
use super::process::{Inner, api, checked, process};
use super::steps;
use super::vmm;
use crate::abi::*;
use crate::uuid::GpuUuid;
use crate::wire::{self, Step, op};

/// The first driver that has it.
const FIRST: u64 = 615;
/// Streams are ordinals in disguise.
const STREAM_TAG: usize = 0x57e0;
/// What is mapped on one GPU is a multiple of this.
const UNIT: u64 = 2 << 20;

/// A piece of the other process's memory, at an offset of what is mapped.
struct Piece {
    at: u64,
    bytes: u64,
    file: File,
}

/// What is mapped of one GPU.
struct Region {
    gpu: GpuUuid,
    address: u64,
    bytes: u64,
    pieces: Vec<Piece>,
}

/// An operation that is not complete.
pub struct Handed {
    handle: usize,
    pid: i32,
    regions: Vec<Region>,
}

/// Whether this driver has custom storage.
pub fn is_there() -> bool {
    process().is_ok_and(|p| p.driver_major >= FIRST)
}

/// Begins a checkpoint or a restore, and maps the process's memory.
pub fn begin(
    pid: c_int,
    step: Step,
    pairs: &[(GpuUuid, GpuUuid)],
) -> Result<*mut CuCustomStorage, CuResult> {
    // Before, the argument was reserved.
    if !is_there() {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    if u32::try_from(pid) == Ok(std::process::id()) {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let own = api(|i| Ok(i.ask(op::MARK, &[0])?[1]))?;
    call(pid, step, 0, pairs, Some(own))?;
    let session = Remote::open(pid)?.get(Word::Session);
    let session = session.map_err(|_| CUDA_ERROR_UNKNOWN)?;
    api(|i| {
        let regions = map_all(i, session)?;
        let mut devices = Vec::new();
        for region in &regions {
            let gpu = i.gpus.iter().position(|g| g.uuid == region.gpu);
            let ordinal = i.ordinals.iter().position(|o| Some(*o) == gpu);
            let ordinal = ordinal.ok_or(CUDA_ERROR_INVALID_DEVICE)?;
            devices.push(CuCustomStorageDevice {
                address: region.address,
                bytes: usize::try_from(region.bytes).map_err(|_| CUDA_ERROR_UNKNOWN)?,
                stream: std::ptr::without_provenance_mut(STREAM_TAG + ordinal),
            });
        }
        let count = c_uint::try_from(devices.len()).map_err(|_| CUDA_ERROR_UNKNOWN)?;
        // The caller reads both until the operation is complete, and later ones are rare: they stay.
        let devices = Box::leak(devices.into_boxed_slice());
        let info = Box::leak(Box::new(CuCustomStorage {
            handle: std::ptr::null_mut(),
            devices: devices.as_mut_ptr(),
            count,
        }));
        let handle = std::ptr::from_mut(info).addr();
        info.handle = std::ptr::without_provenance_mut(handle);
        i.handed.push(Handed {
            handle,
            pid,
            regions,
        });
        Ok(std::ptr::from_mut(info))
    })
}

/// Maps a session's memory, each GPU's at one range of addresses.
fn map_all(inner: &mut Inner, session: u64) -> Result<Vec<Region>, CuResult> {
    let mut regions: Vec<Region> = Vec::new();
    for number in 0.. {
        let Ok(told) = inner.ask(op::ALLOC_AT, &[session, number]) else {
            break;
        };
        let gpu = GpuUuid::from_words([told[1], told[2]]);
        let (address, bytes) = (told[3], told[4]);
        let server = inner.server.as_ref().ok_or(CUDA_ERROR_UNKNOWN)?;
        let asked = wire::ask_fd(server, op::GET_FD, &[address, session]);
        let (frame, file) = asked.map_err(|_| CUDA_ERROR_UNKNOWN)?;
        checked(Ok(frame))?;
        let file = file.ok_or(CUDA_ERROR_UNKNOWN)?;
        let known = regions.iter().position(|r| r.gpu == gpu);
        let at = known.unwrap_or_else(|| {
            regions.push(Region {
                gpu,
                address: 0,
                bytes: 0,
                pieces: Vec::new(),
            });
            regions.len() - 1
        });
        let region = &mut regions[at];
        let at = region.bytes;
        region.pieces.push(Piece { at, bytes, file });
        region.bytes += bytes;
    }
    for region in &mut regions {
        region.address = vmm::reserve(inner, region.bytes.next_multiple_of(UNIT))?;
    }
    Ok(regions)
}

/// Ends an operation: the memory has been copied.
pub fn complete(handle: *mut c_void) -> Result<(), CuResult> {
    if !is_there() {
        return Err(CUDA_ERROR_NOT_SUPPORTED);
    }
    let handed = api(|i| {
        let at = i.handed.iter().position(|h| h.handle == handle.addr());
        Ok(i.handed.swap_remove(at.ok_or(CUDA_ERROR_INVALID_VALUE)?))
    })?;
    call(handed.pid, Step::Complete, 0, &[], None).map(|_| ())
}

/// A part of a file: offset and length.
type Part<'a> = (&'a File, u64, usize);

/// The parts of a range that is mapped here.
pub fn find(inner: &Inner, address: u64, len: u64) -> Option<Result<Vec<Part<'_>>, CuResult>> {
    let mut regions = inner.handed.iter().flat_map(|h| &h.regions);
    let (region, start) = regions.find_map(|r| {
        let at = address.checked_sub(r.address)?;
        (at < r.bytes && len <= r.bytes - at).then_some((r, at))
    })?;
    if let Err(stop) = steps::begin(inner, Step::Copy, None, len) {
        return Some(Err(stop.code));
    }
    let end = start + len;
    let part = |piece: &Piece| {
        let from = start.max(piece.at);
        let to = end.min(piece.at + piece.bytes);
        let len = usize::try_from(to.checked_sub(from)?).ok()?;
        (len > 0).then_some((from - piece.at, len))
    };
    let pieces = region.pieces.iter();
    let parts = pieces.filter_map(|piece| part(piece).map(|(at, len)| (&piece.file, at, len)));
    Some(Ok(parts.collect()))
}

/// The device of a stream that came with custom storage.
pub fn device_of(stream: *mut c_void) -> Result<CuDevice, CuResult> {
    let ordinal = stream.addr().checked_sub(STREAM_TAG);
    let ordinal = ordinal.filter(|ordinal| *ordinal < 64);
    let ordinal = ordinal.and_then(|o| CuDevice::try_from(o).ok());
    ordinal.ok_or(CUDA_ERROR_INVALID_VALUE)
}
