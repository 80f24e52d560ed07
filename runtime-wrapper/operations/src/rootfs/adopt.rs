//! Rewrites an engine's tar of changes as the one that a restore unpacks.
//!
//! podman and CRI-O pack the new files into a plain `rootfs-diff.tar`, and list the deleted ones in `deleted.files`.
//! containerd packs both into one tar, the deleted ones as OCI's whiteouts; that of its CRI is a `rootfs-diff.tar`, too,
//! and always gzip. podman packs the files of `/dev/shm` into a tar of their own. The PAX records may hold anything; here
//! only a program's capabilities are kept.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Component, Path, PathBuf};

use cryopod_archive::{decompressed, format::names};
use cryopod_host::files::sync_directory;
use tar::{Archive, Builder, EntryType, Header};

use super::capture::{is_like_whiteout, pax, whiteout};
use super::left_out::LeftOut;
use super::{CAPABILITY, FILE, SHM_FILE};
use crate::config::rootfs::RootfsOptions;
use crate::error::Error;
use crate::security::tar_end::EndCheck;

/// Key of an extended attribute among the PAX records.
const ATTRIBUTE: &[u8] = b"SCHILY.xattr.";
const GZIP: [u8; 2] = [0x1f, 0x8b];
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
        .and_then(|left_out| {
            left_out.warn();
            fs::rename(&partial, to)?;
            to.parent().map_or(Ok(()), sync_directory)
        })
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
) -> io::Result<LeftOut> {
    let mut out = Builder::new(BufWriter::with_capacity(1 << 20, File::create(to)?));
    let gone = list.map(deleted).transpose()?.unwrap_or_default();
    for path in &gone {
        let path: PathBuf = path
            .components()
            .filter(|c| matches!(c, Component::Normal(_)))
            .collect();
        if let Some(name) = path.file_name() {
            whiteout(&mut out, &path, name)?;
        }
    }
    let mut left_out = LeftOut::default();
    if let Some(diff) = diff {
        left_out = changes(bounds, diff, gone.len() as u64, &mut out)?;
    }
    let file = out.into_inner()?.into_inner();
    // A cache entry with an empty tar would restore nothing of it.
    file.map_err(|e| e.into_error())?.sync_all()?;
    Ok(left_out)
}

fn deleted(list: &Path) -> io::Result<Vec<PathBuf>> {
    let file = File::open(list)?;
    if file.metadata()?.len() > MAX_LIST {
        return Err(io::Error::other("the list of deleted files is too large"));
    }
    Ok(serde_json::from_reader(BufReader::new(file))?)
}

/// Returns true for a tar of containerd's. In all others a name like a whiteout's is a file's.
fn has_whiteouts(diff: &Path, tar: &File) -> io::Result<bool> {
    let mut start = [0; 2];
    let length = tar.read_at(&mut start, 0)?;
    let is_rw = diff.file_name() == Some(names::CONTAINERD_RW.as_ref());
    Ok(is_rw || length == 2 && start == GZIP)
}

fn changes<W: Write>(
    bounds: &RootfsOptions,
    diff: &Path,
    mut files: u64,
    out: &mut Builder<W>,
) -> io::Result<LeftOut> {
    let tar = File::open(diff)?;
    let has_whiteouts = has_whiteouts(diff, &tar)?;
    let mut archive = Archive::new(EndCheck::new(decompressed(tar)?));
    let mut left_out = LeftOut::default();
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
        let attributes = attributes(&mut entry)?;
        left_out.note(&path, attributes.iter().map(|(name, _)| name.as_slice()));
        let mut capability = attributes
            .iter()
            .filter(|(name, _)| name == CAPABILITY.as_bytes());
        let capability = capability.next().map(|(_, value)| value.as_slice());
        let literal = !has_whiteouts && is_like_whiteout(&path);
        match (kind, link) {
            (EntryType::Regular, _) => {
                pax(out, capability, literal)?;
                header.set_size(entry.size());
                out.append_data(&mut header, path, entry)?;
            }
            (EntryType::Symlink | EntryType::Link, Some(link)) => {
                pax(out, None, literal)?;
                out.append_link(&mut header, path, link)?;
            }
            (EntryType::Directory | EntryType::Fifo, _) => {
                pax(out, None, literal)?;
                out.append_data(&mut header, path, io::empty())?;
            }
            _ => tracing::info!("/{}: an entry of kind {kind:?}, left out", path.display()),
        }
    }
    archive.into_inner().finish()?;
    Ok(left_out)
}

/// Returns the names and values of an entry's extended attributes.
fn attributes<R: io::Read>(entry: &mut tar::Entry<'_, R>) -> io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut found = Vec::new();
    for extension in entry.pax_extensions()?.into_iter().flatten() {
        let extension = extension?;
        if let Some(name) = extension.key_bytes().strip_prefix(ATTRIBUTE) {
            found.push((name.to_owned(), extension.value_bytes().to_owned()));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_that_are_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let diff = dir.path().join("rootfs-diff.tar");
        let mut tar = Builder::new(File::create(&diff).unwrap());
        tar.append_pax_extensions([
            ("SCHILY.xattr.user.note", &b"1"[..]),
            ("SCHILY.xattr.security.capability", b"2"),
        ])
        .unwrap();
        let mut header = Header::new_gnu();
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(0);
        tar.append_data(&mut header, "f", io::empty()).unwrap();
        tar.into_inner().unwrap();
        let to = dir.path().join("to");
        let left_out = rewrite(&RootfsOptions::default(), Some(&diff), None, &to).unwrap();
        let warning = left_out.to_string();
        assert!(warning.contains("(user.note): /f;"), "{warning}");
    }
}
