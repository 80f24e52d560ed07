//! Tells the images of a checkpoint from those that an earlier one has left in the same directory: podman keeps the
//! directory of a container with `--keep`, and process and namespace numbers change from one checkpoint to the next. CRIU
//! opens only what the process tree names, so the others are neither judged nor shown to it.

use std::collections::BTreeSet;
use std::path::Path;

use cryopod_archive::criu::image_files::ImageFile;
use cryopod_archive::criu::message::Message;
use cryopod_archive::criu::privileges::{DEAD, ZOMBIE};
use cryopod_archive::format::names;

use crate::security::privileges::{self, PrivilegesError};

const OF_PROCESSES: [&str; 1] = ["core-"];
/// A zombie has only `core-`. Of one that an earlier checkpoint saw alive CRIU would read `ids-` and look for its files
/// (`No file for fd`).
const OF_LIVING: [&str; 4] = ["ids-", "mm-", "fs-", "pagemap-"];
const OF_NAMESPACES: [&str; 7] = [
    "mountpoints-",
    "utsns-",
    "userns-",
    "ipcns-var-",
    "ipcns-shm-",
    "ipcns-msg-",
    "ipcns-sem-",
];
/// The fields of CRIU's `task_kobj_ids_entry` that number namespaces with images of their own.
const NAMESPACES: [&str; 4] = ["mnt_ns_id", "uts_ns_id", "user_ns_id", "ipc_ns_id"];

/// The numbers in the names of a checkpoint's images.
#[derive(Debug, Default)]
pub struct Members {
    /// Threads too. Empty: the process tree cannot be read, and every image counts.
    processes: BTreeSet<u64>,
    living: BTreeSet<u64>,
    namespaces: BTreeSet<u64>,
}

impl Members {
    /// Reads the process tree and what it says of namespaces. Damaged images are left to the checks.
    pub fn of(directory: &Path) -> Result<Self, PrivilegesError> {
        let read = |name: &str| -> Result<Vec<Message>, PrivilegesError> {
            let content = privileges::open(directory, name)?.unwrap_or_default();
            let image = ImageFile::decode(name, &content);
            Ok(image.map_or_else(|_| Vec::new(), |image| image.messages))
        };
        let mut found = Self::default();
        for process in read("pstree.img")? {
            found.processes.extend(process.number("pid"));
            found.processes.extend(process.numbers("threads"));
        }
        let mut ids = Vec::new();
        for process in &found.processes {
            let core = read(&format!("core-{process}.img"))?;
            let state = core
                .first()
                .and_then(|core| core.message("tc")?.u32("task_state"));
            if state.is_none_or(|state| ![DEAD, ZOMBIE].contains(&state)) {
                found.living.insert(*process);
                ids.extend(read(&format!("ids-{process}.img"))?);
            }
        }
        let inventory = read(names::CRIU_INVENTORY)?;
        ids.extend(
            inventory
                .iter()
                .filter_map(|i| i.message("root_ids").cloned()),
        );
        let numbers = ids.iter().flat_map(|of| NAMESPACES.map(|n| of.number(n)));
        found.namespaces = numbers.flatten().collect();
        Ok(found)
    }

    /// Returns true for an image that belongs to no process and no namespace of this checkpoint.
    pub fn lack(&self, name: &str) -> bool {
        let number = |prefix: &&str| -> Option<u64> {
            let number = name.strip_prefix(*prefix)?.strip_suffix(".img")?;
            number.parse().ok()
        };
        let of = |prefixes: &[&str]| prefixes.iter().find_map(number);
        let is_other = |number: Option<u64>, own: &BTreeSet<u64>| {
            number.is_some_and(|number| !own.contains(&number))
        };
        !self.processes.is_empty()
            && (is_other(of(&OF_PROCESSES), &self.processes)
                || is_other(of(&OF_LIVING), &self.living)
                || is_other(of(&OF_NAMESPACES), &self.namespaces))
    }
}
