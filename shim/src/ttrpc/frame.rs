//! Reads and writes ttrpc's frames: a header of ten bytes (length, stream, type, flags; big-endian), then the message.

use std::io::{self, Read, Write};

use containerd_shim::protos::ttrpc::proto::{
    MESSAGE_HEADER_LENGTH, MESSAGE_LENGTH_MAX, MESSAGE_TYPE_REQUEST, MessageHeader,
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Stream, type and flags.
    pub header: MessageHeader,
    pub body: Vec<u8>,
}

/// A message beyond ttrpc's limit, whose body is not kept. Peers with ttrpc before 1.2.6 send it. The error reads as the
/// stock server's.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error(
    "message length {} exceed maximum message size of {MESSAGE_LENGTH_MAX}",
    header.length
)]
pub struct Oversized {
    pub header: MessageHeader,
}

impl Frame {
    /// Returns true for a request, false for a response or data.
    pub fn is_request(&self) -> bool {
        self.header.type_ == MESSAGE_TYPE_REQUEST
    }

    /// Reads a frame; `None` at the end of the stream. Fails if the peer closes in the middle of a frame; with an
    /// [`Oversized`], after which the next frame can be read, if the frame is longer than ttrpc allows.
    pub fn read(from: &mut impl Read) -> io::Result<Option<Self>> {
        let mut head = [0u8; MESSAGE_HEADER_LENGTH];
        let mut got = 0;
        while got < head.len() {
            match from.read(&mut head[got..]) {
                Ok(0) if got == 0 => return Ok(None),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => got += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        let header = MessageHeader::from(&head[..]);
        let length = header.length as usize;
        if length > MESSAGE_LENGTH_MAX {
            let left = u64::from(header.length);
            if io::copy(&mut from.by_ref().take(left), &mut io::sink())? != left {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let oversized = Oversized { header };
            return Err(io::Error::new(io::ErrorKind::InvalidData, oversized));
        }
        let mut body = vec![0; length];
        from.read_exact(&mut body)?;
        Ok(Some(Self { header, body }))
    }

    /// Writes a frame in one piece, so that writers under one lock never interleave.
    pub fn write(&self, to: &mut impl Write) -> io::Result<()> {
        let mut header = self.header;
        header.length = u32::try_from(self.body.len()).map_err(io::Error::other)?;
        let mut bytes: Vec<u8> = header.into();
        bytes.extend_from_slice(&self.body);
        to.write_all(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let frame = Frame {
            header: MessageHeader::new_request(3, 2),
            body: b"hi".to_vec(),
        };
        let mut bytes = Vec::new();
        frame.write(&mut bytes).unwrap();
        assert_eq!(bytes, [0, 0, 0, 2, 0, 0, 0, 3, 1, 0, b'h', b'i']);
        assert_eq!(Frame::read(&mut &bytes[..]).unwrap(), Some(frame));
        assert_eq!(Frame::read(&mut &bytes[..0]).unwrap(), None);
        for cut in 1..bytes.len() {
            assert!(Frame::read(&mut &bytes[..cut]).is_err(), "{cut}");
        }
    }

    #[test]
    fn a_message_beyond_the_limit_is_read_away() {
        let mut bytes = vec![0, 0x40, 0, 1, 0, 0, 0, 1, 1, 0];
        bytes.resize(bytes.len() + MESSAGE_LENGTH_MAX + 1, 0);
        assert_eq!(oversized(&bytes[..bytes.len() - 1]), None);
        bytes.extend([0, 0, 0, 1, 0, 0, 0, 3, 1, 0, b'x']);
        let mut from = &bytes[..];
        let e = Frame::read(&mut from).unwrap_err();
        assert_eq!(
            e.to_string(),
            "message length 4194305 exceed maximum message size of 4194304"
        );
        assert_eq!(e.downcast::<Oversized>().unwrap().header.stream_id, 1);
        assert_eq!(Frame::read(&mut from).unwrap().unwrap().body, b"x");
        // It is not allocated either.
        let longest = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 1, 0];
        assert_eq!(oversized(&longest), None);
    }

    fn oversized(mut bytes: &[u8]) -> Option<Oversized> {
        Frame::read(&mut bytes).unwrap_err().downcast().ok()
    }
}
