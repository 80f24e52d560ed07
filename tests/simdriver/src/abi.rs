//! The part of NVIDIA's C ABI (`cuda.h` of CUDA 12.8 and 13) that the simulated driver speaks:
//! result codes, states, and the argument structures of the checkpoint calls.

use std::ffi::{CStr, c_char, c_int, c_uint};

pub type CuResult = c_int;
pub type CuDevice = c_int;
pub type CuDevicePtr = u64;

/// Defines the result codes with the name and the text that the driver gives for each.
macro_rules! results {
    ($($name:ident = $value:literal, $text:literal;)*) => {
        $(#[doc = $text] pub const $name: CuResult = $value;)*
        /// Name and description of a result code, or `None` for one that is not known here.
        pub fn describe(code: CuResult) -> Option<(&'static CStr, &'static CStr)> {
            match code {
                $($value => Some((c_name(concat!(stringify!($name), "\0")), c_name(concat!($text, "\0")))),)*
                _ => None,
            }
        }
        pub fn code_of(name: &str) -> Option<CuResult> {
            match name {
                $(stringify!($name) => Some($value),)*
                _ => None,
            }
        }
    };
}

/// A literal that ends in NUL, as a C string; empty should the NUL be missing.
fn c_name(literal: &'static str) -> &'static CStr {
    CStr::from_bytes_with_nul(literal.as_bytes()).unwrap_or(c"")
}

results! {
    CUDA_SUCCESS = 0, "no error";
    CUDA_ERROR_INVALID_VALUE = 1, "invalid argument";
    CUDA_ERROR_OUT_OF_MEMORY = 2, "out of memory";
    CUDA_ERROR_NOT_INITIALIZED = 3, "initialization error";
    CUDA_ERROR_DEINITIALIZED = 4, "driver shutting down";
    CUDA_ERROR_NO_DEVICE = 100, "no CUDA-capable device is detected";
    CUDA_ERROR_INVALID_DEVICE = 101, "invalid device ordinal";
    CUDA_ERROR_INVALID_CONTEXT = 201, "invalid device context";
    CUDA_ERROR_OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    CUDA_ERROR_ILLEGAL_STATE = 401, "the operation cannot be performed in the present state";
    CUDA_ERROR_NOT_FOUND = 500, "named symbol not found";
    CUDA_ERROR_NOT_READY = 600, "device not ready";
    CUDA_ERROR_ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    CUDA_ERROR_LAUNCH_FAILED = 719, "unspecified launch failure";
    CUDA_ERROR_NOT_PERMITTED = 800, "operation not permitted";
    CUDA_ERROR_NOT_SUPPORTED = 801, "operation not supported";
    CUDA_ERROR_SYSTEM_NOT_READY = 802, "system not yet initialized";
    CUDA_ERROR_MPS_CONNECTION_FAILED = 805, "MPS client failed to connect to the MPS control daemon or the MPS server";
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    CUDA_ERROR_TIMEOUT = 909, "wait operation timed out";
    CUDA_ERROR_UNKNOWN = 999, "unknown error";
}

pub const STATE_RUNNING: c_uint = 0;
pub const STATE_LOCKED: c_uint = 1;
pub const STATE_CHECKPOINTED: c_uint = 2;
pub const STATE_FAILED: c_uint = 3;

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CuUuid {
    /// The sixteen bytes, in the order in which they are printed.
    pub bytes: [u8; 16],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CuCheckpointLockArgs {
    /// Milliseconds to try; 0 is no limit.
    pub timeout_ms: c_uint,
    pub reserved0: c_uint,
    pub reserved1: [u64; 7],
}

/// `CUcheckpointCheckpointArgs` and `CUcheckpointUnlockArgs`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CuCheckpointPlainArgs {
    pub reserved: [u64; 8],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CuCheckpointGpuPair {
    pub old_uuid: CuUuid,
    pub new_uuid: CuUuid,
}

/// `CUcheckpointRestoreArgs`. 64 bytes in every version; CUDA 12.8 (drivers before 580) had no
/// pairs, only eight reserved words.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CuCheckpointRestoreArgs {
    /// Array of pairs, may be null.
    pub gpu_pairs: *const CuCheckpointGpuPair,
    pub gpu_pairs_count: c_uint,
    pub reserved: [c_char; 64 - size_of::<usize>() - size_of::<c_uint>()],
}

const _: () = {
    assert!(size_of::<CuCheckpointLockArgs>() == 64);
    assert!(size_of::<CuCheckpointPlainArgs>() == 64);
    assert!(size_of::<CuCheckpointRestoreArgs>() == 64);
    assert!(size_of::<CuCheckpointGpuPair>() == 32);
};

pub const PROC_ADDRESS_SUCCESS: c_int = 0;
pub const PROC_ADDRESS_NOT_FOUND: c_int = 1;

/// `CUipcMemHandle`: 64 bytes, passed by value.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Handle(pub [u64; 8]);
