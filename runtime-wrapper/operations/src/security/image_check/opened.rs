//! Finds the regular files that CRIU opens, for the comparison with what volumes have now.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cryopod_archive::criu::message::Message;
use serde::{Deserialize, Serialize};

use super::CheckedImages;

const FILES: &str = "files.img";
/// `VMA_FILE_PRIVATE` and `VMA_FILE_SHARED` (CRIU's `image.h`). The number of the file is then in `shmid`.
const OF_FILE: u32 = 1 << 6 | 1 << 7;
const SHARED: u32 = 1 << 7;

/// A file that CRIU is to open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenedFile {
    pub id: u64,
    pub path: PathBuf,
    /// Its size at the checkpoint.
    pub saved: u64,
    pub position: u64,
    /// As of `open`.
    pub flags: i32,
    pub is_mapped: bool,
    /// Mapped, and written through the mapping.
    pub is_written: bool,
}

pub fn files(images: &CheckedImages) -> Vec<OpenedFile> {
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
    let opened = |file: &Message| {
        let file = file.message("reg")?;
        let id = file.number("id")?;
        Some(OpenedFile {
            id,
            path: Path::new("/").join(file.text("name")?),
            saved: file.number("size")?,
            position: file.number("pos").unwrap_or(0),
            flags: file.u32("flags").unwrap_or(0).cast_signed(),
            is_mapped: mapped.contains(&id),
            is_written: written.contains(&id),
        })
    };
    images.messages(FILES).iter().filter_map(opened).collect()
}
