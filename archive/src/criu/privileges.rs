//! Reads the privileges of the processes in the images: credentials, seccomp, labels, namespaces, mounts. A restore
//! compares them with what the engine's spec gives.
//!
//! The files have CRIU's names: `pstree.img` lists processes and threads. Each thread has a `core-TID.img`, each
//! process an `ids-PID.img`. Each mount namespace in the ids has a `mountpoints-ID.img`.

use std::collections::BTreeSet;

use prost::Message;

use super::image::{Bounds, ImageError, messages};
use super::proto::{CORE_MAGIC, INVENTORY_MAGIC, MOUNTS_MAGIC, PSTREE_MAGIC, PstreeEntry};
use crate::names::CRIU_INVENTORY;

const IDS_MAGIC: u32 = 0x5443_2030;
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
    /// Union of all five capability sets, one bit per capability.
    pub capabilities: u64,
    pub no_new_privs: bool,
    /// 0: no seccomp, 1: strict, 2: a filter.
    pub seccomp: u32,
    /// AppArmor profile or SELinux context.
    pub label: Option<String>,
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

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mount {
    /// Mount point in the container, from `/`.
    pub path: String,
    /// CRIU's number of the file system's type: [`fs_type`].
    pub fs_type: u32,
    /// CRIU's number of the file system's device.
    pub device: u32,
    /// The `MS_*` flags of the mount and of its file system.
    pub flags: u32,
    /// The content comes from outside: the caller tells CRIU where it is.
    pub external: bool,
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
    let inventory: Vec<Inventory> =
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
            let cores: Vec<Core> = messages(&file, &content, CORE_MAGIC, &mut bounds)?;
            let core = cores.into_iter().next();
            let core = core.ok_or_else(|| ImageError::Empty { file: file.clone() })?;
            let task = core.tc.unwrap_or_default();
            if *tid == process.pid {
                comm = task.comm.clone();
                // In any other state CRIU gives the process the credentials of the images, or its own.
                if task.state == DEAD || task.state == ZOMBIE {
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
            let capabilities = creds
                .capabilities()
                .ok_or_else(|| damaged(&file, "a set of capabilities has not two words"))?;
            let own = thread.seccomp_mode.or(task.old_seccomp_mode).unwrap_or(0);
            if *tid == process.pid && own == FILTER && synced(&filters, thread.seccomp_filter) {
                for_all = FILTER;
            }
            found.threads.push(Thread {
                pid: process.pid,
                tid: *tid,
                comm: comm.clone(),
                capabilities,
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
        let mounts: Vec<MntEntry> = messages(&file, &content, MOUNTS_MAGIC, &mut bounds)?;
        found.mounts.extend(mounts.into_iter().map(MntEntry::mount));
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

#[derive(Clone, PartialEq, Message)]
struct Inventory {
    #[prost(message, optional, tag = "3")]
    root_ids: Option<Ids>,
}

#[derive(Clone, PartialEq, Message)]
struct Ids {
    #[prost(uint32, optional, tag = "5")]
    pid: Option<u32>,
    #[prost(uint32, optional, tag = "6")]
    net: Option<u32>,
    #[prost(uint32, optional, tag = "7")]
    ipc: Option<u32>,
    #[prost(uint32, optional, tag = "8")]
    uts: Option<u32>,
    #[prost(uint32, optional, tag = "9")]
    mnt: Option<u32>,
    #[prost(uint32, optional, tag = "10")]
    user: Option<u32>,
    #[prost(uint32, optional, tag = "11")]
    cgroup: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    time: Option<u32>,
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

#[derive(Clone, PartialEq, Message)]
struct Core {
    #[prost(message, optional, tag = "3")]
    tc: Option<Task>,
    #[prost(message, optional, tag = "5")]
    thread_core: Option<ThreadCore>,
}

#[derive(Clone, PartialEq, Message)]
struct Task {
    #[prost(uint32, tag = "1")]
    state: u32,
    #[prost(string, tag = "6")]
    comm: String,
    #[prost(uint32, optional, tag = "11")]
    old_seccomp_mode: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct ThreadCore {
    #[prost(message, optional, tag = "10")]
    creds: Option<Creds>,
    #[prost(uint32, optional, tag = "11")]
    seccomp_mode: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    seccomp_filter: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
struct Creds {
    #[prost(uint32, repeated, packed = "false", tag = "9")]
    cap_inh: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "10")]
    cap_prm: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    cap_eff: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    cap_bnd: Vec<u32>,
    #[prost(string, optional, tag = "15")]
    lsm_profile: Option<String>,
    #[prost(uint32, optional, tag = "18")]
    no_new_privs: Option<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "19")]
    cap_amb: Vec<u32>,
}

impl Creds {
    /// Returns the union of all sets; `None` if one lacks the two words that CRIU writes. CRIU before 4.1 has no
    /// ambient set.
    fn capabilities(&self) -> Option<u64> {
        let mut all = 0;
        for set in [&self.cap_inh, &self.cap_prm, &self.cap_eff, &self.cap_bnd] {
            let [low, high] = set[..] else { return None };
            all |= u64::from(high) << 32 | u64::from(low);
        }
        match self.cap_amb[..] {
            [] => {}
            [low, high] => all |= u64::from(high) << 32 | u64::from(low),
            _ => return None,
        }
        Some(all)
    }
}

#[derive(Clone, PartialEq, Message)]
struct MntEntry {
    #[prost(uint32, tag = "1")]
    fstype: u32,
    #[prost(uint32, tag = "3")]
    root_dev: u32,
    #[prost(uint32, tag = "5")]
    flags: u32,
    #[prost(string, tag = "7")]
    mountpoint: String,
    #[prost(bool, optional, tag = "13")]
    ext_mount: Option<bool>,
    #[prost(uint32, optional, tag = "17")]
    sb_flags: Option<u32>,
    #[prost(string, optional, tag = "18")]
    ext_key: Option<String>,
}

impl MntEntry {
    fn mount(self) -> Mount {
        let external = self.ext_mount == Some(true) || self.ext_key.is_some_and(|k| !k.is_empty());
        // CRIU does not create the file system of an external mount.
        let of_file_system = self.sb_flags.filter(|_| !external).unwrap_or(0);
        Mount {
            // CRIU writes paths with or without a leading dot.
            path: format!(
                "/{}",
                self.mountpoint.trim_start_matches('.').trim_matches('/')
            ),
            fs_type: self.fstype,
            device: self.root_dev,
            flags: self.flags | of_file_system,
            external,
        }
    }
}

#[cfg(test)]
#[path = "privileges_tests.rs"]
mod tests;
