//! Takes the communicators down, and makes them again.

use super::library::{self, Function, call, call_init};
use super::lookup;
use super::state::{self, Config, state};
use super::{IN_PROGRESS, SUCCESS, SYSTEM_ERROR, UniqueId};
use crate::imports::foreign;
use crate::{contexts, idle};
use cryopod_preload_wire::Reason;
use cryopod_preload_wire::nccl::{Fresh, Report, UNIQUE_ID};
use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The oldest NCCL that is moved.
const OLDEST: c_int = 21800;
const TICK: Duration = Duration::from_millis(1);
const STACK: usize = 8 << 20;

fn checked(code: c_int) -> Result<(), Reason> {
    match code {
        SUCCESS => Ok(()),
        code => Err(Reason::Nccl(code.unsigned_abs())),
    }
}

/// The communicators now, and all reasons why they cannot be made again.
pub fn look() -> Report {
    if !state().comms.is_empty() {
        lookup::note_linked();
    }
    report()
}

/// The communicators now.
pub fn report() -> Report {
    super::calls::learn_all();
    let mut report = state().report();
    let mut version = 0;
    // SAFETY: a pointer to a live local.
    let asked = unsafe { call(Function::ncclGetVersion, &[&raw mut version as usize]) };
    if report.live().next().is_some() && asked == SUCCESS && version < OLDEST {
        let why = format!("its NCCL is too old (version code {version}; from 2.18 on it can)");
        report.obstacles.push(why);
    }
    if foreign().has_multicast() {
        report.obstacles.push(Reason::Multicast.to_string());
    }
    report
}

/// A communicator to be worked on: the program's handle, NCCL's, and whether calls do not wait for their end.
type Work = (usize, usize, bool);

fn work() -> Vec<Work> {
    let state = state();
    let comms = state.comms.iter().filter(|(_, comm)| comm.real != 0);
    let nonblocking = |config: &Option<Config>| config.as_ref().is_some_and(Config::is_nonblocking);
    comms
        .map(|(handle, comm)| (*handle, comm.real, nonblocking(&comm.config)))
        .collect()
}

/// Waits until a communicator's last call has ended.
fn settled(real: usize, until: Instant) -> Result<(), Reason> {
    loop {
        let mut error = SUCCESS;
        let to = &raw mut error as usize;
        // SAFETY: a live communicator, and a pointer to a live local.
        checked(unsafe { call(Function::ncclCommGetAsyncError, &[real, to]) })?;
        if error != IN_PROGRESS {
            return checked(error);
        }
        if Instant::now() >= until {
            return Err(Reason::Busy);
        }
        std::thread::sleep(TICK);
    }
}

/// Does something that cannot be ended, within a limit.
fn within_limit<T: Send + 'static>(
    until: Instant,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Reason> {
    let (sender, receiver) = mpsc::channel();
    let work = move || {
        idle::block_signals();
        let _ = sender.send(work());
    };
    std::thread::Builder::new()
        .name("cryopod-nccl".into())
        .stack_size(STACK)
        .spawn(work)
        .map_err(|_| Reason::Busy)?;
    let left = until.saturating_duration_since(Instant::now());
    receiver.recv_timeout(left).map_err(|_| Reason::Busy)
}

/// Waits for the GPU's work, with all calls shut out. After an error the calls go on as before.
pub fn idle(limit: Duration) -> Result<(), Reason> {
    let until = Instant::now() + limit;
    if !state::shut(until) {
        return Err(Reason::Busy);
    }
    let idle = work()
        .iter()
        .try_for_each(|(_, real, _)| settled(*real, until))
        .and_then(|()| idle::finished(until));
    if idle.is_err() {
        state::give_up();
    }
    idle
}

/// Destroys the communicators. The calls wait until [`up`], also after an error.
pub fn down(limit: Duration) -> Result<(), Reason> {
    if !state::is_down() {
        return Err(Reason::Order);
    }
    let until = Instant::now() + limit;
    let all = work();
    // What has not been destroyed by then is in use again.
    let each = move |work| match Instant::now() < until {
        true => destroy(work, until),
        false => Err(Reason::Busy),
    };
    let destroyed = within_limit(until, move || {
        all.into_iter().map(each).fold(Ok(()), Result::and)
    });
    destroyed.and_then(|done| done)?;
    match foreign().count() {
        0 => Ok(()),
        left => Err(Reason::Shared(left)),
    }
}

fn destroy((handle, real, nonblocking): Work, until: Instant) -> Result<(), Reason> {
    let mut device = 0;
    // SAFETY: a live communicator, and a pointer to a live local.
    unsafe {
        call(
            Function::ncclCommCuDevice,
            &[real, &raw mut device as usize],
        )
    };
    let (context, registered) = match state().comms.get_mut(&handle) {
        // Nobody may use it from here on.
        Some(comm) => {
            (comm.real, comm.device) = (0, device);
            if comm.context == 0 {
                comm.context = contexts::primary(device).unwrap_or_default();
            }
            let registered = comm.registered.values().map(|[of_nccl, ..]| *of_nccl);
            (comm.context, registered.collect::<Vec<_>>())
        }
        None => return Ok(()),
    };
    let destroy = || {
        for of_nccl in registered {
            // SAFETY: NCCL's handles.
            unsafe { call(Function::ncclCommDeregister, &[real, of_nccl]) };
        }
        // SAFETY: a live communicator, which is not used again.
        unsafe {
            if nonblocking {
                call(Function::ncclCommFinalize, &[real]);
                settled(real, until)?;
            }
            match call(Function::ncclCommDestroy, &[real]) {
                IN_PROGRESS => Ok(()),
                code => checked(code),
            }
        }
    };
    contexts::with(context, destroy).unwrap_or_else(|code| Err(Reason::Cuda(code.unsigned_abs())))
}

/// A fresh unique id. NCCL listens for the other ranks from then on.
pub fn unique_id() -> Result<[u8; UNIQUE_ID], Reason> {
    let mut id = UniqueId([0; UNIQUE_ID]);
    // SAFETY: a pointer to a live local.
    checked(unsafe { call(Function::ncclGetUniqueId, &[&raw mut id as usize]) })?;
    Ok(id.0)
}

/// What is made again.
struct Remake {
    handle: usize,
    ranks: c_int,
    rank: c_int,
    config: Option<Config>,
    context: usize,
    /// The program's handle, address and size.
    registered: Vec<[usize; 3]>,
}

/// Makes the communicators again, in this order. The calls still wait.
pub fn up(fresh: Vec<Fresh>, limit: Duration) -> Result<(), Reason> {
    if !state::is_down() {
        let nothing = fresh.is_empty();
        return nothing.then_some(()).ok_or(Reason::Order);
    }
    let until = Instant::now() + limit;
    // One that comes up late must not be used.
    let late = std::sync::Arc::new(Mutex::new(false));
    let theirs = std::sync::Arc::clone(&late);
    let made = within_limit(until, move || {
        fresh
            .into_iter()
            .try_for_each(|fresh| make(fresh, until, &theirs))
    });
    if let Ok(mut late) = late.lock() {
        *late = true;
    }
    made.and_then(|made| made)
}

fn make((comm, id): Fresh, until: Instant, late: &Mutex<bool>) -> Result<(), Reason> {
    let own: Vec<Remake> = {
        let state = state();
        let own = state.comms.iter();
        let own = own.filter(|(_, own)| own.id == comm && own.real == 0 && !own.finalized);
        own.map(|(handle, own)| Remake {
            handle: *handle,
            ranks: own.ranks as c_int,
            rank: own.rank as c_int,
            config: own.config.clone(),
            context: own.context,
            registered: (own.registered.iter())
                .map(|(handle, [_, address, bytes])| [*handle, *address, *bytes])
                .collect(),
        })
        .collect()
    };
    let mut reals = vec![0usize; own.len()];
    // Several ranks in one process wait for each other.
    let group = own.len() > 1;
    if group {
        // SAFETY: takes nothing.
        checked(unsafe { call(Function::ncclGroupStart, &[]) })?;
    }
    let mut code = SUCCESS;
    for (one, real) in own.iter().zip(&mut reals) {
        let made = contexts::with(one.context, || {
            // SAFETY: pointers to live locals.
            unsafe { init(one, UniqueId(id), real) }
        });
        code = match (code, made) {
            (SUCCESS | IN_PROGRESS, Ok(made)) => made,
            (SUCCESS | IN_PROGRESS, Err(_)) => SYSTEM_ERROR,
            _ => code,
        };
    }
    if group {
        // SAFETY: takes nothing.
        let ended = unsafe { call(Function::ncclGroupEnd, &[]) };
        code = if code == SUCCESS { ended } else { code };
    }
    let abort = |reals: &[usize]| {
        for real in reals.iter().filter(|real| **real != 0) {
            // SAFETY: a communicator that nobody else knows.
            unsafe { call(Function::ncclCommAbort, &[*real]) };
        }
    };
    if !matches!(code, SUCCESS | IN_PROGRESS) {
        abort(&reals);
        return checked(code);
    }
    let settled = reals.iter().try_for_each(|real| settled(*real, until));
    let late = late.lock().map_or(true, |late| *late);
    if settled.is_err() || late {
        abort(&reals);
        return settled.and(Err(Reason::Busy));
    }
    for (one, real) in own.into_iter().zip(reals) {
        register(&one, real);
    }
    Ok(())
}

/// # Safety
/// `real` must stay where it is until the communicator is made.
unsafe fn init(one: &Remake, id: UniqueId, real: *mut usize) -> c_int {
    let config = one.config.as_ref().map(Config::raw);
    let has_config = library::has(Function::ncclCommInitRankConfig as usize);
    // SAFETY: the caller vouches for it; the configuration's texts live as long as `one`.
    unsafe {
        match config {
            Some(config) if has_config => {
                let function = Function::ncclCommInitRankConfig;
                call_init(function, real, one.ranks, id, one.rank, config.as_ptr())
            }
            _ => {
                let function = Function::ncclCommInitRank;
                call_init(function, real, one.ranks, id, one.rank, std::ptr::null())
            }
        }
    }
}

/// Registers the program's memory again, and gives the communicator its handle.
fn register(one: &Remake, real: usize) {
    let mut handles = Vec::new();
    for [handle, address, bytes] in &one.registered {
        let mut of_nccl = 0usize;
        let arguments = [real, *address, *bytes, &raw mut of_nccl as usize];
        // SAFETY: a live communicator, memory of the program's, and a pointer to a live local. Without it NCCL copies
        // through memory of its own.
        unsafe { call(Function::ncclCommRegister, &arguments) };
        handles.push((*handle, [of_nccl, *address, *bytes]));
    }
    if let Some(comm) = state().comms.get_mut(&one.handle) {
        comm.registered.extend(handles);
        comm.real = real;
    }
}
