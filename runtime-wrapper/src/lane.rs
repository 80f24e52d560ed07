//! The lane, the wrapper's part: whether and how it is used, and waiting for it before a checkpoint is sealed.

pub mod parent;

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use cryopod_archive::lane::{Codec, Digest, Lane, MAX_CHUNK, MIN_CHUNK};
use cryopod_archive::names;
use cryopod_archive::seal::Seal;
use cryopod_gpu_hooks::cuda::client::Client;
use cryopod_gpu_hooks::cuda::lane::memory::available_to;
use cryopod_gpu_hooks::cuda::lane::{LaneConfig, LaneDone, Wanted};
use cryopod_gpu_hooks::cuda::protocol::{ErrorKind, Op, Outcome};
use cryopod_gpu_hooks::cuda::report::GpuUser;
use cryopod_gpu_hooks::spec::Spec;
use serde::Deserialize;

use crate::Error;
use crate::argv::Invocation;
use crate::config::Config;
use crate::op::Operation;
use crate::setup::Setup;

/// The annotation that overrides `nvidia.lane`.
pub const ANNOTATION: &str = "dev.cryopod.lane";
/// Exists once CRIU has asked at the gate, and so will ask before the checkpoint becomes final.
pub const GATE_FILE: &str = "gate-asked";
/// Host memory that must be available at a checkpoint beside a copy of the GPU memory, in bytes.
const SPARE_BYTES: u64 = 1 << 30;
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
    /// What a checkpoint builds upon: `auto`, `off`, or an image folder.
    pub parent: Option<String>,
    /// Folders in which parents are searched that are not where they were.
    pub parents: Vec<PathBuf>,
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
pub fn checkpoint(
    config: &Config,
    spec: &Spec,
    inv: &Invocation,
) -> Result<Option<LaneConfig>, Error> {
    let Some(lane) = wanted(config, spec)? else {
        return Ok(None);
    };
    let parent = parent::choose(config, spec, inv)?;
    Ok(Some(LaneConfig { parent, ..lane }))
}

fn wanted(config: &Config, spec: &Spec) -> Result<Option<LaneConfig>, Error> {
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
        search: config.search(),
        ..lane
    }))
}

/// Whether there is host memory for what the processes have on GPUs, as far as the driver tells how much that is. By
/// the lane it is charged to this program's cgroup, else to the container's.
///
/// # Errors
/// [`Error::Failed`] tells how much is needed and how much there is.
pub fn room(setup: &Setup<'_>, init: i32, pids: &[i32], users: &[GpuUser]) -> Result<(), Error> {
    let used = users.iter().filter(|user| pids.contains(&user.pid));
    let need: u64 = used.map(|user| user.bytes).sum();
    if need == 0 {
        return Ok(());
    }
    let (process, whose) = match wanted(&setup.ctx.config, setup.spec)? {
        Some(_) => ("self".to_owned(), "this program's"),
        None => (init.to_string(), "the container's"),
    };
    enough(need, available_to(&process), whose)
}

fn enough(need: u64, available: u64, whose: &str) -> Result<(), Error> {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    if need.saturating_add(SPARE_BYTES) <= available {
        return Ok(());
    }
    Err(Error::Failed(format!(
        "the checkpoint was refused and the container goes on running: {} MiB of host memory are needed for its GPU memory and {} MiB to spare, and {} MiB are available; free some, or raise the memory limit of {whose} cgroup",
        mib(need),
        mib(SPARE_BYTES),
        mib(available)
    )))
}

/// Has the agent allocate the host memory that the driver is about to ask for, while the container still runs. Where
/// that fails it is allocated when the driver asks, and what is in the way is told then.
pub fn reserve(
    setup: &Setup<'_>,
    op: &Operation,
    pids: &[i32],
    users: &[GpuUser],
    limit: Duration,
) {
    let Ok(Some(config)) = wanted(&setup.ctx.config, setup.spec) else {
        return;
    };
    let mut wanted = by_process(pids, users);
    wanted.retain(|of| of.bytes >= config.min_bytes);
    if wanted.is_empty() {
        return;
    }
    let threads = config.threads_for(wanted.len());
    let reserved = Client::connect(&op.file(crate::agent::SOCKET))
        .and_then(|mut client| client.call(Op::LaneReserve { wanted, threads }, limit));
    let why = match reserved.map(|reply| reply.outcome) {
        Ok(Outcome::Done) => return,
        Ok(Outcome::Error(error)) => error.message,
        Ok(other) => format!("the agent answered {other:?}"),
        Err(error) => error.to_string(),
    };
    tracing::warn!("memory for the GPU's is not allocated before the freeze: {why}");
}

fn by_process(pids: &[i32], users: &[GpuUser]) -> Vec<Wanted> {
    let bytes = |pid: &i32| {
        let of = users.iter().filter(|user| user.pid == *pid);
        of.fold(0u64, |sum, user| sum.saturating_add(user.bytes))
    };
    let of = |pid: &i32| Wanted {
        pid: *pid,
        bytes: bytes(pid),
    };
    pids.iter().map(of).collect()
}

/// For a restore of the checkpoint in this folder. The tables of the lane and of all that it builds upon are read:
/// what is missing or another one than it was is told before anything is started.
///
/// # Errors
/// [`Error`].
pub fn restore(config: &Config, seal: &Seal, folder: &Path) -> Result<LaneConfig, Error> {
    let lane = config.lane.config().map_err(Error::Failed)?;
    let what = format!("{}: the image folder cannot be read", folder.display());
    if let Some(facts) = &seal.gpu.lane {
        let failed =
            |what: String| Error::Failed(format!("restore refused, nothing was started: {what}"));
        let digest = facts.digest.parse::<Digest>().map_err(failed)?;
        let found = Lane::open_with(folder, Some(digest), &config.search());
        if found.map_err(|e| failed(e.to_string()))?.is_none() {
            let index = folder.join(names::LANE_INDEX);
            return Err(failed(format!(
                "{} is missing; the checkpoint is incomplete",
                index.display()
            )));
        }
    }
    Ok(LaneConfig {
        digest: seal.gpu.lane.as_ref().map(|facts| facts.digest.clone()),
        folder: Some(folder.canonicalize().map_err(Error::io(what))?),
        search: config.search(),
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
    use cryopod_gpu_hooks::cuda::gpu::GpuUuid;
    use serde_json::json;

    #[test]
    fn the_annotation_comes_before_the_configuration() {
        let mut config = Config::default();
        let with = |value: &str| Spec::from_json(json!({"annotations": {ANNOTATION: value}}));
        let none = Spec::from_json(json!({}));
        assert!(!wanted(&config, &none).unwrap().unwrap().required);
        assert!(wanted(&config, &with("on")).unwrap().unwrap().required);
        assert!(wanted(&config, &with("off")).unwrap().is_none());
        config.nvidia.lane = Mode::Off;
        assert!(wanted(&config, &none).unwrap().is_none());
        assert!(wanted(&config, &with("auto")).unwrap().is_some());
        let error = wanted(&config, &with("yes")).unwrap_err().to_string();
        assert!(error.starts_with("dev.cryopod.lane: \"yes\""), "{error}");
    }

    #[test]
    fn memory_to_spare() {
        const GIB: u64 = 1 << 30;
        assert!(enough(GIB, 2 * GIB, "its").is_ok());
        let error = enough(GIB + 1, 2 * GIB, "its").unwrap_err().to_string();
        assert!(
            error.contains("1025 MiB of host memory are needed"),
            "{error}"
        );
    }

    #[test]
    fn memory_of_all_gpus_by_process() {
        let gpu = |n: u8| GpuUuid([n; 16]);
        let user = |pid, n, bytes| GpuUser {
            pid,
            gpu: gpu(n),
            bytes,
        };
        let users = [user(1, 1, 5), user(2, 1, 7), user(1, 2, 8), user(9, 1, 1)];
        let bytes: Vec<_> = by_process(&[1, 2, 3], &users)
            .iter()
            .map(|w| (w.pid, w.bytes))
            .collect();
        assert_eq!(bytes, [(1, 13), (2, 7), (3, 0)]);
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
