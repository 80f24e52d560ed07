//! What a program asks of a communicator, which has to be answered while it is down, too.

use super::children::adopt;
use super::works;
use crate::nccl::SUCCESS;
use crate::nccl::library::{Function, call, call_for_pointer, is_within};
use crate::nccl::state::{Comm, ask, enter, state};
use std::ffi::{c_char, c_int};

/// What a number of a communicator is: from here, or from NCCL.
///
/// # Safety
/// As for [`call`].
unsafe fn number(
    function: Function,
    handle: usize,
    to: *mut c_int,
    known: impl FnOnce(&Comm) -> Option<c_int>,
) -> c_int {
    if to.is_null() || is_within() {
        // SAFETY: the program's arguments.
        return unsafe { call(function, &[handle, to as usize]) };
    }
    if let Some(number) = state().comms.get(&handle).and_then(known) {
        // SAFETY: not null; the program's.
        unsafe { to.write(number) };
        return SUCCESS;
    }
    let asking = ask();
    // If it is down: until it is up.
    let _section = asking.is_none().then(|| enter("a query"));
    let real = state().real(handle);
    match real {
        // SAFETY: the program's arguments.
        Ok(real) => unsafe { call(function, &[real, to as usize]) },
        Err(error) => error,
    }
}

fn whole(number: u32) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(comm: usize, count: *mut c_int) -> c_int {
    let known = |comm: &Comm| (comm.ranks > 0).then(|| whole(comm.ranks));
    // SAFETY: the program's arguments.
    unsafe { number(Function::ncclCommCount, comm, count, known) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(comm: usize, rank: *mut c_int) -> c_int {
    let known = |comm: &Comm| (comm.ranks > 0).then(|| whole(comm.rank));
    // SAFETY: the program's arguments.
    unsafe { number(Function::ncclCommUserRank, comm, rank, known) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(comm: usize, device: *mut c_int) -> c_int {
    let known = |comm: &Comm| (comm.real == 0).then_some(comm.device);
    // SAFETY: the program's arguments.
    unsafe { number(Function::ncclCommCuDevice, comm, device, known) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: usize, error: *mut c_int) -> c_int {
    if is_within() || error.is_null() {
        // SAFETY: the program's arguments.
        return unsafe { call(Function::ncclCommGetAsyncError, &[comm, error as usize]) };
    }
    let asking = ask();
    let real = state().real(comm);
    let own = match (asking, real) {
        // SAFETY: the program's arguments, but for the handle.
        (Some(_), Ok(real)) => unsafe {
            let code = call(Function::ncclCommGetAsyncError, &[real, error as usize]);
            adopt();
            if code == SUCCESS && !works(error.read()) {
                state().forget_children(comm);
            }
            return code;
        },
        (Some(_), Err(lost)) => lost,
        // While it is down it works, as far as the program can see.
        (None, _) => SUCCESS,
    };
    // SAFETY: not null; the program's.
    unsafe { error.write(own) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(comm: usize) -> *const c_char {
    let asking = ask();
    let real = match state().real(comm) {
        Ok(real) if asking.is_some() => real,
        _ => 0,
    };
    // SAFETY: the program's communicator, or none.
    let text = unsafe { call_for_pointer(Function::ncclGetLastError, &[real]) };
    text.map_or(c"".as_ptr(), |text| text as *const c_char)
}
