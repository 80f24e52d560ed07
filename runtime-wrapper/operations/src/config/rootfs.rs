//! Parses the table `[rootfs]`.

use serde::Deserialize;

/// `[rootfs]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RootfsOptions {
    /// Which containers' changes of files a checkpoint carries.
    pub carry: Carry,
    /// The most that a restore unpacks, in GiB: checkpoints may come from strangers.
    pub max_gib: u64,
    /// The most files and directories that a restore unpacks.
    pub max_files: u64,
}

impl Default for RootfsOptions {
    fn default() -> Self {
        Self {
            carry: Carry::default(),
            max_gib: 64,
            max_files: 1_000_000,
        }
    }
}

impl RootfsOptions {
    pub(crate) fn max_bytes(&self) -> u64 {
        self.max_gib.saturating_mul(1 << 30)
    }
}

/// Whether a checkpoint carries the container's changed files.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Carry {
    /// Those of docker and nerdctl, and of containers that go on running.
    #[default]
    Auto,
    /// Those of all containers.
    Always,
    /// None.
    Never,
}
