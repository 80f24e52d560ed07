//! Reads the privileges of the processes in the images: credentials, seccomp, labels, namespaces, mounts. A restore
//! compares them with what the engine's spec gives.
//!
//! The files have CRIU's names: `pstree.img` lists processes and threads. Each thread has a `core-TID.img`, each
//! process an `ids-PID.img`. Each mount namespace in the ids has a `mountpoints-ID.img`.

use std::collections::BTreeSet;

use super::image_files::{ImageError, first_message, messages};
use super::message::Message;
use super::mounts::{self, CriuMount};
use crate::format::names::CRIU_INVENTORY;

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
    pub mounts: Vec<CriuMount>,
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
    let mut found = Privileges::default();
    let missing = ImageError::missing;
    let damaged = |file: &str, reason: &str| ImageError::Message {
        file: file.into(),
        message: 0,
        reason: reason.into(),
    };
    let content = open(CRIU_INVENTORY)?.ok_or_else(|| missing(CRIU_INVENTORY))?;
    let inventory = first_message(CRIU_INVENTORY, &content)?;
    let host = inventory.as_ref().and_then(|i| i.message("root_ids"));
    let host = host.ok_or_else(|| {
        damaged(
            CRIU_INVENTORY,
            "it does not say which namespaces are the host's",
        )
    })?;
    found.host = namespaces(host, 0);

    let content = open("pstree.img")?.ok_or_else(|| missing("pstree.img"))?;
    let seccomp = match open("seccomp.img")? {
        Some(content) => first_message("seccomp.img", &content)?,
        None => None,
    };
    let filters: Vec<&Message> = seccomp
        .iter()
        .flat_map(|s| s.messages("seccomp_filters"))
        .collect();
    let mut mount_namespaces: BTreeSet<u32> = BTreeSet::new();
    let mut threads = 0usize;
    for process in messages("pstree.img", &content)? {
        let process = process?;
        let pid = process.u32("pid").unwrap_or(0);
        let file = format!("ids-{pid}.img");
        if let Some(content) = open(&file)?
            && let Some(ids) = first_message(&file, &content)?
        {
            mount_namespaces.extend(ids.u32("mnt_ns_id"));
            found.namespaces.push(namespaces(&ids, pid));
        }
        threads = threads.saturating_add(process.numbers("threads").count().max(1));
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
        let others = process.u32s("threads").filter(|tid| *tid != pid);
        for tid in std::iter::once(pid).chain(others) {
            let file = format!("core-{tid}.img");
            let content = open(&file)?.ok_or_else(|| missing(&file))?;
            let core = first_message(&file, &content)?;
            let core = core.ok_or_else(|| ImageError::Empty { file: file.clone() })?;
            let task = core.message("tc");
            if tid == pid {
                comm = task.and_then(|t| t.text("comm")).unwrap_or_default();
                // In any other state CRIU gives the process the credentials of the images, or its own.
                let state = task.and_then(|t| t.u32("task_state"));
                if state == Some(DEAD) || state == Some(ZOMBIE) {
                    break;
                }
            }
            let thread = core.message("thread_core");
            let thread = thread.and_then(|t| Some((t.message("creds")?, t)));
            let (creds, thread) = thread.ok_or_else(|| {
                damaged(
                    &file,
                    "it has no credentials; the process would get CRIU's own",
                )
            })?;
            let credentials = credentials(creds)
                .ok_or_else(|| damaged(&file, "a set of capabilities has not two words"))?;
            // CRIU would take these in place of the thread's. It has not written them since 3.13.
            let old = ["old_seccomp_mode", "old_seccomp_filter"];
            if task.is_some_and(|t| old.iter().any(|field| t.has(field))) {
                return Err(damaged(&file, "it has two seccomp modes or filters").into());
            }
            let own = thread.u32("seccomp_mode").unwrap_or(0);
            if tid == pid && own == FILTER && synced(&filters, thread.u32("seccomp_filter")) {
                for_all = FILTER;
            }
            found.threads.push(Thread {
                pid,
                tid,
                comm: comm.clone(),
                credentials,
                no_new_privs: creds.number("no_new_privs").unwrap_or(0) != 0,
                seccomp: own.max(for_all),
                label: creds.text("lsm_profile").filter(|l| !l.is_empty()),
            });
        }
    }
    for id in mount_namespaces {
        let file = format!("mountpoints-{id}.img");
        let Some(content) = open(&file)? else {
            continue; // the host's own mount namespace has none
        };
        found.mounts.extend(mounts::read(&file, &content)?);
    }
    Ok(found)
}

pub const DEAD: u32 = 2;
pub const ZOMBIE: u32 = 6;
/// `SECCOMP_MODE_FILTER`, and the flag that installs a filter in all threads.
const FILTER: u32 = 2;
const TSYNC: u32 = 1;

/// Returns true if every filter of the chain that begins at `first` applies to all threads of its process.
fn synced(filters: &[&Message], first: Option<u32>) -> bool {
    let mut next = first;
    for _ in 0..=filters.len() {
        let Some(at) = next else {
            return first.is_some();
        };
        match filters.get(at as usize) {
            Some(filter) if filter.u32("flags").unwrap_or(0) & TSYNC != 0 => {
                next = filter.u32("prev");
            }
            _ => return false,
        }
    }
    false // the chain has a cycle
}

fn namespaces(ids: &Message, of: u32) -> Namespaces {
    let kinds = ["pid", "net", "ipc", "uts", "mnt", "user", "cgroup", "time"];
    let ids = kinds.map(|kind| ids.u32(&format!("{kind}_ns_id")).unwrap_or(0));
    Namespaces { of, ids }
}

/// Returns `None` if a set of capabilities lacks the two words that CRIU writes. CRIU before 4.1 has no ambient set.
fn credentials(creds: &Message) -> Option<Credentials> {
    let id = |field| creds.u32(field).unwrap_or(0);
    let set = |field| match creds.u32s(field).collect::<Vec<_>>()[..] {
        [low, high] => Some(u64::from(high) << 32 | u64::from(low)),
        _ => None,
    };
    Some(Credentials {
        uids: ["uid", "euid", "suid", "fsuid"].map(id),
        gids: ["gid", "egid", "sgid", "fsgid"].map(id),
        groups: creds.u32s("groups").collect(),
        capabilities: Capabilities {
            inheritable: set("cap_inh")?,
            permitted: set("cap_prm")?,
            effective: set("cap_eff")?,
            bounding: set("cap_bnd")?,
            ambient: match creds.has("cap_amb") {
                true => set("cap_amb")?,
                false => 0,
            },
        },
        securebits: id("secbits"),
    })
}

#[cfg(test)]
#[path = "privileges_tests.rs"]
mod tests;
