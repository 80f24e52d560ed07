//! NCCL's own functions.

use super::{SYSTEM_ERROR, UniqueId};
use crate::driver::{Many, real_dlsym};
use std::cell::Cell;
use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

/// Calls a macro with the functions that this library stands in front of: those that enqueue work, with the number of
/// arguments and the place of the communicator among them; those whose effect cannot be undone and done again; those
/// that only ask; and those that it does more about.
macro_rules! all_functions {
    ($then:ident) => {
        $then! {
            collective: {
                ncclReduce 8 6; ncclBcast 6 4; ncclBroadcast 7 5; ncclAllReduce 7 5; ncclReduceScatter 7 5;
                ncclAllGather 6 4; ncclAlltoAll 6 4; ncclGather 7 5; ncclScatter 7 5;
            }
            escape: {
                ncclCommWindowRegister 5 0; ncclCommWindowDeregister 2 0; ncclWinGetUserPtr 3 0;
                ncclPutSignal 11 9; ncclSignal 6 4; ncclWaitSignal 4 2;
                ncclCommGrow 6 0; ncclCommGetUniqueId 2 0; ncclCommRevoke 2 0;
                ncclCommSuspend 2 0; ncclCommResume 1 0; ncclDevCommCreate 3 0; ncclDevCommDestroy 2 0;
            }
            query: {
                ncclCommMemStats 3 0; ncclCommQueryProperties 2 0;
            }
            own: {
                ncclSend ncclRecv ncclGroupStart ncclGroupEnd ncclGroupSimulateEnd
                ncclCommInitRank ncclCommInitRankConfig ncclCommInitRankScalable ncclCommInitAll
                ncclCommSplit ncclCommShrink ncclCommFinalize ncclCommDestroy ncclCommAbort
                ncclCommCount ncclCommCuDevice ncclCommUserRank ncclCommGetAsyncError ncclGetLastError
                ncclCommRegister ncclCommDeregister ncclRedOpCreatePreMulSum ncclRedOpDestroy
                ncclGetUniqueId ncclGetVersion
            }
        }
    };
}
pub(super) use all_functions;

macro_rules! functions {
    (
        collective: { $($collective:ident $a:literal $b:literal;)* }
        escape: { $($escape:ident $c:literal $d:literal;)* }
        query: { $($query:ident $e:literal $f:literal;)* }
        own: { $($own:ident)* }
    ) => {
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[derive(Clone, Copy, PartialEq, Eq)]
        #[repr(usize)]
        pub enum Function { $($collective,)* $($escape,)* $($query,)* $($own,)* Count }

        pub const NAMES: [&str; FUNCTIONS] = [
            $(concat!(stringify!($collective), "\0"),)*
            $(concat!(stringify!($escape), "\0"),)*
            $(concat!(stringify!($query), "\0"),)*
            $(concat!(stringify!($own), "\0"),)*
        ];
    };
}
all_functions!(functions);

impl Function {
    /// Returns its name in `nccl.h`.
    pub fn name(self) -> &'static str {
        NAMES[self as usize].trim_end_matches('\0')
    }
}

pub const FUNCTIONS: usize = Function::Count as usize;

/// NCCL's functions, by [`Function`]; 0 where it has none.
static REALS: OnceLock<[usize; FUNCTIONS]> = OnceLock::new();

fn load(handle: *mut c_void) -> [usize; FUNCTIONS] {
    let dlsym = real_dlsym();
    // SAFETY: a live handle, which is never closed, and C strings.
    NAMES.map(|name| unsafe { dlsym(handle, name.as_ptr().cast()) } as usize)
}

/// Opens a library that is loaded.
fn loaded(path: &CStr) -> Option<*mut c_void> {
    let flags = libc::RTLD_NOLOAD | libc::RTLD_LAZY;
    // SAFETY: a C string; nothing is loaded by this.
    let handle = unsafe { libc::dlopen(path.as_ptr(), flags) };
    (!handle.is_null()).then_some(handle)
}

fn reals() -> Option<&'static [usize; FUNCTIONS]> {
    if let Some(reals) = REALS.get() {
        return Some(reals);
    }
    // Ahead: whoever loads a library holds the linker's lock, and may come here from a constructor.
    let found = load(loaded(c"libnccl.so.2")?);
    Some(REALS.get_or_init(|| found))
}

/// Returns true if NCCL is loaded and has this function, by its [`Function`].
pub fn has(function: usize) -> bool {
    reals().is_some_and(|reals| reals[function] != 0)
}

thread_local! {
    /// This thread is within NCCL, whose calls of its own functions are not the program's.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if this thread is in a call of NCCL's own.
pub fn is_within() -> bool {
    WITHIN.with(Cell::get)
}

/// Does something within NCCL.
pub fn within<T>(work: impl FnOnce() -> T) -> T {
    let before = WITHIN.with(|within| within.replace(true));
    let result = work();
    WITHIN.with(|within| within.set(before));
    result
}

/// Calls NCCL's own function.
///
/// # Safety
/// The arguments must be those of the function, numbers and pointers only.
pub unsafe fn call(function: Function, arguments: &[usize]) -> c_int {
    // SAFETY: the caller vouches for it.
    unsafe { call_for_pointer(function, arguments) }.map_or(SYSTEM_ERROR, |result| result as c_int)
}

/// The same for a function that returns a pointer.
///
/// # Safety
/// As for [`call`].
pub unsafe fn call_for_pointer(function: Function, arguments: &[usize]) -> Option<usize> {
    let real = reals()?[function as usize];
    let mut a = [0; 12];
    for (to, from) in a.iter_mut().zip(arguments) {
        *to = *from;
    }
    let [a, b, c, d, e, f, g, h, i, j, k, l] = a;
    // SAFETY: a function of NCCL's with at most twelve such arguments; further ones are ignored.
    (real != 0).then(|| unsafe {
        let function: Many<usize> = std::mem::transmute(real);
        within(|| function(a, b, c, d, e, f, g, h, i, j, k, l))
    })
}

/// Calls `ncclCommInitRank` or `ncclCommInitRankConfig`, which takes one argument more.
///
/// # Safety
/// The pointers must be as NCCL defines.
pub unsafe fn call_init(
    function: Function,
    comm: *mut usize,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const u64,
) -> c_int {
    type Init = unsafe extern "C" fn(*mut usize, c_int, UniqueId, c_int, *const u64) -> c_int;
    match reals().map_or(0, |reals| reals[function as usize]) {
        0 => SYSTEM_ERROR,
        // SAFETY: NCCL's function; the caller vouches for the pointers.
        real => unsafe {
            let function: Init = std::mem::transmute(real);
            within(|| function(comm, ranks, id, rank, config))
        },
    }
}

/// Takes the library that has this function for NCCL's, if none was found before. NCCL's own function of this index; 0 if
/// there is no library.
pub fn real_of(function: usize, address: *mut c_void) -> usize {
    let reals = REALS.get().or_else(|| {
        // SAFETY: all zeros are a valid Dl_info, which dladdr fills.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: any address; the path lives as long as the library.
        let path = unsafe {
            let found = libc::dladdr(address, &mut info) != 0 && !info.dli_fname.is_null();
            found.then(|| CStr::from_ptr(info.dli_fname))
        }?;
        let found = load(loaded(path)?);
        Some(REALS.get_or_init(|| found))
    });
    reals.map_or(0, |reals| reals[function])
}
