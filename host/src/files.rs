//! Reads the host's files: `/proc`, `/sys`, `/dev`, `/etc`. Tests replace the root.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

/// Largest text file that is read whole, in bytes.
const MAX_TEXT: u64 = 16 << 20;

/// A view of the host's files below a root, `/` outside tests.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// Returns this host as it is: its files below `/`.
    pub fn system() -> Self {
        Self { root: "/".into() }
    }

    /// Returns a view in which `/` is this directory, for tests.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the directory that stands for the host's root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The location of the absolute path `path` below the root.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Reads a text file, decoded leniently, at most 16 MiB of it.
    pub fn text(&self, path: impl AsRef<Path>) -> io::Result<String> {
        let mut bytes = Vec::new();
        File::open(self.path(path))?
            .take(MAX_TEXT)
            .read_to_end(&mut bytes)?;
        Ok(match String::from_utf8(bytes) {
            Ok(s) => s,
            Err(e) => String::from_utf8_lossy(e.as_bytes()).into_owned(),
        })
    }

    /// Reads a one-line file of `/sys` or `/proc`, trimmed; `None` if it cannot be read.
    pub fn line(&self, path: impl AsRef<Path>) -> Option<String> {
        Some(self.text(path).ok()?.trim().to_owned())
    }

    /// The names in a directory, sorted (names of digits by number); empty if it cannot be read.
    pub fn names(&self, path: impl AsRef<Path>) -> Vec<String> {
        let Ok(dir) = fs::read_dir(self.path(path)) else {
            return Vec::new();
        };
        let mut names: Vec<String> = dir
            .filter_map(|e| e.ok()?.file_name().into_string().ok())
            .collect();
        names.sort_by(|a, b| match (a.parse::<u64>(), b.parse::<u64>()) {
            (Ok(x), Ok(y)) => x.cmp(&y),
            _ => a.cmp(b),
        });
        names
    }

    /// The names in a directory, in the order in which the system lists them.
    pub fn listed(&self, path: impl AsRef<Path>) -> io::Result<Vec<String>> {
        let entries = fs::read_dir(self.path(path))?.collect::<io::Result<Vec<_>>>()?;
        Ok(entries
            .into_iter()
            .filter_map(|e| e.file_name().into_string().ok())
            .collect())
    }

    /// Major and minor of a character device; `None` if the path is not one.
    pub fn char_device(&self, path: impl AsRef<Path>) -> Option<(u64, u64)> {
        let meta = fs::metadata(self.path(path)).ok()?;
        meta.file_type()
            .is_char_device()
            .then(|| split_rdev(meta.rdev()))
    }

    /// Returns true if this path of the host is a directory.
    pub fn is_dir(&self, path: impl AsRef<Path>) -> bool {
        self.path(path).is_dir()
    }
}

/// Returns major and minor of a device number.
pub fn split_rdev(rdev: u64) -> (u64, u64) {
    (libc::major(rdev).into(), libc::minor(rdev).into())
}

/// Opens a regular file to read, whatever a stranger may have put there: follows no link, and waits at no FIFO.
pub fn open_regular(path: &Path) -> io::Result<fs::File> {
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        )),
    }
}

/// Opens a path below a directory, which no link can lead out of: it is the root for absolute links.
pub fn open_in_root(root: impl AsFd, path: &Path, flags: OFlag) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    resolved(root, path, flags, resolve)
}

/// Opens a path below a directory as [`open_in_root`] does, but fails with `ELOOP` where it leads through a link.
pub fn open_without_links(root: impl AsFd, path: &Path, flags: OFlag) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS;
    resolved(root, path, flags, resolve)
}

fn resolved(
    root: impl AsFd,
    path: &Path,
    flags: OFlag,
    resolve: ResolveFlag,
) -> Result<OwnedFd, Errno> {
    let below = path.strip_prefix("/").unwrap_or(path);
    let path = Path::new(".").join(below); // an empty path is none
    let how = OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC)
        .resolve(resolve);
    openat2(root, &path, how)
}

/// Reads a file of at most `limit` bytes; a larger one is an error.
pub fn read_bounded(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    read_bounded_from(std::fs::File::open(path)?, limit)
}

/// Reads to the end, at most `limit` bytes; more is an error.
pub fn read_bounded_from(source: impl Read, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        let what = format!("larger than {limit} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(bytes)
}

/// Returns `None` where a file is not there.
pub fn if_there<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    match done {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        done => done.map(Some),
    }
}

/// Makes a new file that is this user's alone.
pub fn create_private(path: &Path) -> io::Result<File> {
    let mut new = File::options();
    new.read(true).write(true).create_new(true).mode(0o600);
    new.open(path)
}

/// Writes a new file that is this user's alone, durably.
pub fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = create_private(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Writes a file as `partial` and renames it: whoever opens it finds the old contents or the new. On failure only the old
/// ones are there.
pub fn replace(path: &Path, partial: &Path, mode: u32, bytes: &[u8]) -> io::Result<()> {
    let _ = fs::remove_file(partial);
    let write = || {
        let mut file = create_private(partial)?;
        file.write_all(bytes)?;
        file.set_permissions(fs::Permissions::from_mode(mode))?;
        file.sync_all()?;
        fs::rename(partial, path)
    };
    write().inspect_err(|_| drop(fs::remove_file(partial)))
}

/// Makes the names in a directory durable.
pub fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// Returns the bytes of a file, or of all files below a directory; follows no links there.
pub fn bytes_below(path: &Path) -> u64 {
    let Ok(items) = fs::read_dir(path) else {
        let file = path.metadata().ok().filter(fs::Metadata::is_file);
        return file.map_or(0, |m| m.len());
    };
    let sizes = items.flatten().map(|item| match item.metadata() {
        Ok(m) if m.is_dir() => bytes_below(&item.path()),
        Ok(m) => m.len(),
        Err(_) => 0,
    });
    sizes.fold(0, u64::saturating_add)
}

/// Returns true for a directory, not a link, that belongs to this user and that nobody else can write to.
pub fn own_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|m| {
        m.is_dir() && m.uid() == nix::unistd::geteuid().as_raw() && m.mode() & 0o022 == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_all_that_lies_deeper() {
        let dir = tempfile::tempdir().unwrap();
        let blobs = dir.path().join("blobs/sha256");
        fs::create_dir_all(&blobs).unwrap();
        for place in [dir.path(), &blobs] {
            fs::write(place.join("data"), [0; 1000]).unwrap();
        }
        std::os::unix::fs::symlink("/usr", blobs.join("link")).unwrap();
        assert_eq!(bytes_below(dir.path()), 2000 + "/usr".len() as u64);
        assert_eq!(bytes_below(&blobs.join("data")), 1000);
        assert_eq!(bytes_below(&dir.path().join("none")), 0);
    }
}
