//! Puts the library's functions in front of the driver's.
//!
//! A program gets a driver function in three ways, and all lead here: the dynamic linker binds `cuMemAlloc_v2` to the one
//! that this library exports, as it is preloaded; `dlsym` is this library's; and so is `cuGetProcAddress`. Both look the
//! address that they would return up in a table of the driver's functions, and return what stands in front of it.
//!
//! A function that is not in the table, but whose name says that it enqueues work, gets one of [`SPARE`] functions that
//! pass the gate. So a newer driver's functions are held, too.

use crate::gate;
use crate::hooks;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock, PoisonError};

/// `CUDA_ERROR_NOT_INITIALIZED`.
const NOT_INITIALIZED: c_int = 3;
/// Functions for what the table does not have.
const SPARE: usize = 64;

/// How names of functions begin that enqueue work or touch GPU memory.
const ENQUEUE: [&str; 12] = [
    "cuLaunch",
    "cuGraphLaunch",
    "cuMemcpy",
    "cuMemset",
    "cuMemPrefetch",
    "cuMemDiscard",
    "cuMemBatch",
    "cuMemAllocAsync",
    "cuMemAllocFromPool",
    "cuMemFreeAsync",
    "cuStreamBatchMemOp",
    "cuStreamW",
];

/// A function of up to twelve numbers and pointers, as all of these are. Those on the stack that it does not take are
/// words of the caller's frame, which it does not look at.
type Many = unsafe extern "C" fn(
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
    usize,
) -> c_int;
type Six = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> c_int;

/// Defines the functions that pass the gate and do nothing else, and lists all that this library exports.
macro_rules! table {
    (six: $($six:ident)*; many: $($many:ident)*; own: $($own:ident)*;) => {
        /// Every function that this library exports of the driver's, as an index into the tables.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy)]
        #[repr(usize)]
        pub enum Symbol { $($six,)* $($many,)* $($own,)* Count }

        const NAMES: [&CStr; Symbol::Count as usize] = [
            $(c_name(concat!(stringify!($six), "\0")),)*
            $(c_name(concat!(stringify!($many), "\0")),)*
            $(c_name(concat!(stringify!($own), "\0")),)*
        ];

        fn in_front(symbol: usize) -> *mut c_void {
            let all: [*mut c_void; Symbol::Count as usize] = [
                $(gated::$six as *mut c_void,)*
                $(gated::$many as *mut c_void,)*
                $(hooks::$own as *mut c_void,)*
            ];
            all.get(symbol).copied().unwrap_or(std::ptr::null_mut())
        }

        mod gated {
            use super::*;
            $(
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $six(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_int {
                    // SAFETY: the arguments are the caller's for this very function.
                    gate::pass(|| unsafe { call(Symbol::$six, [a, b, c, d, e, f]) })
                }
            )*
            $(
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $many(
                    a: usize, b: usize, c: usize, d: usize, e: usize, f: usize,
                    g: usize, h: usize, i: usize, j: usize, k: usize, l: usize,
                ) -> c_int {
                    let real = real(Symbol::$many);
                    // SAFETY: the arguments are the caller's for this very function.
                    gate::pass(|| unsafe { call_many(real, [a, b, c, d, e, f, g, h, i, j, k, l]) })
                }
            )*
        }
    };
}

const fn c_name(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

table! {
    six:
        cuGraphLaunch cuGraphLaunch_ptsz cuGraphUpload cuGraphUpload_ptsz
        cuLaunchKernelEx cuLaunchKernelEx_ptsz cuLaunchHostFunc cuLaunchHostFunc_ptsz cuLaunchCooperativeKernelMultiDevice
        cuLaunch cuLaunchGrid cuLaunchGridAsync
        cuMemcpy cuMemcpy_ptds cuMemcpyAsync cuMemcpyAsync_ptsz
        cuMemcpyPeer cuMemcpyPeer_ptds cuMemcpyPeerAsync cuMemcpyPeerAsync_ptsz
        cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds cuMemcpyHtoDAsync_v2 cuMemcpyHtoDAsync_v2_ptsz
        cuMemcpyDtoH_v2 cuMemcpyDtoH_v2_ptds cuMemcpyDtoHAsync_v2 cuMemcpyDtoHAsync_v2_ptsz
        cuMemcpyDtoD_v2 cuMemcpyDtoD_v2_ptds cuMemcpyDtoDAsync_v2 cuMemcpyDtoDAsync_v2_ptsz
        cuMemcpyDtoA_v2 cuMemcpyDtoA_v2_ptds cuMemcpyAtoD_v2 cuMemcpyAtoD_v2_ptds
        cuMemcpyHtoA_v2 cuMemcpyHtoA_v2_ptds cuMemcpyHtoAAsync_v2 cuMemcpyHtoAAsync_v2_ptsz
        cuMemcpyAtoH_v2 cuMemcpyAtoH_v2_ptds cuMemcpyAtoHAsync_v2 cuMemcpyAtoHAsync_v2_ptsz
        cuMemcpyAtoA_v2 cuMemcpyAtoA_v2_ptds
        cuMemcpy2D_v2 cuMemcpy2D_v2_ptds cuMemcpy2DUnaligned_v2 cuMemcpy2DUnaligned_v2_ptds
        cuMemcpy2DAsync_v2 cuMemcpy2DAsync_v2_ptsz
        cuMemcpy3D_v2 cuMemcpy3D_v2_ptds cuMemcpy3DAsync_v2 cuMemcpy3DAsync_v2_ptsz
        cuMemcpy3DPeer cuMemcpy3DPeer_ptds cuMemcpy3DPeerAsync cuMemcpy3DPeerAsync_ptsz
        cuMemsetD8_v2 cuMemsetD8_v2_ptds cuMemsetD8Async cuMemsetD8Async_ptsz
        cuMemsetD16_v2 cuMemsetD16_v2_ptds cuMemsetD16Async cuMemsetD16Async_ptsz
        cuMemsetD32_v2 cuMemsetD32_v2_ptds cuMemsetD32Async cuMemsetD32Async_ptsz
        cuMemsetD2D8_v2 cuMemsetD2D8_v2_ptds cuMemsetD2D8Async cuMemsetD2D8Async_ptsz
        cuMemsetD2D16_v2 cuMemsetD2D16_v2_ptds cuMemsetD2D16Async cuMemsetD2D16Async_ptsz
        cuMemsetD2D32_v2 cuMemsetD2D32_v2_ptds cuMemsetD2D32Async cuMemsetD2D32Async_ptsz
        cuMemAllocAsync cuMemAllocAsync_ptsz cuMemAllocFromPoolAsync cuMemAllocFromPoolAsync_ptsz
        cuMemFreeAsync cuMemFreeAsync_ptsz
        cuMemPrefetchAsync cuMemPrefetchAsync_ptsz cuMemPrefetchAsync_v2 cuMemPrefetchAsync_v2_ptsz
        cuStreamAddCallback cuStreamAddCallback_ptsz
        cuStreamWaitValue32_v2 cuStreamWaitValue32_v2_ptsz cuStreamWaitValue64_v2 cuStreamWaitValue64_v2_ptsz
        cuStreamWriteValue32_v2 cuStreamWriteValue32_v2_ptsz cuStreamWriteValue64_v2 cuStreamWriteValue64_v2_ptsz
        cuStreamBatchMemOp_v2 cuStreamBatchMemOp_v2_ptsz
        cuSignalExternalSemaphoresAsync cuSignalExternalSemaphoresAsync_ptsz
        cuWaitExternalSemaphoresAsync cuWaitExternalSemaphoresAsync_ptsz;
    many:
        cuLaunchKernel cuLaunchKernel_ptsz cuLaunchCooperativeKernel cuLaunchCooperativeKernel_ptsz
        cuMemcpyBatchAsync cuMemcpyBatchAsync_ptsz cuMemcpy3DBatchAsync cuMemcpy3DBatchAsync_ptsz;
    own:
        cuInit cuGetProcAddress cuGetProcAddress_v2
        cuMemAlloc_v2 cuMemAllocPitch_v2 cuMemFree_v2 cuMemGetAddressRange_v2
        cuMemCreate cuMemRelease cuMemMap cuMemUnmap cuMemSetAccess cuMemRetainAllocationHandle
        cuMemExportToShareableHandle cuMemGetAllocationPropertiesFromHandle cuMulticastBindMem
        cuCtxCreate_v2 cuCtxCreate_v3 cuCtxCreate_v4 cuCtxDestroy_v2
        cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2
        cuCtxEnablePeerAccess
        cuStreamBeginCapture_v2 cuStreamBeginCapture_v2_ptsz cuStreamBeginCaptureToGraph cuStreamBeginCaptureToGraph_ptsz
        cuStreamEndCapture cuStreamEndCapture_ptsz;
}

/// The driver's library and its functions.
struct Driver {
    handle: usize,
    /// By address: what stands in front of it.
    fronts: Vec<(usize, usize)>,
    reals: [usize; Symbol::Count as usize],
}

/// The C library's `dlsym`, for the jump in [`dlsym`].
static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

fn real_dlsym() -> unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void {
    let mut found = REAL_DLSYM.load(SeqCst);
    for version in [c"GLIBC_2.34", c"GLIBC_2.2.5"] {
        if !found.is_null() {
            break;
        }
        // SAFETY: two C strings; the next `dlsym` after this library's is the C library's.
        found = unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
        REAL_DLSYM.store(found, SeqCst);
    }
    if found.is_null() {
        // No glibc has neither.
        std::process::abort();
    }
    // SAFETY: the C library's function of this type.
    unsafe { std::mem::transmute(found) }
}

fn driver() -> Option<&'static Driver> {
    static DRIVER: OnceLock<Driver> = OnceLock::new();
    if let Some(driver) = DRIVER.get() {
        return Some(driver);
    }
    let flags = libc::RTLD_NOLOAD | libc::RTLD_NOW;
    // SAFETY: a C string; the library is not loaded by this.
    let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), flags) };
    if handle.is_null() {
        return None;
    }
    Some(DRIVER.get_or_init(|| {
        let dlsym = real_dlsym();
        // SAFETY: a live handle, which is never closed, and C strings.
        let reals = NAMES.map(|name| unsafe { dlsym(handle, name.as_ptr()) } as usize);
        let known = reals.iter().enumerate().filter(|(_, real)| **real != 0);
        let mut fronts: Vec<(usize, usize)> = known
            .map(|(symbol, real)| (*real, in_front(symbol) as usize))
            .collect();
        fronts.sort_unstable();
        Driver {
            handle: handle as usize,
            fronts,
            reals,
        }
    }))
}

/// The driver's own function; 0 if it has none or is not loaded.
pub fn real(symbol: Symbol) -> usize {
    driver().map_or(0, |driver| driver.reals[symbol as usize])
}

/// A function of the driver's that this library does not stand in front of; 0 if there is none.
pub fn other(name: &CStr) -> usize {
    // SAFETY: a live handle and a C string.
    driver().map_or(0, |driver| unsafe {
        real_dlsym()(driver.handle as *mut c_void, name.as_ptr()) as usize
    })
}

/// Calls the driver's own function.
///
/// # Safety
/// The arguments must be those of the function, numbers and pointers only.
pub unsafe fn call(symbol: Symbol, a: [usize; 6]) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { call_at(real(symbol), a) }
}

/// Calls a function of the driver's by its address.
///
/// # Safety
/// As for [`call`].
pub unsafe fn call_at(real: usize, [a, b, c, d, e, f]: [usize; 6]) -> c_int {
    if real == 0 {
        return NOT_INITIALIZED;
    }
    // SAFETY: a function of the driver's with at most six such arguments; further ones are ignored.
    unsafe {
        let function: Six = std::mem::transmute(real);
        function(a, b, c, d, e, f)
    }
}

/// # Safety
/// As for [`call`].
unsafe fn call_many(real: usize, [a, b, c, d, e, f, g, h, i, j, k, l]: [usize; 12]) -> c_int {
    if real == 0 {
        return NOT_INITIALIZED;
    }
    // SAFETY: a function of the driver's with at most twelve such arguments; further ones are ignored.
    unsafe {
        let function: Many = std::mem::transmute(real);
        function(a, b, c, d, e, f, g, h, i, j, k, l)
    }
}

/// What stands in front of a function that the driver gave for this name.
pub fn front_of(name: &[u8], real: *mut c_void) -> *mut c_void {
    let Some(driver) = driver() else {
        return real;
    };
    let at = driver
        .fronts
        .binary_search_by_key(&(real as usize), |f| f.0);
    match at {
        Ok(at) => driver.fronts[at].1 as *mut c_void,
        Err(_)
            if ENQUEUE
                .iter()
                .any(|start| name.starts_with(start.as_bytes())) =>
        {
            spare(real)
        }
        Err(_) => real,
    }
}

static SPARES: [AtomicUsize; SPARE] = [const { AtomicUsize::new(0) }; SPARE];

/// A function that passes the gate before it calls `real`; `real` itself when all are taken, which [`exhausted`] tells.
fn spare(real: *mut c_void) -> *mut c_void {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    for (spare, function) in SPARES.iter().zip(spares()) {
        let now = spare.load(SeqCst);
        if now == 0 {
            spare.store(real as usize, SeqCst);
        }
        if now == 0 || now == real as usize {
            return function as *mut c_void;
        }
    }
    EXHAUSTED.store(1, SeqCst);
    real
}

static EXHAUSTED: AtomicUsize = AtomicUsize::new(0);

/// Returns true if the program has a function that may enqueue work and does not pass the gate.
pub fn exhausted() -> bool {
    EXHAUSTED.load(SeqCst) != 0
}

unsafe extern "C" fn spare_function<const N: usize>(
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
    g: usize,
    h: usize,
    i: usize,
    j: usize,
    k: usize,
    l: usize,
) -> c_int {
    let real = SPARES[N].load(SeqCst);
    // SAFETY: the arguments are the caller's for this very function.
    gate::pass(|| unsafe { call_many(real, [a, b, c, d, e, f, g, h, i, j, k, l]) })
}

/// The spare functions: eight times eight.
fn spares() -> [Many; SPARE] {
    macro_rules! eight {
        ($($n:literal)*) => {
            [$(
                spare_function::<{ 8 * $n }>, spare_function::<{ 8 * $n + 1 }>, spare_function::<{ 8 * $n + 2 }>,
                spare_function::<{ 8 * $n + 3 }>, spare_function::<{ 8 * $n + 4 }>, spare_function::<{ 8 * $n + 5 }>,
                spare_function::<{ 8 * $n + 6 }>, spare_function::<{ 8 * $n + 7 }>,
            )*]
        };
    }
    eight!(0 1 2 3 4 5 6 7)
}

/// What `dlsym` is to return instead of its own answer; null: its own.
extern "C" fn lookup(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let dlsym = real_dlsym();
    if name.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: the program promised a C string.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    // Most names are none of the driver's. What comes after a library depends on the caller, which the jump keeps.
    if !text.starts_with(b"cu") || handle == libc::RTLD_NEXT {
        return std::ptr::null_mut();
    }
    // SAFETY: the program's own arguments.
    let real = unsafe { dlsym(handle, name) };
    match real.is_null() {
        true => real,
        false => front_of(text, real),
    }
}

/// The program's `dlsym`. The C library's looks at its return address for RTLD_NEXT, so it must be jumped to.
///
/// # Safety
/// As for dlsym(3).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    std::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {lookup}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 2f",
        "ret",
        "2:",
        "mov rax, qword ptr [rip + {real}]",
        "jmp rax",
        lookup = sym lookup,
        real = sym REAL_DLSYM,
    )
}
