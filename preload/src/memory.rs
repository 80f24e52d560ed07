//! GPU memory that this library allocates for the program: pieces of physical memory mapped at reserved addresses, which
//! can be released and allocated again while the addresses stay.
//!
//! Smaller allocations, and all that the program has shared with another process, are left to the driver.

mod physical;

use self::physical::{
    access_for, create_anywhere, create_physical, device_memory, driver_call, map_physical,
    other_call, release_physical, reserve, set_access, supports_rdma, unmap_physical, unreserve,
};
use crate::contexts;
use crate::driver::Symbol;
use crate::gate;
use crate::map::{Access, Contents, Map, Properties};
use crate::process::PerProcess;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::ops::{Range, RangeInclusive};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

/// Physical memory comes in units of so many bytes; smaller allocations are the driver's.
const UNIT: usize = 2 << 20;
const OUT_OF_MEMORY: c_int = 2;
const INVALID_VALUE: c_int = 1;
const NOT_READY: c_int = 600;

// cuda.h
const PINNED: u32 = 1;
const DEVICE: u32 = 1;
const POSIX_DESCRIPTOR: u32 = 1;
/// The errors that are about a stream capture.
const CAPTURE_ERRORS: RangeInclusive<c_int> = 900..=908;

/// An allocation of `cuMemAlloc`.
#[derive(Clone, Copy)]
struct Block {
    bytes: usize,
    /// Size of the reserved addresses.
    reserved: usize,
    id: u64,
    context: usize,
    /// The program has freed it during a capture, and the work in this context may still use it.
    late: Option<usize>,
}

struct Memory {
    map: Map,
    blocks: BTreeMap<u64, Block>,
    /// Devices that may use another's memory: owner and user.
    peers: BTreeSet<(i32, i32)>,
    /// Devices whose memory network cards can reach, or cannot.
    rdma: BTreeMap<i32, bool>,
    /// Some block is late.
    any_late: bool,
    /// How many late blocks have been freed.
    freed_late: u64,
    /// Until when an allocation that finds no memory is tried again: the driver agent holds some, and lets go of it.
    patient_until: Option<Instant>,
}

static MEMORY: PerProcess<Memory> = PerProcess::new(Memory::new(), Memory::new());

fn memory() -> MutexGuard<'static, Memory> {
    MEMORY.lock()
}

impl Memory {
    const fn new() -> Self {
        Self {
            map: Map::new(),
            blocks: BTreeMap::new(),
            peers: BTreeSet::new(),
            rdma: BTreeMap::new(),
            any_late: false,
            freed_late: 0,
            patient_until: None,
        }
    }

    fn access_of(&self, device: i32) -> Vec<Access> {
        let peers = self.peers.iter().filter(|(owner, _)| *owner == device);
        let users = std::iter::once(device).chain(peers.map(|(_, user)| *user));
        users.map(access_for).collect()
    }

    fn allocate(&mut self, bytes: usize, context: usize, device: i32) -> Result<u64, c_int> {
        let reserved = bytes.checked_next_multiple_of(UNIT).ok_or(OUT_OF_MEMORY)?;
        let size = reserved as u64;
        let rdma = *(self.rdma.entry(device)).or_insert_with(|| supports_rdma(device));
        let mut properties = device_memory(device, rdma);
        let handle = create_anywhere(size, &mut properties)?;
        let address = match reserve(reserved) {
            Ok(address) => address,
            Err(code) => {
                let _ = release_physical(handle);
                return Err(code);
            }
        };
        let access = self.access_of(device);
        let mut mapped = map_physical(address, size, 0, handle);
        if mapped.is_ok() {
            mapped = set_access(address, size, &access);
            if mapped.is_err() {
                let _ = unmap_physical(address, size);
            }
        }
        if let Err(code) = mapped {
            unreserve(address, reserved);
            let _ = release_physical(handle);
            return Err(code);
        }
        let id = self.map.add(handle, size, properties);
        self.map.map(address, size, 0, id);
        self.map.allow(address, size, &access);
        // The mapping keeps it.
        self.map.release(id);
        let block = Block {
            bytes,
            reserved,
            id,
            context,
            late: None,
        };
        self.blocks.insert(address, block);
        Ok(address)
    }

    fn free(&mut self, address: u64) -> Option<Result<(), c_int>> {
        let size = self.blocks.get(&address)?.reserved as u64;
        if let Err(code) = unmap_physical(address, size) {
            return Some(Err(code));
        }
        let block = self.blocks.remove(&address)?;
        for handle in self.map.unmap(address, size) {
            let _ = release_physical(handle);
        }
        unreserve(address, block.reserved);
        Some(Ok(()))
    }
}

/// An agent that lives says when it has copied all, at some 30 GB/s. This is for one that has died.
const PATIENCE: Duration = Duration::from_secs(120);

/// Has allocations wait for memory, until [`be_impatient`] or for a while.
pub fn be_patient() {
    memory().patient_until = Some(Instant::now() + PATIENCE);
}

/// Has allocations that find no memory fail at once.
pub fn be_impatient() {
    memory().patient_until = None;
}

/// Makes an allocation that passes the gate; again while it finds no memory and some is freed late, or the agent holds
/// some. It waits outside of the gate, which a checkpoint may shut meanwhile.
pub fn patiently(allocate: impl Fn() -> c_int) -> c_int {
    loop {
        let (until, freed) = {
            let memory = memory();
            (memory.patient_until, memory.freed_late)
        };
        match allocate() {
            OUT_OF_MEMORY if gate::pass(|| free_late(freed)) => {}
            OUT_OF_MEMORY if until.is_some_and(|until| Instant::now() < until) => {
                std::thread::sleep(Duration::from_millis(10));
            }
            code => return code,
        }
    }
}

/// `cuMemAlloc`; `None`: the driver is to do it.
pub fn allocate(bytes: usize) -> Option<Result<u64, c_int>> {
    let context = contexts::current();
    if bytes < UNIT || context == 0 {
        return None;
    }
    let device = contexts::current_device()?;
    let made = memory().allocate(bytes, context, device);
    match made {
        Err(OUT_OF_MEMORY) => Some(Err(OUT_OF_MEMORY)),
        // A device that cannot do this, say.
        Err(_) => None,
        done => Some(done),
    }
}

/// `cuMemFree`; `None`: it is the driver's. As the driver's own function it waits for the work.
pub fn free(address: u64) -> Option<c_int> {
    let block = block_at(address)?;
    let wait = || contexts::synchronize(block.context);
    let code = free_when(address, block, wait, permitted, || block.context)?;
    // Another thread that frees it need not be waited for.
    if code == 0 && memory().any_late {
        free_late(0);
    }
    Some(code)
}

/// `cuMemFreeAsync`, which CUDA allows for such memory, too; `None`: it is the driver's, as in a stream that is captured.
/// `wait` is for the stream's work.
pub fn free_after(
    address: u64,
    stream: usize,
    is_captured: impl FnOnce() -> bool,
    wait: impl FnOnce() -> c_int,
) -> Option<c_int> {
    let block = block_at(address).filter(|_| !is_captured())?;
    let context = || contexts::of_stream(stream);
    free_when(address, block, wait, || NOT_READY, context)
}

fn block_at(address: u64) -> Option<Block> {
    memory().blocks.get(&address).copied()
}

/// Frees a block once `wait` says that its work is done. During a capture nothing can be waited for without ending it: if
/// `in_capture` permits the call, the block is freed later, when that `context` has no work.
fn free_when(
    address: u64,
    block: Block,
    wait: impl FnOnce() -> c_int,
    in_capture: impl FnOnce() -> c_int,
    context: impl FnOnce() -> usize,
) -> Option<c_int> {
    if block.late.is_some() {
        return Some(INVALID_VALUE);
    }
    let code = match gate::is_capturing() {
        true => in_capture(),
        false => wait(),
    };
    match code {
        0 => Some(memory().free(address)?.err().unwrap_or(0)),
        NOT_READY => {
            let context = context();
            let mut memory = memory();
            memory.blocks.get_mut(&address)?.late = Some(context);
            memory.any_late = true;
            Some(0)
        }
        code => Some(code),
    }
}

/// Whether this thread may free memory while a stream is captured: [`NOT_READY`]. That depends on who captures and how,
/// which the driver knows: it forbids the same for memory of its own.
fn permitted() -> c_int {
    let mut byte = 0u64;
    let made = driver_call(Symbol::cuMemAlloc_v2, [&raw mut byte as usize, 1]);
    let freed = match made {
        Ok(()) => driver_call(Symbol::cuMemFree_v2, [byte as usize]),
        Err(_) => Ok(()),
    };
    match made.and(freed) {
        Err(code) if CAPTURE_ERRORS.contains(&code) => code,
        _ => NOT_READY,
    }
}

/// Frees what the program has freed during a capture that has ended: where it waits for its work anyway, or wants memory.
/// Returns true if there is more memory than when so many late blocks had been freed, by this thread or another one, which
/// it waits for.
fn free_late(before: u64) -> bool {
    static ONE: PerProcess<()> = PerProcess::new((), ());
    let _one = ONE.lock();
    if gate::is_capturing() || !std::mem::take(&mut memory().any_late) {
        return memory().freed_late > before;
    }
    let late: Vec<(u64, usize)> = {
        let memory = memory();
        let late = memory.blocks.iter();
        late.filter_map(|(at, block)| Some((*at, block.late?)))
            .collect()
    };
    for (address, context) in late {
        let waited = contexts::synchronize(context);
        let mut memory = memory();
        // Another thread may have done it, and the address may be another block's.
        if memory.blocks.get(&address).and_then(|block| block.late) == Some(context) {
            let freed = (waited == 0).then(|| memory.free(address)).flatten();
            let is_free = matches!(freed, Some(Ok(())));
            memory.any_late |= !is_free;
            memory.freed_late += u64::from(is_free);
        }
    }
    memory().freed_late > before
}

/// Frees what `cuMemAlloc` made in a context that has ended, and what waited for its work.
pub fn free_all_of(context: usize) {
    let mut memory = memory();
    let is_over = |b: &Block| b.context == context || b.late == Some(context);
    let blocks = memory.blocks.iter().filter(|(_, b)| is_over(b));
    let addresses: Vec<u64> = blocks.map(|(address, _)| *address).collect();
    for address in addresses {
        memory.free(address);
    }
}

/// The allocation that holds an address: start and size.
pub fn range_of(address: u64) -> Option<(u64, usize)> {
    let memory = memory();
    let (start, block) = memory.blocks.range(..=address).next_back()?;
    (address - start < block.bytes as u64).then_some((*start, block.bytes))
}

/// `cuMemCreate`; `None`: the driver is to do it.
pub fn create(bytes: usize, properties: Properties) -> Option<Result<u64, c_int>> {
    let plain = properties.kind == PINNED
        && properties.location.kind == DEVICE
        && properties.handle_types & !POSIX_DESCRIPTOR == 0
        && properties.compression == 0
        && properties.usage == 0;
    let bytes = u64::try_from(bytes).ok().filter(|_| plain)?;
    match create_physical(bytes, &properties) {
        Ok(handle) => Some(Ok(memory().map.add(handle, bytes, properties))),
        Err(OUT_OF_MEMORY) => Some(Err(OUT_OF_MEMORY)),
        // A device that cannot make it so that it can be handed over.
        Err(_) => None,
    }
}

/// `cuMemRelease` of one of our ids.
pub fn release(id: u64) -> c_int {
    let mut memory = memory();
    if !memory.map.is_referred_to(id) {
        return INVALID_VALUE;
    }
    let handle = memory.map.release(id);
    handle.map_or(0, |handle| release_physical(handle).err().unwrap_or(0))
}

/// The driver's handle for what the program calls a handle.
pub fn handle(handle: u64) -> u64 {
    memory().map.handle(handle)
}

/// The same for a handle that the program gives to somebody else, who will hold the memory, too.
pub fn shared(handle: u64) -> u64 {
    let mut memory = memory();
    if let Some(piece) = memory.map.piece(handle) {
        piece.shared = true;
    }
    memory.map.handle(handle)
}

/// Notes that the program has given the memory at these addresses to somebody else.
pub fn share(address: u64, bytes: u64) {
    memory().map.share(address, bytes);
}

/// Whether memory of ours is mapped at an address.
pub fn is_at(address: u64) -> bool {
    memory().map.mapped_at(address).is_some()
}

/// What the program asked for at `cuMemCreate`.
pub fn properties(handle: u64) -> Option<Properties> {
    memory().map.piece(handle).map(|piece| piece.properties)
}

/// `cuMemRetainAllocationHandle`: returns our id; `None`: the memory is the driver's.
pub fn retain(address: u64) -> Option<u64> {
    memory().map.retain(address)
}

/// Notes that a part of our memory is mapped at an address.
pub fn mapped(address: u64, bytes: u64, offset: u64, id: u64) {
    let mut memory = memory();
    if memory.map.piece(id).is_some() {
        memory.map.map(address, bytes, offset, id);
    }
}

/// Forgets the mappings in a range, and releases memory that nothing refers to any more.
pub fn unmapped(address: u64, bytes: u64) {
    for handle in memory().map.unmap(address, bytes) {
        let _ = release_physical(handle);
    }
}

/// Notes which devices may use a range.
pub fn allowed(address: u64, bytes: u64, access: &[Access]) {
    memory().map.allow(address, bytes, access);
}

/// `cuCtxEnablePeerAccess`: the current context's device may use the memory of the other context's.
pub fn allow_peer(context: usize) {
    let owner = contexts::with(context, contexts::current_device);
    let (Ok(Some(owner)), Some(user)) = (owner, contexts::current_device()) else {
        return;
    };
    let mut memory = memory();
    if owner == user || !memory.peers.insert((owner, user)) {
        return;
    }
    let access = access_for(user);
    let Memory { map, blocks, .. } = &mut *memory;
    for (address, block) in blocks {
        let of_owner = map
            .piece(block.id)
            .is_some_and(|piece| piece.properties.location.id == owner);
        let size = block.reserved as u64;
        if of_owner && set_access(*address, size, &[access]).is_ok() {
            map.allow(*address, size, &[access]);
        }
    }
}

/// A piece's place in the file and a handle of it for another process.
pub struct Exported {
    pub offset: u64,
    pub bytes: u64,
    pub descriptor: OwnedFd,
}

fn export(handle: u64, offset: u64, bytes: u64) -> Result<Exported, c_int> {
    let mut fd = -1i32;
    let kind = POSIX_DESCRIPTOR as usize;
    let arguments = [&raw mut fd as usize, handle as usize, kind, 0];
    driver_call(Symbol::cuMemExportToShareableHandle, arguments)?;
    if fd < 0 {
        return Err(INVALID_VALUE);
    }
    Ok(Exported {
        offset,
        bytes,
        // SAFETY: the driver has just made it, for us.
        descriptor: unsafe { OwnedFd::from_raw_fd(fd) },
    })
}

/// Gives each piece its place in the file ([`Map::lay_out`]), and exports all.
pub fn export_all(keep: bool, each: impl FnMut(Exported)) -> Result<(), c_int> {
    let mut memory = memory();
    memory.map.lay_out(keep);
    export_those(&mut memory.map, each)
}

/// Whether most of the file is pieces, as long as they keep their places.
pub fn is_compact() -> bool {
    let mut memory = memory();
    let ends = memory.map.movable();
    let (bytes, end) = ends.fold((0u64, 0), |(bytes, end), (_, piece)| {
        let of_piece = piece.offset.saturating_add(piece.bytes);
        (bytes.saturating_add(piece.bytes), of_piece.max(end))
    });
    end <= bytes.saturating_mul(2)
}

fn export_those(map: &mut Map, mut each: impl FnMut(Exported)) -> Result<(), c_int> {
    for (_, piece) in map.movable() {
        each(export(piece.handle, piece.offset, piece.bytes)?);
    }
    Ok(())
}

/// Unmaps and releases all pieces. After an error some are here, and some are away.
pub fn release_all() -> Result<(), c_int> {
    let mut memory = memory();
    for (address, mapping, _) in memory.map.movable_mappings() {
        unmap_physical(address, mapping.bytes)?;
        mapping.mapped = false;
    }
    for (_, piece) in memory.map.movable() {
        release_physical(piece.handle)?;
        (piece.handle, piece.contents) = (0, Contents::Away);
    }
    Ok(())
}

/// Allocates and maps again what was released of the pieces with these places. After an error it can be called once more.
pub fn restore(places: &Range<u64>) -> Result<(), c_int> {
    let mut memory = memory();
    for (_, piece) in memory.map.movable() {
        if piece.contents == Contents::Away && places.contains(&piece.offset) {
            piece.handle = create_anywhere(piece.bytes, &mut piece.properties)?;
            piece.contents = Contents::Empty;
        }
    }
    for (address, mapping, piece) in memory.map.movable_mappings() {
        if mapping.mapped || !places.contains(&piece.offset) {
            continue;
        }
        map_physical(address, mapping.bytes, mapping.offset, piece.handle)?;
        let mut accesses = mapping.access.iter();
        let allowed = accesses.try_for_each(|(start, bytes, access)| {
            set_access(*start, *bytes, std::slice::from_ref(access))
        });
        if allowed.is_err() {
            let _ = unmap_physical(address, mapping.bytes);
        }
        allowed?;
        mapping.mapped = true;
    }
    Ok(())
}

/// Exports the pieces with these places that are allocated and have no contents yet.
pub fn export_empty(places: &Range<u64>, mut each: impl FnMut(Exported)) -> Result<(), c_int> {
    for (_, piece) in memory().map.movable() {
        if piece.contents == Contents::Empty && places.contains(&piece.offset) {
            each(export(piece.handle, piece.offset, piece.bytes)?);
        }
    }
    Ok(())
}

/// Returns true if all memory is allocated and has its contents; what is empty counts as filled if somebody says so.
pub fn is_back(empty_filled: bool) -> bool {
    let mut memory = memory();
    let back = |contents| match contents {
        Contents::Here => true,
        Contents::Empty => empty_filled,
        Contents::Away => false,
    };
    let here = memory.map.movable().all(|(_, p)| back(p.contents))
        && memory.map.movable_mappings().all(|(_, m, _)| m.mapped);
    if here {
        for (_, piece) in memory.map.movable() {
            piece.contents = Contents::Here;
        }
    }
    here
}

/// Whether all pieces have their contents.
pub fn has_all() -> bool {
    memory()
        .map
        .movable()
        .all(|(_, p)| p.contents == Contents::Here)
}

/// Unmaps all memory whose contents are lost.
pub fn unmap_empty() {
    for (address, mapping, piece) in memory().map.movable_mappings() {
        if mapping.mapped && piece.contents == Contents::Empty {
            let _ = unmap_physical(address, mapping.bytes);
            mapping.mapped = false;
        }
    }
}

/// Copies all pieces without contents from memory that holds them at their places.
pub fn fill_from(contents: &[u8]) -> Result<(), c_int> {
    let mut memory = memory();
    for (_, piece) in memory.map.movable() {
        if piece.contents != Contents::Empty {
            continue;
        }
        let place = usize::try_from(piece.offset).ok();
        let place = place.zip(usize::try_from(piece.bytes).ok());
        let from = place.and_then(|(at, len)| contents.get(at..at.checked_add(len)?));
        let from = from.ok_or(INVALID_VALUE)?;
        let device = piece.properties.location.id;
        while_mapped(piece.handle, from.len(), device, |address| {
            let arguments = [address, from.as_ptr() as usize, from.len()];
            driver_call(Symbol::cuMemcpyHtoD_v2, arguments)
        })?;
    }
    Ok(())
}

/// Maps memory for a moment, at addresses of its own: a piece need not be mapped anywhere.
fn while_mapped(
    handle: u64,
    len: usize,
    device: i32,
    work: impl FnOnce(usize) -> Result<(), c_int>,
) -> Result<(), c_int> {
    let bytes = len as u64;
    let address = reserve(len)?;
    let access = access_for(device);
    let done = map_physical(address, bytes, 0, handle).and_then(|()| {
        let done = set_access(address, bytes, &[access]).and_then(|()| work(address as usize));
        done.and(unmap_physical(address, bytes))
    });
    unreserve(address, len);
    done
}

/// Allocates the piece at a place again if need be, and copies its contents from memory of this handle.
pub fn take_back(offset: u64, bytes: u64, from: BorrowedFd<'_>) -> Result<(), c_int> {
    restore(&(offset..offset.saturating_add(1)))?;
    let len = usize::try_from(bytes).map_err(|_| INVALID_VALUE)?;
    let mut memory = memory();
    let mut movable = memory.map.movable();
    let piece = movable.find(|(_, piece)| piece.offset == offset && piece.bytes == bytes);
    let (_, piece) = piece.ok_or(INVALID_VALUE)?;
    let mut old = 0u64;
    let fd = from.as_raw_fd().unsigned_abs() as usize;
    let import = [&raw mut old as usize, fd, POSIX_DESCRIPTOR as usize];
    other_call(c"cuMemImportFromShareableHandle", import)?;
    let device = piece.properties.location.id;
    let copy = || {
        while_mapped(piece.handle, len, device, |to| {
            while_mapped(old, len, device, |from| {
                other_call(c"cuMemcpyDtoD_v2", [to, from, len])?;
                other_call(c"cuCtxSynchronize", [])
            })
        })
    };
    let copied = match contexts::primary(device) {
        Some(context) => contexts::with(context, copy).and_then(|copied| copied),
        None => copy(),
    };
    let released = release_physical(old);
    copied.and(released)?;
    piece.contents = Contents::Here;
    Ok(())
}
