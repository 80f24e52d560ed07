//! Detects the kind of checkpoint at a path.

use std::fs;
use std::io::{self, Read};
use std::path::Path;

use serde_json::Value;

use super::directory::Directory;
use super::image;
use super::tarball::Tarball;
use super::{Kind, SourceInner};
use crate::bytes::blobs::Blobs;
use crate::bytes::stream::{Section, open_regular};
use crate::error::{Bad, Error};
use crate::format::compression::Compression;
use crate::format::entry::EntryKind;
use crate::format::limits::Limits;
use crate::format::names;

pub(super) fn detect(
    path: &Path,
    image: Option<&str>,
    limits: &Limits,
) -> Result<(Kind, SourceInner), Error> {
    let meta = fs::metadata(path).map_err(Error::io(path, "open it"))?;
    if meta.is_dir() {
        return directory(path, image, limits);
    }
    let path = &fs::canonicalize(path).map_err(Error::io(path, "open it"))?;
    let file = open_regular(path)?;
    let section = Section::whole(file).map_err(Error::io(path, "read its size"))?;
    let mut start = Vec::new();
    section
        .clone()
        .take(512)
        .read_to_end(&mut start)
        .map_err(Error::io(path, "read it"))?;
    let compression = Compression::detect(&start);
    if start.is_empty() {
        return Err(not(path, "it is empty"));
    }
    if compression == Compression::None && start.get(257..262) != Some(b"ustar") {
        return Err(not(path, "neither a tar nor zstd nor gzip"));
    }
    tar(
        path,
        Tarball::new(path, section, compression),
        image,
        limits,
    )
}

fn not(path: &Path, reason: impl Into<String>) -> Error {
    Error::NotACheckpoint {
        path: path.into(),
        reason: reason.into(),
    }
}

fn directory(
    path: &Path,
    image: Option<&str>,
    limits: &Limits,
) -> Result<(Kind, SourceInner), Error> {
    let has = |name: &str| fs::symlink_metadata(path.join(name)).is_ok();
    if has(names::OCI_LAYOUT) || (has(names::OCI_INDEX) && has(names::OCI_BLOBS)) {
        return image::open(Blobs::Directory(path.into()), image, limits);
    }
    if has(names::CRIU_INVENTORY) {
        return Ok((
            Kind::CriuDirectory,
            SourceInner::Directory(Directory::new(path, true)),
        ));
    }
    if has(&format!(
        "{}/{}",
        names::CHECKPOINT_DIR,
        names::CRIU_INVENTORY
    )) {
        return Ok((
            Kind::Directory,
            SourceInner::Directory(Directory::new(path, false)),
        ));
    }
    Err(not(
        path,
        "the directory has no inventory.img, no checkpoint/inventory.img and no oci-layout",
    ))
}

#[derive(Default)]
struct SeenEntries {
    layout: bool,
    bare: bool,
    checkpoint: bool,
    status: bool,
    crio: bool,
    config: Option<Vec<u8>>,
    entries: u64,
}

fn tar(
    path: &Path,
    tar: Tarball,
    image: Option<&str>,
    limits: &Limits,
) -> Result<(Kind, SourceInner), Error> {
    let seen = look(&tar, limits).map_err(|e| Error::from_io(path, "read it", e))?;
    let compression = tar.compression();
    if seen.layout {
        if compression != Compression::None {
            let reason =
                format!("a tar of an OCI image layout in {compression}; decompress it first");
            return Err(Error::Unsupported {
                path: path.into(),
                reason,
            });
        }
        return image::open(Blobs::in_tar(path, tar.section(), limits)?, image, limits);
    }
    if seen.bare && !seen.checkpoint {
        return Ok((Kind::CriuTar(compression), SourceInner::Tar(tar.bare())));
    }
    if !seen.checkpoint {
        return Err(not(
            path,
            format!(
                "a tar without checkpoint/ and without inventory.img ({} entries)",
                seen.entries
            ),
        ));
    }
    let kind = match config_of(&seen, path)? {
        ConfigWriter::Podman => Kind::PodmanTar(compression),
        ConfigWriter::Cri if seen.status => Kind::CriContainerdTar(compression),
        ConfigWriter::Cri => Kind::CrioTar(compression),
    };
    Ok((kind, SourceInner::Tar(tar)))
}

enum ConfigWriter {
    Podman,
    Cri,
}

/// Determines who wrote a `config.dump`. CRI-O and containerd use checkpointctl's schema, which has the time of the
/// checkpoint; podman uses its own.
fn config_of(seen: &SeenEntries, path: &Path) -> Result<ConfigWriter, Error> {
    let Some(text) = &seen.config else {
        return Err(Error::bad(
            path,
            Bad::MissingFile(names::CONFIG_DUMP.into()),
        ));
    };
    let config: Value = serde_json::from_slice(text).map_err(|e| {
        Error::bad(
            path,
            Bad::Json {
                file: names::CONFIG_DUMP.into(),
                reason: e.to_string(),
            },
        )
    })?;
    let has = |key| config.get(key).is_some();
    Ok(
        match has("checkpointedTime") && !has("lockID") && !has("staticDir") {
            true => ConfigWriter::Cri,
            false => ConfigWriter::Podman,
        },
    )
}

/// Reads all headers of a plain tar; of a compressed tar only up to the entry that decides.
fn look(tar: &Tarball, limits: &Limits) -> io::Result<SeenEntries> {
    let mut seen = SeenEntries::default();
    let mut reader = tar.reader(limits)?;
    while let Some(entry) = reader.next()? {
        seen.entries += 1;
        match entry.name.as_str() {
            names::OCI_LAYOUT | names::OCI_INDEX => seen.layout = true,
            names::STATUS_DUMP => seen.status = true,
            names::BIND_MOUNTS | names::CRIO_LOG_PATH => seen.crio = true,
            names::CRIU_INVENTORY => seen.bare = true,
            names::CONFIG_DUMP if entry.kind == EntryKind::File && seen.config.is_none() => {
                seen.config = Some(entry.read_small(&mut reader, limits)?);
            }
            name if name.split('/').next() == Some(names::CHECKPOINT_DIR) => seen.checkpoint = true,
            name if name.starts_with("blobs/") => seen.layout = true,
            _ => {}
        }
        // podman writes config.dump before the images, and only podman compresses.
        let decided = seen.layout
            || (seen.config.is_some() && seen.checkpoint)
            || (seen.bare && seen.entries > 1);
        if decided && tar.compression() != Compression::None {
            break;
        }
    }
    Ok(seen)
}
