//! Finds the files that CRIU opens, makes and removes as root, for the comparison with what volumes have and with what the
//! spec's user could do there.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use cryopod_archive::criu::message::Message;
use serde::{Deserialize, Serialize};

use super::CheckedImages;

const FILES: &str = "files.img";
const REMAPS: &str = "remap-fpath.img";
/// `VMA_FILE_PRIVATE` and `VMA_FILE_SHARED` (CRIU's `image.h`). The number of the file is then in `shmid`.
const OF_FILE: u32 = 1 << 6 | 1 << 7;
const SHARED: u32 = 1 << 7;
/// `REMAP_TYPE__LINKED`, and the mark of a deleted file in images of an old CRIU (`REMAP_GHOST`).
const LINKED: u32 = 0;
const OLD_GHOST: u32 = 1 << 31;
/// CRIU's mark of a socket of another process (`USK_EXTERN`).
pub const OUTSIDE: u64 = 1;

/// A file that CRIU is to open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenedFile {
    pub id: u64,
    pub path: PathBuf,
    /// Its size at the checkpoint, if it is a regular one.
    pub saved: Option<u64>,
    pub position: u64,
    /// As of `open`.
    pub flags: i32,
    /// Mapped, run, or a process's directory.
    pub is_mapped: bool,
    /// Mapped, and written through the mapping.
    pub is_written: bool,
}

/// What CRIU does with paths of the container, as root.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReachedPaths {
    /// A file that has lost its name is where CRIU's link to it is; a deleted one comes from the images.
    pub opened: Vec<OpenedFile>,
    /// Made or removed in CRIU's own mount namespace: deleted files and links.
    pub made: Vec<String>,
    pub watched: Vec<PathBuf>,
    /// Bound to sockets; what is there is removed.
    pub bound: Vec<PathBuf>,
}

pub fn reached(images: &CheckedImages) -> ReachedPaths {
    let links = links(images);
    let names: BTreeMap<u64, String> = images
        .messages(FILES)
        .iter()
        .filter_map(|m| m.message("reg"))
        .filter_map(|file| Some((file.number("id")?, file.text("name")?)))
        .collect();
    let mut made = Vec::new();
    for (id, link) in &links {
        made.extend(names.get(id).cloned());
        made.extend(link.and_then(|link| names.get(&link)).cloned());
    }
    ReachedPaths {
        opened: opened(images, &links, &names).collect(),
        made,
        watched: watched(images).collect(),
        bound: bound(images).collect(),
    }
}

/// Returns the files that have lost their names, each with the link that CRIU has made to it. `None`: it is deleted.
pub fn links(images: &CheckedImages) -> BTreeMap<u64, Option<u64>> {
    let link = |remap: &Message| {
        let target = remap.u32("remap_id").unwrap_or(0);
        let is_link = match remap.u32("remap_type") {
            Some(kind) => kind == LINKED,
            None => target & OLD_GHOST == 0,
        };
        Some((remap.number("orig_id")?, is_link.then_some(target.into())))
    };
    images.messages(REMAPS).iter().filter_map(link).collect()
}

fn opened(
    images: &CheckedImages,
    links: &BTreeMap<u64, Option<u64>>,
    names: &BTreeMap<u64, String>,
) -> impl Iterator<Item = OpenedFile> {
    let (mut mapped, mut written) = (BTreeSet::new(), BTreeSet::new());
    for process in images.numbered("fs-").flat_map(|(_, m)| m) {
        mapped.extend(process.number("cwd_id"));
        mapped.extend(process.number("root_id"));
    }
    for memory in images.numbered("mm-").flat_map(|(_, m)| m) {
        mapped.extend(memory.number("exe_file_id"));
        for area in memory.messages("vmas") {
            let number = |field| area.u32(field).unwrap_or(0);
            let (status, id) = (number("status"), area.number("shmid").unwrap_or(0));
            if status & OF_FILE == 0 {
                continue;
            }
            mapped.insert(id);
            if status & SHARED != 0 && number("prot").cast_signed() & libc::PROT_WRITE != 0 {
                written.insert(id);
            }
        }
    }
    let files = images.messages(FILES).iter();
    files.filter_map(move |file| {
        let file = file.message("reg")?;
        let id = file.number("id")?;
        let name = match links.get(&id) {
            Some(link) => names.get(&(*link)?)?.clone(),
            None => file.text("name")?,
        };
        Some(OpenedFile {
            id,
            path: Path::new("/").join(name),
            saved: file.number("size"),
            position: file.number("pos").unwrap_or(0),
            flags: file.u32("flags").unwrap_or(0).cast_signed(),
            is_mapped: mapped.contains(&id),
            is_written: written.contains(&id),
        })
    })
}

/// The files that are watched with inotify: whoever does so could have read them.
fn watched(images: &CheckedImages) -> impl Iterator<Item = PathBuf> {
    let groups = images
        .messages(FILES)
        .iter()
        .filter_map(|m| m.message("ify"));
    let watches = groups.flat_map(|group| group.messages("wd"));
    watches.filter_map(|watch| Some(Path::new("/").join(watch.message("f_handle")?.text("path")?)))
}

/// The paths of sockets that are no abstract names and nobody else's.
fn bound(images: &CheckedImages) -> impl Iterator<Item = PathBuf> {
    let sockets = images
        .messages(FILES)
        .iter()
        .filter_map(|m| m.message("usk"));
    let own = sockets.filter(|s| s.number("uflags").unwrap_or(0) & OUTSIDE == 0);
    own.filter_map(|socket| {
        let name = socket.bytes("name")?.split(|b| *b == 0).next()?;
        let name = std::str::from_utf8(name).ok().filter(|n| !n.is_empty())?;
        let from = socket.text("name_dir").unwrap_or_default();
        Some(Path::new("/").join(from).join(name))
    })
}
