//! Compares the open and mapped files of volumes with what CRIU saw of them. No checkpoint carries these files.
//!
//! CRIU restores no file of another size (`has bad size`). But a job that goes on after its checkpoint, and fails later,
//! has written on to its log: the checkpoint must still be good. So a file may have grown where its process cannot tell:
//! it reads, appends, or had just written to the end. CRIU's images then get today's size. A mapped file, or one that is
//! written anywhere, may be half of a database whose other half is in the memory: that is refused, also where only the
//! content of a mapping has changed, which CRIU does not notice.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use cryopod_archive::container::surroundings::CriuFacts;
use cryopod_archive::metadata::Metadata;
use cryopod_gpu_plan::checks::switches::{Switches, VOLUMES};
use cryopod_gpu_plan::refusal::Refusal;
use nix::fcntl::OFlag;
use nix::sys::statfs::{FUSE_SUPER_MAGIC, FsType, NFS_SUPER_MAGIC, SMB_SUPER_MAGIC, fstatfs};

use crate::request::Request;
use crate::rootfs::open_in_volume;
use crate::security::image_check::opened::OpenedFile;

/// File systems that may set a file's time when the process that wrote to it is gone.
const FLUSHED_LATER: [FsType; 5] = [
    NFS_SUPER_MAGIC,
    SMB_SUPER_MAGIC,
    FUSE_SUPER_MAGIC,
    FsType(0xff53_4d42), // CIFS
    FsType(0x00c3_6400), // Ceph
];

/// What volumes have now.
#[derive(Debug, Default)]
pub struct VolumeFiles {
    /// Files that have grown without harm, by CRIU's number, and the size that CRIU is to accept.
    pub sizes: BTreeMap<u64, u64>,
    /// Those that CRIU must not restore: none with the check [`VOLUMES`] off.
    pub refused: Vec<Refusal>,
}

/// Compares the files of the images with those of the spec's volumes.
pub fn compare(files: &[OpenedFile], request: &Request<'_>, metadata: &Metadata) -> VolumeFiles {
    let (mounts, bundle) = (&request.mounts, &request.bundle);
    let switches = Switches::gather(&request.spec, &request.config().checks, &|_| None);
    // A wrong annotation is refused elsewhere.
    let check = switches.is_ok_and(|s| s.on(VOLUMES));
    let noted = metadata.criu.dumped;
    let dumped = match noted.or_else(|| CriuFacts::dumped_at(&request.images)) {
        Some((seconds, 0)) => (seconds, i64::MAX), // from an archive with whole seconds
        time => time.unwrap_or((i64::MAX, 0)),
    };
    let (mut sizes, mut refused) = (BTreeMap::new(), BTreeMap::new());
    for file in files {
        let Some(saved) = file.saved else {
            continue;
        };
        let Some((host_path, found)) = open_in_volume(mounts, bundle, &file.path) else {
            continue;
        };
        let network = fstatfs(&found).is_ok_and(|s| FLUSHED_LATER.contains(&s.filesystem_type()));
        let Ok(found) = File::from(found).metadata() else {
            continue;
        };
        let (now, path) = (found.len(), file.path.display());
        let written = (found.mtime(), found.mtime_nsec());
        let rewritten = file.is_written && written > dumped && !network;
        if !found.is_file() || now == saved && !rewritten {
            continue;
        }
        let grows = now > saved && !file.is_mapped && bears_growth(file);
        if grows || !check {
            tracing::warn!("{path}: {now} bytes, and {saved} at the checkpoint");
            sizes.insert(file.id, now);
        } else {
            refused.insert(file.path.clone(), refusal(file, &host_path, now));
        }
    }
    VolumeFiles {
        sizes,
        refused: refused.into_values().collect(),
    }
}

/// True if its process cannot tell that somebody has written behind the end.
fn bears_growth(file: &OpenedFile) -> bool {
    let flags = OFlag::from_bits_retain(file.flags);
    flags & OFlag::O_ACCMODE == OFlag::O_RDONLY
        || flags.contains(OFlag::O_APPEND)
        || Some(file.position) == file.saved
}

fn refusal(file: &OpenedFile, host_path: &Path, now: u64) -> Refusal {
    let saved = file.saved.unwrap_or(0);
    let (path, host) = (file.path.display(), host_path.display());
    let (what, cut) = match now == saved {
        true => (
            "has been written since the checkpoint".into(),
            String::new(),
        ),
        false => (
            format!("has {now} bytes, and {saved} at the checkpoint"),
            format!(" (a longer file: truncate -s {saved} {host})"),
        ),
    };
    Refusal::new(
        format!("{path} ({host}) {what}, and a process has it mapped or open for writing"),
        format!(
            "put it back as it was{cut}, or, if the program takes it as it is, {}",
            Switches::how(VOLUMES)
        ),
    )
}
