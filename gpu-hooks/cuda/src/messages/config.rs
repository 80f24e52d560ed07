//! Reads the plugin's configuration: `cryopod_nvidia.json`, written by the runtime wrapper into the private plugin
//! directory of one operation, beside the symlink to the plugin.
//!
//! A missing or invalid file fails the operation: with a silently disabled plugin CRIU would dump a process whose GPU
//! state is lost.

use super::buffers::VramConfig;
use crate::gpus::gpu::GpuPair;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Name of the file, beside the plugin as CRIU loaded it (links not resolved).
pub const FILE_NAME: &str = "cryopod_nvidia.json";
/// The version written and the only one read.
pub const VERSION: u32 = 1;
pub const MAX_BYTES: u64 = 1 << 20;

const MAX_PIDS: usize = 1 << 16;
const MAX_GPUS: usize = 1024;
/// How long NCCL's ranks may take to come level, if nothing else is configured.
pub const NCCL_QUIESCE_MS: u64 = 30_000;
/// The largest value of a time limit.
pub const MAX_TIMEOUT_MS: u64 = 24 * 3600 * 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    Checkpoint,
    Restore,
    /// `criu pre-dump`: the plugin does nothing.
    PreDump,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginConfig {
    pub version: u32,
    /// CRIU's operation; checked against the stage CRIU announces.
    pub operation: Operation,
    /// The agent's socket (absolute). Not used by [`Operation::PreDump`].
    pub socket: PathBuf,
    /// Checkpoint only: the container goes on running afterwards (`--leave-running`).
    #[serde(default)]
    pub leave_running: bool,
    /// When this file exists at any hook, the hook fails and CRIU rolls the dump back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abort_file: Option<PathBuf>,
    /// How long the driver may wait for a process's GPU work to finish.
    #[serde(default = "default_lock_timeout_ms")]
    pub lock_timeout_ms: u64,
    /// How long any other single driver call (checkpoint, restore, unlock) may take.
    #[serde(default = "default_step_timeout_ms")]
    pub step_timeout_ms: u64,
    /// Checkpoint only: how long NCCL's ranks may take to come level, in processes with the preload library.
    #[serde(default = "default_nccl_quiesce_ms")]
    pub nccl_quiesce_ms: u64,
    /// Checkpoint only: GPU memory that is still shared when the communicators are down does not fail the dump.
    #[serde(default)]
    pub allow_shared: bool,
    /// Checkpoint only: host pids of the CUDA processes in the plan. The first hook locks them together; the plugin
    /// finds others by itself.
    #[serde(default)]
    pub pids: Vec<i32>,
    /// Checkpoint only: host pids whose CUDA calls were locked when the container was paused. Its cgroup is frozen, so
    /// their driver cannot be asked before CRIU has stopped them. They run again after a restore.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub locked: Vec<i32>,
    /// Restore only: every GPU of the checkpoint and its replacement.
    #[serde(default)]
    pub gpu_map: Vec<GpuPair>,
    /// Path for [`crate::messages::report::PluginReport`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report: Option<PathBuf>,
    /// Checkpoint only: when this file exists, CRIU asks at `post-dump` whether the checkpoint may become final, and
    /// whoever answers waits for the VRAM files. Else the plugin waits itself, earlier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action_script_file: Option<PathBuf>,
    /// Checkpoint only: the container goes on before the VRAM files are written, and whoever asked for it waits for them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub copy_later: bool,
    /// Settings for VRAM files, which are used where possible; absent: never.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vram: Option<VramConfig>,
    /// Tests only (a plugin built with the feature `test-hooks`): the hook that panics, by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub test_panic_in: Option<String>,
}

fn default_lock_timeout_ms() -> u64 {
    10_000
}

fn default_nccl_quiesce_ms() -> u64 {
    NCCL_QUIESCE_MS
}

fn default_step_timeout_ms() -> u64 {
    600_000
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("not a plugin configuration: {0}")]
    Json(#[from] serde_json::Error),
    #[error("invalid plugin configuration: {0}")]
    Invalid(String),
}

impl PluginConfig {
    pub fn new(operation: Operation, socket: impl Into<PathBuf>) -> Self {
        Self {
            version: VERSION,
            operation,
            socket: socket.into(),
            leave_running: false,
            abort_file: None,
            lock_timeout_ms: default_lock_timeout_ms(),
            step_timeout_ms: default_step_timeout_ms(),
            nccl_quiesce_ms: NCCL_QUIESCE_MS,
            allow_shared: false,
            pids: Vec::new(),
            locked: Vec::new(),
            gpu_map: Vec::new(),
            report: None,
            action_script_file: None,
            copy_later: false,
            vram: None,
            test_panic_in: None,
        }
    }

    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let bytes = cryopod_host::files::read_bounded(path, MAX_BYTES).map_err(|source| {
            ConfigError::Read {
                path: path.to_owned(),
                source,
            }
        })?;
        Self::parse(&bytes)
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, ConfigError> {
        let config: Self = serde_json::from_slice(bytes)?;
        config.validate()?;
        Ok(config)
    }

    pub fn validate(&self) -> Result<(), ConfigError> {
        let invalid = |what: String| Err(ConfigError::Invalid(what));
        if self.version != VERSION {
            return invalid(format!(
                "version {} (this plugin reads {VERSION})",
                self.version
            ));
        }
        if !self.socket.is_absolute() {
            return invalid(format!(
                "socket `{}` is not absolute",
                self.socket.display()
            ));
        }
        for (name, value) in [
            ("lock_timeout_ms", self.lock_timeout_ms),
            ("step_timeout_ms", self.step_timeout_ms),
            ("nccl_quiesce_ms", self.nccl_quiesce_ms),
        ] {
            if value == 0 || value > MAX_TIMEOUT_MS {
                return invalid(format!("{name} {value} is not within 1..={MAX_TIMEOUT_MS}"));
            }
        }
        for (name, pids) in [("pids", &self.pids), ("locked", &self.locked)] {
            if pids.len() > MAX_PIDS || pids.iter().any(|pid| *pid <= 0) {
                return invalid(format!("{name}: too many, or not positive"));
            }
        }
        if self.gpu_map.len() > MAX_GPUS {
            return invalid("gpu_map: too many GPUs".into());
        }
        for (i, pair) in self.gpu_map.iter().enumerate() {
            let others = &self.gpu_map[..i];
            if others
                .iter()
                .any(|o| o.old == pair.old || o.new == pair.new)
            {
                return invalid(format!("gpu_map: {} or {} named twice", pair.old, pair.new));
            }
        }
        if let Some(vram) = &self.vram {
            vram.validate().map_err(ConfigError::Invalid)?;
        }
        if self.operation != Operation::Restore && !self.gpu_map.is_empty() {
            return invalid("gpu_map: only a restore has one".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_short_form_gets_defaults() {
        let text = br#"{"version":1,"operation":"pre-dump","socket":"/run/x.sock"}"#;
        let config = PluginConfig::parse(text).unwrap();
        assert_eq!(config, PluginConfig::new(Operation::PreDump, "/run/x.sock"));
    }

    #[test]
    fn out_of_range_values_are_refused() {
        for text in [
            r#"{"version":2,"operation":"restore","socket":"/s"}"#,
            r#"{"version":1,"operation":"restore","socket":"s"}"#,
            r#"{"version":1,"operation":"checkpoint","socket":"/s","lock_timeout_ms":0}"#,
            r#"{"version":1,"operation":"checkpoint","socket":"/s","pids":[-1]}"#,
            r#"{"version":1,"operation":"checkpoint","socket":"/s","locked":[0]}"#,
            r#"{"version":1,"operation":"checkpoint","socket":"/s","gpu_map":[
                {"old":"GPU-00000000-0000-0000-0000-000000000000","new":"GPU-00000000-0000-0000-0000-000000000000"}]}"#,
            r#"{"version":1,"operation":"restore","socket":"/s","gpu_map":[{"old":"x","new":"y"}]}"#,
            r#"{"version":1,"operation":"restore","socket":"/s","gpu_map":[
                {"old":"GPU-00000000-0000-0000-0000-000000000000","new":"GPU-00000000-0000-0000-0000-000000000001"},
                {"old":"GPU-00000000-0000-0000-0000-000000000002","new":"GPU-00000000-0000-0000-0000-000000000001"}]}"#,
        ] {
            assert!(PluginConfig::parse(text.as_bytes()).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn written_is_read_back(pids in proptest::collection::vec(1..i32::MAX, 0..8), leave: bool) {
            let mut config = PluginConfig::new(Operation::Checkpoint, "/run/cryopod/1/driver.sock");
            config.pids = pids;
            config.leave_running = leave;
            let text = serde_json::to_vec(&config).unwrap();
            prop_assert_eq!(PluginConfig::parse(&text).unwrap(), config);
        }
    }
}
