//! Packs an overlay's upper directory as a tar.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use cryopod_host::files::create_private;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use rustix::io::Errno;
use tar::{Builder, EntryType, Header};

use super::left_out::LeftOut;
use super::{CAPABILITY, LITERAL, OPAQUE, WHITEOUT};
use crate::config::rootfs::RootfsOptions;

/// Deepest nesting of directories; a descriptor is open for each.
const MAX_DEPTH: usize = 512;
/// Longest path in bytes: with the longest marker behind it and a NUL, [`super::records`] takes it.
const MAX_PATH: usize = 4096 - OPAQUE.len() - 2;
/// A file's access control list (acl(5)).
const ACL: &str = "system.posix_acl_access";

/// Packs the directory into a new file, which only this user may read. Returns which attributes that leaves out.
///
/// Somebody may still change the directory. So every entry is opened once, without following a link, and only the
/// opened file is examined and read. Other types than directories and regular files are opened with O_PATH only.
pub fn pack(upper: &File, to: &Path, bounds: &RootfsOptions) -> io::Result<LeftOut> {
    let _ = fs::remove_file(to);
    let to = create_private(to)?;
    let mut walk = LayerWalk {
        tar: Builder::new(BufWriter::with_capacity(1 << 20, to)),
        links: HashMap::new(),
        bounds,
        files: 0,
        bytes: 0,
        left_out: LeftOut::default(),
    };
    walk.directory(&LayerEntry(upper.try_clone()?), Path::new(""), 0)?;
    let file = walk
        .tar
        .into_inner()?
        .into_inner()
        .map_err(|e| e.into_error())?;
    file.sync_all()?;
    Ok(walk.left_out)
}

struct LayerEntry(File);

impl LayerEntry {
    /// Opens what has this name in the directory now; a link itself, not its target.
    fn open(directory: &Self, name: &OsStr) -> io::Result<Self> {
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
            .resolve(
                ResolveFlag::RESOLVE_BENEATH
                    | ResolveFlag::RESOLVE_NO_SYMLINKS
                    | ResolveFlag::RESOLVE_NO_MAGICLINKS
                    | ResolveFlag::RESOLVE_NO_XDEV,
            );
        Ok(Self(openat2(directory.0.as_fd(), name, how)?.into()))
    }

    /// A path to the opened file, whatever its name leads to by now.
    fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }

    fn link(&self) -> io::Result<PathBuf> {
        let target = nix::fcntl::readlinkat(self.0.as_fd(), "")?;
        Ok(target.into())
    }

    fn contents(&self) -> io::Result<File> {
        let mut options = OpenOptions::new();
        let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
        options.read(true).custom_flags(flags).open(self.path())
    }

    fn attribute(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut value = vec![0u8; 256];
        match rustix::fs::getxattr(self.path(), name, &mut value[..]) {
            Ok(got) => {
                value.truncate(got);
                Ok(Some(value))
            }
            Err(Errno::NODATA | Errno::NOTSUP) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Lists the names of its extended attributes, each with a NUL behind it. They are for a warning only: where they
    /// cannot be listed there are none.
    fn attributes(&self) -> Vec<u8> {
        let mut names = vec![0; 1024];
        let mut listed = rustix::fs::listxattr(self.path(), &mut names[..]);
        if listed == Err(Errno::RANGE) {
            names.resize(64 << 10, 0);
            listed = rustix::fs::listxattr(self.path(), &mut names[..]);
        }
        names.truncate(listed.unwrap_or(0));
        names
    }
}

struct LayerWalk<'b, W: Write> {
    tar: Builder<W>,
    /// The first name of each file that has several.
    links: HashMap<(u64, u64), PathBuf>,
    bounds: &'b RootfsOptions,
    files: u64,
    bytes: u64,
    left_out: LeftOut,
}

impl<W: Write> LayerWalk<'_, W> {
    fn directory(&mut self, at: &LayerEntry, path: &Path, depth: usize) -> io::Result<()> {
        if depth > MAX_DEPTH {
            return Err(io::Error::other(format!(
                "/{}: more than {MAX_DEPTH} directories in directories",
                path.display()
            )));
        }
        // A directory that was renamed without a copy of its content.
        if at.attribute("trusted.overlay.redirect")?.is_some() {
            let what = format!(
                "/{}: a directory that overlayfs has renamed",
                path.display()
            );
            return Err(io::Error::other(what));
        }
        if at.attribute("trusted.overlay.opaque")?.as_deref() == Some(b"y") {
            self.count(path)?;
            empty(&mut self.tar, &path.join(OPAQUE))?;
        }
        let mut names = fs::read_dir(at.path())?
            .map(|entry| Ok(entry?.file_name()))
            // One more than allowed, which is then refused.
            .take(
                usize::try_from(self.bounds.max_files).map_or(usize::MAX, |n| n.saturating_add(1)),
            )
            .collect::<io::Result<Vec<_>>>()?;
        names.sort();
        for name in names {
            let path = path.join(&name);
            match LayerEntry::open(at, &name) {
                Ok(entry) => self.entry(&entry, &path, &name, depth)?,
                // Removed or renamed meanwhile.
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    fn entry(
        &mut self,
        entry: &LayerEntry,
        path: &Path,
        name: &OsStr,
        depth: usize,
    ) -> io::Result<()> {
        self.count(path)?;
        let meta = entry.0.metadata()?;
        let kind = meta.file_type();
        if kind.is_char_device() && meta.rdev() == 0 {
            whiteout(&mut self.tar, path, name)
        } else if kind.is_dir() {
            self.note(entry, path);
            pax(&mut self.tar, None, is_like_whiteout(path))?;
            let mut header = header(&meta, EntryType::Directory);
            header.set_mode(self.mode(entry, &meta)?);
            self.tar.append_data(&mut header, path, io::empty())?;
            self.directory(entry, path, depth + 1)
        } else if kind.is_symlink() {
            pax(&mut self.tar, None, is_like_whiteout(path))?;
            let mut header = header(&meta, EntryType::Symlink);
            self.tar.append_link(&mut header, path, entry.link()?)
        } else if kind.is_file() {
            self.file(entry, path, &meta)
        } else if kind.is_fifo() {
            pax(&mut self.tar, None, is_like_whiteout(path))?;
            let mut header = header(&meta, EntryType::Fifo);
            self.tar.append_data(&mut header, path, io::empty())
        } else {
            tracing::info!("/{}: a device or a socket, left out", path.display());
            Ok(())
        }
    }

    fn note(&mut self, entry: &LayerEntry, path: &Path) {
        let names = entry.attributes();
        self.left_out.note(path, names.split(|byte| *byte == 0));
    }

    /// Returns the mode of a file as it is without its access control list: the group's bits show what anybody in the list
    /// has at most, and not what the group has.
    fn mode(&self, entry: &LayerEntry, meta: &Metadata) -> io::Result<u32> {
        let mode = meta.mode() & 0o7777;
        let list = match entry.attribute(ACL) {
            Ok(None) => return Ok(mode),
            Ok(Some(list)) => list,
            // Of more than some thirty names.
            Err(e) if e.raw_os_error() == Some(libc::ERANGE) => Vec::new(),
            Err(e) => return Err(e),
        };
        Ok(mode & (!0o070 | (u32::from(of_group(&list)) << 3)))
    }

    fn count(&mut self, path: &Path) -> io::Result<()> {
        self.files += 1;
        if self.files > self.bounds.max_files {
            return Err(io::Error::other(format!(
                "more than {} files (rootfs.max_files in the configuration)",
                self.bounds.max_files
            )));
        }
        if path.as_os_str().len() > MAX_PATH {
            return Err(io::Error::other(format!(
                "a path of more than {MAX_PATH} bytes"
            )));
        }
        Ok(())
    }

    fn file(&mut self, entry: &LayerEntry, name: &Path, meta: &Metadata) -> io::Result<()> {
        if meta.nlink() > 1 {
            if let Some(first) = self.links.get(&(meta.dev(), meta.ino())) {
                pax(&mut self.tar, None, is_like_whiteout(name))?;
                let mut header = header(meta, EntryType::Link);
                return self.tar.append_link(&mut header, name, first);
            }
            self.links.insert((meta.dev(), meta.ino()), name.to_owned());
        }
        // A sparse file takes no room in the container, and all of its length in the tar.
        self.bytes = self.bytes.saturating_add(meta.len());
        if self.bytes > self.bounds.max_bytes() {
            return Err(io::Error::other(format!(
                "/{}: the files have more than {} GiB, which a restore would refuse (rootfs.max_gib in the configuration)",
                name.display(),
                self.bounds.max_gib
            )));
        }
        if entry.attribute("trusted.overlay.metacopy")?.is_some() {
            let what = format!("/{}: overlayfs has its contents elsewhere", name.display());
            return Err(io::Error::other(what));
        }
        self.note(entry, name);
        let capability = entry.attribute(CAPABILITY)?;
        let literal = is_like_whiteout(name);
        pax(&mut self.tar, capability.as_deref(), literal)?;
        let mut header = header(meta, EntryType::Regular);
        header.set_mode(self.mode(entry, meta)?);
        header.set_size(meta.len());
        // Exactly as long as the header says, whatever somebody writes to it meanwhile.
        let contents = io::Read::chain(entry.contents()?, io::repeat(0));
        let data = io::Read::take(contents, meta.len());
        self.tar.append_data(&mut header, name, data)
    }
}

/// The rights that a file's group has by an access control list, of which the kernel shows entries of eight bytes behind a
/// version: tag, rights, id.
fn of_group(list: &[u8]) -> u16 {
    const GROUP: u16 = 4;
    let entries = list.get(4..).unwrap_or_default().as_chunks::<8>().0;
    let number = |entry: &[u8; 8], at| u16::from_le_bytes([entry[at], entry[at + 1]]);
    let own = entries.iter().find(|entry| number(entry, 0) == GROUP);
    own.map_or(0, |entry| number(entry, 2) & 7)
}

/// Returns true for a name that a restore would take for a whiteout's.
pub fn is_like_whiteout(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default();
    name.as_bytes().starts_with(WHITEOUT.as_bytes())
}

/// Appends the records of the next entry, if it needs any. `literal`: its name is a file's own.
pub fn pax<W: Write>(
    tar: &mut Builder<W>,
    capability: Option<&[u8]>,
    literal: bool,
) -> io::Result<()> {
    let key = format!("SCHILY.xattr.{CAPABILITY}");
    let capability = capability.map(|value| (key.as_str(), value));
    let records = capability
        .into_iter()
        .chain(literal.then_some((LITERAL, &b"1"[..])));
    tar.append_pax_extensions(records)
}

/// Appends that the file `name` at this path is deleted.
pub fn whiteout<W: Write>(tar: &mut Builder<W>, path: &Path, name: &OsStr) -> io::Result<()> {
    let mut gone = OsString::from(WHITEOUT);
    gone.push(name);
    if gone == OPAQUE {
        return Err(io::Error::other(format!(
            "/{}: its deletion would delete all files of the directory",
            path.display()
        )));
    }
    empty(tar, &path.with_file_name(gone))
}

/// Appends an empty file.
fn empty<W: Write>(tar: &mut Builder<W>, name: &Path) -> io::Result<()> {
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
