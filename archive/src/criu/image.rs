//! The frame of an image: magic numbers, then messages, each after its length.

use prost::Message;

use super::proto::{COMMON_MAGIC, SERVICE_MAGIC};

/// Messages read from all images of one checkpoint: a checkpoint of the largest hosts has fewer.
const MAX_MESSAGES: usize = 4_000_000;
/// Bytes of one message. CRIU's largest, a process with all of its timers and signals, has some 10 kB.
const MAX_MESSAGE_BYTES: usize = 16 << 20;

/// Why an image could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// The directory has no such file.
    #[error("{file}: not there; this is no complete checkpoint of CRIU")]
    Missing {
        /// The file.
        file: String,
    },
    /// The file has a head and no message.
    #[error("{file}: holds nothing; the checkpoint is damaged")]
    Empty {
        /// The file.
        file: String,
    },
    /// The magic number is another one.
    #[error(
        "{file}: starts with {found:#010x}, an image of that name with {expected:#010x}; the checkpoint is damaged"
    )]
    Magic {
        /// The file.
        file: String,
        /// What it starts with.
        found: u32,
        /// What it ought to.
        expected: u32,
    },
    /// The file ends early.
    #[error("{file}: ends in the middle of message {message}; the checkpoint is damaged")]
    Truncated {
        /// The file.
        file: String,
        /// Which message, from 0.
        message: usize,
    },
    /// A message cannot be decoded.
    #[error("{file}: message {message}: {reason}; the checkpoint is damaged")]
    Message {
        /// The file.
        file: String,
        /// Which message, from 0.
        message: usize,
        /// Which field, and what is wrong with it.
        reason: String,
    },
    /// Too much for one checkpoint.
    #[error(
        "{file}: {what}, more than a checkpoint has; the file is damaged or was made to do harm"
    )]
    TooMuch {
        /// The file.
        file: String,
        /// How much of what.
        what: String,
    },
}

/// What may still be read.
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

/// All messages of an image of one kind.
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

/// A message of one kind, then all others of another kind.
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
        // Since CRIU 1.5 all images but the inventory have a common magic ahead of their own.
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
