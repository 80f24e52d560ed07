//! Makes a checkpoint whose GPU memory builds on earlier checkpoints independent of them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::criu;
use crate::error::{Bad, Error};
use crate::format::limits::Limits;
use crate::format::limits::threads_or_cores;
use crate::format::names;
use crate::metadata::{Metadata, MetadataError, MetadataSlot};
use crate::progress::Progress;
use crate::source::{Kind, Source};
use crate::unpack::{UnpackOptions, unpack};
use crate::vram::{
    ChunkDigest, Vram, VramError, VramFacts, WriteOptions, flatten::flatten, remove,
};

#[derive(Debug, Clone, Default)]
pub struct FlattenOptions {
    /// 0: one per core.
    pub threads: usize,
    /// Directories to search for parent checkpoints that have moved.
    pub parents: Vec<PathBuf>,
    pub limits: Limits,
    pub progress: Arc<Progress>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flattened {
    pub before: VramFacts,
    pub after: VramFacts,
}

/// Unpacks a checkpoint with complete GPU memory into a directory that does not exist yet. A directory of CRIU's images
/// stays one; anything else becomes an unpacked checkpoint. After an error the content of the directory must not be
/// used.
pub fn into_directory(
    source: &Source,
    to: &Path,
    options: &FlattenOptions,
) -> Result<Flattened, Error> {
    let unsupported = |reason: String| Error::Unsupported {
        path: source.path().into(),
        reason,
    };
    let images_only = source.kind() == Kind::CriuDirectory;
    if images_only && builds_on_pages(source, options)? {
        return Err(unsupported(
            "CRIU's own images build upon earlier ones too (a pre-dump), and only GPU memory can be made whole; make a checkpoint without --parent-path, or restore this one where its parent is".into(),
        ));
    }
    let here = source.images_directory();
    unpack(
        source,
        to,
        &UnpackOptions {
            images_only,
            without_vram: here.is_some(),
            leave: BTreeMap::new(),
            threads: options.threads,
            limits: options.limits.clone(),
            progress: Arc::clone(&options.progress),
        },
    )?;
    let images = match images_only {
        true => to.to_owned(),
        false => to.join(names::CHECKPOINT_DIR),
    };
    let failed = |e: VramError| unsupported(e.to_string());
    let metadata = Metadata::open(&images).map_err(|e| unsupported(e.to_string()))?;
    let recorded = metadata
        .as_ref()
        .and_then(|metadata| metadata.gpu.vram.as_ref());
    let digest = recorded.map(|facts| facts.digest.parse::<ChunkDigest>());
    let digest = digest.transpose().map_err(unsupported)?;
    let from = here.unwrap_or_else(|| images.clone());
    let vram = Vram::open_with(&from, digest, &options.parents).map_err(failed)?;
    let Some(vram) = vram else {
        return Err(unsupported(
            "it has no GPU memory in files of its own, so there is nothing to make whole".into(),
        ));
    };
    let before = vram.facts();
    let whole = images.join(".vram-whole");
    fs::create_dir(&whole).map_err(Error::io(&whole, "create it"))?;
    let write = WriteOptions {
        threads: threads_or_cores(options.threads),
        ..WriteOptions::default()
    };
    let written = flatten(&vram, &whole, &write, &AtomicBool::new(false)).map_err(failed)?;
    drop(vram);
    remove(&images);
    let moved = || {
        for entry in fs::read_dir(&whole)? {
            let entry = entry?;
            fs::rename(entry.path(), images.join(entry.file_name()))?;
        }
        if images_only && images.join(names::PARENT_LINK).is_symlink() {
            fs::remove_file(images.join(names::PARENT_LINK))?;
        }
        fs::remove_dir(&whole)?;
        // The user may remove the parents once this one exists, so it must be on disk.
        fs::File::open(&images)?.sync_all()
    };
    moved().map_err(Error::io(&images, "put the files in place"))?;
    if metadata.is_some() {
        let recorded = |e: MetadataError| {
            let name = names::METADATA.into();
            let reason = e.to_string();
            Error::bad(source.path(), Bad::Content { name, reason })
        };
        let metadata = Metadata::with_vram(&images, &written.facts);
        let metadata = metadata.map_err(Error::io(&images, "read its metadata"))?;
        MetadataSlot::reserve(&images)
            .and_then(|slot| slot.commit(&metadata))
            .map_err(recorded)?;
    }
    Ok(Flattened {
        before,
        after: written.facts,
    })
}

/// Returns true if CRIU's images of memory refer to earlier ones.
fn builds_on_pages(source: &Source, options: &FlattenOptions) -> Result<bool, Error> {
    let image = |name: &str| {
        let inner = name.strip_prefix(names::CHECKPOINT_DIR)?;
        Some(inner.strip_prefix('/')?.to_owned())
    };
    let wanted = |name: &str| image(name).is_some_and(|name| criu::is_wanted(&name));
    let files = source.small_files(&wanted, &options.limits)?;
    let files = files
        .into_iter()
        .filter_map(|(name, content)| Some((image(&name)?, content)))
        .collect();
    let facts = criu::read(&files, 0).map_err(|e| Error::Unsupported {
        path: source.path().into(),
        reason: e.to_string(),
    })?;
    Ok(facts.parent_bytes > 0)
}
