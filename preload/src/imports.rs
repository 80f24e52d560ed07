//! Memory of other processes that is mapped in this one, and multicast memory: nothing of it may be left when the driver
//! checkpoints.

use crate::driver::{self, Symbol, hooks, real};
use crate::gate;
use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

const SUCCESS: c_int = 0;

#[derive(Default)]
struct Imports {
    /// Handles of the driver's that are not released.
    handles: BTreeSet<u64>,
    /// Addresses at which such memory is mapped.
    mapped: BTreeSet<u64>,
}

static IMPORTS: Mutex<Imports> = Mutex::new(Imports {
    handles: BTreeSet::new(),
    mapped: BTreeSet::new(),
});
static MULTICAST: AtomicBool = AtomicBool::new(false);

fn imports() -> MutexGuard<'static, Imports> {
    IMPORTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How much is there.
pub fn count() -> u32 {
    let imports = imports();
    u32::try_from(imports.handles.len() + imports.mapped.len()).unwrap_or(u32::MAX)
}

/// Whether the process has ever used multicast memory.
pub fn multicast() -> bool {
    MULTICAST.load(SeqCst)
}

/// Notes that the process has used multicast memory.
pub fn multicast_used() {
    MULTICAST.store(true, SeqCst);
}

/// Notes a mapping of a handle at an address, if the handle is another process's.
pub fn mapped(address: u64, handle: u64) {
    let mut imports = imports();
    if imports.handles.contains(&handle) {
        imports.mapped.insert(address);
    }
}

/// Forgets the mappings in a range of addresses.
pub fn unmapped(address: u64, bytes: u64) {
    let end = address.saturating_add(bytes);
    imports().mapped.retain(|at| !(address..end).contains(at));
}

/// Forgets a handle.
pub fn released(handle: u64) {
    imports().handles.remove(&handle);
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
                imports().handles.insert(unsafe { handle.read() });
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
                imports().mapped.insert(unsafe { address.read() });
            }
            code
        })
    }

    fn cuIpcCloseMemHandle(address: u64) {
        gate::pass(|| {
            let code = real!(cuIpcCloseMemHandle, address);
            if code == SUCCESS {
                imports().mapped.remove(&address);
            }
            code
        })
    }
}
