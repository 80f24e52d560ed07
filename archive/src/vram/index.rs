//! Reads and writes the table of chunks, `vram-index.img`.
//!
//! Little-endian: magic (8 bytes), version (u32), length of the header (u32), number of chunks (u64); the header, JSON;
//! 48 bytes per chunk: kind (u8), zero (u8), shard (u16), stored bytes (u32), place (u64), BLAKE3 (32 bytes); at the
//! end the BLAKE3 of everything before it (32 bytes).

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{MAX_CHUNK, MIN_CHUNK, VramError};

/// The version written, and the newest read.
pub const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"CRYOVRAM";
const PREFIX: usize = 24;
const ROW: usize = 48;
const DIGEST: usize = 32;

const MAX_HEADER: u32 = 16 << 20;
const MAX_CHUNKS: u64 = 1 << 24;
const MAX_REGIONS: usize = 1 << 16;
const MAX_ID: usize = 256;
const MAX_PLACES: usize = 8;
const MAX_PLACE: usize = 4096;
/// A shard's number is 16 bits.
pub const MAX_SHARDS: usize = 1 << 16;
/// The largest table.
pub(crate) const MAX_BYTES: u64 =
    PREFIX as u64 + MAX_HEADER as u64 + MAX_CHUNKS * ROW as u64 + DIGEST as u64;

#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct ChunkDigest(pub [u8; DIGEST]);

impl ChunkDigest {
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }
}

impl fmt::Display for ChunkDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl fmt::Debug for ChunkDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::str::FromStr for ChunkDigest {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        blake3::Hash::from_hex(text)
            .map(|hash| Self(*hash.as_bytes()))
            .map_err(|error| format!("not a BLAKE3 digest: {error}"))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ChunkKind {
    /// All bytes are zero; neither data nor digest is stored.
    Zero = 0,
    /// In a shard, uncompressed.
    Raw = 1,
    /// In a shard, an LZ4 block.
    Lz4 = 2,
    /// In a shard, a zstd frame.
    Zstd = 3,
    /// The same as the chunk of this checkpoint with number `place`; that one is not `Same`.
    Same = 4,
    /// The same as the chunk of the parent checkpoint with number `place`.
    Parent = 5,
}

impl ChunkKind {
    fn from_byte(byte: u8) -> Option<Self> {
        Some(match byte {
            0 => Self::Zero,
            1 => Self::Raw,
            2 => Self::Lz4,
            3 => Self::Zstd,
            4 => Self::Same,
            5 => Self::Parent,
            _ => return None,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    pub kind: ChunkKind,
    /// The number of its shard; 0 if it is in no shard.
    pub shard: u16,
    /// Its size in the shard; 0 if it is in no shard.
    pub stored: u32,
    /// Its offset in the shard, or the number of the identical chunk.
    pub place: u64,
    /// BLAKE3 of its uncompressed contents; zeros for a chunk of zeros.
    pub digest: ChunkDigest,
}

impl Chunk {
    pub const ZERO: Self = Self {
        kind: ChunkKind::Zero,
        shard: 0,
        stored: 0,
        place: 0,
        digest: ChunkDigest([0; DIGEST]),
    };
}

/// A buffer whose contents are in the VRAM files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// Unique within the checkpoint.
    pub id: String,
    pub bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VramIndex {
    /// Size of a chunk; the last of a region may be shorter.
    pub chunk_bytes: u32,
    /// The buffers; their chunks follow each other in the table.
    pub regions: Vec<Region>,
    pub shards: Vec<u64>,
    /// Digest of the parent's table.
    pub parent: Option<ChunkDigest>,
    /// Paths of the parent at the checkpoint, absolute or relative to this directory. Only the digest decides whether a
    /// table is the parent.
    pub parent_at: Vec<String>,
    pub chunks: Vec<Chunk>,
    /// Digest of this table; set when it is encoded or parsed.
    pub digest: ChunkDigest,
}

#[derive(Serialize, Deserialize)]
struct IndexHeader {
    chunk_bytes: u32,
    regions: Vec<Region>,
    shards: Vec<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    parent_at: Vec<String>,
}

/// Returns how many chunks a region of this size has; the last may be shorter.
pub fn chunks_of(bytes: u64, chunk_bytes: u32) -> u64 {
    bytes.div_ceil(u64::from(chunk_bytes))
}

impl VramIndex {
    /// The numbers of a region's chunks.
    pub fn range(&self, region: usize) -> Option<std::ops::Range<usize>> {
        let count = |r: &Region| chunks_of(r.bytes, self.chunk_bytes) as usize;
        let start = self.regions.get(..region)?.iter().map(count).sum();
        Some(start..start + count(self.regions.get(region)?))
    }

    /// Finds a region by name; also returns its number.
    pub fn find(&self, id: &str) -> Option<(usize, &Region)> {
        self.regions.iter().enumerate().find(|(_, r)| r.id == id)
    }

    /// Returns the length of each chunk before compression, in bytes, in the order of the table.
    pub fn lengths(&self) -> Vec<u32> {
        let mut lengths = Vec::with_capacity(self.chunks.len());
        for region in &self.regions {
            let mut left = region.bytes;
            while left > 0 {
                let length = left.min(u64::from(self.chunk_bytes));
                lengths.push(length as u32);
                left -= length;
            }
        }
        lengths
    }

    /// Encodes the file's bytes; sets the digest. Fails with [`VramError::Invalid`] if the table could not be read
    /// back.
    pub fn encode(&mut self) -> Result<Vec<u8>, VramError> {
        self.check().map_err(VramError::Invalid)?;
        let header = IndexHeader {
            chunk_bytes: self.chunk_bytes,
            regions: self.regions.clone(),
            shards: self.shards.clone(),
            parent: self.parent.map(|digest| digest.to_string()),
            parent_at: self.parent_at.clone(),
        };
        let header = serde_json::to_vec(&header).map_err(|e| VramError::Invalid(e.to_string()))?;
        let header_len = u32::try_from(header.len())
            .ok()
            .filter(|len| *len <= MAX_HEADER)
            .ok_or_else(|| VramError::Invalid("too many regions or shards".into()))?;
        let size = PREFIX + header.len() + self.chunks.len() * ROW + DIGEST;
        let mut bytes = Vec::with_capacity(size);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(header_len.to_le_bytes());
        bytes.extend((self.chunks.len() as u64).to_le_bytes());
        bytes.extend(&header);
        for chunk in &self.chunks {
            bytes.extend([chunk.kind as u8, 0]);
            bytes.extend(chunk.shard.to_le_bytes());
            bytes.extend(chunk.stored.to_le_bytes());
            bytes.extend(chunk.place.to_le_bytes());
            bytes.extend(chunk.digest.0);
        }
        self.digest = ChunkDigest::of(&bytes);
        bytes.extend(self.digest.0);
        Ok(bytes)
    }

    /// Reads and checks the table of VRAM files; `path` only appears in errors.
    pub fn read(file: &File, path: &Path) -> Result<Self, VramError> {
        let size = file
            .metadata()
            .map_err(VramError::io(path, "cannot be read"))?
            .len();
        if size > MAX_BYTES {
            return Err(VramError::damaged(
                path,
                format!("larger than {MAX_BYTES} bytes"),
            ));
        }
        let mut bytes = Vec::new();
        file.take(size)
            .read_to_end(&mut bytes)
            .map_err(VramError::io(path, "cannot be read"))?;
        Self::parse(&bytes, path)
    }

    /// Parses and checks the file's bytes; `path` only appears in errors.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, VramError> {
        let damaged = |reason: String| VramError::damaged(path, reason);
        if bytes.len() < PREFIX + DIGEST || &bytes[..8] != MAGIC {
            return Err(damaged("not a table of the VRAM files".into()));
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(VramError::Version {
                path: path.to_owned(),
                found: version,
            });
        }
        let header_len = u32_at(bytes, 12);
        let count = u64_at(bytes, 16);
        if header_len > MAX_HEADER || count > MAX_CHUNKS {
            return Err(damaged("its sizes are out of range".into()));
        }
        let rows_at = PREFIX + header_len as usize;
        let end = rows_at + count as usize * ROW;
        if bytes.len() != end + DIGEST {
            return Err(damaged("its size does not fit its contents".into()));
        }
        let digest = ChunkDigest::of(&bytes[..end]);
        if digest.0 != bytes[end..] {
            return Err(damaged("its digest does not fit its contents".into()));
        }
        let header: IndexHeader = serde_json::from_slice(&bytes[PREFIX..rows_at])
            .map_err(|error| damaged(format!("its header: {error}")))?;
        let parent = header
            .parent
            .map(|text| text.parse::<ChunkDigest>())
            .transpose()
            .map_err(damaged)?;
        let mut chunks = Vec::with_capacity(count as usize);
        for (i, row) in bytes[rows_at..end].chunks_exact(ROW).enumerate() {
            let kind = ChunkKind::from_byte(row[0])
                .filter(|_| row[1] == 0)
                .ok_or_else(|| damaged(format!("chunk {i} is of unknown kind {}", row[0])))?;
            let mut digest = ChunkDigest::default();
            digest.0.copy_from_slice(&row[16..]);
            chunks.push(Chunk {
                kind,
                shard: u16::from_le_bytes([row[2], row[3]]),
                stored: u32_at(row, 4),
                place: u64_at(row, 8),
                digest,
            });
        }
        let index = Self {
            chunk_bytes: header.chunk_bytes,
            regions: header.regions,
            shards: header.shards,
            parent,
            parent_at: header.parent_at,
            chunks,
            digest,
        };
        index.check().map_err(damaged)?;
        Ok(index)
    }

    fn check(&self) -> Result<(), String> {
        let size = self.chunk_bytes;
        if !size.is_power_of_two() || !(MIN_CHUNK..=MAX_CHUNK).contains(&size) {
            return Err(format!("chunks of {size} bytes"));
        }
        if self.regions.len() > MAX_REGIONS || self.shards.len() > MAX_SHARDS {
            return Err("too many regions or shards".into());
        }
        if self.parent_at.len() > MAX_PLACES
            || self.parent_at.iter().any(|place| place.len() > MAX_PLACE)
        {
            return Err("too many places of a parent".into());
        }
        let mut seen = std::collections::HashSet::new();
        let mut count = 0u64;
        for region in &self.regions {
            if region.id.len() > MAX_ID || !seen.insert(region.id.as_str()) {
                return Err(format!(
                    "region {:.40?}: name too long or used twice",
                    region.id
                ));
            }
            count = count.saturating_add(chunks_of(region.bytes, size));
        }
        if count > MAX_CHUNKS || count != self.chunks.len() as u64 {
            return Err(format!(
                "{} chunks for regions of {count}",
                self.chunks.len()
            ));
        }
        let lengths = self.lengths();
        for (i, (chunk, length)) in self.chunks.iter().zip(&lengths).enumerate() {
            self.check_chunk(chunk, *length, &lengths)
                .map_err(|what| format!("chunk {i}: {what}"))?;
        }
        Ok(())
    }

    fn check_chunk(&self, chunk: &Chunk, length: u32, lengths: &[u32]) -> Result<(), String> {
        let stored = chunk.stored;
        match chunk.kind {
            ChunkKind::Zero => {
                if *chunk != Chunk::ZERO {
                    return Err("zero, and yet something is stored".into());
                }
            }
            ChunkKind::Raw | ChunkKind::Lz4 | ChunkKind::Zstd => {
                let shard = self
                    .shards
                    .get(usize::from(chunk.shard))
                    .ok_or_else(|| format!("there is no shard {}", chunk.shard))?;
                let end = chunk.place.checked_add(u64::from(stored));
                if end.is_none_or(|end| end > *shard) {
                    return Err(format!("beyond the end of shard {}", chunk.shard));
                }
                let fits = match chunk.kind {
                    ChunkKind::Raw => stored == length,
                    _ => stored > 0 && stored < length,
                };
                if !fits {
                    return Err(format!("{stored} bytes stored for {length}"));
                }
            }
            ChunkKind::Same => {
                let other = usize::try_from(chunk.place).ok();
                let target = other.and_then(|n| Some((self.chunks.get(n)?, lengths.get(n)?)));
                let fits = target.is_some_and(|(to, len)| {
                    !matches!(to.kind, ChunkKind::Same | ChunkKind::Zero)
                        && *len == length
                        && to.digest == chunk.digest
                });
                if !fits || stored != 0 || chunk.shard != 0 {
                    return Err(format!("cannot be the same as {}", chunk.place));
                }
            }
            ChunkKind::Parent => {
                if self.parent.is_none() || stored != 0 || chunk.shard != 0 {
                    return Err("in a parent that is not named".into());
                }
            }
        }
        Ok(())
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}
