//! Rewrites an engine's tar of changes as the one that a restore unpacks.
//!
//! podman and CRI-O pack the new files into `rootfs-diff.tar`, and list the deleted ones in `deleted.files`. containerd
//! packs both into one tar, which its CRI compresses, the deleted ones as OCI's whiteouts. podman packs the files of
//! `/dev/shm` into a tar of their own. The PAX records may hold anything; here only a program's capabilities are kept.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write};
use std::path::{Component, Path, PathBuf};

use cryopod_archive::{decompressed, format::names};
use tar::{Archive, Builder, EntryType, Header};

use super::capture::empty;
use super::{CAPABILITY, FILE, SHM_FILE, WHITEOUT};
use crate::config::rootfs::RootfsOptions;
use crate::error::Error;

/// Largest list of deleted files, in bytes.
const MAX_LIST: u64 = 64 << 20;

/// Puts the changes of files of an unpacked archive into its image directory, where a restore takes them from. Does
/// nothing if the archive has none, or has them there.
pub fn adopt(bounds: &RootfsOptions, unpacked: &Path, images: &Path) -> Result<(), Error> {
    let (shm, to) = (unpacked.join(names::DEVSHM), images.join(SHM_FILE));
    if shm.is_file() && !to.exists() {
        adopt_one(bounds, unpacked, Some(&shm), None, &to)?;
    }
    let containerd = Path::new(names::CONTAINERD_DIR).join(names::CONTAINERD_RW);
    let tars = [Path::new(names::ROOTFS_DIFF), &containerd];
    let diff = tars
        .map(|t| unpacked.join(t))
        .into_iter()
        .find(|t| t.is_file());
    let list = Some(unpacked.join(names::DELETED_FILES)).filter(|l| l.is_file());
    let to = images.join(FILE);
    if to.exists() || diff.is_none() && list.is_none() {
        return Ok(());
    }
    adopt_one(bounds, unpacked, diff.as_deref(), list.as_deref(), &to)
}

fn adopt_one(
    bounds: &RootfsOptions,
    unpacked: &Path,
    diff: Option<&Path>,
    list: Option<&Path>,
    to: &Path,
) -> Result<(), Error> {
    let partial = to.with_extension("partial");
    rewrite(bounds, diff, list, &partial)
        .and_then(|()| fs::rename(&partial, to))
        .map_err(Error::at(
            unpacked,
            "the container's changes of files cannot be read",
        ))
}

fn rewrite(
    bounds: &RootfsOptions,
    diff: Option<&Path>,
    list: Option<&Path>,
    to: &Path,
) -> io::Result<()> {
    let mut out = Builder::new(BufWriter::with_capacity(1 << 20, File::create(to)?));
    let gone = list.map(deleted).transpose()?.unwrap_or_default();
    for path in &gone {
        whiteout(&mut out, path)?;
    }
    if let Some(diff) = diff {
        changes(bounds, diff, gone.len() as u64, &mut out)?;
    }
    out.into_inner()?.flush()
}

fn deleted(list: &Path) -> io::Result<Vec<PathBuf>> {
    let file = File::open(list)?;
    if file.metadata()?.len() > MAX_LIST {
        return Err(io::Error::other("the list of deleted files is too large"));
    }
    Ok(serde_json::from_reader(BufReader::new(file))?)
}

fn whiteout<W: Write>(out: &mut Builder<W>, path: &Path) -> io::Result<()> {
    let path: PathBuf = path
        .components()
        .filter(|c| matches!(c, Component::Normal(_)))
        .collect();
    let Some(name) = path.file_name() else {
        return Ok(());
    };
    let mut gone = OsString::from(WHITEOUT);
    gone.push(name);
    empty(out, &path.with_file_name(gone))
}

fn changes<W: Write>(
    bounds: &RootfsOptions,
    diff: &Path,
    mut files: u64,
    out: &mut Builder<W>,
) -> io::Result<()> {
    let mut archive = Archive::new(decompressed(File::open(diff)?)?);
    let mut bytes = 0u64;
    for entry in archive.entries()? {
        let mut entry = entry?;
        files += 1;
        bytes = bytes.saturating_add(entry.size());
        if files > bounds.max_files || bytes > bounds.max_bytes() {
            return Err(io::Error::other(format!(
                "more than {} files or {} GiB (rootfs.max_files and rootfs.max_gib in the configuration)",
                bounds.max_files, bounds.max_gib
            )));
        }
        let path = entry.path()?.into_owned();
        let link = entry.link_name()?.map(|l| l.into_owned());
        let kind = entry.header().entry_type();
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(entry.header().mode()? & 0o7777);
        header.set_uid(entry.header().uid()?);
        header.set_gid(entry.header().gid()?);
        header.set_mtime(entry.header().mtime()?);
        header.set_size(0);
        match (kind, link) {
            (EntryType::Regular, _) => {
                if let Some(value) = capability(&mut entry)? {
                    let key = format!("SCHILY.xattr.{CAPABILITY}");
                    out.append_pax_extensions([(key.as_str(), value.as_slice())])?;
                }
                header.set_size(entry.size());
                out.append_data(&mut header, path, entry)?;
            }
            (EntryType::Symlink | EntryType::Link, Some(link)) => {
                out.append_link(&mut header, path, link)?;
            }
            (EntryType::Directory | EntryType::Fifo, _) => {
                out.append_data(&mut header, path, io::empty())?;
            }
            _ => tracing::info!("/{}: an entry of kind {kind:?}, left out", path.display()),
        }
    }
    Ok(())
}

fn capability<R: io::Read>(entry: &mut tar::Entry<'_, R>) -> io::Result<Option<Vec<u8>>> {
    let key = format!("SCHILY.xattr.{CAPABILITY}");
    for extension in entry.pax_extensions()?.into_iter().flatten() {
        let extension = extension?;
        if extension.key_bytes() == key.as_bytes() {
            return Ok(Some(extension.value_bytes().to_vec()));
        }
    }
    Ok(None)
}
