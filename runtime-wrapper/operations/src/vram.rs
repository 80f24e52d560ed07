//! Decides about VRAM files: whether and how they are used. Waits for them before a checkpoint is recorded.

pub mod agent;
pub mod parent;
pub mod preload;

use std::fs::File;
use std::time::{Duration, Instant};

use cryopod_archive::format::names;
use cryopod_archive::metadata::Metadata;
use cryopod_archive::vram::{ChunkDigest, Vram};
use cryopod_cuda::exchange::client::Client;
use cryopod_cuda::messages::protocol::{ErrorKind, Op, Outcome};
use cryopod_cuda::messages::report::GpuUser;
use cryopod_cuda::preload::Library;
use cryopod_cuda::vram::memory::available_to;
use cryopod_cuda::vram::{VramConfig, VramDone, Wanted};
use cryopod_host::spec::Spec;
use nix::fcntl::Flock;

use crate::config::Config;
use crate::config::vram::VramMode;
use crate::error::Error;
use crate::request::Request;
use crate::run::operation::Operation;

/// The annotation that overrides `nvidia.vram`.
pub const ANNOTATION: &str = "dev.cryopod.vram";
/// Exists once CRIU has called the action script, and so will call it before the checkpoint becomes final.
pub const ACTION_SCRIPT_FILE: &str = "action-script-asked";
/// Host memory that must be available at a checkpoint beside a copy of the GPU memory, in bytes.
const SPARE_BYTES: u64 = 1 << 30;
const MARGIN: Duration = Duration::from_secs(10);

/// Returns the plugin's VRAM settings for a checkpoint (`None`: without VRAM files), and the lock of its parent.
pub fn checkpoint(
    request: &Request<'_>,
) -> Result<(Option<VramConfig>, Option<Flock<File>>), Error> {
    let (config, spec) = (request.config(), &request.spec);
    let Some(vram) = wanted(config, spec)? else {
        return Ok((None, None));
    };
    let held = parent::choose(config, spec, request.inv)?;
    let (parent, lock) = held.map_or((None, None), |held| (Some(held.parent), held.lock));
    Ok((Some(VramConfig { parent, ..vram }), lock))
}

fn wanted(config: &Config, spec: &Spec) -> Result<Option<VramConfig>, Error> {
    let wrong = |what: String| Error::untouched(format!("{ANNOTATION}: {what}"));
    let mode = match spec.annotation(ANNOTATION) {
        Some(text) => text.parse().map_err(wrong)?,
        None => config.nvidia.vram,
    };
    if mode == VramMode::Off {
        return Ok(None);
    }
    let vram = config.vram.config().map_err(wrong)?;
    Ok(Some(VramConfig {
        required: mode == VramMode::On,
        search: config.search(),
        ..vram
    }))
}

/// Checks that there is host memory for the processes' GPU memory, as far as the driver reports its size. With VRAM
/// files it is charged to this program's cgroup, else to the container's.
pub fn room(
    request: &Request<'_>,
    init: i32,
    pids: &[i32],
    users: &[GpuUser],
) -> Result<(), Error> {
    let used = users.iter().filter(|user| pids.contains(&user.pid));
    let need: u64 = used.map(|user| user.bytes).sum();
    if need == 0 {
        return Ok(());
    }
    let (process, whose) = match wanted(request.config(), &request.spec)? {
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

/// GPU memory of a process that the driver moves, where the preload library has the rest, in bytes: 529 MiB for a context of
/// CUDA 13's on an H100.
const BESIDE_THE_LIBRARY: u64 = 640 << 20;

/// Has the agent allocate the host memory that the driver is about to ask for, while the container still runs. On
/// failure it is allocated when the driver asks, and the cause is reported then.
pub fn reserve(
    request: &Request<'_>,
    op: &Operation,
    pids: &[i32],
    users: &[GpuUser],
    limit: Duration,
) {
    let Ok(Some(vram)) = wanted(request.config(), &request.spec) else {
        return;
    };
    let mut wanted = by_process(pids, users);
    wanted.retain(|of| of.bytes >= vram.min_bytes);
    for of in wanted.iter_mut().filter(|of| Library::is_in(of.pid)) {
        of.bytes = of.bytes.min(BESIDE_THE_LIBRARY);
    }
    if wanted.is_empty() {
        return;
    }
    let threads = vram.threads_for(wanted.len());
    let socket = op.file(crate::vram::agent::SOCKET);
    let prepare = Op::PreloadPrepare {
        pids: wanted.iter().map(|of| of.pid).collect(),
        gpus: Vec::new(),
        in_bulk: true,
        wait: true,
    };
    let ask = |op| Client::connect(&socket)?.call(op, limit);
    // Not at the same time: while memory is allocated, the driver takes ten times as long. If it fails, the first copy
    // prepares the GPUs.
    if let Err(error) = ask(prepare) {
        tracing::debug!("the GPUs are not ready ahead: {error}");
    }
    let reserved = ask(Op::VramReserve { wanted, threads });
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

/// Returns the plugin's VRAM settings for a restore from this directory. Reads the tables of its VRAM files and of all
/// that they build upon: missing or changed ones are reported before anything is started.
pub fn restore(request: &Request<'_>, metadata: &Metadata) -> Result<VramConfig, Error> {
    let (config, directory) = (request.config(), request.images.as_path());
    let vram = config.vram.config().map_err(Error::Failed)?;
    let what = format!(
        "{}: the image directory cannot be read",
        directory.display()
    );
    if let Some(facts) = &metadata.gpu.vram {
        let failed =
            |what: String| Error::Failed(format!("restore refused, nothing was started: {what}"));
        let digest = facts.digest.parse::<ChunkDigest>().map_err(failed)?;
        let found = Vram::check(directory, Some(digest), &config.search());
        if found.map_err(|e| failed(e.to_string()))?.is_none() {
            let index = directory.join(names::VRAM_INDEX);
            return Err(failed(format!(
                "{} is missing; the checkpoint is incomplete",
                index.display()
            )));
        }
    }
    Ok(VramConfig {
        digest: metadata.gpu.vram.as_ref().map(|facts| facts.digest.clone()),
        directory: Some(directory.canonicalize().map_err(Error::io(what))?),
        search: config.search(),
        identities: config.encrypt.identities.clone(),
        ..vram
    })
}

/// Progress of the VRAM files.
#[derive(Debug)]
pub enum VramProgress {
    Unused,
    Durable(VramDone),
    Writing,
}

/// Waits for the VRAM files of this operation.
pub fn wait(op: &Operation, limit: Duration) -> Result<VramProgress, String> {
    let lost =
        |error: String| format!("the driver agent, which writes the GPU memory, is gone: {error}");
    let socket = op.file(crate::vram::agent::SOCKET);
    if !socket.exists() {
        return Ok(VramProgress::Unused);
    }
    let mut client = Client::connect(&socket).map_err(|e| lost(e.to_string()))?;
    let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
    let reply = client
        .call(Op::VramWait { limit_ms }, limit.saturating_add(MARGIN))
        .map_err(|e| lost(e.to_string()))?;
    match reply.outcome {
        Outcome::Vram(None) => Ok(VramProgress::Unused),
        Outcome::Vram(Some(done)) => Ok(VramProgress::Durable(done)),
        Outcome::Error(error) if error.kind == ErrorKind::TimedOut => Ok(VramProgress::Writing),
        Outcome::Error(error) => Err(error.message),
        other => Err(format!("unexpected answer of the driver agent: {other:?}")),
    }
}

/// Waits for the VRAM files and notes them in the metadata. Returns false if they are still being written.
pub fn note(
    op: &Operation,
    limit: Duration,
    since: Instant,
    metadata: &mut Metadata,
) -> Result<bool, String> {
    match wait(op, limit)? {
        VramProgress::Unused => {}
        VramProgress::Writing => return Ok(false),
        VramProgress::Durable(done) => {
            metadata.timings.durable_us = u64::try_from(since.elapsed().as_micros()).ok();
            metadata.gpu.vram = Some(done.facts);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_cuda::gpus::gpu::GpuUuid;
    use serde_json::json;

    #[test]
    fn the_annotation_comes_before_the_configuration() {
        let mut config = Config::default();
        let with = |value: &str| Spec::from_json(json!({"annotations": {ANNOTATION: value}}));
        let none = Spec::from_json(json!({}));
        assert!(!wanted(&config, &none).unwrap().unwrap().required);
        assert!(wanted(&config, &with("on")).unwrap().unwrap().required);
        assert!(wanted(&config, &with("off")).unwrap().is_none());
        config.nvidia.vram = VramMode::Off;
        assert!(wanted(&config, &none).unwrap().is_none());
        assert!(wanted(&config, &with("auto")).unwrap().is_some());
        let error = wanted(&config, &with("yes")).unwrap_err().to_string();
        assert!(error.starts_with("dev.cryopod.vram: \"yes\""), "{error}");
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
}
