//! Compresses and decompresses chunks, and decides whether compression pays.

use std::io;

use serde::{Deserialize, Serialize};

use super::index::ChunkKind;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Codec {
    /// For each chunk: LZ4 if by its zeros and a sample it shrinks by a tenth, else no compression.
    #[default]
    Auto,
    None,
    /// LZ4: GiB per second and core.
    Lz4,
    Zstd,
}

/// Compressed data must be at most this many 64ths of the original size to be worth its decompression.
const WORTH: u64 = 60;
/// Size of the sample, and of the pieces that are looked at for zeros.
const SAMPLE_BYTES: usize = 64 << 10;

/// Compresses chunks; one per thread.
pub struct Encoder {
    codec: Codec,
    zstd: Option<zstd::bulk::Compressor<'static>>,
    buffer: Vec<u8>,
}

impl Encoder {
    /// For chunks of at most `chunk_bytes`.
    pub fn new(codec: Codec, level: i32, chunk_bytes: usize) -> io::Result<Self> {
        let (room, zstd) = match codec {
            Codec::None => (0, None),
            Codec::Auto | Codec::Lz4 => {
                (lz4_flex::block::get_maximum_output_size(chunk_bytes), None)
            }
            Codec::Zstd => (
                zstd::zstd_safe::compress_bound(chunk_bytes),
                Some(zstd::bulk::Compressor::new(level)?),
            ),
        };
        Ok(Self {
            codec,
            zstd,
            buffer: vec![0; room],
        })
    }

    /// Returns the chunk in its stored form.
    pub fn encode<'a>(&'a mut self, chunk: &'a [u8]) -> (ChunkKind, &'a [u8]) {
        let codec = match self.codec {
            Codec::Auto if pays(chunk) => Codec::Lz4,
            Codec::Auto => Codec::None,
            codec => codec,
        };
        let (kind, size) = match (codec, &mut self.zstd) {
            (Codec::Lz4, _) => (
                ChunkKind::Lz4,
                lz4_flex::block::compress_into(chunk, &mut self.buffer).ok(),
            ),
            (Codec::Zstd, Some(zstd)) => (
                ChunkKind::Zstd,
                zstd.compress_to_buffer(chunk, &mut self.buffer[..]).ok(),
            ),
            _ => (ChunkKind::Raw, None),
        };
        match size {
            Some(size) if (size as u64) * 64 <= (chunk.len() as u64) * WORTH => {
                (kind, &self.buffer[..size])
            }
            _ => (ChunkKind::Raw, chunk),
        }
    }
}

/// Undoes [`Encoder::encode`]: the result must fill `to` exactly.
pub fn decode(kind: ChunkKind, stored: &[u8], to: &mut [u8]) -> Result<(), String> {
    let size = match kind {
        ChunkKind::Lz4 => {
            lz4_flex::block::decompress_into(stored, to).map_err(|e| e.to_string())?
        }
        ChunkKind::Zstd => {
            zstd::bulk::decompress_to_buffer(stored, to).map_err(|e| e.to_string())?
        }
        _ => return Err(format!("{kind:?} is not compressed")),
    };
    if size != to.len() {
        return Err(format!("{size} bytes in place of {}", to.len()));
    }
    Ok(())
}

/// Whether LZ4 would shrink a chunk by a tenth or more, by its zeros and a sample of the rest.
pub fn pays(chunk: &[u8]) -> bool {
    let rest: Vec<&[u8]> = chunk
        .chunks(SAMPLE_BYTES)
        .filter(|piece| !is_zero(piece))
        .collect();
    let Some(sample) = rest.first() else {
        return true;
    };
    let mut out = vec![0; lz4_flex::block::get_maximum_output_size(SAMPLE_BYTES)];
    let after = lz4_flex::block::compress_into(sample, &mut out).unwrap_or(sample.len());
    let left: usize = rest.iter().map(|piece| piece.len()).sum();
    let estimate = left as u64 * after as u64 / sample.len() as u64;
    estimate * 10 <= chunk.len() as u64 * 9
}

/// Returns true if all bytes are zero, or there are none.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Each byte is compared with the one after it, by the C library: fast in debug builds too.
    bytes
        .split_first()
        .is_none_or(|(first, rest)| *first == 0 && rest == &bytes[..rest.len()])
}
