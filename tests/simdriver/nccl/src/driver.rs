//! The driver's functions that NCCL uses here.

use std::ffi::{CStr, c_int};
use std::sync::OnceLock;

/// A handle of the simulation's for memory of another process.
pub type Handle = [u64; 8];

fn symbol(name: &CStr) -> usize {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        // SAFETY: a C string.
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) as usize }
    });
    // SAFETY: a live handle, or null, and a C string.
    unsafe { libc::dlsym(*library as *mut _, name.as_ptr()) as usize }
}

fn call(name: &CStr, [a, b, c]: [usize; 3]) -> c_int {
    match symbol(name) {
        0 => 500,
        // SAFETY: every caller here names a function of at most three numbers and pointers to live locals.
        real => unsafe {
            let function: unsafe extern "C" fn(usize, usize, usize) -> c_int =
                std::mem::transmute(real);
            function(a, b, c)
        },
    }
}

pub fn context() -> usize {
    let mut context = 0usize;
    call(c"cuCtxGetCurrent", [&raw mut context as usize, 0, 0]);
    context
}

pub fn use_context(context: usize) {
    call(c"cuCtxSetCurrent", [context, 0, 0]);
}

pub fn device() -> c_int {
    let mut device = 0;
    call(c"cuCtxGetDevice", [&raw mut device as usize, 0, 0]);
    device
}

pub fn allocate(bytes: usize) -> u64 {
    let mut address = 0u64;
    call(c"cuMemAlloc_v2", [&raw mut address as usize, bytes, 0]);
    address
}

pub fn free(address: u64) {
    call(c"cuMemFree_v2", [address as usize, 0, 0]);
}

pub fn read<const N: usize>(from: u64) -> [u64; N] {
    let mut words = [0; N];
    let to = words.as_mut_ptr() as usize;
    call(c"cuMemcpyDtoH_v2", [to, from as usize, 8 * N]);
    words
}

pub fn write<const N: usize>(to: u64, words: [u64; N]) {
    call(
        c"cuMemcpyHtoD_v2",
        [to as usize, words.as_ptr() as usize, 8 * N],
    );
}

pub fn export(address: u64) -> Handle {
    let mut handle = Handle::default();
    call(
        c"cusim_export",
        [handle.as_mut_ptr() as usize, address as usize, 0],
    );
    handle
}

/// Maps memory of another process, which the driver does not bring back.
pub fn import(handle: Handle) -> u64 {
    type Import = unsafe extern "C" fn(*mut u64, Handle8, u32) -> c_int;
    #[repr(C)]
    struct Handle8(Handle);
    let mut address = 0u64;
    let real = symbol(c"cusim_import");
    if real != 0 {
        // SAFETY: the simulation's function of this type.
        unsafe {
            let function: Import = std::mem::transmute(real);
            function(&mut address, Handle8(handle), 0);
        }
    }
    address
}

pub fn close(address: u64) {
    call(c"cuIpcCloseMemHandle", [address as usize, 0, 0]);
}
