//! A tar of changes, unpacked over a container's root. The tar may be a stranger's: every path is resolved as within
//! that root, whatever links are there.

use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufReader};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt, lchown, symlink};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::Mode;
use tar::{Archive, Entry, EntryType};

use super::{CAPABILITY, OPAQUE, WHITEOUT};

/// A file's name while it is written.
const PARTIAL: &str = ".cryopod-unpacked";

/// Unpacks it.
pub fn unpack(tar: &Path, root: &Path) -> io::Result<()> {
    let root = File::open(root)?;
    let mut options = OpenOptions::new();
    let tar = options
        .read(true)
        .custom_flags(libc::O_NOFOLLOW)
        .open(tar)?;
    let mut archive = Archive::new(BufReader::with_capacity(1 << 20, tar));
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        one(&mut entry, &path, &root)
            .map_err(|e| io::Error::new(e.kind(), format!("/{}: {e}", path.display())))?;
    }
    Ok(())
}

/// A folder of the root.
struct Folder(OwnedFd);

impl Folder {
    fn open(root: &File, path: &Path) -> io::Result<Self> {
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        let path = if path.as_os_str().is_empty() {
            Path::new(".")
        } else {
            path
        };
        Ok(Self(openat2(root.as_fd(), path, how)?))
    }

    /// The folder of a path, made where it is missing.
    fn make(root: &File, path: &Path) -> io::Result<Self> {
        match Self::open(root, path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                    return Err(e);
                };
                fs::DirBuilder::new()
                    .mode(0o755)
                    .create(Self::make(root, parent)?.at(name))?;
                Self::open(root, path)
            }
            other => other,
        }
    }

    /// An entry of it; only for calls that do not follow a link there.
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
        match removed {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

/// A path's folder and name; `None` for the root itself.
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

fn one(entry: &mut Entry<'_, impl io::Read>, path: &Path, root: &File) -> io::Result<()> {
    let Some((parent, name)) = parts(path)? else {
        return Ok(());
    };
    let folder = Folder::make(root, &parent)?;
    if name == OPAQUE {
        for child in fs::read_dir(folder.at(OsStr::new(".")))? {
            folder.remove(&child?.file_name())?;
        }
        return Ok(());
    }
    if let Some(gone) = name.as_bytes().strip_prefix(WHITEOUT.as_bytes()) {
        return folder.remove(OsStr::from_bytes(gone));
    }
    let target = folder.at(&name);
    let is_dir = fs::symlink_metadata(&target).map(|m| m.is_dir());
    match entry.header().entry_type() {
        EntryType::Directory => {
            if !matches!(is_dir, Ok(true)) {
                folder.remove(&name)?;
                fs::DirBuilder::new().mode(0o700).create(&target)?;
            }
            return settle(entry, &target, true);
        }
        EntryType::Regular => return file(entry, &folder, &name, matches!(is_dir, Ok(true))),
        _ => {}
    }
    match entry.header().entry_type() {
        EntryType::Symlink => {
            let link = entry.link_name()?.ok_or_else(cut_off)?.into_owned();
            folder.remove(&name)?;
            symlink(link, &target)?;
            settle(entry, &target, false)
        }
        EntryType::Link => {
            let link = entry.link_name()?.ok_or_else(cut_off)?.into_owned();
            let Some((parent, first)) = parts(&link)? else {
                return Err(cut_off());
            };
            let beside = Folder::open(root, &parent)?;
            let first = beside.at(&first);
            if !fs::symlink_metadata(&first)?.is_file() {
                return Err(io::Error::other("a hard link to what is no file"));
            }
            folder.remove(&name)?;
            fs::hard_link(first, &target)
        }
        EntryType::Fifo => {
            folder.remove(&name)?;
            nix::unistd::mkfifo(&target, Mode::from_bits_truncate(0o600))?;
            settle(entry, &target, true)
        }
        other => {
            tracing::warn!("/{}: an entry of kind {other:?}, left out", path.display());
            Ok(())
        }
    }
}

fn cut_off() -> io::Error {
    io::Error::other("a link to nothing; the archive is damaged")
}

/// Writes a file beside its place and renames it: what is there is whole, the old or the new.
fn file(
    entry: &mut Entry<'_, impl io::Read>,
    folder: &Folder,
    name: &OsStr,
    in_the_way: bool,
) -> io::Result<()> {
    let capability = capability(entry)?;
    let partial = folder.at(OsStr::new(PARTIAL));
    folder.remove(OsStr::new(PARTIAL))?;
    let mut out = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&partial)?;
    let written = (|| {
        io::copy(entry, &mut out)?;
        settle(entry, &partial, true)?;
        if let Some(value) = capability {
            set(&out, &value)?;
        }
        let stamp = SystemTime::UNIX_EPOCH + Duration::from_secs(entry.header().mtime()?);
        out.set_modified(stamp)?;
        if in_the_way {
            folder.remove(name)?;
        }
        fs::rename(&partial, folder.at(name))
    })();
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

/// Owner and, but for links, mode.
fn settle(entry: &Entry<'_, impl io::Read>, target: &Path, mode: bool) -> io::Result<()> {
    let number = |n: u64| u32::try_from(n).map_err(io::Error::other);
    let header = entry.header();
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

fn capability(entry: &mut Entry<'_, impl io::Read>) -> io::Result<Option<Vec<u8>>> {
    let key = format!("SCHILY.xattr.{CAPABILITY}");
    let Some(extensions) = entry.pax_extensions()? else {
        return Ok(None);
    };
    for extension in extensions {
        let extension = extension?;
        if extension.key_bytes() == key.as_bytes() {
            return Ok(Some(extension.value_bytes().to_vec()));
        }
    }
    Ok(None)
}

fn set(file: &File, value: &[u8]) -> io::Result<()> {
    let name = CString::new(CAPABILITY)?;
    // SAFETY: the descriptor is open, the name ends with NUL, the value is as long as is told.
    let done = unsafe {
        libc::fsetxattr(
            file.as_raw_fd(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
