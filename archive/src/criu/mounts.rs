//! Reads the mounts of a checkpoint: `mountpoints-ID.img`, one for each mount namespace.

use serde::{Deserialize, Serialize};

use super::image_files::{ImageError, messages};
use super::message::Message;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CriuMount {
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
pub fn read(file: &str, content: &[u8]) -> Result<Vec<CriuMount>, ImageError> {
    let number = file
        .trim_start_matches("mountpoints-")
        .trim_end_matches(".img");
    let namespace = number.parse().unwrap_or(0);
    messages(file, content)?
        .map(|entry| Ok(mount(&entry?, namespace)))
        .collect()
}

fn mount(entry: &Message, namespace: u32) -> CriuMount {
    let number = |field| entry.u32(field).unwrap_or(0);
    let root = entry.text("root").unwrap_or_default();
    // Old images have the name in place of the root.
    let old = (entry.number("ext_mount") == Some(1)).then(|| root.clone());
    let key = entry.text("ext_key").filter(|k| !k.is_empty()).or(old);
    let external = key.is_some();
    // CRIU does not create the file system of an external mount.
    let of_file_system = if external { 0 } else { number("sb_flags") };
    let path = entry.text("mountpoint").unwrap_or_default();
    CriuMount {
        id: number("mnt_id"),
        parent: number("parent_mnt_id"),
        namespace,
        // CRIU writes paths with or without a leading dot.
        path: format!("/{}", path.trim_start_matches('.').trim_matches('/')),
        fs_type: number("fstype"),
        device: number("root_dev"),
        flags: number("flags") | of_file_system,
        root,
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
