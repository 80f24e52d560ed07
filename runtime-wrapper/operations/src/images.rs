//! Makes an image directory with some files rewritten, for one restore; the user's directory is only read.
//!
//! The overlay lies in the operation's directory: the rewritten files, and a link for every other entry of the image
//! directory. The links are relative and pass through no other link. CRIU opens images by the directory's descriptor
//! from within the container as well. There an absolute path would lead elsewhere, while a relative one is followed
//! from the directory on, through the mounts of the host.

pub mod devtar;
pub mod handover;
pub mod mountpoints;
pub mod owners;
pub mod place;
pub mod store;

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use cryopod_archive::criu::mounts::CriuMount;
use cryopod_archive::format::names;
use cryopod_archive::store::Found;
use cryopod_gpu_plan::mapping::remap::{NodeTarget, Remap};
use cryopod_host::nodes::NodeSource;
use cryopod_host::sandbox::Sandbox;

use crate::error::Error;
use crate::request::argv::Invocation;
use crate::run::operation::Operation;
use crate::security::decoder::DecodedImages;
use crate::security::image_check::MAX_ENTRIES;

const DIRECTORY: &str = "images";
/// How long it may take to rewrite an archived `/dev`; one of 64 MiB takes a second.
const REWRITE_LIMIT: Duration = Duration::from_secs(60);

/// Refuses an image directory that has links. Nothing that writes checkpoints makes any but CRIU's `parent`. CRIU would
/// read any file of the host through a link in place of memory, and rewrite it as the container's.
pub fn no_links(images: &Path) -> Result<(), Error> {
    let entries =
        fs::read_dir(images).map_err(Error::at(images, "the image directory cannot be read"))?;
    for entry in entries.take(MAX_ENTRIES) {
        let entry = entry.map_err(Error::at(images, "the image directory cannot be read"))?;
        let link = entry.file_type().is_ok_and(|t| t.is_symlink());
        let parent = entry.file_name() == names::PARENT_LINK;
        if link && !(parent && entry.path().is_dir()) {
            return Err(Error::Failed(format!(
                "restore refused, nothing was started: {}: a link, and a checkpoint has none; put the file itself there if you trust it",
                entry.path().display()
            )));
        }
    }
    Ok(())
}

/// Where the files of a checkpoint are that its image directory has not.
#[derive(Debug, Clone, Copy, Default)]
pub struct ImageLinks<'a> {
    pub stored: Option<&'a Found>,
    /// A directory with some.
    pub unpacked: Option<&'a Path>,
}

/// Images that CRIU reads in place of the checkpoint's.
#[derive(Debug)]
pub struct RewrittenImages<'a> {
    /// All small ones, if they are checked and encoded anew. CRIU then sees of the others only what is known.
    pub decoded: &'a DecodedImages,
    /// That of the network namespace: name and content.
    pub network: Option<(String, Vec<u8>)>,
}

impl ImageLinks<'_> {
    fn is_empty(&self) -> bool {
        self.stored.is_none() && self.unpacked.is_none()
    }
}

/// Makes the overlay if the archived `/dev` has to change, files are elsewhere, or some are `written` anew. `None`: the
/// images can be used as they are.
pub fn overlay(
    op: &Operation,
    images: &Path,
    remap: &Remap,
    links: ImageLinks<'_>,
    written: &RewrittenImages<'_>,
) -> Result<Option<PathBuf>, Error> {
    let changed = changed(remap);
    let encoded = written.decoded.encoded.as_ref();
    let is_unwritten = encoded.is_none() && written.network.is_none();
    if changed.is_empty() && links.is_empty() && is_unwritten {
        return Ok(None);
    }
    let images = images
        .canonicalize()
        .map_err(Error::at(images, "the image directory cannot be read"))?;
    let rewritten = match changed.is_empty() {
        true => Vec::new(),
        false => rewritten(written.decoded.mounts()?, remap, changed)?,
    };
    if rewritten.is_empty() && links.is_empty() && is_unwritten {
        return Ok(None);
    }
    let directory = op.file(DIRECTORY);
    DirBuilder::new()
        .mode(0o700)
        .create(&directory)
        .map_err(Error::at(&directory, "cannot be made"))?;
    let directory = directory
        .canonicalize()
        .map_err(Error::at(&directory, "cannot be read"))?;
    for (file, nodes) in &rewritten {
        rewrite(op, &images.join(file), nodes, &directory.join(file))?;
    }
    let network = written
        .network
        .iter()
        .map(|(name, content)| (name, content));
    let network: BTreeMap<&String, &Vec<u8>> = network.collect();
    let checked = encoded.into_iter().flat_map(|e| &e.written);
    let checked = checked.filter(|(name, _)| !network.contains_key(name));
    for (name, content) in checked.chain(network.iter().map(|(n, c)| (*n, *c))) {
        let path = directory.join(name);
        let mut file = File::create_new(&path).map_err(Error::at(&path, "cannot be written"))?;
        file.write_all(content)
            .map_err(Error::at(&path, "cannot be written"))?;
    }
    let shows = |name: &OsStr| encoded.is_none_or(|e| name.to_str().is_some_and(|n| e.shows(n)));
    link_rest(&images, &directory, &shows)?;
    if let Some(stored) = links.stored {
        link_stored(stored, &directory)?;
    }
    if let Some(unpacked) = links.unpacked {
        let unpacked = unpacked
            .canonicalize()
            .map_err(Error::at(unpacked, "cannot be read"))?;
        link_rest(&unpacked, &directory, &|_| true)?;
    }
    Ok(Some(directory))
}

/// Rewrites an archive of `/dev` in a confined child, in a directory of its own.
fn rewrite(op: &Operation, from: &Path, nodes: &[devtar::TarNode], to: &Path) -> Result<(), Error> {
    let directory = op.file("dev");
    let failed = || format!("{}: cannot be written", to.display());
    fs::create_dir(&directory).map_err(Error::io(failed()))?;
    let directory = directory.canonicalize().map_err(Error::io(failed()))?;
    let archive = directory.join("archive");
    let sandbox = Sandbox {
        read: vec![from.to_owned()],
        write: vec![directory.clone()],
    };
    let rewrite = || {
        let done = devtar::rewrite(from, &archive, nodes);
        done.map(|()| Vec::new())
    };
    let done = sandbox.run(REWRITE_LIMIT, rewrite);
    done.map_err(|e| Error::Failed(e.to_string()))?;
    // The child may have left a link.
    if !archive
        .symlink_metadata()
        .is_ok_and(|m| m.is_file() && m.nlink() == 1)
    {
        return Err(Error::Failed(failed()));
    }
    fs::rename(&archive, to).map_err(Error::io(failed()))?;
    fs::remove_dir_all(&directory).map_err(Error::io(failed()))
}

/// Links the files of a store's entry that the overlay does not have yet.
fn link_stored(stored: &Found, directory: &Path) -> Result<(), Error> {
    let entry = stored
        .entry
        .canonicalize()
        .map_err(Error::at(&stored.entry, "the store's entry cannot be read"))?;
    for file in &stored.reference.files {
        let link = directory.join(&file.name);
        if link.symlink_metadata().is_err() {
            symlink(relative(directory, &entry.join(&file.name)), &link)
                .map_err(Error::at(&link, "cannot be made"))?;
        }
    }
    Ok(())
}

/// Returns the archives of `/dev` that have to change, and their new nodes.
fn rewritten(
    mounts: &[CriuMount],
    remap: &Remap,
    changed: Vec<&NodeTarget>,
) -> Result<Vec<(String, Vec<devtar::TarNode>)>, Error> {
    let mut rewritten: Vec<(String, Vec<devtar::TarNode>)> = Vec::new();
    for target in changed {
        let mount = mountpoints::covering(mounts, &target.path);
        let Some(mount) = mount.filter(|m| mountpoints::is_archived(m)) else {
            let bound = remap
                .recorded(&target.from)
                .is_some_and(|n| n.source == NodeSource::BindMount);
            if bound || mount.is_some_and(|m| m.external) {
                // The host's own directory: its nodes are there under their native names.
                tracing::info!("{}: comes from the host, and is not archived", target.path);
                continue;
            }
            return Err(Error::Failed(format!(
                "{}: the checkpoint keeps this node in the container's file system, not in a /dev of its own, where it cannot be moved to {}; restore where the checkpoint's own GPUs are. The checkpoint is untouched",
                target.from, target.host_path
            )));
        };
        let below = |path: &str| {
            let path = Path::new(path).strip_prefix(&mount.path).ok()?;
            Some(path.to_owned())
        };
        let (Some(path), Some(model)) = (below(&target.path), below(&target.from)) else {
            continue;
        };
        let node = devtar::TarNode {
            path,
            model,
            otherwise: remap
                .recorded(&target.from)
                .filter(|n| n.source == NodeSource::BindMount)
                .and_then(|_| access(&target.host_path)),
            major: target.major,
            minor: target.minor,
        };
        let file = format!("tmpfs-dev-{}.tar.gz.img", mount.device);
        match rewritten.iter_mut().find(|(f, _)| *f == file) {
            Some((_, nodes)) => nodes.push(node),
            None => rewritten.push((file, vec![node])),
        }
    }
    Ok(rewritten)
}

/// Permission bits, owner and group of this host's node.
fn access(path: &str) -> Option<(u32, u32, u32)> {
    let meta = fs::metadata(path).ok()?;
    Some((meta.mode() & 0o7777, meta.uid(), meta.gid()))
}

/// Returns the nodes that the archived `/dev` lacks or has with other numbers. Bind-mounted nodes are left out: the
/// mount is made anew, from the spec.
fn changed(remap: &Remap) -> Vec<&NodeTarget> {
    let bound = |t: &&NodeTarget| {
        remap
            .recorded(&t.path)
            .is_some_and(|n| n.source == NodeSource::BindMount)
    };
    let mut changed = remap.changed();
    changed.retain(|t| !bound(t));
    changed
}

/// Links the files that the overlay does not have yet and that CRIU may see.
fn link_rest(images: &Path, directory: &Path, shows: &dyn Fn(&OsStr) -> bool) -> Result<(), Error> {
    let entries =
        fs::read_dir(images).map_err(Error::at(images, "the image directory cannot be read"))?;
    for (i, entry) in entries.enumerate() {
        if i >= MAX_ENTRIES {
            return Err(Error::Failed(format!(
                "{}: more than {MAX_ENTRIES} entries, which no checkpoint has",
                images.display()
            )));
        }
        let entry = entry.map_err(Error::at(images, "the image directory cannot be read"))?;
        let link = directory.join(entry.file_name());
        if link.symlink_metadata().is_ok() || !shows(&entry.file_name()) {
            continue;
        }
        // Resolves CRIU's `parent`, the only link (`no_links`), here: later nothing may depend on it.
        if entry.file_type().is_ok_and(|t| t.is_symlink())
            && entry.file_name() != names::PARENT_LINK
        {
            tracing::warn!("{}: a link, left out", entry.path().display());
            continue;
        }
        let Ok(target) = entry.path().canonicalize() else {
            tracing::warn!("{}: leads nowhere", entry.path().display());
            continue;
        };
        symlink(relative(directory, &target), &link).map_err(Error::at(&link, "cannot be made"))?;
    }
    Ok(())
}

/// Returns the relative path from a directory to a file; both are absolute and without links.
fn relative(directory: &Path, file: &Path) -> PathBuf {
    let shared = directory
        .components()
        .zip(file.components())
        .take_while(|(a, b)| a == b)
        .count();
    let up = directory.components().count() - shared;
    let mut way: PathBuf = std::iter::repeat_n(Component::ParentDir, up).collect();
    way.extend(file.components().skip(shared));
    way
}

/// Replaces the image directory on the command line. CRIU's log stays where it would have been.
pub fn with_image_path(
    args: &[OsString],
    inv: &Invocation,
    directory: &Path,
    images: &Path,
) -> Vec<OsString> {
    let mut line = args.to_vec();
    let place = inv.flags.last_place("image-path");
    let word = place.and_then(|i| args.get(i)).map(|w| w.to_string_lossy());
    let mut flags: Vec<OsString> = Vec::new();
    match (place, word.as_deref().and_then(|w| w.split_once('='))) {
        (Some(i), Some((flag, _))) => {
            let mut new = OsString::from(format!("{flag}="));
            new.push(directory);
            line.splice(i..=i, [new]);
        }
        (Some(i), None) => {
            line.splice(i + 1..=i + 1, [directory.into()]);
        }
        (None, _) => flags.extend(["--image-path".into(), directory.into()]),
    }
    if inv.flags.value("work-path").is_none_or(|w| w.is_empty()) {
        flags.extend(["--work-path".into(), images.into()]);
    }
    let at = (inv.verb_at + 1).min(line.len());
    line.splice(at..at, flags);
    line
}

#[cfg(test)]
mod tests;
