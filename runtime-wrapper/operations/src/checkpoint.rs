//! Runs `checkpoint`: plans, freezes, writes the metadata.
//!
//! Every failure that can be foreseen happens before the container is frozen. The metadata is written at CRIU's
//! `post-dump`, when the images are complete and the container still exists: if it cannot be written, the container
//! runs on.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use cryopod_archive::metadata::{ContainerFacts, Metadata, MetadataSlot, Timings};
use cryopod_archive::{handover, names};
use cryopod_cuda::report::AgentReady;
use cryopod_cuda::sharing;
use cryopod_gpu_plan::live;
use cryopod_gpu_plan::nvidia_compat;
use cryopod_gpu_plan::plan::{self, CheckpointPlan, PlanError};
use cryopod_gpu_plan::remap;
use cryopod_host::destinations::Destinations;
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use cryopod_host::processes::Scan;
use cryopod_host::programs::{SystemTools, Tools};
use serde_json::Value;

use crate::argv::Invocation;
use crate::child::{self, Ended, Watch};
use crate::context::Context;
use crate::error::Error;
use crate::operation::Operation;
use crate::reasons::Before;
use crate::restore_here::Prospect;
use crate::runtime_log::RuntimeLog;
use crate::state::{self, State};
use crate::surroundings::{self, Bundle, Surroundings};
use crate::suspended::Record;
use crate::{facts, frozen, log, lsm, passthrough, plugins, rootfs, store, vram};

/// Checkpoints a container. Execs the low-level runtime for one without GPU nodes. On error the container goes on
/// running.
pub fn run(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    let started = Instant::now();
    let host = Host::system();
    let tools = SystemTools::from_env();
    // The low-level runtime reports whatever is wrong with the container's state.
    let Some(state) = State::ask(ctx, inv, &tools) else {
        return Err(passthrough::exec(&ctx.low, &ctx.args));
    };
    let spec = state.spec(ctx, inv);
    let nodes = plan::container_nodes(&host, &spec, state.init);
    let carried =
        !inv.flags.has("pre-dump") && rootfs::wanted(&ctx.config.rootfs, &spec, &state.bundle);
    if nodes.is_empty() {
        // A paused container cannot be asked; but an engine that carries no files has paused it.
        if carried && state.paused {
            rootfs::capture(
                &ctx.config.rootfs,
                &host,
                &state.container(&spec),
                &inv.image_path(),
            )?;
        }
        return Err(passthrough::exec(&ctx.low, &ctx.args));
    }
    if state.created {
        // A created container runs the runtime's own code, with files of the host. crun would have CRIU dump it anyway.
        return Err(Error::Failed(format!(
            "checkpoint of {} refused: a container cannot be checkpointed in created state; start it first. Nothing was touched",
            inv.id
        )));
    }
    if !inv.flags.has("pre-dump") {
        handover::before_checkpoint(&inv.image_path()).map_err(|e| Error::Failed(e.to_string()))?;
    }
    let record = Record::of(&host, state.init);
    let locked = match &record {
        None => Vec::new(),
        Some(record) => locked_at_pause(inv, &state, record)?,
    };
    let sharing = sharing::Policy::of(&spec, ctx.config.nvidia.sharing)
        .map_err(|e| Error::Failed(format!("{e}. Nothing was touched")))?;
    // Tools run while the processes are scanned.
    let limit = ctx.config.limits.tool();
    let (criu, low_version, scan) = std::thread::scope(|scope| {
        let criu = scope.spawn(|| facts::criu(&tools, limit));
        let low = scope.spawn(|| facts::version_line(&tools, &ctx.low.path, limit));
        let scan = Scan::of(&host, &live::tree(&host, state.init));
        (
            criu.join().unwrap_or_default(),
            low.join().unwrap_or_default(),
            scan,
        )
    });
    let criu = criu.ok_or_else(crate::setup::no_criu)?;
    let amd = nodes.iter().any(|n| n.vendor == Vendor::Amd);
    let plugins = plugins::checked(&ctx.config, &host, &tools, &criu, amd);
    let mounts = Destinations::of(&host, &spec, &state.bundle);
    let bundle = Bundle {
        spec: &spec,
        mounts: &mounts,
    };
    let (surroundings, hazards) =
        surroundings::checkpoint(ctx, inv, &host, &tools, bundle, state.init, &scan, &criu)?;
    let (plan, mut refusals) =
        plan::checkpoint(&host, nodes, state.init, &scan, &plugins, sharing)?;
    refusals.extend(hazards);
    let setup = crate::setup::Setup {
        ctx,
        inv,
        spec: &spec,
        tools: &tools,
        criu: &criu,
        low_version: low_version.as_deref(),
        locked: &locked,
    };
    let prospect = Prospect {
        ctx,
        host: &host,
        bundle,
        plan: &plan,
    };
    if !refusals.is_empty() {
        // The driver is not asked from here on; reasons that need no driver are reported with the rest.
        if !inv.flags.has("pre-dump") {
            let metadata = metadata_of(
                &setup,
                &host,
                &plan,
                &surroundings,
                None,
                low_version.clone(),
            );
            refusals.extend(prospect.refusals(&metadata, None)?);
        }
        return Err(PlanError::Refused(refusals).into());
    }
    let store = store::wanted(&ctx.config.store, &spec)?.map(Path::to_owned);
    store::parent_is_here(inv, &inv.image_path())?;
    let job = Job {
        ctx,
        inv,
        host: &host,
        state,
        plan: &plan,
        surroundings,
        carried,
        store,
        started,
    };
    job.run(&setup, &prospect)
}

/// Returns the processes whose CUDA calls were locked when the container was paused.
///
/// # Errors
/// The container is suspended, or somebody thawed it without unlocking them.
fn locked_at_pause(inv: &Invocation, state: &State, record: &Record) -> Result<Vec<i32>, Error> {
    if record.locked_at_pause && state.paused {
        return Ok(record.processes.iter().map(|p| p.pid).collect());
    }
    let (id, since) = (&inv.id, &record.since);
    Err(Error::Failed(match record.locked_at_pause {
        true => format!(
            "checkpoint of {id} refused: its CUDA calls are locked since it was paused at {since}, and it runs: unlock it first: cryopod resume pid:{}. Nothing was touched",
            state.init
        ),
        false => format!(
            "checkpoint of {id} refused: it is suspended since {since}, its GPU memory is {}; resume it first: cryopod resume {id}. Nothing was touched",
            record.place()
        ),
    }))
}

struct Job<'a> {
    ctx: &'a Context,
    inv: &'a Invocation,
    host: &'a Host,
    state: State,
    plan: &'a CheckpointPlan,
    surroundings: Surroundings,
    /// The checkpoint carries the container's changes of files.
    carried: bool,
    store: Option<PathBuf>,
    started: Instant,
}

impl Job<'_> {
    fn run(
        &self,
        setup: &crate::setup::Setup<'_>,
        prospect: &Prospect<'_>,
    ) -> Result<ExitCode, Error> {
        let pre_dump = self.inv.flags.has("pre-dump");
        let leave_running = self.inv.flags.has("leave-running");
        let signals = child::Signals::watch()?;
        // Dropped last, when all else is done.
        let _thawed = match setup.locked {
            [] => Thawed::of(self, setup.tools),
            _ => None,
        };
        let op = Operation::new()?;
        let images = ImageDir::ready(self.inv.image_path())?;
        // A pre-dump cannot be restored by itself: it gets no metadata.
        let mut slot = match pre_dump {
            true => None,
            false => Some(MetadataSlot::reserve(&images.path)?),
        };
        let ready = setup.checkpoint(&op, self.plan, pre_dump, &self.surroundings.extra)?;
        let users = self.plan.users_of(Vendor::Nvidia);
        let said = ready.agent.as_ref().map(|a| &a.ready);
        let low_version = ready.low_version.clone();
        let mut metadata = metadata_of(
            setup,
            self.host,
            self.plan,
            &self.surroundings,
            said,
            low_version,
        );
        let fits = match said {
            Some(said) => vram::room(
                &setup.ctx.config,
                setup.spec,
                self.state.init,
                &users,
                &said.users,
            ),
            None => Ok(()),
        };
        let fits = fits.and_then(|()| match pre_dump {
            true => Ok(()),
            false => prospect.settled(&metadata, said),
        });
        if let Err(error) = fits {
            // Ends the agent; nothing was touched.
            ready.finish(&op);
            return Err(error);
        }
        if let (Some(agent), false) = (&ready.agent, pre_dump) {
            vram::reserve(
                &setup.ctx.config,
                setup.spec,
                &op,
                &users,
                &agent.ready.users,
                ready.limit,
            );
        }
        let watch = Watch {
            kind: child::Kind::Checkpoint,
            action_script: &ready.action_script,
            limit: ready.limit,
            abort_limit: Duration::from_secs(self.ctx.config.limits.abort_s),
            abort_file: op.file(crate::setup::ABORT_FILE),
            images: Some(images.path.clone()),
            agent: ready.agent.as_ref().and_then(crate::agent::Agent::pid),
        };
        let whole_limit = watch.limit;
        let mut metadata_error = None;
        let before = Before::note(
            self.inv.work_path().join(names::DUMP_LOG),
            &self.inv.globals,
        );
        let dump_started = Instant::now();
        metadata.timings.plan_us = micros(dump_started - self.started);
        let mut args = self.line(ready.low_version.as_deref());
        let runtime_log = RuntimeLog::apart(&op, &self.ctx.low, self.inv, &mut args);
        let ended = child::run(
            &self.ctx.low,
            &args,
            &ready.env,
            &watch,
            &signals,
            &mut |stage| {
                if stage != "post-dump" {
                    // From its first question on the plugin knows that the final one will come.
                    let _ = std::fs::write(op.file(vram::ACTION_SCRIPT_FILE), "");
                    return true;
                }
                if !setup.locked.is_empty()
                    && let Err(e) = frozen::restored_thawed(&images.path)
                {
                    metadata_error = Some(format!("cgroup.img: {e}"));
                    return false;
                }
                let Some(this) = slot.take() else { return true };
                let options = &self.ctx.config.rootfs;
                if self.carried
                    && let Err(e) = rootfs::capture(
                        options,
                        self.host,
                        &self.state.container(setup.spec),
                        &images.path,
                    )
                {
                    metadata_error = Some(e.to_string());
                    return false;
                }
                metadata.timings.dump_us = micros(dump_started.elapsed());
                metadata.gpu.plugin_report = plugin_report(&images.path);
                // A container that goes on running need not wait for the VRAM files; the metadata must.
                let limit = if leave_running {
                    Duration::ZERO
                } else {
                    watch.limit
                };
                let noted = match vram::note(&op, limit, dump_started, &mut metadata) {
                    Ok(true) => this.commit(&metadata).map_err(|e| e.to_string()),
                    Ok(false) if leave_running => {
                        slot = Some(this);
                        Ok(())
                    }
                    Ok(false) => Err("the GPU memory was not written in time".into()),
                    Err(e) => Err(e),
                };
                metadata_error = noted.err();
                metadata_error.is_none()
            },
        )?;
        if ended.code == 0 && metadata_error.is_none() && slot.is_some() {
            // Waits for the VRAM files of a container that runs again, or of a CRIU that does not ask (the runtime
            // cleared its environment).
            metadata.gpu.plugin_report = plugin_report(&images.path);
            let written = vram::note(&op, watch.limit, dump_started, &mut metadata);
            metadata_error = match written {
                Ok(true) => None,
                Ok(false) => Some("the GPU memory was not written in time".into()),
                Err(e) => Some(e),
            };
        }
        // The agent puts back what was not committed before anything is reported about the container.
        let finished = ready.finish(&op);
        if ended.killed {
            self.thaw(setup.tools);
        }
        if ended.code == 0 && metadata_error.is_none() {
            if let Some(slot) = slot.take() {
                slot.commit(&metadata)?;
            }
            // `cryopod export` makes an archive of everything.
            if let (false, false, Some(directory)) =
                (pre_dump, handover::asked(&images.path), &self.store)
            {
                store::put(directory, &images.path, &metadata, whole_limit);
            }
            if let Err(e) = handover::after_checkpoint(&images.path) {
                tracing::warn!("the large files are not moved aside: {e}");
            }
            images.keep();
            if let Some(log) = &runtime_log {
                log.hand_on();
            }
            return Ok(self.succeeded(&finished));
        }
        let said = runtime_log.as_ref().filter(|_| ended.code != 0);
        let said = said.and_then(RuntimeLog::own_error);
        // Checked while the space reserved for the metadata is still taken.
        let full = facts::full_disk(&images.path);
        drop(slot);
        if !ended.passed || self.alive() {
            // A failed checkpoint leaves no metadata.
            let _ = std::fs::remove_file(images.path.join(names::METADATA));
        }
        let denied = before
            .criu_log()
            .and_then(|log| lsm::denial(self.host, log, &self.surroundings.lsm));
        let reasons = metadata_error.into_iter().chain(finished.reasons());
        let reasons = reasons.chain(full).chain(denied).chain(said).collect();
        log::error(&self.explain(&ended, reasons, &before));
        Ok(exit_code(if ended.code == 0 { 1 } else { ended.code }))
    }

    /// Returns the exit code for complete images. A container that goes on running may still lack its GPU.
    fn succeeded(&self, finished: &crate::setup::Finished) -> ExitCode {
        if let Some(error) = &finished.error {
            tracing::warn!("the checkpoint is complete; on the way: {error}");
        }
        // The agent has retried what the plugin could not put back: its report counts.
        if finished.not_put_back.is_empty() || !self.alive() {
            return ExitCode::SUCCESS;
        }
        log::error(&format!(
            "the checkpoint of {} is complete, but the container that was to go on running could not be brought back: {}; restore it from the checkpoint",
            self.inv.id,
            finished.not_put_back.join("; ")
        ));
        ExitCode::FAILURE
    }

    fn line(&self, low_version: Option<&str>) -> Vec<OsString> {
        let kind = self.ctx.low.kind;
        let newer = surroundings::newer_runc(kind, low_version);
        let options = &self.surroundings.extra.options;
        let flags = options.flags(kind, newer, true, &self.inv.flags);
        crate::setup::with_flags(&self.ctx.args, self.inv.verb_at, &flags)
    }

    /// Thaws the container's cgroup after CRIU was killed in the middle of a dump: nothing else can be done from
    /// outside.
    fn thaw(&self, tools: &dyn Tools) {
        self.ask("resume", tools);
    }

    fn ask(&self, verb: &str, tools: &dyn Tools) {
        match state::verb(self.ctx, self.inv, verb, tools) {
            Ok(out) if out.code == 0 => {}
            Ok(out) => tracing::warn!("{verb}: {}", out.stderr.trim()),
            Err(e) => tracing::warn!("{verb}: {e}"),
        }
    }

    fn alive(&self) -> bool {
        !live::tree(self.host, self.state.init).is_empty()
    }

    fn explain(&self, ended: &Ended, reasons: Vec<String>, before: &Before) -> String {
        let container = if ended.killed {
            "CRIU had to be killed: see whether the container still answers, and restart it if not"
        } else if self.alive() {
            "the container goes on running"
        } else {
            "the container is no longer running"
        };
        let why = facts::why(&self.ctx.low, ended, reasons, before);
        format!(
            "checkpoint of {} failed and {container}: {why}",
            self.inv.id
        )
    }
}

/// Returns the metadata without what the dump itself adds.
fn metadata_of(
    setup: &crate::setup::Setup<'_>,
    host: &Host,
    plan: &CheckpointPlan,
    surroundings: &Surroundings,
    agent: Option<&AgentReady>,
    low_version: Option<String>,
) -> Metadata {
    let mut gpu = plan.gpu.clone();
    remap::complete(&mut gpu, setup.spec);
    if let Some(agent) = agent {
        if let Some(version) = &agent.driver_version {
            gpu.drivers
                .entry("nvidia".into())
                .or_insert_with(|| version.clone());
        }
        nvidia_compat::enrich(&mut gpu.gpus, &agent.gpus);
        nvidia_compat::note_use(&mut gpu.processes, &agent.users);
    }
    Metadata {
        schema: Metadata::current_schema(),
        cryopod: env!("CARGO_PKG_VERSION").into(),
        created: facts::rfc3339(SystemTime::now()),
        container: ContainerFacts {
            id: setup.inv.id.clone(),
            low_level: setup.ctx.low.label(),
            low_level_version: low_version,
            leave_running: setup.inv.flags.has("leave-running"),
        },
        host: facts::host(host, Some(setup.criu)),
        gpu,
        mounts: surroundings.mounts.clone(),
        criu: surroundings.criu.clone(),
        lsm: surroundings.lsm.clone(),
        timings: Timings::default(),
        extra: serde_json::Map::new(),
    }
}

/// A container that its engine had paused (containerd and docker do, before every checkpoint), thawed: the driver does
/// its work in the processes' own threads. Dropped, it is paused again, for the engine to resume.
struct Thawed<'a> {
    job: &'a Job<'a>,
    tools: &'a dyn Tools,
}

impl<'a> Thawed<'a> {
    fn of(job: &'a Job<'a>, tools: &'a dyn Tools) -> Option<Self> {
        job.state.paused.then(|| {
            tracing::info!("{}: paused; resumed for the GPU driver", job.inv.id);
            job.thaw(tools);
            Self { job, tools }
        })
    }
}

impl Drop for Thawed<'_> {
    fn drop(&mut self) {
        if self.job.alive() {
            self.job.ask("pause", self.tools);
        }
    }
}

fn plugin_report(images: &Path) -> Value {
    std::fs::read(images.join(cryopod_cuda::image::FILE_NAME))
        .ok()
        .and_then(|bytes| serde_json::from_slice(&bytes).ok())
        .unwrap_or(Value::Null)
}

fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}

pub fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// The image directory: made if it is missing, and removed again if it stays empty.
struct ImageDir {
    path: PathBuf,
    made: bool,
}

impl ImageDir {
    fn ready(path: PathBuf) -> Result<Self, Error> {
        use std::os::unix::fs::DirBuilderExt;
        if path.exists() && !path.is_dir() {
            return Err(Error::Failed(format!(
                "{}: the image path is not a directory; name another one. Nothing was touched",
                path.display()
            )));
        }
        let made = !path.exists();
        if made {
            let what = format!("{}: the image directory cannot be made", path.display());
            std::fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&path)
                .map_err(Error::io(what))?;
        }
        Ok(Self { path, made })
    }

    fn keep(mut self) {
        self.made = false;
    }
}

impl Drop for ImageDir {
    fn drop(&mut self) {
        if self.made {
            // Succeeds only on an empty directory: logs and half-made images belong to the runtime.
            let _ = std::fs::remove_dir(&self.path);
        }
    }
}
