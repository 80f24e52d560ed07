//! Calls the driver's checkpoint API (`cuCheckpointProcess*`, libcuda 12.8 and later), behind a trait so that the agent
//! can be tested without a driver.
//!
//! libcuda is loaded at run time: it belongs to the driver installed on the host. Every call acts on another process by
//! pid and needs only `cuInit`; no CUDA context is ever made here.

use crate::gpus::gpu::{GpuPair, GpuUuid};
use crate::messages::protocol::{AgentGpu, DriverError, ErrorKind, ProcessState};
use cryopod_host::files::Host;
use cryopod_host::processes::maps;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Error codes of `cuda.h` that need different handling.
mod code {
    pub const OUT_OF_MEMORY: i32 = 2;
    pub const NO_DEVICE: i32 = 100;
    pub const ILLEGAL_STATE: i32 = 401;
    pub const NOT_READY: i32 = 600;
    pub const NOT_SUPPORTED: i32 = 801;
    pub const SYSTEM_DRIVER_MISMATCH: i32 = 803;
}

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `_MINOR`.
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallError {
    pub code: i32,
    /// Its name and text, as the driver gives them.
    pub text: String,
}

impl CallError {
    /// Returns true for the "illegal state" of a process that is just initialising CUDA.
    pub fn is_illegal_state(&self) -> bool {
        self.code == code::ILLEGAL_STATE
    }

    pub fn describe(&self, what: &str) -> DriverError {
        let kind = match self.code {
            code::OUT_OF_MEMORY => ErrorKind::OutOfMemory,
            code::ILLEGAL_STATE => ErrorKind::WrongState,
            code::NOT_READY if what == "lock" => ErrorKind::LockTimeout,
            code::NOT_SUPPORTED => ErrorKind::NotSupported,
            _ => ErrorKind::Driver,
        };
        DriverError {
            kind,
            code: Some(self.code),
            message: format!("the driver refused {what}: {}", self.text),
        }
    }
}

/// The driver calls that the agent uses. They may run on several threads at once.
pub trait Driver: Send + Sync + 'static {
    /// Returns the process's thread that does the driver's work; an error if it has none.
    fn restore_tid(&self, pid: i32) -> Result<i32, CallError>;
    fn state(&self, pid: i32) -> Result<ProcessState, CallError>;
    /// Blocks CUDA calls, waiting at most that long for GPU work.
    fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), CallError>;
    /// Moves GPU memory to host memory.
    fn checkpoint(&self, pid: i32) -> Result<(), CallError>;
    /// Moves host memory to GPU memory; `map` is empty or names every GPU.
    fn restore(&self, pid: i32, map: &[GpuPair]) -> Result<(), CallError>;
    fn unlock(&self, pid: i32) -> Result<(), CallError>;
}

// The argument structures of cuda.h: 64 bytes each, unused bytes zero.
const ARGS_SIZE: usize = 64;

#[repr(C)]
struct LockArgs {
    timeout_ms: c_uint,
    reserved0: c_uint,
    reserved1: [u64; 7],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Uuid([u8; 16]);

#[repr(C)]
#[derive(Clone, Copy)]
struct RawPair {
    old: Uuid,
    new: Uuid,
}

#[repr(C)]
struct RestoreArgs {
    pairs: *mut RawPair,
    count: c_uint,
    padding: c_uint,
    reserved: [u64; 6],
}

#[repr(C)]
struct NoArgs {
    reserved: [u64; 8],
}

const _: () = {
    assert!(size_of::<LockArgs>() == ARGS_SIZE);
    assert!(size_of::<RestoreArgs>() == ARGS_SIZE);
    assert!(size_of::<NoArgs>() == ARGS_SIZE);
    assert!(size_of::<RawPair>() == 32);
};

type Pid = c_int;
type Result32 = c_int;
type Step<A> = unsafe extern "C" fn(Pid, *mut A) -> Result32;
type ErrorText = unsafe extern "C" fn(Result32, *mut *const c_char) -> Result32;
type DeviceString = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Result32;

pub struct LibCuda {
    path: PathBuf,
    version: c_int,
    gpus: Vec<AgentGpu>,
    restore_tid: unsafe extern "C" fn(Pid, *mut c_int) -> Result32,
    state: unsafe extern "C" fn(Pid, *mut c_uint) -> Result32,
    lock: Step<LockArgs>,
    checkpoint: Step<NoArgs>,
    restore: Step<RestoreArgs>,
    unlock: Step<NoArgs>,
    error_name: Option<ErrorText>,
    error_text: Option<ErrorText>,
}

/// Why no driver can be used, and what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct LoadError {
    pub cause: String,
    pub remedy: String,
}

impl LoadError {
    fn new(cause: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            cause: cause.into(),
            remedy: remedy.into(),
        }
    }
}

pub fn usual_libraries() -> Vec<PathBuf> {
    [
        "libcuda.so.1",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "/usr/lib/aarch64-linux-gnu/libcuda.so.1",
        "/usr/lib64/libcuda.so.1",
        "/usr/local/nvidia/lib64/libcuda.so.1",
        "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "/run/nvidia/driver/usr/lib64/libcuda.so.1",
    ]
    .into_iter()
    .map(PathBuf::from)
    .collect()
}

/// One loaded library; never unloaded, the driver does not support it.
#[derive(Clone, Copy)]
pub(super) struct Handle(*mut c_void);

impl Handle {
    pub(super) fn open(path: &Path) -> Result<Self, LoadError> {
        let name = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| LoadError::new("a path with a zero byte", "correct the path"))?;
        // SAFETY: a NUL-terminated path; the library's constructors are the driver's own.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !handle.is_null() {
            return Ok(Self(handle));
        }
        // SAFETY: dlerror returns NULL or a string that is valid until the next dl call here.
        let error = unsafe { libc::dlerror() };
        let cause = if error.is_null() {
            "unknown error".to_owned()
        } else {
            // SAFETY: not NULL, NUL-terminated, copied at once.
            unsafe { CStr::from_ptr(error) }
                .to_string_lossy()
                .into_owned()
        };
        Err(LoadError::new(
            format!("cannot load {}: {cause}", path.display()),
            "install NVIDIA's driver, or name its libcuda.so.1 in the configuration",
        ))
    }

    /// Returns the function `name` as `T`, which must be its C type.
    pub(super) fn optional<T: Copy>(self, name: &CStr) -> Option<T> {
        assert_eq!(size_of::<T>(), size_of::<*mut c_void>());
        // SAFETY: a live handle and a NUL-terminated name.
        let symbol = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if symbol.is_null() {
            return None;
        }
        // SAFETY: T has a pointer's size (checked above) and the caller names the C type of it.
        Some(unsafe { std::mem::transmute_copy::<*mut c_void, T>(&symbol) })
    }

    pub(super) fn required<T: Copy>(self, name: &CStr) -> Result<T, LoadError> {
        self.optional(name).ok_or_else(|| {
            LoadError::new(
                format!("the driver has no {}", name.to_string_lossy()),
                "install driver 570 or later on this host: earlier ones cannot checkpoint",
            )
        })
    }
}

impl LibCuda {
    pub fn load_first(paths: &[PathBuf]) -> Result<Self, LoadError> {
        let mut errors: Vec<LoadError> = Vec::new();
        for path in paths {
            match Self::load(path) {
                Ok(cuda) => return Ok(cuda),
                Err(error) => errors.push(error),
            }
        }
        // The library that could be opened tells more than those that are absent.
        let remedy = errors
            .iter()
            .find(|error| !error.cause.starts_with("cannot load"))
            .or(errors.first())
            .map_or("name libcuda.so.1 with --libcuda", |error| &error.remedy)
            .to_owned();
        let causes: Vec<String> = errors.into_iter().map(|error| error.cause).collect();
        Err(LoadError::new(causes.join("; "), remedy))
    }

    /// Loads one library and initialises the driver.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let lib = Handle::open(path)?;
        let init: unsafe extern "C" fn(c_uint) -> Result32 = lib.required(c"cuInit")?;
        let mut cuda = Self {
            path: loaded_path(path),
            version: 0,
            gpus: Vec::new(),
            restore_tid: lib.required(c"cuCheckpointProcessGetRestoreThreadId")?,
            state: lib.required(c"cuCheckpointProcessGetState")?,
            lock: lib.required(c"cuCheckpointProcessLock")?,
            checkpoint: lib.required(c"cuCheckpointProcessCheckpoint")?,
            restore: lib.required(c"cuCheckpointProcessRestore")?,
            unlock: lib.required(c"cuCheckpointProcessUnlock")?,
            error_name: lib.optional(c"cuGetErrorName"),
            error_text: lib.optional(c"cuGetErrorString"),
        };
        // SAFETY: cuInit takes flags, which must be 0.
        if let Err(error) = cuda.check(unsafe { init(0) }) {
            let remedy = match error.code {
                code::NO_DEVICE => "no GPU is visible here: check /dev/nvidia* and nvidia-smi",
                code::SYSTEM_DRIVER_MISMATCH => {
                    "libcuda and the kernel module are of different versions: reload the module or reboot"
                }
                _ => "check the driver with nvidia-smi",
            };
            let cause = format!("{}: cuInit failed: {}", cuda.path.display(), error.text);
            return Err(LoadError::new(cause, remedy));
        }
        if let Some(get) =
            lib.optional::<unsafe extern "C" fn(*mut c_int) -> Result32>(c"cuDriverGetVersion")
        {
            // SAFETY: writes one int.
            unsafe { get(&mut cuda.version) };
        }
        cuda.gpus = gpus(lib);
        Ok(cuda)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `cuDriverGetVersion`: 13000 is CUDA 13.0.
    pub fn version(&self) -> i32 {
        self.version
    }

    pub fn gpus(&self) -> &[AgentGpu] {
        &self.gpus
    }

    fn check(&self, code: Result32) -> Result<(), CallError> {
        if code == 0 {
            return Ok(());
        }
        let text = |function: Option<ErrorText>| {
            let mut text: *const c_char = std::ptr::null();
            // SAFETY: writes one pointer to a static string, or NULL.
            unsafe { function?(code, &mut text) };
            if text.is_null() {
                return None;
            }
            // SAFETY: not NULL; the driver's strings are static and NUL-terminated.
            Some(
                unsafe { CStr::from_ptr(text) }
                    .to_string_lossy()
                    .into_owned(),
            )
        };
        let text = match (text(self.error_name), text(self.error_text)) {
            (Some(name), Some(text)) => format!("{name} ({text})"),
            (Some(name), None) => name,
            _ => format!("error {code}"),
        };
        Err(CallError { code, text })
    }
}

/// Finds the file behind a bare library name in our own memory map.
fn loaded_path(path: &Path) -> PathBuf {
    if path.is_absolute() {
        return path.to_owned();
    }
    let mut found = None;
    let _ = maps::for_each(
        &Host::system(),
        std::process::id().cast_signed(),
        |mapping| {
            if found.is_none() && mapping.name.contains("/libcuda.so") {
                found = Some(PathBuf::from(mapping.name));
            }
        },
    );
    found.unwrap_or_else(|| path.to_owned())
}

fn gpus(lib: Handle) -> Vec<AgentGpu> {
    type Count = unsafe extern "C" fn(*mut c_int) -> Result32;
    type Get = unsafe extern "C" fn(*mut c_int, c_int) -> Result32;
    type GetUuid = unsafe extern "C" fn(*mut Uuid, c_int) -> Result32;
    type Memory = unsafe extern "C" fn(*mut usize, c_int) -> Result32;
    type Attribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Result32;
    let (Some(count), Some(get), Some(uuid)) = (
        lib.optional::<Count>(c"cuDeviceGetCount"),
        lib.optional::<Get>(c"cuDeviceGet"),
        lib.optional::<GetUuid>(c"cuDeviceGetUuid_v2")
            .or_else(|| lib.optional(c"cuDeviceGetUuid")),
    ) else {
        return Vec::new();
    };
    let name = lib.optional::<DeviceString>(c"cuDeviceGetName");
    let memory = lib.optional::<Memory>(c"cuDeviceTotalMem_v2");
    let attribute = lib.optional::<Attribute>(c"cuDeviceGetAttribute");
    let mut number = 0;
    // SAFETY: writes one int.
    if unsafe { count(&mut number) } != 0 {
        return Vec::new();
    }
    (0..number)
        .filter_map(|ordinal| {
            let (mut device, mut raw) = (0, Uuid([0; 16]));
            // SAFETY: each writes its one out parameter.
            if unsafe { get(&mut device, ordinal) } != 0 || unsafe { uuid(&mut raw, device) } != 0 {
                return None;
            }
            let mut text = [0u8; 128];
            let mut bytes = 0usize;
            if let Some(name) = name {
                // SAFETY: writes at most the length given, which leaves a zero byte at the end.
                unsafe { name(text.as_mut_ptr().cast(), text.len() as c_int - 1, device) };
            }
            if let Some(memory) = memory {
                // SAFETY: writes one size.
                unsafe { memory(&mut bytes, device) };
            }
            let number = |which| {
                let mut value = 0;
                // SAFETY: writes one int.
                let code = unsafe { attribute?(&mut value, which, device) };
                u32::try_from(value).ok().filter(|_| code == 0)
            };
            let name = CStr::from_bytes_until_nul(&text).unwrap_or_default();
            Some(AgentGpu {
                uuid: GpuUuid(raw.0),
                name: name.to_string_lossy().into_owned(),
                total_memory: bytes as u64,
                compute_capability: number(CAPABILITY_MAJOR).zip(number(CAPABILITY_MINOR)),
                free_memory: None,
                mig: None,
            })
        })
        .collect()
}

impl Driver for LibCuda {
    fn restore_tid(&self, pid: i32) -> Result<i32, CallError> {
        let mut tid = 0;
        // SAFETY: writes one int.
        self.check(unsafe { (self.restore_tid)(pid, &mut tid) })?;
        Ok(tid)
    }

    fn state(&self, pid: i32) -> Result<ProcessState, CallError> {
        let mut state: c_uint = 0;
        // SAFETY: writes one enum, an unsigned int.
        self.check(unsafe { (self.state)(pid, &mut state) })?;
        Ok(ProcessState::from_raw(state))
    }

    fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), CallError> {
        let mut args = LockArgs {
            timeout_ms,
            reserved0: 0,
            reserved1: [0; 7],
        };
        // SAFETY: the argument structure of cuda.h, alive during the call.
        self.check(unsafe { (self.lock)(pid, &mut args) })
    }

    fn checkpoint(&self, pid: i32) -> Result<(), CallError> {
        let mut args = NoArgs { reserved: [0; 8] };
        // SAFETY: the argument structure of cuda.h, alive during the call.
        self.check(unsafe { (self.checkpoint)(pid, &mut args) })
    }

    fn restore(&self, pid: i32, map: &[GpuPair]) -> Result<(), CallError> {
        let mut pairs: Vec<RawPair> = map
            .iter()
            .map(|pair| RawPair {
                old: Uuid(pair.old.0),
                new: Uuid(pair.new.0),
            })
            .collect();
        let mut args = RestoreArgs {
            pairs: if pairs.is_empty() {
                std::ptr::null_mut()
            } else {
                pairs.as_mut_ptr()
            },
            count: pairs.len() as c_uint,
            padding: 0,
            reserved: [0; 6],
        };
        // SAFETY: the argument structure of cuda.h; it and the pairs live during the call.
        self.check(unsafe { (self.restore)(pid, &mut args) })
    }

    fn unlock(&self, pid: i32) -> Result<(), CallError> {
        let mut args = NoArgs { reserved: [0; 8] };
        // SAFETY: the argument structure of cuda.h, alive during the call.
        self.check(unsafe { (self.unlock)(pid, &mut args) })
    }
}
