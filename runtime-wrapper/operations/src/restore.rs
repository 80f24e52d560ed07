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
mod device_filter;
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

use std::io;
use std::process::ExitCode;

use cryopod_gpu_plan::gpumap;
use cryopod_host::nodes::Vendor;
use cryopod_host::spec::Spec;
use serde_json::Value;

use crate::bundle::hold;
use crate::criu::plugins;
use crate::error::Error;
use crate::request::Request;
use crate::request::argv::Invocation;
use crate::request::context::Context;
use crate::request::passthrough;
use crate::request::state;
use crate::restore::link_remaps::LinkRemaps;
use crate::restore::new_container::NewContainer;
use crate::run::application::{self, Moment};
use crate::run::child::Signals;
use crate::run::mount_namespace;
use crate::run::operation::Operation;
use crate::vram::preload;

/// Restores a container. Execs the low-level runtime, which says what it lacks, where there are no images.
///
/// # Errors
/// Nothing was started, and the checkpoint is untouched.
pub fn run(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    // The low-level runtime reports a bundle that cannot be read.
    let spec = Spec::of_bundle(&inv.bundle()).unwrap_or_else(|_| Spec::from_json(Value::Null));
    let code = match open::open(ctx, inv)? {
        Some(checkpoint) => restore(ctx, inv, &checkpoint, None)?,
        None if open::has_images(ctx, inv) => {
            restore(ctx, inv, &open::without_gpus(ctx, inv)?, None)?
        }
        None => return Err(without_images(ctx, inv)),
    };
    if inv.flags.has("detach") {
        application::tell(ctx, inv, &spec, Moment::AfterRestore);
    }
    Ok(code)
}

/// Restores into a container that is being created.
///
/// # Errors
/// Nothing was started, and the checkpoint is untouched.
pub fn run_new(ctx: &Context, inv: &Invocation, new: &NewContainer) -> Result<ExitCode, Error> {
    let checkpoint = match open::open(ctx, inv)? {
        Some(checkpoint) => checkpoint,
        None => open::without_gpus(ctx, inv)?,
    };
    restore(ctx, inv, &checkpoint, Some(new))
}

fn restore(
    ctx: &Context,
    inv: &Invocation,
    checkpoint: &open::Checkpoint,
    new: Option<&NewContainer>,
) -> Result<ExitCode, Error> {
    let _held = hold(&inv.bundle(), &inv.id)?;
    preload::restore(&inv.bundle(), &inv.images_of_restore(ctx.low.kind))?;
    let with_handed = checkpoint.context(ctx);
    let mut request = Request::restore(&with_handed, inv)?;
    if checkpoint.handed.map.is_some() {
        request.spec = request.spec.without_annotation(gpumap::ANNOTATION);
    }
    let is_free = new.is_some() && !state::directory(ctx, inv).exists();
    let signals = Signals::watch()?;
    let op = Operation::new()?;
    let planned = plan::plan(&request, checkpoint, &op, new.is_some())?;
    let prepared = prepare::prepare(&request, checkpoint, planned, &op)?;
    if let Some(new) = new {
        new.ask(&op)?;
        NewContainer::reseed();
    }
    // The next copy needs what CRIU removes.
    let links = new.map(|_| LinkRemaps::of(&request)).transpose()?;
    let changed = bundle::change(&request, &prepared, &op)?;
    prepared.ensure_no_links(&request)?;
    let amd = plugins::uses(&checkpoint.metadata, Vendor::Amd);
    let ran = run::run(&request, &prepared, &op, &signals, new, amd)?;
    if let Some(links) = links {
        links.put_back();
    }
    let result = conclude::conclude(&request, prepared, changed, ran, &op, amd);
    if is_free && result.is_err() {
        // crun keeps the state of a failed restore, and a failed `create` leaves nothing.
        state::remove(ctx, inv, &request.tools);
    }
    result
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
