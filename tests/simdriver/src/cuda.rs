//! Loads `libcuda.so.1`, the simulated or the real one, and calls it: what the client program, the
//! conformance probe and the tests use.

use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::mem::transmute_copy;
use std::path::Path;

use crate::abi::*;
use crate::uuid::GpuUuid;

#[derive(Clone, Copy)]
pub struct Cuda(*mut c_void);

// SAFETY: a handle of the dynamic linker may be used from any thread; it is never closed.
unsafe impl Send for Cuda {}
// SAFETY: as above.
unsafe impl Sync for Cuda {}

#[derive(Clone, Copy, PartialEq, Eq)]
pub struct CuError(pub CuResult);

impl std::fmt::Debug for CuError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match describe(self.0) {
            Some((name, _)) => write!(f, "{} ({})", name.to_string_lossy(), self.0),
            None => write!(f, "code {}", self.0),
        }
    }
}

impl std::fmt::Display for CuError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(self, f)
    }
}

impl std::error::Error for CuError {}

pub type CuOutcome<T> = Result<T, CuError>;

/// Calls a function of the library by name; a missing one is CUDA_ERROR_NOT_FOUND.
macro_rules! call {
    ($cuda:expr, $name:literal $(, $arg:expr)*) => {
        match $cuda.symbol($name) {
            p if p.is_null() => Err(CuError(CUDA_ERROR_NOT_FOUND)),
            p => {
                // SAFETY: the symbol is a function of NVIDIA's ABI that takes these arguments; pointers are to live
                // locals of the right type.
                let code = unsafe {
                    let f: unsafe extern "C" fn($(infer!($arg)),*) -> CuResult = transmute_copy(&p);
                    f($($arg),*)
                };
                if code == CUDA_SUCCESS { Ok(()) } else { Err(CuError(code)) }
            }
        }
    };
}
#[macro_export]
macro_rules! infer {
    ($arg:expr) => {
        _
    };
}

impl Cuda {
    /// Loads `libcuda.so.1` the way a program does, or this very file.
    pub fn load(path: Option<&Path>) -> anyhow::Result<Self> {
        use std::os::unix::ffi::OsStrExt;
        let name = match path {
            Some(p) => CString::new(p.as_os_str().as_bytes())?,
            None => c"libcuda.so.1".to_owned(),
        };
        // SAFETY: the name is a C string.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            // SAFETY: dlerror gives null or a C string that lives until the next call.
            let text = unsafe {
                let e = libc::dlerror();
                if e.is_null() {
                    c"dlopen failed"
                } else {
                    CStr::from_ptr(e)
                }
            };
            anyhow::bail!("{}", text.to_string_lossy());
        }
        Ok(Self(handle))
    }

    /// The address of a symbol, null if the library has none of this name.
    pub fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is open and the name a C string.
        unsafe { libc::dlsym(self.0, name.as_ptr()) }
    }

    /// The address of a symbol in any loaded file; without one, whether the linker tells of an error.
    pub fn symbol_anywhere(name: &CStr) -> Result<*mut c_void, bool> {
        // SAFETY: a C string; dlerror gives null or a C string.
        let (found, error) = unsafe {
            libc::dlerror();
            let found = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
            (found, libc::dlerror())
        };
        match found.is_null() {
            true => Err(!error.is_null()),
            false => Ok(found),
        }
    }

    pub fn init(&self) -> CuOutcome<()> {
        call!(self, c"cuInit", 0)
    }

    pub fn version(&self) -> CuOutcome<i32> {
        let mut v: c_int = 0;
        call!(self, c"cuDriverGetVersion", &mut v).map(|()| v)
    }

    pub fn device_count(&self) -> CuOutcome<i32> {
        let mut n: c_int = 0;
        call!(self, c"cuDeviceGetCount", &mut n).map(|()| n)
    }

    pub fn uuid(&self, device: i32) -> CuOutcome<GpuUuid> {
        let mut u = CuUuid { bytes: [0; 16] };
        call!(self, c"cuDeviceGetUuid_v2", &mut u, device).map(|()| GpuUuid(u.bytes))
    }

    pub fn name(&self, device: i32) -> CuOutcome<String> {
        let mut b = [0u8; 128];
        call!(self, c"cuDeviceGetName", b.as_mut_ptr(), 128, device)?;
        Ok(CStr::from_bytes_until_nul(&b)
            .unwrap_or(c"")
            .to_string_lossy()
            .into_owned())
    }

    /// Retains the primary context of a device and makes it current.
    pub fn use_device(&self, device: i32) -> CuOutcome<()> {
        let mut ctx: *mut c_void = std::ptr::null_mut();
        call!(self, c"cuDevicePrimaryCtxRetain", &mut ctx, device)?;
        call!(self, c"cuCtxSetCurrent", ctx)
    }

    /// Makes a context as old programs do, current in this thread.
    pub fn plain_context(&self, device: i32) -> CuOutcome<()> {
        let mut ctx: *mut c_void = std::ptr::null_mut();
        call!(self, c"cuCtxCreate", &mut ctx, 0 as c_uint, device)
    }

    /// Makes a green context, current in this thread; returns it.
    pub fn green_context(&self, device: i32) -> CuOutcome<usize> {
        let mut ctx: *mut c_void = std::ptr::null_mut();
        let none = std::ptr::null_mut::<c_void>();
        call!(
            self,
            c"cuGreenCtxCreate",
            &mut ctx,
            none,
            device,
            1 as c_uint
        )?;
        let green = ctx;
        call!(self, c"cuCtxFromGreenCtx", &mut ctx, green)?;
        call!(self, c"cuCtxSetCurrent", ctx)?;
        Ok(green.addr())
    }

    /// Makes no context current in this thread.
    pub fn no_context(&self) -> CuOutcome<()> {
        call!(self, c"cuCtxSetCurrent", std::ptr::null_mut::<c_void>())
    }

    pub fn destroy_green_context(&self, green: usize) -> CuOutcome<()> {
        let green: *mut c_void = std::ptr::without_provenance_mut(green);
        call!(self, c"cuGreenCtxDestroy", green)
    }

    pub fn mem_info(&self) -> CuOutcome<(usize, usize)> {
        let (mut f, mut t) = (0usize, 0usize);
        call!(self, c"cuMemGetInfo_v2", &mut f, &mut t).map(|()| (f, t))
    }

    pub fn alloc(&self, bytes: usize) -> CuOutcome<CuDevicePtr> {
        let mut p: CuDevicePtr = 0;
        call!(self, c"cuMemAlloc_v2", &mut p, bytes).map(|()| p)
    }

    pub fn alloc_managed(&self, bytes: usize) -> CuOutcome<CuDevicePtr> {
        let mut p: CuDevicePtr = 0;
        call!(self, c"cuMemAllocManaged", &mut p, bytes, 1).map(|()| p)
    }

    pub fn ipc_handle(&self, p: CuDevicePtr) -> CuOutcome<Handle> {
        let mut h = Handle::default();
        call!(self, c"cuIpcGetMemHandle", &mut h, p).map(|()| h)
    }

    pub fn ipc_open(&self, handle: Handle) -> CuOutcome<CuDevicePtr> {
        let mut p: CuDevicePtr = 0;
        call!(self, c"cuIpcOpenMemHandle_v2", &mut p, handle, 1).map(|()| p)
    }

    pub fn ipc_close(&self, p: CuDevicePtr) -> CuOutcome<()> {
        call!(self, c"cuIpcCloseMemHandle", p)
    }

    /// The simulation's own: a handle that another process can import as cuMem does.
    pub fn share(&self, p: CuDevicePtr) -> CuOutcome<Handle> {
        let mut h = Handle::default();
        call!(self, c"cusim_export", &mut h, p).map(|()| h)
    }

    /// The simulation's own: imports it, as cuMem does or as NCCL's P2P/IPC (`legacy`).
    pub fn import(&self, handle: Handle, legacy: bool) -> CuOutcome<CuDevicePtr> {
        let mut p: CuDevicePtr = 0;
        call!(self, c"cusim_import", &mut p, handle, c_uint::from(legacy)).map(|()| p)
    }

    pub fn free(&self, p: CuDevicePtr) -> CuOutcome<()> {
        call!(self, c"cuMemFree_v2", p)
    }

    /// The same in the order of a stream; the one here is nobody's.
    pub fn free_async(&self, p: CuDevicePtr) -> CuOutcome<()> {
        call!(self, c"cuMemFreeAsync", p, std::ptr::null_mut::<c_void>())
    }

    /// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`.
    pub fn memory_type(&self, p: CuDevicePtr) -> CuOutcome<u32> {
        let mut kind: c_uint = 0;
        call!(self, c"cuPointerGetAttribute", &mut kind, 2, p).map(|()| kind)
    }

    /// Begins a capture that forbids some calls of this thread alone, `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`; its stream.
    pub fn capture(&self) -> CuOutcome<usize> {
        let mut stream: *mut c_void = std::ptr::null_mut();
        call!(self, c"cuStreamCreate", &mut stream, 1)?;
        call!(self, c"cuStreamBeginCapture_v2", stream, 1)?;
        Ok(stream.addr())
    }

    /// Ends it.
    pub fn end_capture(&self, stream: usize) -> CuOutcome<()> {
        let stream: *mut c_void = std::ptr::without_provenance_mut(stream);
        let mut graph: *mut c_void = std::ptr::null_mut();
        call!(self, c"cuStreamEndCapture", stream, &mut graph)?;
        call!(self, c"cuStreamDestroy_v2", stream)
    }

    pub fn upload(&self, to: CuDevicePtr, from: &[u8]) -> CuOutcome<()> {
        call!(self, c"cuMemcpyHtoD_v2", to, from.as_ptr(), from.len())
    }

    pub fn download(&self, to: &mut [u8], from: CuDevicePtr) -> CuOutcome<()> {
        call!(self, c"cuMemcpyDtoH_v2", to.as_mut_ptr(), from, to.len())
    }

    pub fn fill(&self, p: CuDevicePtr, value: u8, bytes: usize) -> CuOutcome<()> {
        call!(self, c"cuMemsetD8_v2", p, value, bytes)
    }

    /// The checksum of device memory: a call of its own in the simulated driver, a copy and a
    /// loop with the real one.
    pub fn sum(&self, p: CuDevicePtr, bytes: usize) -> CuOutcome<u64> {
        let mut total = 0u64;
        if !self.symbol(c"cuLaunchCusimSum").is_null() {
            call!(self, c"cuLaunchCusimSum", p, bytes, &mut total)?;
            return Ok(total);
        }
        let mut block = vec![0u8; bytes.min(64 << 20)];
        let mut at = 0usize;
        while at < bytes {
            let n = block.len().min(bytes - at);
            self.download(&mut block[..n], p + at as u64)?;
            for (i, chunk) in (at as u64 / 8..).zip(block[..n].chunks_exact(8)) {
                let mut w = [0u8; 8];
                w.copy_from_slice(chunk);
                total = total.wrapping_add(u64::from_le_bytes(w).wrapping_mul(i | 1));
            }
            at += n;
        }
        Ok(total)
    }

    pub fn restore_thread(&self, pid: i32) -> CuOutcome<i32> {
        let mut tid: c_int = 0;
        call!(
            self,
            c"cuCheckpointProcessGetRestoreThreadId",
            pid,
            &mut tid
        )
        .map(|()| tid)
    }

    pub fn state(&self, pid: i32) -> CuOutcome<u32> {
        let mut s: c_uint = 0;
        call!(self, c"cuCheckpointProcessGetState", pid, &mut s).map(|()| s)
    }

    pub fn lock(&self, pid: i32, timeout_ms: u32) -> CuOutcome<()> {
        let a = CuCheckpointLockArgs {
            timeout_ms,
            reserved0: 0,
            reserved1: [0; 7],
        };
        call!(self, c"cuCheckpointProcessLock", pid, &a)
    }

    pub fn checkpoint(&self, pid: i32) -> CuOutcome<()> {
        let a = CuCheckpointPlainArgs { reserved: [0; 8] };
        call!(self, c"cuCheckpointProcessCheckpoint", pid, &a)
    }

    pub fn restore(&self, pid: i32, pairs: &[(GpuUuid, GpuUuid)]) -> CuOutcome<()> {
        let pairs: Vec<CuCheckpointGpuPair> = pairs
            .iter()
            .map(|(o, n)| CuCheckpointGpuPair {
                old_uuid: CuUuid { bytes: o.0 },
                new_uuid: CuUuid { bytes: n.0 },
            })
            .collect();
        let a = CuCheckpointRestoreArgs {
            gpu_pairs: pairs.as_ptr(),
            gpu_pairs_count: c_uint::try_from(pairs.len()).unwrap_or(c_uint::MAX),
            reserved: [0; 52],
        };
        call!(self, c"cuCheckpointProcessRestore", pid, &a)
    }

    pub fn unlock(&self, pid: i32) -> CuOutcome<()> {
        let a = CuCheckpointPlainArgs { reserved: [0; 8] };
        call!(self, c"cuCheckpointProcessUnlock", pid, &a)
    }
}
