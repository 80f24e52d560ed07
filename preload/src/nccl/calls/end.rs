//! The end of a communicator.

use super::{with_handle, works};
use crate::nccl::SUCCESS;
use crate::nccl::library::{Function, call, is_within};
use crate::nccl::state::{ask, enter, state};
use std::ffi::c_int;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(comm: usize) -> c_int {
    // SAFETY: the program's argument.
    let code = unsafe { with_handle(Function::ncclCommFinalize, [comm], 0, false) };
    if let (true, false, Some(comm)) = (works(code), is_within(), state().comms.get_mut(&comm)) {
        comm.finalized = true;
    }
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: usize) -> c_int {
    // SAFETY: the program's argument.
    unsafe { end(Function::ncclCommDestroy, comm) }
}

/// # Safety
/// As for [`call`].
unsafe fn end(function: Function, handle: usize) -> c_int {
    if is_within() {
        // SAFETY: the caller vouches for it.
        return unsafe { call(function, &[handle]) };
    }
    let _section = enter(function.name());
    // Before the call: NCCL may give its address to another communicator at once.
    let real = match state().remove(handle) {
        Some(comm) => comm.real,
        None => handle,
    };
    match real == 0 && handle != 0 {
        true => SUCCESS,
        // SAFETY: the caller vouches for it.
        false => unsafe { call(function, &[real]) },
    }
}

/// An abort does not wait for anything: it is what a program does about a communicator that hangs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: usize) -> c_int {
    if is_within() {
        // SAFETY: the program's argument.
        return unsafe { call(Function::ncclCommAbort, &[comm]) };
    }
    match ask() {
        Some(_asking) => {
            let removed = state().remove(comm);
            match removed.map_or(comm, |removed| removed.real) {
                0 if comm != 0 => SUCCESS,
                // SAFETY: the program's communicator.
                real => unsafe { call(Function::ncclCommAbort, &[real]) },
            }
        }
        // It is not there now, or about to go.
        None => {
            // SAFETY: the program's argument.
            unsafe { end(Function::ncclCommAbort, comm) }
        }
    }
}
