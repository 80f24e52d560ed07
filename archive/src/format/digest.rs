//! Parses and computes SHA-256 digests of blobs.

use std::fmt;
use std::io::{self, BufReader, Read};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::Bad;

/// A sha256 digest; `sha256:HEX` in text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

impl Digest {
    /// Returns the digest without `sha256:`, 64 hexadecimal digits.
    pub fn hex(&self) -> &str {
        &self.0
    }

    pub fn of(data: &[u8]) -> Self {
        Self::from_hash(Sha256::new_with_prefix(data))
    }

    /// Reads all data, and returns its digest.
    pub fn of_reader(data: impl Read) -> io::Result<Self> {
        let mut hash = Sha256::new();
        io::copy(&mut BufReader::with_capacity(1 << 20, data), &mut hash)?;
        Ok(Self::from_hash(hash))
    }

    pub fn from_hash(hash: Sha256) -> Self {
        Self::from_bytes(hash.finalize().into())
    }

    /// Wraps a hash that was computed elsewhere.
    pub fn from_bytes(hash: [u8; 32]) -> Self {
        use fmt::Write as _;
        let mut hex = String::with_capacity(64);
        for byte in hash {
            let _ = write!(hex, "{byte:02x}");
        }
        Self(hex)
    }

    /// Parses `sha256:HEX`. Fails with [`Bad::Digest`] for anything else; other algorithms are refused.
    pub fn parse(text: &str) -> Result<Self, Bad> {
        match text.strip_prefix("sha256:") {
            Some(hex)
                if hex.len() == 64
                    && hex.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')) =>
            {
                Ok(Self(hex.into()))
            }
            _ => Err(Bad::Digest(text.chars().take(100).collect())),
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sha256:{}", self.0)
    }
}

impl TryFrom<String> for Digest {
    type Error = Bad;
    fn try_from(text: String) -> Result<Self, Bad> {
        Self::parse(&text)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}
