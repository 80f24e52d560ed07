//! GPU UUIDs as the driver prints them: `GPU-` and five groups of hexadecimal digits.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct GpuUuid(pub [u8; 16]);

impl GpuUuid {
    /// A UUID made from a number, for GPUs that are configured without one.
    pub fn numbered(n: u8) -> Self {
        let mut b = *b"\xc0\xda\x00\x00\x51\x30\x4d\x00\x80\x00\x00\x00\x00\x00\x00\x00";
        b[15] = n;
        Self(b)
    }

    pub fn words(self) -> [u64; 2] {
        let all = u128::from_be_bytes(self.0);
        [(all >> 64) as u64, all as u64]
    }

    /// The reverse of [`GpuUuid::words`].
    pub fn from_words(w: [u64; 2]) -> Self {
        Self((u128::from(w[0]) << 64 | u128::from(w[1])).to_be_bytes())
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = format!("{:032x}", u128::from_be_bytes(self.0));
        let groups = [0..8, 8..12, 12..16, 16..20, 20..32].map(|group| &hex[group]);
        write!(f, "GPU-{}", groups.join("-"))
    }
}

impl FromStr for GpuUuid {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> anyhow::Result<Self> {
        let hex = s.strip_prefix("GPU-").unwrap_or(s).replace('-', "");
        match u128::from_str_radix(&hex, 16) {
            Ok(all) if hex.len() == 32 => Ok(Self(all.to_be_bytes())),
            _ => anyhow::bail!("{s:?} is not a GPU UUID"),
        }
    }
}

impl Serialize for GpuUuid {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GpuUuid {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        String::deserialize(d)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}
