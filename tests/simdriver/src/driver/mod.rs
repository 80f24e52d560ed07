//! The client side of the simulated driver: what `libcuda.so.1` does inside a process.

/// Exports functions of `cuda.h`, each of which is one expression.
macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),*) = $value:expr;)*) => {$(
        $(#[$doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) -> CuResult {
            $value
        }
    )*};
}

pub mod caller;
pub mod exports;
pub mod exports_capture;
pub mod exports_checkpoint;
pub mod exports_vmm;
pub mod gate;
pub mod kernels;
pub mod locate;
pub mod mailbox;
pub mod memory;
pub mod nodes;
pub mod nvml;
pub mod process;
pub mod shared;
pub mod steps;
pub mod thread;
pub mod vmm;
