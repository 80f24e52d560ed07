//! Finds the files that CRIU opens, makes and removes as root, for the comparison with what volumes have and with what the
//! spec's user could do there.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use cryopod_archive::criu::message::Message;
use serde::{Deserialize, Serialize};

use super::CheckedImages;

const FILES: &str = "files.img";
const REMAPS: &str = "remap-fpath.img";
const QUEUES: &str = "sk-queues.img";
/// `VMA_FILE_PRIVATE` and `VMA_FILE_SHARED` (CRIU's `image.h`). The number of the file is then in `shmid`.
const OF_FILE: u32 = 1 << 6 | 1 << 7;
const SHARED: u32 = 1 << 7;
/// `REMAP_TYPE__LINKED`, `REMAP_TYPE__GHOST`, and the mark of a deleted file in images of an old CRIU (`REMAP_GHOST`).
const LINKED: u32 = 0;
const GHOST: u32 = 1;
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
    /// Mapped or run.
    pub is_mapped: bool,
    /// Mapped, and written through the mapping.
    pub is_written: bool,
}

/// A file that CRIU makes, or a link that it removes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MadePath {
    pub path: String,
    /// The number of the mount in which CRIU does so.
    pub mount: Option<u64>,
    pub is_directory: bool,
}

/// A watched file as `open_by_handle_at` takes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WatchedHandle {
    /// CRIU's number of the file system's device.
    pub device: u32,
    pub kind: i32,
    pub bytes: Vec<u8>,
}

/// What CRIU does with paths of the container, as root.
#[derive(Debug, Default, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReachedPaths {
    /// A file that has lost its name is where CRIU's link to it is; a deleted one comes from the images.
    pub opened: Vec<OpenedFile>,
    /// Made or removed in CRIU's own mount namespace: deleted files and links.
    pub made: Vec<MadePath>,
    /// Sent over a socket, and not yet received.
    pub in_flight: Vec<OpenedFile>,
    pub watched: Vec<PathBuf>,
    pub handles: Vec<WatchedHandle>,
    /// Bound to sockets; what is there is removed.
    pub bound: Vec<PathBuf>,
}

pub fn reached(images: &CheckedImages) -> ReachedPaths {
    let lost = lost(images);
    let names: BTreeMap<u64, String> = images
        .messages(FILES)
        .iter()
        .filter_map(|m| m.message("reg"))
        .filter_map(|file| Some((file.number("id")?, file.text("name")?)))
        .collect();
    let opened: Vec<OpenedFile> = opened(images, &lost, &names).collect();
    let queues = images.with_data.get(QUEUES).into_iter().flatten();
    let sent = queues.flat_map(|packet| packet.messages("scm"));
    let sent: BTreeSet<u64> = sent.flat_map(|scm| scm.numbers("rights")).collect();
    let in_flight = opened.iter().filter(|file| sent.contains(&file.id));
    let watches = watches(images, &lost);
    ReachedPaths {
        in_flight: in_flight.cloned().collect(),
        opened,
        made: made(images, &lost),
        watched: watched(&watches).collect(),
        handles: handles(&watches).collect(),
        bound: bound(images).collect(),
    }
}

/// A file that has lost its name (`remap-fpath.img`), by the number of the open file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LostFile {
    /// The number of an open file with the name of CRIU's link.
    Link(u64),
    /// The number of the image of a deleted file.
    Ghost(u64),
    /// Of a process that has ended.
    Process,
}

pub fn lost(images: &CheckedImages) -> BTreeMap<u64, LostFile> {
    let lost = |remap: &Message| {
        let target = remap.u32("remap_id").unwrap_or(0);
        let kind = match (remap.u32("remap_type"), target & OLD_GHOST) {
            (Some(LINKED), _) | (None, 0) => LostFile::Link(target.into()),
            (Some(GHOST), _) => LostFile::Ghost(target.into()),
            (None, _) => LostFile::Ghost((target & !OLD_GHOST).into()),
            (Some(_), _) => LostFile::Process,
        };
        Some((remap.number("orig_id")?, kind))
    };
    images.messages(REMAPS).iter().filter_map(lost).collect()
}

/// Returns the first message of the image of a deleted file.
pub fn ghost(images: &CheckedImages, number: u64) -> Option<&Message> {
    let name = format!("ghost-file-{number:x}.img");
    images.with_data.get(&name)?.first()
}

/// Returns what CRIU makes and removes of these.
fn made(images: &CheckedImages, lost: &BTreeMap<u64, LostFile>) -> Vec<MadePath> {
    let files = images
        .messages(FILES)
        .iter()
        .filter_map(|m| m.message("reg"));
    let files: BTreeMap<u64, &Message> = files.filter_map(|f| Some((f.number("id")?, f))).collect();
    let mut made = Vec::new();
    for (id, kind) in lost {
        let Some(file) = files.get(id) else { continue };
        // CRIU takes the mount of the open file for its link, too.
        let mount = file
            .number("mnt_id")
            .filter(|n| n & 1 == 0)
            .map(|zigzag| zigzag >> 1);
        let mut add = |file: &Message, is_directory| {
            made.extend(file.text("name").map(|path| MadePath {
                path,
                mount,
                is_directory,
            }));
        };
        match kind {
            LostFile::Link(link) => {
                add(file, false);
                if let Some(link) = files.get(link) {
                    add(link, false);
                }
            }
            LostFile::Ghost(number) => {
                let mode = ghost(images, *number).and_then(|g| g.u32("mode"));
                add(file, mode.unwrap_or(0) & libc::S_IFMT == libc::S_IFDIR);
            }
            LostFile::Process => {}
        }
    }
    made
}

fn opened(
    images: &CheckedImages,
    lost: &BTreeMap<u64, LostFile>,
    names: &BTreeMap<u64, String>,
) -> impl Iterator<Item = OpenedFile> {
    let (mut mapped, mut written) = (BTreeSet::new(), BTreeSet::new());
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
        let name = match lost.get(&id) {
            Some(LostFile::Link(link)) => names.get(link)?.clone(),
            Some(_) => return None,
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

/// Returns the watches of inotify whose files are not in the images.
fn watches(images: &CheckedImages, lost: &BTreeMap<u64, LostFile>) -> Vec<Message> {
    let is_deleted = |watch: &Message| {
        let of = (watch.number("s_dev"), watch.number("i_ino"));
        lost.values().any(|lost| match lost {
            LostFile::Ghost(number) => {
                ghost(images, *number).is_some_and(|g| (g.number("dev"), g.number("ino")) == of)
            }
            _ => false,
        })
    };
    let groups = images
        .messages(FILES)
        .iter()
        .filter_map(|m| m.message("ify"));
    let watches = groups.flat_map(|group| group.messages("wd"));
    watches.filter(|w| !is_deleted(w)).cloned().collect()
}

/// The files that are watched: whoever does so could have read them.
fn watched(watches: &[Message]) -> impl Iterator<Item = PathBuf> {
    watches
        .iter()
        .filter_map(|watch| Some(Path::new("/").join(watch.message("f_handle")?.text("path")?)))
}

/// Watched files of which CRIU has found no path.
fn handles(watches: &[Message]) -> impl Iterator<Item = WatchedHandle> {
    watches.iter().filter_map(|watch| {
        let handle = watch.message("f_handle").filter(|h| !h.has("path"))?;
        let words = handle.numbers("handle").flat_map(u64::to_le_bytes);
        let length = usize::try_from(handle.u32("bytes")?).ok()?;
        Some(WatchedHandle {
            device: watch.u32("s_dev")?,
            kind: handle.u32("type")?.cast_signed(),
            bytes: words.take(length).collect(),
        })
    })
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
