//! Calls the driver's checkpoint API (`cuCheckpointProcess*`, libcuda 12.8 and later), behind a trait so that the agent
//! can be tested without a driver.
//!
//! libcuda is loaded at run time: it belongs to the driver installed on the host. Every call acts on another process by
//! pid and needs only `cuInit`; no CUDA context is ever made here.

use super::gpu::{GpuPair, GpuUuid};
use super::protocol::{AgentGpu, DriverError, ErrorKind, ProcessState};
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
    pub const UNKNOWN: i32 = 999;
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
    /// The driver's custom storage, if it has it.
    fn custom_storage(&self) -> Option<&dyn CustomStorage> {
        None
    }
}

/// Custom storage (CUDA 13.4): whoever checkpoints a process gets its GPU memory mapped, and copies it.
pub trait CustomStorage: Send + Sync {
    /// Maps a locked process's memory here. There must be a primary context on each of its GPUs. It cannot be taken back:
    /// [`CustomStorage::complete`] must follow when the memory has been copied.
    fn begin_checkpoint(&self, pid: i32) -> Result<Handed, CallError>;
    /// Maps a checkpointed process's memory here, to be filled.
    fn begin_restore(&self, pid: i32, map: &[GpuPair]) -> Result<Handed, CallError>;
    /// Ends either. Afterwards the memory is not mapped any more, whatever the result.
    fn complete(&self, handed: Handed) -> Result<(), CallError>;
}

/// Memory that the driver has mapped here.
#[derive(Debug)]
pub struct Handed {
    handle: usize,
    pub parts: Vec<HandedPart>,
}

/// What it has mapped of one GPU.
#[derive(Debug, Clone, Copy)]
pub struct HandedPart {
    pub device: i32,
    pub address: u64,
    pub bytes: u64,
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

/// `CUcheckpointCustomStoragePerDeviceData`.
#[repr(C)]
struct RawPart {
    address: u64,
    bytes: usize,
    stream: *mut c_void,
}

/// `CUcheckpointCustomStorageInfo`, the driver's own.
#[repr(C)]
struct RawStorage {
    handle: *mut c_void,
    parts: *const RawPart,
    count: c_uint,
}

/// Before CUDA 13.4 all of it was reserved.
#[repr(C)]
struct CheckpointArgs {
    storage: *mut *const RawStorage,
    reserved: [u64; 7],
}

#[repr(C)]
struct RestoreArgs {
    pairs: *mut RawPair,
    count: c_uint,
    padding: c_uint,
    storage: *mut *const RawStorage,
    reserved: [u64; 5],
}

#[repr(C)]
struct NoArgs {
    reserved: [u64; 8],
}

const _: () = {
    assert!(size_of::<LockArgs>() == ARGS_SIZE);
    assert!(size_of::<CheckpointArgs>() == ARGS_SIZE);
    assert!(size_of::<RestoreArgs>() == ARGS_SIZE);
    assert!(size_of::<NoArgs>() == ARGS_SIZE);
    assert!(size_of::<RawPair>() == 32);
};

type Pid = c_int;
type Result32 = c_int;
type Step<A> = unsafe extern "C" fn(Pid, *mut A) -> Result32;
type Complete = unsafe extern "C" fn(*mut c_void) -> Result32;
type StreamDevice = unsafe extern "C" fn(*mut c_void, *mut c_int) -> Result32;
type ErrorText = unsafe extern "C" fn(Result32, *mut *const c_char) -> Result32;
type DeviceString = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Result32;

/// The functions of custom storage.
#[derive(Clone, Copy)]
struct Storage {
    complete: Complete,
    device: StreamDevice,
}

/// The CUDA version whose functions are asked for: the first with custom storage.
const STORAGE_CUDA: c_int = 13_040;

impl Storage {
    /// `None` before CUDA 13.4.
    fn of(lib: Handle) -> Option<Self> {
        type Get = unsafe extern "C" fn(
            *const c_char,
            *mut *mut c_void,
            c_int,
            u64,
            *mut c_int,
        ) -> Result32;
        let get: Get = lib.optional(c"cuGetProcAddress_v2")?;
        let find = |name: &CStr| {
            let (mut found, mut status) = (std::ptr::null_mut(), 0);
            // SAFETY: a NUL-terminated name; writes one pointer and one int.
            let code = unsafe { get(name.as_ptr(), &mut found, STORAGE_CUDA, 0, &mut status) };
            (code == 0 && status == 0 && !found.is_null()).then_some(found)
        };
        let complete = find(c"cuCheckpointOperationComplete")?;
        let device = find(c"cuStreamGetDevice")?;
        // SAFETY: pointers to functions of these C types, by cuda.h of CUDA 13.4.
        unsafe {
            Some(Self {
                complete: std::mem::transmute::<*mut c_void, Complete>(complete),
                device: std::mem::transmute::<*mut c_void, StreamDevice>(device),
            })
        }
    }
}

pub struct LibCuda {
    path: PathBuf,
    version: c_int,
    gpus: Vec<AgentGpu>,
    restore_tid: unsafe extern "C" fn(Pid, *mut c_int) -> Result32,
    state: unsafe extern "C" fn(Pid, *mut c_uint) -> Result32,
    lock: Step<LockArgs>,
    checkpoint: Step<CheckpointArgs>,
    restore: Step<RestoreArgs>,
    unlock: Step<NoArgs>,
    storage: Option<Storage>,
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
            storage: None,
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
        cuda.storage = Storage::of(lib);
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
    std::fs::read_to_string("/proc/self/maps")
        .ok()
        .and_then(|maps| {
            let file = maps.lines().find_map(|line| {
                let start = line.find('/')?;
                line[start..]
                    .contains("/libcuda.so")
                    .then(|| line[start..].to_owned())
            })?;
            Some(PathBuf::from(file))
        })
        .unwrap_or_else(|| path.to_owned())
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
        let mut args = CheckpointArgs {
            storage: std::ptr::null_mut(),
            reserved: [0; 7],
        };
        // SAFETY: the argument structure of cuda.h, alive during the call.
        self.check(unsafe { (self.checkpoint)(pid, &mut args) })
    }

    fn restore(&self, pid: i32, map: &[GpuPair]) -> Result<(), CallError> {
        self.restore_with(pid, map, std::ptr::null_mut())
    }

    fn unlock(&self, pid: i32) -> Result<(), CallError> {
        let mut args = NoArgs { reserved: [0; 8] };
        // SAFETY: the argument structure of cuda.h, alive during the call.
        self.check(unsafe { (self.unlock)(pid, &mut args) })
    }

    fn custom_storage(&self) -> Option<&dyn CustomStorage> {
        self.storage.map(|_| self as &dyn CustomStorage)
    }
}

impl CustomStorage for LibCuda {
    fn begin_checkpoint(&self, pid: i32) -> Result<Handed, CallError> {
        let mut storage = std::ptr::null();
        let mut args = CheckpointArgs {
            storage: &mut storage,
            reserved: [0; 7],
        };
        // SAFETY: the argument structure of cuda.h; it and the pointer that it names live during the call.
        self.check(unsafe { (self.checkpoint)(pid, &mut args) })?;
        self.handed(storage)
    }

    fn begin_restore(&self, pid: i32, map: &[GpuPair]) -> Result<Handed, CallError> {
        let mut storage = std::ptr::null();
        self.restore_with(pid, map, &mut storage)?;
        self.handed(storage)
    }

    fn complete(&self, handed: Handed) -> Result<(), CallError> {
        let storage = self.storage.ok_or_else(nonsense)?;
        let handle = std::ptr::with_exposed_provenance_mut(handed.handle);
        // SAFETY: the driver's handle, of an operation that nobody else completes.
        self.check(unsafe { (storage.complete)(handle) })
    }
}

fn nonsense() -> CallError {
    CallError {
        code: code::UNKNOWN,
        text: "the driver does not say what it has mapped".into(),
    }
}

impl LibCuda {
    /// Reads what the driver has mapped.
    fn handed(&self, storage: *const RawStorage) -> Result<Handed, CallError> {
        let functions = self.storage.ok_or_else(nonsense)?;
        // SAFETY: null, or a structure of the driver's that lives until the operation is complete.
        let storage = unsafe { storage.as_ref() }.ok_or_else(nonsense)?;
        if storage.count > 0 && storage.parts.is_null() {
            return Err(nonsense());
        }
        let count = usize::try_from(storage.count).map_err(|_| nonsense())?;
        let mut parts = Vec::new();
        for at in 0..count {
            // SAFETY: the driver's array of so many elements.
            let raw = unsafe { &*storage.parts.add(at) };
            let mut device = 0;
            // SAFETY: the driver's stream; writes one int.
            self.check(unsafe { (functions.device)(raw.stream, &mut device) })?;
            parts.push(HandedPart {
                device,
                address: raw.address,
                bytes: raw.bytes as u64,
            });
        }
        // The driver may list a GPU of which the process has nothing.
        parts.retain(|part| part.bytes > 0);
        Ok(Handed {
            handle: storage.handle.expose_provenance(),
            parts,
        })
    }

    fn restore_with(
        &self,
        pid: i32,
        map: &[GpuPair],
        storage: *mut *const RawStorage,
    ) -> Result<(), CallError> {
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
            storage,
            reserved: [0; 5],
        };
        // SAFETY: the argument structure of cuda.h; it and the pairs live during the call.
        self.check(unsafe { (self.restore)(pid, &mut args) })
    }
}
