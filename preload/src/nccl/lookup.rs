//! What a program gets that looks a function of NCCL's up.

use super::calls;
use super::library::{FUNCTIONS, NAMES, all_functions, real_of};
use super::state::state;
use crate::driver::real_dlsym;
use std::ffi::{c_char, c_void};

/// Functions without a communicator, which need nothing done.
const HARMLESS: [&[u8]; 4] = [
    b"ncclGetErrorString",
    b"ncclMemAlloc",
    b"ncclMemFree",
    b"ncclResetDebugInit",
];

macro_rules! fronts {
    (
        collective: { $($collective:ident $a:literal $b:literal;)* }
        escape: { $($escape:ident $c:literal $d:literal;)* }
        query: { $($query:ident $e:literal $f:literal;)* }
        own: { $($own:ident)* }
    ) => {
        fn in_front(function: usize) -> *mut c_void {
            let all: [*mut c_void; FUNCTIONS] = [
                $(calls::$collective as *mut c_void,)*
                $(calls::$escape as *mut c_void,)*
                $(calls::$query as *mut c_void,)*
                $(calls::$own as *mut c_void,)*
            ];
            all.get(function).copied().unwrap_or(std::ptr::null_mut())
        }
    };
}
all_functions!(fronts);

/// What `dlsym` is to return for a name of NCCL's; null: its own answer.
pub fn looked_up(handle: *mut c_void, name: *const c_char, text: &[u8]) -> *mut c_void {
    // SAFETY: the program's own arguments.
    let real = unsafe { real_dlsym()(handle, name) };
    if real.is_null() {
        return real;
    }
    let is = |own: &&str| own.as_bytes().strip_suffix(b"\0") == Some(text);
    let Some(at) = NAMES.iter().position(|own| is(&own)) else {
        let harmless = HARMLESS.contains(&text) || text.starts_with(b"ncclParam");
        if !harmless {
            let name = String::from_utf8_lossy(text);
            let why = format!("it has NCCL's {name}, which the preload library does not know");
            state().hinder(None, why);
        }
        return real;
    };
    let front = in_front(at);
    if real == front {
        return front;
    }
    if real_of(at, real) == real as usize {
        return front;
    }
    state().hinder(None, "it has more than one NCCL library");
    real
}
