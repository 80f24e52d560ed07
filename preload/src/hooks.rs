//! The functions that stand in front of the driver's and do more than pass the gate.

use crate::contexts;
use crate::driver::{hooks, real};
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

/// The pitch that the driver gives to rows of memory, in bytes.
const PITCH: usize = 512;

hooks! {
    fn cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        gate::pass(|| match memory::allocate(bytes) {
            // SAFETY: the program's arguments.
            Some(result) => unsafe { put(address, result) },
            None => real!(cuMemAlloc_v2, address, bytes),
        })
    }

    fn cuMemAllocPitch_v2(address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: usize) {
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
                _ => real!(cuMemAllocPitch_v2, address, pitch, width, height, element),
            }
        })
    }

    fn cuMemFree_v2(address: usize) {
        gate::pass(|| memory::free(address as u64).unwrap_or_else(|| real!(cuMemFree_v2, address)))
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: usize) {
        let Some((start, size)) = memory::range_of(address as u64) else {
            return real!(cuMemGetAddressRange_v2, base, bytes, address);
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

    fn cuMemCreate(handle: *mut u64, bytes: usize, properties: *const Properties, flags: usize) {
        gate::pass(|| {
            // SAFETY: not null; the program promised that it may be read.
            let wanted = (!properties.is_null()).then(|| unsafe { properties.read() });
            let ours = wanted.filter(|_| flags == 0 && !handle.is_null());
            match ours.and_then(|properties| memory::create(bytes, properties)) {
                // SAFETY: the program's arguments.
                Some(result) => unsafe { put(handle, result) },
                None => real!(cuMemCreate, handle, bytes, properties, flags),
            }
        })
    }

    fn cuMemRelease(handle: usize) {
        gate::pass(|| match is_id(handle as u64) {
            true => memory::release(handle as u64),
            false => {
                imports::released(handle as u64);
                real!(cuMemRelease, handle)
            }
        })
    }

    fn cuMemMap(address: u64, bytes: u64, offset: u64, handle: u64, flags: usize) {
        gate::pass(|| {
            let code = real!(cuMemMap, address, bytes, offset, memory::handle(handle), flags);
            if code == SUCCESS {
                memory::mapped(address, bytes, offset, handle);
                imports::mapped(address, handle);
            }
            code
        })
    }

    fn cuMemUnmap(address: u64, bytes: u64) {
        gate::pass(|| {
            let code = real!(cuMemUnmap, address, bytes);
            if code == SUCCESS {
                memory::unmapped(address, bytes);
                imports::unmapped(address, bytes);
            }
            code
        })
    }

    fn cuMemSetAccess(address: u64, bytes: u64, access: *const Access, count: usize) {
        gate::pass(|| {
            let code = real!(cuMemSetAccess, address, bytes, access, count);
            if code == SUCCESS && !access.is_null() {
                // SAFETY: the driver has read so many.
                let access = unsafe { std::slice::from_raw_parts(access, count) };
                memory::allowed(address, bytes, access);
            }
            code
        })
    }

    fn cuMemRetainAllocationHandle(handle: *mut u64, address: u64) {
        gate::pass(|| match memory::retain(address) {
            // SAFETY: the program's arguments.
            Some(id) => unsafe { put(handle, Ok(id)) },
            None => real!(cuMemRetainAllocationHandle, handle, address),
        })
    }

    fn cuMemExportToShareableHandle(exported: *mut c_void, handle: u64, kind: usize, flags: usize) {
        gate::pass(|| real!(cuMemExportToShareableHandle, exported, memory::shared(handle), kind, flags))
    }

    fn cuMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: u64) {
        match memory::properties(handle) {
            // SAFETY: the program's arguments.
            Some(own) => unsafe { put(properties, Ok(own)) },
            None => real!(cuMemGetAllocationPropertiesFromHandle, properties, handle),
        }
    }

    fn cuMulticastBindMem(multicast: usize, at: usize, handle: u64, offset: usize, bytes: usize, flags: usize) {
        gate::pass(|| {
            imports::multicast_used();
            real!(cuMulticastBindMem, multicast, at, memory::shared(handle), offset, bytes, flags)
        })
    }

    fn cuCtxDestroy_v2(context: usize) {
        gate::pass(|| {
            let code = real!(cuCtxDestroy_v2, context);
            if code == SUCCESS {
                contexts::remove(context);
                memory::free_all_of(context);
            }
            code
        })
    }

    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) {
        let code = real!(cuDevicePrimaryCtxRetain, context, device);
        if code == SUCCESS {
            // SAFETY: the driver has written it.
            contexts::add(unsafe { context.read() }, Some(device));
        }
        code
    }

    fn cuCtxEnablePeerAccess(context: usize, flags: usize) {
        gate::pass(|| {
            let code = real!(cuCtxEnablePeerAccess, context, flags);
            if code == SUCCESS {
                memory::allow_peer(context);
            }
            code
        })
    }
}

/// Functions that make a context; the first argument is where its handle goes. `cuCtxCreate_v3` has the most, five.
macro_rules! create_context {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(context: *mut usize, b: usize, c: usize, d: usize, e: usize) -> c_int {
            let code = real!($name, context, b, c, d, e);
            if code == SUCCESS {
                // SAFETY: the driver has written it.
                contexts::add(unsafe { context.read() }, None);
            }
            code
        }
    )*};
}
create_context!(cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4);

/// Functions that may end a device's primary context.
macro_rules! end_context {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(device: usize) -> c_int {
            gate::pass(|| {
                let code = real!($name, device);
                if let (SUCCESS, Some(context)) = (code, contexts::ended(device as i32)) {
                    memory::free_all_of(context);
                }
                code
            })
        }
    )*};
}
end_context!(cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2);

/// Functions that begin or end a capture.
macro_rules! capture {
    ($($name:ident $count:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_int {
            gate::pass(|| {
                let code = real!($name, a, b, c, d, e, f);
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
