//! The few calls of NVIDIA's management library that cryopod makes, answered by the device server. The same library is
//! installed a second time as `libnvidia-ml.so.1`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use serde_json::Value;

use super::locate::places;
use crate::abi::CuResult;
use crate::server::control;

const SUCCESS: c_int = 0;
const INVALID_ARGUMENT: c_int = 2;
const NOT_FOUND: c_int = 6;
const INSUFFICIENT_SIZE: c_int = 7;
const DRIVER_NOT_LOADED: c_int = 9;

#[repr(C)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

#[repr(C)]
pub struct ProcessInfo {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

fn gpus() -> Option<Vec<Value>> {
    let status = control::send(&places().socket, "status").ok()?;
    status.get("gpus")?.as_array().cloned()
}

/// The GPU behind a handle: its place in the list, counted from one.
fn gpu(device: *mut c_void) -> Option<Value> {
    gpus()?.into_iter().nth(device.addr().checked_sub(1)?)
}

fn number(gpu: &Value, key: &str) -> u64 {
    gpu.get(key).and_then(Value::as_u64).unwrap_or(0)
}

/// Writes a result through the caller's pointer, for which it promised room, unless that is null.
fn put<T>(to: *mut T, value: Result<T, c_int>) -> c_int {
    match value {
        Ok(_) if to.is_null() => INVALID_ARGUMENT,
        Ok(value) => {
            // SAFETY: not null; the caller promised room.
            unsafe { to.write(value) };
            SUCCESS
        }
        Err(code) => code,
    }
}

exports! {
    fn nvmlInit_v2() = gpus().map_or(DRIVER_NOT_LOADED, |_| SUCCESS);
    fn nvmlDeviceGetHandleByUUID(uuid: *const c_char, device: *mut *mut c_void) = match uuid.is_null() {
        true => INVALID_ARGUMENT,
        false => {
            // SAFETY: not null; the caller promised a string.
            let wanted = unsafe { CStr::from_ptr(uuid) }.to_string_lossy();
            let known = gpus().unwrap_or_default();
            let is = |g: &Value| g.get("uuid").and_then(Value::as_str) == Some(&*wanted);
            let place = known.iter().position(is).ok_or(NOT_FOUND);
            put(device, place.map(|at| std::ptr::without_provenance_mut(at + 1)))
        }
    };
    fn nvmlDeviceGetMemoryInfo(device: *mut c_void, memory: *mut Memory) = {
        let of = |gpu: Value| {
            let (total, free) = (number(&gpu, "total"), number(&gpu, "free"));
            Memory { total, free, used: total.saturating_sub(free) }
        };
        put(memory, gpu(device).map(of).ok_or(INVALID_ARGUMENT))
    };
    fn nvmlDeviceGetMigMode(device: *mut c_void, current: *mut c_uint, pending: *mut c_uint) = {
        let on = |gpu: Value| c_uint::from(gpu.get("mig") == Some(&Value::Bool(true)));
        let on = gpu(device).map(on).ok_or(INVALID_ARGUMENT);
        match put(current, on) {
            SUCCESS => put(pending, on),
            error => error,
        }
    };
    fn nvmlDeviceGetComputeRunningProcesses_v3(device: *mut c_void, count: *mut c_uint, infos: *mut ProcessInfo) =
        match gpu(device).filter(|_| !count.is_null()) {
            Some(gpu) => running(&gpu, count, infos),
            None => INVALID_ARGUMENT,
        };
}

fn running(gpu: &Value, count: *mut c_uint, infos: *mut ProcessInfo) -> c_int {
    let users: Vec<(c_uint, u64)> = gpu
        .get("pids")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
        .filter_map(|(pid, used)| Some((pid.parse().ok()?, used.as_u64()?)))
        .collect();
    // SAFETY: not null; the caller promised a count, and room for that many.
    unsafe {
        let room = count.read() as usize;
        count.write(c_uint::try_from(users.len()).unwrap_or(c_uint::MAX));
        if room < users.len() || infos.is_null() {
            return INSUFFICIENT_SIZE;
        }
        for (at, (pid, used)) in users.into_iter().enumerate() {
            infos.add(at).write(ProcessInfo {
                pid,
                used,
                gpu_instance: c_uint::MAX,
                compute_instance: c_uint::MAX,
            });
        }
    }
    SUCCESS
}
