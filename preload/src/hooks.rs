//! The functions that stand in front of the driver's and do more than pass the gate.

use crate::contexts;
use crate::driver::{Symbol, call};
use crate::gate;
use crate::imports;
use crate::map::{Access, Properties, is_id};
use crate::memory;
use std::ffi::{c_int, c_void};

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;

/// Writes a result where the program wants it.
///
/// # Safety
/// The pointer must be the program's for a value of this type.
unsafe fn put<T>(to: *mut T, result: Result<T, c_int>) -> c_int {
    match result {
        Ok(_) if to.is_null() => INVALID_VALUE,
        Ok(value) => {
            // SAFETY: not null; the caller vouches for it.
            unsafe { to.write(value) };
            SUCCESS
        }
        Err(code) => code,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> c_int {
    gate::pass(|| match memory::allocate(bytes) {
        // SAFETY: the program's arguments.
        Some(result) => unsafe { put(address, result) },
        // SAFETY: as above.
        None => unsafe { call(Symbol::cuMemAlloc_v2, [address as usize, bytes, 0, 0, 0, 0]) },
    })
}

/// The pitch that the driver gives to rows of memory, in bytes.
const PITCH: usize = 512;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocPitch_v2(
    address: *mut u64,
    pitch: *mut usize,
    width: usize,
    height: usize,
    element: usize,
) -> c_int {
    let row = width.checked_next_multiple_of(PITCH);
    let bytes = row.and_then(|row| row.checked_mul(height));
    let known = matches!(element as u32, 4 | 8 | 16) && !pitch.is_null();
    gate::pass(|| {
        let ours = bytes.filter(|_| known).and_then(memory::allocate);
        match (ours, row) {
            // SAFETY: the program's arguments.
            (Some(result), Some(row)) => unsafe {
                let code = put(address, result);
                if code == SUCCESS {
                    pitch.write(row);
                }
                code
            },
            // SAFETY: as above.
            _ => unsafe {
                let arguments = [address as usize, pitch as usize, width, height, element, 0];
                call(Symbol::cuMemAllocPitch_v2, arguments)
            },
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemFree_v2(address: usize) -> c_int {
    gate::pass(|| match memory::free(address as u64) {
        Some(code) => code,
        // SAFETY: the program's argument.
        None => unsafe { call(Symbol::cuMemFree_v2, [address, 0, 0, 0, 0, 0]) },
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: *mut u64,
    bytes: *mut usize,
    address: usize,
) -> c_int {
    let Some((start, size)) = memory::range_of(address as u64) else {
        let arguments = [base as usize, bytes as usize, address, 0, 0, 0];
        // SAFETY: the program's arguments.
        return unsafe { call(Symbol::cuMemGetAddressRange_v2, arguments) };
    };
    // SAFETY: either may be null; the program's arguments.
    unsafe {
        if !base.is_null() {
            base.write(start);
        }
        if !bytes.is_null() {
            bytes.write(size);
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    handle: *mut u64,
    bytes: usize,
    properties: *const Properties,
    flags: usize,
) -> c_int {
    gate::pass(|| {
        // SAFETY: not null; the program promised that it may be read.
        let wanted = (!properties.is_null()).then(|| unsafe { properties.read() });
        let ours = wanted.filter(|_| flags == 0 && !handle.is_null());
        match ours.and_then(|properties| memory::create(bytes, properties)) {
            // SAFETY: the program's arguments.
            Some(result) => unsafe { put(handle, result) },
            // SAFETY: as above.
            None => unsafe {
                let arguments = [handle as usize, bytes, properties as usize, flags, 0, 0];
                call(Symbol::cuMemCreate, arguments)
            },
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRelease(handle: usize) -> c_int {
    gate::pass(|| match is_id(handle as u64) {
        true => memory::release(handle as u64),
        false => {
            imports::released(handle as u64);
            // SAFETY: the program's argument.
            unsafe { call(Symbol::cuMemRelease, [handle, 0, 0, 0, 0, 0]) }
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemMap(
    address: usize,
    bytes: usize,
    offset: usize,
    handle: usize,
    flags: usize,
) -> c_int {
    gate::pass(|| {
        let real = memory::handle(handle as u64) as usize;
        // SAFETY: the program's arguments, but for the handle.
        let code = unsafe { call(Symbol::cuMemMap, [address, bytes, offset, real, flags, 0]) };
        if code == SUCCESS {
            memory::mapped(address as u64, bytes as u64, offset as u64, handle as u64);
            imports::mapped(address as u64, handle as u64);
        }
        code
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemUnmap(address: usize, bytes: usize) -> c_int {
    gate::pass(|| {
        // SAFETY: the program's arguments.
        let code = unsafe { call(Symbol::cuMemUnmap, [address, bytes, 0, 0, 0, 0]) };
        if code == SUCCESS {
            memory::unmapped(address as u64, bytes as u64);
            imports::unmapped(address as u64, bytes as u64);
        }
        code
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(
    address: usize,
    bytes: usize,
    access: *const Access,
    count: usize,
) -> c_int {
    gate::pass(|| {
        // SAFETY: the program's arguments.
        let code = unsafe {
            call(
                Symbol::cuMemSetAccess,
                [address, bytes, access as usize, count, 0, 0],
            )
        };
        if code == SUCCESS && !access.is_null() {
            // SAFETY: the driver has read so many.
            let access = unsafe { std::slice::from_raw_parts(access, count) };
            memory::allowed(address as u64, bytes as u64, access);
        }
        code
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut u64, address: usize) -> c_int {
    gate::pass(|| match memory::retain(address as u64) {
        // SAFETY: the program's arguments.
        Some(id) => unsafe { put(handle, Ok(id)) },
        // SAFETY: as above.
        None => unsafe {
            call(
                Symbol::cuMemRetainAllocationHandle,
                [handle as usize, address, 0, 0, 0, 0],
            )
        },
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    exported: *mut c_void,
    handle: usize,
    kind: usize,
    flags: usize,
) -> c_int {
    gate::pass(|| {
        let real = memory::shared(handle as u64) as usize;
        // SAFETY: the program's arguments, but for the handle.
        unsafe {
            call(
                Symbol::cuMemExportToShareableHandle,
                [exported as usize, real, kind, flags, 0, 0],
            )
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(
    properties: *mut Properties,
    handle: usize,
) -> c_int {
    match memory::properties(handle as u64) {
        // SAFETY: the program's arguments.
        Some(own) => unsafe { put(properties, Ok(own)) },
        // SAFETY: as above.
        None => unsafe {
            call(
                Symbol::cuMemGetAllocationPropertiesFromHandle,
                [properties as usize, handle, 0, 0, 0, 0],
            )
        },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMulticastBindMem(
    multicast: usize,
    at: usize,
    handle: usize,
    offset: usize,
    bytes: usize,
    flags: usize,
) -> c_int {
    gate::pass(|| {
        imports::multicast_used();
        let real = memory::shared(handle as u64) as usize;
        // SAFETY: the program's arguments, but for the handle.
        unsafe {
            call(
                Symbol::cuMulticastBindMem,
                [multicast, at, real, offset, bytes, flags],
            )
        }
    })
}

/// Functions that make a context; the first argument is where its handle goes.
macro_rules! create_context {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(context: *mut usize, b: usize, c: usize, d: usize) -> c_int {
            // SAFETY: the program's arguments.
            let code = unsafe { call(Symbol::$name, [context as usize, b, c, d, 0, 0]) };
            if code == SUCCESS {
                // SAFETY: the driver has written it.
                contexts::add(unsafe { context.read() }, None);
            }
            code
        }
    )*};
}
create_context!(cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxDestroy_v2(context: usize) -> c_int {
    gate::pass(|| {
        // SAFETY: the program's argument.
        let code = unsafe { call(Symbol::cuCtxDestroy_v2, [context, 0, 0, 0, 0, 0]) };
        if code == SUCCESS {
            contexts::remove(context);
            memory::free_all_of(context);
        }
        code
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, device: usize) -> c_int {
    // SAFETY: the program's arguments.
    let code = unsafe {
        call(
            Symbol::cuDevicePrimaryCtxRetain,
            [context as usize, device, 0, 0, 0, 0],
        )
    };
    if code == SUCCESS {
        // SAFETY: the driver has written it.
        contexts::add(unsafe { context.read() }, Some(device as i32));
    }
    code
}

/// Functions that may end a device's primary context.
macro_rules! end_context {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(device: usize) -> c_int {
            gate::pass(|| {
                // SAFETY: the program's argument.
                let code = unsafe { call(Symbol::$name, [device, 0, 0, 0, 0, 0]) };
                if let (SUCCESS, Some(context)) = (code, contexts::ended(device as i32)) {
                    memory::free_all_of(context);
                }
                code
            })
        }
    )*};
}
end_context!(cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxEnablePeerAccess(context: usize, flags: usize) -> c_int {
    gate::pass(|| {
        // SAFETY: the program's arguments.
        let code = unsafe { call(Symbol::cuCtxEnablePeerAccess, [context, flags, 0, 0, 0, 0]) };
        if code == SUCCESS {
            memory::allow_peer(context);
        }
        code
    })
}

/// Functions that begin or end a capture.
macro_rules! capture {
    ($($name:ident $count:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_int {
            gate::pass(|| {
                // SAFETY: the program's arguments.
                let code = unsafe { call(Symbol::$name, [a, b, c, d, e, f]) };
                $count(code);
                code
            })
        }
    )*};
}
capture!(
    cuStreamBeginCapture_v2 begun
    cuStreamBeginCapture_v2_ptsz begun
    cuStreamBeginCaptureToGraph begun
    cuStreamBeginCaptureToGraph_ptsz begun
    cuStreamEndCapture ended
    cuStreamEndCapture_ptsz ended
);

fn begun(code: c_int) {
    if code == SUCCESS {
        gate::capture_began();
    }
}

/// A capture that has failed is over, too.
fn ended(_code: c_int) {
    gate::capture_ended();
}
