//! The exported checkpoint API: `cuCheckpointProcess*`.

use std::ffi::{c_int, c_uint};

use super::caller::{call, restore_thread};
use super::exports::{code, put};
use super::mailbox::MAX_PAIRS;
use crate::abi::*;
use crate::uuid::GpuUuid;
use crate::wire::Step;

/// The caller's arguments, all zero where it gave none.
fn args<T: Copy>(p: *const T, none: T) -> T {
    if p.is_null() {
        none
    } else {
        // SAFETY: not null; the caller promised that it may be read.
        unsafe { p.read() }
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessGetRestoreThreadId(pid: c_int, tid: *mut c_int) -> CuResult {
    put(tid, restore_thread(pid))
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessGetState(pid: c_int, state: *mut c_uint) -> CuResult {
    if state.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    put(
        state,
        call(pid, Step::GetState, 0, &[]).map(|s| c_uint::try_from(s).unwrap_or(STATE_FAILED)),
    )
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessLock(pid: c_int, a: *const CuCheckpointLockArgs) -> CuResult {
    let a = args(
        a,
        CuCheckpointLockArgs {
            timeout_ms: 0,
            reserved0: 0,
            reserved1: [0; 7],
        },
    );
    if a.reserved0 != 0 || a.reserved1 != [0; 7] {
        return CUDA_ERROR_INVALID_VALUE;
    }
    code(call(pid, Step::Lock, a.timeout_ms, &[]).map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessCheckpoint(
    pid: c_int,
    a: *const CuCheckpointCheckpointArgs,
) -> CuResult {
    if args(a, CuCheckpointCheckpointArgs { reserved: [0; 8] }).reserved != [0; 8] {
        return CUDA_ERROR_INVALID_VALUE;
    }
    code(call(pid, Step::Checkpoint, 0, &[]).map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessRestore(
    pid: c_int,
    a: *const CuCheckpointRestoreArgs,
) -> CuResult {
    let none = CuCheckpointRestoreArgs {
        gpu_pairs: std::ptr::null(),
        gpu_pairs_count: 0,
        reserved: [0; 52],
    };
    let a = args(a, none);
    let count = a.gpu_pairs_count as usize;
    if a.reserved != [0; 52] || (a.gpu_pairs.is_null() && count > 0) || count > MAX_PAIRS {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let mut pairs = Vec::with_capacity(count);
    for i in 0..count {
        // SAFETY: not null, and the caller promised `count` pairs.
        let p = unsafe { a.gpu_pairs.add(i).read() };
        pairs.push((GpuUuid(p.old_uuid.bytes), GpuUuid(p.new_uuid.bytes)));
    }
    code(call(pid, Step::Restore, 0, &pairs).map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessUnlock(pid: c_int, a: *const CuCheckpointUnlockArgs) -> CuResult {
    if args(a, CuCheckpointUnlockArgs { reserved: [0; 8] }).reserved != [0; 8] {
        return CUDA_ERROR_INVALID_VALUE;
    }
    code(call(pid, Step::Unlock, 0, &[]).map(|_| ()))
}
