//! Dumps a container: runs the low-level runtime, and writes the metadata when CRIU asks whether the container may go.

use std::cell::Cell;
use std::ffi::OsString;
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cryopod_amd::image::Images;
use cryopod_amd::pages;
use cryopod_amd::saved;
use cryopod_amd::unpause::unpause;
use cryopod_archive::container::surroundings::CriuFacts;
use cryopod_archive::format::names;
use cryopod_archive::metadata::{Metadata, MetadataSlot};
use cryopod_cuda::procfs;
use cryopod_cuda::vram::VramConfig;
use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use cryopod_host::processes::thread_settings::{self, ThreadGroup};
use nix::fcntl::Flock;
use serde_json::Value;

use super::capture_files;
use super::plan::no_exec_processes;
use super::planned::DumpPlan;
use super::prepare::DumpPreparation;
use crate::error::Error;
use crate::preflight::criu_setup;
use crate::request::Request;
use crate::request::state::ContainerState;
use crate::rootfs::frozen::{self, Frozen};
use crate::run::child::{self, RunOutcome, RunWatch};
use crate::run::failure;
use crate::run::failure::LogMarks;
use crate::run::hidden_gpus::HiddenGpus;
use crate::run::operation::Operation;
use crate::run::runtime_log::{HeldErrors, RuntimeLog};
use crate::vram;
use crate::vram::agent::RunningAgent;
use crate::vram::preload;
use cryopod_host::micros;

pub(super) struct DumpOutcome {
    pub ended: RunOutcome,
    /// Why the metadata could not be written.
    pub metadata_error: Option<String>,
    /// The disk was full.
    pub full: Option<String>,
    pub before: LogMarks,
    pub runtime_log: Option<RuntimeLog>,
    pub held: HeldErrors,
    /// The cgroup of a container that is to end with its checkpoint. Dropped, the container goes on.
    pub frozen: Option<Frozen>,
}

impl DumpOutcome {
    /// Returns true if images and metadata are complete.
    pub fn succeeded(&self) -> bool {
        self.ended.code == 0 && self.metadata_error.is_none()
    }
}

/// Runs the low-level runtime until it ends. An error means that it could not be started.
pub(super) fn dump(
    prepared: &mut DumpPreparation<'_>,
    signals: &child::Signals,
    started: Instant,
) -> Result<DumpOutcome, Error> {
    let (request, op) = (prepared.request, &prepared.op);
    let low = &request.ctx.low;
    let before = LogMarks::note(request.log(names::DUMP_LOG), &request.inv.globals);
    let mut args = arguments(request, prepared.planned);
    let runtime_log = RuntimeLog::apart(op, low, request.inv, &mut args);
    let (held, stderr) = HeldErrors::new().map_err(Error::io("memfd_create"))?;
    let watch = RunWatch {
        stderr: Some(stderr),
        kind: child::RunKind::Checkpoint {
            init: prepared.state.init,
            leave_running: request.flag("leave-running"),
        },
        action_script: &prepared.ready.action_script,
        limit: prepared.ready.limit,
        abort_limit: Duration::from_secs(request.config().limits.abort_s),
        abort_file: op.file(criu_setup::ABORT_FILE),
        images: Some(prepared.images.path.clone()),
        criu_log: request.log(names::DUMP_LOG),
        agent: prepared.ready.agent.as_ref().and_then(RunningAgent::pid),
        hidden: match amd_users(prepared.planned).is_empty() {
            true => None,
            false => HiddenGpus::of(&request.host, &request.spec, op)?,
        },
    };
    let (packing, _parent) = packing(request, prepared.planned, prepared.slot.as_ref())?;
    let since = Instant::now();
    prepared.metadata.timings.plan_us = micros(since - started);
    let mut completion = Completion {
        request,
        state: prepared.state,
        planned: prepared.planned,
        op,
        limit: watch.limit,
        since,
        slot: &mut prepared.slot,
        metadata: &mut prepared.metadata,
        packing,
        signals,
        stopped: Vec::new(),
        settings: None,
    };
    let progress = &mut prepared.progress;
    progress.step("start");
    let mut metadata_error = None;
    let mut frozen = None;
    let env = &prepared.ready.env;
    let ended = child::run(low, &args, env, &watch, signals, &mut |question| {
        progress.step(&question.stage);
        let mut answer = Ok(());
        if request.ends && question.stage == LAST_STAGE {
            // CRIU lets go of processes that must not run on.
            let (init, op) = (completion.state.init, completion.op.dir());
            let stopped = Frozen::stopped(&request.host, &request.spec, init, op);
            answer = stopped.map(|cgroup| frozen = Some(cgroup));
        }
        let answer = answer.and_then(|()| completion.at(&question.stage));
        let go_on = answer.is_ok();
        metadata_error = metadata_error.take().or(answer.err());
        go_on
    })?;
    if ended.code == 0 && metadata_error.is_none() {
        if request.leave_running() {
            // It goes on, and the rest can take long.
            unpause_amd(request, prepared.planned);
        }
        metadata_error = completion.after_all().err();
    }
    // Before what was written in vain is removed, and there is room again.
    let failed = ended.code != 0 || metadata_error.is_some();
    let full = failed.then(|| failure::full_disk(&prepared.images.path));
    Ok(DumpOutcome {
        ended,
        metadata_error,
        full: full.flatten(),
        before,
        runtime_log,
        held,
        frozen,
    })
}

/// The processes whose GPU state CRIU's amdgpu plugin saves.
pub(super) fn amd_users(planned: &DumpPlan) -> Vec<i32> {
    planned.gpus.users_of(Vendor::Amd)
}

/// CRIU's amdgpu plugin may have left the queues of a container paused that goes on running.
pub(super) fn unpause_amd(request: &Request<'_>, planned: &DumpPlan) {
    for error in unpause(&request.host, &amd_users(planned)) {
        tracing::error!("{error}; restart the container if its GPUs do not answer");
    }
}

fn arguments(request: &Request<'_>, planned: &DumpPlan) -> Vec<OsString> {
    let kind = request.low();
    let options = &planned.surroundings.extra.options;
    let version = planned.low_version.as_deref();
    let flags = options.flags(kind, version, true, &request.inv.flags);
    request.with_flags(&request.ctx.args, &flags)
}

/// Completes the metadata when the images are complete.
struct Completion<'a> {
    request: &'a Request<'a>,
    state: &'a ContainerState,
    planned: &'a DumpPlan,
    op: &'a Operation,
    limit: Duration,
    /// The start of the dump.
    since: Instant,
    slot: &'a mut Option<MetadataSlot>,
    metadata: &'a mut Metadata,
    /// How AMD's GPU memory goes into VRAM files, if it does.
    packing: Option<VramConfig>,
    signals: &'a child::Signals,
    /// The processes that CRIU has stopped, by pid and start time.
    stopped: Vec<(i32, u64)>,
    /// Reads what their threads have set.
    settings: Option<JoinHandle<Vec<ThreadGroup>>>,
}

impl Completion<'_> {
    /// Answers CRIU at a stage.
    ///
    /// # Errors
    /// Why the container must not go.
    fn at(&mut self, stage: &str) -> Result<(), String> {
        if stage != LAST_STAGE {
            // From its first question on the plugin knows that the final one will come.
            let _ = std::fs::write(self.op.file(vram::ACTION_SCRIPT_FILE), "");
            if stage == STOPPED_STAGE {
                let (host, init) = (&self.request.host, self.state.init);
                self.stopped = running(host, init);
                let pids: Vec<i32> = self.stopped.iter().map(|(pid, _)| *pid).collect();
                let host = host.clone();
                // They stay as they are: CRIU need not wait, and the application with it.
                let read = move || thread_settings::settings(&host, init, &pids);
                self.settings = std::thread::Builder::new().spawn(read).ok();
            }
            return Ok(());
        }
        let read = self.settings.take().and_then(|reads| reads.join().ok());
        self.metadata.container.threads = read.unwrap_or_else(|| {
            // CRIU does not stop for us where the network is the host's.
            let (host, init) = (&self.request.host, self.state.init);
            thread_settings::settings(host, init, &live::tree(host, init))
        });
        // CRIU succeeds, with images that it may not restore.
        if let Some(pid) = ended_since(&self.stopped, &self.request.host, self.state.init) {
            return Err(format!("process {pid} was killed in the middle of it"));
        }
        if !self.planned.locked.is_empty() {
            frozen::restored_thawed(&self.request.images)
                .map_err(|e| format!("cgroup.img: {e}"))?;
        }
        if self.slot.is_none() {
            return Ok(());
        }
        // Nothing kept an engine from starting one since the plan looked.
        let lost = no_exec_processes(self.request, self.state, true);
        lost.map_err(|e| e.to_string())?;
        if self.planned.carries_files {
            let captured = capture_files(self.request, self.state, Some(self.op.dir()));
            captured.map_err(|e| e.to_string())?;
        }
        self.metadata.timings.dump_us = micros(self.since.elapsed());
        // A container that goes on running need not wait for the VRAM files; the metadata must. One that its engine had
        // paused must, too: the engine takes its files afterwards, which must be those of this moment.
        let leave_running = self.request.leave_running() && !self.state.paused;
        let limit = if leave_running {
            Duration::ZERO
        } else {
            self.limit
        };
        if self.vram_written(limit)? {
            if leave_running && self.packing.is_some() {
                return self.amd_saved().map(drop);
            }
            // How long it had to wait is known once it goes on, and its images are on the disk then.
            return if leave_running { Ok(()) } else { self.commit() };
        }
        match leave_running {
            true => Ok(()),
            false => Err(NOT_IN_TIME.into()),
        }
    }

    /// Waits for the VRAM files of a container that runs again, or of a CRIU that did not ask (the runtime cleared its
    /// environment), and writes the metadata.
    fn after_all(&mut self) -> Result<(), String> {
        if self.slot.is_none() {
            return Ok(());
        }
        match self.vram_written(self.limit)? {
            true => self.commit(),
            false => Err(NOT_IN_TIME.into()),
        }
    }

    /// Waits for the VRAM files. Returns false if they are still being written after `limit`.
    fn vram_written(&mut self, limit: Duration) -> Result<bool, String> {
        self.metadata.gpu.plugin_report = plugin_report(&self.request.images);
        self.metadata.timings.pause_us = criu_setup::pause(self.op);
        let until = Instant::now() + limit;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let slice = left.min(LOOK);
            if vram::note(self.op, slice, self.since, self.metadata)? {
                return Ok(true);
            }
            if self.signals.interrupted() {
                return Err(INTERRUPTED.into());
            }
            if left <= slice {
                return Ok(false);
            }
        }
    }

    fn commit(&mut self) -> Result<(), String> {
        if let Some(images) = self.amd_saved()? {
            saved::note(&images, &mut self.metadata.gpu);
        }
        if let Some(packing) = self.packing.take() {
            self.pack(packing)?;
        }
        preload::carry(&self.request.spec, &self.request.images)?;
        self.metadata.criu.dumped = CriuFacts::dumped_at(&self.request.images);
        // After a power cut there must be no metadata without images, and of a container that ends nothing else is left.
        synced(&self.request.images)
            .map_err(|e| format!("{}: {e}", self.request.images.display()))?;
        let slot = self.slot.take();
        slot.map_or(Ok(()), |slot| {
            slot.commit(self.metadata).map_err(|e| e.to_string())
        })
    }

    /// What CRIU's amdgpu plugin has saved, if it had anything to save.
    fn amd_saved(&self) -> Result<Option<Images>, String> {
        match amd_users(self.planned).is_empty() {
            true => Ok(None),
            false => saved::complete(&self.request.images).map(Some),
        }
    }

    fn pack(&mut self, config: VramConfig) -> Result<(), String> {
        let required = config.required;
        let left = self.limit.saturating_sub(self.since.elapsed());
        let interrupted = Cell::new(false);
        let look = || {
            interrupted.set(self.signals.interrupted());
            interrupted.get()
        };
        let Some(finished) = pages::pack(&self.request.images, config, left, look) else {
            return Err(if interrupted.get() {
                INTERRUPTED.into()
            } else {
                NOT_IN_TIME.into()
            });
        };
        match finished {
            Ok(None) => {}
            Ok(Some(facts)) => {
                self.metadata.gpu.vram = Some(facts);
                self.metadata.timings.durable_us = Some(micros(self.since.elapsed()));
            }
            Err(e) if required => return Err(format!("the GPU memory: {e}")),
            Err(e) => tracing::warn!("the GPU memory stays in CRIU's images: {e}"),
        }
        Ok(())
    }
}

/// How the memory of AMD's GPUs goes into VRAM files. `None`: there is none, it is to stay in CRIU's images, or NVIDIA's
/// takes those files. With the lock of its parent.
fn packing(
    request: &Request<'_>,
    planned: &DumpPlan,
    slot: Option<&MetadataSlot>,
) -> Result<(Option<VramConfig>, Option<Flock<File>>), Error> {
    let nvidia = planned.gpus.users_of(Vendor::Nvidia);
    if slot.is_none() || amd_users(planned).is_empty() || !nvidia.is_empty() {
        return Ok((None, None));
    }
    vram::checkpoint(request)
}

/// The pid and start time of all processes of a container that are not exiting.
fn running(host: &Host, init: i32) -> Vec<(i32, u64)> {
    let all = live::tree(host, init).into_iter();
    let all = all.filter_map(|pid| Some((pid, procfs::stat(pid)?)));
    all.filter(|(_, stat)| !stat.exiting)
        .map(|(pid, stat)| (pid, stat.start_time))
        .collect()
}

/// A process of `before` that does not run any more.
fn ended_since(before: &[(i32, u64)], host: &Host, init: i32) -> Option<i32> {
    let now = running(host, init);
    let ended = before.iter().find(|process| !now.contains(process));
    ended.map(|(pid, _)| *pid)
}

/// CRIU's stage at which it has stopped all processes and dumped none.
const STOPPED_STAGE: &str = "network-lock";
/// CRIU's stage at which the images are complete, and the container still exists.
const LAST_STAGE: &str = "post-dump";
const INTERRUPTED: &str = "interrupted while the GPU memory was written";
/// How often it looks meanwhile whether it is interrupted.
const LOOK: Duration = Duration::from_millis(500);
const NOT_IN_TIME: &str = "the GPU memory was not written in time";

/// Files that are written to the disk at once: one write of the file system's journal serves many.
const SYNCED_AT_ONCE: usize = 16;

/// Writes the files of a directory to the disk.
fn synced(directory: &Path) -> std::io::Result<()> {
    let mut files = Vec::new();
    for file in std::fs::read_dir(directory)? {
        let file = file?;
        if file.file_type()?.is_file() {
            files.push(file.path());
        }
    }
    let next = AtomicUsize::new(0);
    let sync = || {
        while let Some(file) = files.get(next.fetch_add(1, Relaxed)) {
            File::open(file)?.sync_all()?;
        }
        std::io::Result::Ok(())
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..SYNCED_AT_ONCE.min(files.len()))
            .map(|_| scope.spawn(sync))
            .collect();
        threads.into_iter().try_for_each(|thread| {
            let died = |_| Err(std::io::Error::other("a thread died"));
            thread.join().unwrap_or_else(died)
        })
    })?;
    File::open(directory)?.sync_all()
}

fn plugin_report(images: &Path) -> Value {
    std::fs::read(images.join(cryopod_cuda::messages::image::FILE_NAME))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or(Value::Null)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_killed_is_missed() {
        let mut init = std::process::Command::new("sh")
            .args(["-c", "sleep 1000 & echo $!; sleep 1000 & wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let host = Host::system();
        let pid = i32::try_from(init.id()).unwrap();
        let mut said = String::new();
        let mut out = std::io::BufReader::new(init.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut out, &mut said).unwrap();
        let child: i32 = said.trim().parse().unwrap();
        let before = loop {
            match running(&host, pid) {
                all if all.len() == 3 => break all,
                _ => std::thread::sleep(Duration::from_millis(5)),
            }
        };
        assert_eq!(ended_since(&before, &host, pid), None);
        let kill = |pid| {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::SIGKILL)
        };
        kill(child).unwrap();
        while ended_since(&before, &host, pid).is_none() {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(ended_since(&before, &host, pid), Some(child));
        for (pid, _) in before {
            let _ = kill(pid);
        }
        init.wait().unwrap();
    }
}
