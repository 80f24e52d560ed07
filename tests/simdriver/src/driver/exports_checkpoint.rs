//! The exported checkpoint API: `cuCheckpointProcess*`.

use std::ffi::{c_int, c_uint};

use super::caller::{call, restore_thread};
use super::exports::{code, put};
use super::mailbox::MAX_PAIRS;
use crate::abi::*;
use crate::uuid::GpuUuid;
use crate::wire::Step;

/// The caller's arguments, all zero where it gave none.
fn args<T: Copy>(p: *const T) -> T {
    // SAFETY: all zero is a value of each of these structures; a pointer that is not null may be read, as the caller
    // promised.
    unsafe {
        match p.is_null() {
            true => std::mem::zeroed(),
            false => p.read(),
        }
    }
}

/// Asks the process for a step, unless the caller set something that is reserved.
fn ask(plain: bool, pid: c_int, step: Step, timeout_ms: u32) -> CuResult {
    match plain {
        true => code(call(pid, step, timeout_ms, &[]).map(|_| ())),
        false => CUDA_ERROR_INVALID_VALUE,
    }
}

exports! {
    fn cuCheckpointProcessGetRestoreThreadId(pid: c_int, tid: *mut c_int) = put(tid, restore_thread(pid));
    fn cuCheckpointProcessGetState(pid: c_int, state: *mut c_uint) = match state.is_null() {
        true => CUDA_ERROR_INVALID_VALUE,
        false => {
            let told = call(pid, Step::GetState, 0, &[]);
            put(state, told.map(|s| c_uint::try_from(s).unwrap_or(STATE_FAILED)))
        }
    };
    fn cuCheckpointProcessLock(pid: c_int, a: *const CuCheckpointLockArgs) = {
        let a = args(a);
        ask(a.reserved0 == 0 && a.reserved1 == [0; 7], pid, Step::Lock, a.timeout_ms)
    };
    fn cuCheckpointProcessCheckpoint(pid: c_int, a: *const CuCheckpointPlainArgs) =
        ask(args(a).reserved == [0; 8], pid, Step::Checkpoint, 0);
    fn cuCheckpointProcessUnlock(pid: c_int, a: *const CuCheckpointPlainArgs) =
        ask(args(a).reserved == [0; 8], pid, Step::Unlock, 0);
    fn cuCheckpointProcessRestore(pid: c_int, a: *const CuCheckpointRestoreArgs) = restore(pid, &args(a));
}

fn restore(pid: c_int, a: &CuCheckpointRestoreArgs) -> CuResult {
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
