//! The exported symbols that a program uses. Signatures are those of `cuda.h`.

use std::collections::BTreeSet;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::exports_capture::{unsafe_call, wait};
use super::memory::{self, Way};
use super::process::{Gpu, Inner, api, init, process};
use super::shared::{self, Kind};
use super::steps;
use crate::abi::*;
use crate::wire::Step;

pub fn code(r: Result<(), CuResult>) -> CuResult {
    r.err().unwrap_or(CUDA_SUCCESS)
}

/// Writes a result through the program's pointer, unless that is null.
pub fn put<T>(to: *mut T, r: Result<T, CuResult>) -> CuResult {
    match r {
        Ok(_) if to.is_null() => CUDA_ERROR_INVALID_VALUE,
        Ok(value) => {
            // SAFETY: not null; the program promised that it may be written.
            unsafe { to.write(value) };
            CUDA_SUCCESS
        }
        Err(e) => e,
    }
}

const CONTEXT_TAG: usize = 0x00c0_da00;
/// What the number of a green context has more than that of its device.
const GREEN: usize = 1 << 8;
static GREENS: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

fn greens() -> MutexGuard<'static, BTreeSet<usize>> {
    GREENS.lock().unwrap_or_else(PoisonError::into_inner)
}

pub fn context(number: usize) -> *mut c_void {
    std::ptr::without_provenance_mut(CONTEXT_TAG + 16 * number)
}

/// The number of a context.
fn ordinal(context: *mut c_void) -> Result<Option<usize>, CuResult> {
    let number = match context.addr().checked_sub(CONTEXT_TAG) {
        _ if context.is_null() => return Ok(None),
        Some(at) => at / 16,
        None => return Err(CUDA_ERROR_INVALID_CONTEXT),
    };
    match number < 64 || greens().contains(&number) {
        true => Ok(Some(number)),
        false => Err(CUDA_ERROR_INVALID_CONTEXT),
    }
}

fn number<A, B: TryFrom<A>>(n: A) -> Result<B, CuResult> {
    B::try_from(n).map_err(|_| CUDA_ERROR_UNKNOWN)
}

fn gpu(inner: &Inner, dev: CuDevice) -> Result<&Gpu, CuResult> {
    Ok(&inner.gpus[memory::gpu_of(inner, device(dev)?)?])
}

fn device(d: CuDevice) -> Result<usize, CuResult> {
    usize::try_from(d).map_err(|_| CUDA_ERROR_INVALID_DEVICE)
}

exports! {
    fn cuInit(flags: c_uint) = match flags {
        0 => code(init()),
        _ => CUDA_ERROR_INVALID_VALUE,
    };
    /// Works before cuInit too; then it tells the newest version that is simulated.
    fn cuDriverGetVersion(version: *mut c_int) = put(version, Ok(process().map_or(13_000, |p| p.cuda_version)));
    fn cuDeviceGetUuid_v2(uuid: *mut CuUuid, dev: CuDevice) =
        put(uuid, api(|i| gpu(i, dev).map(|g| CuUuid { bytes: g.uuid.0 })));
    fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: CuDevice) = put(bytes, api(|i| number(gpu(i, dev)?.total)));
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, dev: CuDevice) = put(value, api(|i| match attribute {
        75 => number(gpu(i, dev)?.compute.0), // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        76 => number(gpu(i, dev)?.compute.1),
        110 => Ok(1), // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        _ => Err(CUDA_ERROR_INVALID_VALUE),
    }));
    fn cuCtxGetDevice(dev: *mut CuDevice) =
        put(dev, api(|_| number(memory::current().ok_or(CUDA_ERROR_INVALID_CONTEXT)?)));
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) = code(api(memory::info).and_then(|(f, t)| {
        [put(free, number(f)), put(total, number(t))].into_iter().find(|c| *c != CUDA_SUCCESS).map_or(Ok(()), Err)
    }));
    /// Not NVIDIA's: maps such memory, as cuMem does or, with `legacy` not 0, as NCCL's P2P/IPC. `cuIpcCloseMemHandle`
    /// unmaps it.
    fn cusim_import(ptr: *mut CuDevicePtr, handle: Handle, legacy: c_uint) = {
        let kind = if legacy == 0 { Kind::Cumem } else { Kind::NcclIpc };
        put(ptr, api(|i| shared::import(i, &handle, kind)))
    };
    fn cuGetErrorName(error: CuResult, text: *mut *const c_char) =
        put(text, describe(error).map(|d| d.0.as_ptr()).ok_or(CUDA_ERROR_INVALID_VALUE));
    fn cuGetErrorString(error: CuResult, text: *mut *const c_char) =
        put(text, describe(error).map(|d| d.1.as_ptr()).ok_or(CUDA_ERROR_INVALID_VALUE));
    fn cuDeviceGetCount(count: *mut c_int) = put(count, api(|i| Ok(c_int::try_from(i.ordinals.len()).unwrap_or(0))));
    fn cuDeviceGet(dev: *mut CuDevice, number: c_int) =
        put(dev, api(|i| memory::gpu_of(i, device(number)?).map(|_| number)));
    fn cuDeviceGetUuid(uuid: *mut CuUuid, dev: CuDevice) = cuDeviceGetUuid_v2(uuid, dev);
    fn cuDevicePrimaryCtxRetain(ctx: *mut *mut c_void, dev: CuDevice) = put(ctx, retain(dev).map(context));
    fn cuDevicePrimaryCtxRelease_v2(dev: CuDevice) = code(api(|i| memory::gpu_of(i, device(dev)?).map(|_| ())));
    fn cuCtxCreate_v2(ctx: *mut *mut c_void, _flags: c_uint, dev: CuDevice) =
        put(ctx, retain(dev).map(|o| { memory::set_current(Some(o)); context(o) }));
    fn cuCtxCreate_v4(ctx: *mut *mut c_void, _params: *const c_void, flags: c_uint, dev: CuDevice) =
        cuCtxCreate_v2(ctx, flags, dev);
    fn cuCtxCreate(ctx: *mut *mut c_void, flags: c_uint, dev: CuDevice) = cuCtxCreate_v2(ctx, flags, dev);
    fn cuCtxDestroy_v2(ctx: *mut c_void) = code(api(|_| ordinal(ctx).map(|_| ())));
    fn cuGreenCtxCreate(ctx: *mut *mut c_void, _resources: *mut c_void, dev: CuDevice, _flags: c_uint) =
        put(ctx, retain(dev).map(|o| { greens().insert(GREEN + o); context(GREEN + o) }));
    fn cuCtxFromGreenCtx(ctx: *mut *mut c_void, green: *mut c_void) = put(ctx, ordinal(green).map(|_| green));
    fn cuGreenCtxDestroy(green: *mut c_void) = code(ordinal(green).map(|o| greens().retain(|g| Some(*g) != o)));
    fn cuCtxSetCurrent(ctx: *mut c_void) = code(api(|_| ordinal(ctx).map(memory::set_current)));
    fn cuCtxGetCurrent(ctx: *mut *mut c_void) =
        put(ctx, api(|_| Ok(memory::current_context().map_or(std::ptr::null_mut(), context))));
    fn cuCtxSynchronize() = code(api(|_| wait()).and_then(|()| steps::begin_alone(Step::Synchronize)));
    fn cuMemAlloc_v2(ptr: *mut CuDevicePtr, bytes: usize) = put(ptr, api(|i| {
        unsafe_call()?;
        memory::alloc(i, bytes as u64)
    }));
    fn cuMemAllocManaged(ptr: *mut CuDevicePtr, bytes: usize, _flags: c_uint) =
        put(ptr, api(|i| memory::alloc_managed(i, bytes as u64)));
    fn cuMemFree_v2(ptr: CuDevicePtr) = code(api(|i| {
        unsafe_call()?;
        memory::free(i, ptr)
    }));
    fn cuMemcpyHtoD_v2(to: CuDevicePtr, from: *const c_void, bytes: usize) =
        code(api(|i| memory::copy(i, to, from.cast_mut(), bytes, Way::ToDevice)));
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: CuDevicePtr, bytes: usize) =
        code(api(|i| memory::copy(i, from, to, bytes, Way::ToHost)));
    fn cuMemsetD8_v2(ptr: CuDevicePtr, value: u8, bytes: usize) =
        code(api(|i| memory::fill(i, ptr, value, bytes as u64)));
    fn cuIpcGetMemHandle(handle: *mut Handle, ptr: CuDevicePtr) = put(handle, api(|i| shared::export(i, ptr, true)));
    fn cuIpcOpenMemHandle_v2(ptr: *mut CuDevicePtr, handle: Handle, _flags: c_uint) =
        put(ptr, api(|i| shared::import(i, &handle, Kind::Ipc)));
    fn cuIpcCloseMemHandle(ptr: CuDevicePtr) = code(api(|i| shared::close(i, ptr)));
    /// Not NVIDIA's: a handle of memory, in place of exporting a cuMem allocation as a descriptor.
    fn cusim_export(handle: *mut Handle, ptr: CuDevicePtr) = put(handle, api(|i| shared::export(i, ptr, false)));
    /// Not NVIDIA's: the checksum kernel, word i times (i | 1), modulo 2^64. Its name tells that it enqueues work.
    fn cuLaunchCusimSum(ptr: CuDevicePtr, bytes: usize, total: *mut u64) =
        put(total, api(|i| memory::sum(i, ptr, bytes as u64)));
}

#[unsafe(no_mangle)]
extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: CuDevice) -> CuResult {
    let Ok(room @ 1..) = usize::try_from(len) else {
        return CUDA_ERROR_INVALID_VALUE;
    };
    if name.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    code(api(|i| {
        let gpu = gpu(i, dev)?;
        let n = gpu.name.len().min(room);
        // SAFETY: the program gave room for `len` bytes; n is no more, and 64 at most.
        unsafe {
            name.cast::<u8>()
                .copy_from_nonoverlapping(gpu.name.as_ptr(), n);
            name.add(n - 1).write(0);
        }
        Ok(())
    }))
}

/// Makes or finds the context of a device.
fn retain(dev: CuDevice) -> Result<usize, CuResult> {
    api(|i| {
        let ordinal = device(dev)?;
        let gpu = memory::gpu_of(i, ordinal)?;
        memory::make_context(i, gpu).map(|()| ordinal)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGetProcAddress_v2(
    symbol: *const c_char,
    address: *mut *mut c_void,
    version: c_int,
    _flags: u64,
    status: *mut c_int,
) -> CuResult {
    if symbol.is_null() || address.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null; the program promised a C string.
    let name = unsafe { CStr::from_ptr(symbol) }.to_bytes();
    let checkpoint = name.starts_with(b"cuCheckpoint");
    let hidden = checkpoint && process().is_ok_and(|p| p.driver_major < 570);
    let too_new = version > process().map_or(13_000, |p| p.cuda_version);
    let found = if hidden || too_new {
        std::ptr::null_mut()
    } else {
        find_symbol(name)
    };
    // SAFETY: not null; the program promised that both may be written.
    unsafe {
        address.write(found);
        if !status.is_null() {
            let missing = found.is_null();
            status.write(if missing {
                PROC_ADDRESS_NOT_FOUND
            } else {
                PROC_ADDRESS_SUCCESS
            });
        }
    }
    if too_new {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if found.is_null() {
        CUDA_ERROR_NOT_FOUND
    } else {
        CUDA_SUCCESS
    }
}

/// A symbol of this library by the name that it has in `cuda.h`: the newest version of it.
fn find_symbol(name: &[u8]) -> *mut c_void {
    // SAFETY: dladdr fills the all-zero Dl_info for an address of this object; dlopen with
    // NOLOAD only raises the count of this object, which is never unloaded; the names are C
    // strings.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(cuInit as *const c_void, &mut info) == 0 {
            return std::ptr::null_mut();
        }
        let this = libc::dlopen(info.dli_fname, libc::RTLD_NOW | libc::RTLD_NOLOAD);
        if this.is_null() {
            return std::ptr::null_mut();
        }
        [&b"_v4\0"[..], b"_v2\0", b"\0"]
            .iter()
            .map(|suffix| libc::dlsym(this, [name, suffix].concat().as_ptr().cast()))
            .find(|p| !p.is_null())
            .unwrap_or(std::ptr::null_mut())
    }
}
