//! CUDA's virtual memory calls: physical memory, reserved addresses, and mappings of the one at the other.

use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use super::memory;
use super::process::{Block, Inner};
use super::steps::{self, device_memory};
use crate::abi::*;
use crate::uuid::GpuUuid;
use crate::wire::{Step, VRAM};

/// Where physical memory is, for the server; no program sees these addresses.
const PHYSICAL: u64 = 0x5000_0000_0000;
/// Physical memory comes in pieces of this size.
const UNIT: u64 = 2 << 20;

/// Physical memory; its handle is its address for the server, or a number of its own if it is another process's.
pub struct Physical {
    handle: u64,
    bytes: u64,
    gpu: usize,
    foreign: Option<File>,
    released: bool,
}

pub struct Mapping {
    address: u64,
    bytes: u64,
    offset: u64,
    handle: u64,
    accessible: bool,
}

#[derive(Default)]
pub struct Vmm {
    physical: Vec<Physical>,
    mappings: Vec<Mapping>,
    made: u64,
}

impl Vmm {
    /// Whether it has memory of another process: the real driver then does not restore it.
    pub fn has_foreign(&self) -> bool {
        self.physical.iter().any(|p| p.foreign.is_some())
    }
}

/// Where the bytes of a mapped range are.
pub enum Place {
    /// In a block of the process's own, at an offset.
    Own(u64, u64),
    Foreign(File, u64),
}

/// The memory that is mapped at a range, all of it by one mapping.
pub fn find(inner: &Inner, address: u64, len: u64) -> Option<Result<Place, CuResult>> {
    let (mapping, at) = inner.vmm.mappings.iter().find_map(|m| {
        let at = address.checked_sub(m.address)?;
        (at < m.bytes && len <= m.bytes - at).then_some((m, at))
    })?;
    if !mapping.accessible {
        return Some(Err(CUDA_ERROR_INVALID_VALUE));
    }
    let offset = mapping.offset + at;
    let physical = inner
        .vmm
        .physical
        .iter()
        .find(|p| p.handle == mapping.handle)?;
    Some(match &physical.foreign {
        None => Ok(Place::Own(physical.handle, offset)),
        Some(file) => file
            .try_clone()
            .map(|file| Place::Foreign(file, offset))
            .map_err(|_| CUDA_ERROR_UNKNOWN),
    })
}

pub fn reserve(inner: &mut Inner, bytes: u64) -> Result<u64, CuResult> {
    if bytes == 0 || !bytes.is_multiple_of(UNIT) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let address = inner.next_address.next_multiple_of(UNIT);
    inner.next_address = address + bytes;
    Ok(address)
}

pub fn create(inner: &mut Inner, bytes: u64, ordinal: i32) -> Result<u64, CuResult> {
    if bytes == 0 || !bytes.is_multiple_of(UNIT) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let ordinal = usize::try_from(ordinal).map_err(|_| CUDA_ERROR_INVALID_DEVICE)?;
    let gpu = memory::gpu_of(inner, ordinal)?;
    let handle = PHYSICAL + (inner.vmm.made << 32);
    inner.vmm.made += 1;
    let block = Block {
        address: handle,
        bytes,
        gpu,
        context: false,
    };
    memory::add(inner, block)?;
    inner.vmm.physical.push(Physical {
        handle,
        bytes,
        gpu,
        foreign: None,
        released: false,
    });
    Ok(handle)
}

/// `cuMemRelease`: the memory lives as long as it is mapped.
pub fn release(inner: &mut Inner, handle: u64) -> Result<(), CuResult> {
    let of = |p: &&mut Physical| p.handle == handle && !p.released;
    let physical = inner.vmm.physical.iter_mut().find(of);
    physical.ok_or(CUDA_ERROR_INVALID_VALUE)?.released = true;
    free_unused(inner)
}

fn free_unused(inner: &mut Inner) -> Result<(), CuResult> {
    let mappings = &inner.vmm.mappings;
    let unused = |p: &Physical| p.released && mappings.iter().all(|m| m.handle != p.handle);
    let Some(at) = inner.vmm.physical.iter().position(unused) else {
        return Ok(());
    };
    let gone = inner.vmm.physical.swap_remove(at);
    if gone.foreign.is_none() {
        memory::free(inner, gone.handle)?;
    }
    free_unused(inner)
}

pub fn map(
    inner: &mut Inner,
    address: u64,
    bytes: u64,
    offset: u64,
    handle: u64,
) -> Result<(), CuResult> {
    let physical = inner.vmm.physical.iter().find(|p| p.handle == handle);
    let physical = physical.ok_or(CUDA_ERROR_INVALID_VALUE)?;
    let free = |m: &Mapping| address + bytes <= m.address || address >= m.address + m.bytes;
    let fits = bytes > 0
        && offset
            .checked_add(bytes)
            .is_some_and(|end| end <= physical.bytes);
    if !fits || !inner.vmm.mappings.iter().all(free) {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    inner.vmm.mappings.push(Mapping {
        address,
        bytes,
        offset,
        handle,
        accessible: false,
    });
    Ok(())
}

pub fn unmap(inner: &mut Inner, address: u64, bytes: u64) -> Result<(), CuResult> {
    steps::begin(inner, Step::Unmap, None, bytes).map_err(|stop| stop.code)?;
    let inside = |m: &Mapping| m.address >= address && m.address + m.bytes <= address + bytes;
    let before = inner.vmm.mappings.len();
    inner.vmm.mappings.retain(|m| !inside(m));
    if inner.vmm.mappings.len() == before {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    free_unused(inner)
}

pub fn allow(inner: &mut Inner, address: u64, bytes: u64) -> Result<(), CuResult> {
    let mut any = false;
    for m in &mut inner.vmm.mappings {
        if m.address < address + bytes && address < m.address + m.bytes {
            (m.accessible, any) = (true, true);
        }
    }
    any.then_some(()).ok_or(CUDA_ERROR_INVALID_VALUE)
}

pub fn export(inner: &Inner, handle: u64) -> Result<i32, CuResult> {
    steps::begin(inner, Step::Export, None, 0).map_err(|stop| stop.code)?;
    let physical = inner.vmm.physical.iter().find(|p| p.handle == handle);
    let physical = physical.filter(|p| p.foreign.is_none());
    let file = device_memory(inner, physical.ok_or(CUDA_ERROR_INVALID_VALUE)?.handle)?;
    Ok(file.into_raw_fd())
}

/// `cuMemImportFromShareableHandle`: the memory lives as long as a descriptor of it, as on the real driver.
pub fn import(inner: &mut Inner, fd: i32) -> Result<u64, CuResult> {
    // SAFETY: the program's descriptor, copied and left alone.
    let copy = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) };
    if copy < 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: a new descriptor that belongs to nobody else.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(copy) });
    let bytes = file.metadata().map_err(|_| CUDA_ERROR_INVALID_VALUE)?.len();
    let name = std::fs::read_link(format!("/proc/self/fd/{copy}")).unwrap_or_default();
    let uuid = name.to_str().and_then(|name| {
        let uuid = name.strip_prefix("/memfd:")?.strip_prefix(VRAM)?;
        uuid.split(' ').next()?.parse::<GpuUuid>().ok()
    });
    let gpu = inner.gpus.iter().position(|g| Some(g.uuid) == uuid);
    let handle = PHYSICAL + (inner.vmm.made << 32);
    inner.vmm.made += 1;
    inner.vmm.physical.push(Physical {
        handle,
        bytes,
        gpu: gpu.ok_or(CUDA_ERROR_INVALID_DEVICE)?,
        foreign: Some(file),
        released: false,
    });
    Ok(handle)
}

/// The ordinal of the device that a handle's memory is on.
pub fn device_of(inner: &Inner, handle: u64) -> Result<i32, CuResult> {
    let physical = inner.vmm.physical.iter().find(|p| p.handle == handle);
    let gpu = physical.ok_or(CUDA_ERROR_INVALID_VALUE)?.gpu;
    let ordinal = inner.ordinals.iter().position(|o| *o == gpu);
    ordinal
        .and_then(|o| i32::try_from(o).ok())
        .ok_or(CUDA_ERROR_INVALID_DEVICE)
}
