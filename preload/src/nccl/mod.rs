//! NCCL's communicators, which leave a process for the time of a checkpoint and are made again under the same handles.
//!
//! The driver cannot restore processes that have each other's GPU memory mapped, as NCCL's ranks do. So this library
//! stands in front of NCCL's functions ([`calls`]), too, and remembers how each communicator was made and how many
//! calls it has seen ([`state`]). At a checkpoint the agent has the calls wait at a moment at which all ranks have made
//! the same calls, and the communicators are destroyed; afterwards they are made again among the same ranks
//! ([`moves`]). The agent carries the unique ids from rank to rank.
//!
//! A handle that the program holds is the communicator that NCCL made first. So a function that this library does not
//! know works, until a checkpoint; after one it would get a communicator that is gone. A program that has such a
//! function is therefore not checkpointed while its communicators share memory ([`lookup`]).

pub mod state;

#[cfg(not(test))]
pub mod calls;
#[cfg(not(test))]
pub mod library;
#[cfg(not(test))]
pub mod lookup;
#[cfg(not(test))]
pub mod moves;

use std::ffi::c_int;

// nccl.h: ncclResult_t
pub const SUCCESS: c_int = 0;
pub const SYSTEM_ERROR: c_int = 2;
pub const INVALID_ARGUMENT: c_int = 4;
pub const REMOTE_ERROR: c_int = 6;
pub const IN_PROGRESS: c_int = 7;

/// `ncclUniqueId`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [u8; cryopod_preload_wire::nccl::UNIQUE_ID]);
