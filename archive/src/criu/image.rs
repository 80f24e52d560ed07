//! Decodes the frame of an image: magic numbers, then messages, each after its length.

use prost::Message;

use super::proto::{COMMON_MAGIC, SERVICE_MAGIC};

/// Most messages in all images of one checkpoint. Checkpoints of the largest hosts have fewer.
const MAX_MESSAGES: usize = 4_000_000;
/// Most bytes of one message. CRIU's largest, a process with all of its timers and signals, has about 10 kB.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    #[error("{file}: not there; this is no complete checkpoint of CRIU")]
    Missing { file: String },
    #[error("{file}: holds nothing; the checkpoint is damaged")]
    Empty { file: String },
    #[error(
        "{file}: starts with {found:#010x}, an image of that name with {expected:#010x}; the checkpoint is damaged"
    )]
    Magic {
        file: String,
        found: u32,
        expected: u32,
    },
    #[error("{file}: ends in the middle of message {message}; the checkpoint is damaged")]
    Truncated {
        file: String,
        /// The message's number, from 0.
        message: usize,
    },
    #[error("{file}: message {message}: {reason}; the checkpoint is damaged")]
    Message {
        file: String,
        message: usize,
        /// The field, and what is wrong with it.
        reason: String,
    },
    #[error(
        "{file}: {what}, more than a checkpoint has; the file is damaged or was made to do harm"
    )]
    TooMuch { file: String, what: String },
}

/// The remaining budget of messages and bytes.
#[derive(Debug)]
pub(super) struct Bounds {
    messages: usize,
}

impl Default for Bounds {
    fn default() -> Self {
        Self {
            messages: MAX_MESSAGES,
        }
    }
}

/// Decodes an image whose messages are all of one kind.
pub(super) fn messages<M: Message + Default>(
    file: &str,
    content: &[u8],
    magic: u32,
    bounds: &mut Bounds,
) -> Result<Vec<M>, ImageError> {
    let mut frames = Frames::open(file, content, magic, bounds)?;
    let mut all = Vec::new();
    while let Some(message) = frames.next()? {
        all.push(message);
    }
    Ok(all)
}

/// Decodes an image with one message of kind `H`, followed by messages of kind `M`.
pub(super) fn head_and_messages<H: Message + Default, M: Message + Default>(
    file: &str,
    content: &[u8],
    magic: u32,
    bounds: &mut Bounds,
) -> Result<(H, Vec<M>), ImageError> {
    let mut frames = Frames::open(file, content, magic, bounds)?;
    let head = frames
        .next()?
        .ok_or_else(|| ImageError::Empty { file: file.into() })?;
    let mut all = Vec::new();
    while let Some(message) = frames.next()? {
        all.push(message);
    }
    Ok((head, all))
}

struct Frames<'a> {
    file: &'a str,
    rest: &'a [u8],
    at: usize,
    bounds: &'a mut Bounds,
}

impl<'a> Frames<'a> {
    fn open(
        file: &'a str,
        content: &'a [u8],
        expected: u32,
        bounds: &'a mut Bounds,
    ) -> Result<Self, ImageError> {
        let truncated = || ImageError::Truncated {
            file: file.into(),
            message: 0,
        };
        let (mut found, mut rest) = number(content).ok_or_else(truncated)?;
        // Since CRIU 1.5 every image but the inventory starts with a common magic, followed by its own.
        if matches!(found, COMMON_MAGIC | SERVICE_MAGIC) {
            (found, rest) = number(rest).ok_or_else(truncated)?;
        }
        if found != expected {
            return Err(ImageError::Magic {
                file: file.into(),
                found,
                expected,
            });
        }
        Ok(Self {
            file,
            rest,
            at: 0,
            bounds,
        })
    }

    fn next<M: Message + Default>(&mut self) -> Result<Option<M>, ImageError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let truncated = || ImageError::Truncated {
            file: self.file.into(),
            message: self.at,
        };
        let (len, rest) = number(self.rest).ok_or_else(truncated)?;
        let len = len as usize;
        if len > MAX_MESSAGE_BYTES {
            return Err(self.too_much(format!("a message of {len} bytes")));
        }
        if self.bounds.messages == 0 {
            return Err(self.too_much(format!("{MAX_MESSAGES} messages in all images")));
        }
        self.bounds.messages -= 1;
        let body = rest.get(..len).ok_or_else(truncated)?;
        let message = M::decode(body).map_err(|e| ImageError::Message {
            file: self.file.into(),
            message: self.at,
            reason: e.to_string(),
        })?;
        self.rest = &rest[len..];
        self.at += 1;
        Ok(Some(message))
    }

    fn too_much(&self, what: String) -> ImageError {
        ImageError::TooMuch {
            file: self.file.into(),
            what,
        }
    }
}

fn number(from: &[u8]) -> Option<(u32, &[u8])> {
    let (bytes, rest) = from.split_first_chunk::<4>()?;
    Some((u32::from_le_bytes(*bytes), rest))
}
