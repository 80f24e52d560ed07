//! Makes a container's stop a checkpoint: [`ANNOTATION`].
//!
//! An engine's stop is `kill ID TERM`, a grace period, and `kill ID KILL`. `kill` returns at once: podman, dockerd and
//! containerd's shim hold the container's lock meanwhile, and would hold up the KILL. So a process of its own
//! ([`NAME`]) does the rest, in this order:
//!
//! 1. It checkpoints the container into its place. CRIU lets go of processes in a frozen cgroup, and the driver keeps
//!    their GPU memory checkpointed.
//! 2. The checkpoint gets its name in the place.
//! 3. The container's init process exits with [`EXIT_CODE`] ([`end`]). It runs no instruction of its own after 1.
//!
//! If 1 fails, or takes longer than the container's grace period allows, the container goes on and gets the TERM. KILL
//! passes at any time. A container that a KILL ends after 1 has a complete checkpoint, too.

mod end;
pub mod every;

use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use cryopod_host::processes::stat::StatusFile;
use cryopod_host::programs::{SystemTools, Tools};
use cryopod_host::spec::Spec;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::config::restore::Asker;
use crate::config::tenant::{Tenant, holds_pod};
use crate::config::{Config, CriuValue};
use crate::criu::program;
use crate::error::Error;
use crate::images::place::lease::{self, LeaseHolder};
use crate::images::place::{
    self, PartialCheckpoint, Place, PlaceRequest, Setting, integrity, prune, seconds, setting,
};
use crate::request::argv::{self, Invocation, Verb};
use crate::request::context::Context;
use crate::request::passthrough;
use crate::request::state::{self, ContainerState};
use crate::rootfs::frozen::Frozen;
use crate::run::child::{self, Signals};
use crate::run::{log, metrics, operation};

/// What a stop of the container is: `checkpoint`, or `end`.
const ANNOTATION: &str = "dev.cryopod.on-stop";
/// Names the place.
const TO: &str = "dev.cryopod.checkpoint.to";
/// The engine's grace period: the time between TERM and KILL.
const GRACE: &str = "dev.cryopod.grace_s";
/// That of docker and podman.
const DEFAULT_GRACE: u64 = 10;
/// The name under which this program checkpoints and ends a container.
pub const NAME: &str = "cryopod-on-stop";
/// The file in the low-level runtime's directory of the container that this program locks.
const LOCK: &str = "cryopod-on-stop";
/// The exit code of a process that TERM ends.
const EXIT_CODE: i32 = 128 + libc::SIGTERM;
/// How long after its time limit a checkpoint may take to give up before the TERM is sent regardless.
const GIVE_UP: Duration = Duration::from_secs(2);

/// What the container asks for: checkpoints in a place, when it stops and while it runs.
struct PlacedRequest<'a> {
    stops: bool,
    /// The time between two checkpoints of the running container.
    every: Option<Duration>,
    place: PlaceRequest<'a>,
    name: String,
    /// The time that the checkpoint of a stop may take.
    limit: Duration,
    /// Other containers of the name may run at the same time.
    many: bool,
    /// How many checkpoints of the name stay; `None`: all.
    keep: Option<usize>,
    /// It took the lease of the name when it was made.
    had_lease: bool,
}

impl<'a> PlacedRequest<'a> {
    /// Reads the container's wishes; `None`: it has none.
    fn of(
        config: &'a Config,
        id: &str,
        spec: &'a Spec,
        tenant: &'a Tenant,
    ) -> Result<Option<Self>, String> {
        let stops = match asked(spec).map(|on_stop| on_stop.value) {
            None | Some("end") => false,
            Some("checkpoint") => true,
            Some(other) => {
                return Err(format!(
                    "{ANNOTATION}: {other:?} is neither \"checkpoint\" nor \"end\""
                ));
            }
        };
        let every = every::period(spec)?;
        if !stops && every.is_none() {
            return Ok(None);
        }
        let to = setting(spec, TO);
        let to = to.ok_or_else(|| match stops {
            true => format!("{ANNOTATION}=checkpoint needs {TO}=PLACE"),
            false => format!("{} needs {TO}=PLACE", every::ANNOTATION),
        })?;
        let asker = Asker {
            tenant,
            by_variable: place::by_variable(
                spec,
                &[ANNOTATION, TO, GRACE, prune::KEEP, every::ANNOTATION],
            ),
        };
        let place = PlaceRequest {
            place: to.value,
            asker,
            options: &config.checkpoint,
            key: "checkpoint.allow",
        };
        place.check().map_err(|why| format!("{TO}: {why}"))?;
        let grace = seconds(spec, GRACE, DEFAULT_GRACE)?;
        Ok(Some(Self {
            stops,
            every,
            place,
            name: place::name(spec, id)?,
            keep: prune::keep(spec)?,
            many: lease::limit(spec)?.is_none(),
            had_lease: lease::note_of(id.as_ref()).is_some_and(|note| note.exists()),
            // The rest is the process's own, should the checkpoint fail.
            limit: grace * 4 / 5,
        }))
    }
}

impl PlacedRequest<'_> {
    /// Begins a checkpoint.
    ///
    /// # Errors
    /// The place cannot be used, or another container has the name now.
    fn begin(&self, me: &LeaseHolder) -> Result<(Place, PartialCheckpoint), Error> {
        let place = self.place.open(&self.name).map_err(Error::Failed)?;
        if !self.many {
            place.renew(me).map_err(Error::io(self.place.place))?;
        }
        self.check_lease(&place, me)?;
        let partial = place.begin().map_err(Error::Failed)?;
        Ok((place, partial))
    }

    /// Checks that no other container has the name now.
    fn check_lease(&self, place: &Place, me: &LeaseHolder) -> Result<(), Error> {
        if self.many {
            return Ok(());
        }
        let other = place.taken_over(me, self.had_lease);
        match other.map_err(Error::io(self.place.place))? {
            None => Ok(()),
            Some(other) => Err(Error::Failed(format!(
                "{other} has taken the lease of {} over: this container must not write its next checkpoint",
                self.name
            ))),
        }
    }

    /// Sends a checkpoint whose files are all there to the place, if that is in object storage.
    ///
    /// # Errors
    /// It is not in the place: the container goes on.
    fn send(
        &self,
        place: &Place,
        partial: &PartialCheckpoint,
        me: &LeaseHolder,
        signals: &Signals,
    ) -> Result<(), Error> {
        place
            .send(partial, &|| signals.interrupted())
            .map_err(|e| match e.kind() {
                ErrorKind::Interrupted => Error::Failed(format!(
                    "{}: not all is sent in time; more time: {GRACE}",
                    self.place.place
                )),
                _ => Error::io(self.place.place)(e),
            })
            // The other may have written it meanwhile.
            .and_then(|sent| self.check_lease(place, me).map(|()| sent))
            .and_then(|sent| {
                let published = place.publish(partial, sent);
                published.map_err(Error::io(self.place.place))
            })
    }

    /// Lists what a complete checkpoint has, and removes those that it supersedes.
    fn completed(&self, ctx: &Context, place: &Place, checkpoint: &Path) {
        let (place, checkpoint, keep) = (place.clone(), checkpoint.to_owned(), self.keep);
        let config = ctx.config.clone();
        let shown = self.place.place.to_owned();
        let limit = config.limits.checkpoint(0);
        attend_place(limit, self.place.place, move |more_time| {
            // The list has a limit of its own, which is to be over first.
            more_time(integrity::limit(&config, &checkpoint) + config.limits.checkpoint(0));
            if let Err(e) = integrity::list(&config, &checkpoint) {
                tracing::warn!("{}: damage will not be found: {e}", checkpoint.display());
            }
            more_time(config.limits.checkpoint(0));
            if let Err(e) = place.completed_there(&checkpoint, keep) {
                tracing::warn!("{shown}: older checkpoints stay: {e}");
            }
            if let Some(Err(e)) = keep.map(|keep| place.prune(keep)) {
                tracing::warn!("{shown}: older checkpoints stay: {e}");
            }
        });
    }
}

/// Does work in a place, with a time limit: a server may never answer. The work may set a new limit for its next step. What
/// still waits then goes on as long as this process.
fn attend_place(
    mut limit: Duration,
    place: &str,
    work: impl FnOnce(&dyn Fn(Duration)) + Send + 'static,
) {
    let (sender, told) = mpsc::channel();
    std::thread::spawn(move || {
        let more_time = |limit| {
            let _ = sender.send(Some(limit));
        };
        work(&more_time);
        let _ = sender.send(None);
    });
    loop {
        match told.recv_timeout(limit) {
            Ok(Some(more)) => limit = more,
            Ok(None) => return,
            Err(RecvTimeoutError::Timeout) => {
                let limit = limit.as_secs();
                return tracing::warn!(
                    "{place}: no answer within {limit} s: what is left to do there waits for the next checkpoint"
                );
            }
            Err(RecvTimeoutError::Disconnected) => {
                return tracing::error!(
                    "{place}: what is left to do there waits for the next checkpoint"
                );
            }
        }
    }
}

/// Removes what there is of a checkpoint that failed.
fn remove_incomplete(limit: Duration, partial: PartialCheckpoint) {
    let place = partial.shown();
    attend_place(limit, &place, move |_| drop(partial));
}

/// What the container wants its stop to be.
fn asked(spec: &Spec) -> Option<Setting<'_>> {
    setting(spec, ANNOTATION).filter(|_| !holds_pod(spec))
}

/// Checks what a new container asks for, and starts the process that checkpoints it while it runs.
///
/// # Errors
/// It could not be checkpointed into its place.
pub fn check(ctx: &Context, inv: &Invocation, spec: &Spec) -> Result<(), Error> {
    let tenant = Tenant::of(&inv.id, &inv.bundle(), inv.globals.root.as_deref(), spec);
    let asked = PlacedRequest::of(&ctx.config, &inv.id, spec, &tenant);
    let asked = asked.map_err(Error::not_started)?;
    match asked.is_some_and(|asked| asked.every.is_some()) {
        true => every::start(ctx).map_err(Error::io(every::NAME)),
        false => Ok(()),
    }
}

/// Returns true if this command line stops a container, and may have to be a checkpoint.
pub fn is_stop(ctx: &Context, inv: &Invocation) -> bool {
    inv.verb == Verb::Kill
        && !inv.flags.has("all")
        && inv.signal(&ctx.args) == Some(Signal::SIGTERM)
}

/// Returns true if this command line kills a container while it may be being checkpointed, and frozen.
pub fn is_kill_meanwhile(ctx: &Context, inv: &Invocation) -> bool {
    inv.verb == Verb::Kill
        && inv.signal(&ctx.args) == Some(Signal::SIGKILL)
        && [LOCK, every::LOCK]
            .iter()
            .any(|lock| state::directory(ctx, inv).join(lock).exists())
}

/// Starts the checkpoint of a container that asks for it at its stop; else passes the TERM on.
pub fn run(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    let tools = SystemTools::from_env();
    every::interrupt(&state::directory(ctx, inv));
    let state = ContainerState::ask(ctx, inv, &tools);
    // The place is not touched here: it may hang.
    let asked = state
        // A checkpoint that gives way may have it frozen: whether it is paused shows after that.
        .filter(|state| !state.created)
        .and_then(|state| asked(&state.spec(ctx, inv)).map(|on| on.value != "end"));
    if asked != Some(true) {
        return Err(passthrough::exec(&ctx.low, &ctx.args));
    }
    let lock = match claim(ctx, inv) {
        Ok(Some(lock)) => lock,
        // Its checkpoint is under way.
        Ok(None) => return Ok(ExitCode::SUCCESS),
        Err(e) => {
            tracing::warn!("the stop of {} is no checkpoint: {e}", inv.id);
            return Err(passthrough::exec(&ctx.low, &ctx.args));
        }
    };
    let mut command = child::detached(NAME);
    command.args(&ctx.args);
    // podman's `kill` has none, and CRIU is searched there.
    command.env("PATH", tools.search());
    // The lock goes with the process.
    command.stdin(Stdio::from(lock)).stderr(own_log());
    match command.spawn() {
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(e) => {
            tracing::warn!("the stop of {} is no checkpoint: {e}", inv.id);
            Err(passthrough::exec(&ctx.low, &ctx.args))
        }
    }
}

/// Passes the TERM on: without a configuration no stop is a checkpoint.
pub fn pass(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    every::interrupt(&state::directory(ctx, inv));
    Err(passthrough::exec(&ctx.low, &ctx.args))
}

/// Locks the container's stop; `None`: another process has done so.
fn claim(ctx: &Context, inv: &Invocation) -> std::io::Result<Option<File>> {
    let file = state::directory(ctx, inv).join(LOCK);
    let file = File::options().append(true).create(true).open(file)?;
    // A lock of the open file, which the next process has, too.
    let copy = file.try_clone()?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) if lock.metadata()?.len() > 0 => Err(std::io::Error::other(
            "it has had its TERM, and may be ending",
        )),
        Ok(lock) => {
            std::mem::forget(lock);
            Ok(Some(copy))
        }
        Err((_, nix::errno::Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, e)) => Err(e.into()),
    }
}

/// Opens the log, which a former one makes room for.
fn own_log() -> Stdio {
    let log = Path::new(log::DETACHED);
    log::make_room(log);
    let file = File::options()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(log);
    file.map_or_else(|_| Stdio::null(), Stdio::from)
}

/// Runs the process that checkpoints and ends a container.
pub fn main(ctx: &Context) -> ExitCode {
    log::init_at(Path::new(log::DETACHED));
    let Some(inv) = argv::decode(ctx.low.kind, &ctx.args) else {
        return ExitCode::FAILURE;
    };
    program::prefer_over_host(&ctx.config);
    let tools = SystemTools::from_env();
    let since = Instant::now();
    let host = Host::system();
    // What a killed operation has frozen is no pause.
    operation::sweep_dead();
    let state = ContainerState::ask(ctx, &inv, &tools);
    let started = |state: &ContainerState| live::start_time(&host, state.init);
    let before = state.as_ref().and_then(started);
    let has_term = AtomicBool::new(false);
    // Its removal can take longer than the container's grace period.
    let mut incomplete = None;
    let saved = state
        .as_ref()
        .ok_or_else(|| Error::Failed("it is gone".into()))
        .and_then(|state| {
            let save = || save(ctx, &inv, state, &has_term, &mut incomplete);
            metrics::measured("stop", save, |()| true)
        });
    let id = &inv.id;
    match saved {
        Ok(()) => {
            tracing::info!("{id}: stopped after {} ms", since.elapsed().as_millis());
            return ExitCode::SUCCESS;
        }
        Err(e) => tracing::error!("{id}: the stop is no checkpoint: {e}"),
    }
    // Its engine may have started another one of this id meanwhile.
    if state.as_ref().is_some_and(|state| started(state) != before) {
        tracing::info!("{id}: it has ended");
    } else {
        send_term(ctx, id, state, has_term.into_inner(), &tools);
    }
    // The lock, which would swallow the next TERM.
    let unlocked = File::open("/dev/null").map(|null| nix::unistd::dup2_stdin(&null));
    if let Err(e) = unlocked {
        tracing::warn!("{id}: {e}");
    }
    if let Some(partial) = incomplete {
        remove_incomplete(ctx.config.limits.checkpoint(0), partial);
    }
    ExitCode::FAILURE
}

/// Sends a container the TERM that its engine has sent, unless it has had it.
fn send_term(
    ctx: &Context,
    id: &str,
    state: Option<ContainerState>,
    has_term: bool,
    tools: &SystemTools,
) {
    if state.is_some_and(|state| handles_term(state.init)) {
        // A later checkpoint would be one of a container that is ending.
        let lock = std::io::stdin().as_fd().try_clone_to_owned();
        let noted = lock.and_then(|lock| File::from(lock).write_all(b"TERM\n"));
        if let Err(e) = noted {
            tracing::warn!("{id}: {e}");
        }
    }
    if !has_term {
        let args: Vec<_> = ctx.args.iter().map(|a| a.as_os_str()).collect();
        match tools.output(&ctx.low.path, &args, ctx.config.limits.tool()) {
            Ok(out) if out.code == 0 => tracing::info!("{id}: TERM is sent"),
            Ok(out) => tracing::warn!("{id}: TERM: {}", out.stderr.trim()),
            Err(e) => tracing::warn!("{id}: TERM: {e}"),
        }
    }
}

/// Returns true if a process has a handler of TERM.
fn handles_term(pid: i32) -> bool {
    let caught = StatusFile::read(&Host::system(), pid).set("SigCgt");
    caught.is_some_and(|caught| caught & (1 << (libc::SIGTERM - 1)) != 0)
}

/// Checkpoints a container and ends it.
///
/// # Errors
/// It goes on running. `has_term`: it has had its TERM. `incomplete`: what there is of the checkpoint.
fn save(
    ctx: &Context,
    inv: &Invocation,
    state: &ContainerState,
    has_term: &AtomicBool,
    incomplete: &mut Option<PartialCheckpoint>,
) -> Result<(), Error> {
    let spec = state.spec(ctx, inv);
    let tenant = Tenant::of(&inv.id, &state.bundle, inv.globals.root.as_deref(), &spec);
    let asked = PlacedRequest::of(&ctx.config, &inv.id, &spec, &tenant).map_err(Error::Failed)?;
    let asked = asked.filter(|asked| asked.stops);
    let asked = asked.ok_or_else(|| Error::Failed(format!("{ANNOTATION} is gone")))?;
    let signals = Signals::watch()?;
    let done = AtomicBool::new(false);
    let (place, checkpoint) = std::thread::scope(|scope| {
        scope.spawn(|| watchdog(state.init, asked.limit, &done, has_term));
        let saved = save_in_time(ctx, inv, state, &asked, &signals, incomplete);
        done.store(true, Ordering::Release);
        saved
    })?;
    // The container has ended, which does not wait for this.
    asked.completed(ctx, &place, &checkpoint);
    Ok(())
}

/// Has the checkpoint give up when its time is over, and sends the TERM if that does not help: the place may hang.
fn watchdog(init: i32, limit: Duration, done: &AtomicBool, has_term: &AtomicBool) {
    let host = Host::system();
    let started = live::start_time(&host, init);
    let wait = |limit: Duration| {
        let end = Instant::now() + limit;
        while !done.load(Ordering::Acquire) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(20));
        }
        !done.load(Ordering::Acquire)
    };
    if wait(limit) {
        let _ = kill(Pid::this(), Signal::SIGTERM);
    } else {
        return;
    }
    if wait(GIVE_UP) && started.is_some() && live::start_time(&host, init) == started {
        tracing::error!("process {init}: the checkpoint does not give up in time, TERM is sent");
        let sent = kill(Pid::from_raw(init), Signal::SIGTERM);
        has_term.store(sent.is_ok(), Ordering::Release);
    }
}

fn save_in_time(
    ctx: &Context,
    inv: &Invocation,
    state: &ContainerState,
    asked: &PlacedRequest<'_>,
    signals: &Signals,
    partial: &mut Option<PartialCheckpoint>,
) -> Result<(Place, PathBuf), Error> {
    let since = Instant::now();
    let _no_other = every::end(&state::directory(ctx, inv), asked.limit);
    let me = LeaseHolder::noted(&inv.id, state::directory(ctx, inv));
    let (place, begun) = asked.begin(&me)?;
    let config = config_of_stop(&ctx.config, asked.limit);
    let images = begun.path().to_owned();
    *partial = Some(begun);
    let (stopping, inv_of_checkpoint) = checkpoint_of(ctx, inv, config, &images)?;
    let mut named = images;
    let mut is_unsent = false;
    let mut end = |mut frozen: Frozen| {
        if let Some(partial) = &*partial {
            let sent = asked.send(&place, partial, &me, signals);
            sent.inspect_err(|_| is_unsent = true)?;
        }
        // From here on the checkpoint is the container's end, also if this process is killed in the middle of it.
        frozen.forget_note();
        let mut complete = Ok(());
        if let Some(partial) = partial.take() {
            tracing::info!("{}: checkpointed into {}", inv.id, partial.shown());
            complete = partial.complete().map(|complete| named = complete);
        }
        // None of its instructions will run, so the next may begin, which looks for the name.
        let give_back = |complete: std::io::Result<()>| {
            if let Err(e) = complete.and_then(|()| place.give_back(&me)) {
                tracing::warn!("{}: the lease is not given back: {e}", inv.id);
            }
        };
        // Object storage may take its time, in which the container would stay frozen.
        let later = match place.is_remote() {
            true => Some(complete),
            false => {
                give_back(complete);
                None
            }
        };
        if let Err(e) = end::end(state.init, EXIT_CODE, move || drop(frozen)) {
            tracing::warn!("{}: ended by KILL in place of TERM: {e}", inv.id);
        }
        if let Some(complete) = later {
            give_back(complete);
        }
        Ok(())
    };
    let own = super::OwnCheckpoint {
        signals,
        patience: asked.limit.saturating_sub(since.elapsed()),
        end: Some(&mut end),
    };
    let made = super::into_place(&stopping, &inv_of_checkpoint, state, own);
    // Of one that was killed meanwhile nothing else is left.
    if let Some(partial) = partial
        .as_ref()
        .filter(|_| is_unsent && live::is_alive(&Host::system(), state.init))
    {
        partial.discard();
    }
    made.map(|()| (place, named))
}

fn config_of_stop(config: &Config, limit: Duration) -> Config {
    let mut config = config_of_place(config);
    config.limits.checkpoint_s = limit.as_secs().max(1);
    // However much there is to save.
    config.limits.slowest_mib_s = u64::MAX;
    config
}

fn config_of_place(config: &Config) -> Config {
    let mut config = config.clone();
    // A restore closes the connections, unless the container asks for them.
    let options = &mut config.criu.options;
    if options.get("tcp-close") != Some(&CriuValue::Flag(true)) {
        let keep = options.entry("tcp-established".into());
        keep.or_insert(CriuValue::Flag(true));
    }
    config
}

/// Rewrites a command line as that of a checkpoint. The low-level runtime must not end the container.
fn checkpoint_of(
    ctx: &Context,
    inv: &Invocation,
    config: Config,
    images: &Path,
) -> Result<(Context, Invocation), Error> {
    let mut args: Vec<OsString> = ctx.args.iter().take(inv.verb_at).cloned().collect();
    args.extend(["checkpoint", "--leave-running", "--image-path"].map(OsString::from));
    args.push(images.into());
    args.push(inv.id.clone().into());
    let low = ctx.low.clone();
    let inv = argv::decode(low.kind, &args).ok_or_else(|| {
        Error::Failed("the checkpoint's command line cannot be understood".to_owned())
    })?;
    Ok((Context { config, low, args }, inv))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_never_answers_is_left() {
        let (_never, answer) = mpsc::channel::<()>();
        attend_place(Duration::ZERO, "/place", move |more_time| {
            more_time(Duration::ZERO);
            let _ = answer.recv();
        });
        let (sender, done) = mpsc::channel();
        attend_place(Duration::from_secs(60), "/place", move |_| {
            let _ = sender.send(());
        });
        assert!(done.recv().is_ok(), "another's work goes on");
        let (sender, done) = mpsc::channel();
        attend_place(Duration::from_secs(1), "/place", move |more_time| {
            more_time(Duration::from_secs(900));
            std::thread::sleep(Duration::from_millis(1500));
            let _ = sender.send(());
        });
        assert!(done.try_recv().is_ok(), "it waits for the work");
    }
}
