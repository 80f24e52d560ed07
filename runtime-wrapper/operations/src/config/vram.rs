//! Parses the table `[vram]` and the key `nvidia.vram`.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use cryopod_archive::vram::Codec;
use cryopod_cuda::vram::VramConfig;
use serde::Deserialize;

/// Whether GPU memory goes into VRAM files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VramMode {
    /// Where possible, else through CRIU.
    #[default]
    Auto,
    /// A checkpoint without VRAM files fails.
    On,
    /// Never.
    Off,
}

impl FromStr for VramMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "auto" => Ok(Self::Auto),
            "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            other => Err(format!("{other:?} is not one of auto, on, off")),
        }
    }
}

/// `[vram]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VramOptions {
    /// Threads; 0: one a core, at most 16.
    pub threads: usize,
    pub chunk_kib: Option<u32>,
    pub shard_mib: Option<u64>,
    pub codec: Codec,
    pub level: Option<i32>,
    /// `false`: a restore does not check digests.
    pub verify: Option<bool>,
    /// The checkpoint to build upon: `auto`, `off`, or an image directory.
    pub parent: Option<String>,
    /// Directories to search for parents that were moved.
    pub parents: Vec<PathBuf>,
}

impl VramOptions {
    /// Returns the plugin's form of these options. An error names the key.
    pub fn config(&self) -> Result<VramConfig, String> {
        let usual = VramConfig::default();
        let chunk = self.chunk_kib.map(|kib| kib.saturating_mul(1 << 10));
        let shard = self.shard_mib.map(|mib| mib.saturating_mul(1 << 20));
        let config = VramConfig {
            threads: self.threads,
            chunk_bytes: chunk.unwrap_or(usual.chunk_bytes),
            shard_bytes: shard.unwrap_or(usual.shard_bytes),
            codec: self.codec,
            level: self.level.unwrap_or(usual.level),
            check: self.verify.unwrap_or(usual.check),
            ..usual
        };
        config.validate()?;
        Ok(config)
    }
}

/// Checks what the annotation or `vram.parent` says.
pub fn check_parent(wish: &str) -> Result<(), String> {
    match wish.trim() {
        "auto" | "off" => Ok(()),
        path if Path::new(path).is_absolute() => Ok(()),
        other => Err(format!(
            "{other:?} is not one of auto, off, and no absolute path"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range() {
        for options in [
            VramOptions {
                chunk_kib: Some(100),
                ..VramOptions::default()
            },
            VramOptions {
                chunk_kib: Some(u32::MAX),
                ..VramOptions::default()
            },
            VramOptions {
                shard_mib: Some(0),
                ..VramOptions::default()
            },
            VramOptions {
                shard_mib: Some(u64::MAX),
                ..VramOptions::default()
            },
            VramOptions {
                threads: 1000,
                ..VramOptions::default()
            },
            VramOptions {
                level: Some(40),
                ..VramOptions::default()
            },
        ] {
            assert!(options.config().is_err(), "{options:?}");
        }
        assert_eq!(VramOptions::default().config(), Ok(VramConfig::default()));
    }
}
