//! BLAKE3 digests of GPU memory, made by the GPU.
//!
//! `digest/blake3.cu` has the kernels; the driver compiles `digest/blake3.ptx`, which nvcc made of it, for the GPU that is
//! there. On an H100 it hashes 1.6 TB a second, so that to find what has changed takes no longer than to read it.

use super::{Address, Copier, Functions, Imported, checked, wrong};
use crate::messages::protocol::DriverError;
use std::ffi::{CStr, c_uint, c_void};
use std::sync::PoisonError;

const PTX: &[u8] = concat!(include_str!("digest/blake3.ptx"), "\0").as_bytes();
/// Bytes of a block: a whole subtree of BLAKE3's tree, hashed by one block of threads.
const BLOCK: u64 = 1 << 20;
/// Bytes of a leaf of the tree.
const LEAF: u64 = 1024;
const THREADS: c_uint = 256;
const PARENT_THREADS: usize = 128;

/// A BLAKE3 digest.
pub type Digest = [u8; 32];

/// `Block` of blake3.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HashBlock {
    address: Address,
    bytes: u32,
    first_leaf: u32,
    is_root: u32,
    unused: u32,
}

/// `Range` of blake3.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HashRange {
    first: u32,
    count: u32,
}

/// The kernels, loaded in a GPU's context.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kernels {
    blocks: *mut c_void,
    parents: *mut c_void,
}

// SAFETY: names of functions, which may be launched from any thread.
unsafe impl Send for Kernels {}

/// GPU memory of this program's own, freed when dropped.
struct Scratch {
    functions: Functions,
    address: Address,
}

impl Scratch {
    fn new(functions: Functions, bytes: usize) -> Result<Self, DriverError> {
        let mut address = 0;
        // SAFETY: writes one number.
        let code = unsafe { (functions.allocate)(&mut address, bytes.max(1)) };
        checked("memory for digests", code)?;
        Ok(Self { functions, address })
    }

    fn of<T: Copy>(functions: Functions, from: &[T]) -> Result<Self, DriverError> {
        let scratch = Self::new(functions, size_of_val(from))?;
        let at = from.as_ptr().cast();
        // SAFETY: reads the slice; the memory is as large.
        let code = unsafe { (functions.upload)(scratch.address, at, size_of_val(from)) };
        checked("a copy", code)?;
        Ok(scratch)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: what this value has allocated.
        unsafe { (self.functions.free)(self.address) };
    }
}

impl Copier {
    /// The kernels of a GPU whose context is current.
    pub(super) fn kernels(&self, device: i32) -> Result<Kernels, DriverError> {
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = kernels.entry(device).or_insert_with(|| self.load_kernels());
        loaded.clone()
    }

    fn load_kernels(&self) -> Result<Kernels, DriverError> {
        let f = &self.functions;
        let mut module = std::ptr::null_mut();
        // SAFETY: a text that ends with NUL; writes one pointer.
        checked("the digests' kernels", unsafe {
            (f.load)(&mut module, PTX.as_ptr().cast())
        })?;
        let function = |name: &CStr| {
            let mut function = std::ptr::null_mut();
            // SAFETY: a C string; writes one pointer.
            checked("a digests' kernel", unsafe {
                (f.function)(&mut function, module, name.as_ptr())
            })?;
            Ok(function)
        };
        Ok(Kernels {
            blocks: function(c"blake3_blocks")?,
            parents: function(c"blake3_parents")?,
        })
    }

    /// Returns the digest of each chunk of the pieces, with its place in the file with all pieces. The chunks are of so
    /// many bytes, into which all pieces can be divided.
    ///
    /// # Errors
    /// The driver's.
    pub fn digests(
        &self,
        pieces: &[Imported],
        chunk: u64,
    ) -> Result<Vec<(u64, Digest)>, DriverError> {
        let mut all = Vec::new();
        let mut devices: Vec<i32> = pieces.iter().map(|piece| piece.device).collect();
        devices.sort_unstable();
        devices.dedup();
        for device in devices {
            let of_device = pieces.iter().filter(|piece| piece.device == device);
            let chunks = of_device.flat_map(|piece| {
                let (offset, bytes) = piece.place();
                let starts = (0..bytes).step_by(usize::try_from(chunk).unwrap_or(usize::MAX));
                starts.map(move |at| (offset + at, piece.address + at, chunk.min(bytes - at)))
            });
            let chunks: Vec<(u64, Address, u64)> = chunks.collect();
            let ranges: Vec<_> = chunks.iter().map(|(_, at, bytes)| (*at, *bytes)).collect();
            let digests = self.digests_of(device, &ranges)?;
            all.extend(chunks.iter().map(|(place, ..)| *place).zip(digests));
        }
        Ok(all)
    }

    /// Returns the digest of bytes, made on a GPU.
    ///
    /// # Errors
    /// The driver's.
    pub fn digest_of(&self, device: i32, bytes: &[u8]) -> Result<Digest, DriverError> {
        self.make_current(self.device(device)?)?;
        let memory = Scratch::of(self.functions, bytes)?;
        let digests = self.digests_of(device, &[(memory.address, bytes.len() as u64)])?;
        let digest = digests.first().copied();
        digest.ok_or_else(|| wrong("there is no digest"))
    }

    /// Makes the digests of this much memory, whatever is in it, to measure how long it takes. Returns how many.
    ///
    /// # Errors
    /// The driver's.
    pub fn hash_fresh(&self, device: i32, bytes: u64, chunk: u64) -> Result<usize, DriverError> {
        self.make_current(self.device(device)?)?;
        let len = usize::try_from(bytes).map_err(|_| wrong("there is too much of it"))?;
        let memory = Scratch::new(self.functions, len)?;
        let starts = (0..bytes).step_by(usize::try_from(chunk).unwrap_or(usize::MAX));
        let ranges = starts.map(|at| (memory.address + at, chunk.min(bytes - at)));
        let digests = self.digests_of(device, &ranges.collect::<Vec<_>>())?;
        Ok(digests.len())
    }

    /// Returns the digests of ranges of a GPU's memory: addresses, multiples of 16, and bytes, at most 64 MiB each.
    ///
    /// # Errors
    /// The driver's.
    pub fn digests_of(
        &self,
        device: i32,
        ranges: &[(Address, u64)],
    ) -> Result<Vec<Digest>, DriverError> {
        if ranges.is_empty() {
            return Ok(Vec::new());
        }
        self.make_current(self.device(device)?)?;
        let kernels = self.kernels(device)?;
        let f = self.functions;
        let (blocks, ranges) = cut(ranges);
        let nodes = Scratch::new(f, blocks.len() * size_of::<Digest>())?;
        let on_gpu = Scratch::of(f, &blocks)?;
        let launch = |kernel, groups: usize, threads, arguments: &[*const c_void]| {
            let groups = c_uint::try_from(groups).unwrap_or(c_uint::MAX);
            let stream = std::ptr::null_mut();
            // SAFETY: the kernel's arguments, which live until the call returns.
            checked("the digests", unsafe {
                let (one, none) = (1, std::ptr::null());
                let arguments = arguments.as_ptr();
                (f.launch)(
                    kernel, groups, one, one, threads, one, one, 0, stream, arguments, none,
                )
            })
        };
        let argument = |number: &Address| std::ptr::from_ref(number).cast::<c_void>();
        let arguments = [argument(&on_gpu.address), argument(&nodes.address)];
        launch(kernels.blocks, blocks.len(), THREADS, &arguments)?;
        let on_gpu = Scratch::of(f, &ranges)?;
        if ranges.iter().any(|range| range.count > 1) {
            let all = u32::try_from(ranges.len()).unwrap_or(u32::MAX);
            let count = std::ptr::from_ref(&all).cast();
            let arguments = [argument(&on_gpu.address), argument(&nodes.address), count];
            let groups = ranges.len().div_ceil(PARENT_THREADS);
            launch(
                kernels.parents,
                groups,
                PARENT_THREADS as c_uint,
                &arguments,
            )?;
        }
        let mut digests = vec![Digest::default(); blocks.len()];
        let (to, bytes) = (digests.as_mut_ptr().cast(), size_of_val(&digests[..]));
        // SAFETY: the memory and the list are of this size. The copy waits for the kernels.
        checked("the digests", unsafe {
            (f.download)(to, nodes.address, bytes)
        })?;
        let first = |range: &HashRange| digests.get(range.first as usize).copied();
        Ok(ranges.iter().filter_map(first).collect())
    }
}

/// Cuts ranges into blocks.
fn cut(ranges: &[(Address, u64)]) -> (Vec<HashBlock>, Vec<HashRange>) {
    let mut blocks = Vec::new();
    let ranges = ranges.iter().map(|(address, bytes)| {
        let first = blocks.len() as u32;
        let count = bytes.div_ceil(BLOCK).max(1);
        blocks.extend((0..count).map(|i| HashBlock {
            address: address + i * BLOCK,
            bytes: BLOCK.min(bytes - i * BLOCK) as u32,
            first_leaf: (i * (BLOCK / LEAF)) as u32,
            is_root: u32::from(count == 1),
            unused: 0,
        }));
        HashRange {
            first,
            count: count as u32,
        }
    });
    let ranges = ranges.collect();
    (blocks, ranges)
}
