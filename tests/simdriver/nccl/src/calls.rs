//! NCCL's functions.

use crate::board;
use crate::comm::{self, Call, Comm};
use crate::driver;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::fs::File;
use std::io::Read;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

const SUCCESS: c_int = 0;
const SYSTEM_ERROR: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const IN_PROGRESS: c_int = 7;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

static COMMS: Mutex<BTreeMap<usize, Arc<Comm>>> = Mutex::new(BTreeMap::new());

fn comms() -> std::sync::MutexGuard<'static, BTreeMap<usize, Arc<Comm>>> {
    COMMS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn comm(handle: usize) -> Option<Arc<Comm>> {
    comms().get(&handle).cloned()
}

fn add(comm: Comm) -> usize {
    let comm = Arc::new(comm);
    let handle = Arc::as_ptr(&comm) as usize;
    comms().insert(handle, comm);
    handle
}

type Group = Option<(u32, Vec<(usize, Call)>)>;

thread_local! {
    static GROUP: RefCell<Group> = const { RefCell::new(None) };
}

fn enqueue(handle: usize, call: Call) -> c_int {
    let Some(comm) = comm(handle) else {
        return INVALID_ARGUMENT;
    };
    let alone = GROUP.with_borrow_mut(|group| match group {
        Some((_, calls)) => {
            calls.push((handle, call));
            false
        }
        None => true,
    });
    if alone {
        comm.enqueue(vec![call]);
    }
    SUCCESS
}

/// Exports functions of `nccl.h`, each of which is one expression. Their callers own what the pointers point to.
macro_rules! exports {
    ($(fn $name:ident($($arg:ident: $ty:ty),*) = $value:expr;)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
            $value
        }
    )*};
}

exports! {
    fn ncclGetVersion(version: *mut c_int) = {
        let told = std::env::var("NCCL_SIM_VERSION").ok();
        put(version, told.and_then(|told| told.parse().ok()).unwrap_or(22809))
    };
    fn ncclGetUniqueId(id: *mut UniqueId) = {
        let mut bytes = [0; 128];
        let mut random = || File::open("/dev/urandom")?.read_exact(&mut bytes);
        match random() {
            Ok(()) => put(id, UniqueId(bytes)),
            Err(_) => SYSTEM_ERROR,
        }
    };
    fn ncclCommInitRank(to: *mut usize, ranks: c_int, id: UniqueId, rank: c_int) = {
        let name: String = id.0[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        made(to, Comm::new(&format!("nccl-{name}"), ranks as usize, rank as usize))
    };
    fn ncclCommInitRankConfig(to: *mut usize, ranks: c_int, id: UniqueId, rank: c_int, _config: *const c_void) =
        // SAFETY: as of the caller.
        unsafe { ncclCommInitRank(to, ranks, id, rank) };
    fn ncclCommDestroy(handle: usize) = {
        dawdle(handle);
        let removed = comms().remove(&handle);
        removed.map_or(INVALID_ARGUMENT, |_| SUCCESS)
    };
    fn ncclCommAbort(handle: usize) = {
        if let Some(comm) = comm(handle) {
            comm.abort();
        }
        // SAFETY: as of the caller.
        unsafe { ncclCommDestroy(handle) }
    };
    fn ncclCommFinalize(handle: usize) = known(handle);
    fn ncclCommCount(handle: usize, to: *mut c_int) = number(handle, to, |comm| comm.shared().ranks);
    fn ncclCommUserRank(handle: usize, to: *mut c_int) = number(handle, to, |comm| comm.shared().rank);
    fn ncclCommCuDevice(handle: usize, to: *mut c_int) = number(handle, to, |comm| comm.device as usize);
    fn ncclCommGetAsyncError(handle: usize, to: *mut c_int) = {
        dawdle(handle);
        number(handle, to, |comm| comm.shared().error.load(SeqCst) as usize)
    };
    fn ncclAllReduce(from: u64, to: u64, _n: usize, _kind: c_int, _operation: c_int, comm: usize, _stream: usize) =
        enqueue(comm, Call::AllReduce { from, to });
    fn ncclSend(from: u64, _n: usize, _kind: c_int, peer: c_int, comm: usize, _stream: usize) =
        enqueue(comm, Call::Send { from, peer: peer as usize });
    fn ncclRecv(to: u64, _n: usize, _kind: c_int, peer: c_int, comm: usize, _stream: usize) =
        enqueue(comm, Call::Receive { to, peer: peer as usize });
    fn ncclCommRegister(handle: usize, _buffer: usize, _bytes: usize, to: *mut usize) = {
        static NEXT: AtomicUsize = AtomicUsize::new(0x1000);
        match known(handle) {
            SUCCESS => put(to, NEXT.fetch_add(16, SeqCst)),
            error => error,
        }
    };
    fn ncclCommDeregister(handle: usize, registered: usize) = match (0x1000..0x10_0000).contains(&registered) {
        true => known(handle),
        false => INVALID_ARGUMENT,
    };
    fn ncclCommWindowRegister(handle: usize, _buffer: usize, _bytes: usize, to: *mut usize, _flags: c_int) = {
        put(to, handle);
        known(handle)
    };
    fn ncclCommNovelty(handle: usize) = known(handle);
}

/// Writes a result to the caller's place.
fn put<T>(to: *mut T, value: T) -> c_int {
    // SAFETY: the caller's.
    unsafe { to.write(value) };
    SUCCESS
}

/// Takes its time where it is told to: the last rank longest.
fn dawdle(handle: usize) {
    if let Some(comm) = comm(handle).filter(|_| board::directory().join("nccl-slow").exists()) {
        thread::sleep(Duration::from_millis(
            100 + 300 * comm.shared().rank.min(9) as u64,
        ));
    }
}

fn known(handle: usize) -> c_int {
    comm(handle).map_or(INVALID_ARGUMENT, |_| SUCCESS)
}

fn number(handle: usize, to: *mut c_int, number: fn(&Comm) -> usize) -> c_int {
    comm(handle).map_or(INVALID_ARGUMENT, |comm| put(to, number(&comm) as c_int))
}

fn made(to: *mut usize, comm: Result<Comm, c_int>) -> c_int {
    comm.map_or_else(|code| code, |comm| put(to, add(comm)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    parent: usize,
    color: c_int,
    key: c_int,
    to: *mut usize,
    _config: *const c_void,
) -> c_int {
    let Some(parent) = comm(parent) else {
        return INVALID_ARGUMENT;
    };
    let to = to as usize;
    // SAFETY: the caller's.
    unsafe { (to as *mut usize).write(0) };
    if std::env::var_os("NCCL_SIM_ASYNC").is_none() {
        return split(&parent, color, key, to);
    }
    // As of a communicator that does not block: the handle is written when the new one is ready.
    parent.shared().error.store(IN_PROGRESS, SeqCst);
    let context = driver::context();
    std::thread::spawn(move || {
        driver::use_context(context);
        let code = split(&parent, color, key, to);
        parent.shared().error.store(code, SeqCst);
    });
    IN_PROGRESS
}

fn split(parent: &Comm, color: c_int, key: c_int, to: usize) -> c_int {
    let shared = parent.shared();
    let number = parent.splits.fetch_add(1, SeqCst);
    let own = (color as u32 as u64) << 32 | u64::from(key as u32);
    let Some(values) = shared.exchange(own) else {
        return comm::REMOTE_ERROR;
    };
    if color < 0 {
        return SUCCESS;
    }
    let ranks = (0..).zip(&values).filter(|(_, v)| *v >> 32 == own >> 32);
    let mut ranks: Vec<(u64, usize)> = ranks.map(|(rank, value)| (*value, rank)).collect();
    ranks.sort_unstable();
    let rank = ranks.iter().position(|(_, rank)| *rank == shared.rank);
    let name = format!("{}.{number}.{color}", shared.name);
    made(
        to as *mut usize,
        Comm::new(&name, ranks.len(), rank.unwrap_or(0)),
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|group| match group {
        Some((depth, _)) => *depth += 1,
        None => *group = Some((1, Vec::new())),
    });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> c_int {
    let calls = GROUP.with_borrow_mut(|group| match group {
        Some((1, _)) => group.take().map(|(_, calls)| calls),
        Some((depth, _)) => {
            *depth -= 1;
            None
        }
        None => None,
    });
    let mut by_comm: BTreeMap<usize, Vec<Call>> = BTreeMap::new();
    for (comm, call) in calls.unwrap_or_default() {
        by_comm.entry(comm).or_default().push(call);
    }
    for (handle, calls) in by_comm {
        match comm(handle) {
            Some(comm) => comm.enqueue(calls),
            None => return INVALID_ARGUMENT,
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(_code: c_int) -> *const c_char {
    c"an error of the simulated NCCL".as_ptr()
}
