//! Memory of other processes that is mapped in this one, and multicast memory: nothing of it may be left when the driver
//! checkpoints.

use crate::driver::{self, Symbol, hooks, real};
use crate::foreign::Foreign;
use crate::gate;
use crate::process::PerProcess;
use std::ffi::c_int;
use std::sync::MutexGuard;

const SUCCESS: c_int = 0;

static FOREIGN: PerProcess<Foreign> = PerProcess::new(Foreign::new(), Foreign::new());

/// Locks what this process has of others.
pub fn foreign() -> MutexGuard<'static, Foreign> {
    FOREIGN.lock()
}

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle([u8; 64]);

hooks! {
    fn cuMemImportFromShareableHandle(handle: *mut u64, from: usize, kind: usize) {
        gate::pass(|| {
            let code = real!(cuMemImportFromShareableHandle, handle, from, kind);
            if code == SUCCESS {
                // SAFETY: the driver has written it.
                foreign().import(unsafe { handle.read() });
            }
            code
        })
    }

    fn cuIpcOpenMemHandle_v2(address: *mut u64, handle: IpcHandle, flags: u32) {
        type Open = unsafe extern "C" fn(*mut u64, IpcHandle, u32) -> c_int;
        gate::pass(|| {
            let code = match driver::address(Symbol::cuIpcOpenMemHandle_v2) {
                0 => driver::NOT_INITIALIZED,
                // SAFETY: the driver's function of this type, and the program's arguments.
                real => unsafe {
                    let open: Open = std::mem::transmute(real);
                    open(address, handle, flags)
                },
            };
            if code == SUCCESS {
                // SAFETY: the driver has written it.
                foreign().open(unsafe { address.read() });
            }
            code
        })
    }

    fn cuIpcCloseMemHandle(address: u64) {
        gate::pass(|| {
            let code = real!(cuIpcCloseMemHandle, address);
            if code == SUCCESS {
                foreign().unmap(address, 1);
            }
            code
        })
    }
}
