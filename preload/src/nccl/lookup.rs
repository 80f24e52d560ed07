//! What a program gets that looks a function of NCCL's up.

use super::calls;
use super::library::{FUNCTIONS, NAMES, all_functions, has, real_of};
use super::state::state;
use crate::driver::{MISSING, find_behind, real_dlsym};
use crate::linked;
use std::ffi::{c_char, c_void};

/// How names of functions begin that need nothing done: those without a communicator, and those that only go with a
/// window or a device communicator, which are noted.
const HARMLESS: [&[u8]; 13] = [
    b"ncclGetErrorString",
    b"ncclGetLsa",
    b"ncclGetMultimem",
    b"ncclGetPeerDevice",
    b"ncclGetResourceBuffer",
    b"ncclMemAlloc",
    b"ncclMemFree",
    b"ncclResetDebugInit",
    b"ncclParam",
    b"ncclTeam",
    b"ncclGin",
    b"ncclLsa",
    b"ncclLLA2A",
];

fn function(name: &[u8]) -> Option<usize> {
    let is = |own: &&str| own.as_bytes().strip_suffix(b"\0") == Some(name);
    NAMES.iter().position(is)
}

/// Whether a name is NCCL's, and this library knows nothing of it.
fn is_unknown(name: &[u8]) -> bool {
    let own = name.starts_with(b"nccl") || name.starts_with(b"pnccl");
    own && function(name).is_none() && !HARMLESS.iter().any(|start| name.starts_with(start))
}

/// Notes the functions that loaded files are linked with and that this library does not know.
pub fn note_linked() {
    linked::names(is_unknown).iter().for_each(|name| note(name));
}

fn note(name: &str) {
    let why = format!("it has NCCL's {name}, which the preload library does not know");
    state().hinder(None, why);
}

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

/// What `dlsym` is to return for a name of NCCL's; null: its own answer; [`MISSING`]: null.
pub fn looked_up(handle: *mut c_void, name: *const c_char, text: &[u8]) -> *mut c_void {
    // SAFETY: the program's own arguments.
    let mut real = unsafe { real_dlsym()(handle, name) };
    if real.is_null() {
        return real;
    }
    let Some(at) = function(text) else {
        if is_unknown(text) {
            note(&String::from_utf8_lossy(text));
        }
        return real;
    };
    let front = in_front(at);
    if real == front {
        if has(at) {
            return front;
        }
        // A lookup in all loaded files, of what NCCL does not have.
        // SAFETY: as above.
        real = unsafe { find_behind(name) };
        if real.is_null() {
            return MISSING;
        }
    }
    if real_of(at, real) == real as usize {
        return front;
    }
    state().hinder(None, "it has more than one NCCL library");
    real
}
