//! Finds the directory with the container's own changes: the upper directory of the overlay that the engine mounted as
//! its root.
//!
//! A container that may mount can show any overlay as its `/`, with `upperdir=/etc` say. So its own mounts are not
//! used: this module opens the engine's root in this program's mount namespace, and finds its mount by the mount's id.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use cryopod_host::files::Host;

/// An overlay's upper directory, by its path in this program's mount namespace.
#[derive(Debug, PartialEq, Eq)]
pub struct Upper(PathBuf);

impl Upper {
    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Opens the directory.
    pub fn open(&self) -> io::Result<File> {
        directory(&self.0)
    }
}

fn directory(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(libc::O_PATH | libc::O_DIRECTORY)
        .open(path)
}

/// Returns the upper directory of the overlay that is mounted at `root`; `None` where no overlay with one is.
pub fn upper(host: &Host, root: &Path) -> Result<Option<Upper>, String> {
    let (Ok(opened), Ok(path)) = (directory(root), root.canonicalize()) else {
        return Ok(None);
    };
    let Some(id) = mount_id(&opened) else {
        return Ok(None);
    };
    let mounts = host.text("/proc/self/mountinfo").unwrap_or_default();
    of_mount(&mounts, id, &path)
}

/// The id of the mount through which a file was opened.
fn mount_id(file: &File) -> Option<u64> {
    let info = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
    let info = std::fs::read_to_string(info).ok()?;
    let id = info.lines().find_map(|l| l.strip_prefix("mnt_id:"))?;
    id.trim().parse().ok()
}

fn of_mount(mounts: &str, id: u64, root: &Path) -> Result<Option<Upper>, String> {
    // The kernel writes odd characters as octal numbers: no engine's directories have any.
    let point = |line: &&str| line.split(' ').nth(4).map(Path::new) == Some(root);
    let at: Vec<&str> = mounts.lines().filter(point).collect();
    let found = at.iter().find_map(|line| {
        let (front, back) = line.split_once(" - ")?;
        let mut front = front.split(' ');
        let this = front.next()?.parse() == Ok(id);
        // All of the file system, not a directory of it.
        let whole = front.nth(2)? == "/";
        let mut back = back.split(' ');
        let overlay = back.next()? == "overlay";
        let upper = back
            .nth(1)?
            .split(',')
            .find_map(|o| o.strip_prefix("upperdir="))?;
        let plain = upper.starts_with('/') && !upper.contains('\\');
        (this && whole && overlay && plain).then(|| Upper(upper.into()))
    });
    if found.is_some() && at.len() > 1 {
        return Err(format!(
            "{}: {} mounts lie over each other, and which is the engine's cannot be told",
            root.display(),
            at.len()
        ));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = "/run/c/rootfs";

    fn of(mounts: &str) -> Result<Option<Upper>, String> {
        of_mount(mounts, 500, Path::new(ROOT))
    }

    #[test]
    fn the_engines_mount_by_its_id() {
        let line = |id: u64, root: &str, at: &str, rest: &str| {
            format!("{id} 400 0:50 {root} {at} rw,relatime shared:1 - {rest}\n")
        };
        let overlay = "overlay overlay rw,lowerdir=/l,upperdir=/var/u/diff,workdir=/w";
        let right = line(500, "/", ROOT, overlay);
        let other = line(501, "/", "/run/d/rootfs", overlay);
        assert_eq!(
            of(&format!("{other}{right}")),
            Ok(Some(Upper("/var/u/diff".into())))
        );
        for not in [
            line(501, "/", ROOT, overlay),
            line(500, "/sub", ROOT, overlay),
            line(500, "/", "/run/c", overlay),
            line(500, "/", ROOT, "overlay overlay ro,lowerdir=/l:/m"),
            line(500, "/", ROOT, "overlay overlay rw,upperdir=u"),
            line(500, "/", ROOT, "ext4 /dev/x rw,upperdir=/u"),
            String::new(),
        ] {
            assert_eq!(of(&not), Ok(None), "{not}");
        }
    }

    /// A container whose mounts propagate to the host mounts an overlay of its own over its root.
    #[test]
    fn a_mount_over_the_engines_is_refused() {
        let mounts = format!(
            "499 400 0:50 / {ROOT} rw - overlay overlay rw,upperdir=/var/u/diff\n\
             500 499 0:60 / {ROOT} rw - overlay overlay rw,upperdir=/etc\n"
        );
        let error = of(&mounts).unwrap_err();
        assert!(error.contains("2 mounts"), "{error}");
    }

    #[test]
    fn a_directory_that_nothing_is_mounted_at() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::system();
        assert_eq!(upper(&host, dir.path()), Ok(None));
        assert_eq!(upper(&host, &dir.path().join("none")), Ok(None));
        // A mount, but no overlay.
        assert_eq!(upper(&host, Path::new("/proc")), Ok(None));
    }
}
