//! Compares what CRIU's images give the restored processes with what the engine's spec gives them.
//!
//! CRIU restores credentials, seccomp, labels, namespaces and mounts as the images say; no runtime applies its spec to
//! them. The images come with the archive, perhaps from a stranger. So cryopod refuses whatever they give beyond the
//! spec, unless the configuration disables the check `privileges`; an annotation cannot.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use cryopod_archive::criu::ImageError;
use cryopod_archive::criu::mounts::{CriuMount, fs_type};
use cryopod_archive::criu::privileges::{
    self, Capabilities, Credentials, NAMESPACES, Privileges, Thread,
};
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::files::{Host, if_there, open_regular, read_bounded_from};
use cryopod_host::processes::id_map::IdMap;
use cryopod_host::processes::stat::StatusFile;
use cryopod_host::sandbox::SandboxError;
use cryopod_host::spec::Spec;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::ceiling::CredentialsCeiling;
use super::host_facts::{HostFacts, READ_ONLY};
use super::mount_limits::limits;
use crate::config::{Config, PRIVILEGES_CHECK};

const MAX_IMAGE: u64 = 64 << 20;
const MAX_DATA: u64 = 4 << 30;
/// At most so many refusals are reported.
const MAX_TOLD: usize = 20;

/// Paths that specs mask or make read-only and every kernel has; without the mount over them a container reaches the
/// host. Others differ between kernels, and a checkpoint of another host may lack them.
const GUARDED: [&str; 6] = [
    "/proc/kcore",
    "/proc/sys",
    "/proc/sysrq-trigger",
    "/proc/irq",
    "/proc/bus",
    "/proc/fs",
];
/// File systems that any container may have new instances of.
const ORDINARY: [&str; 3] = ["tmpfs", "devpts", "mqueue"];

#[derive(Debug, thiserror::Error)]
pub enum PrivilegesError {
    #[error("{path}: cannot be read: {source}")]
    Read { path: PathBuf, source: io::Error },
    /// An image is damaged, or says too little.
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error(transparent)]
    Decoder(#[from] SandboxError),
    #[error("a thread that reads the images has ended early")]
    Panicked,
}

#[derive(Debug, Clone, Copy)]
pub struct Given<'a> {
    pub facts: &'a HostFacts,
    pub spec: &'a Spec,
    /// Mount points of the host's own files that no spec names: read-only whatever the images say.
    pub read_only: &'a [String],
    /// CRIU gives every process the label of the new spec (`--lsm-profile`).
    pub relabelled: bool,
    /// The restore itself, where a path has one mount and all processes see the same ones, sets `nosuid`, `nodev` and `noexec` as the spec says ([`crate::restore::new_container::mounts`]).
    pub limited: bool,
}

/// A path that the spec masks or makes read-only, this host has, and the images leave open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LeftOpen {
    pub path: String,
    /// False: it is to be read-only.
    pub masked: bool,
}

/// How images compare with the spec.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Empty if nothing goes beyond the spec, or the check is off.
    pub refusals: Vec<Refusal>,
    pub warnings: Vec<String>,
    /// What the restore has to close; empty if the check is off.
    pub left_open: Vec<LeftOpen>,
}

/// Compares the images with the spec. `open` returns the content of an image as CRIU will read it, or `None` if there is
/// no such file.
pub fn compare(
    config: &Config,
    open: impl FnMut(&str) -> Result<Option<Vec<u8>>, PrivilegesError>,
    given: Given<'_>,
) -> Result<Comparison, PrivilegesError> {
    let on = config.compares_privileges();
    let off = |what: String| format!("the check {PRIVILEGES_CHECK} is off: {what}");
    match privileges::read(open) {
        Ok(found) if on => Ok(Comparison {
            refusals: beyond(&found, given),
            warnings: Vec::new(),
            left_open: left_open(&found, given).into_iter().collect(),
        }),
        Ok(found) => {
            let refusals = beyond(&found, given).into_iter();
            Ok(Comparison {
                warnings: refusals.map(|r| off(r.what)).collect(),
                ..Comparison::default()
            })
        }
        Err(e) if on => Err(e),
        Err(e) => Ok(Comparison {
            warnings: vec![off(e.to_string())],
            ..Comparison::default()
        }),
    }
}

/// Returns what the running processes `pids` have beyond their own spec: a restore of their checkpoint would be refused
/// for it. Empty if the check is off.
pub fn running(config: &Config, host: &Host, spec: &Spec, pids: &[i32]) -> Vec<Refusal> {
    if !config.checks.get(PRIVILEGES_CHECK).copied().unwrap_or(true) || !spec.json().is_object() {
        return Vec::new();
    }
    let facts = HostFacts::of(host, spec);
    let bounds = Bounds::of(Given {
        facts: &facts,
        spec,
        read_only: &[],
        relabelled: false,
        limited: false,
    });
    let threads = pids.iter().flat_map(|pid| threads(host, *pid));
    let mut told: Vec<String> = threads.flat_map(|t| bounds.thread(&t)).collect();
    told.dedup();
    told.truncate(MAX_TOLD);
    let refusal = |what: String| {
        Refusal::new(
            what.replace(" in the images", ""),
            format!(
                "end the process (one that `exec --privileged` has left, say), or set `{PRIVILEGES_CHECK} = false` under [checks] in /etc/cryopod/config.toml, for the restore too"
            ),
        )
    };
    told.into_iter().map(refusal).collect()
}

/// The threads of a running process, as `/proc` shows them; those that have ended are left out.
fn threads(host: &Host, pid: i32) -> Vec<Thread> {
    let directory = format!("/proc/{pid}/task");
    let comm = host.line(format!("/proc/{pid}/comm")).unwrap_or_default();
    let label = host.line(format!("/proc/{pid}/attr/current"));
    // AppArmor adds its mode: `profile (enforce)`.
    let label = label.map(|l| l.split(" (").next().unwrap_or_default().to_owned());
    let [uids, gids] =
        ["uid_map", "gid_map"].map(|file| IdMap::read(host, format!("/proc/{pid}/{file}")));
    let thread = |tid: String| {
        let status = StatusFile::read(host, format_args!("{pid}/task/{tid}"));
        let set = |name| status.set(name);
        let ids = |name, map: &IdMap| -> Option<Vec<u32>> {
            let ids = status.numbers(name)?.into_iter();
            let inside = |id: u32| u32::try_from(map.inside(id.into())?).ok();
            Some(ids.map(|id| inside(id).unwrap_or(id)).collect())
        };
        Some(Thread {
            pid: u32::try_from(pid).ok()?,
            tid: tid.parse().ok()?,
            comm: comm.clone(),
            credentials: Credentials {
                uids: ids("Uid", &uids)?.try_into().ok()?,
                gids: ids("Gid", &gids)?.try_into().ok()?,
                groups: ids("Groups", &gids)?,
                capabilities: Capabilities {
                    inheritable: set("CapInh")?,
                    permitted: set("CapPrm")?,
                    effective: set("CapEff")?,
                    bounding: set("CapBnd")?,
                    ambient: set("CapAmb").unwrap_or(0),
                },
                securebits: 0,
            },
            no_new_privs: status.field("NoNewPrivs") == Some("1"),
            seccomp: status.number("Seccomp")?,
            label: label.clone().filter(|l| !l.is_empty()),
        })
    };
    host.names(&directory)
        .into_iter()
        .filter_map(thread)
        .collect()
}

/// Reads a small image; `None` if there is no such file.
pub(crate) fn open(images: &Path, name: &str) -> Result<Option<Vec<u8>>, PrivilegesError> {
    read_file(images, name, MAX_IMAGE)
}

/// Reads an image that holds data of the container, too.
pub(crate) fn open_data(images: &Path, name: &str) -> Result<Option<Vec<u8>>, PrivilegesError> {
    read_file(images, name, MAX_DATA)
}

fn read_file(images: &Path, name: &str, limit: u64) -> Result<Option<Vec<u8>>, PrivilegesError> {
    let path = images.join(name);
    let read = open_regular(&path).and_then(|file| read_bounded_from(file, limit));
    if_there(read).map_err(|source| PrivilegesError::Read {
        path: path.clone(),
        source,
    })
}

/// Returns the paths that the spec closes and the images leave open, and that no restore is refused for.
fn left_open(found: &Privileges, given: Given<'_>) -> BTreeSet<LeftOpen> {
    let bounds = Bounds::of(given);
    if bounds.credentials.has("SYS_ADMIN") {
        return BTreeSet::new();
    }
    let namespaces = found.mounts.chunk_by(|a, b| a.namespace == b.namespace);
    let open = namespaces.flat_map(|mounts| bounds.left_open(mounts));
    open.filter(|left| !GUARDED.contains(&&left.path[..]))
        .collect()
}

/// Refuses what the images would give the processes beyond the engine's spec.
pub fn beyond(found: &Privileges, given: Given<'_>) -> Vec<Refusal> {
    let mount = NAMESPACES.iter().position(|n| *n == "mount").unwrap_or(0);
    let seen: BTreeSet<u32> = found.namespaces.iter().map(|n| n.ids[mount]).collect();
    let given = Given {
        limited: given.limited && seen.len() == 1,
        ..given
    };
    let bounds = Bounds::of(given);
    let mut told: Vec<String> = Vec::new();
    told.extend(found.threads.iter().flat_map(|t| bounds.thread(t)));
    told.extend(namespaces(found, given));
    for namespace in found.mounts.chunk_by(|a, b| a.namespace == b.namespace) {
        told.extend(bounds.mounts(namespace, seen.len() < 2));
    }
    told.dedup();
    let more = told.len().saturating_sub(MAX_TOLD);
    told.truncate(MAX_TOLD);
    if more > 0 {
        told.push(format!("{more} more things go beyond the spec"));
    }
    let refusal = |what| {
        Refusal::new(
            what,
            format!(
                "start the new container with the same privileges, or, if the checkpoint is trusted, set `{PRIVILEGES_CHECK} = false` under [checks] in /etc/cryopod/config.toml"
            ),
        )
    };
    told.into_iter().map(refusal).collect()
}

/// What the spec allows a process.
struct Bounds<'a> {
    given: Given<'a>,
    credentials: CredentialsCeiling,
    no_new_privs: bool,
    seccomp: bool,
    label: Option<&'a str>,
}

impl<'a> Bounds<'a> {
    fn of(given: Given<'a>) -> Self {
        let json = given.spec.json();
        let text = |pointer: &str| json.pointer(pointer).and_then(Value::as_str);
        let label = text("/process/apparmorProfile")
            .filter(|l| !l.is_empty() && *l != "unconfined")
            .filter(|_| given.facts.apparmor);
        let context =
            text("/process/selinuxLabel").filter(|l| !l.is_empty() && given.facts.selinux);
        let seccomp = json.pointer("/linux/seccomp");
        let open = seccomp.is_none_or(|s| {
            let allows = s.get("defaultAction").and_then(Value::as_str) == Some("SCMP_ACT_ALLOW");
            let rules = s.get("syscalls").and_then(Value::as_array);
            s.is_null() || allows && rules.is_none_or(Vec::is_empty)
        });
        Self {
            given,
            credentials: CredentialsCeiling::of(given.spec),
            no_new_privs: json
                .pointer("/process/noNewPrivileges")
                .and_then(Value::as_bool)
                == Some(true),
            seccomp: !open,
            label: label.or(context),
        }
    }

    fn thread(&self, thread: &Thread) -> Vec<String> {
        let mut told = Vec::new();
        let who = format!("process {} ({:?})", thread.pid, thread.comm);
        let more = self.credentials.exceeded(&thread.credentials);
        told.extend(more.into_iter().map(|what| format!("{who} {what}")));
        if self.no_new_privs && !thread.no_new_privs {
            told.push(format!(
                "{who} may gain privileges in the images, and the spec says noNewPrivileges"
            ));
        }
        if self.seccomp && thread.seccomp == 0 {
            told.push(format!(
                "{who} has no seccomp filter in the images, and the spec has one"
            ));
        }
        if let Some(want) = self.label {
            let same = thread.label.as_deref().is_some_and(|is| {
                self.given.relabelled
                    || is == want
                    || is.strip_prefix(want).is_some_and(|r| r.starts_with("//"))
            });
            if !same {
                let is = thread.label.as_deref().unwrap_or("none");
                told.push(format!(
                    "{who} has the label {is:?} in the images, and the spec says {want:?}"
                ));
            }
        }
        told
    }

    /// `alone`: there is no other mount namespace, so the restore closes what is left open.
    fn mounts(&self, mounts: &[CriuMount], alone: bool) -> Vec<String> {
        let mut told = Vec::new();
        for path in self.given.read_only {
            let of = |m: &&CriuMount| m.path == *path || m.external && m.key == *path;
            let open = mounts.iter().filter(of).any(|m| m.flags & READ_ONLY == 0);
            if open {
                told.push(format!(
                    "the images mount the host's files at {path} writable, and the spec does not name them"
                ));
            }
        }
        // Whoever may mount can do all of the following without a checkpoint.
        if self.credentials.has("SYS_ADMIN") {
            return told;
        }
        let spec = self.given.spec.json();
        let list = spec.get("mounts").and_then(Value::as_array);
        for mount in list.into_iter().flatten() {
            let Some(at) = mount.get("destination").and_then(Value::as_str) else {
                continue;
            };
            // runc leaves the tmpfs over cgroup v1's hierarchies writable, whatever the spec says.
            if mount
                .get("type")
                .and_then(Value::as_str)
                .is_some_and(|t| t.starts_with("cgroup"))
            {
                continue;
            }
            let options = mount.get("options").and_then(Value::as_array);
            let options = options.into_iter().flatten().filter_map(Value::as_str);
            let options: Vec<String> = options.map(str::to_owned).collect();
            // Its source may be mounted elsewhere, too, and `rro` is for all that is below.
            let at = at.trim_end_matches('/');
            let below = |m: &&CriuMount| Path::new(&m.path).starts_with(at);
            let is = |m: &&CriuMount| m.path == at || m.external && m.key == at;
            let limited = self.given.limited && mounts.iter().filter(is).count() == 1;
            for limit in limits(&options) {
                if limited && limit.flag != READ_ONLY {
                    continue;
                }
                let open = |m: &CriuMount| m.flags & limit.flag == 0;
                let mut of_it = mounts.iter().filter(is);
                let mut all_below = mounts.iter().filter(|m| limit.recursive && below(m));
                if of_it.any(open)
                    || all_below.any(open)
                    || top(mounts, at).is_some_and(|m| m.path == at && open(m))
                {
                    told.push(format!(
                        "the images mount {at} without {option}, and the spec says {option}",
                        option = limit.option
                    ));
                }
            }
        }
        for LeftOpen { path, .. } in self.left_open(mounts) {
            if !alone || GUARDED.contains(&&path[..]) {
                told.push(format!(
                    "the images leave {path} open, which the spec closes"
                ));
            }
        }
        let root = mounts.iter().find(|m| m.path == "/").map(|m| m.device);
        told.extend(mounts.iter().filter_map(|m| self.file_system(m, root)));
        told
    }

    /// Returns the paths that the spec closes, this host has, and no mount covers.
    fn left_open(&self, mounts: &[CriuMount]) -> impl Iterator<Item = LeftOpen> {
        let closed = self.given.facts.closed.iter();
        let closed = closed.filter(move |(path, flag)| {
            let is_closed = |m: &CriuMount| m.path == *path && m.flags & flag == *flag;
            !top(mounts, path).is_some_and(is_closed)
        });
        closed.map(|(path, flag)| LeftOpen {
            path: path.clone(),
            masked: *flag == 0,
        })
    }

    /// Refuses a new instance of a file system that the spec does not mount there. `root`: the device of the
    /// container's own.
    fn file_system(&self, mount: &CriuMount, root: Option<u32>) -> Option<String> {
        let name = fs_type(mount.fs_type)?;
        let own = mount.path == "/" || name == "overlay" && root == Some(mount.device);
        if mount.external || own || ORDINARY.contains(&name) {
            return None;
        }
        let spec = self.given.spec.json();
        let list = spec.get("mounts").and_then(Value::as_array);
        let named = list.into_iter().flatten().any(|m| {
            let text = |key: &str| m.get(key).and_then(Value::as_str).unwrap_or_default();
            let cgroup = |t: &str| t.starts_with("cgroup");
            let of_type = text("type") == name || cgroup(name) && cgroup(text("type"));
            let Ok(below) = Path::new(&mount.path).strip_prefix(text("destination")) else {
                return false;
            };
            let options = m.get("options").and_then(Value::as_array);
            let is_recursive = options.into_iter().flatten().any(|o| o == "rbind");
            of_type
                || is_recursive && self.has_mounted(&Path::new(text("source")).join(below), name)
        });
        (!named).then(|| {
            format!(
                "the images mount a {name} at {}, and the spec does not",
                mount.path
            )
        })
    }
}

impl Bounds<'_> {
    /// Returns true if this host has such a file system there: a recursive bind mount brings it along.
    fn has_mounted(&self, path: &Path, fs_type: &str) -> bool {
        let mut mounts = self.given.facts.mounts.iter();
        mounts.any(|m| m.point == path && m.fs_type == fs_type)
    }
}

/// Returns the mount that a process sees at this path: of several on one mount point, the last.
pub fn top<'a>(mounts: &'a [CriuMount], path: &str) -> Option<&'a CriuMount> {
    let path = Path::new(path);
    let is_child = |m: &&CriuMount| !mounts.iter().any(|p| p.id == m.parent && p.id != m.id);
    let mut seen = mounts.iter().find(|m| m.path == "/" && is_child(m))?;
    // Each step goes to a mount on the one before; a damaged image may lead in a circle.
    for _ in 0..mounts.len() {
        let on = mounts
            .iter()
            .filter(|m| m.parent == seen.id && m.id != seen.id && path.starts_with(&m.path));
        match on.min_by_key(|m| m.path.len()) {
            Some(next) => seen = next,
            None => break,
        }
    }
    Some(seen)
}

/// The spec's own namespaces: no process may share them with the host.
fn namespaces(found: &Privileges, given: Given<'_>) -> Vec<String> {
    let mut told = Vec::new();
    for named in &given.facts.own_namespaces {
        let Some(i) = NAMESPACES.iter().position(|n| n == named) else {
            continue;
        };
        // A missing record is CRIU's 0, the same for both: the process would stay in CRIU's.
        let shared = found
            .namespaces
            .iter()
            .find(|n| n.ids[i] == found.host.ids[i]);
        if let Some(n) = shared {
            told.push(format!(
                "process {} is in the host's {named} namespace in the images, and the spec gives the container its own",
                n.of
            ));
        }
    }
    if found.namespaces.is_empty() {
        told.push("the images name no process's namespaces".into());
    }
    told
}

#[cfg(test)]
#[path = "privileges_tests.rs"]
mod tests;
