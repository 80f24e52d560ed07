//! Communicators that are made from another one: their handles and sizes are known later than the call.

use super::works;
use crate::contexts;
use crate::nccl::SUCCESS;
use crate::nccl::library::{Function, call, is_within};
use crate::nccl::state::{Child, Comm, Config, enter, hash, state};
use cryopod_preload_wire::nccl::Kind;
use std::ffi::{c_int, c_void};

/// `NCCL_SPLIT_NOCOLOR`
const NO_COLOR: c_int = -1;

/// Learns the size of a communicator that was split from another one, and this process's rank in it.
pub fn learn(handle: usize) {
    let known = state()
        .comms
        .get(&handle)
        .map(|comm| (comm.ranks, comm.real));
    let real = match known {
        Some((0, real)) if real != 0 => real,
        Some(_) => return,
        None => return adopt(),
    };
    let (mut ranks, mut rank) = (0i32, 0i32);
    let (to_ranks, to_rank) = (&raw mut ranks as usize, &raw mut rank as usize);
    // SAFETY: a live communicator, and pointers to live locals.
    let codes = unsafe {
        [
            call(Function::ncclCommCount, &[real, to_ranks]),
            call(Function::ncclCommUserRank, &[real, to_rank]),
        ]
    };
    let numbers = (u32::try_from(ranks), u32::try_from(rank));
    if let (true, (Ok(ranks), Ok(rank))) = (codes == [SUCCESS; 2], numbers)
        && let Some(comm) = state().comms.get_mut(&handle)
    {
        (comm.ranks, comm.rank) = (ranks, rank);
    }
}

/// The same for all; the report then has them.
pub fn learn_all() {
    adopt();
    let handles: Vec<usize> = state().comms.keys().copied().collect();
    handles.into_iter().for_each(learn);
}

/// Reads a word of this process, wherever it is.
fn word_at(address: usize) -> Option<usize> {
    let mut word = 0usize;
    let bytes = size_of::<usize>();
    let local = libc::iovec {
        iov_base: (&raw mut word).cast(),
        iov_len: bytes,
    };
    let remote = libc::iovec {
        iov_base: address as *mut c_void,
        iov_len: bytes,
    };
    // SAFETY: the kernel checks the address that is read; the other one is a live local.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    (usize::try_from(read) == Ok(bytes)).then_some(word)
}

/// Takes in the children whose handles NCCL has written meanwhile. The program does not have them yet: it learns from a
/// call of this library's that they are ready.
pub fn adopt() {
    let mut state = state();
    for child in std::mem::take(&mut state.children) {
        match word_at(child.to) {
            Some(0) => state.children.push(child),
            Some(real) => {
                let handle = state.add(Comm {
                    real,
                    id: child.id,
                    config: child.config,
                    context: child.context,
                    ..Comm::default()
                });
                if handle != real {
                    // SAFETY: the program's place for it, which has just been read.
                    unsafe { (child.to as *mut usize).write(handle) };
                }
            }
            None => {}
        }
    }
}

/// Makes a communicator from another one. `part` is the same in all of its ranks, and tells it from others.
///
/// # Safety
/// The pointers must be the program's for such a function, and `make` NCCL's function.
unsafe fn make_child(
    function: Function,
    parent: usize,
    to: *mut usize,
    part: &[u8],
    config: *const u64,
    collective: bool,
    make: impl FnOnce(usize, *mut usize) -> c_int,
) -> c_int {
    if is_within() {
        return make(parent, to);
    }
    let _section = enter(function.name());
    learn(parent);
    let context = contexts::current();
    // SAFETY: the caller vouches for it.
    let config = unsafe { Config::copy(config) };
    let (real, id, config) = {
        let mut state = state();
        if collective {
            state.count(parent, Kind::Collective);
        }
        let real = match state.real(parent) {
            Ok(real) => real,
            Err(error) => return error,
        };
        match state.comms.get_mut(&parent) {
            Some(comm) => {
                comm.children += 1;
                let numbers = [comm.id, comm.children].map(u64::to_le_bytes);
                let id = hash(&[&numbers[0], &numbers[1], part]);
                (real, id, config.or_else(|| comm.config.clone()))
            }
            None => (real, 0, config),
        }
    };
    if !to.is_null() {
        // Older versions leave it as it is until the communicator is ready.
        // SAFETY: the program's.
        unsafe { to.write(0) };
    }
    let code = make(real, to);
    // An empty part: this rank is in no child.
    if works(code) && !to.is_null() && !part.is_empty() {
        let child = Child {
            to: to as usize,
            parent,
            id,
            config,
            context,
        };
        state().children.push(child);
        adopt();
    }
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    comm: usize,
    color: c_int,
    key: c_int,
    new: *mut usize,
    config: *const u64,
) -> c_int {
    let part = color.to_le_bytes();
    let part = if color == NO_COLOR { &[][..] } else { &part };
    let function = Function::ncclCommSplit;
    let make = |comm, to: *mut usize| {
        let (color, key) = (color as usize, key as usize);
        // SAFETY: the program's arguments.
        unsafe { call(function, &[comm, color, key, to as usize, config as usize]) }
    };
    // SAFETY: as above.
    unsafe { make_child(function, comm, new, part, config, true, make) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommShrink(
    comm: usize,
    excluded: *const c_int,
    count: c_int,
    new: *mut usize,
    config: *const u64,
    flags: c_int,
) -> c_int {
    let function = Function::ncclCommShrink;
    let make = |comm, to: *mut usize| {
        let (excluded, count, flags) = (excluded as usize, count as usize, flags as usize);
        let (to, config) = (to as usize, config as usize);
        // SAFETY: the program's arguments.
        unsafe { call(function, &[comm, excluded, count, to, config, flags]) }
    };
    // The ranks that are left out do not call this.
    // SAFETY: as above.
    unsafe { make_child(function, comm, new, b"shrink", config, false, make) }
}
