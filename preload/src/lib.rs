//! A library inside a workload, loaded with `LD_PRELOAD`, that lets cryopod copy the workload's GPU memory itself.
//!
//! NVIDIA's driver moves 2 to 6 GB/s at a checkpoint. A process whose GPU memory is mapped by CUDA's virtual memory calls
//! can give that memory to another process, release it, and keep its addresses; the driver then has almost nothing to
//! move. So this library stands in front of the driver's functions ([`exports`]):
//!
//! * Allocations of 2 MiB and more become physical memory at reserved addresses ([`memory`], recorded in [`map`]).
//! * Calls that enqueue work pass a gate, which is open until a checkpoint ([`gate`], [`hooks`]).
//! * A thread waits for the driver agent ([`control`]). At a checkpoint it shuts the gate, waits for the GPU's work, and
//!   hands each piece of memory to the agent, which copies it to host memory; then it releases the pieces. At a restore
//!   it allocates them again, and the agent copies back.
//! * NCCL's communicators, whose memory the driver cannot restore, are destroyed before and made again after ([`nccl`]).
//!
//! The copying is the agent's, in a process of its own. This library has no buffers and no threads but the one that
//! waits.

#![cfg_attr(
    test,
    allow(dead_code, reason = "the modules that use it are not part of a test")
)]

// A test program must not replace its own dlsym, and there is no driver to stand in front of.
#[cfg(not(test))]
mod contexts;
#[cfg(not(test))]
mod control;
#[cfg(not(test))]
mod driver;
#[cfg(not(test))]
mod exports;
mod foreign;
mod gate;
#[cfg(not(test))]
mod hooks;
#[cfg(not(test))]
mod idle;
#[cfg(not(test))]
mod imports;
#[cfg(not(test))]
mod linked;
mod map;
#[cfg(not(test))]
mod memory;
#[cfg(not(test))]
mod names;
mod nccl;
mod process;
