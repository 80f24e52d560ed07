//! Reads and writes the VRAM files: GPU memory in the image directory, beside CRIU's own images.
//!
//! The contents of each buffer (a *region*) are cut into chunks of one fixed size. A chunk is zero, or the same as
//! another one, or lies in a shard (`vram-0000.img`, ...), compressed or not. The table of all chunks,
//! `vram-index.img`, is written last and atomically: without it the shards mean nothing. The table has the BLAKE3
//! digest of each chunk, and ends with its own digest. The metadata repeats that digest, so one digest covers
//! everything.
//!
//! * [`index`]: the table's format
//! * [`write`](mod@write): from memory to a directory, with several threads
//! * [`read`]: from a directory to memory, and the verification
//! * [`parent`]: finds the VRAM files that others build on
//! * [`layers`]: finds them in the layers of an image
//! * [`places`]: finds shards that lie in an archive
//! * [`flatten`](mod@flatten): makes VRAM files independent of their parents
//!
//! docs/formats.md describes every byte.

pub mod codec;
mod file;
pub mod flatten;
pub mod index;
pub mod layers;
pub mod parent;
pub mod places;
pub mod read;
mod shards;
pub mod write;

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use codec::Codec;
pub use index::{Chunk, ChunkDigest, ChunkKind, Region, VramIndex};
pub use read::{ReadOptions, Vram, parent_of};
pub use write::{Ahead, MemorySource, WriteOptions, Writer, Written, remove, write};

/// In bytes.
pub const MIN_CHUNK: u32 = 64 << 10;
/// In bytes.
pub const MAX_CHUNK: u32 = 64 << 20;
/// In bytes.
pub const DEFAULT_CHUNK: u32 = 1 << 20;

#[derive(Debug, thiserror::Error)]
pub enum VramError {
    #[error("{path}: {what}: {source}")]
    Io {
        path: PathBuf,
        what: &'static str,
        source: io::Error,
    },
    #[error("{path}: {reason}; the checkpoint is damaged or incomplete")]
    Damaged { path: PathBuf, reason: String },
    #[error(
        "{path}: version {found} of the format; this cryopod reads {}: update it",
        index::VERSION
    )]
    Version { path: PathBuf, found: u32 },
    #[error(
        "{0}: missing: the checkpoint is incomplete. If `cryopod import` made this container, remove the container and import the archive again"
    )]
    Missing(PathBuf),
    /// The parent checkpoint, on which this one builds, is unusable.
    #[error(
        "{path}: the parent checkpoint, without which this one cannot be read, {reason}; put it back, name its directory in `vram.parents`, or make checkpoints whole before they are moved (cryopod flatten)"
    )]
    Parent {
        /// The expected path.
        path: PathBuf,
        reason: String,
    },
    #[error(transparent)]
    Store(#[from] crate::store::StoreError),
    #[error("called off")]
    Cancelled,
    #[error("{0}")]
    Invalid(String),
}

impl VramError {
    fn io(path: &Path, what: &'static str) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { path, what, source }
    }

    fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_owned(),
            reason: reason.into(),
        }
    }
}

/// Statistics of VRAM files, for the metadata and for users.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VramFacts {
    /// Digest of the table, in hexadecimal.
    pub digest: String,
    pub bytes: u64,
    /// Size in the shards, in bytes.
    pub stored_bytes: u64,
    pub chunk_bytes: u32,
    pub shards: usize,
    pub chunks: usize,
    pub zero: usize,
    /// Chunks that are stored uncompressed.
    pub raw: usize,
    pub lz4: usize,
    pub zstd: usize,
    /// Chunks that are the same as another of this checkpoint.
    pub same: usize,
    /// Chunks that are the same as one of the parent checkpoint.
    pub parent: usize,
    /// Zeros, and chunks of the parent's, that stayed on the GPU: it has made their digests.
    #[serde(default, skip_serializing_if = "is_none")]
    pub not_copied: usize,
    /// Digest of the parent's table, if there are such chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_digest: Option<String>,
}

fn is_none(count: &usize) -> bool {
    *count == 0
}

impl VramFacts {
    pub fn of(index: &VramIndex) -> Self {
        let mut facts = Self {
            digest: index.digest.to_string(),
            bytes: index.regions.iter().map(|region| region.bytes).sum(),
            stored_bytes: index.shards.iter().sum(),
            chunk_bytes: index.chunk_bytes,
            shards: index.shards.len(),
            chunks: index.chunks.len(),
            parent_digest: index.parent.map(|digest| digest.to_string()),
            ..Self::default()
        };
        for chunk in &index.chunks {
            match chunk.kind {
                ChunkKind::Zero => facts.zero += 1,
                ChunkKind::Raw => facts.raw += 1,
                ChunkKind::Lz4 => facts.lz4 += 1,
                ChunkKind::Zstd => facts.zstd += 1,
                ChunkKind::Same => facts.same += 1,
                ChunkKind::Parent => facts.parent += 1,
            }
        }
        facts
    }
}

/// Chunks that a thread writes or reads at a time: they lie one behind the other in its shard. A reader that took one at a
/// time would open an encrypted shard anew for each.
const RUN: usize = 8;

/// Runs the same work on several threads, at least one. Returns the error that made the others stop.
fn run_on(
    threads: usize,
    work: &(dyn Fn() -> Result<(), VramError> + Sync),
) -> Result<(), VramError> {
    std::thread::scope(|scope| {
        let threads = threads.clamp(1, 256);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut first = Ok(());
        for worker in workers {
            let done = worker
                .join()
                .unwrap_or_else(|_| Err(VramError::Invalid("a thread died".into())));
            if matches!(first, Ok(()) | Err(VramError::Cancelled)) && done.is_err() {
                first = done;
            }
        }
        first
    })
}

/// The default number of threads: one per core, at most 16.
pub fn usual_threads() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get().min(16))
}

#[cfg(test)]
mod tests;
