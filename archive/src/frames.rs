//! Finds where zstd frames end without decompressing them (RFC 8878, section 3.1).

/// Largest frame that a worker gets as a whole, in bytes, compressed or not.
pub(crate) const MAX_FRAME: usize = 2 << 20;

/// What a buffer starts with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frame {
    /// More bytes are needed.
    Short,
    /// A frame of this length whose content has a known, small size.
    Whole { len: usize, content: usize },
    /// A skippable frame. The length includes its header.
    Skip { len: u64 },
    /// Not a frame, or a frame that is too large to take as a whole, or one that does not state its size.
    Other,
}

/// Examines the start of a buffer.
pub(crate) fn look(buf: &[u8]) -> Frame {
    let Some((magic, rest)) = buf.split_first_chunk::<4>() else {
        return Frame::Short;
    };
    match u32::from_le_bytes(*magic) {
        0xfd2f_b528 => data_frame(buf).unwrap_or(Frame::Short),
        0x184d_2a50..=0x184d_2a5f => match rest.first_chunk::<4>() {
            Some(len) => Frame::Skip {
                len: 8 + u64::from(u32::from_le_bytes(*len)),
            },
            None => Frame::Short,
        },
        _ => Frame::Other,
    }
}

/// `None` if the buffer ends too early.
fn data_frame(buf: &[u8]) -> Option<Frame> {
    let descriptor = *buf.get(4)?;
    let single = descriptor & 0x20 != 0;
    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let size_bytes = match descriptor >> 6 {
        0 => usize::from(single),
        1 => 2,
        2 => 4,
        _ => 8,
    };
    if size_bytes == 0 || dictionary != 0 || descriptor & 8 != 0 {
        return Some(Frame::Other);
    }
    let mut at = 5 + usize::from(!single);
    let mut number = [0; 8];
    number[..size_bytes].copy_from_slice(buf.get(at..at + size_bytes)?);
    let content = u64::from_le_bytes(number) + if size_bytes == 2 { 256 } else { 0 };
    if content > MAX_FRAME as u64 {
        return Some(Frame::Other);
    }
    at += size_bytes;
    loop {
        let header = buf.get(at..at + 3)?;
        let header = u32::from_le_bytes([header[0], header[1], header[2], 0]);
        let size = (header >> 3) as usize;
        at += 3 + match header >> 1 & 3 {
            1 => 1, // one byte, repeated
            3 => return Some(Frame::Other),
            _ => size,
        };
        if at > MAX_FRAME {
            return Some(Frame::Other);
        }
        if header & 1 != 0 {
            break;
        }
    }
    let len = at + if descriptor & 4 != 0 { 4 } else { 0 };
    if len > buf.len() {
        return None;
    }
    Some(Frame::Whole {
        len,
        content: content as usize,
    })
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
                let expected = Frame::Whole {
                    len: frame.len(),
                    content: size,
                };
                assert_eq!(look(&frame), expected);
                assert_eq!(look(&[&frame[..], b"more"].concat()), expected);
                for cut in (0..frame.len()).step_by(frame.len() / 50 + 1) {
                    assert_eq!(look(&frame[..cut]), Frame::Short, "{size} {cut}");
                }
            }
        }
    }

    #[test]
    fn what_is_no_small_frame_is_left_to_the_decoder() {
        assert_eq!(look(b"\x50\x2a\x4d\x18\x05\0\0\0"), Frame::Skip { len: 13 });
        assert_eq!(look(b"\x50\x2a\x4d\x18\x05\0"), Frame::Short);
        assert_eq!(look(b"hello"), Frame::Other);
        let unsized_frame = zstd::stream::encode_all(&b"hello"[..], 1).unwrap();
        assert_eq!(look(&unsized_frame), Frame::Other);
        let large = zstd::bulk::compress(&vec![0; MAX_FRAME + 1], 1).unwrap();
        assert_eq!(look(&large), Frame::Other);
    }
}
