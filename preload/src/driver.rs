//! The driver's own functions.

use crate::names::all_symbols;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering::SeqCst};

/// `CUDA_ERROR_NOT_INITIALIZED`.
pub const NOT_INITIALIZED: c_int = 3;

/// Defines functions of the driver's that stand in front of its own.
macro_rules! hooks {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int $body
    )*};
}
pub(crate) use hooks;

/// Calls the driver's own function from the one that stands in front of it.
macro_rules! real {
    ($name:ident $(, $arg:expr)*) => {
        // SAFETY: the program's arguments for this very function, but for a handle that stands for one of ours.
        unsafe { crate::driver::call(crate::driver::Symbol::$name, [$($arg as usize),*]) }
    };
}
pub(crate) use real;

/// A function of up to twelve numbers and pointers, as all that is called is. Those on the stack that it does not take are
/// words of the caller's frame, which it does not look at.
pub type Many<R> = unsafe extern "C" fn(
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
) -> R;
type Six = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> c_int;

macro_rules! symbols {
    (six: $($six:ident)*; many: $($many:ident)*; own: $($own:ident)*;) => {
        /// Every function that this library stands in front of, as an index.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy)]
        #[repr(usize)]
        pub enum Symbol { $($six,)* $($many,)* $($own,)* Count }

        const NAMES: [&CStr; SYMBOLS] = [
            $(c_name(concat!(stringify!($six), "\0")),)*
            $(c_name(concat!(stringify!($many), "\0")),)*
            $(c_name(concat!(stringify!($own), "\0")),)*
        ];
    };
}
all_symbols!(symbols);

pub const SYMBOLS: usize = Symbol::Count as usize;

/// Functions that this library calls and does not stand in front of. They are looked up ahead: a lookup waits for a thread
/// that loads a library, which may itself wait at the gate.
const OTHERS: [&CStr; 15] = [
    c"cuCtxGetCurrent",
    c"cuCtxGetDevice",
    c"cuCtxPopCurrent_v2",
    c"cuCtxPushCurrent_v2",
    c"cuCtxSynchronize",
    c"cuDeviceGetAttribute",
    c"cuDevicePrimaryCtxGetState",
    c"cuMemAddressFree",
    c"cuMemAddressReserve",
    c"cuStreamGetCtx",
    c"cuStreamIsCapturing",
    c"cuStreamIsCapturing_ptsz",
    c"cuStreamSynchronize",
    c"cuStreamSynchronize_ptsz",
    c"cuThreadExchangeStreamCaptureMode",
];

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

/// Returns true if a function enqueues work or touches GPU memory, by its name.
pub fn enqueues(name: &[u8]) -> bool {
    ENQUEUE
        .iter()
        .any(|start| name.starts_with(start.as_bytes()))
}

/// The [`Symbol`] of this name, as a number.
pub fn symbol(name: &[u8]) -> Option<usize> {
    NAMES.iter().position(|known| known.to_bytes() == name)
}

/// Returns true for such a function that this library does not stand in front of.
pub fn is_unknown(name: &[u8]) -> bool {
    enqueues(name) && symbol(name).is_none()
}

const fn c_name(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

/// The driver's library and its functions.
struct Driver {
    /// By [`Symbol`]; 0 where it has none.
    reals: [usize; SYMBOLS],
    /// By [`OTHERS`].
    others: [usize; OTHERS.len()],
}

/// The C library's `dlsym`, for the jump in this library's.
pub static REAL_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Returns the C library's `dlsym`. Aborts if there is none.
pub fn real_dlsym() -> unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void {
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

/// What a lookup returns instead of null, which stands for the C library's own answer: no function is there.
pub const MISSING: *mut c_void = std::ptr::without_provenance_mut(1);

/// What a lookup in all loaded files would find without this library; null, and the C library's error, if nothing.
///
/// # Safety
/// The name must be a C string.
pub unsafe fn find_behind(name: *const c_char) -> *mut c_void {
    // SAFETY: the caller vouches for it; what comes after a library depends on the caller, which is this one.
    unsafe { real_dlsym()(libc::RTLD_NEXT, name) }
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
    let dlsym = real_dlsym();
    // SAFETY: a live handle, which is never closed, and C strings.
    let find = |name: &CStr| unsafe { dlsym(handle, name.as_ptr()) } as usize;
    // Ahead: whoever loads a library holds the linker's lock, and may come here from a constructor.
    let driver = Driver {
        reals: NAMES.map(find),
        others: OTHERS.map(find),
    };
    Some(DRIVER.get_or_init(|| driver))
}

/// The driver's own function; 0 if it has none or is not loaded.
pub fn address(symbol: Symbol) -> usize {
    driver().map_or(0, |driver| driver.reals[symbol as usize])
}

/// All of the driver's own functions, by [`Symbol`]; `None` if it is not loaded.
pub fn reals() -> Option<&'static [usize; SYMBOLS]> {
    driver().map(|driver| &driver.reals)
}

/// A function of the driver's, one of those that this library calls; 0 if there is none.
pub fn other(name: &CStr) -> usize {
    let Some(driver) = driver() else { return 0 };
    match OTHERS.iter().position(|other| *other == name) {
        Some(at) => driver.others[at],
        None => {
            let at = symbol(name.to_bytes());
            debug_assert!(at.is_some(), "{name:?} is in no list");
            at.map_or(0, |at| driver.reals[at])
        }
    }
}

/// Calls the driver's own function.
///
/// # Safety
/// The arguments must be those of the function, numbers and pointers only, and at most six.
pub unsafe fn call<const N: usize>(symbol: Symbol, a: [usize; N]) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { call_at(address(symbol), a) }
}

/// Calls a function of the driver's by its address.
///
/// # Safety
/// As for [`call`].
pub unsafe fn call_at<const N: usize>(real: usize, arguments: [usize; N]) -> c_int {
    const { assert!(N <= 6) };
    if real == 0 {
        return NOT_INITIALIZED;
    }
    let mut all = [0; 6];
    all[..N].copy_from_slice(&arguments);
    let [a, b, c, d, e, f] = all;
    // SAFETY: a function of the driver's with at most six such arguments; further ones are ignored.
    unsafe {
        let function: Six = std::mem::transmute(real);
        function(a, b, c, d, e, f)
    }
}

/// The same with up to twelve arguments.
///
/// # Safety
/// As for [`call`].
pub unsafe fn call_many(real: usize, [a, b, c, d, e, f, g, h, i, j, k, l]: [usize; 12]) -> c_int {
    if real == 0 {
        return NOT_INITIALIZED;
    }
    // SAFETY: a function of the driver's with at most twelve such arguments; further ones are ignored.
    unsafe {
        let function: Many<c_int> = std::mem::transmute(real);
        function(a, b, c, d, e, f, g, h, i, j, k, l)
    }
}
