//! Checkpoints a running container again and again into its place: [`ANNOTATION`].
//!
//! A process of its own does so ([`NAME`]), for as long as the container exists. It holds the lock [`LOCK`]. A stop
//! interrupts it by TERM and takes the lock, so that it never waits for a whole checkpoint. A pause interrupts it by INT.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use cryopod_host::programs::SystemTools;
use cryopod_host::spec::Spec;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal as Interrupt;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{
    DEFAULT_GRACE, GRACE, PlacedRequest, checkpoint_of, config_of_place, remove_incomplete,
};
use crate::checkpoint::{OwnCheckpoint, into_place};
use crate::config::tenant::{Tenant, holds_pod};
use crate::criu::program;
use crate::error::Error;
use crate::images::place::lease::LeaseHolder;
use crate::images::place::{PartialCheckpoint, Place, seconds, setting};
use crate::request::argv::{self, Invocation};
use crate::request::context::Context;
use crate::request::lowlevel::RuntimeKind;
use crate::request::state::{self, ContainerState};
use crate::run::child::{self, Signals};
use crate::run::{log, metrics, operation};

/// The seconds between two checkpoints.
pub(super) const ANNOTATION: &str = "dev.cryopod.checkpoint.every_s";
/// The name under which this program checkpoints a running container.
pub const NAME: &str = "cryopod-every";
/// The file in the low-level runtime's directory of the container that this program locks. It has its process id.
pub(super) const LOCK: &str = "cryopod-every";
const LOOK: Duration = Duration::from_millis(200);
/// Names the process that makes the container, or becomes the low-level runtime that does.
const MAKER: &str = "CRYOPOD_MAKER";
/// A container that handles TERM may be ending until its engine's grace period is over, which only [`GRACE`] tells.
const LONGEST_GRACE: Duration = Duration::from_secs(120);
/// So many times in a row the low-level runtime knows no process of a container that has ended. It may fail once.
const ENDED: u32 = 3;
/// What ends the checkpoints, and what interrupts one: [`give_way`] sends the first.
const STOP: Interrupt = Interrupt::SIGTERM;
const PAUSES: [Interrupt; 3] = [Interrupt::SIGINT, Interrupt::SIGHUP, Interrupt::SIGQUIT];
/// How soon a pause that is announced shows in the container's state.
const PAUSED: Duration = Duration::from_secs(2);
/// How long what there is of a checkpoint that failed is waited for.
const REMOVAL: Duration = Duration::from_secs(2);
const TRY_AGAIN: Duration = Duration::from_secs(60);
/// After failures the time between two tries grows to so many periods.
const MAX_PERIODS: u32 = 64;

/// Returns how often the container wants to be checkpointed.
pub(super) fn period(spec: &Spec) -> Result<Option<Duration>, String> {
    match setting(spec, ANNOTATION).is_some() && !holds_pod(spec) {
        true => seconds(spec, ANNOTATION, 0).map(Some),
        false => Ok(None),
    }
}

/// Returns how long a container may be ending after a TERM: twice its engine's grace period.
fn stopping(spec: &Spec) -> Result<Duration, String> {
    match setting(spec, GRACE) {
        Some(_) => Ok(seconds(spec, GRACE, DEFAULT_GRACE)? * 2),
        None => Ok(LONGEST_GRACE),
    }
}

/// Starts the process for a container that is being created.
pub(super) fn start(ctx: &Context) -> io::Result<()> {
    let mut command = child::detached(NAME);
    command.args(&ctx.args);
    command.env(MAKER, std::process::id().to_string());
    // CRIU is searched there.
    command.env("PATH", SystemTools::from_env().search());
    command.spawn().map(drop)
}

/// Has the process give up for the container's stop, without waiting for it.
pub(super) fn interrupt(directory: &Path) {
    if let Some(unlocked) = signal(directory, Signal::TERM) {
        // It is between two checkpoints, and finds its id gone.
        let _ = unlocked.set_len(0);
    }
}

/// Has the process give up a checkpoint for a pause, without waiting for it. It makes none of a paused container.
pub fn give_way(directory: &Path) {
    drop(signal(directory, Signal::INT));
}

/// Sends the process a signal. Returns the lock if the process does not have it.
fn signal(directory: &Path, signal: Signal) -> Option<Flock<File>> {
    let mut options = File::options();
    let options = options.read(true).write(true);
    let mut file = options.open(directory.join(LOCK)).ok()?;
    let mut id = String::new();
    let _ = (&mut file).take(20).read_to_string(&mut id);
    let id = id.trim().parse().ok().and_then(Pid::from_raw);
    let process = id.and_then(|id| pidfd_open(id, PidfdFlags::empty()).ok());
    let unlocked = Flock::lock(file, FlockArg::LockSharedNonblock).ok();
    // As long as it is locked, the process is the one that was opened.
    if let (None, Some(process)) = (&unlocked, process) {
        let _ = pidfd_send_signal(process, signal);
    }
    unlocked
}

/// Has the process give up, and returns the lock, with which there is no other. `None`: it did not give up in time.
pub(super) fn end(directory: &Path, limit: Duration) -> Option<Flock<File>> {
    let until = Instant::now() + limit;
    loop {
        interrupt(directory);
        match lock(directory) {
            Ok(lock) => {
                // A dead process's id may be a stranger's by now.
                let _ = lock.set_len(0);
                return Some(lock);
            }
            Err(_) if Instant::now() > until || !directory.exists() => return None,
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

fn lock(directory: &Path) -> io::Result<Flock<File>> {
    let mut options = File::options();
    let options = options.read(true).write(true).create(true).truncate(false);
    let file = options.open(directory.join(LOCK))?;
    Ok(Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, e)| e)?)
}

fn is_empty(directory: &Path) -> bool {
    let file = directory.join(LOCK).metadata();
    file.is_ok_and(|file| file.len() == 0)
}

/// Locks as the process that [`interrupt`] finds. Returns with the lock whether a stop was told while it was free.
fn attended(directory: &Path) -> io::Result<(Flock<File>, bool)> {
    let mut lock = lock(directory)?;
    let was_told = lock.metadata()?.len() == 0;
    lock.set_len(0)?;
    writeln!(lock, "{}", std::process::id())?;
    Ok((lock, was_told))
}

/// Runs the process.
pub fn main(ctx: &Context) -> ExitCode {
    log::init_at(Path::new(log::DETACHED));
    let Some(inv) = argv::decode(ctx.low.kind, &ctx.args) else {
        return ExitCode::FAILURE;
    };
    program::prefer_over_host(&ctx.config);
    match attend(ctx, &inv) {
        Ok(()) => {
            tracing::info!("{}: no longer checkpointed while it runs", inv.id);
            ExitCode::SUCCESS
        }
        Err(e) => {
            tracing::error!("{}: no checkpoints while it runs: {e}", inv.id);
            ExitCode::FAILURE
        }
    }
}

/// Waits for the next try of a process that cannot read its configuration. Returns false if its container is gone.
pub fn try_again(e: &Error, args: &[OsString]) -> bool {
    log::init_at(Path::new(log::DETACHED));
    tracing::warn!("no checkpoints of a running container until this is corrected: {e}");
    std::thread::sleep(TRY_AGAIN);
    let inv = argv::decode(RuntimeKind::Runc, args);
    inv.is_some_and(|inv| inv.bundle().exists())
}

/// Returns the program that has taken the place of one whose file was removed.
fn successor(own: &Path) -> Option<PathBuf> {
    let path = own.to_str()?.strip_suffix(" (deleted)")?;
    Path::new(path).is_file().then(|| path.into())
}

/// Checkpoints the container until it is gone.
fn attend(ctx: &Context, inv: &Invocation) -> Result<(), Error> {
    let signals = Signals::watch_detached()?;
    let spec = Spec::of_bundle(&inv.bundle())?;
    let period = period(&spec).map_err(Error::Failed)?;
    let stopping = stopping(&spec).map_err(Error::Failed)?;
    let began_in = std::env::current_dir().unwrap_or_else(|_| "/".into());
    // A process must not keep a bundle's file system mounted.
    std::env::set_current_dir("/").map_err(Error::io("/"))?;
    let Some(period) = period else { return Ok(()) };
    let maker = std::env::var(MAKER).ok().and_then(|id| id.parse().ok());
    let is_made = || maker != Some(std::os::unix::process::parent_id());
    let successor = || {
        let own = std::fs::read_link("/proc/self/exe").ok()?;
        let program = successor(&own).filter(|_| is_made())?;
        let mut command = child::detached_program(&program, NAME);
        command.args(&ctx.args);
        command.env_remove(MAKER).current_dir(&began_in);
        Some(command)
    };
    let directory = state::directory(ctx, inv);
    // A restore that fails is followed by another, or by a container without a checkpoint.
    let mut is_stopped = false;
    loop {
        let made = is_made();
        if directory.exists() {
            match Attendance::begin(ctx, inv, &signals, &directory) {
                Ok((attendance, was_told)) => {
                    // A program that this one has succeeded had the lock.
                    is_stopped |= was_told && maker.is_none();
                    attendance.attend(period, stopping, is_stopped, &successor);
                    if is_made() {
                        return Ok(());
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                // A stop has it, which writes no process there.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && is_empty(&directory) => {
                    is_stopped = true;
                }
                Err(e) => return Err(Error::io(LOCK)(e)),
            }
        } else if made || signals.interrupted() {
            return Ok(());
        }
        std::thread::sleep(LOOK);
    }
}

/// The checkpoints of one container while it exists.
struct Attendance<'a> {
    ctx: &'a Context,
    inv: &'a Invocation,
    signals: &'a Signals,
    directory: &'a Path,
    /// None while another process has the container.
    lock: Option<Flock<File>>,
    /// A later container of this id has a directory of its own.
    inode: u64,
}

impl<'a> Attendance<'a> {
    fn begin(
        ctx: &'a Context,
        inv: &'a Invocation,
        signals: &'a Signals,
        directory: &'a Path,
    ) -> io::Result<(Self, bool)> {
        let (lock, was_told) = attended(directory)?;
        let inode = lock.metadata()?.ino();
        let begun = Self {
            ctx,
            inv,
            signals,
            directory,
            lock: Some(lock),
            inode,
        };
        Ok((begun, was_told))
    }

    fn exists(&self) -> bool {
        let lock = self.directory.join(LOCK).symlink_metadata();
        lock.is_ok_and(|lock| lock.ino() == self.inode)
    }

    /// Checkpoints the container until it is gone, or has ended after an interrupt, for which it may take `stopping`.
    /// `is_stopped`: it has had one already. `successor`: the program that takes over after an upgrade, as the driver agent
    /// is of the new version, too.
    fn attend(
        mut self,
        period: Duration,
        stopping: Duration,
        is_stopped: bool,
        successor: &dyn Fn() -> Option<Command>,
    ) {
        if is_stopped && !self.outlives_its_stop(stopping) {
            return;
        }
        let mut wait = period;
        let mut due = Instant::now() + period;
        while self.exists() {
            std::thread::sleep(LOOK);
            if self.signals.interrupted_by(STOP) || self.was_stopped() {
                if !self.outlives_its_stop(stopping) {
                    return;
                }
                due = Instant::now() + period;
            }
            if self.signals.interrupted() {
                PAUSES
                    .iter()
                    .for_each(|signal| self.signals.answered(*signal));
                due = due.max(Instant::now() + PAUSED);
            }
            if Instant::now() < due || self.lock.is_none() {
                continue;
            }
            if let Some(mut program) = successor() {
                self.lock = None;
                let Err(e) = program.spawn() else { return };
                tracing::warn!("{}: the new version does not start: {e}", self.inv.id);
                due = Instant::now() + period;
                continue;
            }
            let started = Instant::now();
            match self.checkpoint() {
                Ok(()) => wait = period,
                Err(e) if self.signals.interrupted() => {
                    tracing::info!("{}: a checkpoint gives way: {e}", self.inv.id);
                }
                Err(e) => {
                    tracing::warn!("{}: no checkpoint while it runs: {e}", self.inv.id);
                    // Each try stops the container for a moment.
                    wait = (wait * 2).min(period * MAX_PERIODS);
                }
            }
            // At most half of the time.
            due = started + wait.max(started.elapsed() * 2);
        }
    }

    /// Takes the lock again, unless a stop has it. Returns true if there was a stop while it was free.
    fn was_stopped(&mut self) -> bool {
        if self.lock.is_some() || !self.exists() {
            return false;
        }
        let (lock, was_told) = attended(self.directory).ok().unzip();
        self.lock = lock;
        was_told == Some(true)
    }

    /// Leaves the container to whoever stops it. Returns true if it is there after `stopping`: it was no stop. Before, a
    /// checkpoint would be one of a container that is ending.
    fn outlives_its_stop(&mut self, stopping: Duration) -> bool {
        self.lock = None;
        self.signals.answered(STOP);
        let until = Instant::now() + stopping;
        let mut unknown = 0;
        while Instant::now() < until {
            std::thread::sleep(Duration::from_secs(1));
            unknown = match self.state() {
                Some(_) => 0,
                None => unknown + 1,
            };
            if !self.exists() || unknown == ENDED {
                return false;
            }
        }
        self.lock = attended(self.directory).ok().map(|(lock, _)| lock);
        true
    }

    fn state(&self) -> Option<ContainerState> {
        ContainerState::ask(self.ctx, self.inv, &SystemTools::from_env())
    }

    fn checkpoint(&mut self) -> Result<(), Error> {
        // What a killed operation has frozen is no pause.
        operation::sweep_dead();
        let Some(state) = self.state() else {
            // It is being restored, or has ended.
            tracing::info!("{}: the low-level runtime names no process", self.inv.id);
            return Ok(());
        };
        if state.paused || state.created {
            return Ok(());
        }
        let (ctx, inv) = (self.ctx, self.inv);
        let spec = state.spec(ctx, inv);
        let tenant = Tenant::of(&inv.id, &state.bundle, inv.globals.root.as_deref(), &spec);
        let asked = PlacedRequest::of(&ctx.config, &inv.id, &spec, &tenant);
        let asked = asked.map_err(Error::Failed)?;
        let asked = asked.ok_or_else(|| Error::Failed(format!("{ANNOTATION} is gone")))?;
        let mut incomplete = None;
        let done = || checkpoint(ctx, inv, &state, &asked, self.signals, &mut incomplete);
        let made = metrics::measured("checkpoint", done, |_| true);
        // A stop waits for the room that this takes, and not for a server that does not answer.
        if let Some(partial) = incomplete {
            remove_incomplete(REMOVAL, partial);
        }
        let (place, named) = made?;
        // A stop does not wait for this.
        self.lock = None;
        asked.completed(ctx, &place, &named);
        Ok(())
    }
}

/// Makes one checkpoint. The container goes on running in any case. `incomplete`: what there is of one that failed.
fn checkpoint(
    ctx: &Context,
    inv: &Invocation,
    state: &ContainerState,
    asked: &PlacedRequest<'_>,
    signals: &Signals,
    incomplete: &mut Option<PartialCheckpoint>,
) -> Result<(Place, PathBuf), Error> {
    let me = LeaseHolder::noted(&inv.id, state::directory(ctx, inv));
    let (place, partial) = asked.begin(&me)?;
    let made = fill(ctx, inv, state, &partial, signals).and_then(|()| {
        let sent = asked.send(&place, &partial, &me, signals);
        sent.inspect_err(|_| {
            // Of one that ended meanwhile nothing else is left.
            if live::is_alive(&Host::system(), state.init) {
                partial.discard();
            }
        })
    });
    if let Err(e) = made {
        *incomplete = Some(partial);
        return Err(e);
    }
    let shown = partial.shown();
    let named = partial.complete().map_err(Error::io("the place"))?;
    tracing::info!("{}: checkpointed into {shown}", inv.id);
    Ok((place, named))
}

fn fill(
    ctx: &Context,
    inv: &Invocation,
    state: &ContainerState,
    partial: &PartialCheckpoint,
    signals: &Signals,
) -> Result<(), Error> {
    let config = config_of_place(&ctx.config);
    let (own_ctx, own_inv) = checkpoint_of(ctx, inv, config, partial.path())?;
    let own = OwnCheckpoint {
        signals,
        patience: Duration::ZERO,
        end: None,
    };
    into_place(&own_ctx, &own_inv, state, own)
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
    fn a_pause_is_no_stop() {
        use std::os::unix::process::ExitStatusExt;
        // SAFETY: installs no handler. A shell has its background jobs ignore it, and the child inherits that.
        unsafe { libc::signal(libc::SIGINT, libc::SIG_DFL) };
        let dir = tempfile::tempdir().unwrap();
        for (tell, sent) in [
            (give_way as fn(&Path), libc::SIGINT),
            (interrupt, libc::SIGTERM),
        ] {
            let mut process = Command::new("sleep").arg("1000").spawn().unwrap();
            let mut lock = lock(dir.path()).unwrap();
            writeln!(lock, "{}", process.id()).unwrap();
            tell(dir.path());
            assert_eq!(process.wait().unwrap().signal(), Some(sent));
            drop(lock);
            tell(dir.path());
            // By this the process learns that there was a stop while the lock was free.
            let is_told = std::fs::read(dir.path().join(LOCK)).unwrap().is_empty();
            assert_eq!(is_told, sent == libc::SIGTERM);
        }
    }

    #[test]
    fn a_program_that_was_replaced_has_a_successor() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cryopod-runtime");
        let deleted = dir.path().join("cryopod-runtime (deleted)");
        assert_eq!(successor(&deleted), None, "the package was removed");
        std::fs::write(&path, "").unwrap();
        assert_eq!(successor(&deleted), Some(path.clone()));
        assert_eq!(successor(&path), None);
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
