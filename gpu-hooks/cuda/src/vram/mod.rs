//! Saves GPU memory as VRAM files, past CRIU's pipe.
//!
//! At a checkpoint the driver asks in the process for one large piece of memory, into which it copies all that the GPU
//! holds. The plugin, which traces the driver's thread at that time, answers with memory of the agent's: hugepages,
//! filled by several threads, shared between the process and the agent. When the driver is done, the plugin puts an
//! empty mapping in its place, so that CRIU finds nothing to dump. A worker of the agent writes the memory with several
//! threads ([`cryopod_archive::vram`]) while CRIU dumps the rest. Whenever the process must have its memory back, the
//! same pages are mapped where they were. docs/architecture.md describes it in one page.
//!
//! * [`memory`]: the memory itself
//! * [`ceiling`]: how much of it a process may have
//! * [`reserve`]: memory allocated before the freeze
//! * [`store`]: the agent's buffers
//! * [`filling`]: how far the driver has filled memory
//! * [`front`]: how far a memory has been read or filled
//! * [`userfault`]: a process that reads memory waits until it is there
//! * [`worker`]: the process that reads and writes the image directory

pub use crate::messages::buffers::{
    MIN_BYTES, NamedBuffer, SharedBuffer, VramBuffer, VramConfig, VramDone, VramParent, Wanted,
    WantedRegion,
};

pub mod ceiling;
pub mod filling;
pub mod front;
pub mod memory;
pub mod reserve;
pub mod store;
pub mod userfault;
pub mod worker;

/// Bytes that must remain free on the host beside a buffer.
pub const SPARE_BYTES: u64 = 256 << 20;
