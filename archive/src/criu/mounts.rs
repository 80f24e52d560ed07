//! Reads the mounts of a checkpoint: `mountpoints-ID.img`, one for each mount namespace.

use super::image::{Bounds, ImageError, messages};
use super::proto::{MOUNTS_MAGIC, MntEntry};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mount {
    /// The mount's number, and that of the mount that it is on.
    pub id: u32,
    pub parent: u32,
    /// CRIU's number of the mount namespace.
    pub namespace: u32,
    /// Mount point in the container, from `/`.
    pub path: String,
    /// CRIU's number of the file system's type: [`fs_type`].
    pub fs_type: u32,
    /// CRIU's number of the file system's device.
    pub device: u32,
    /// The `MS_*` flags of the mount and of its file system.
    pub flags: u32,
    /// The directory of the file system that is mounted.
    pub root: String,
    /// The content comes from outside: the caller tells CRIU where it is.
    pub external: bool,
    /// The name by which CRIU asks for an external mount's source; otherwise empty.
    pub key: String,
}

/// Reads an image with the name `file`.
pub fn read(file: &str, content: &[u8]) -> Result<Vec<Mount>, ImageError> {
    bounded(file, content, &mut Bounds::default())
}

pub(super) fn bounded(
    file: &str,
    content: &[u8],
    bounds: &mut Bounds,
) -> Result<Vec<Mount>, ImageError> {
    let mounts: Vec<MntEntry> = messages(file, content, MOUNTS_MAGIC, bounds)?;
    let number = file
        .trim_start_matches("mountpoints-")
        .trim_end_matches(".img");
    let namespace = number.parse().unwrap_or(0);
    Ok(mounts.into_iter().map(|m| mount(m, namespace)).collect())
}

fn mount(entry: MntEntry, namespace: u32) -> Mount {
    // Old images have the name in place of the root.
    let old = (entry.ext_mount == Some(true)).then(|| entry.root.clone());
    let key = entry.ext_key.filter(|k| !k.is_empty()).or(old);
    let external = key.is_some();
    // CRIU does not create the file system of an external mount.
    let of_file_system = entry.sb_flags.filter(|_| !external).unwrap_or(0);
    Mount {
        id: entry.mnt_id,
        parent: entry.parent_mnt_id,
        namespace,
        // CRIU writes paths with or without a leading dot.
        path: format!(
            "/{}",
            entry.mountpoint.trim_start_matches('.').trim_matches('/')
        ),
        fs_type: entry.fstype,
        device: entry.root_dev,
        flags: entry.flags | of_file_system,
        root: entry.root,
        external,
        key: key.unwrap_or_default(),
    }
}

/// Returns the kernel's name of a file system that CRIU mounts anew by itself; `None` for all others.
pub fn fs_type(number: u32) -> Option<&'static str> {
    Some(match number {
        1 => "proc",
        2 => "sysfs",
        3 => "devtmpfs",
        4 => "binfmt_misc",
        5 => "tmpfs",
        6 => "devpts",
        7 => "simfs",
        8 => "pstore",
        9 => "securityfs",
        10 => "fusectl",
        11 => "debugfs",
        12 => "cgroup",
        13 => "aufs",
        14 => "mqueue",
        15 => "fuse",
        16 => "auto",
        17 => "overlay",
        18 => "autofs",
        19 => "tracefs",
        23 => "cgroup2",
        _ => return None,
    })
}
