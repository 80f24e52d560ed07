//! Runs `restore`: opens the checkpoint, plans, prepares, edits the bundle, restores, concludes.
//!
//! The steps hand data to each other and touch nothing of the user's until the fourth:
//!
//! 1. [`open`]: what was checkpointed ([`Metadata`](cryopod_archive::metadata::Metadata)).
//! 2. [`plan`]: what this host has, which GPU takes which place, and every reason why it cannot work.
//! 3. [`prepare`]: the image directory of this operation, plugins, CRIU's configuration, the command line.
//! 4. [`bundle`]: the edits of the new container's spec, files and mount points. A later failure puts them back.
//! 5. [`mod@run`]: the low-level runtime and CRIU.
//! 6. [`conclude`]: what was made is kept or removed.
//!
//! A directory without metadata is a checkpoint of a container without GPUs, or of another tool. It goes through the same
//! steps: metadata can be deleted, and CRIU's images are compared with the spec either way.

mod arguments;
mod bundle;
mod conclude;
mod enforcement;
pub mod hook;
mod link_remaps;
mod network_settings;
pub mod new_container;
mod open;
mod plan;
mod prepare;
pub mod private_root;
#[cfg(test)]
mod reach_tests;
mod run;
mod searchable;
mod volume_files;

use std::io::{self, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use cryopod_gpu_plan::mapping::gpumap;
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use cryopod_host::programs::SystemTools;
use cryopod_host::spec::Spec;
use serde_json::Value;

use self::open::{OpenError, OpenedCheckpoint};
use crate::bundle::Edit;
use crate::bundle::lock::BundleLock;
use crate::criu::plugins;
use crate::error::Error;
use crate::request::Request;
use crate::request::argv::{self, Invocation, Verb};
use crate::request::context::Context;
use crate::request::passthrough;
use crate::request::state;
use crate::request::state::ContainerState;
use crate::restore::link_remaps::LinkRemaps;
use crate::restore::new_container::NewContainer;
use crate::run::application::{self, Moment};
use crate::run::child::{self, Signals};
use crate::run::operation::{self, Operation};
use crate::run::{log, mount_namespace};
use crate::vram::preload;

/// Restores a container. Execs the low-level runtime, which says what it lacks, where there are no images.
///
/// # Errors
/// Nothing was started, and the checkpoint is untouched.
pub fn run(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    // The low-level runtime reports a bundle that cannot be read.
    let spec = Spec::of_bundle(&inv.bundle()).unwrap_or_else(|_| Spec::from_json(Value::Null));
    let checkpoint = match open::open(ctx, inv) {
        Err(OpenError::NoImages(_)) => return Err(without_images(ctx, inv)),
        opened => opened?,
    };
    let (code, _guarded) = restore(ctx, inv, checkpoint, None)?;
    if inv.flags.has("detach") {
        application::notify(ctx, inv, &spec, Moment::AfterRestore);
    }
    Ok(code)
}

/// Restores into a container that is being created.
///
/// # Errors
/// Nothing was started, and the checkpoint is untouched.
pub fn run_new(
    ctx: &Context,
    inv: &Invocation,
    new: &NewContainer,
) -> Result<(ExitCode, GuardedBundle), Error> {
    restore(ctx, inv, open::open(ctx, inv)?, Some(new))
}

fn restore(
    ctx: &Context,
    inv: &Invocation,
    checkpoint: OpenedCheckpoint,
    new: Option<&NewContainer>,
) -> Result<(ExitCode, GuardedBundle), Error> {
    let mut guarded = GuardedBundle::of(ctx, inv)?;
    // The low-level runtime says so, too, but only when files of the checkpoint are in the container's root.
    let there = state::directory(ctx, inv).exists();
    if there && ContainerState::ask(ctx, inv, &SystemTools::from_env()).is_some() {
        return Err(Error::Failed(format!(
            "restore of {} refused, nothing was started: a container with this ID already exists",
            inv.id
        )));
    }
    let host = Host::system();
    let on_disk = Spec::of_bundle(&inv.bundle())?;
    let mut edits = preload::edits_of_restore(&checkpoint.images)?;
    if checkpoint.handed.map.is_some() {
        edits.push(Box::new(WithoutGpuMap));
    }
    let spec = crate::bundle::preview(&host, &on_disk, &edits)?;
    let with_handed = checkpoint.context(ctx);
    let request = Request::restore(&with_handed, inv, spec, checkpoint.images.clone());
    let is_free = new.is_some() && !state::directory(ctx, inv).exists();
    let signals = Signals::watch()?;
    let op = Operation::new()?;
    let planned = plan::plan(&request, &checkpoint, &op, new.is_some())?;
    let prepared = prepare::prepare(&request, &checkpoint, planned, &op)?;
    if let Some(new) = new {
        new.ask(&op)?;
        NewContainer::reseed();
    }
    // The next copy needs what CRIU removes.
    let links = match new {
        Some(_) => Some(LinkRemaps::of(&request, prepared.decoded.links()?)),
        None => None,
    };
    let changed = bundle::change(&request, &on_disk, edits, &prepared, &op)?;
    prepared.ensure_no_links(&request)?;
    let amd = plugins::uses(&checkpoint.metadata, Vendor::Amd);
    let mut unlocked = false;
    let mut unlock = || {
        guarded.lock = BundleLock::default();
        unlocked = true;
    };
    let ran = run::run(&request, &prepared, &op, &signals, new, amd, &mut unlock)?;
    // Another operation may have begun while the container ran.
    let is_ours = !unlocked || guarded.lock_again(&request.bundle);
    if let Some(links) = links {
        links.put_back();
    }
    let result = conclude::conclude(&request, prepared, changed, ran, &op, amd, is_ours);
    if is_free && is_ours && result.is_err() {
        // crun keeps the state of a failed restore, and a failed `create` leaves nothing.
        state::remove(ctx, inv, &request.tools);
    }
    result.map(|code| (code, guarded))
}

/// A bundle that is locked while a container is restored into it. A process of its own removes the container if this one is
/// killed: an engine's monitor (conmon) would wait for what the container prints, and never report the failure.
pub struct GuardedBundle {
    guard: Option<PipeWriter>,
    lock: BundleLock,
}

impl GuardedBundle {
    /// The name under which this program removes the container.
    pub const GUARD: &str = "cryopod-guard";
    /// A container is removed within this time.
    const PATIENCE: Duration = Duration::from_secs(20);

    fn of(ctx: &Context, inv: &Invocation) -> Result<Self, Error> {
        let bundle = inv.bundle();
        let lock = BundleLock::take(&bundle, Self::PATIENCE, || {
            let into = bundle.display();
            format!(
                "restore of {} refused: another restore into {into} is under way",
                inv.id
            )
        })?;
        let outlives = inv.verb == Verb::Create || inv.flags.has("detach");
        // One of this name is not this process's.
        let is_free = !state::directory(ctx, inv).exists();
        let lock_of_guard = lock.share().filter(|_| outlives && is_free);
        let warn = |e: &io::Error| tracing::warn!("{}: {e}", Self::GUARD);
        let guard = lock_of_guard.and_then(|lock| start_guard(ctx, lock).inspect_err(warn).ok());
        Ok(Self { guard, lock })
    }

    /// Takes the lock again. Returns false if another operation has it.
    fn lock_again(&mut self, bundle: &Path) -> bool {
        let lock = BundleLock::take(bundle, Duration::ZERO, String::new);
        lock.map(|lock| self.lock = lock).is_ok()
    }

    /// Runs the process.
    pub fn guard(ctx: &Context) -> ExitCode {
        // A byte, or the end of whoever would have written it.
        if !matches!(io::stdin().read(&mut [0]), Ok(0)) {
            return ExitCode::SUCCESS;
        }
        log::init_at(Path::new(log::DETACHED));
        let Some(inv) = argv::decode(ctx.low.kind, &ctx.args) else {
            return ExitCode::FAILURE;
        };
        // Its engine may have made another container of this id meanwhile, with a bundle of its own.
        let locked = rustix::fs::fstat(io::stdout()).map(|file| (file.st_dev, file.st_ino));
        let bundle = std::fs::metadata(inv.bundle()).map(|file| (file.dev(), file.ino()));
        if let (Ok(locked), Ok(bundle)) = (locked, bundle)
            && locked != bundle
        {
            return ExitCode::FAILURE;
        }
        operation::sweep_dead();
        if state::directory(ctx, &inv).exists() {
            tracing::warn!("{}: its restore was killed; it is removed", inv.id);
            state::remove(ctx, &inv, &SystemTools::from_env());
        }
        ExitCode::SUCCESS
    }
}

impl Drop for GuardedBundle {
    fn drop(&mut self) {
        if let Some(mut done) = self.guard.take() {
            // Killed from here on, this process leaves the container, which the engine takes for one that failed. So the
            // guard is not waited for: dropped, the lock is free for all that share it.
            let _ = done.write_all(b".");
        }
    }
}

fn start_guard(ctx: &Context, lock: OwnedFd) -> io::Result<PipeWriter> {
    let (reader, done) = io::pipe()?;
    let mut command = child::detached(GuardedBundle::GUARD);
    command.args(&ctx.args).stdin(reader).stdout(lock);
    command.spawn()?;
    Ok(done)
}

/// Removes the container's own GPU map, where root has given `cryopod import` another one.
struct WithoutGpuMap;

impl Edit for WithoutGpuMap {
    fn name(&self) -> &'static str {
        "the GPU map of cryopod import in place of its own"
    }

    fn apply(&self, _: &Host, spec: &mut Value) -> Result<(), Error> {
        if let Some(all) = spec.get_mut("annotations").and_then(Value::as_object_mut) {
            all.remove(gpumap::ANNOTATION);
        }
        Ok(())
    }
}

/// Leaves a directory without images to the low-level runtime. Returns only if that fails.
fn without_images(ctx: &Context, inv: &Invocation) -> Error {
    match mount_namespace::enter() {
        // Without the right to it, the low-level runtime has none to unmount anything either, and reports what it lacks.
        Err(e) if e.kind() != io::ErrorKind::PermissionDenied => {
            Error::io("a mount namespace for the restore cannot be made")(e)
        }
        _ => passthrough::exec(&ctx.low, &arguments::fit(ctx, inv)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_that_another_operation_has_is_not_ours() {
        let dir = tempfile::tempdir().unwrap();
        let mut guarded = GuardedBundle {
            guard: None,
            lock: BundleLock::default(),
        };
        let take = || BundleLock::take(dir.path(), Duration::ZERO, String::new);
        let other = take().unwrap();
        assert!(!guarded.lock_again(dir.path()));
        drop(other);
        assert!(guarded.lock_again(dir.path()));
        assert!(take().is_err(), "it is held");
    }
}
