//! The exported virtual memory calls, and the streams, events and pinned memory of a program that copies.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_void};

use super::exports::{code, context, cuCtxSetCurrent, cuMemcpyDtoH_v2, cuMemcpyHtoD_v2, put};
use super::memory;
use super::process::api;
use super::vmm;
use crate::abi::*;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Location {
    kind: c_uint,
    id: c_int,
}

#[repr(C)]
pub struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    win32: u64,
    compression: u8,
    rdma: u8,
    rest: [u8; 6],
}

const DESCRIPTOR: c_uint = 1;

exports! {
    fn cuMemExportToShareableHandle(shareable: *mut c_int, handle: u64, kind: c_uint, _flags: u64) = match kind {
        DESCRIPTOR => put(shareable, api(|i| vmm::export(i, handle))),
        _ => CUDA_ERROR_NOT_SUPPORTED,
    };
    fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_uint) =
        match (kind, c_int::try_from(shareable.addr())) {
            (DESCRIPTOR, Ok(fd)) => put(handle, api(|i| vmm::import(i, fd))),
            _ => CUDA_ERROR_INVALID_VALUE,
        };
    fn cuMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: u64) =
        put(properties, api(|i| vmm::device_of(i, handle)).map(|id| Properties {
            kind: 1,
            handle_types: DESCRIPTOR,
            location: Location { kind: 1, id },
            win32: 0,
            compression: 0,
            rdma: 0,
            rest: [0; 6],
        }));
    fn cuDevicePrimaryCtxGetState(_device: CuDevice, flags: *mut c_uint, active: *mut c_int) =
        match put(flags, api(|_| Ok(0))) {
            CUDA_SUCCESS => put(active, Ok(1)),
            error => error,
        };
    fn cuMemcpyDtoDAsync_v2(to: CuDevicePtr, from: CuDevicePtr, bytes: usize, _stream: *mut c_void) =
        cuMemcpyDtoD_v2(to, from, bytes);
    fn cuMemcpyDtoD_v2(to: CuDevicePtr, from: CuDevicePtr, bytes: usize) = {
        let mut copy = vec![0u8; bytes];
        match cuMemcpyDtoH_v2(copy.as_mut_ptr().cast(), from, bytes) {
            CUDA_SUCCESS => cuMemcpyHtoD_v2(to, copy.as_ptr().cast(), bytes),
            error => error,
        }
    };
    fn cuMemHostAlloc(memory: *mut *mut c_void, bytes: usize, _flags: c_uint) = {
        // SAFETY: takes a number; null when there is no memory.
        let made = unsafe { libc::malloc(bytes) };
        put(memory, if made.is_null() { Err(CUDA_ERROR_OUT_OF_MEMORY) } else { Ok(made) })
    };
    fn cuMemFreeHost(memory: *mut c_void) = {
        // SAFETY: what the function above has made.
        unsafe { libc::free(memory) };
        CUDA_SUCCESS
    };
    fn cuMemAddressReserve(address: *mut u64, bytes: usize, _align: usize, _wanted: u64, _flags: u64) =
        put(address, api(|i| vmm::reserve(i, bytes as u64)));
    fn cuMemAddressFree(_address: u64, _bytes: usize) = code(api(|_| Ok(())));
    fn cuMemRelease(handle: u64) = code(api(|i| vmm::release(i, handle)));
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, _flags: u64) =
        code(api(|i| vmm::map(i, address, bytes as u64, offset as u64, handle)));
    fn cuMemUnmap(address: u64, bytes: usize) = code(api(|i| vmm::unmap(i, address, bytes as u64)));
    fn cuMemSetAccess(address: u64, bytes: usize, _access: *const c_void, _count: usize) =
        code(api(|i| vmm::allow(i, address, bytes as u64)));
    fn cuStreamCreate(stream: *mut *mut c_void, _flags: c_uint) = put(stream, api(|_| Ok(token())));
    fn cuStreamDestroy_v2(_stream: *mut c_void) = code(api(|_| Ok(())));
    fn cuEventCreate(event: *mut *mut c_void, _flags: c_uint) = put(event, api(|_| Ok(token())));
    fn cuEventDestroy_v2(_event: *mut c_void) = code(api(|_| Ok(())));
    fn cuEventRecord(_event: *mut c_void, _stream: *mut c_void) = code(api(|_| Ok(())));
    fn cuEventSynchronize(_event: *mut c_void) = code(api(|_| Ok(())));
    /// Copies at once, so that all events are complete.
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CuDevicePtr, bytes: usize, _stream: *mut c_void) =
        cuMemcpyDtoH_v2(to, from, bytes);
    fn cuMemcpyHtoDAsync_v2(to: CuDevicePtr, from: *const c_void, bytes: usize, _stream: *mut c_void) =
        cuMemcpyHtoD_v2(to, from, bytes);
}

#[unsafe(no_mangle)]
extern "C" fn cuMemCreate(
    handle: *mut u64,
    bytes: usize,
    properties: *const Properties,
    _flags: u64,
) -> CuResult {
    if properties.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null; the program promised that it may be read.
    let (device, rdma) = unsafe { ((*properties).location.id, (*properties).rdma) };
    // Every other GPU refuses what it says it has, so that both ways are tried.
    if rdma != 0 && device % 2 == 1 {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    put(handle, api(|i| vmm::create(i, bytes as u64, device)))
}

thread_local! {
    static STACK: RefCell<Vec<Option<usize>>> = const { RefCell::new(Vec::new()) };
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> CuResult {
    let below = memory::current_context();
    let set = cuCtxSetCurrent(context);
    if set == CUDA_SUCCESS {
        STACK.with_borrow_mut(|stack| stack.push(below));
    }
    set
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxPopCurrent_v2(popped: *mut *mut c_void) -> CuResult {
    let Some(below) = STACK.with_borrow_mut(Vec::pop) else {
        return CUDA_ERROR_INVALID_CONTEXT;
    };
    let was = memory::current_context().map_or(std::ptr::null_mut(), context);
    memory::set_current(below);
    put(popped, Ok(was))
}

/// Something that is not null.
fn token() -> *mut c_void {
    std::ptr::without_provenance_mut(0x7ea)
}
