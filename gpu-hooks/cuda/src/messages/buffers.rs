//! What messages and files say of GPU memory.

use crate::inject::Descriptor;
use cryopod_archive::vram::{
    Codec, DEFAULT_CHUNK, MAX_CHUNK, MIN_CHUNK, ReadOptions, VramFacts, WriteOptions, usual_threads,
};
use serde::{Deserialize, Serialize};
use std::num::NonZero;
use std::path::PathBuf;

/// Smaller mappings of the driver stay where they are, in bytes.
pub const MIN_BYTES: u64 = 64 << 20;
const MAX_THREADS: usize = 256;
const MAX_SHARD: u64 = 1 << 40;

/// Settings for VRAM files in the plugin's configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VramConfig {
    pub required: bool,
    /// Smaller mappings of the driver stay where they are.
    pub min_bytes: u64,
    /// Threads; 0: one a core, at most 16 for each process.
    pub threads: usize,
    pub chunk_bytes: u32,
    pub shard_bytes: u64,
    pub codec: Codec,
    /// zstd's level.
    pub level: i32,
    /// Checkpoint: the previous VRAM files, whose chunks are not stored again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<VramParent>,
    /// Directories to search for parents that were moved.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<PathBuf>,
    pub check: bool,
    /// Restore: the digest in the metadata.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Restore: the checkpoint's own directory, where CRIU is given another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<PathBuf>,
    /// Restore: files with the keys for encrypted shards. The plugin does not get their names, nor names them: CRIU could.
    #[serde(skip)]
    pub identities: Vec<PathBuf>,
    /// Tests only (a plugin built with the feature `test-hooks`): the step that fails, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_fail_at: Option<String>,
}

impl Default for VramConfig {
    fn default() -> Self {
        let usual = WriteOptions::default();
        Self {
            required: false,
            min_bytes: MIN_BYTES,
            threads: 0,
            chunk_bytes: DEFAULT_CHUNK,
            shard_bytes: usual.shard_bytes,
            codec: usual.codec,
            level: usual.level,
            parent: None,
            search: Vec::new(),
            check: true,
            digest: None,
            directory: None,
            identities: Vec::new(),
            test_fail_at: None,
        }
    }
}

impl VramConfig {
    /// The number of threads for one process's memory.
    pub fn threads(&self) -> usize {
        self.threads_for(1)
    }

    /// The number of threads for the memory of several processes, each on a GPU of its own, say. If none is configured,
    /// each gets as many as one process would, while there are cores. With several, one core in eight is left to CRIU,
    /// which then has several processes to dump.
    pub fn threads_for(&self, buffers: usize) -> usize {
        let cores = || {
            let all = std::thread::available_parallelism().map_or(2, NonZero::get);
            if buffers > 1 { all - all / 8 } else { all }
        };
        match self.threads {
            0 => usual_threads()
                .saturating_mul(buffers.max(1))
                .min(cores())
                .min(MAX_THREADS),
            threads => threads,
        }
    }

    pub fn write_options(&self, buffers: usize) -> WriteOptions {
        WriteOptions {
            chunk_bytes: self.chunk_bytes,
            shard_bytes: self.shard_bytes,
            threads: self.threads_for(buffers),
            codec: self.codec,
            level: self.level,
            sync: true,
        }
    }

    /// For the reader of so many buffers, into fresh memory.
    pub fn read_options(&self, buffers: usize) -> ReadOptions {
        ReadOptions {
            threads: self.threads_for(buffers),
            check: self.check,
            zeroed: true,
        }
    }

    /// Checks every value. An error names the key of the configuration.
    pub fn validate(&self) -> Result<(), String> {
        if self.threads > MAX_THREADS {
            return Err(format!(
                "vram: {} threads (at most {MAX_THREADS})",
                self.threads
            ));
        }
        if !self.chunk_bytes.is_power_of_two()
            || !(MIN_CHUNK..=MAX_CHUNK).contains(&self.chunk_bytes)
        {
            return Err(format!(
                "vram: chunk_kib: {} bytes are not a power of two between 64 KiB and 64 MiB",
                self.chunk_bytes
            ));
        }
        if !(1 << 20..=MAX_SHARD).contains(&self.shard_bytes) {
            return Err(format!(
                "vram: shard_mib: {} bytes are not between 1 MiB and 1 TiB",
                self.shard_bytes
            ));
        }
        if !(-7..=19).contains(&self.level) {
            return Err(format!("vram: level {} (-7 to 19)", self.level));
        }
        Ok(())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VramParent {
    pub directory: PathBuf,
    /// Digest of its table, in hexadecimal.
    pub digest: String,
}

/// Memory of the agent's that another process can open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedBuffer {
    pub id: u64,
    /// Path to open it by, as long as the agent lives.
    pub path: String,
    /// Allocated before it was asked for.
    #[serde(default)]
    pub reserved: bool,
    /// A restore: the agent's descriptor of [`crate::vram::userfault::DEVICE`]. CRIU may be in the container's cgroup already, which
    /// may not open the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub userfault: Option<Descriptor>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wanted {
    pub pid: i32,
    /// Approximate size.
    pub bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedBuffer {
    pub id: u64,
    /// [`cryopod_archive::vram::Region::id`].
    pub name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WantedRegion {
    pub name: String,
    /// Its size, which must be the recorded one.
    pub bytes: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VramDone {
    pub facts: VramFacts,
    /// Hashing, compressing and writing, or reading: microseconds.
    pub work_us: u64,
    /// Waiting for the disk, in microseconds.
    #[serde(default)]
    pub sync_us: u64,
    /// Chunks that were written while the driver filled the memory.
    #[serde(default)]
    pub ahead: u64,
    /// How many of these had changed when the driver was done, and were written again.
    #[serde(default)]
    pub changed: u64,
}

/// The place of a region's memory in a restored process; part of the process's record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VramBuffer {
    /// 0 for memory that the preload library handed over: it was never mapped in host memory.
    pub address: u64,
    /// Size, whole pages.
    pub bytes: u64,
    pub region: String,
    /// The preload library in the process takes it back.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub preload: bool,
}

impl VramBuffer {
    /// Memory that the driver has; its region has no name yet.
    pub fn of_driver(address: u64, bytes: u64) -> Self {
        Self {
            address,
            bytes,
            region: String::new(),
            preload: false,
        }
    }

    /// Memory that the preload library handed over.
    pub fn of_preload(bytes: u64) -> Self {
        Self {
            preload: true,
            ..Self::of_driver(0, bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_buffers_have_more_threads_while_there_are_cores() {
        let cores = std::thread::available_parallelism().unwrap().get();
        let config = VramConfig::default();
        assert_eq!(config.threads(), cores.min(16));
        assert_eq!(config.threads_for(0), config.threads());
        let some = cores - cores / 8;
        assert_eq!(config.write_options(2).threads, some.min(32));
        assert_eq!(config.read_options(1 << 40).threads, some.min(MAX_THREADS));
        let three = VramConfig {
            threads: 3,
            ..config
        };
        assert_eq!(three.write_options(8).threads, 3);
    }
}
