//! Puts the library's functions in front of the driver's.
//!
//! A program gets a driver function in three ways, and all lead here: the dynamic linker binds `cuMemAlloc_v2` to the one
//! that this library exports, as it is preloaded; `dlsym` is this library's; and so is `cuGetProcAddress`. Both look the
//! address that they would return up in a table of the driver's functions, and return what stands in front of it.
//!
//! A function that is not in the table, but whose name says that it enqueues work, gets one of [`SPARE`] functions that
//! pass the gate. So a newer driver's functions are held, too.

use crate::control;
use crate::driver::{
    MISSING, Many, REAL_DLSYM, SYMBOLS, Symbol, address, call_many, enqueues, find_behind, hooks,
    real, real_dlsym, reals, symbol,
};
use crate::gate;
use crate::hooks;
use crate::names::all_symbols;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock, PoisonError};

const SUCCESS: c_int = 0;
/// Functions for what the table does not have.
const SPARE: usize = 64;

/// Defines the functions that pass the gate and do nothing else, and lists all that this library exports.
macro_rules! table {
    (six: $($six:ident)*; many: $($many:ident)*; own: $($own:ident)*;) => {
        fn in_front(symbol: usize) -> *mut c_void {
            let all: [*mut c_void; SYMBOLS] = [
                $(gated::$six as *mut c_void,)*
                $(gated::$many as *mut c_void,)*
                $(own::$own as *mut c_void,)*
            ];
            all.get(symbol).copied().unwrap_or(std::ptr::null_mut())
        }

        mod gated {
            use super::*;
            $(
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $six(a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_int {
                    gate::pass(|| real!($six, a, b, c, d, e, f))
                }
            )*
            $(
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $many(
                    a: usize, b: usize, c: usize, d: usize, e: usize, f: usize,
                    g: usize, h: usize, i: usize, j: usize, k: usize, l: usize,
                ) -> c_int {
                    let real = address(Symbol::$many);
                    // SAFETY: the arguments are the caller's for this very function.
                    gate::pass(|| unsafe { call_many(real, [a, b, c, d, e, f, g, h, i, j, k, l]) })
                }
            )*
        }
    };
}

all_symbols!(table);

/// The functions that are more than a gate.
mod own {
    pub use super::hooks::*;
    pub use super::{cuGetProcAddress, cuGetProcAddress_v2, cuInit};
    pub use crate::imports::{
        cuIpcCloseMemHandle, cuIpcOpenMemHandle_v2, cuMemImportFromShareableHandle,
    };
}

/// By the address of the driver's function: what stands in front of it. `None` while the driver is not loaded.
fn fronts() -> Option<&'static [(usize, usize)]> {
    static FRONTS: OnceLock<Vec<(usize, usize)>> = OnceLock::new();
    let reals = reals()?;
    let fronts = FRONTS.get_or_init(|| {
        let known = reals.iter().enumerate().filter(|(_, real)| **real != 0);
        let mut fronts: Vec<_> = known
            .map(|(symbol, real)| (*real, in_front(symbol) as usize))
            .collect();
        fronts.sort_unstable();
        fronts
    });
    Some(fronts)
}

hooks! {
    fn cuInit(flags: usize) {
        let code = real!(cuInit, flags);
        if code == SUCCESS {
            control::start();
        }
        code
    }

    fn cuGetProcAddress(name: *const c_char, found: *mut *mut c_void, version: usize, flags: usize) {
        let code = real!(cuGetProcAddress, name, found, version, flags);
        // SAFETY: the program's arguments.
        unsafe { replace_found(code, name, found) };
        code
    }

    fn cuGetProcAddress_v2(
        name: *const c_char,
        found: *mut *mut c_void,
        version: usize,
        flags: usize,
        status: *mut c_int,
    ) {
        let code = real!(cuGetProcAddress_v2, name, found, version, flags, status);
        // SAFETY: the program's arguments.
        unsafe { replace_found(code, name, found) };
        code
    }
}

/// # Safety
/// The pointers must be those that the driver has just been called with.
unsafe fn replace_found(code: c_int, name: *const c_char, found: *mut *mut c_void) {
    if code != SUCCESS || name.is_null() || found.is_null() {
        return;
    }
    // SAFETY: the driver has read the one and written the other.
    unsafe {
        let real = found.read();
        if !real.is_null() {
            found.write(front_of(CStr::from_ptr(name).to_bytes(), real));
        }
    }
}

/// What stands in front of a function that the driver gave for this name.
fn front_of(name: &[u8], real: *mut c_void) -> *mut c_void {
    let Some(fronts) = fronts() else {
        return real;
    };
    // A lookup in all loaded files finds this library's own.
    let is_front = || fronts.iter().any(|front| front.1 == real as usize);
    match fronts.binary_search_by_key(&(real as usize), |front| front.0) {
        Ok(at) => fronts[at].1 as *mut c_void,
        Err(_) if enqueues(name) && !is_front() => spare(real),
        Err(_) => real,
    }
}

static SPARES: [AtomicUsize; SPARE] = [const { AtomicUsize::new(0) }; SPARE];

/// A function that passes the gate before it calls `real`; `real` itself when all are taken.
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
    gate::cannot_hold_all();
    real
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
fn spares() -> [Many<c_int>; SPARE] {
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

/// Whether this stands in front of a function that the driver does not have: a lookup in all loaded files finds it, and a
/// program that asks whether the driver has the function would call it.
fn stands_alone(name: &[u8], found: *mut c_void) -> bool {
    let has_none = |at: &usize| reals().is_none_or(|reals| reals[*at] == 0);
    let mut own = symbol(name).into_iter().filter(has_none);
    own.any(|at| in_front(at) == found)
}

/// What `dlsym` is to return instead of its own answer; null: its own.
extern "C" fn lookup(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let dlsym = real_dlsym();
    if name.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: the program promised a C string.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    // Most names are neither the driver's nor NCCL's. What comes after a library depends on the caller, which the jump
    // keeps.
    if handle == libc::RTLD_NEXT {
        return std::ptr::null_mut();
    }
    if text.starts_with(b"nccl") || text.starts_with(b"pnccl") {
        return crate::nccl::lookup::looked_up(handle, name, text);
    }
    if !text.starts_with(b"cu") {
        return std::ptr::null_mut();
    }
    // SAFETY: the program's own arguments.
    let mut real = unsafe { dlsym(handle, name) };
    if stands_alone(text, real) {
        // SAFETY: as above.
        real = unsafe { find_behind(name) };
        if real.is_null() {
            return MISSING;
        }
    }
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
        "cmp rax, {missing}",
        "jb 2f",
        "jne 3f",
        "xor eax, eax",
        "3:",
        "ret",
        "2:",
        "mov rax, qword ptr [rip + {real}]",
        "jmp rax",
        lookup = sym lookup,
        missing = const 1, // MISSING
        real = sym REAL_DLSYM,
    )
}
