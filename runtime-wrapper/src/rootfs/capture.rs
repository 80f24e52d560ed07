//! An overlay's upper folder as a tar.

use std::collections::HashMap;
use std::ffi::{CString, OsStr};
use std::fs::{self, File, Metadata};
use std::io::{self, BufWriter};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use tar::{Builder, EntryType, Header};

use super::{CAPABILITY, OPAQUE, WHITEOUT};

/// Folders in folders that are followed; paths cannot be longer anyway.
const MAX_DEPTH: usize = 2048;

/// Packs the folder.
pub fn pack(upper: &Path, to: &Path) -> io::Result<()> {
    let mut tar = Builder::new(BufWriter::with_capacity(1 << 20, File::create(to)?));
    let mut links = HashMap::new();
    folder(&mut tar, upper, Path::new(""), &mut links, 0)?;
    let file = tar.into_inner()?.into_inner().map_err(|e| e.into_error())?;
    file.sync_all()
}

type Links = HashMap<(u64, u64), PathBuf>;

fn folder<W: io::Write>(
    tar: &mut Builder<W>,
    at: &Path,
    path: &Path,
    links: &mut Links,
    depth: usize,
) -> io::Result<()> {
    if depth > MAX_DEPTH {
        return Err(io::Error::other("too many folders in folders"));
    }
    // A folder that was renamed without a copy of what is in it.
    if attribute(at, "trusted.overlay.redirect")?.is_some() {
        let what = format!("/{}: a folder that overlayfs has renamed", path.display());
        return Err(io::Error::other(what));
    }
    if attribute(at, "trusted.overlay.opaque")?.as_deref() == Some(b"y") {
        empty(tar, &path.join(OPAQUE))?;
    }
    let mut entries = fs::read_dir(at)?.collect::<io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (from, name) = (entry.path(), path.join(entry.file_name()));
        let meta = fs::symlink_metadata(&from)?;
        let kind = meta.file_type();
        if kind.is_char_device() && meta.rdev() == 0 {
            let mut whiteout = OsStr::new(WHITEOUT).to_owned();
            whiteout.push(entry.file_name());
            empty(tar, &path.join(whiteout))?;
        } else if kind.is_dir() {
            let mut header = header(&meta, EntryType::Directory);
            tar.append_data(&mut header, &name, io::empty())?;
            folder(tar, &from, &name, links, depth + 1)?;
        } else if kind.is_symlink() {
            let mut header = header(&meta, EntryType::Symlink);
            tar.append_link(&mut header, &name, fs::read_link(&from)?)?;
        } else if kind.is_file() {
            file(tar, &from, &name, &meta, links)?;
        } else if kind.is_fifo() {
            let mut header = header(&meta, EntryType::Fifo);
            tar.append_data(&mut header, &name, io::empty())?;
        } else {
            tracing::info!("/{}: a device or a socket, left out", name.display());
        }
    }
    Ok(())
}

fn file<W: io::Write>(
    tar: &mut Builder<W>,
    from: &Path,
    name: &Path,
    meta: &Metadata,
    links: &mut Links,
) -> io::Result<()> {
    if meta.nlink() > 1 {
        if let Some(first) = links.get(&(meta.dev(), meta.ino())) {
            let mut header = header(meta, EntryType::Link);
            return tar.append_link(&mut header, name, first);
        }
        links.insert((meta.dev(), meta.ino()), name.to_owned());
    }
    if attribute(from, "trusted.overlay.metacopy")?.is_some() {
        let what = format!("/{}: overlayfs has its contents elsewhere", name.display());
        return Err(io::Error::other(what));
    }
    if let Some(value) = attribute(from, CAPABILITY)? {
        let key = format!("SCHILY.xattr.{CAPABILITY}");
        tar.append_pax_extensions([(key.as_str(), value.as_slice())])?;
    }
    let mut header = header(meta, EntryType::Regular);
    header.set_size(meta.len());
    // Exactly as long as it is told, whatever somebody writes to it meanwhile.
    let data = io::Read::take(
        io::Read::chain(File::open(from)?, io::repeat(0)),
        meta.len(),
    );
    tar.append_data(&mut header, name, data)
}

fn empty<W: io::Write>(tar: &mut Builder<W>, name: &Path) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o600);
    header.set_size(0);
    tar.append_data(&mut header, name, io::empty())
}

fn header(meta: &Metadata, kind: EntryType) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(meta.mode() & 0o7777);
    header.set_uid(meta.uid().into());
    header.set_gid(meta.gid().into());
    header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0));
    header.set_size(0);
    header
}

/// An extended attribute of a file or folder.
fn attribute(path: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    let name = CString::new(name)?;
    let mut value = vec![0u8; 256];
    // SAFETY: both strings end with NUL, and the kernel writes at most as many bytes as the buffer has.
    let got = unsafe {
        libc::lgetxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    if let Ok(got) = usize::try_from(got) {
        value.truncate(got);
        return Ok(Some(value));
    }
    let e = io::Error::last_os_error();
    match e.raw_os_error() {
        Some(libc::ENODATA | libc::ENOTSUP) => Ok(None),
        _ => Err(e),
    }
}
