//! Checkpoints a running container again and again into its place: [`ANNOTATION`].
//!
//! A process of its own does so ([`NAME`]), for as long as the container exists. It holds the lock [`LOCK`]. A stop
//! interrupts it and takes the lock, so that it never waits for a whole checkpoint.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use cryopod_host::programs::SystemTools;
use cryopod_host::spec::Spec;
use nix::fcntl::{Flock, FlockArg};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{PlacedRequest, checkpoint_of, config_of_place};
use crate::checkpoint::{OwnCheckpoint, into_place};
use crate::config::tenant::{Tenant, holds_pod};
use crate::criu::program;
use crate::error::Error;
use crate::images::place::lease::LeaseHolder;
use crate::images::place::{seconds, setting};
use crate::request::argv::{self, Invocation};
use crate::request::context::Context;
use crate::request::state::{self, ContainerState};
use crate::run::child::{self, Signals};
use crate::run::{log, metrics};

/// The seconds between two checkpoints.
pub(super) const ANNOTATION: &str = "dev.cryopod.checkpoint.every_s";
/// The name under which this program checkpoints a running container.
pub const NAME: &str = "cryopod-every";
/// The file in the low-level runtime's directory of the container that this program locks. It has its process id.
pub(super) const LOCK: &str = "cryopod-every";
const LOOK: Duration = Duration::from_millis(200);
/// The low-level runtime may take so long to make the container.
const MAKING: Duration = Duration::from_secs(120);
/// After failures the time between two tries grows to so many periods.
const MAX_PERIODS: u32 = 64;

/// Returns how often the container wants to be checkpointed.
pub(super) fn period(spec: &Spec) -> Result<Option<Duration>, String> {
    match setting(spec, ANNOTATION).is_some() && !holds_pod(spec) {
        true => seconds(spec, ANNOTATION, 0).map(Some),
        false => Ok(None),
    }
}

/// Starts the process for a container that is being created.
pub(super) fn start(ctx: &Context) -> io::Result<()> {
    let mut command = child::detached(NAME);
    command.args(&ctx.args);
    // CRIU is searched there.
    command.env("PATH", SystemTools::from_env().search());
    command.spawn().map(drop)
}

/// Has the process give up, without waiting for it.
pub(super) fn interrupt(directory: &Path) {
    let Ok(mut file) = File::options().read(true).open(directory.join(LOCK)) else {
        return;
    };
    let mut id = String::new();
    let _ = (&mut file).take(20).read_to_string(&mut id);
    let id = id.trim().parse().ok().and_then(Pid::from_raw);
    let Some(process) = id.and_then(|id| pidfd_open(id, PidfdFlags::empty()).ok()) else {
        return;
    };
    // As long as it is locked, the process is the one that was opened.
    if Flock::lock(file, FlockArg::LockSharedNonblock).is_err() {
        let _ = pidfd_send_signal(process, Signal::TERM);
    }
}

/// Has the process give up, and returns the lock, with which there is no other. `None`: it did not give up in time.
pub(super) fn end(directory: &Path, limit: Duration) -> Option<Flock<File>> {
    let until = Instant::now() + limit;
    loop {
        interrupt(directory);
        match lock(directory) {
            Ok(lock) => return Some(lock),
            Err(_) if Instant::now() > until || !directory.exists() => return None,
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn lock(directory: &Path) -> io::Result<Flock<File>> {
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false);
    let file = options.open(directory.join(LOCK))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, e)| e.into())
}

/// Runs the process.
pub fn main(ctx: &Context) -> ExitCode {
    log::init_at(Path::new(log::DETACHED));
    let Some(inv) = argv::decode(ctx.low.kind, &ctx.args) else {
        return ExitCode::FAILURE;
    };
    program::prefer_over_host(&ctx.config);
    match attend(ctx, &inv) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            tracing::error!("{}: no checkpoints while it runs: {e}", inv.id);
            ExitCode::FAILURE
        }
    }
}

/// Checkpoints the container until it is gone, or a stop interrupts this.
fn attend(ctx: &Context, inv: &Invocation) -> Result<(), Error> {
    let signals = Signals::watch()?;
    let period = period(&Spec::of_bundle(&inv.bundle())?).map_err(Error::Failed)?;
    // A process must not keep a bundle's file system mounted.
    std::env::set_current_dir("/").map_err(Error::io("/"))?;
    let Some(period) = period else { return Ok(()) };
    let directory = state::directory(ctx, inv);
    let since = Instant::now();
    while !directory.exists() {
        if signals.interrupted() || since.elapsed() > MAKING {
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
    let mut lock = lock(&directory).map_err(Error::io(LOCK))?;
    lock.set_len(0)
        .and_then(|()| writeln!(lock, "{}", std::process::id()))
        .map_err(Error::io(LOCK))?;
    let tools = SystemTools::from_env();
    let mut wait = period;
    let mut due = Instant::now() + period;
    loop {
        std::thread::sleep(LOOK);
        // A later container of this id has a directory of its own.
        if signals.interrupted() || lock.metadata().map_or(0, |m| m.nlink()) == 0 {
            return Ok(());
        }
        if Instant::now() < due {
            continue;
        }
        let started = Instant::now();
        if let Some(state) = ContainerState::ask(ctx, inv, &tools)
            && !state.paused
            && !state.created
        {
            let done = || checkpoint(ctx, inv, &state, &signals);
            match metrics::measured("checkpoint", done, |()| true) {
                Ok(()) => wait = period,
                Err(e) => {
                    tracing::warn!("{}: no checkpoint while it runs: {e}", inv.id);
                    // Each try stops the container for a moment.
                    wait = (wait * 2).min(period * MAX_PERIODS);
                }
            }
        }
        // At most half of the time.
        due = started + wait.max(started.elapsed() * 2);
    }
}

/// Makes one checkpoint. The container goes on running in any case.
fn checkpoint(
    ctx: &Context,
    inv: &Invocation,
    state: &ContainerState,
    signals: &Signals,
) -> Result<(), Error> {
    let spec = state.spec(ctx, inv);
    let tenant = Tenant::of(&inv.id, &state.bundle, inv.globals.root.as_deref(), &spec);
    let asked = PlacedRequest::of(&ctx.config, &inv.id, &spec, &tenant).map_err(Error::Failed)?;
    let asked = asked.ok_or_else(|| Error::Failed(format!("{ANNOTATION} is gone")))?;
    let me = LeaseHolder::here(&inv.id, state::directory(ctx, inv));
    let (place, partial) = asked.begin(&me)?;
    let config = config_of_place(&ctx.config);
    let (own_ctx, own_inv) = checkpoint_of(ctx, inv, config, partial.path())?;
    let own = OwnCheckpoint { signals, end: None };
    into_place(&own_ctx, &own_inv, state, own)?;
    let named = partial.complete();
    tracing::info!("{}: checkpointed into {}", inv.id, named.display());
    asked.completed(ctx, &place, &named);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_without_its_process_interrupts_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let me = std::process::id().to_string();
        std::fs::write(dir.path().join(LOCK), me).unwrap();
        // This process would end.
        interrupt(dir.path());
        let first = end(dir.path(), Duration::ZERO);
        assert!(first.is_some());
        assert!(lock(dir.path()).is_err());
        drop(first);
        assert!(lock(dir.path()).is_ok());
        assert!(end(&dir.path().join("gone"), Duration::from_secs(60)).is_none());
    }

    #[test]
    fn periods() {
        let of = |text: &str| {
            let annotations = serde_json::json!({"annotations": {ANNOTATION: text}});
            period(&Spec::from_json(annotations))
        };
        assert_eq!(of("5").unwrap(), Some(Duration::from_secs(5)));
        for bad in ["0", "5s", "-1", ""] {
            assert!(of(bad).is_err(), "{bad}");
        }
        assert_eq!(
            period(&Spec::from_json(serde_json::json!({}))).unwrap(),
            None
        );
    }
}
