//! Communicators that are made from a unique id, or of all GPUs of a process.

use super::works;
use crate::contexts;
use crate::nccl::library::{Function, call, call_init, is_within};
use crate::nccl::state::{Comm, Config, enter, hash, state};
use crate::nccl::{SUCCESS, UniqueId};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Makes a communicator whose size is known.
///
/// # Safety
/// The pointers must be the program's for such a function, and `make` NCCL's function.
unsafe fn make_ranked(
    function: Function,
    to: *mut usize,
    (id, ranks, rank): (u64, c_int, c_int),
    config: *const u64,
    make: impl FnOnce(*mut usize) -> c_int,
) -> c_int {
    if is_within() {
        return make(to);
    }
    let _section = enter(function.name());
    let numbers = (u32::try_from(ranks), u32::try_from(rank));
    let (false, (Ok(ranks), Ok(rank))) = (to.is_null(), numbers) else {
        return make(to);
    };
    // SAFETY: the caller vouches for it.
    let config = unsafe { Config::copy(config) };
    let context = contexts::current();
    let pending = (id, ranks, rank);
    state().begin_comm(pending);
    // NCCL writes the handle before this returns, also if the communicator is not ready by then.
    let code = make(to);
    let mut state = state();
    state.end_comm(pending);
    // SAFETY: not null; the program's.
    let real = unsafe { to.read() };
    if works(code) && real != 0 {
        let handle = state.add(Comm {
            real,
            id,
            ranks,
            rank,
            config,
            context,
            ..Comm::default()
        });
        // SAFETY: as above.
        unsafe { to.write(handle) };
    }
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    comm: *mut usize,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
) -> c_int {
    let function = Function::ncclCommInitRank;
    let null = std::ptr::null();
    let known = (hash(&[&id.0]), ranks, rank);
    // SAFETY: the program's arguments.
    unsafe {
        make_ranked(function, comm, known, null, |to| {
            call_init(function, to, ranks, id, rank, null)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut usize,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const u64,
) -> c_int {
    let function = Function::ncclCommInitRankConfig;
    let known = (hash(&[&id.0]), ranks, rank);
    // SAFETY: the program's arguments.
    unsafe {
        make_ranked(function, comm, known, config, |to| {
            call_init(function, to, ranks, id, rank, config)
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankScalable(
    comm: *mut usize,
    ranks: c_int,
    rank: c_int,
    count: c_int,
    ids: *const UniqueId,
    config: *const u64,
) -> c_int {
    let ids_given = usize::try_from(count).unwrap_or(0);
    let all: &[UniqueId] = match ids.is_null() {
        true => &[],
        // SAFETY: so many, as NCCL defines.
        false => unsafe { std::slice::from_raw_parts(ids, ids_given) },
    };
    let bytes: Vec<&[u8]> = all.iter().map(|id| &id.0[..]).collect();
    let known = (hash(&bytes), ranks, rank);
    let function = Function::ncclCommInitRankScalable;
    let arguments = [ranks, rank, count].map(|number| number as usize);
    // SAFETY: the program's arguments.
    unsafe {
        make_ranked(function, comm, known, config, |to| {
            let [ranks, rank, count] = arguments;
            let (to, ids, config) = (to as usize, ids as usize, config as usize);
            call(function, &[to, ranks, rank, count, ids, config])
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(
    comms: *mut usize,
    count: c_int,
    devices: *const c_int,
) -> c_int {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let arguments = [comms as usize, count as usize, devices as usize];
    let ranks = u32::try_from(count).unwrap_or(0);
    let outermost = !is_within();
    let _section = outermost.then(|| enter("ncclCommInitAll"));
    // SAFETY: the program's arguments.
    let code = unsafe { call(Function::ncclCommInitAll, &arguments) };
    if !outermost || code != SUCCESS || comms.is_null() {
        return code;
    }
    let number = CALLS.fetch_add(1, SeqCst);
    let id = hash(&[
        &std::process::id().to_le_bytes(),
        &number.to_le_bytes(),
        b"all",
    ]);
    // SAFETY: NCCL has written so many.
    let comms = unsafe { std::slice::from_raw_parts_mut(comms, ranks as usize) };
    let mut state = state();
    for (rank, comm) in (0..).zip(comms) {
        let real = *comm;
        *comm = state.add(Comm {
            real,
            id,
            ranks,
            rank,
            ..Comm::default()
        });
    }
    code
}
