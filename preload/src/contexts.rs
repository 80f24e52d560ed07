//! The process's CUDA contexts, whose work a checkpoint waits for.

use crate::driver::{call_at, other};
use crate::process::PerProcess;
use std::ffi::{CStr, c_int};
use std::sync::MutexGuard;

#[derive(Clone, Copy)]
struct Context {
    handle: usize,
    /// The device whose primary context it is.
    primary: Option<i32>,
}

static CONTEXTS: PerProcess<Vec<Context>> = PerProcess::new(Vec::new(), Vec::new());

fn contexts() -> MutexGuard<'static, Vec<Context>> {
    CONTEXTS.lock()
}

/// Notes a context, once; `primary` is the device whose primary context it is.
pub fn add(handle: usize, primary: Option<i32>) {
    let mut contexts = contexts();
    if contexts.iter().all(|context| context.handle != handle) {
        contexts.push(Context { handle, primary });
    }
}

/// Forgets a context that has ended.
pub fn remove(handle: usize) {
    contexts().retain(|context| context.handle != handle);
}

/// Returns the handles of all contexts.
pub fn all() -> Vec<usize> {
    contexts().iter().map(|context| context.handle).collect()
}

/// The primary context of a device.
pub fn primary(device: i32) -> Option<usize> {
    let contexts = contexts();
    let mut own = contexts.iter().filter(|c| c.primary == Some(device));
    own.next().map(|context| context.handle)
}

/// The primary context of a device, if it is no longer active; it is removed.
pub fn ended(device: i32) -> Option<usize> {
    let mut contexts = contexts();
    let at = contexts.iter().position(|c| c.primary == Some(device))?;
    let (mut flags, mut active) = (0u32, 1i32);
    let arguments = [
        device as usize,
        &raw mut flags as usize,
        &raw mut active as usize,
    ];
    let asked = other_call(c"cuDevicePrimaryCtxGetState", arguments);
    (asked == 0 && active == 0).then(|| contexts.remove(at).handle)
}

/// The primary contexts that are no longer active; they are removed.
pub fn all_ended() -> Vec<usize> {
    let devices: Vec<i32> = contexts().iter().filter_map(|c| c.primary).collect();
    devices.into_iter().filter_map(ended).collect()
}

/// Calls a function of the driver's that this library does not stand in front of.
pub fn other_call<const N: usize>(name: &CStr, arguments: [usize; N]) -> c_int {
    // SAFETY: each caller here names a function with at most these arguments: numbers, and pointers to live locals.
    unsafe { call_at(other(name), arguments) }
}

/// The context that is current in this thread; 0 if none is.
pub fn current() -> usize {
    let mut context = 0usize;
    match other_call(c"cuCtxGetCurrent", [&raw mut context as usize]) {
        0 => known(context),
        _ => 0,
    }
}

/// For a green context the primary one, which waits for it: a green context may be current in one thread only, and can
/// end before the memory that was allocated in it.
fn known(context: usize) -> usize {
    let is_known = contexts().iter().any(|c| c.handle == context);
    let primary = || current_device().and_then(primary);
    match is_known || context == 0 {
        true => context,
        false => primary().unwrap_or(context),
    }
}

/// The last of the handles that mean a default stream.
const DEFAULT_STREAM: usize = 2;

/// The context of a stream.
pub fn of_stream(stream: usize) -> usize {
    let mut context = 0usize;
    let to = &raw mut context as usize;
    // The default streams are the current context's.
    match stream > DEFAULT_STREAM && other_call(c"cuStreamGetCtx", [stream, to]) == 0 {
        true => known(context),
        false => current(),
    }
}

/// The device of the current context.
pub fn current_device() -> Option<i32> {
    let mut device = 0i32;
    let code = other_call(c"cuCtxGetDevice", [&raw mut device as usize]);
    (code == 0).then_some(device)
}

/// Does something with another context current in this thread.
pub fn with<T>(context: usize, work: impl FnOnce() -> T) -> Result<T, c_int> {
    let code = other_call(c"cuCtxPushCurrent_v2", [context]);
    if code != 0 {
        return Err(code);
    }
    let result = work();
    let mut popped = 0usize;
    other_call(c"cuCtxPopCurrent_v2", [&raw mut popped as usize]);
    Ok(result)
}

/// Waits for the work in a context.
pub fn synchronize(context: usize) -> c_int {
    with(context, || other_call(c"cuCtxSynchronize", [])).unwrap_or_else(|code| code)
}
