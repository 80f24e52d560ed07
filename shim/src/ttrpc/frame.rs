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

impl Frame {
    /// Returns true for a request, false for a response or data.
    pub fn is_request(&self) -> bool {
        self.header.type_ == MESSAGE_TYPE_REQUEST
    }

    /// Reads a frame; `None` at the end of the stream. Fails if the peer closes in the middle of a frame, or states a
    /// length that ttrpc does not allow.
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
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "a ttrpc message of {length} bytes; at most {MESSAGE_LENGTH_MAX} are allowed"
                ),
            ));
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
    fn a_length_beyond_the_protocol_is_refused_unread() {
        let bytes = [0xff, 0xff, 0xff, 0xff, 0, 0, 0, 1, 1, 0];
        let e = Frame::read(&mut &bytes[..]).unwrap_err();
        assert!(e.to_string().contains("4294967295"), "{e}");
    }
}
