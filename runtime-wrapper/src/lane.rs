//! The lane, the wrapper's part: whether and how it is used, and waiting for it before a checkpoint is sealed.

use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, Instant};

use cryopod_archive::lane::{Codec, MAX_CHUNK, MIN_CHUNK};
use cryopod_archive::seal::Seal;
use cryopod_gpu_hooks::cuda::client::Client;
use cryopod_gpu_hooks::cuda::lane::{LaneConfig, LaneDone};
use cryopod_gpu_hooks::cuda::protocol::{ErrorKind, Op, Outcome};
use cryopod_gpu_hooks::spec::Spec;
use serde::Deserialize;

use crate::Error;
use crate::config::Config;
use crate::op::Operation;

/// The annotation that overrides `nvidia.lane`.
pub const ANNOTATION: &str = "dev.cryopod.lane";
/// Exists once CRIU has asked at the gate, and so will ask before the checkpoint becomes final.
pub const GATE_FILE: &str = "gate-asked";
/// How much later than its own limit the agent's answer may come.
const MARGIN: Duration = Duration::from_secs(10);

/// Whether GPU memory goes by the lane.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Where it can, else through CRIU.
    #[default]
    Auto,
    /// A checkpoint without it is a failure.
    On,
    /// Never.
    Off,
}

impl FromStr for Mode {
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

/// `[lane]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// Threads; 0: one a core, at most 16.
    pub threads: usize,
    /// Size of a chunk in KiB.
    pub chunk_kib: Option<u32>,
    /// Size of a shard in MiB.
    pub shard_mib: Option<u64>,
    /// Compression.
    pub codec: Codec,
    /// zstd's level.
    pub level: Option<i32>,
    /// `false`: a restore does not check digests.
    pub verify: Option<bool>,
}

impl Options {
    /// As the plugin gets them.
    ///
    /// # Errors
    /// A text that names the key.
    pub fn config(&self) -> Result<LaneConfig, String> {
        let usual = LaneConfig::default();
        let chunk_bytes = self
            .chunk_kib
            .map_or(Some(usual.chunk_bytes), |kib| kib.checked_mul(1024));
        let chunk_bytes = chunk_bytes
            .filter(|b| b.is_power_of_two() && (MIN_CHUNK..=MAX_CHUNK).contains(b))
            .ok_or("chunk_kib is not a power of two between 64 and 65536")?;
        let shard_bytes = self
            .shard_mib
            .map_or(Some(usual.shard_bytes), |mib| mib.checked_mul(1 << 20));
        let shard_bytes = shard_bytes
            .filter(|b| *b > 0)
            .ok_or("shard_mib is out of range")?;
        let config = LaneConfig {
            threads: self.threads,
            chunk_bytes,
            shard_bytes,
            codec: self.codec,
            level: self.level.unwrap_or(usual.level),
            check: self.verify.unwrap_or(usual.check),
            ..usual
        };
        config.validate()?;
        Ok(config)
    }
}

/// For a checkpoint; `None`: without the lane.
///
/// # Errors
/// [`Error::Failed`] names the annotation.
pub fn checkpoint(config: &Config, spec: &Spec) -> Result<Option<LaneConfig>, Error> {
    let wrong = |what: String| Error::Failed(format!("{ANNOTATION}: {what}. Nothing was touched"));
    let mode = match spec.annotation(ANNOTATION) {
        Some(text) => text.parse().map_err(wrong)?,
        None => config.nvidia.lane,
    };
    if mode == Mode::Off {
        return Ok(None);
    }
    let lane = config.lane.config().map_err(wrong)?;
    Ok(Some(LaneConfig {
        required: mode == Mode::On,
        ..lane
    }))
}

/// For a restore of the checkpoint in this folder.
///
/// # Errors
/// [`Error`].
pub fn restore(config: &Config, seal: &Seal, folder: &Path) -> Result<LaneConfig, Error> {
    let lane = config.lane.config().map_err(Error::Failed)?;
    let what = format!("{}: the image folder cannot be read", folder.display());
    Ok(LaneConfig {
        digest: seal.gpu.lane.as_ref().map(|facts| facts.digest.clone()),
        folder: Some(folder.canonicalize().map_err(Error::io(what))?),
        ..lane
    })
}

/// How far the lane is.
#[derive(Debug)]
pub enum Progress {
    /// There is nothing to wait for.
    Unused,
    /// All of it is on the disk.
    Durable(LaneDone),
    /// It is still being written.
    Writing,
}

/// Waits for the lane of this operation.
///
/// # Errors
/// A text for a user: the checkpoint is not complete.
pub fn wait(op: &Operation, limit: Duration) -> Result<Progress, String> {
    let lost =
        |error: String| format!("the driver agent, which writes the GPU memory, is gone: {error}");
    let socket = op.file(crate::agent::SOCKET);
    if !socket.exists() {
        return Ok(Progress::Unused);
    }
    let mut client = Client::connect(&socket).map_err(|e| lost(e.to_string()))?;
    let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    let reply = client
        .call(Op::LaneWait { limit_ms }, limit.saturating_add(MARGIN))
        .map_err(|e| lost(e.to_string()))?;
    match reply.outcome {
        Outcome::Lane(None) => Ok(Progress::Unused),
        Outcome::Lane(Some(done)) => Ok(Progress::Durable(done)),
        Outcome::Error(error) if error.kind == ErrorKind::TimedOut => Ok(Progress::Writing),
        Outcome::Error(error) => Err(error.message),
        other => Err(format!("unexpected answer of the driver agent: {other:?}")),
    }
}

/// Waits for the lane, and notes in the seal what there is of it. False: it is still being written.
///
/// # Errors
/// As [`wait`].
pub fn note(
    op: &Operation,
    limit: Duration,
    since: Instant,
    seal: &mut Seal,
) -> Result<bool, String> {
    match wait(op, limit)? {
        Progress::Unused => {}
        Progress::Writing => return Ok(false),
        Progress::Durable(done) => {
            seal.timings.durable_us = u64::try_from(since.elapsed().as_micros()).ok();
            seal.gpu.lane = Some(done.facts);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_annotation_comes_before_the_configuration() {
        let mut config = Config::default();
        let with = |value: &str| Spec::from_json(json!({"annotations": {ANNOTATION: value}}));
        let none = Spec::from_json(json!({}));
        assert!(!checkpoint(&config, &none).unwrap().unwrap().required);
        assert!(checkpoint(&config, &with("on")).unwrap().unwrap().required);
        assert!(checkpoint(&config, &with("off")).unwrap().is_none());
        config.nvidia.lane = Mode::Off;
        assert!(checkpoint(&config, &none).unwrap().is_none());
        assert!(checkpoint(&config, &with("auto")).unwrap().is_some());
        let error = checkpoint(&config, &with("yes")).unwrap_err().to_string();
        assert!(error.starts_with("dev.cryopod.lane: \"yes\""), "{error}");
    }

    #[test]
    fn options_out_of_range() {
        for options in [
            Options {
                chunk_kib: Some(100),
                ..Options::default()
            },
            Options {
                chunk_kib: Some(u32::MAX),
                ..Options::default()
            },
            Options {
                shard_mib: Some(0),
                ..Options::default()
            },
            Options {
                shard_mib: Some(u64::MAX),
                ..Options::default()
            },
            Options {
                threads: 1000,
                ..Options::default()
            },
            Options {
                level: Some(40),
                ..Options::default()
            },
        ] {
            assert!(options.config().is_err(), "{options:?}");
        }
        assert_eq!(Options::default().config(), Ok(LaneConfig::default()));
    }
}
