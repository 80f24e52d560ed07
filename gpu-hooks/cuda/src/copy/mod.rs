//! Copies GPU memory that is imported from another process to host memory and back.
//!
//! A ring of pinned buffers lies in between: the GPU copies between a buffer and the piece at the speed of PCIe, and
//! threads copy between the buffer and the host memory. To pin the host memory itself would take longer than the copy
//! (measured: 2.2 s for 32 GiB, and 0.7 s for the copy).

mod digest;
mod gpus;
mod pipeline;
mod ring;

pub use digest::Digest;
pub use gpus::Gpus;

use self::pipeline::{Block, Host};
use self::ring::Ring;
use crate::driver::{Handle, LoadError};
use crate::messages::protocol::{DriverError, ErrorKind};
use crate::vram::front::Front;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

// cuda.h
const POSIX_DESCRIPTOR: c_uint = 1;
const NON_BLOCKING: c_uint = 1;
const NO_TIMING: c_uint = 2;
const READ_WRITE: u32 = 3;

/// `CUmemAllocationProp`, of which the location matters.
#[repr(C)]
#[derive(Default)]
struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    rest: [u64; 2],
}

#[repr(C)]
#[derive(Default, Clone, Copy)]
struct Location {
    kind: u32,
    id: i32,
}

#[repr(C)]
struct Access {
    location: Location,
    flags: u32,
}

/// A piece of another process's GPU memory.
#[derive(Debug)]
pub struct Piece {
    /// Its place in the file with all pieces.
    pub offset: u64,
    pub bytes: u64,
    /// A shareable handle of CUDA's.
    pub handle: OwnedFd,
}

type Address = u64;
type Code = c_int;

/// Declares the functions of the driver that are used here, by their C types.
macro_rules! functions {
    ($($field:ident $symbol:literal ($($argument:ty),*);)*) => {
        #[derive(Clone, Copy)]
        struct Functions { $($field: unsafe extern "C" fn($($argument),*) -> Code,)* }

        impl Functions {
            fn of(library: Handle) -> Result<Self, LoadError> {
                Ok(Self { $($field: library.required($symbol)?,)* })
            }
        }
    };
}

functions! {
    retain c"cuDevicePrimaryCtxRetain" (*mut *mut c_void, c_int);
    let_go c"cuDevicePrimaryCtxRelease_v2" (c_int);
    set_current c"cuCtxSetCurrent" (*mut c_void);
    import c"cuMemImportFromShareableHandle" (*mut u64, *mut c_void, c_uint);
    properties c"cuMemGetAllocationPropertiesFromHandle" (*mut Properties, u64);
    reserve c"cuMemAddressReserve" (*mut Address, usize, usize, Address, u64);
    unreserve c"cuMemAddressFree" (Address, usize);
    map c"cuMemMap" (Address, usize, usize, u64, u64);
    unmap c"cuMemUnmap" (Address, usize);
    access c"cuMemSetAccess" (Address, usize, *const Access, usize);
    release c"cuMemRelease" (u64);
    pin c"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    unpin c"cuMemFreeHost" (*mut c_void);
    stream c"cuStreamCreate" (*mut *mut c_void, c_uint);
    end_stream c"cuStreamDestroy_v2" (*mut c_void);
    event c"cuEventCreate" (*mut *mut c_void, c_uint);
    end_event c"cuEventDestroy_v2" (*mut c_void);
    record c"cuEventRecord" (*mut c_void, *mut c_void);
    wait c"cuEventSynchronize" (*mut c_void);
    to_host c"cuMemcpyDtoHAsync_v2" (*mut c_void, Address, usize, *mut c_void);
    to_device c"cuMemcpyHtoDAsync_v2" (Address, *const c_void, usize, *mut c_void);
    on_device c"cuMemcpyDtoDAsync_v2" (Address, Address, usize, *mut c_void);
    synchronize c"cuCtxSynchronize" ();
    room c"cuMemGetInfo_v2" (*mut usize, *mut usize);
    allocate c"cuMemAlloc_v2" (*mut Address, usize);
    free c"cuMemFree_v2" (Address);
    upload c"cuMemcpyHtoD_v2" (Address, *const c_void, usize);
    download c"cuMemcpyDtoH_v2" (*mut c_void, Address, usize);
    load c"cuModuleLoadData" (*mut *mut c_void, *const c_void);
    function c"cuModuleGetFunction" (*mut *mut c_void, *mut c_void, *const c_char);
    launch c"cuLaunchKernel" (*mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void,
        *const *const c_void, *const *const c_void);
}

/// Waits until so many bytes from the start of the memory may be read.
pub type Ready<'a> = dyn Fn(u64) -> Result<(), DriverError> + Sync + 'a;

/// Hears how many bytes from the start of the memory are there.
pub type Filled<'a> = dyn Fn(u64) + Sync + 'a;

/// Hears what has been copied: its place, and itself.
pub type Seen<'a> = dyn Fn(usize, &[u8]) + Sync + 'a;

/// Which way to copy.
#[derive(Clone, Copy)]
pub enum Way<'a> {
    Out(&'a Filled<'a>),
    OutSeen(&'a Filled<'a>, &'a Seen<'a>),
    /// Memory that is still being filled is waited for.
    In(&'a Ready<'a>),
}

/// The agent's own use of the GPUs. Dropped, it frees what it has there.
pub struct Copier {
    functions: Functions,
    devices: Mutex<BTreeMap<i32, Device>>,
    /// Rings that no copy uses, by device.
    rings: Mutex<BTreeMap<i32, Vec<Ring>>>,
    kernels: Mutex<BTreeMap<i32, Result<digest::Kernels, DriverError>>>,
}

#[derive(Clone, Copy)]
struct Device {
    /// Its primary context.
    context: *mut c_void,
}

// SAFETY: a context may be current in any number of threads.
unsafe impl Send for Device {}
// SAFETY: as above; it is only a name.
unsafe impl Sync for Device {}

fn checked(what: &str, code: Code) -> Result<(), DriverError> {
    match code {
        0 => Ok(()),
        code => Err(DriverError {
            kind: if code == 2 {
                ErrorKind::OutOfMemory
            } else {
                ErrorKind::Driver
            },
            code: Some(code),
            message: format!("copying the GPU memory: the driver refused {what}: error {code}"),
        }),
    }
}

fn wrong(message: &str) -> DriverError {
    DriverError {
        kind: ErrorKind::Driver,
        code: None,
        message: format!("copying the GPU memory: {message}"),
    }
}

/// A piece, mapped in this process: its memory stays on the GPU when its process lets go of it. Let go of when dropped.
pub struct Imported {
    /// Has the context that mapped it.
    copier: Arc<Copier>,
    handle: u64,
    device: i32,
    /// 0 until it has one.
    address: Address,
    is_mapped: bool,
    bytes: usize,
    offset: usize,
}

impl Imported {
    /// Returns its place in the file with all pieces: offset and bytes.
    pub fn place(&self) -> (u64, u64) {
        (self.offset as u64, self.bytes as u64)
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        let f = &self.copier.functions;
        // SAFETY: what this value holds, and nothing uses any more.
        unsafe {
            if self.is_mapped {
                (f.unmap)(self.address, self.bytes);
            }
            if self.address != 0 {
                (f.unreserve)(self.address, self.bytes);
            }
            (f.release)(self.handle);
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        let devices = self.devices.get_mut();
        let devices = std::mem::take(devices.unwrap_or_else(PoisonError::into_inner));
        for (ordinal, device) in devices {
            if self.make_current(device).is_ok() {
                let rings = self.rings().remove(&ordinal);
                drop(rings);
            }
            // SAFETY: it was retained once, and whatever uses it has this value.
            let freed = checked("the end of a context", unsafe {
                (self.functions.let_go)(ordinal)
            });
            if let Err(error) = freed {
                tracing::info!(ordinal, "{error}");
            }
        }
    }
}

impl Copier {
    /// # Errors
    /// The driver lacks a function. It has all since CUDA 11.
    pub fn load(library: &Path) -> Result<Arc<Self>, LoadError> {
        Ok(Arc::new(Self {
            functions: Functions::of(Handle::open(library)?)?,
            devices: Mutex::default(),
            rings: Mutex::default(),
            kernels: Mutex::default(),
        }))
    }

    /// Makes a GPU ready ahead of its use: a context (0.06 to 0.1 s) and, if copies will be `in_bulk`, a ring (0.04 s). Both take
    /// many times as long while other threads allocate memory.
    pub fn prepare(&self, device: i32, in_bulk: bool) -> Result<(), DriverError> {
        let start = Instant::now();
        self.make_current(self.device(device)?)?;
        let context = start.elapsed();
        if in_bulk {
            let ring = self.ring(device)?;
            self.give_back(device, ring);
        }
        let ring = start.elapsed();
        if let Err(error) = self.kernels(device) {
            tracing::info!("no digests of GPU memory: {error}");
        }
        tracing::debug!(?context, ?ring, kernels = ?start.elapsed(), "prepared");
        Ok(())
    }

    fn rings(&self) -> std::sync::MutexGuard<'_, BTreeMap<i32, Vec<Ring>>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A ring of a device whose context is current.
    fn ring(&self, device: i32) -> Result<Ring, DriverError> {
        let unused = self.rings().get_mut(&device).and_then(Vec::pop);
        unused.map_or_else(|| Ring::new(self.functions), Ok)
    }

    fn give_back(&self, device: i32, ring: Ring) {
        self.rings().entry(device).or_default().push(ring);
    }

    fn device(&self, ordinal: i32) -> Result<Device, DriverError> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.get(&ordinal) {
            return Ok(*device);
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one pointer.
        checked("a context", unsafe {
            (self.functions.retain)(&mut context, ordinal)
        })?;
        let device = Device { context };
        devices.insert(ordinal, device);
        Ok(device)
    }

    fn make_current(&self, device: Device) -> Result<(), DriverError> {
        // SAFETY: a context that is kept.
        checked("its context", unsafe {
            (self.functions.set_current)(device.context)
        })
    }

    /// Maps pieces whose memory together has this size.
    ///
    /// # Errors
    /// The driver's, or a piece that does not lie within the memory. All pieces have been let go of.
    pub fn import(
        self: &Arc<Self>,
        pieces: &[Piece],
        size: u64,
    ) -> Result<Vec<Imported>, DriverError> {
        // Importing needs a context of some device.
        self.make_current(self.device(0)?)?;
        let size = usize::try_from(size).map_err(|_| wrong("there is too much of it"))?;
        let import = |piece| self.import_one(piece, size);
        pieces.iter().map(import).collect()
    }

    /// Returns each GPU of these pieces, with their bytes and the bytes that it could still give to them: what is free
    /// but for the last twentieth, which is left to others.
    ///
    /// # Errors
    /// The driver's.
    pub fn room(&self, pieces: &[Imported]) -> Result<Vec<(i32, u64, u64)>, DriverError> {
        let mut bytes: BTreeMap<i32, u64> = BTreeMap::new();
        for piece in pieces {
            *bytes.entry(piece.device).or_default() += piece.bytes as u64;
        }
        let room = |(device, bytes)| {
            self.make_current(self.device(device)?)?;
            let (mut free, mut all) = (0, 0);
            // SAFETY: writes two numbers.
            checked("its free memory", unsafe {
                (self.functions.room)(&mut free, &mut all)
            })?;
            Ok((device, bytes, free.saturating_sub(all / 20) as u64))
        };
        bytes.into_iter().map(room).collect()
    }

    /// Copies all pieces, all GPUs at once, with so many threads for each.
    pub fn copy(
        &self,
        pieces: &[Imported],
        memory: &mut [u8],
        way: Way<'_>,
        threads: usize,
    ) -> Result<(), DriverError> {
        let all = 0..memory.len() as u64;
        self.copy_ranges(pieces, &[all], memory, way, threads)
    }

    /// [`Copier::copy`], of these ranges of the memory alone, which are in order.
    ///
    /// # Errors
    /// As for that.
    pub fn copy_ranges(
        &self,
        pieces: &[Imported],
        ranges: &[Range<u64>],
        memory: &mut [u8],
        way: Way<'_>,
        threads: usize,
    ) -> Result<(), DriverError> {
        let mut front = Front::new(memory.len());
        let mut at = 0;
        for range in ranges {
            let [start, end] = [range.start, range.end]
                .map(|end| usize::try_from(end).unwrap_or(usize::MAX).min(memory.len()));
            if at < start {
                front.advance(at, start - at);
            }
            at = at.max(end);
        }
        let front = Mutex::new(front);
        let mut by_device: BTreeMap<i32, Vec<Block>> = BTreeMap::new();
        for piece in pieces {
            let (offset, bytes) = piece.place();
            let (start, len) = within(offset, bytes, memory.len())?;
            let first = ranges.partition_point(|range| range.end <= offset);
            let within = ranges[first..].iter();
            let within = within.take_while(|range| range.start < offset + bytes);
            for range in within {
                let from = start.max(usize::try_from(range.start).unwrap_or(usize::MAX));
                let to = (start + len).min(usize::try_from(range.end).unwrap_or(usize::MAX));
                let address = piece.address + (from - start) as u64;
                let blocks = Block::of(address, (from, to - from));
                by_device.entry(piece.device).or_default().extend(blocks);
            }
        }
        let host = Host::new(memory);
        std::thread::scope(|scope| {
            let copies: Vec<_> = by_device
                .iter()
                .map(|(device, blocks)| {
                    scope.spawn(|| self.copy_device(*device, blocks, &host, &front, way, threads))
                })
                .collect();
            copies
                .into_iter()
                .try_for_each(|copy| copy.join().unwrap_or_else(|_| Err(wrong("a thread died"))))
        })
    }

    /// Copies pieces to others of the same sizes and GPUs, from the one to the other GPU memory.
    pub fn copy_on_gpus(&self, pairs: &[(&Imported, &Imported)]) -> Result<(), DriverError> {
        let f = &self.functions;
        let devices: BTreeSet<i32> = pairs.iter().map(|(from, _)| from.device).collect();
        for device in &devices {
            self.make_current(self.device(*device)?)?;
            for (from, to) in pairs.iter().filter(|(from, _)| from.device == *device) {
                let stream = std::ptr::null_mut();
                // SAFETY: both are mapped, and as long as the shorter of the two.
                checked("a copy", unsafe {
                    (f.on_device)(to.address, from.address, from.bytes.min(to.bytes), stream)
                })?;
            }
        }
        for device in devices {
            self.make_current(self.device(device)?)?;
            // SAFETY: takes nothing.
            checked("a copy", unsafe { (f.synchronize)() })?;
        }
        Ok(())
    }

    fn import_one(self: &Arc<Self>, piece: &Piece, all: usize) -> Result<Imported, DriverError> {
        let (offset, bytes) = within(piece.offset, piece.bytes, all)?;
        let f = &self.functions;
        let mut handle = 0;
        let fd = std::ptr::without_provenance_mut(piece.handle.as_raw_fd() as usize);
        // SAFETY: writes one number; the descriptor is open.
        checked("an import", unsafe {
            (f.import)(&mut handle, fd, POSIX_DESCRIPTOR)
        })?;
        let mut imported = Imported {
            copier: Arc::clone(self),
            handle,
            device: 0,
            address: 0,
            is_mapped: false,
            bytes,
            offset,
        };
        let mut properties = Properties::default();
        // SAFETY: writes one structure of this layout.
        checked("a handle's properties", unsafe {
            (f.properties)(&mut properties, handle)
        })?;
        imported.device = properties.location.id;
        // SAFETY: writes one number.
        checked("addresses", unsafe {
            (f.reserve)(&mut imported.address, bytes, 0, 0, 0)
        })?;
        // SAFETY: the addresses are ours.
        checked("a mapping", unsafe {
            (f.map)(imported.address, bytes, 0, handle, 0)
        })?;
        imported.is_mapped = true;
        let access = Access {
            location: properties.location,
            flags: READ_WRITE,
        };
        // SAFETY: the mapping is ours; reads one structure.
        checked("access", unsafe {
            (f.access)(imported.address, bytes, &access, 1)
        })?;
        Ok(imported)
    }
}

/// A place in host memory of a size: offset and bytes.
fn within(offset: u64, bytes: u64, all: usize) -> Result<(usize, usize), DriverError> {
    let place = usize::try_from(offset)
        .ok()
        .zip(usize::try_from(bytes).ok());
    place
        .filter(|(at, bytes)| *bytes > 0 && at.checked_add(*bytes).is_some_and(|end| end <= all))
        .ok_or_else(|| wrong("a piece does not lie within its memory"))
}
