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
//! A directory without metadata is a checkpoint of a container without GPUs, or of another tool: the low-level runtime
//! restores it as it is. Two fixes apply to every restore under crun, GPU or not. cryopod drops a runc flag that
//! containerd passes to any runtime, and makes CRIU leave cgroups alone where it would fail on them.

mod arguments;
mod bundle;
mod conclude;
mod open;
mod plan;
mod prepare;
mod run;

use std::process::ExitCode;

use cryopod_host::nodes::Vendor;

use crate::argv::Invocation;
use crate::bundle::hold;
use crate::child::Signals;
use crate::context::Context;
use crate::error::Error;
use crate::operation::Operation;
use crate::request::Request;
use crate::{passthrough, plugins, rootfs};

/// Restores a container. Execs the low-level runtime for one whose checkpoint has no metadata.
///
/// # Errors
/// Nothing was started, and the checkpoint is untouched.
pub fn run(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    let Some(checkpoint) = open::open(ctx, inv)? else {
        return Err(without_metadata(ctx, inv));
    };
    let _held = hold(&inv.bundle(), &inv.id)?;
    let request = Request::restore(ctx, inv)?;
    let signals = Signals::watch()?;
    let op = Operation::new()?;
    let planned = plan::plan(&request, &checkpoint, &op)?;
    let prepared = prepare::prepare(&request, &checkpoint, planned, &op)?;
    let changed = bundle::change(&request, &prepared)?;
    let ran = run::run(&request, &prepared, &op, &signals)?;
    let amd = plugins::uses(&checkpoint.metadata, Vendor::Amd);
    Ok(conclude::conclude(
        &request, prepared, changed, ran, &op, amd,
    ))
}

/// Leaves a checkpoint without metadata to the low-level runtime. Returns only if that fails.
fn without_metadata(ctx: &Context, inv: &Invocation) -> Error {
    let images = inv.images_of_restore(ctx.low.kind);
    match rootfs::apply(&ctx.config.rootfs, &images, &inv.bundle()) {
        Ok(()) => passthrough::exec(&ctx.low, &arguments::fit(ctx, inv)),
        Err(e) => e,
    }
}
