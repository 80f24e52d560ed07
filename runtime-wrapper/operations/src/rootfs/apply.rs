//! Unpacks a tar of changes over a container's root. The tar may be a stranger's: every path is resolved within that
//! root, whatever links are there.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, lchown, symlink};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime};

use cryopod_host::files::{if_there, open_in_root, open_regular};
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use rustix::fs::{XattrFlags, fsetxattr};
use tar::EntryType;

use super::program_rights::ProgramRights;
use super::records::{TarRecord, each};
use super::{CAPABILITY, OPAQUE, WHITEOUT};
use crate::config::rootfs::RootfsOptions;

/// Unpacks a tar of changes over this root, within the bounds. Programs in it keep what these rights allow.
pub fn unpack(
    tar: &Path,
    root: &Path,
    bounds: &RootfsOptions,
    mut rights: ProgramRights,
) -> io::Result<()> {
    let root = File::open(root)?;
    let tar = open_regular(tar)?;
    // Checks all of it before changing anything of the container.
    each(&tar, bounds, &mut |record| {
        let regular = record.header.entry_type() == EntryType::Regular;
        if let Some((_, Name::There(_))) = record.place()?
            && regular
        {
            modified(record)?;
        }
        Ok(())
    })?;
    each(&tar, bounds, &mut |record| {
        rights.limit(record)?;
        one(record, &root)
    })?;
    rights.warn();
    Ok(())
}

struct OpenDirectory(OwnedFd);

impl OpenDirectory {
    fn open(root: &File, path: &Path) -> io::Result<Self> {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        Ok(Self(open_in_root(root, path, flags)?))
    }

    /// Opens the directory of a path; makes missing ones.
    fn make(root: &File, path: &Path) -> io::Result<Self> {
        match Self::open(root, path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                    return Err(e);
                };
                fs::DirBuilder::new()
                    .mode(0o755)
                    .create(Self::make(root, parent)?.at(name))?;
                let made = Self::open(root, path)?;
                // The engine may have another umask.
                let itself = format!("/proc/self/fd/{}", made.0.as_raw_fd());
                fs::set_permissions(itself, PermissionsExt::from_mode(0o755))?;
                Ok(made)
            }
            other => other,
        }
    }

    /// Path of an entry; only for calls that do not follow a link there.
    fn at(&self, name: &OsStr) -> PathBuf {
        Path::new(&format!("/proc/self/fd/{}", self.0.as_raw_fd())).join(name)
    }

    fn remove(&self, name: &OsStr) -> io::Result<()> {
        let path = self.at(name);
        let removed = match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_dir() => fs::remove_dir_all(&path),
            Ok(_) => fs::remove_file(&path),
            Err(e) => Err(e),
        };
        if_there(removed).map(drop)
    }
}

impl TarRecord<'_> {
    /// Splits the entry's path into a directory within the root and a name in it; `None` for the root itself.
    fn place(&self) -> io::Result<Option<(PathBuf, Name)>> {
        let Some((parent, name)) = parts(&self.path)? else {
            return Ok(None);
        };
        let name = if self.literal {
            Name::There(name)
        } else if name == OPAQUE {
            Name::Opaque
        } else if let Some(gone) = name.as_bytes().strip_prefix(WHITEOUT.as_bytes()) {
            // `.wh...` would be the directory above, and `.wh..` the directory itself.
            if matches!(gone, b"" | b"." | b"..") {
                return Err(io::Error::other("a whiteout of no name"));
            }
            Name::Gone(OsStr::from_bytes(gone).to_owned())
        } else {
            Name::There(name)
        };
        Ok(Some((parent, name)))
    }
}

/// What happens to a name.
enum Name {
    /// It is made, or replaced.
    There(OsString),
    /// It is removed.
    Gone(OsString),
    /// All others in its directory are removed.
    Opaque,
}

/// A path's directory and name; `None` for the root itself.
fn parts(path: &Path) -> io::Result<Option<(PathBuf, OsString)>> {
    let mut clean = PathBuf::new();
    for part in path.components() {
        match part {
            Component::Normal(name) => clean.push(name),
            Component::CurDir | Component::RootDir => {}
            _ => return Err(io::Error::other("the path leads out of the container")),
        }
    }
    let name = clean.file_name().map(OsStr::to_owned);
    Ok(name.map(|n| (clean.parent().map(Path::to_owned).unwrap_or_default(), n)))
}

fn modified(entry: &TarRecord<'_>) -> io::Result<SystemTime> {
    let since = Duration::from_secs(entry.header.mtime()?);
    let modified = SystemTime::UNIX_EPOCH.checked_add(since);
    modified.ok_or_else(|| io::Error::other("no clock shows the time of its last change"))
}

fn one(entry: &mut TarRecord<'_>, root: &File) -> io::Result<()> {
    let Some((parent, name)) = entry.place()? else {
        return Ok(());
    };
    let directory = OpenDirectory::make(root, &parent)?;
    let name = match name {
        Name::There(name) => name,
        Name::Gone(name) => return directory.remove(&name),
        Name::Opaque => {
            for child in fs::read_dir(directory.at(OsStr::new(".")))? {
                directory.remove(&child?.file_name())?;
            }
            return Ok(());
        }
    };
    let target = directory.at(&name);
    let is_dir = fs::symlink_metadata(&target).map(|m| m.is_dir());
    match entry.header.entry_type() {
        EntryType::Directory => {
            if !matches!(is_dir, Ok(true)) {
                directory.remove(&name)?;
                fs::DirBuilder::new().mode(0o700).create(&target)?;
            }
            settle(entry, &target, true)
        }
        EntryType::Regular => file(entry, &directory, &name, matches!(is_dir, Ok(true))),
        EntryType::Symlink => {
            let link = entry.link.as_ref().ok_or_else(cut_off)?;
            directory.remove(&name)?;
            symlink(link, &target)?;
            settle(entry, &target, false)
        }
        EntryType::Link => {
            let link = entry.link.as_ref().ok_or_else(cut_off)?;
            let Some((parent, first)) = parts(link)? else {
                return Err(cut_off());
            };
            let beside = OpenDirectory::open(root, &parent)?;
            let first = beside.at(&first);
            if !fs::symlink_metadata(&first)?.is_file() {
                return Err(io::Error::other("a hard link to what is no file"));
            }
            directory.remove(&name)?;
            fs::hard_link(first, &target)
        }
        EntryType::Fifo => {
            directory.remove(&name)?;
            nix::unistd::mkfifo(&target, Mode::from_bits_truncate(0o600))?;
            settle(entry, &target, true)
        }
        other => {
            tracing::warn!(
                "/{}: an entry of kind {other:?}, left out",
                entry.path.display()
            );
            Ok(())
        }
    }
}

fn cut_off() -> io::Error {
    io::Error::other("a link to nothing; the archive is damaged")
}

/// Writes a file beside its place and renames it, so that the old or the new one is there in full. The container may have
/// a file of any fixed name.
fn file(
    entry: &mut TarRecord<'_>,
    directory: &OpenDirectory,
    name: &OsStr,
    in_the_way: bool,
) -> io::Result<()> {
    let mut partial = tempfile::Builder::new()
        .prefix(".cryopod-")
        .tempfile_in(directory.at(OsStr::new(".")))?;
    let written = copy_sparse(entry.content, partial.as_file_mut())?;
    if written != entry.header.entry_size()? {
        return Err(io::Error::other("the archive ends within it"));
    }
    settle(entry, partial.path(), true)?;
    let out = partial.as_file();
    if let Some(value) = &entry.capability {
        fsetxattr(out, CAPABILITY, value, XattrFlags::empty())?;
    }
    out.set_modified(modified(entry)?)?;
    if in_the_way {
        directory.remove(name)?;
    }
    partial.persist(directory.at(name)).map_err(|e| e.error)?;
    Ok(())
}

/// Copies all, without room for blocks of zeros: a sparse file was packed in its full length. Returns the number of bytes.
fn copy_sparse(from: &mut dyn Read, to: &mut File) -> io::Result<u64> {
    let mut block = vec![0; 64 << 10];
    let mut copied = 0;
    loop {
        let read = match from.read(&mut block) {
            Ok(0) => break,
            Ok(read) => read,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(e),
        };
        let read = block.get(..read).unwrap_or_default();
        match read.iter().all(|byte| *byte == 0) {
            true => drop(to.seek(SeekFrom::Current(read.len() as i64))?),
            false => to.write_all(read)?,
        }
        copied += read.len() as u64;
    }
    to.set_len(copied)?;
    Ok(copied)
}

/// Sets the owner and, except for links, the mode.
fn settle(entry: &TarRecord<'_>, target: &Path, mode: bool) -> io::Result<()> {
    let number = |n: u64| u32::try_from(n).map_err(io::Error::other);
    let header = &entry.header;
    lchown(
        target,
        Some(number(header.uid()?)?),
        Some(number(header.gid()?)?),
    )?;
    if mode {
        fs::set_permissions(target, fs::Permissions::from_mode(header.mode()? & 0o7777))?;
    }
    Ok(())
}
