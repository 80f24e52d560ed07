//! Opens a checkpoint: brings its files together and reads its metadata.

use cryopod_archive::metadata::Metadata;
use cryopod_archive::names;
use cryopod_archive::store::Found;

use crate::config::tenant::Tenant;
use crate::error::Error;
use crate::images;
use crate::images::handover::{self, Handed};
use crate::images::owners;
use crate::images::store;
use crate::request::argv::Invocation;
use crate::request::context::Context;

pub(super) struct Checkpoint {
    pub metadata: Metadata,
    /// The store's entry with the large files, if they are in one.
    pub stored: Option<Found>,
    /// What `cryopod import` wants of this restore.
    pub handed: Handed,
}

impl Checkpoint {
    /// Returns the context with what `cryopod import` wants of this restore: another GPU map, and the place of large
    /// files.
    pub fn context(&self, ctx: &Context) -> Context {
        let mut ctx = ctx.clone();
        if let Some(map) = &self.handed.map {
            ctx.config.gpu.map = Some(map.clone());
        }
        ctx.config.store.search.extend(self.handed.places.clone());
        ctx
    }
}

/// Returns true if the command line names a directory with images of CRIU.
pub(super) fn has_images(ctx: &Context, inv: &Invocation) -> bool {
    let directory = inv.images_of_restore(ctx.low.kind);
    directory.join(names::CRIU_INVENTORY).is_file()
}

/// Opens a checkpoint without metadata: of a container without GPUs, or of another tool.
///
/// # Errors
/// The directory holds no images of CRIU, or has links.
pub(super) fn without_gpus(ctx: &Context, inv: &Invocation) -> Result<Checkpoint, Error> {
    let directory = inv.images_of_restore(ctx.low.kind);
    images::no_links(&directory)?;
    if !directory.join(names::CRIU_INVENTORY).is_file() {
        return Err(Error::Failed(format!(
            "{}: no checkpoint: it has no {}",
            directory.display(),
            names::CRIU_INVENTORY
        )));
    }
    Ok(Checkpoint {
        metadata: Metadata::default(),
        stored: None,
        handed: Handed::default(),
    })
}

/// Opens the checkpoint in the image directory that the command line names. `None`: it has no metadata.
///
/// # Errors
/// The checkpoint is incomplete, has links, or others than root can write it.
pub(super) fn open(ctx: &Context, inv: &Invocation) -> Result<Option<Checkpoint>, Error> {
    let directory = inv.images_of_restore(ctx.low.kind);
    // A user's own engine restores with that user's privileges. The low-level runtime reports a directory that is not
    // there.
    if directory.exists() && Tenant::user() == Some(0) {
        owners::check_reachable(&directory).map_err(|what| {
            Error::Failed(format!(
                "restore of {} refused, nothing was started: {what}",
                inv.id
            ))
        })?;
    }
    let handed = handover::before_restore(&directory).map_err(|e| Error::Failed(e.to_string()))?;
    let stored = store::find(&ctx.config, &inv.id, &directory)?;
    match (Metadata::open(&directory)?, stored) {
        (Some(metadata), stored) => {
            images::no_links(&directory)?;
            Ok(Some(Checkpoint {
                metadata,
                stored,
                handed,
            }))
        }
        (None, Some(stored)) => Err(store::without_metadata(&stored, &directory)),
        (None, None) => Ok(None),
    }
}
