//! The functions that stand in front of NCCL's.

use super::library::{Function, all_functions, call, call_for_pointer, call_init, is_within};
use super::state::{self, Child, Comm, Config, ask, enter, hash, state};
use super::{IN_PROGRESS, INVALID_ARGUMENT, SUCCESS, UniqueId};
use crate::{contexts, gate};
use cryopod_preload_wire::nccl::Kind;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};

/// `NCCL_SPLIT_NOCOLOR`
const NO_COLOR: c_int = -1;
/// Where the program's handles of registered memory begin: no address of its own.
const REGISTERED: usize = 0x7a00_0000_0000_0000;

fn works(code: c_int) -> bool {
    matches!(code, SUCCESS | IN_PROGRESS)
}

/// Learns the size of a communicator that was split from another one, and this process's rank in it.
fn learn(handle: usize) {
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
    name: &'static str,
    mut arguments: [usize; N],
    at: usize,
    kind: Kind,
) -> c_int {
    if is_within() {
        // SAFETY: the caller vouches for it.
        return unsafe { call(function, &arguments) };
    }
    let _section = enter(name);
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
    name: &'static str,
    mut arguments: [usize; N],
    at: usize,
    escapes: bool,
) -> c_int {
    if is_within() {
        // SAFETY: the caller vouches for it.
        return unsafe { call(function, &arguments) };
    }
    let _section = enter(name);
    let handle = arguments[at];
    let real = {
        let mut state = state();
        if escapes && state.comms.contains_key(&handle) {
            state.hinder(Some(handle), format!("it has called {name}"));
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
        $(one! { $count $collective args => enqueue(Function::$collective, stringify!($collective), args, $at, Kind::Collective) })*
        $(one! { $count2 $escape args => with_handle(Function::$escape, stringify!($escape), args, $at2, true) })*
        $(one! { $count3 $query args => with_handle(Function::$query, stringify!($query), args, $at3, false) })*
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    buffer: usize,
    count: usize,
    kind: usize,
    peer: c_int,
    comm: usize,
    stream: usize,
) -> c_int {
    let to = Kind::SendTo(peer.unsigned_abs());
    let arguments = [buffer, count, kind, peer as usize, comm, stream];
    // SAFETY: the program's arguments.
    unsafe { enqueue(Function::ncclSend, "ncclSend", arguments, 4, to) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    buffer: usize,
    count: usize,
    kind: usize,
    peer: c_int,
    comm: usize,
    stream: usize,
) -> c_int {
    let from = Kind::ReceiveFrom(peer.unsigned_abs());
    let arguments = [buffer, count, kind, peer as usize, comm, stream];
    // SAFETY: the program's arguments.
    unsafe { enqueue(Function::ncclRecv, "ncclRecv", arguments, 4, from) }
}

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
fn adopt() {
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

/// Makes a communicator whose size is known.
///
/// # Safety
/// The pointers must be the program's for such a function, and `make` NCCL's function.
unsafe fn make_ranked(
    name: &'static str,
    to: *mut usize,
    (id, ranks, rank): (u64, c_int, c_int),
    config: *const u64,
    make: impl FnOnce(*mut usize) -> c_int,
) -> c_int {
    if is_within() {
        return make(to);
    }
    let _section = enter(name);
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
        make_ranked("ncclCommInitRank", comm, known, null, |to| {
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
        make_ranked("ncclCommInitRankConfig", comm, known, config, |to| {
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
    let arguments = [ranks, rank, count].map(|number| number as usize);
    // SAFETY: the program's arguments.
    unsafe {
        make_ranked("ncclCommInitRankScalable", comm, known, config, |to| {
            let [ranks, rank, count] = arguments;
            let all = [
                to as usize,
                ranks,
                rank,
                count,
                ids as usize,
                config as usize,
            ];
            call(Function::ncclCommInitRankScalable, &all)
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

/// Makes a communicator from another one. `part` is the same in all of its ranks, and tells it from others.
///
/// # Safety
/// As for [`make_ranked`].
unsafe fn make_child(
    name: &'static str,
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
    let _section = enter(name);
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
    // SAFETY: the program's arguments.
    unsafe {
        make_child(
            "ncclCommSplit",
            comm,
            new,
            part,
            config,
            true,
            |comm, to| {
                let numbers = [color as usize, key as usize];
                let all = [comm, numbers[0], numbers[1], to as usize, config as usize];
                call(Function::ncclCommSplit, &all)
            },
        )
    }
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
    // The ranks that are left out do not call this.
    // SAFETY: the program's arguments.
    unsafe {
        make_child(
            "ncclCommShrink",
            comm,
            new,
            b"shrink",
            config,
            false,
            |comm, to| {
                let all = [
                    comm,
                    excluded as usize,
                    count as usize,
                    to as usize,
                    config as usize,
                    flags as usize,
                ];
                call(Function::ncclCommShrink, &all)
            },
        )
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(comm: usize) -> c_int {
    // SAFETY: the program's argument.
    let code = unsafe {
        with_handle(
            Function::ncclCommFinalize,
            "ncclCommFinalize",
            [comm],
            0,
            false,
        )
    };
    if let (true, false, Some(comm)) = (works(code), is_within(), state().comms.get_mut(&comm)) {
        comm.finalized = true;
    }
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(comm: usize) -> c_int {
    // SAFETY: the program's argument.
    unsafe { end(Function::ncclCommDestroy, "ncclCommDestroy", comm) }
}

/// # Safety
/// As for [`call`].
unsafe fn end(function: Function, name: &'static str, handle: usize) -> c_int {
    if is_within() {
        // SAFETY: the caller vouches for it.
        return unsafe { call(function, &[handle]) };
    }
    let _section = enter(name);
    // Before the call: NCCL may give its address to another communicator at once.
    let real = match state().remove(handle) {
        Some(comm) => comm.real,
        None => handle,
    };
    match real == 0 && handle != 0 {
        true => SUCCESS,
        // SAFETY: the caller vouches for it.
        false => unsafe { call(function, &[real]) },
    }
}

/// An abort does not wait for anything: it is what a program does about a communicator that hangs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: usize) -> c_int {
    if is_within() {
        // SAFETY: the program's argument.
        return unsafe { call(Function::ncclCommAbort, &[comm]) };
    }
    match ask() {
        Some(_asking) => {
            let removed = state().remove(comm);
            match removed.map_or(comm, |removed| removed.real) {
                0 if comm != 0 => SUCCESS,
                // SAFETY: the program's communicator.
                real => unsafe { call(Function::ncclCommAbort, &[real]) },
            }
        }
        // It is not there now, or about to go.
        None => {
            // SAFETY: the program's argument.
            unsafe { end(Function::ncclCommAbort, "ncclCommAbort", comm) }
        }
    }
}

/// What a number of a communicator is: from here, or from NCCL.
///
/// # Safety
/// As for [`call`].
unsafe fn number(
    function: Function,
    handle: usize,
    to: *mut c_int,
    known: impl FnOnce(&Comm) -> Option<c_int>,
) -> c_int {
    if to.is_null() || is_within() {
        // SAFETY: the program's arguments.
        return unsafe { call(function, &[handle, to as usize]) };
    }
    if let Some(number) = state().comms.get(&handle).and_then(known) {
        // SAFETY: not null; the program's.
        unsafe { to.write(number) };
        return SUCCESS;
    }
    let asking = ask();
    // If it is down: until it is up.
    let _section = asking.is_none().then(|| enter("a query"));
    let real = state().real(handle);
    match real {
        // SAFETY: the program's arguments.
        Ok(real) => unsafe { call(function, &[real, to as usize]) },
        Err(error) => error,
    }
}

fn whole(number: u32) -> c_int {
    c_int::try_from(number).unwrap_or(c_int::MAX)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(comm: usize, count: *mut c_int) -> c_int {
    let known = |comm: &Comm| (comm.ranks > 0).then(|| whole(comm.ranks));
    // SAFETY: the program's arguments.
    unsafe { number(Function::ncclCommCount, comm, count, known) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(comm: usize, rank: *mut c_int) -> c_int {
    let known = |comm: &Comm| (comm.ranks > 0).then(|| whole(comm.rank));
    // SAFETY: the program's arguments.
    unsafe { number(Function::ncclCommUserRank, comm, rank, known) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCuDevice(comm: usize, device: *mut c_int) -> c_int {
    let known = |comm: &Comm| (comm.real == 0).then_some(comm.device);
    // SAFETY: the program's arguments.
    unsafe { number(Function::ncclCommCuDevice, comm, device, known) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: usize, error: *mut c_int) -> c_int {
    if is_within() || error.is_null() {
        // SAFETY: the program's arguments.
        return unsafe { call(Function::ncclCommGetAsyncError, &[comm, error as usize]) };
    }
    let asking = ask();
    let real = state().real(comm);
    let own = match (asking, real) {
        // SAFETY: the program's arguments, but for the handle.
        (Some(_), Ok(real)) => unsafe {
            let code = call(Function::ncclCommGetAsyncError, &[real, error as usize]);
            adopt();
            if code == SUCCESS && !works(error.read()) {
                state().forget_children(comm);
            }
            return code;
        },
        (Some(_), Err(lost)) => lost,
        // While it is down it works, as far as the program can see.
        (None, _) => SUCCESS,
    };
    // SAFETY: not null; the program's.
    unsafe { error.write(own) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(comm: usize) -> *const c_char {
    let asking = ask();
    let real = match state().real(comm) {
        Ok(real) if asking.is_some() => real,
        _ => 0,
    };
    // SAFETY: the program's communicator, or none.
    let text = unsafe { call_for_pointer(Function::ncclGetLastError, &[real]) };
    text.map_or(c"".as_ptr(), |text| text as *const c_char)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommRegister(
    comm: usize,
    buffer: *const c_void,
    bytes: usize,
    to: *mut usize,
) -> c_int {
    static NEXT: AtomicUsize = AtomicUsize::new(REGISTERED);
    let arguments = [comm, buffer as usize, bytes, to as usize];
    // SAFETY: the program's arguments.
    let code = unsafe {
        with_handle(
            Function::ncclCommRegister,
            "ncclCommRegister",
            arguments,
            0,
            false,
        )
    };
    if code != SUCCESS || is_within() || to.is_null() {
        return code;
    }
    // SAFETY: NCCL has written it.
    let real = unsafe { to.read() };
    // Null: NCCL does not register it, and takes that back.
    if let (true, Some(comm)) = (real != 0, state().comms.get_mut(&comm)) {
        let handle = NEXT.fetch_add(1, SeqCst);
        comm.registered
            .insert(handle, [real, buffer as usize, bytes]);
        // SAFETY: the program's.
        unsafe { to.write(handle) };
    }
    code
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDeregister(comm: usize, handle: usize) -> c_int {
    if is_within() {
        // SAFETY: the program's arguments.
        return unsafe { call(Function::ncclCommDeregister, &[comm, handle]) };
    }
    let _section = enter("ncclCommDeregister");
    let (real, registered) = {
        let mut state = state();
        let own = state.comms.get_mut(&comm);
        let registered = own.and_then(|comm| comm.registered.remove(&handle));
        (state.real(comm), registered)
    };
    match (real, registered) {
        // SAFETY: NCCL's handles of the program's.
        (Ok(real), Some([of_nccl, ..])) => unsafe {
            call(Function::ncclCommDeregister, &[real, of_nccl])
        },
        // SAFETY: the program's arguments.
        (Ok(real), None) => unsafe { call(Function::ncclCommDeregister, &[real, handle]) },
        (Err(error), _) => error,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    operation: *mut c_int,
    scalar: usize,
    kind: usize,
    residence: usize,
    comm: usize,
) -> c_int {
    let arguments = [operation as usize, scalar, kind, residence, comm];
    let name = "ncclRedOpCreatePreMulSum";
    // SAFETY: the program's arguments.
    let code = unsafe {
        with_handle(
            Function::ncclRedOpCreatePreMulSum,
            name,
            arguments,
            4,
            false,
        )
    };
    if code == SUCCESS && !is_within() {
        state().reductions += 1;
    }
    code
}

/// Does not wait: until it is done the gate is not shut.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpDestroy(operation: c_int, comm: usize) -> c_int {
    if is_within() {
        // SAFETY: the program's arguments.
        return unsafe { call(Function::ncclRedOpDestroy, &[operation as usize, comm]) };
    }
    let Some(_asking) = ask() else {
        return INVALID_ARGUMENT;
    };
    let real = state().real(comm);
    let code = match real {
        // SAFETY: the program's arguments, but for the handle.
        Ok(real) => unsafe { call(Function::ncclRedOpDestroy, &[operation as usize, real]) },
        Err(error) => error,
    };
    let mut state = state();
    state.reductions = state.reductions.saturating_sub(1);
    code
}
