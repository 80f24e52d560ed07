//! The functions that stand in front of the driver's and do more than pass the gate.

use crate::contexts;
use crate::driver::{Symbol, address as address_of, call_many, hooks, real};
use crate::gate;
use crate::imports::{IpcHandle, foreign};
use crate::map::{Access, Properties, is_id};
use crate::memory;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const WRONG_THREAD: c_int = 908;

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
        memory::patiently(|| {
            gate::pass(|| match memory::allocate(bytes) {
                // SAFETY: the program's arguments.
                Some(result) => unsafe { put(address, result) },
                None => real!(cuMemAlloc_v2, address, bytes),
            })
        })
    }

    fn cuMemAllocPitch_v2(address: *mut u64, pitch: *mut usize, width: usize, height: usize, element: usize) {
        let row = width.checked_next_multiple_of(PITCH);
        let bytes = row.and_then(|row| row.checked_mul(height));
        let known = matches!(element as u32, 4 | 8 | 16) && !pitch.is_null();
        let allocate = || {
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
        };
        memory::patiently(|| gate::pass(allocate))
    }

    fn cuMemFree_v2(address: usize) {
        gate::pass(|| memory::free(address as u64).unwrap_or_else(|| real!(cuMemFree_v2, address)))
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: usize) {
        let Some((start, size)) = memory::range_of(address as u64) else {
            return gate::pass(|| real!(cuMemGetAddressRange_v2, base, bytes, address));
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
        // SAFETY: not null; the program promised that it may be read.
        let wanted = (!properties.is_null()).then(|| unsafe { properties.read() });
        let wanted = wanted.filter(|_| flags == 0 && !handle.is_null());
        let create = || match wanted.and_then(|properties| memory::create(bytes, properties)) {
            // SAFETY: the program's arguments.
            Some(result) => unsafe { put(handle, result) },
            None => real!(cuMemCreate, handle, bytes, properties, flags),
        };
        memory::patiently(|| gate::pass(create))
    }

    fn cuMemRelease(handle: usize) {
        gate::pass(|| match is_id(handle as u64) {
            true => memory::release(handle as u64),
            false => {
                foreign().release(handle as u64);
                real!(cuMemRelease, handle)
            }
        })
    }

    fn cuMemMap(address: u64, bytes: u64, offset: u64, handle: u64, flags: usize) {
        gate::pass(|| {
            let code = real!(cuMemMap, address, bytes, offset, memory::handle(handle), flags);
            if code == SUCCESS {
                memory::mapped(address, bytes, offset, handle);
                foreign().map(address, handle);
            }
            code
        })
    }

    fn cuMemUnmap(address: u64, bytes: u64) {
        gate::pass(|| {
            let code = real!(cuMemUnmap, address, bytes);
            if code == SUCCESS {
                memory::unmapped(address, bytes);
                foreign().unmap(address, bytes);
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

    fn cuMemGetHandleForAddressRange(to: *mut c_void, address: u64, bytes: usize, kind: usize, flags: usize) {
        gate::pass(|| {
            let code = real!(cuMemGetHandleForAddressRange, to, address, bytes, kind, flags);
            share(code, address, bytes);
            code
        })
    }

    /// The memory has no handle of this kind, and only the driver could give it one.
    fn cuIpcGetMemHandle(handle: *mut IpcHandle, address: u64) {
        let code = gate::pass(|| real!(cuIpcGetMemHandle, handle, address));
        if code != SUCCESS && memory::is_at(address) {
            warn_of_ipc();
        }
        code
    }

    fn cuMulticastCreate(multicast: *mut u64, properties: *const c_void) {
        gate::pass(|| {
            let code = real!(cuMulticastCreate, multicast, properties);
            if code == SUCCESS {
                // SAFETY: the driver has written it.
                bound(code, unsafe { multicast.read() });
            }
            code
        })
    }

    fn cuMulticastBindMem(multicast: u64, at: usize, handle: u64, offset: usize, bytes: usize, flags: usize) {
        gate::pass(|| {
            let handle = memory::shared(handle);
            let code = real!(cuMulticastBindMem, multicast, at, handle, offset, bytes, flags);
            bound(code, multicast);
            code
        })
    }

    fn cuMulticastBindMem_v2(
        multicast: u64,
        device: usize,
        at: usize,
        handle: u64,
        offset: usize,
        bytes: usize,
        flags: usize,
    ) {
        gate::pass(|| {
            let (object, handle) = (multicast as usize, memory::shared(handle) as usize);
            let arguments = [object, device, at, handle, offset, bytes, flags, 0, 0, 0, 0, 0];
            let real = address_of(Symbol::cuMulticastBindMem_v2);
            // SAFETY: the program's arguments for this very function.
            let code = unsafe { call_many(real, arguments) };
            bound(code, multicast);
            code
        })
    }

    fn cuMulticastBindAddr(multicast: u64, at: usize, address: u64, bytes: usize, flags: usize) {
        gate::pass(|| {
            let code = real!(cuMulticastBindAddr, multicast, at, address, bytes, flags);
            bound(code, multicast);
            share(code, address, bytes);
            code
        })
    }

    fn cuMulticastBindAddr_v2(multicast: u64, device: usize, at: usize, address: u64, bytes: usize, flags: usize) {
        gate::pass(|| {
            let code = real!(cuMulticastBindAddr_v2, multicast, device, at, address, bytes, flags);
            bound(code, multicast);
            share(code, address, bytes);
            code
        })
    }

    fn cuStreamDestroy_v2(stream: usize) {
        gate::capture_ended(stream, contexts::of_stream(stream));
        real!(cuStreamDestroy_v2, stream)
    }

    fn cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) {
        let code = real!(cuDevicePrimaryCtxRetain, context, device);
        if code == SUCCESS {
            // SAFETY: the driver has written it.
            contexts::add(unsafe { context.read() }, Some(device));
        }
        code
    }

    fn cuGreenCtxCreate(green: usize, resources: usize, device: i32, flags: usize) {
        let code = real!(cuGreenCtxCreate, green, resources, device, flags);
        if code == SUCCESS {
            // It keeps the primary context, and whoever waits for that waits for it, too.
            let mut primary = 0usize;
            if real!(cuDevicePrimaryCtxRetain, &raw mut primary, device) == SUCCESS {
                contexts::add(primary, Some(device));
                let _ = real!(cuDevicePrimaryCtxRelease_v2, device);
            }
        }
        code
    }

    fn cuGreenCtxDestroy(green: usize) {
        gate::pass(|| {
            let code = real!(cuGreenCtxDestroy, green);
            if code == SUCCESS {
                contexts::all_ended().into_iter().for_each(ended);
            }
            code
        })
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

/// Notes a multicast object: one of another process is known as such only when memory is bound to it.
fn bound(code: c_int, multicast: u64) {
    if code == SUCCESS {
        foreign().note_multicast(multicast);
    }
}

fn share(code: c_int, address: u64, bytes: usize) {
    if code == SUCCESS {
        memory::share(address, bytes as u64);
    }
}

/// Says once why CUDA IPC fails, and what to do.
fn warn_of_ipc() {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, SeqCst) {
        let text = "cryopod: cuIpcGetMemHandle fails for GPU memory of 2 MiB and more in a container with the annotation dev.cryopod.preload=on; create it without, or share memory by cuMemExportToShareableHandle\n";
        // SAFETY: a live text. Where it cannot be written, nobody reads.
        let _ = unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
    }
}

/// Functions that free memory once a stream's work is done.
macro_rules! free_async {
    ($($name:ident $is_capturing:literal $synchronize:literal)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(address: usize, stream: usize) -> c_int {
            gate::pass(|| {
                let is_captured = || {
                    let mut capturing = 0i32;
                    let to = &raw mut capturing as usize;
                    contexts::other_call($is_capturing, [stream, to]) != SUCCESS || capturing != 0
                };
                // A free that waits for nothing would keep memory from allocations that are not this library's.
                let wait = || contexts::other_call($synchronize, [stream]);
                let freed = memory::free_after(address as u64, stream, is_captured, wait);
                freed.unwrap_or_else(|| real!($name, address, stream))
            })
        }
    )*};
}
free_async!(
    cuMemFreeAsync c"cuStreamIsCapturing" c"cuStreamSynchronize"
    cuMemFreeAsync_ptsz c"cuStreamIsCapturing_ptsz" c"cuStreamSynchronize_ptsz"
);

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
create_context!(cuCtxCreate cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4);

macro_rules! destroy_context {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(context: usize) -> c_int {
            gate::pass(|| {
                let code = real!($name, context);
                if code == SUCCESS {
                    contexts::remove(context);
                    ended(context);
                }
                code
            })
        }
    )*};
}
destroy_context!(cuCtxDestroy cuCtxDestroy_v2);

/// Functions that may end a device's primary context.
macro_rules! end_context {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(device: usize) -> c_int {
            gate::pass(|| {
                let code = real!($name, device);
                if let (SUCCESS, Some(context)) = (code, contexts::ended(device as i32)) {
                    ended(context);
                }
                code
            })
        }
    )*};
}
end_context!(
    cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
    cuDevicePrimaryCtxReset cuDevicePrimaryCtxReset_v2
);

/// Forgets what ends with a context.
fn ended(context: usize) {
    gate::context_ended(context);
    memory::free_all_of(context);
}

/// Functions that begin a capture of a stream.
macro_rules! begin_capture {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(stream: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_int {
            gate::pass(|| {
                let context = contexts::of_stream(stream);
                gate::capture(stream, context, || real!($name, stream, b, c, d, e, f))
            })
        }
    )*};
}
begin_capture!(
    cuStreamBeginCapture_v2 cuStreamBeginCapture_v2_ptsz
    cuStreamBeginCaptureToGraph cuStreamBeginCaptureToGraph_ptsz
);

/// Functions that end one. A capture that has failed is over, too, but for one that another thread must end.
macro_rules! end_capture {
    ($($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(stream: usize, graph: usize) -> c_int {
            gate::pass(|| {
                let code = real!($name, stream, graph);
                if code != WRONG_THREAD {
                    gate::capture_ended(stream, contexts::of_stream(stream));
                }
                code
            })
        }
    )*};
}
end_capture!(cuStreamEndCapture cuStreamEndCapture_ptsz);
