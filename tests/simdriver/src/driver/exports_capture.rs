//! The exported calls about stream captures: nothing is recorded, but what a capture forbids is an error.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use super::exports::{code, put};
use super::memory;
use super::process::api;
use crate::abi::*;

const GLOBAL: c_uint = 0;
const RELAXED: c_uint = 2;

struct StreamCapture {
    stream: usize,
    mode: c_uint,
    thread: ThreadId,
}

static CAPTURES: Mutex<Vec<StreamCapture>> = Mutex::new(Vec::new());

fn captures() -> MutexGuard<'static, Vec<StreamCapture>> {
    CAPTURES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this thread may allocate and free memory.
pub fn unsafe_call() -> Result<(), CuResult> {
    let forbids = |c: &StreamCapture| {
        c.mode == GLOBAL || (c.mode != RELAXED && c.thread == thread::current().id())
    };
    match captures().iter().any(forbids) {
        true => Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
        false => Ok(()),
    }
}

/// Whether a context can be waited for.
pub fn wait() -> Result<(), CuResult> {
    match captures().is_empty() {
        true => Ok(()),
        false => Err(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED),
    }
}

exports! {
    fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_uint) = code(api(|_| {
        let (stream, thread) = (stream.addr(), thread::current().id());
        captures().push(StreamCapture { stream, mode, thread });
        Ok(())
    }));
    fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) = put(graph, api(|_| {
        let mut captures = captures();
        let at = captures.iter().position(|c| c.stream == stream.addr());
        captures.swap_remove(at.ok_or(CUDA_ERROR_INVALID_VALUE)?);
        Ok(std::ptr::null_mut())
    }));
    fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_int) =
        put(status, api(|_| Ok(captures().iter().any(|c| c.stream == stream.addr()).into())));
    fn cuStreamSynchronize(_stream: *mut c_void) = code(api(|_| Ok(())));
    fn cuMemFreeAsync(ptr: CuDevicePtr, _stream: *mut c_void) = code(api(|i| memory::free(i, ptr)));
    fn cuPointerGetAttribute(data: *mut c_uint, attribute: c_uint, ptr: CuDevicePtr) = match attribute {
        2 => put(data, api(|i| memory::locate(i, ptr, 1).map(|_| 2))), // CU_POINTER_ATTRIBUTE_MEMORY_TYPE: device
        _ => CUDA_ERROR_NOT_SUPPORTED,
    };
}
