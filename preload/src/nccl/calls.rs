//! The functions that stand in front of NCCL's.

mod children;
mod create;
mod end;
mod queries;
mod registered;

pub use children::*;
pub use create::*;
pub use end::*;
pub use queries::*;
pub use registered::*;

use super::library::{Function, all_functions, call, is_within};
use super::state::{self, enter, state};
use super::{IN_PROGRESS, SUCCESS, UniqueId};
use crate::{contexts, gate};
use cryopod_preload_wire::nccl::Kind;
use std::ffi::c_int;

fn works(code: c_int) -> bool {
    matches!(code, SUCCESS | IN_PROGRESS)
}

/// A call on a stream of which a graph is being captured runs whenever the graph does, which nobody counts.
fn note_capture(handle: usize, stream: usize) {
    if !gate::is_capturing() {
        return;
    }
    let mut status = 0i32;
    let arguments = [stream, &raw mut status as usize, 0];
    // The default stream of a thread cannot be captured.
    if contexts::other_call(c"cuStreamIsCapturing", arguments) == 0 && status != 0 {
        state().hinder(Some(handle), "a CUDA graph has captured NCCL's kernels");
    }
}

/// Makes a call that enqueues work: counts it, and puts NCCL's handle in place of the program's.
///
/// # Safety
/// As for [`call`].
unsafe fn enqueue<const N: usize>(
    function: Function,
    mut arguments: [usize; N],
    at: usize,
    kind: Kind,
) -> c_int {
    if is_within() {
        // SAFETY: the caller vouches for it.
        return unsafe { call(function, &arguments) };
    }
    let _section = enter(function.name());
    let handle = arguments[at];
    learn(handle);
    note_capture(handle, arguments[at + 1]);
    let real = {
        let mut state = state();
        state.count(handle, kind);
        state.real(handle)
    };
    match real {
        // SAFETY: the caller vouches for the others.
        Ok(real) => unsafe {
            arguments[at] = real;
            call(function, &arguments)
        },
        Err(error) => error,
    }
}

/// Makes a call that needs NCCL's handle. One that `escapes` does something that cannot be done again.
///
/// # Safety
/// As for [`call`].
unsafe fn with_handle<const N: usize>(
    function: Function,
    mut arguments: [usize; N],
    at: usize,
    escapes: bool,
) -> c_int {
    if is_within() {
        // SAFETY: the caller vouches for it.
        return unsafe { call(function, &arguments) };
    }
    let _section = enter(function.name());
    let handle = arguments[at];
    let real = {
        let mut state = state();
        if escapes && state.comms.contains_key(&handle) {
            state.hinder(Some(handle), format!("it has called {}", function.name()));
        }
        state.real(handle)
    };
    match real {
        // SAFETY: the caller vouches for the others.
        Ok(real) => unsafe {
            arguments[at] = real;
            call(function, &arguments)
        },
        Err(error) => error,
    }
}

macro_rules! define {
    (
        collective: { $($collective:ident $count:tt $at:tt;)* }
        escape: { $($escape:ident $count2:tt $at2:tt;)* }
        query: { $($query:ident $count3:tt $at3:tt;)* }
        own: { $($own:ident)* }
    ) => {
        $(one! { $count $collective args => enqueue(Function::$collective, args, $at, Kind::Collective) })*
        $(one! { $count2 $escape args => with_handle(Function::$escape, args, $at2, true) })*
        $(one! { $count3 $query args => with_handle(Function::$query, args, $at3, false) })*
    };
}

/// Defines a function of so many numbers and pointers.
macro_rules! one {
    (1 $($rest:tt)*) => { one! { @ [a] $($rest)* } };
    (2 $($rest:tt)*) => { one! { @ [a b] $($rest)* } };
    (3 $($rest:tt)*) => { one! { @ [a b c] $($rest)* } };
    (4 $($rest:tt)*) => { one! { @ [a b c d] $($rest)* } };
    (5 $($rest:tt)*) => { one! { @ [a b c d e] $($rest)* } };
    (6 $($rest:tt)*) => { one! { @ [a b c d e f] $($rest)* } };
    (7 $($rest:tt)*) => { one! { @ [a b c d e f g] $($rest)* } };
    (8 $($rest:tt)*) => { one! { @ [a b c d e f g h] $($rest)* } };
    (11 $($rest:tt)*) => { one! { @ [a b c d e f g h i j k] $($rest)* } };
    (@ [$($argument:ident)*] $name:ident $args:ident => $does:expr) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: usize),*) -> c_int {
            let $args = [$($argument),*];
            // SAFETY: the arguments are the program's for this very function.
            unsafe { $does }
        }
    };
}
all_functions!(define);

macro_rules! with_peer {
    ($name:ident => $kind:path) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            buffer: usize,
            count: usize,
            kind: usize,
            peer: c_int,
            comm: usize,
            stream: usize,
        ) -> c_int {
            let arguments = [buffer, count, kind, peer as usize, comm, stream];
            // SAFETY: the program's arguments.
            unsafe { enqueue(Function::$name, arguments, 4, $kind(peer.unsigned_abs())) }
        }
    };
}
with_peer!(ncclSend => Kind::SendTo);
with_peer!(ncclRecv => Kind::ReceiveFrom);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> c_int {
    if !is_within() {
        state::begin_group();
    }
    // SAFETY: takes nothing.
    let code = unsafe { call(Function::ncclGroupStart, &[]) };
    if code != SUCCESS && !is_within() {
        state::end_group();
    }
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> c_int {
    // SAFETY: takes nothing.
    let code = unsafe { call(Function::ncclGroupEnd, &[]) };
    if !is_within() {
        adopt();
        state::end_group();
    }
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupSimulateEnd(info: usize) -> c_int {
    // SAFETY: the program's argument.
    let code = unsafe { call(Function::ncclGroupSimulateEnd, &[info]) };
    if !is_within() {
        state::end_group();
    }
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    // SAFETY: the program's argument.
    unsafe { call(Function::ncclGetVersion, &[version as usize]) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    // SAFETY: the program's argument.
    unsafe { call(Function::ncclGetUniqueId, &[id as usize]) }
}
