//! Records what a checkpoint needs besides CRIU's images and the GPUs: host mounts that the spec does not name, CRIU
//! options that a restore must repeat, security labels. All are parts of the [metadata](crate::metadata).

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::format::names;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MountKind {
    File,
    Directory,
    Device,
    /// A Unix socket or a FIFO.
    Socket,
}

impl MountKind {
    /// In words, for messages.
    pub fn word(self) -> &'static str {
        match self {
            Self::File => "file",
            Self::Directory => "directory",
            Self::Device => "device node",
            Self::Socket => "socket",
        }
    }
}

/// A mount of a host path that the container's spec does not name: made by a hook, or below a recursive bind mount.
/// CRIU leaves its content out; a restore must provide it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForeignMount {
    /// Mount point in the container.
    pub path: String,
    pub kind: MountKind,
    pub host_path: String,
    pub fs_type: String,
    #[serde(default)]
    pub options: Vec<String>,
    /// For a file: its size in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// For a small file: SHA-256 of its content, in hex.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// `true` if a process had a file of it open or mapped.
    #[serde(default)]
    pub in_use: bool,
}

impl ForeignMount {
    /// A mount of which nothing else is known.
    pub fn new(path: impl Into<String>, kind: MountKind, host_path: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            kind,
            host_path: host_path.into(),
            fs_type: String::new(),
            options: Vec::new(),
            size: None,
            sha256: None,
            in_use: false,
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountFacts {
    #[serde(default)]
    pub foreign: Vec<ForeignMount>,
    /// Mount points of the container's own file systems, whose content the images hold.
    #[serde(default)]
    pub own: Vec<String>,
}

/// The CRIU options that a restore must repeat.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CriuFacts {
    /// Options that the images also need at a restore: `tcp-established`, `file-locks`, `ext-unix-sk`.
    #[serde(default)]
    pub options: Vec<String>,
    /// Programs that CRIU runs for these images at a restore: `tar`, `ip`, and the network lock, `iptables` or
    /// `nftables`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub helpers: Vec<String>,
    /// The inventory's mtime in seconds and nanoseconds: when the images were complete. Archives do not carry it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dumped: Option<(i64, i64)>,
}

impl CriuFacts {
    /// Reads what [`CriuFacts::dumped`] notes from an image directory.
    pub fn dumped_at(images: &Path) -> Option<(i64, i64)> {
        let inventory = images.join(names::CRIU_INVENTORY).metadata().ok()?;
        Some((inventory.mtime(), inventory.mtime_nsec()))
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LsmFacts {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub apparmor: Option<String>,
    /// SELinux process label of the spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selinux: Option<String>,
    /// SELinux label of the spec's mounts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_label: Option<String>,
}
