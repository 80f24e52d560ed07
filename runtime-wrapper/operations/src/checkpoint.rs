//! Runs `checkpoint`: plans, prepares, dumps, concludes.
//!
//! 1. [`plan`]: what has to be saved, and whether that can work. Nothing is made.
//! 2. [`prepare`]: plugins, driver agent, CRIU's configuration, space for the metadata, and whether this host would
//!    restore it. Nothing is frozen: every failure that can be foreseen happens up to here.
//! 3. [`dump`]: the low-level runtime and CRIU. The metadata is written at CRIU's `post-dump`, when the images are
//!    complete and the container still exists: if it cannot be written, the container runs on.
//! 4. [`conclude`]: what was made is kept or removed, and the engine gets one error that says what to do.

mod conclude;
mod dump;
mod exit_file;
mod image_directory;
pub mod on_stop;
mod plan;
mod planned;
mod prepare;
mod refused_before;

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cryopod_archive::format::names;
use cryopod_cuda::procfs;
use cryopod_gpu_plan::checks::switches::{RESTORE_HERE, Switches};
use cryopod_gpu_plan::hazards;
use cryopod_gpu_plan::live;
use cryopod_gpu_plan::plan::{PlanError, container_nodes};
use cryopod_host::containerd::is_image_directory;
use cryopod_host::files::Host;
use cryopod_host::nodes::DeviceNode;
use cryopod_host::programs::{SystemTools, Tools};
use cryopod_host::spec::Spec;

use self::exit_file::ExitFile;
use self::image_directory::ImageDirectory;
use crate::criu::NO_CRIU;
use crate::error::Error;
use crate::images::store::Cleaning;
use crate::pause;
use crate::pause::suspended::SuspendLock;
use crate::preflight::{restore_here, surroundings};
use crate::request::Request;
use crate::request::argv::Invocation;
use crate::request::context::Context;
use crate::request::passthrough;
use crate::request::state::{self, ContainerState};
use crate::rootfs::frozen::Frozen;
use crate::rootfs::{self, frozen};
use crate::run::application::{self, NotifiedApplication};
use crate::run::child;
use crate::run::failure::{self, LogMarks};
use crate::run::log;
use crate::run::operation;
use crate::run::runtime_log::HeldErrors;
use crate::run::stuck_freeze;
use crate::security::privileges;

/// How often CRIU tries to freeze a container. A process that is inside vfork(2) at that moment stops the freeze (under
/// load every program that a shell starts is such a moment), and the freezer of cgroup v1 does at times.
const FREEZES: u32 = 3;
/// How often a container is paused anew because one of its processes is inside vfork.
const PAUSES: u32 = 20;
/// Time for a process to come out of vfork.
const OUT_OF_VFORK: Duration = Duration::from_millis(20);
/// CRIU's error when it could not stop a container's processes in 10 seconds.
const NOT_STOPPED: &str = "Timeout reached. Try to interrupt";

/// Checkpoints a container. On error the container goes on running.
pub fn run(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    let started = Instant::now();
    // The low-level runtime reports whatever is wrong with the container's state.
    let tools = SystemTools::from_env();
    // What a killed operation has frozen is no pause.
    operation::sweep_dead();
    let Some(mut state) = ContainerState::ask(ctx, inv, &tools) else {
        return Err(passthrough::exec(&ctx.low, &ctx.args));
    };
    let mut request = Request::checkpoint(ctx, inv, &state);
    request.lock = refused_before::lock(&request, &state, Duration::ZERO)?;
    state.ask_again(ctx, inv, &tools);
    refused_before::lost_export(&request)?;
    refused_before::without_cgroups(&request)?;
    let nodes = container_nodes(&request.host, &request.spec, state.init);
    let exit_file = ExitFile::find(&request.host, state.init);
    // containerd may remove the images while CRIU writes them, and then the container must not end.
    let asks_criu = application::takes_part(&request.spec)
        || !request.leave_running() && is_image_directory(&request.images);
    let result = if nodes.is_empty() && !asks_criu {
        without_gpu(&request, &state)
    } else {
        with_metadata(&request, &state, nodes, None, started)
    };
    if let Some(exit_file) = exit_file {
        let succeeded = matches!(&result, Ok(code) if *code == ExitCode::SUCCESS);
        exit_file.wait(succeeded && !request.leave_running() && !request.pre_dump());
    }
    result
}

/// A checkpoint that cryopod makes of its own accord.
struct OwnCheckpoint<'a> {
    /// Those that are watched already.
    signals: &'a child::Signals,
    /// How long it waits for the container's lock.
    patience: Duration,
    /// Ends the container with this cgroup, when images and metadata are complete. No instruction of its processes may
    /// run any more. An error: the container goes on. `None`: it goes on.
    end: Option<&'a mut dyn FnMut(Frozen) -> Result<(), Error>>,
}

/// Checkpoints a container into a place.
///
/// # Errors
/// The container goes on running.
fn into_place(
    ctx: &Context,
    inv: &Invocation,
    state: &ContainerState,
    own: OwnCheckpoint<'_>,
) -> Result<(), Error> {
    let mut request = Request::checkpoint(ctx, inv, state);
    request.ends = own.end.is_some();
    request.into_place = true;
    request.lock = refused_before::lock(&request, state, own.patience)?;
    // Before that another operation may have had it frozen, or its engine may have paused it.
    let state = ContainerState::ask(ctx, inv, &SystemTools::from_env())
        .filter(|now| now.init == state.init && !now.paused);
    let state = state.ok_or_else(|| Error::Failed("it is paused, or has ended".into()))?;
    let nodes = container_nodes(&request.host, &request.spec, state.init);
    match with_metadata(&request, &state, nodes, Some(own), Instant::now())? {
        code if code == ExitCode::SUCCESS => Ok(()),
        _ => Err(Error::Failed("the checkpoint failed".into())),
    }
}

/// Checkpoints a container with cryopod's metadata.
fn with_metadata(
    request: &Request<'_>,
    state: &ContainerState,
    nodes: Vec<DeviceNode>,
    mut own: Option<OwnCheckpoint<'_>>,
    started: Instant,
) -> Result<ExitCode, Error> {
    let _not_suspended = match SuspendLock::take(&request.host, state.init, Duration::ZERO) {
        // The plan says that it has ended.
        Err(e) if e.kind() == ErrorKind::NotFound => None,
        lock => Some(lock.map_err(|e| {
            Error::untouched(format!("checkpoint of {} refused: {e}", request.id()))
        })?),
    };
    let watched;
    let signals = match &own {
        Some(own) => own.signals,
        None => {
            watched = child::Signals::watch()?;
            &watched
        }
    };
    // Before the plan, for which the preload library in its processes is asked. Dropped last, when all else is done.
    let locked = plan::locked_at_pause(request, state)?;
    let _thawed = locked.is_empty().then(|| Thawed::of(request, state));
    let mut planned = plan::plan(request, state, nodes.clone())?;
    if state.paused {
        // Thawed now, or never: those that were about to end when the engine paused the container may do so.
        plan::no_exec_processes(request, state, !planned.locked.is_empty())?;
    }
    let told = NotifiedApplication::before_checkpoint(request, state)?;
    if told.is_some() {
        // The application may have changed everything.
        planned = plan::plan(request, state, nodes)?;
    }
    let _cleaning = planned.stored.then(|| Cleaning::start(request.config()));
    let mut tries = FREEZES;
    loop {
        if !planned.locked.is_empty() {
            pause_outside_vfork(request, state);
        }
        let mut prepared = prepare::prepare(request, state, &planned)?;
        let mut dumped = dump::dump(&mut prepared, signals, started)?;
        tries -= 1;
        let mut unsent = None;
        if let Some(frozen) = dumped.frozen.take()
            && let Some(end) = own.as_mut().and_then(|own| own.end.as_mut())
            && dumped.succeeded()
        {
            conclude::count(&prepared.metadata, &prepared.images.path);
            // Before the agent ends, which brings the GPU memory of living processes back.
            unsent = end(frozen).err();
        }
        if !dumped.succeeded() && !state.paused {
            frozen::thaw_left(&request.host, &request.spec, state.init);
        }
        let again = dumped.ended.not_frozen && tries > 0;
        let result = conclude::conclude(prepared, dumped, again);
        if let Some(e) = unsent {
            return Err(e);
        }
        if !again || !alive(&request.host, state) {
            return result;
        }
    }
}

/// Leaves a container without GPUs to the low-level runtime, and stays its parent: a CRIU that is killed leaves the
/// container frozen, and runc's last error, which an engine shows, has no reason (`criu failed: type NOTIFY errno 0`).
fn without_gpu(request: &Request<'_>, state: &ContainerState) -> Result<ExitCode, Error> {
    // A restore compares every container's processes with its spec, and CRIU restores not all that it dumps.
    let switches = Switches::gather(&request.spec, &request.config().checks, &|_| None);
    let mut tree = live::tree(&request.host, state.init);
    live::retain_living(&request.host, &mut tree);
    let mut beyond = privileges::running(request.config(), &request.host, &request.spec, &tree);
    beyond.extend(hazards::unrestorable(&request.host, &request.spec, &tree));
    beyond.extend(restore_here::not_openable(request, &tree));
    if switches.is_ok_and(|s| s.on(RESTORE_HERE)) {
        surroundings::ensure_followed(request)?;
        if !beyond.is_empty() {
            return Err(PlanError::Refused(beyond).into());
        }
    }
    let carries_files = carries_files(request, state, false)?;
    let images = ImageDirectory::ready(&request.images)?;
    prepare::work_directory(request);
    let (low, args) = (&request.ctx.low, &request.ctx.args);
    for tries in (0..FREEZES).rev() {
        pause_outside_vfork(request, state);
        // A running container cannot be asked for its files; an engine that carries none has paused it.
        if state.paused && carries_files {
            capture_files(request, state, None)?;
        }
        let before = LogMarks::note(request.log(names::DUMP_LOG), &request.inv.globals);
        let (held, stderr) = HeldErrors::new().map_err(Error::io("memfd_create"))?;
        let limit = Duration::from_secs(request.config().limits.checkpoint_s);
        // CRIU writes it last. One may be there of an earlier checkpoint.
        let inventory = || {
            let meta = request.images.join(names::CRIU_INVENTORY).metadata().ok()?;
            Some((meta.ino(), meta.modified().ok()?))
        };
        let earlier = inventory();
        let ended = child::attend_checkpoint(low, args, stderr, limit)?;
        if ended.code != 0 {
            if !state.paused {
                frozen::thaw_left(&request.host, &request.spec, state.init);
            }
            let none = request.tools.find("criu").is_none();
            let reasons = none.then(|| NO_CRIU.to_owned()).into_iter();
            let reasons = reasons.chain(failure::full_disk(&request.images)).collect();
            let why = failure::describe(low, &ended, reasons, &before, &held.text());
            if tries > 0 && why.contains(NOT_STOPPED) && alive(&request.host, state) {
                tracing::info!("{}: {why}; CRIU tries again", request.id());
                continue;
            }
            let mut told = match ended.interrupted {
                Some(_) => format!(
                    "checkpoint of {} failed, and whether the container goes on is not known yet: {why}",
                    request.id()
                ),
                None => failed(request, state, &why, &[]),
            };
            if !alive(&request.host, state) && inventory() != earlier {
                let images = request.images.display();
                told.push_str(&format!(
                    "; CRIU's images in {images} are complete: unless its engine removes them, a restore brings it back"
                ));
            }
            log::error(&told);
        } else {
            images.keep();
        }
        held.hand_on();
        return Ok(child::exit_code(ended.code));
    }
    Ok(ExitCode::FAILURE)
}

/// Pauses a container anew if its engine has paused it while one of its processes was inside vfork(2). CRIU stops the
/// child before it lets the container run, and waits for the parent in vain, however often it tries. BusyBox's shell from
/// 1.38 on is inside vfork for each program that it starts.
fn pause_outside_vfork(request: &Request<'_>, state: &ContainerState) {
    for _ in 0..PAUSES {
        let tree = live::tree(&request.host, state.init).into_iter();
        let mut threads = tree.flat_map(procfs::threads);
        if !state.paused || !threads.any(stuck_freeze::inside_vfork) {
            return;
        }
        let thawed = Thawed::of(request, state);
        std::thread::sleep(OUT_OF_VFORK);
        drop(thawed);
    }
}

/// What to tell of a failed checkpoint. `left`: the processes whose GPU state could not be put back.
fn failed(request: &Request<'_>, state: &ContainerState, why: &str, left: &[String]) -> String {
    let init = alive(&request.host, state).then_some(state.init);
    told(request.id(), init, why, left)
}

/// [`failed`] for a container with this init process; `None`: it has ended.
fn told(id: &str, init: Option<i32>, why: &str, left: &[String]) -> String {
    match init {
        None => format!("checkpoint of {id} failed and the container is no longer running: {why}"),
        Some(_) if left.is_empty() => {
            format!("checkpoint of {id} failed and the container goes on running: {why}")
        }
        Some(init) => format!(
            "checkpoint of {id} failed: {why}; the container runs, but its CUDA calls may wait: {}; try `cryopod resume pid:{init}`",
            left.join("; ")
        ),
    }
}

/// Returns true if the checkpoint must carry the container's changes of files. `goes_on`: its processes run on when CRIU
/// has dumped them.
fn carries_files(
    request: &Request<'_>,
    state: &ContainerState,
    goes_on: bool,
) -> Result<bool, Error> {
    let options = &request.config().rootfs;
    let named = (&*state.bundle, request.id());
    Ok(rootfs::wanted(options, &request.spec, named, goes_on)? && !request.pre_dump())
}

fn capture_files(
    request: &Request<'_>,
    state: &ContainerState,
    operation: Option<&Path>,
) -> Result<(), Error> {
    let container = state.container(&request.spec, &request.mounts);
    let options = &request.config().rootfs;
    rootfs::capture(
        options,
        &request.host,
        &container,
        &request.images,
        operation,
    )
}

fn alive(host: &Host, state: &ContainerState) -> bool {
    live::is_alive(host, state.init)
}

/// Has the low-level runtime do something to the container. Returns false for a failure, which is logged.
fn ask(request: &Request<'_>, verb: &str) -> bool {
    match state::verb(request.ctx, request.inv, verb, &request.tools) {
        Ok(out) if out.code == 0 => return true,
        Ok(out) => tracing::warn!("{verb}: {}", out.stderr.trim()),
        Err(e) => tracing::warn!("{verb}: {e}"),
    }
    false
}

/// A container that its engine had paused (containerd and docker do, before every checkpoint), thawed: the driver does
/// its work in the processes' own threads. Dropped, it is paused again, for the engine to resume.
struct Thawed<'a> {
    request: &'a Request<'a>,
    state: &'a ContainerState,
    marked: bool,
}

impl<'a> Thawed<'a> {
    fn of(request: &'a Request<'a>, state: &'a ContainerState) -> Option<Self> {
        state.paused.then(|| {
            tracing::info!("{}: paused, and resumed for a moment", request.id());
            let marked = pause::mark_thawed(&state::directory(request.ctx, request.inv))
                .inspect_err(|e| {
                    tracing::debug!("{}: no mark that it is thawed: {e}", request.id());
                })
                .is_ok();
            ask(request, "resume");
            Self {
                request,
                state,
                marked,
            }
        })
    }
}

impl Drop for Thawed<'_> {
    fn drop(&mut self) {
        let directory = state::directory(self.request.ctx, self.request.inv);
        if alive(&self.request.host, self.state) && !is_resumed(self.marked, &directory) {
            let paused = ask(self.request, "pause");
            let (host, spec) = (&self.request.host, &self.request.spec);
            end_thawed(paused, host, spec, self.state.init, &directory);
        }
    }
}

/// Returns true if a `resume` has removed the mark meanwhile: for its engine the container runs, and nobody resumes it again.
fn is_resumed(marked: bool, state_directory: &Path) -> bool {
    marked && !pause::is_marked_thawed(state_directory)
}

/// Removes the mark of a container that is paused again. One that is not keeps it, for the engine's `resume`. runc gives
/// up after 10 s, and would leave it to freeze later (cgroup v2).
fn end_thawed(paused: bool, host: &Host, spec: &Spec, init: i32, state_directory: &Path) {
    match paused {
        true => drop(pause::unmark_thawed(state_directory)),
        false => frozen::thaw_left(host, spec, init),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;

    #[test]
    fn a_failure_says_whether_the_container_runs() {
        let left = ["process 8 (job) is left checkpointed by the driver: no".to_owned()];
        for (init, left, want) in [
            (
                Some(7),
                &[][..],
                "c1 failed and the container goes on running: why",
            ),
            (
                Some(7),
                &left[..],
                "c1 failed: why; the container runs, but its CUDA calls may wait: process 8 (job) is left checkpointed by the driver: no; try `cryopod resume pid:7`",
            ),
            (
                None,
                &left[..],
                "c1 failed and the container is no longer running: why",
            ),
        ] {
            assert_eq!(
                told("c1", init, "why", left),
                format!("checkpoint of {want}")
            );
        }
    }

    #[test]
    fn a_container_that_cannot_be_paused_again_runs_on() {
        let dir = tempfile::tempdir().unwrap();
        let freeze = dir.path().join("sys/fs/cgroup/c/cgroup.freeze");
        dir.put("proc/7/cgroup", "0::/c\n");
        dir.put("sys/fs/cgroup/c/cgroup.freeze", "1\n");
        let host = Host::at(dir.path());
        pause::mark_thawed(dir.path()).unwrap();
        end_thawed(false, &host, &Spec::default(), 7, dir.path());
        assert_eq!(std::fs::read(&freeze).unwrap(), b"0\n");
        dir.put("sys/fs/cgroup/c/cgroup.freeze", "1\n");
        end_thawed(true, &host, &Spec::default(), 7, dir.path());
        assert_eq!(std::fs::read(&freeze).unwrap(), b"1\n");
        assert!(!pause::unmark_thawed(dir.path()), "it was removed");
    }

    #[test]
    fn a_container_that_is_resumed_meanwhile_is_not_paused_again() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!is_resumed(false, dir.path()), "no mark could be made");
        pause::mark_thawed(dir.path()).unwrap();
        assert!(!is_resumed(true, dir.path()));
        pause::unmark_thawed(dir.path());
        assert!(is_resumed(true, dir.path()));
    }
}
