//! Defines GPU identity: the UUID that NVIDIA's driver and tools print, and the map from old to new GPUs.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a GPU UUID (expected GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)")]
pub struct BadUuid(String);

/// The UUID of a whole GPU, printed as `GPU-8-4-4-4-12` hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuUuid(pub [u8; 16]);

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for GpuUuid {
    type Err = BadUuid;

    fn from_str(text: &str) -> Result<Self, BadUuid> {
        let bad = || BadUuid(text.chars().take(64).collect());
        let hex = text.strip_prefix("GPU-").ok_or_else(bad)?.as_bytes();
        if hex.len() != 36 {
            return Err(bad());
        }
        let mut bytes = [0u8; 16];
        let mut digits = 0usize;
        for (i, c) in hex.iter().enumerate() {
            if matches!(i, 8 | 13 | 18 | 23) {
                if *c != b'-' {
                    return Err(bad());
                }
                continue;
            }
            let value = (*c as char).to_digit(16).ok_or_else(bad)? as u8;
            bytes[digits / 2] = (bytes[digits / 2] << 4) | value;
            digits += 1;
        }
        Ok(Self(bytes))
    }
}

impl Serialize for GpuUuid {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for GpuUuid {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuPair {
    pub old: GpuUuid,
    pub new: GpuUuid,
}

/// Returns the map for the driver: `None` when every GPU stays where it was (drivers before 580 know no map, and later
/// ones need none then).
pub fn effective_map(map: &[GpuPair]) -> Option<&[GpuPair]> {
    map.iter().any(|pair| pair.old != pair.new).then_some(map)
}

/// Returns where a GPU goes: itself if the map does not name it.
pub fn mapped(gpu: GpuUuid, map: &[GpuPair]) -> GpuUuid {
    let pair = map.iter().find(|pair| pair.old == gpu);
    pair.map_or(gpu, |pair| pair.new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn uuid_text_round_trips(bytes: [u8; 16]) {
            let uuid = GpuUuid(bytes);
            prop_assert_eq!(uuid.to_string().parse::<GpuUuid>(), Ok(uuid));
        }

        #[test]
        fn uuid_parser_takes_any_text(text in ".{0,60}") {
            if let Ok(uuid) = text.parse::<GpuUuid>() {
                prop_assert_eq!(uuid.to_string(), text.to_lowercase().replace("gpu-", "GPU-"));
            }
        }
    }

    #[test]
    fn an_identity_map_is_no_map() {
        let (a, b) = (GpuUuid([1; 16]), GpuUuid([2; 16]));
        assert_eq!(effective_map(&[GpuPair { old: a, new: a }]), None);
        let swap = [GpuPair { old: a, new: b }, GpuPair { old: b, new: a }];
        assert_eq!(effective_map(&swap), Some(&swap[..]));
        assert_eq!(effective_map(&[]), None);
    }
}
