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
        let mut w = [0u64; 2];
        for (word, half) in w.iter_mut().zip(self.0.chunks_exact(8)) {
            for b in half {
                *word = *word << 8 | u64::from(*b);
            }
        }
        w
    }

    /// The reverse of [`GpuUuid::words`].
    pub fn from_words(w: [u64; 2]) -> Self {
        let mut b = [0u8; 16];
        b[..8].copy_from_slice(&w[0].to_be_bytes());
        b[8..].copy_from_slice(&w[1].to_be_bytes());
        Self(b)
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        for (i, b) in self.0.iter().enumerate() {
            if matches!(i, 0 | 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{b:02x}")?;
        }
        Ok(())
    }
}

impl FromStr for GpuUuid {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let hex: String = s
            .strip_prefix("GPU-")
            .unwrap_or(s)
            .chars()
            .filter(|c| *c != '-')
            .collect();
        let mut b = [0u8; 16];
        if hex.len() != 32 || !hex.is_ascii() {
            return Err(format!("{s:?} is not a GPU UUID"));
        }
        for (i, byte) in b.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&hex[i * 2..i * 2 + 2], 16)
                .map_err(|_| format!("{s:?} is not a GPU UUID"))?;
        }
        Ok(Self(b))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_words_round_trip() {
        let text = "GPU-c0da0000-5130-4d00-8000-000000000003";
        let u: GpuUuid = text.parse().unwrap();
        assert_eq!(u, GpuUuid::numbered(3));
        assert_eq!(u.to_string(), text);
        assert_eq!(GpuUuid::from_words(u.words()), u);
        assert!("GPU-12".parse::<GpuUuid>().is_err());
        assert!(
            "GPU-g0da0000-5130-4d00-8000-000000000003"
                .parse::<GpuUuid>()
                .is_err()
        );
    }
}
