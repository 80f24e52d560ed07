//! Finds where zstd frames end without decompressing them.

use zstd::zstd_safe::{find_frame_compressed_size, get_error_name, get_frame_content_size};

/// Largest frame that a worker gets as a whole, in bytes, compressed or not.
pub(crate) const MAX_FRAME: usize = 2 << 20;

/// What a buffer starts with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ZstdFrame {
    /// More bytes are needed.
    Short,
    /// A frame of this length whose content has a known, small size.
    Whole { len: usize, content: usize },
    /// A skippable frame. The length includes its header.
    Skip { len: usize },
    /// Not a frame, or a frame that is too large to take as a whole, or one that does not state its size.
    Other,
}

/// Examines the start of a buffer.
pub(crate) fn look(buf: &[u8]) -> ZstdFrame {
    let len = match find_frame_compressed_size(buf) {
        Ok(len) => len,
        Err(code) if get_error_name(code) == "Src size is incorrect" => return ZstdFrame::Short,
        Err(_) => return ZstdFrame::Other,
    };
    if buf.starts_with(&0xfd2f_b528_u32.to_le_bytes()) {
        match get_frame_content_size(buf) {
            Ok(Some(content)) if len.max(content as usize) <= MAX_FRAME => ZstdFrame::Whole {
                len,
                content: content as usize,
            },
            _ => ZstdFrame::Other,
        }
    } else {
        ZstdFrame::Skip { len }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_all_sizes_are_found() {
        for size in [0, 1, 255, 256, 257, 65_791, 65_792, 200_000, MAX_FRAME] {
            for fill in [0u8, 1] {
                let data: Vec<u8> = (0..size)
                    .map(|i| if fill == 0 { 0 } else { (i * i / 7) as u8 })
                    .collect();
                let mut compressor = zstd::bulk::Compressor::new(1).unwrap();
                compressor.include_checksum(fill == 1).unwrap();
                let frame = compressor.compress(&data).unwrap();
                let expected = ZstdFrame::Whole {
                    len: frame.len(),
                    content: size,
                };
                assert_eq!(look(&frame), expected);
                assert_eq!(look(&[&frame[..], b"more"].concat()), expected);
                for cut in (0..frame.len()).step_by(frame.len() / 50 + 1) {
                    assert_eq!(look(&frame[..cut]), ZstdFrame::Short, "{size} {cut}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_small_frame_is_left_to_the_decoder() {
        let skipped = b"\x50\x2a\x4d\x18\x05\0\0\0hello";
        assert_eq!(look(skipped), ZstdFrame::Skip { len: 13 });
        assert_eq!(look(b"\x50\x2a\x4d\x18\x05\0"), ZstdFrame::Short);
        assert_eq!(look(b"hello"), ZstdFrame::Other);
        let unsized_frame = zstd::stream::encode_all(&b"hello"[..], 1).unwrap();
        assert_eq!(look(&unsized_frame), ZstdFrame::Other);
        let large = zstd::bulk::compress(&vec![0; MAX_FRAME + 1], 1).unwrap();
        assert_eq!(look(&large), ZstdFrame::Other);
    }
}
