//! Reads the privileges of the processes in the images: credentials, seccomp, labels, namespaces, mounts. A restore
//! compares them with what the engine's spec gives.
//!
//! The files have CRIU's names: `pstree.img` lists processes and threads. Each thread has a `core-TID.img`, each
//! process an `ids-PID.img`. Each mount namespace in the ids has a `mountpoints-ID.img`.

use std::collections::BTreeSet;

use prost::Message;

use super::image::{Bounds, ImageError, messages};
use super::mounts::{self, Mount};
use super::proto::{
    CORE_MAGIC, CoreEntry, Creds, IDS_MAGIC, INVENTORY_MAGIC, Ids, InventoryEntry, PSTREE_MAGIC,
    PstreeEntry,
};
use crate::names::CRIU_INVENTORY;

const SECCOMP_MAGIC: u32 = 0x6441_3049;
const MAX_THREADS: usize = 1 << 20;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Privileges {
    /// All restored threads. Zombies have no privileges.
    pub threads: Vec<Thread>,
    /// The namespaces of the processes that have their own list; the others have those of their parent.
    pub namespaces: Vec<Namespaces>,
    /// The namespaces that CRIU ran in at the checkpoint. A process with one of these ids shares that namespace with
    /// the host.
    pub host: Namespaces,
    pub mounts: Vec<Mount>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Thread {
    /// Process id inside the container.
    pub pid: u32,
    /// Thread id inside the container.
    pub tid: u32,
    pub comm: String,
    pub credentials: Credentials,
    pub no_new_privs: bool,
    /// 0: no seccomp, 1: strict, 2: a filter.
    pub seccomp: u32,
    /// AppArmor profile or SELinux context.
    pub label: Option<String>,
}

/// Ids and capabilities of a thread, as its user namespace has them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Credentials {
    /// Real, effective, saved and file system user id.
    pub uids: [u32; 4],
    pub gids: [u32; 4],
    /// Supplementary groups.
    pub groups: Vec<u32>,
    pub capabilities: Capabilities,
    /// `SECBIT_*`.
    pub securebits: u32,
}

/// The capability sets, one bit per capability.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Capabilities {
    pub inheritable: u64,
    pub permitted: u64,
    pub effective: u64,
    pub bounding: u64,
    pub ambient: u64,
}

/// CRIU's ids of a process's namespaces; 0: not recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Namespaces {
    /// The process id; 0 for CRIU itself.
    pub of: u32,
    /// In the order of [`NAMESPACES`].
    pub ids: [u32; 8],
}

pub const NAMESPACES: [&str; 8] = [
    "pid", "network", "ipc", "uts", "mount", "user", "cgroup", "time",
];

/// Reads the privileges. `open` returns the content of a file of the image directory, or `None` if there is no such
/// file. Fails with [`ImageError`] if an image is damaged, or if one is missing and CRIU would then restore a process
/// with CRIU's own privileges. Errors of `open` pass through unchanged.
pub fn read<E: From<ImageError>>(
    mut open: impl FnMut(&str) -> Result<Option<Vec<u8>>, E>,
) -> Result<Privileges, E> {
    let mut bounds = Bounds::default();
    let mut found = Privileges::default();
    let missing = |file: &str| ImageError::Missing { file: file.into() };
    let damaged = |file: &str, reason: &str| ImageError::Message {
        file: file.into(),
        message: 0,
        reason: reason.into(),
    };
    let content = open(CRIU_INVENTORY)?.ok_or_else(|| missing(CRIU_INVENTORY))?;
    let inventory: Vec<InventoryEntry> =
        messages(CRIU_INVENTORY, &content, INVENTORY_MAGIC, &mut bounds)?;
    let host = inventory.into_iter().next().and_then(|i| i.root_ids);
    let host = host.ok_or_else(|| {
        damaged(
            CRIU_INVENTORY,
            "it does not say which namespaces are the host's",
        )
    })?;
    found.host = host.namespaces(0);

    let content = open("pstree.img")?.ok_or_else(|| missing("pstree.img"))?;
    let tree: Vec<PstreeEntry> = messages("pstree.img", &content, PSTREE_MAGIC, &mut bounds)?;
    let filters = match open("seccomp.img")? {
        Some(content) => {
            let all: Vec<Seccomp> = messages("seccomp.img", &content, SECCOMP_MAGIC, &mut bounds)?;
            all.into_iter().next().unwrap_or_default().filters
        }
        None => Vec::new(),
    };
    let mut mount_namespaces: BTreeSet<u32> = BTreeSet::new();
    let mut threads = 0usize;
    for process in &tree {
        let file = format!("ids-{}.img", process.pid);
        if let Some(content) = open(&file)? {
            let ids: Vec<Ids> = messages(&file, &content, IDS_MAGIC, &mut bounds)?;
            if let Some(ids) = ids.into_iter().next() {
                mount_namespaces.extend(ids.mnt);
                found.namespaces.push(ids.namespaces(process.pid));
            }
        }
        threads = threads.saturating_add(process.threads.len().max(1));
        if threads > MAX_THREADS {
            return Err(ImageError::TooMuch {
                file: "pstree.img".into(),
                what: format!("{threads} threads"),
            }
            .into());
        }
        let mut comm = String::new();
        // If all threads have the leader's filters, CRIU records only the leader's, for all of them.
        let mut for_all = 0;
        let others = process.threads.iter().filter(|tid| **tid != process.pid);
        for tid in std::iter::once(&process.pid).chain(others) {
            let file = format!("core-{tid}.img");
            let content = open(&file)?.ok_or_else(|| missing(&file))?;
            let cores: Vec<CoreEntry> = messages(&file, &content, CORE_MAGIC, &mut bounds)?;
            let core = cores.into_iter().next();
            let core = core.ok_or_else(|| ImageError::Empty { file: file.clone() })?;
            let task = core.tc.unwrap_or_default();
            if *tid == process.pid {
                comm = task.comm.clone();
                // In any other state CRIU gives the process the credentials of the images, or its own.
                if task.task_state == DEAD || task.task_state == ZOMBIE {
                    break;
                }
            }
            let thread = core.thread_core.and_then(|t| Some((t.creds.clone()?, t)));
            let (creds, thread) = thread.ok_or_else(|| {
                damaged(
                    &file,
                    "it has no credentials; the process would get CRIU's own",
                )
            })?;
            let credentials = creds
                .credentials()
                .ok_or_else(|| damaged(&file, "a set of capabilities has not two words"))?;
            let own = thread.seccomp_mode.or(task.old_seccomp_mode).unwrap_or(0);
            if *tid == process.pid && own == FILTER && synced(&filters, thread.seccomp_filter) {
                for_all = FILTER;
            }
            found.threads.push(Thread {
                pid: process.pid,
                tid: *tid,
                comm: comm.clone(),
                credentials,
                no_new_privs: creds.no_new_privs.unwrap_or(0) != 0,
                seccomp: own.max(for_all),
                label: creds.lsm_profile.filter(|l| !l.is_empty()),
            });
        }
    }
    for id in mount_namespaces {
        let file = format!("mountpoints-{id}.img");
        let Some(content) = open(&file)? else {
            continue; // the host's own mount namespace has none
        };
        found
            .mounts
            .extend(mounts::bounded(&file, &content, &mut bounds)?);
    }
    Ok(found)
}

const DEAD: u32 = 2;
const ZOMBIE: u32 = 6;
/// `SECCOMP_MODE_FILTER`, and the flag that installs a filter in all threads.
const FILTER: u32 = 2;
const TSYNC: u32 = 1;

/// Returns true if every filter of the chain that begins at `first` applies to all threads of its process.
fn synced(filters: &[Filter], first: Option<u32>) -> bool {
    let mut next = first;
    for _ in 0..=filters.len() {
        let Some(at) = next else {
            return first.is_some();
        };
        match filters.get(at as usize) {
            Some(filter) if filter.flags & TSYNC != 0 => next = filter.prev,
            _ => return false,
        }
    }
    false // the chain has a cycle
}

#[derive(Clone, PartialEq, Message)]
struct Seccomp {
    #[prost(message, repeated, tag = "1")]
    filters: Vec<Filter>,
}

#[derive(Clone, PartialEq, Message)]
struct Filter {
    #[prost(uint32, optional, tag = "2")]
    prev: Option<u32>,
    #[prost(uint32, tag = "3")]
    flags: u32,
}

impl Ids {
    fn namespaces(&self, of: u32) -> Namespaces {
        let ids = [
            self.pid,
            self.net,
            self.ipc,
            self.uts,
            self.mnt,
            self.user,
            self.cgroup,
            self.time,
        ];
        Namespaces {
            of,
            ids: ids.map(|id| id.unwrap_or(0)),
        }
    }
}

impl Creds {
    /// Returns `None` if a set of capabilities lacks the two words that CRIU writes. CRIU before 4.1 has no ambient set.
    fn credentials(&self) -> Option<Credentials> {
        let set = |words: &[u32]| {
            let [low, high] = words[..] else { return None };
            Some(u64::from(high) << 32 | u64::from(low))
        };
        Some(Credentials {
            uids: [self.uid, self.euid, self.suid, self.fsuid],
            gids: [self.gid, self.egid, self.sgid, self.fsgid],
            groups: self.groups.clone(),
            capabilities: Capabilities {
                inheritable: set(&self.cap_inh)?,
                permitted: set(&self.cap_prm)?,
                effective: set(&self.cap_eff)?,
                bounding: set(&self.cap_bnd)?,
                ambient: match self.cap_amb.is_empty() {
                    true => 0,
                    false => set(&self.cap_amb)?,
                },
            },
            securebits: self.secbits,
        })
    }
}

#[cfg(test)]
#[path = "privileges_tests.rs"]
mod tests;
