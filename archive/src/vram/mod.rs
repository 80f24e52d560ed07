//! The vram: GPU memory in the image directory, beside CRIU's own images.
//!
//! The contents of each buffer (a *region*) are cut into chunks of one fixed size. A chunk is zero, or
//! the same as another one, or lies in a shard (`vram-0000.img`, ...) as it is or compressed. The table
//! of all chunks, `vram-index.img`, is written last and in one step: without it the shards mean
//! nothing. Each chunk's BLAKE3 digest stands in the table, the table's own at its end, and that one
//! again in the metadata, so that one digest vouches for everything.
//!
//! * [`index`]: the table, as bytes
//! * [`write`](mod@write): from memory to a directory, with several threads
//! * [`read`]: from a directory to memory, and the verification
//! * [`parent`]: where the VRAM files before this one is found
//! * [`flatten`](mod@flatten): one that builds upon others becomes one that does not
//!
//! docs/vram-format.md describes every byte.

pub mod codec;
pub mod flatten;
pub mod index;
pub mod parent;
pub mod read;
mod shards;
pub mod write;

use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use codec::Codec;
pub use index::{Chunk, Digest, Index, Kind, Region};
pub use read::{ReadOptions, Vram};
pub use write::{Source, WriteOptions, Written, remove, write};

/// Smallest size of a chunk, in bytes.
pub const MIN_CHUNK: u32 = 64 << 10;
/// Largest size of a chunk, in bytes.
pub const MAX_CHUNK: u32 = 64 << 20;
/// The size of a chunk unless another is wanted, in bytes.
pub const DEFAULT_CHUNK: u32 = 1 << 20;

/// Why VRAM files cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum VramError {
    /// The system refused.
    #[error("{path}: {what}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A file is not what it should be.
    #[error("{path}: {reason}; the checkpoint is damaged or incomplete")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Written by a later version.
    #[error(
        "{path}: version {found} of the format; this cryopod reads {}: update it",
        index::VERSION
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The version that the file names.
        found: u32,
    },
    /// The checkpoint before this one, which it builds upon, cannot be used.
    #[error(
        "{path}: the parent checkpoint, without which this one cannot be read, {reason}; put it back, name its directory in `vram.parents`, or make checkpoints whole before they are moved (cryopod flatten)"
    )]
    Parent {
        /// Where it should be.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The shards are in a store that cannot be used.
    #[error(transparent)]
    Store(#[from] crate::store::StoreError),
    /// The work was called off.
    #[error("called off")]
    Cancelled,
    /// What was asked for makes no sense.
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

/// What VRAM files holds, in numbers: for the metadata, and for a user.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VramFacts {
    /// Digest of the table, in hexadecimal.
    pub digest: String,
    /// GPU memory, in bytes.
    pub bytes: u64,
    /// What it takes in the shards, in bytes.
    pub stored_bytes: u64,
    /// Size of a chunk, in bytes.
    pub chunk_bytes: u32,
    /// Shards.
    pub shards: usize,
    /// All chunks.
    pub chunks: usize,
    /// Chunks that are zero.
    pub zero: usize,
    /// Chunks that lie in a shard as they are.
    pub raw: usize,
    /// Chunks compressed with LZ4.
    pub lz4: usize,
    /// Chunks compressed with zstd.
    pub zstd: usize,
    /// Chunks that are the same as another of this checkpoint.
    pub same: usize,
    /// Chunks that are the same as one of the parent checkpoint.
    pub parent: usize,
    /// Digest of the parent's table, where there are such chunks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_digest: Option<String>,
}

impl VramFacts {
    /// Counts.
    pub fn of(index: &Index) -> Self {
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
                Kind::Zero => facts.zero += 1,
                Kind::Raw => facts.raw += 1,
                Kind::Lz4 => facts.lz4 += 1,
                Kind::Zstd => facts.zstd += 1,
                Kind::Same => facts.same += 1,
                Kind::Parent => facts.parent += 1,
            }
        }
        facts
    }
}

/// How many threads to use where nobody says: one a core, at most 16.
pub fn usual_threads() -> usize {
    std::thread::available_parallelism().map_or(2, |n| n.get().min(16))
}

#[cfg(test)]
mod tests;
