//! What a communicator holds besides itself: memory that is registered with it, and reductions of its own.

use super::with_handle;
use crate::nccl::library::{Function, call, is_within};
use crate::nccl::state::{ask, enter, state};
use crate::nccl::{INVALID_ARGUMENT, SUCCESS};
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Where the program's handles of registered memory begin: no address of its own.
const REGISTERED: usize = 0x7a00_0000_0000_0000;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(
    comm: usize,
    buffer: *const c_void,
    bytes: usize,
    to: *mut usize,
) -> c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(REGISTERED);
    let arguments = [comm, buffer as usize, bytes, to as usize];
    // SAFETY: the program's arguments.
    let code = unsafe { with_handle(Function::ncclCommRegister, arguments, 0, false) };
    if code != SUCCESS || is_within() || to.is_null() {
        return code;
    }
    // SAFETY: NCCL has written it.
    let real = unsafe { to.read() };
    // Null: NCCL does not register it, and takes that back.
    if let (true, Some(comm)) = (real != 0, state().comms.get_mut(&comm)) {
        let handle = NEXT.fetch_add(1, SeqCst);
        comm.registered
            .insert(handle, [real, buffer as usize, bytes]);
        // SAFETY: the program's.
        unsafe { to.write(handle) };
    }
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDeregister(comm: usize, handle: usize) -> c_int {
    if is_within() {
        // SAFETY: the program's arguments.
        return unsafe { call(Function::ncclCommDeregister, &[comm, handle]) };
    }
    let _section = enter("ncclCommDeregister");
    let (real, registered) = {
        let mut state = state();
        let own = state.comms.get_mut(&comm);
        let registered = own.and_then(|comm| comm.registered.remove(&handle));
        (state.real(comm), registered)
    };
    match (real, registered) {
        // SAFETY: NCCL's handles of the program's.
        (Ok(real), Some([of_nccl, ..])) => unsafe {
            call(Function::ncclCommDeregister, &[real, of_nccl])
        },
        // SAFETY: the program's arguments.
        (Ok(real), None) => unsafe { call(Function::ncclCommDeregister, &[real, handle]) },
        (Err(error), _) => error,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    operation: *mut c_int,
    scalar: usize,
    kind: usize,
    residence: usize,
    comm: usize,
) -> c_int {
    let arguments = [operation as usize, scalar, kind, residence, comm];
    let function = Function::ncclRedOpCreatePreMulSum;
    // SAFETY: the program's arguments.
    let code = unsafe { with_handle(function, arguments, 4, false) };
    if let (SUCCESS, false, Some(comm)) = (code, is_within(), state().comms.get_mut(&comm)) {
        comm.reductions += 1;
    }
    code
}

/// Does not wait: until it is done the gate is not shut.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpDestroy(operation: c_int, comm: usize) -> c_int {
    if is_within() {
        // SAFETY: the program's arguments.
        return unsafe { call(Function::ncclRedOpDestroy, &[operation as usize, comm]) };
    }
    let Some(_asking) = ask() else {
        return INVALID_ARGUMENT;
    };
    let real = state().real(comm);
    let code = match real {
        // SAFETY: the program's arguments, but for the handle.
        Ok(real) => unsafe { call(Function::ncclRedOpDestroy, &[operation as usize, real]) },
        Err(error) => error,
    };
    if let Some(comm) = state().comms.get_mut(&comm) {
        comm.reductions = comm.reductions.saturating_sub(1);
    }
    code
}
