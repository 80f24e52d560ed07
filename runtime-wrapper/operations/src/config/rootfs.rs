//! `[rootfs]`.

use serde::Deserialize;

/// `[rootfs]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Whose changes are carried.
    pub carry: Carry,
    /// What a restore unpacks at most, in GiB: checkpoints may be strangers'.
    pub max_gib: u64,
    /// Likewise, files and directories.
    pub max_files: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            carry: Carry::default(),
            max_gib: 64,
            max_files: 1_000_000,
        }
    }
}

impl Options {
    pub(crate) fn max_bytes(&self) -> u64 {
        self.max_gib.saturating_mul(1 << 30)
    }
}

/// `rootfs.carry`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Carry {
    /// docker's and nerdctl's.
    #[default]
    Auto,
    /// All containers'.
    Always,
    /// Nobody's.
    Never,
}
