//! Asks NVIDIA's management library, `libnvidia-ml.so.1`, for what libcuda reports only with a context on each GPU:
//! free memory, memory by process, and whether a GPU is divided into MIG instances.
//!
//! It comes with the driver. Without it these facts are unknown, and nothing fails.

use crate::driver::Handle;
use crate::gpus::gpu::GpuUuid;
use crate::messages::protocol::AgentGpu;
use crate::messages::report::GpuUser;
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

const NAME: &str = "libnvidia-ml.so.1";
const SUCCESS: c_int = 0;
/// `NVML_ERROR_NOT_SUPPORTED`: a GPU without MIG.
const NOT_SUPPORTED: c_int = 3;
/// `NVML_ERROR_INSUFFICIENT_SIZE`: more processes than there was room for.
const TOO_SMALL: c_int = 7;
/// `NVML_VALUE_NOT_AVAILABLE`.
const NO_VALUE: u64 = u64::MAX;
/// At most so many processes of one GPU are examined.
const MOST_PROCESSES: usize = 4096;

type Device = *mut c_void;

#[repr(C)]
#[derive(Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t` of the functions ending in `_v2` and `_v3`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ProcessInfo {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

const _: () = {
    assert!(size_of::<Memory>() == 24);
    assert!(size_of::<ProcessInfo>() == 24);
};

struct Nvml {
    by_uuid: unsafe extern "C" fn(*const c_char, *mut Device) -> c_int,
    memory: unsafe extern "C" fn(Device, *mut Memory) -> c_int,
    mig: Option<unsafe extern "C" fn(Device, *mut c_uint, *mut c_uint) -> c_int>,
    processes: Option<unsafe extern "C" fn(Device, *mut c_uint, *mut ProcessInfo) -> c_int>,
}

impl Nvml {
    fn load(path: &Path) -> Option<Self> {
        let lib = Handle::open(path).ok()?;
        let init = lib.optional::<unsafe extern "C" fn() -> c_int>(c"nvmlInit_v2")?;
        // SAFETY: takes no argument.
        if unsafe { init() } != SUCCESS {
            return None;
        }
        Some(Self {
            by_uuid: lib.optional(c"nvmlDeviceGetHandleByUUID")?,
            memory: lib.optional(c"nvmlDeviceGetMemoryInfo")?,
            mig: lib.optional(c"nvmlDeviceGetMigMode"),
            processes: lib
                .optional(c"nvmlDeviceGetComputeRunningProcesses_v3")
                .or_else(|| lib.optional(c"nvmlDeviceGetComputeRunningProcesses_v2")),
        })
    }

    fn device(&self, uuid: GpuUuid) -> Option<Device> {
        let name = CString::new(uuid.to_string()).ok()?;
        let mut device: Device = std::ptr::null_mut();
        // SAFETY: a NUL-terminated name; writes one handle.
        let code = unsafe { (self.by_uuid)(name.as_ptr(), &mut device) };
        (code == SUCCESS).then_some(device)
    }

    fn free(&self, device: Device) -> Option<u64> {
        let mut memory = Memory::default();
        // SAFETY: a handle of this library; writes the structure.
        let code = unsafe { (self.memory)(device, &mut memory) };
        (code == SUCCESS).then_some(memory.free)
    }

    fn mig(&self, device: Device) -> Option<bool> {
        let (mut current, mut pending) = (0, 0);
        // SAFETY: a handle of this library; writes two ints.
        match unsafe { self.mig?(device, &mut current, &mut pending) } {
            SUCCESS => Some(current != 0),
            NOT_SUPPORTED => Some(false),
            _ => None,
        }
    }

    fn users(&self, device: Device) -> Vec<ProcessInfo> {
        let Some(ask) = self.processes else {
            return Vec::new();
        };
        let mut room = 64usize;
        while room <= MOST_PROCESSES {
            let mut found = vec![ProcessInfo::default(); room];
            let mut count = c_uint::try_from(room).unwrap_or(c_uint::MAX);
            // SAFETY: room for as many entries as the count says.
            match unsafe { ask(device, &mut count, found.as_mut_ptr()) } {
                SUCCESS => {
                    found.truncate(usize::try_from(count).unwrap_or(0));
                    return found;
                }
                TOO_SMALL => room *= 4,
                _ => break,
            }
        }
        Vec::new()
    }
}

/// Adds the library's facts to the GPUs, and returns who uses how much of their memory. Looks for the library beside
/// libcuda first.
pub fn ask(libcuda: &Path, gpus: &mut [AgentGpu]) -> Vec<GpuUser> {
    let beside = libcuda.parent().map(|d| d.join(NAME));
    let places = beside
        .filter(|p| p.is_absolute())
        .into_iter()
        .chain([PathBuf::from(NAME)]);
    let Some(nvml) = places.into_iter().find_map(|p| Nvml::load(&p)) else {
        tracing::info!("{NAME} cannot be used: free GPU memory is not known");
        return Vec::new();
    };
    let mut users = Vec::new();
    for gpu in gpus {
        let Some(device) = nvml.device(gpu.uuid) else {
            continue;
        };
        gpu.free_memory = nvml.free(device);
        gpu.mig = nvml.mig(device);
        users.extend(nvml.users(device).into_iter().filter_map(|user| {
            Some(GpuUser {
                pid: i32::try_from(user.pid).ok()?,
                gpu: gpu.uuid,
                bytes: Some(user.used).filter(|used| *used != NO_VALUE)?,
            })
        }));
    }
    users
}
