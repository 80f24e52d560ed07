//! Opens a checkpoint: brings its files together and reads its metadata.

use std::path::{Path, PathBuf};

use cryopod_archive::format::names;
use cryopod_archive::metadata::Metadata;
use cryopod_archive::store::Found;

use crate::config::tenant::Tenant;
use crate::error::Error;
use crate::images;
use crate::images::handover::{self, ImportGrant};
use crate::images::owners;
use crate::images::store;
use crate::request::argv::Invocation;
use crate::request::context::Context;

pub(super) struct OpenedCheckpoint {
    /// The image directory.
    pub images: PathBuf,
    pub metadata: Metadata,
    /// The store's entry with the large files, if they are in one.
    pub stored: Option<Found>,
    /// What `cryopod import` wants of this restore.
    pub handed: ImportGrant,
}

/// Why a checkpoint cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error("{}: no checkpoint: it has no {}", .0.display(), names::CRIU_INVENTORY)]
    NoImages(PathBuf),
    #[error("{}: the checkpoint of a container with GPUs has no {}: it was killed before its end; make another", .0.display(), names::METADATA)]
    Incomplete(PathBuf),
    #[error(transparent)]
    Other(#[from] Error),
}

impl From<OpenError> for Error {
    fn from(e: OpenError) -> Self {
        match e {
            OpenError::Other(e) => e,
            OpenError::NoImages(_) | OpenError::Incomplete(_) => Self::Failed(e.to_string()),
        }
    }
}

impl OpenedCheckpoint {
    /// Returns the context with what `cryopod import` wants of this restore: another GPU map, and the place of large
    /// files.
    pub fn context(&self, ctx: &Context) -> Context {
        let mut ctx = ctx.clone();
        if let Some(map) = &self.handed.map {
            ctx.config.gpu.map = Some(map.clone());
        }
        let handed = [&self.handed.places, &self.handed.store];
        ctx.config
            .store
            .search
            .extend(handed.into_iter().flatten().cloned());
        ctx
    }
}

/// Opens a checkpoint. One without metadata is of a container without GPUs, or of another tool.
pub(super) fn open(ctx: &Context, inv: &Invocation) -> Result<OpenedCheckpoint, OpenError> {
    let images = inv.images_of_restore(ctx.low.kind);
    if let Some(checkpoint) = with_metadata(ctx, inv, &images)? {
        return Ok(checkpoint);
    }
    if !images.join(names::CRIU_INVENTORY).is_file() {
        return Err(OpenError::NoImages(images));
    }
    if images.join(names::NVIDIA_IMAGE).exists() {
        return Err(OpenError::Incomplete(images));
    }
    images::no_links(&images).map_err(OpenError::Other)?;
    Ok(OpenedCheckpoint {
        images,
        metadata: Metadata::default(),
        stored: None,
        handed: ImportGrant::default(),
    })
}

/// Opens a checkpoint that has metadata. `None`: it has none.
fn with_metadata(
    ctx: &Context,
    inv: &Invocation,
    directory: &Path,
) -> Result<Option<OpenedCheckpoint>, Error> {
    // A user's own engine restores with that user's privileges. The low-level runtime reports a directory that is not
    // there.
    if directory.exists() && Tenant::user() == Some(0) {
        owners::check_reachable(directory).map_err(|what| {
            Error::Failed(format!(
                "restore of {} refused, nothing was started: {what}",
                inv.id
            ))
        })?;
    }
    let handed = handover::before_restore(directory).map_err(|e| Error::Failed(e.to_string()))?;
    let stored = store::find(&ctx.config, &inv.id, directory, handed.store.as_deref())?;
    match (Metadata::open(directory)?, stored) {
        (Some(metadata), stored) => {
            images::no_links(directory)?;
            Ok(Some(OpenedCheckpoint {
                images: directory.to_owned(),
                metadata,
                stored,
                handed,
            }))
        }
        (None, Some(stored)) => Err(store::without_metadata(&stored, directory)),
        (None, None) => Ok(None),
    }
}
