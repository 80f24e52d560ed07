//! A simulated NVIDIA driver, for tests only.
//!
//! Built as a cdylib this is a `libcuda.so.1` that behaves, where checkpointing is concerned, as
//! the real driver was measured to behave: device memory lives in another process (the device
//! server, [`server`]), a restore thread in the client process does the work when another process
//! asks by pid, a checkpoint makes one anonymous `MAP_POPULATE` mapping with the contents of device
//! memory and closes everything else, a restore reverses it. `README.md` next to this crate
//! describes how to run it and what of it was checked against hardware.
//!
//! The crate is a test fixture: nothing that is released depends on it.

pub mod abi;
pub mod cuda;
mod driver;
pub mod install;
pub mod ranks;
pub mod server;
pub mod uuid;
pub mod wire;

/// A word of noise: the mixer of splitmix64.
pub fn noise(n: u64) -> u64 {
    let mut z = n.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
