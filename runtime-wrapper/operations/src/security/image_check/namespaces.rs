//! Compares and settles what CRIU writes into namespaces: maps of user ids, host name, limits of System V objects.
//!
//! A namespace that the spec gives by path is others' too, the other containers of a pod, say. CRIU joins it and then
//! writes the images' values into it. So the images get the values that it has.

use std::fs::File;
use std::iter;
use std::path::Path;

use cryopod_archive::criu::message::Message;
use cryopod_host::processes::id_map::IdMap;
use cryopod_host::spec::Spec;
use nix::sched::{CloneFlags, setns};
use serde_json::Value;

use super::{CheckedImages, Subject};

/// The values of an IPC namespace: CRIU's name, and the file that has it.
const IPC: [(&str, &str); 12] = [
    ("msg_ctlmax", "kernel/msgmax"),
    ("msg_ctlmnb", "kernel/msgmnb"),
    ("msg_ctlmni", "kernel/msgmni"),
    ("auto_msgmni", "kernel/auto_msgmni"),
    ("shm_ctlmax", "kernel/shmmax"),
    ("shm_ctlall", "kernel/shmall"),
    ("shm_ctlmni", "kernel/shmmni"),
    ("shm_rmid_forced", "kernel/shm_rmid_forced"),
    ("mq_queues_max", "fs/mqueue/queues_max"),
    ("mq_msg_max", "fs/mqueue/msg_max"),
    ("mq_msgsize_max", "fs/mqueue/msgsize_max"),
    ("mq_msg_default", "fs/mqueue/msg_default"),
];

/// The values of the namespaces that the spec gives by path. Nothing that is confined may enter them.
#[derive(Debug, Default)]
pub struct NamespaceValues {
    /// The names of the host and of its domain.
    names: Option<Result<(String, String), String>>,
    ipc: Option<Result<IpcLimits, String>>,
}

/// The values of [`IPC`], and those of semaphores.
type IpcLimits = (Vec<Option<u64>>, Vec<u64>);

impl NamespaceValues {
    pub fn of(spec: &Spec) -> Self {
        let path = |kind| by_path(spec.json(), kind);
        Self {
            names: path("uts").map(host_name),
            ipc: path("ipc").map(ipc_limits),
        }
    }
}

pub fn settle(images: &mut CheckedImages, subject: Subject<'_>) -> Vec<String> {
    let mut told = user_ids(images, subject.spec.json());
    told.extend(translate_group_range(images).err());
    if let Some(names) = &subject.values.names {
        told.extend(keep_host_name(images, names).err());
    }
    if let Some(limits) = &subject.values.ipc {
        told.extend(keep_ipc_limits(images, limits).err());
    }
    told
}

/// The path of a namespace of this kind that the spec names.
fn by_path<'a>(spec: &'a Value, kind: &str) -> Option<&'a Path> {
    let list = spec.pointer("/linux/namespaces")?.as_array()?;
    let entry = list.iter().find(|n| n["type"] == kind)?;
    let path = entry.get("path")?.as_str()?;
    (!path.is_empty()).then(|| Path::new(path))
}

fn of_images<'a>(namespaces: impl Iterator<Item = &'a Message>, field: &str) -> IdMap {
    let ranges = namespaces.flat_map(|namespace| namespace.messages(field));
    let range = |m: &Message| ["first", "lower_first", "count"].map(|f| m.number(f).unwrap_or(0));
    ranges.map(range).collect()
}

/// Compares the maps of the user namespace with the spec's.
fn user_ids(images: &CheckedImages, spec: &Value) -> Vec<String> {
    let mut told = Vec::new();
    for (name, messages) in images.numbered("userns-") {
        for of in messages {
            for (field, of_spec) in [("uid_map", "uidMappings"), ("gid_map", "gidMappings")] {
                let differ = of_images(iter::once(of), field) != IdMap::of_spec(spec, of_spec);
                if differ && by_path(spec, "user").is_none() {
                    told.push(format!("{name}: {field} is not the spec's"));
                }
            }
            if of.has("binfmt_misc") {
                told.push(format!("{name}: holds interpreters"));
            }
        }
    }
    told
}

/// Translates the groups of `net.ipv4.ping_group_range` into the container's numbers.
///
/// CRIU 4.1 reads them on the host, in the host's numbers, and writes them within the container's user namespace, which
/// has other numbers (`Failed to write net/ipv4/<sysctls>`). CRIU 4.2 has the container's numbers in the image: they stay.
fn translate_group_range(images: &mut CheckedImages) -> Result<(), String> {
    let namespaces = images.numbered("userns-").flat_map(|(_, m)| m);
    let map = of_images(namespaces, "gid_map");
    if map.is_empty() {
        return Ok(());
    }
    for name in images.names("netns-") {
        for sysctl in images
            .messages_mut(&name)
            .iter_mut()
            .flat_map(|m| m.messages_mut("ipv4_sysctl"))
        {
            let Some(text) = sysctl.text("sarg") else {
                continue;
            };
            let numbers = text.split_whitespace().map(|n| n.parse().ok());
            let Some([low, high]) = numbers
                .collect::<Option<Vec<u64>>>()
                .and_then(|n| <[u64; 2]>::try_from(n).ok())
            else {
                continue; // not a range of groups
            };
            if low > high {
                continue; // no group at all, in any numbers
            }
            let (Some(low), Some(high)) = (map.inside(low), map.inside(high)) else {
                if map.outside(low).is_some() && map.outside(high).is_some() {
                    continue;
                }
                return Err(format!(
                    "{name}: net.ipv4.ping_group_range is {text:?}: groups that the user namespace does not map"
                ));
            };
            sysctl.set_text("sarg", &format!("{low} {high}"));
        }
    }
    Ok(())
}

fn host_name(path: &Path) -> Result<(String, String), String> {
    within(path, CloneFlags::CLONE_NEWUTS, || {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/sys/kernel/{file}"));
        Ok((read("hostname")?, read("domainname")?))
    })
}

fn keep_host_name(
    images: &mut CheckedImages,
    names: &Result<(String, String), String>,
) -> Result<(), String> {
    for name in images.names("utsns-") {
        let (node, domain) = names.as_ref()?;
        for of in images.messages_mut(&name) {
            of.set_text("nodename", node.trim_end());
            of.set_text("domainname", domain.trim_end());
        }
    }
    Ok(())
}

fn ipc_limits(path: &Path) -> Result<IpcLimits, String> {
    within(path, CloneFlags::CLONE_NEWIPC, || {
        let read = |(_, file): &(&str, &str)| {
            let text = std::fs::read_to_string(format!("/proc/sys/{file}")).ok()?;
            text.trim().parse::<u64>().ok()
        };
        let sem = std::fs::read_to_string("/proc/sys/kernel/sem")?;
        let sem = sem.split_whitespace().filter_map(|n| n.parse().ok());
        Ok((
            IPC.iter().map(read).collect::<Vec<_>>(),
            sem.collect::<Vec<u64>>(),
        ))
    })
}

fn keep_ipc_limits(
    images: &mut CheckedImages,
    limits: &Result<IpcLimits, String>,
) -> Result<(), String> {
    for name in images.names("ipcns-var-") {
        let (values, semaphores) = limits.as_ref()?;
        for of in images.messages_mut(&name) {
            of.set_numbers("sem_ctls", semaphores);
            // The ids of the next objects are the checkpoint's.
            for next in ["msg_next_id", "sem_next_id", "shm_next_id"] {
                of.remove(next);
            }
            for ((field, _), value) in IPC.iter().zip(values) {
                if let (Some(value), true) = (value, of.has(field)) {
                    of.set_number(field, *value);
                }
            }
        }
    }
    Ok(())
}

/// Runs `what` in a thread that has joined the namespace at this path.
fn within<T: Send>(
    path: &Path,
    kind: CloneFlags,
    what: impl FnOnce() -> std::io::Result<T> + Send,
) -> Result<T, String> {
    let failed = |e: std::io::Error| format!("{}: the namespace of the spec: {e}", path.display());
    let namespace = File::open(path).map_err(failed)?;
    let entered = || {
        setns(namespace, kind)?;
        what()
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, entered)?;
        let ended = thread.join();
        ended.unwrap_or_else(|_| Err(std::io::Error::other("a thread has ended early")))
    })
    .map_err(failed)
}
