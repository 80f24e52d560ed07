//! Detects from outside GPU memory that processes of one container share.
//!
//! The driver checkpoints processes that have each other's memory mapped, and then fails to restore them; they stay
//! checkpointed for ever. Seen with driver 580.159.04 and NCCL 2.28.9, torch 2.11, on two H200:
//!
//! | what is shared | restore |
//! |---|---|
//! | NCCL over P2P/CUMEM, its default, and cuMem host memory | `NOT_SUPPORTED` |
//! | NCCL over P2P/IPC (`NCCL_CUMEM_ENABLE=0`) | `INVALID_VALUE` |
//! | a tensor by CUDA IPC | exporter: works; importer: `INVALID_VALUE` |
//! | NCCL over `/dev/shm` files, and over sockets | works |
//! | nothing: the process groups have been destroyed | works |
//!
//! Imported cuMem memory shows nowhere in `/proc`. What shows:
//!
//! * NCCL from 2.17 on has one abstract socket `@tmp/nccl-socket-RANK-HASH` for each rank while a communicator is up.
//!   The socket does not reveal the transport; the environment at the process's start does.
//! * NCCL's files in `/dev/shm`.
//! * An importer by CUDA IPC has `/dev/shm/cuda.shm.UID.PID.N` of the exporter mapped, PID in hexadecimal.
//!
//! Pure functions over the host's files. A process that exits meanwhile counts as one that shares nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::str::FromStr;

use serde::Deserialize;

use crate::gpus::nvidia;
use crate::preflight::refusal::Refusal;
use crate::preload::Library;
use crate::preload::nccl::Group;
use cryopod_host::cgroups;
use cryopod_host::files::Host;
use cryopod_host::processes::{Process, Scan};
use cryopod_host::spec::Spec;

/// The container's annotation; it overrides the configuration's `nvidia.sharing`.
pub const ANNOTATION: &str = "dev.cryopod.gpu.sharing";
/// The first driver that can restore CUDA IPC, for jobs that `cuda-checkpoint --launch-job` started.
const FIRST_IPC_DRIVER: u32 = 610;
/// Bytes read of a namespace's list of unix sockets: about 600,000 sockets.
const MAX_SOCKETS: u64 = 64 << 20;
const MAX_NAMED: usize = 8;

/// What happens to a container whose processes share GPU memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    #[default]
    Refuse,
    /// A warning is logged: the user declares that nothing is shared at that time.
    Allow,
}

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.trim() {
            "refuse" => Ok(Self::Refuse),
            "allow" => Ok(Self::Allow),
            other => Err(format!("{other:?} is not one of refuse, allow")),
        }
    }
}

impl Policy {
    /// Returns the annotation's policy, else the configured one. An error names the annotation's bad value.
    pub fn of(spec: &Spec, configured: Self) -> Result<Self, String> {
        match spec.annotation(ANNOTATION) {
            Some(text) => text
                .parse()
                .map_err(|e| format!("annotation {ANNOTATION}: {e}")),
            None => Ok(configured),
        }
    }

    /// Returns the findings that refuse; logs those that are allowed.
    pub fn settle(self, found: Vec<Refusal>) -> Vec<Refusal> {
        if self == Self::Refuse {
            return found;
        }
        for refusal in &found {
            tracing::warn!(
                "{}. {ANNOTATION}=allow lets it pass: if that memory is still shared, the checkpoint cannot be restored, and the job is lost",
                refusal.cause()
            );
        }
        Vec::new()
    }
}

/// Looks for shared GPU memory among the CUDA processes `pids` of the container with the processes `scan`.
pub fn preflight(host: &Host, scan: &Scan, pids: &[i32]) -> Vec<Refusal> {
    let processes = scan.processes.iter().filter(|p| pids.contains(&p.pid));
    let processes: Vec<&Process> = processes.collect();
    let found = nccl(host, &processes).into_iter();
    found.chain(by_ipc(host, &processes)).collect()
}

/// The same for what a checkpoint can do about it: NCCL's communicators that the preload library takes down do not count.
pub fn plan(host: &Host, scan: &Scan, pids: &[i32]) -> Vec<Refusal> {
    let processes = scan.processes.iter().filter(|p| pids.contains(&p.pid));
    let processes: Vec<&Process> = processes.collect();
    let found = match nccl(host, &processes) {
        Some(found) => unmovable(host, found, pids),
        None => outside(host, pids),
    };
    found.into_iter().chain(by_ipc(host, &processes)).collect()
}

/// Communicators with ranks outside of the container, which only the preload library knows of.
fn outside(host: &Host, pids: &[i32]) -> Option<Refusal> {
    if !pids.iter().any(|pid| Library::is_in(*pid)) {
        return None;
    }
    let (pid, what) = group(host, pids).ok()?.outside().into_iter().next()?;
    let refusal = Refusal::new(
        format!("it uses NCCL, and {what}: its other ranks would not come back with it"),
        format!(
            "destroy the process groups before the checkpoint and make them again afterwards; {ANNOTATION}=allow overrides this"
        ),
    );
    Some(refusal.about(pid, &crate::procfs::comm(pid)))
}

/// Asks the processes that have the library, none of which answers while its container is paused.
fn group(host: &Host, pids: &[i32]) -> Result<Group, String> {
    if pids.iter().any(|pid| cgroups::is_frozen(host, *pid)) {
        return Err("the container is paused".into());
    }
    Group::settled(pids)
}

/// What is left of a finding about NCCL, as the preload library tells.
fn unmovable(host: &Host, mut found: Refusal, pids: &[i32]) -> Option<Refusal> {
    if !pids.iter().any(|pid| Library::is_in(*pid)) {
        found.remedy = format!(
            "create the container with the annotation dev.cryopod.preload=on, with which checkpoints take NCCL's communicators down; or {}",
            found.remedy
        );
        return Some(found);
    }
    let group = match group(host, pids) {
        Ok(group) => group,
        Err(error) => {
            found.what = format!("{}; {error}", found.what);
            return Some(found);
        }
    };
    if let Some((pid, why)) = group.obstacles().into_iter().next() {
        found = found.about(pid, &crate::procfs::comm(pid));
        found.what = format!(
            "it shares GPU memory through NCCL, and its communicators cannot be taken down for a checkpoint: {why}"
        );
        return Some(found);
    }
    if !group.has_comms() {
        found.what = format!(
            "{}; the preload library does not know of its communicators (an NCCL that is linked statically?)",
            found.what
        );
        return Some(found);
    }
    None
}

/// Finds memory of other processes by CUDA IPC.
fn by_ipc(host: &Host, processes: &[&Process]) -> Vec<Refusal> {
    let mut found = Vec::new();
    let branch = nvidia::driver_version(host)
        .as_deref()
        .and_then(nvidia::branch);
    for importer in importers(processes) {
        if branch.is_some_and(|b| b >= FIRST_IPC_DRIVER) {
            tracing::warn!(
                "{}; driver {FIRST_IPC_DRIVER} and newer can restore this for jobs started by `cuda-checkpoint --launch-job` only",
                importer.cause()
            );
        } else {
            found.push(importer);
        }
    }
    found
}

/// Returns the processes with a CUDA context. `/dev/nvidia-uvm` is mapped in each, and the driver keeps that mapping
/// from forked children, which inherit descriptors and every other mapping. If none has it, all count.
fn with_context<'a>(processes: &[&'a Process]) -> Vec<&'a Process> {
    let has = |p: &&&Process| p.mapped.contains("/dev/nvidia-uvm");
    match processes.iter().any(|p| has(&p)) {
        true => processes.iter().filter(has).copied().collect(),
        false => processes.to_vec(),
    }
}

fn files(process: &Process) -> impl Iterator<Item = &str> {
    let open = process.fds.iter().map(|fd| fd.target.as_str());
    open.chain(process.mapped.iter().map(String::as_str))
        .map(|name| name.strip_suffix(" (deleted)").unwrap_or(name))
}

fn in_shm(path: &str) -> Option<&str> {
    let (directory, name) = path.rsplit_once('/')?;
    directory.ends_with("/shm").then_some(name)
}

fn named(processes: &[&Process]) -> String {
    let name = |p: &&Process| format!("process {} ({})", p.pid, p.comm);
    let mut all: Vec<String> = processes.iter().take(MAX_NAMED).map(name).collect();
    if let Some(more @ 1..) = processes.len().checked_sub(MAX_NAMED) {
        all.push(format!("{more} more"));
    }
    all.join(", ")
}

// ---- NCCL ----

/// Finds NCCL between several of the processes, unless each of them is known to use a transport that can be restored.
fn nccl(host: &Host, processes: &[&Process]) -> Option<Refusal> {
    let sockets = Sockets::of(host, processes);
    let mut group: BTreeMap<i32, &Process> = BTreeMap::new();
    for process in processes {
        let shares = processes
            .iter()
            .any(|other| other.pid != process.pid && sockets.may_be_of_one(process.pid, other.pid));
        if shares {
            group.insert(process.pid, process);
        }
    }
    for process in with_common_files(processes) {
        group.insert(process.pid, process);
    }
    let unsafe_ways: BTreeSet<&str> = group
        .keys()
        .filter_map(|pid| Environment::of(host, *pid).unsafe_way())
        .collect();
    let group: Vec<&Process> = group.into_values().collect();
    let (first, others) = match group.split_first() {
        Some(parts) if !unsafe_ways.is_empty() => parts,
        _ if sockets.cut => return processes.first().map(|p| too_many_sockets(p)),
        _ => return None,
    };
    let ways: Vec<&str> = unsafe_ways.into_iter().collect();
    Some(Refusal::of(
        first,
        format!(
            "it shares GPU memory through NCCL with {}; the transport, as far as their environment tells, is {}: the driver would checkpoint this and fail to restore it",
            named(others),
            ways.join(" or "),
        ),
        format!(
            "destroy the process groups before the checkpoint and make them again afterwards (torch.distributed.destroy_process_group), or start the container with {} (NCCL over /dev/shm) or with the annotation dev.cryopod.env.avoid=nccl (NCCL over sockets); variables that a program sets itself cannot be seen. {ANNOTATION}=allow overrides this for a job that shares nothing now",
            SAFE[0]
                .map(|(name, value)| format!("{name}={value}"))
                .join(" "),
        ),
    ))
}

fn too_many_sockets(process: &Process) -> Refusal {
    Refusal::of(
        process,
        format!(
            "its network namespace has more unix sockets than are looked at ({} MiB of /proc/net/unix), so whether NCCL shares GPU memory is not known",
            MAX_SOCKETS >> 20
        ),
        format!(
            "give the container a network namespace of its own, or set the annotation {ANNOTATION}=allow if its processes share no GPU memory"
        ),
    )
}

/// Sets of variables with which NCCL uses restorable memory, as measured: files in `/dev/shm`, and sockets. From 2.28
/// on NCCL uses NVLS between two GPUs already, and `NCCL_P2P_DISABLE` leaves that on.
pub const SAFE: [[(&str, &str); 3]; 2] = [
    [
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_CUMEM_HOST_ENABLE", "0"),
        ("NCCL_NVLS_ENABLE", "0"),
    ],
    [
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_SHM_DISABLE", "1"),
        ("NCCL_NVLS_ENABLE", "0"),
    ],
];

/// The environment with which a process was started; later changes do not show.
struct Environment(Vec<(String, String)>);

impl Environment {
    fn of(host: &Host, pid: i32) -> Self {
        let text = host
            .text(format!("/proc/{pid}/environ"))
            .unwrap_or_default();
        let entries = text.split('\0').filter_map(|entry| entry.split_once('='));
        Self(
            entries
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .collect(),
        )
    }

    /// If a variable is set twice, the first counts, as for `getenv`.
    fn is(&self, name: &str, value: &str) -> bool {
        let found = self.0.iter().find(|(other, _)| other == name);
        found.is_some_and(|(_, text)| text.trim() == value)
    }

    /// Returns NCCL's transport, unless it is known to be restorable.
    fn unsafe_way(&self) -> Option<&'static str> {
        // Such a plugin answers in place of the environment.
        let plugin = self.0.iter().any(|(name, _)| name == "NCCL_ENV_PLUGIN");
        let holds = |set: &[(&str, &str); 3]| set.iter().all(|(n, v)| self.is(n, v));
        if !plugin && SAFE.iter().any(holds) {
            return None;
        }
        Some(if !self.is("NCCL_P2P_DISABLE", "1") {
            match self.is("NCCL_CUMEM_ENABLE", "0") {
                true => "P2P/IPC",
                false => "P2P/CUMEM",
            }
        } else if self.is("NCCL_CUMEM_HOST_ENABLE", "0") || self.is("NCCL_SHM_DISABLE", "1") {
            match plugin {
                true => "what NCCL_ENV_PLUGIN chooses",
                false => "NVLS (NCCL_NVLS_ENABLE=0 is missing)",
            }
        } else {
            "SHM in cuMem host memory"
        })
    }
}

/// The ranks of existing communicators.
#[derive(Debug, Default)]
struct Sockets {
    /// By process.
    ranks: HashMap<i32, BTreeSet<u32>>,
    /// A list was longer than the part that was read.
    cut: bool,
}

impl Sockets {
    /// Reads the lists of the processes' network namespaces. Only sockets that the processes hold count: a namespace
    /// can be shared with other containers.
    fn of(host: &Host, processes: &[&Process]) -> Self {
        let mut owners: HashMap<u64, i32> = HashMap::new();
        let mut namespaces: BTreeMap<_, Vec<i32>> = BTreeMap::new();
        for process in processes {
            let mut any = false;
            for fd in &process.fds {
                let inode = fd.target.strip_prefix("socket:[");
                if let Some(inode) = inode.and_then(|i| i.strip_suffix(']')?.parse().ok()) {
                    any = true;
                    // A forked child inherits it, and comes after its parent.
                    owners.entry(inode).or_insert(process.pid);
                }
            }
            let namespace = fs::read_link(host.path(format!("/proc/{}/ns/net", process.pid)));
            if let (true, Ok(namespace)) = (any, namespace) {
                namespaces.entry(namespace).or_default().push(process.pid);
            }
        }
        let mut sockets = Self::default();
        // A single process shares with nobody.
        if owners.values().collect::<BTreeSet<_>>().len() < 2 {
            return sockets;
        }
        for pids in namespaces.values() {
            let open = |pid: &i32| File::open(host.path(format!("/proc/{pid}/net/unix"))).ok();
            if let Some(list) = pids.iter().find_map(open) {
                sockets.add(list, &owners);
            }
        }
        sockets
    }

    fn add(&mut self, list: File, owners: &HashMap<u64, i32>) {
        let mut reader = BufReader::with_capacity(64 << 10, list.take(MAX_SOCKETS));
        let mut line = Vec::new();
        loop {
            line.clear();
            if !matches!(reader.read_until(b'\n', &mut line), Ok(n) if n > 0) {
                break;
            }
            let Some((inode, rank)) = std::str::from_utf8(&line).ok().and_then(rank_of) else {
                continue;
            };
            if let Some(pid) = owners.get(&inode) {
                self.ranks.entry(*pid).or_default().insert(rank);
            }
        }
        self.cut |= reader.into_inner().limit() == 0;
    }

    /// Two processes of one communicator have different ranks in it. So single-rank communicators of several jobs, all
    /// of rank 0, share nothing.
    fn may_be_of_one(&self, pid: i32, other: i32) -> bool {
        let (Some(a), Some(b)) = (self.ranks.get(&pid), self.ranks.get(&other)) else {
            return false;
        };
        a.len() > 1 || b.len() > 1 || a != b
    }
}

/// Parses inode and rank from a line of `/proc/net/unix` for a socket `@tmp/nccl-socket-RANK-HASH`.
fn rank_of(line: &str) -> Option<(u64, u32)> {
    let mut words = line.split_ascii_whitespace().skip(6);
    let (inode, name) = (words.next()?, words.next()?);
    let (rank, _) = name.strip_prefix("@tmp/nccl-socket-")?.split_once('-')?;
    Some((inode.parse().ok()?, rank.parse().ok()?))
}

/// Returns the processes that share one of NCCL's files in `/dev/shm` with another: the only visible trace of an NCCL
/// before 2.17.
fn with_common_files<'a>(processes: &[&'a Process]) -> Vec<&'a Process> {
    let processes = with_context(processes);
    let own = |p: &'a Process| -> BTreeSet<&'a str> {
        files(p)
            .filter(|path| in_shm(path).is_some_and(|name| name.starts_with("nccl-")))
            .collect()
    };
    let mut users: HashMap<&str, usize> = HashMap::new();
    for name in processes.iter().flat_map(|p| own(p)) {
        *users.entry(name).or_default() += 1;
    }
    let common = |p: &&Process| files(p).any(|name| users.get(name).is_some_and(|n| *n > 1));
    processes.iter().filter(|p| common(p)).copied().collect()
}

// ---- CUDA IPC ----

/// Returns the processes that have memory of another process mapped by CUDA IPC.
fn importers(processes: &[&Process]) -> Vec<Refusal> {
    let mut found = Vec::new();
    for process in with_context(processes) {
        let exporters: BTreeSet<i32> = files(process)
            .filter_map(exporter_of)
            .filter(|pid| *pid != process.ns_pid)
            .collect();
        if exporters.is_empty() {
            continue;
        }
        let known = processes.iter().filter(|p| exporters.contains(&p.ns_pid));
        let known: Vec<&Process> = known.copied().collect();
        let whose = match known.is_empty() {
            true => "a process outside of the container".to_owned(),
            false => named(&known),
        };
        found.push(Refusal::of(
            process,
            format!(
                "it uses GPU memory of {whose} by CUDA IPC: the driver would checkpoint it and fail to restore it"
            ),
            format!(
                "drop what it got from other processes before the checkpoint (tensors passed by torch.multiprocessing, handles opened by cudaIpcOpenMemHandle), or pass it through host memory; {ANNOTATION}=allow overrides this for a job that shares nothing now"
            ),
        ));
    }
    found
}

/// The process, as its PID namespace numbers it, that made a file `cuda.shm.UID.PID.N`.
fn exporter_of(path: &str) -> Option<i32> {
    let pid = in_shm(path)?.strip_prefix("cuda.shm.")?.split('.').nth(1)?;
    i32::from_str_radix(pid, 16).ok()
}

#[cfg(test)]
#[path = "sharing_tests.rs"]
mod tests;
