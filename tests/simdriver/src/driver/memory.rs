//! Device memory as a program uses it: contexts, allocations, copies.

use std::cell::Cell;
use std::os::fd::AsRawFd;

use super::nodes::Node;
use super::process::{Block, Inner};
use super::shared;
use super::steps::device_memory;
use super::vmm::{self, Place};
use crate::abi::*;
use crate::wire::{ALLOC_CONTEXT, op};

/// Device memory comes in pieces of this size.
const GRAIN: u64 = 4096;
/// Addresses of allocations start at multiples of this.
const ALIGN: u64 = 2 << 20;
const CONTEXTS: u64 = 0x6000_0000_0000;
/// Most that one read or write system call moves.
const MOST: usize = 0x4000_0000;

thread_local! {
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Makes a context current in this thread, or none.
pub fn set_current(ordinal: Option<usize>) {
    CURRENT.set(ordinal);
}

/// The number of the context that is current in this thread.
pub fn current_context() -> Option<usize> {
    CURRENT.get()
}

/// The device of the same; a green context has the device's number, and more.
pub fn current() -> Option<usize> {
    CURRENT.get().map(|number| number % 64)
}

pub fn gpu_of(inner: &Inner, ordinal: usize) -> Result<usize, CuResult> {
    inner
        .ordinals
        .get(ordinal)
        .copied()
        .ok_or(CUDA_ERROR_INVALID_DEVICE)
}

fn current_gpu(inner: &Inner) -> Result<usize, CuResult> {
    gpu_of(inner, current().ok_or(CUDA_ERROR_INVALID_CONTEXT)?)
}

/// Makes sure that this GPU has a context.
pub fn make_context(inner: &mut Inner, gpu: usize) -> Result<(), CuResult> {
    if inner.blocks.iter().any(|b| b.context && b.gpu == gpu) {
        return Ok(());
    }
    let address = CONTEXTS + ((gpu as u64) << 32);
    add(
        inner,
        Block {
            address,
            bytes: inner.context_bytes,
            gpu,
            context: true,
        },
    )
}

pub fn add(inner: &mut Inner, b: Block) -> Result<(), CuResult> {
    let [hi, lo] = inner
        .gpus
        .get(b.gpu)
        .ok_or(CUDA_ERROR_INVALID_DEVICE)?
        .uuid
        .words();
    let flags = if b.context { ALLOC_CONTEXT } else { 0 };
    inner.ask(op::ALLOC, &[hi, lo, b.address, b.bytes, flags])?;
    inner.blocks.push(b);
    Ok(())
}

pub fn alloc(inner: &mut Inner, bytes: u64) -> Result<CuDevicePtr, CuResult> {
    let gpu = current_gpu(inner)?;
    let bytes = bytes
        .checked_next_multiple_of(GRAIN)
        .ok_or(CUDA_ERROR_OUT_OF_MEMORY)?;
    if bytes == 0 {
        return Err(CUDA_ERROR_INVALID_VALUE);
    }
    let address = inner.next_address;
    add(
        inner,
        Block {
            address,
            bytes,
            gpu,
            context: false,
        },
    )?;
    inner.next_address = address + bytes.next_multiple_of(ALIGN);
    Ok(address)
}

/// `cuMemAllocManaged`: memory of which nvidia-uvm keeps a mapping in the process.
pub fn alloc_managed(inner: &mut Inner, bytes: u64) -> Result<CuDevicePtr, CuResult> {
    let address = alloc(inner, bytes)?;
    inner.ask(op::MARK, &[1])?;
    let len = usize::try_from(bytes).map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
    inner.nodes.map_new(Node::Uvm, len);
    Ok(address)
}

pub fn free(inner: &mut Inner, address: CuDevicePtr) -> Result<(), CuResult> {
    if address == 0 {
        return Ok(());
    }
    let i = inner
        .blocks
        .iter()
        .position(|b| b.address == address && !b.context)
        .ok_or(CUDA_ERROR_INVALID_VALUE)?;
    inner.ask(op::FREE, &[address])?;
    inner.blocks.swap_remove(i);
    Ok(())
}

/// The block that holds a range, and the range's offset in it.
pub fn find(inner: &Inner, address: CuDevicePtr, len: u64) -> Result<(Block, u64), CuResult> {
    inner
        .blocks
        .iter()
        .filter(|b| !b.context)
        .find_map(|b| {
            let offset = address.checked_sub(b.address)?;
            (offset < b.bytes && len <= b.bytes - offset).then_some((*b, offset))
        })
        .ok_or(CUDA_ERROR_INVALID_VALUE)
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Way {
    ToDevice,
    ToHost,
}

/// `cuMemcpyHtoD` and `cuMemcpyDtoH`. The kernel checks the host range.
pub fn copy(
    inner: &Inner,
    device: CuDevicePtr,
    host: *mut libc::c_void,
    len: usize,
    way: Way,
) -> Result<(), CuResult> {
    if len == 0 {
        return Ok(());
    }
    let mapped = vmm::find(inner, device, len as u64).transpose()?;
    let (file, offset) = match (mapped, shared::find(inner, device, len as u64)) {
        (Some(Place::Own(block, offset)), _) => (device_memory(inner, block)?, offset),
        (Some(Place::Foreign(file, offset)), _) => (file, offset),
        (None, Some((import, offset))) => (import.memory(inner)?, offset),
        (None, None) => {
            let (block, offset) = find(inner, device, len as u64)?;
            (device_memory(inner, block.address)?, offset)
        }
    };
    let mut at = 0;
    while at < len {
        let n = (len - at).min(MOST);
        let to = libc::off_t::try_from(offset + at as u64).map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let p = host.wrapping_byte_add(at);
        // SAFETY: the range is the program's; the kernel answers EFAULT for one that is not
        // mapped, and the program promised that it may be read or written.
        let moved = unsafe {
            match way {
                Way::ToDevice => libc::pwrite(file.as_raw_fd(), p, n, to),
                Way::ToHost => libc::pread(file.as_raw_fd(), p, n, to),
            }
        };
        match usize::try_from(moved) {
            Ok(0) => return Err(CUDA_ERROR_UNKNOWN),
            Ok(n) => at += n,
            Err(_) => return Err(CUDA_ERROR_INVALID_VALUE),
        }
    }
    Ok(())
}

/// The block of this process that holds a range, and the offset in it.
pub fn locate(inner: &Inner, address: CuDevicePtr, len: u64) -> Result<(u64, u64), CuResult> {
    match vmm::find(inner, address, len).transpose()? {
        Some(Place::Own(block, offset)) => Ok((block, offset)),
        Some(Place::Foreign(..)) => Err(CUDA_ERROR_NOT_SUPPORTED),
        None => find(inner, address, len).map(|(block, offset)| (block.address, offset)),
    }
}

pub fn sum(inner: &Inner, address: CuDevicePtr, len: u64) -> Result<u64, CuResult> {
    if let Some((import, offset)) = shared::find(inner, address, len) {
        return import.sum(inner, offset, len);
    }
    let (block, offset) = locate(inner, address, len)?;
    Ok(inner.ask(op::SUM, &[block, offset, len])?[1])
}

pub fn fill(inner: &Inner, address: CuDevicePtr, value: u8, len: u64) -> Result<(), CuResult> {
    if len == 0 {
        return Ok(());
    }
    let (block, offset) = locate(inner, address, len)?;
    inner
        .ask(op::MEMSET, &[block, offset, len, u64::from(value)])
        .map(|_| ())
}

/// Free and total memory of the current context's GPU.
pub fn info(inner: &mut Inner) -> Result<(u64, u64), CuResult> {
    let [hi, lo] = inner.gpus[current_gpu(inner)?].uuid.words();
    let f = inner.ask(op::MEM_INFO, &[hi, lo])?;
    Ok((f[1], f[2]))
}
