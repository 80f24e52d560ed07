//! Finds the newest checkpoint of a container's name in a place: `latest:PLACE`. A damaged one is set aside, and the one
//! before it takes its place.

use std::cell::Cell;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::{CheckpointName, VARIABLE};
use crate::config::Config;
use crate::config::restore::Asker;
use crate::config::tenant::Tenant;
use crate::error::Error;
use crate::images::place::copies::{self, FetchOutcome};
use crate::images::place::lease::{self, LeaseHolder, NameLease};
use crate::images::place::{self, Place, PlaceRequest, integrity, prune, renewal};
use crate::request::argv::Invocation;
use crate::request::context::Context;
use crate::request::state;
use crate::run::child;
use cryopod_cuda::write_json;
use cryopod_host::spec::Spec;

/// How often the checkpoints are listed that others supersede meanwhile.
const TRIES: usize = 3;

/// The newest checkpoint, and the lease of the name.
pub struct Newest {
    place: Place,
    name: String,
    checkpoints: Vec<PathBuf>,
    me: LeaseHolder,
    lease: Option<NameLease>,
    limit: Option<Duration>,
    is_unknown: Cell<bool>,
}

/// What became of one checkpoint.
enum Tried<T> {
    Restored(T),
    Superseded,
    Damaged(String),
}

impl Newest {
    /// Takes the lease, and finds the checkpoint.
    ///
    /// # Errors
    /// The place may not be used or does not answer, or another container has the lease. Such a container does not start
    /// without a checkpoint either.
    pub fn of(
        ctx: &Context,
        inv: &Invocation,
        spec: &Spec,
        named: &CheckpointName<'_>,
        place: &str,
    ) -> Result<Self, Error> {
        let tenant = Tenant::of(&inv.id, &inv.bundle(), inv.globals.root.as_deref(), spec);
        let by_variable = named.by == VARIABLE || place::by_variable(spec, &[]);
        let refused = |why: String| {
            let (by, named) = (named.by, named.checkpoint);
            Error::not_started(format!("{by}={named}: {why}"))
        };
        let name = place::name(spec, &inv.id).map_err(refused)?;
        let limit = lease::limit(spec).map_err(refused)?;
        let directory = state::directory(ctx, inv);
        if directory.exists() {
            // Its failed creation would give the running one's lease back.
            return Err(refused(format!("the container {} exists", inv.id)));
        }
        let me = LeaseHolder::new(&inv.id, directory);
        let (options, place) = (ctx.config.restore.clone(), place.to_owned());
        let patience = ctx.config.limits.tool() + lease::CONFIRMATION;
        let (sender, found) = mpsc::channel();
        // The place may be on a server that does not answer.
        std::thread::spawn(move || {
            let request = PlaceRequest {
                place: &place,
                asker: Asker {
                    tenant: &tenant,
                    by_variable,
                },
                options: &options,
                key: "restore.allow",
            };
            let _ = sender.send(find(&request, name, me, limit));
        });
        let found = found.recv_timeout(patience);
        found
            .unwrap_or_else(|_| Err(format!("no answer within {} s", patience.as_secs())))
            .map_err(refused)
    }

    /// Has the checkpoints stay, as the container starts without them.
    ///
    /// # Errors
    /// The object storage does not answer: the container is not to start.
    pub fn keep(&self) -> Result<(), Error> {
        let Some(newest) = self.checkpoints.first() else {
            return Ok(());
        };
        let kept = self.place.keep_up_to(newest);
        kept.or_else(|e| match self.place.is_remote() {
            true => Err(Error::not_started(format!("{}: {e}", self.name))),
            false => {
                tracing::warn!("{}: newer ones may supersede it: {e}", newest.display());
                Ok(())
            }
        })
    }

    /// Returns true if the place did not answer: whether a checkpoint fits is not known.
    pub fn is_unknown(&self) -> bool {
        self.is_unknown.get()
    }

    /// Notes the container's lease, for its end on this host ([`delete`]), and has it renewed until then. `None`: it has
    /// none.
    ///
    /// # Errors
    /// Nobody renews it: another host would take it over while the container runs.
    pub fn note(&self, id: &str) -> Result<Option<Child>, Error> {
        let (Some(path), Some(lease)) = (lease::note_of(OsStr::new(id)), &self.lease) else {
            return Ok(None);
        };
        let directory = path.parent().unwrap_or(Path::new("/"));
        let made = fs::create_dir_all(directory);
        let note = (&self.place, &self.me);
        let noted = made.and_then(|()| write_json(&path, &note));
        let limit = self.limit.unwrap_or_default();
        let started = noted.and_then(|()| renewal::start(id, limit, lease));
        started.map(Some).map_err(|e| {
            let path = path.display();
            Error::not_started(format!("the lease cannot be renewed: {path}: {e}"))
        })
    }

    /// Restores the newest checkpoint that is not damaged, as if the container had named it.
    ///
    /// # Errors
    /// There is none, or why it is not restored.
    pub fn restore<T>(
        &self,
        config: &Config,
        by: &'static str,
        restore: impl Fn(&CheckpointName<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut damaged = Vec::new();
        let mut checkpoints = self.checkpoints.clone();
        for _ in 0..TRIES {
            let mut superseded = false;
            for path in &checkpoints {
                match self.restore_one(config, by, path, &restore)? {
                    Tried::Restored(restored) => return Ok(restored),
                    Tried::Superseded => {
                        superseded = true;
                        break;
                    }
                    Tried::Damaged(damage) => {
                        let aside = self.place.set_aside(path);
                        tracing::warn!(
                            "{}: a checkpoint of {} is damaged ({damage}); it is kept as {}, and the one before it is taken",
                            path.display(),
                            self.name,
                            aside.display()
                        );
                        damaged.push(aside.display().to_string());
                    }
                }
            }
            if !superseded {
                return Err(self.none(&damaged));
            }
            let newer = self
                .place
                .newest_first()
                .inspect_err(|_| self.is_unknown.set(true));
            checkpoints = newer.map_err(|why| Error::not_started(format!("{by}: {why}")))?;
        }
        self.is_unknown.set(true);
        Err(Error::not_started(format!(
            "{by}: newer checkpoints of {} supersede each that is about to be restored",
            self.name
        )))
    }

    fn none(&self, damaged: &[String]) -> Error {
        let mut none = format!("there is no checkpoint of {}", self.name);
        if !damaged.is_empty() {
            none += &format!(" that is not damaged ({})", damaged.join(", "));
        }
        Error::not_started(none)
    }

    fn restore_one<T>(
        &self,
        config: &Config,
        by: &'static str,
        path: &Path,
        restore: &impl Fn(&CheckpointName<'_>) -> Result<T, Error>,
    ) -> Result<Tried<T>, Error> {
        let not_started = |why| Error::not_started(format!("{by}: {why}"));
        let mut is_copy_new = false;
        loop {
            match self.fetch(config, path).map_err(not_started)? {
                FetchOutcome::Here => {}
                FetchOutcome::Fetched => is_copy_new = true,
                FetchOutcome::Gone => return Ok(Tried::Superseded),
                FetchOutcome::Damaged(damage) => return Ok(Tried::Damaged(damage)),
            }
            // Copies that run write newer ones, which supersede it.
            let held = prune::hold(path).ok().filter(|_| path.exists());
            let Some(held) = held else {
                return Ok(Tried::Superseded);
            };
            let also_held = copies::ancestors(path).map(|above| prune::hold(&above));
            let also_held: Vec<_> = also_held.collect();
            let damage = match integrity::damage(config, path).map_err(not_started)? {
                Some(damage) => damage,
                None => {
                    let restored = restore(&CheckpointName {
                        checkpoint: path.to_str().unwrap_or_default(),
                        by,
                        is_in_place: true,
                    });
                    let Err(e) = restored else {
                        return restored.map(Tried::Restored);
                    };
                    // The restore itself reads the GPU memory, and may have found what is wrong.
                    match integrity::damage_of_vram(config, path) {
                        Some(damage) => damage,
                        None => return Err(e),
                    }
                }
            };
            drop((held, also_held));
            // Perhaps only this host's copy is.
            if is_copy_new || !self.place.discard_copy(path) {
                return Ok(Tried::Damaged(damage));
            }
            is_copy_new = true;
        }
    }

    /// Brings a checkpoint of object storage to this host.
    fn fetch(&self, config: &Config, checkpoint: &Path) -> Result<FetchOutcome, String> {
        // How much it is the storage alone knows.
        let until = Instant::now() + config.limits.restore(0);
        let fetched = self.place.fetch(checkpoint, &|| Instant::now() > until);
        let fetched = fetched.and_then(|outcome| {
            // It may have taken longer than the lease counts.
            let taken = match (&outcome, self.limit) {
                (FetchOutcome::Fetched, Some(_)) => self.place.taken_over(&self.me, true),
                _ => Ok(None),
            };
            match taken.map_err(|e| e.to_string())? {
                None => Ok(outcome),
                Some(other) => Err(format!("{other} has taken the lease over")),
            }
        });
        fetched.inspect_err(|_| self.is_unknown.set(true))
    }

    /// Gives the lease back: there is no container, or no longer.
    pub fn give_back(&self, id: &str) {
        if let Some(note) = lease::note_of(OsStr::new(id)) {
            let _ = fs::remove_file(note);
        }
        if let Err(e) = self.place.give_back(&self.me) {
            tracing::warn!("the lease of {} is not given back: {e}", self.name);
        }
    }
}

fn find(
    request: &PlaceRequest<'_>,
    name: String,
    me: LeaseHolder,
    limit: Option<Duration>,
) -> Result<Newest, String> {
    let place = request.open(&name)?;
    let lease = limit.map(|limit| place.take(&me, limit)).transpose()?;
    let checkpoints = place.newest_first().inspect_err(|_| {
        let _ = place.give_back(&me);
    })?;
    Ok(Newest {
        checkpoints,
        place,
        name,
        me,
        lease,
        limit,
        is_unknown: Cell::new(false),
    })
}

/// Deletes a container that has a lease, and gives that back. `None`: it has none, and nothing is done.
///
/// # Errors
/// The low-level runtime cannot be started.
pub fn delete(ctx: &Context) -> Result<Option<ExitCode>, Error> {
    let note = ctx.args.last().and_then(|id| lease::note_of(id));
    let Some(path) = note.filter(|path| path.exists()) else {
        return Ok(None);
    };
    give_back(ctx, &path);
    if !path.exists() {
        return Ok(None);
    }
    let stderr = io::stderr().as_fd().try_clone_to_owned();
    let stderr = stderr.map_err(Error::io("standard error"))?;
    let ended = child::attend(&ctx.low, &ctx.args, stderr.into())?;
    give_back(ctx, &path);
    Ok(Some(child::exit_code(ended.code)))
}

/// Gives the lease of a container back, by its note, if the container is no more.
fn give_back(ctx: &Context, path: &Path) {
    let note = lease::read_note(path);
    if note.as_ref().is_some_and(|(_, me)| me.is_here()) {
        return;
    }
    let _ = fs::remove_file(path);
    let Some((place, me)) = note else { return };
    let (sender, done) = mpsc::channel();
    // The place may be on a server that does not answer.
    std::thread::spawn(move || sender.send(place.give_back(&me)));
    if let Ok(Err(e)) = done.recv_timeout(ctx.config.limits.tool()) {
        tracing::warn!("a lease is not given back: {e}");
    }
}
