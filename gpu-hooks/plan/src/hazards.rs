//! Detects what CRIU cannot dump, before anything is frozen: in the descriptors, mappings and tracers of the
//! container's processes, and in its spec.
//!
//! CRIU finds these after the GPUs have been checkpointed, when the container has been stopped for long. A finding here
//! is certain enough to refuse; everything else is left to CRIU. The container is not trusted: its files are never
//! opened, only looked at. docs/failures.md lists CRIU's errors, and which of them are predicted.

mod descriptors;
mod file_systems;
mod files;
#[cfg(test)]
mod fixtures;
pub mod limits;
mod namespaces;
mod sockets;
mod tasks;
mod watches;

pub use files::linked_elsewhere;
pub use namespaces::unrestorable;

use std::collections::{HashMap, HashSet};

use cryopod_archive::container::surroundings::ForeignMount;

use crate::refusal::Refusal;
use cryopod_cuda::preload::Library;
use cryopod_host::files::Host;
use cryopod_host::mountinfo;
use cryopod_host::processes::{Fd, Process, Scan};
use cryopod_host::spec::Spec;

/// Majors of terminals: consoles, `/dev/tty`, the slaves of pseudo terminals.
const TERMINALS: [u64; 10] = [4, 5, 136, 137, 138, 139, 140, 141, 142, 143];

/// At most so many reasons are reported in one refusal; there may be one for each of many processes.
const MAX_TOLD: usize = 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Connection {
    pub process: (i32, String),
    /// Both ends, `10.0.0.2:8000 - 10.0.0.9:40000`.
    pub ends: String,
    /// Both ends are loopback addresses, which every network namespace has.
    pub loopback: bool,
}

/// Things that CRIU cannot dump: prefix of a descriptor's or mapping's target, description, remedy.
const UNDUMPABLE: [(&str, &str, &str); 15] = [
    (
        "anon_inode:[io_uring]",
        "has an io_uring",
        "start the container with the annotation dev.cryopod.env.avoid=io_uring, or with a seccomp profile that forbids io_uring, as the engines' own do (UV_USE_IO_URING=0 alone is enough for libuv before 1.49 only)",
    ),
    (
        "/dev/gdrdrv",
        "uses GDRCopy (/dev/gdrdrv)",
        "start the container without /dev/gdrdrv, or with the annotation dev.cryopod.env.avoid=gdrcopy",
    ),
    (
        "/dev/infiniband/",
        "uses RDMA verbs (/dev/infiniband)",
        "start the container without /dev/infiniband, or with NCCL_IB_DISABLE=1 (the annotation dev.cryopod.env.avoid=rdma)",
    ),
    (
        "anon_inode:[infinibandevent]",
        "uses RDMA verbs",
        "start the container with NCCL_IB_DISABLE=1 (the annotation dev.cryopod.env.avoid=rdma)",
    ),
    (
        "/dev/nvidia-fs",
        "uses GPUDirect Storage (/dev/nvidia-fs)",
        "start the container without /dev/nvidia-fs: cuFile then uses ordinary reads",
    ),
    (
        "anon_inode:seccomp notify",
        "is a seccomp supervisor (it has a user-notify listener)",
        "start the container without that supervisor: CRIU cannot dump the listener",
    ),
    (
        "anon_inode:[perf_event]",
        "has a performance counter open (perf_event)",
        "stop profiling before the checkpoint",
    ),
    (
        "anon_inode:bpf-prog",
        "has a BPF program loaded",
        "close it before the checkpoint",
    ),
    (
        "anon_inode:[userfaultfd]",
        "has a userfaultfd",
        "close it before the checkpoint: CRIU cannot dump it",
    ),
    (
        "anon_inode:kvm-",
        "runs a virtual machine (KVM)",
        "stop the virtual machine before the checkpoint",
    ),
    (
        "/dev/kvm",
        "runs a virtual machine (KVM)",
        "stop the virtual machine before the checkpoint",
    ),
    (
        "/dev/fuse",
        "serves a FUSE file system",
        "mount it on the host, and into the container from there",
    ),
    (
        "/dev/vfio/",
        "drives a device itself (VFIO)",
        "start the container without that device",
    ),
    (
        "/secretmem (deleted)",
        "has secret memory (memfd_secret)",
        "start it without: nobody else can read that memory, CRIU neither",
    ),
    (
        "/dev/uinput",
        "makes an input device (/dev/uinput)",
        "close it before the checkpoint",
    ),
];

/// CRIU's options and version, which decide whether it can dump something.
#[derive(Debug, Clone)]
pub struct CriuLimits {
    /// `ghost-limit`, in bytes.
    pub ghost_limit: u64,
    /// `irmap-scan-path`.
    pub searched: Vec<String>,
    /// CRIU leaves out the container's network namespace (`--empty-ns`).
    pub own_network: bool,
    /// CRIU's version; empty if it is unknown.
    pub version: Vec<u32>,
}

impl Default for CriuLimits {
    fn default() -> Self {
        Self {
            ghost_limit: 1 << 20,
            searched: Vec::new(),
            own_network: false,
            version: Vec::new(),
        }
    }
}

/// Returns mounts of the container with init process `init` that CRIU cannot make anew. `foreign`: mounts that it
/// leaves out.
pub fn file_systems(host: &Host, spec: &Spec, init: i32, foreign: &[ForeignMount]) -> Vec<Refusal> {
    file_systems::refusals(&mountinfo::of(host, &init.to_string()), spec, foreign)
}

/// Returns everything that CRIU cannot dump, a line each.
pub fn refusals(scan: &Scan, host: &Host, spec: &Spec, limits: &CriuLimits) -> Vec<Refusal> {
    let of_spec = [spec_hazards(spec), namespaces::shared_user_namespace(spec)];
    let mut refusals: Vec<Refusal> = of_spec.into_iter().flatten().collect();
    let mounts = mount_ids(scan, host);
    for process in &scan.processes {
        let mut add = |what: String, remedy: String| {
            refusals.push(Refusal::of(process, what, remedy));
        };
        for (what, remedy) in undumpable(process) {
            add(what.to_owned(), remedy.to_owned());
        }
        for fd in queues(process, host) {
            add(
                format!(
                    "has a POSIX message queue open (descriptor {}: {})",
                    fd.number, fd.target
                ),
                "close it before the checkpoint: CRIU saves System V's message queues only".into(),
            );
        }
        if process.tracer > 0 {
            let name = host.line(format!("/proc/{}/comm", process.tracer));
            add(
                format!(
                    "is traced by process {} ({})",
                    process.tracer,
                    name.unwrap_or_default()
                ),
                "detach the debugger or tracer: a process has one tracer, and CRIU must be it"
                    .into(),
            );
        }
        for (fd, target) in outside(process, &mounts) {
            if is_queue(host, process.pid, &fd) || Library::has_spare(process.pid, &fd) {
                continue;
            }
            add(
                format!("has a file outside the container open (descriptor {fd}: {target})"),
                "start the container with its input and output in pipes or a log of the engine, not a file or terminal of the host".into(),
            );
        }
    }
    refusals.extend(namespaces::namespaces(scan, limits.own_network));
    refusals.extend(tasks::tasks(scan, host));
    refusals.extend(limits::limits(scan, host));
    refusals.extend(sockets::protocols(scan));
    refusals.extend(descriptors::descriptors(scan, host));
    refusals.extend(sockets::outside_connections(scan, host));
    refusals.extend(watches::watches(
        scan,
        host,
        &limits.searched,
        &limits.version,
    ));
    refusals.extend(files::deleted_files(scan, host, limits.ghost_limit));
    refusals.extend(files::covered_files(scan, host));
    let more = refusals.len().saturating_sub(MAX_TOLD);
    if more > 0 {
        refusals.truncate(MAX_TOLD);
        refusals.push(Refusal::new(
            format!("and {more} more reasons of this kind"),
            "see to those first",
        ));
    }
    refusals
}

/// The mounts of all the processes' mount namespaces: a process that has made itself one keeps the files that it has
/// open in the container's.
fn mount_ids(scan: &Scan, host: &Host) -> HashSet<u64> {
    let mut seen = HashSet::new();
    let mut mounts = HashSet::new();
    for process in &scan.processes {
        if process
            .mount_namespace
            .as_ref()
            .is_some_and(|n| seen.insert(n))
        {
            let its = mountinfo::of(host, &process.pid.to_string());
            mounts.extend(its.into_iter().map(|m| m.id));
        }
    }
    mounts
}

/// Marks the mounts with a file that a process has open or mapped.
pub fn mark_used(scan: &Scan, mounts: &mut [ForeignMount]) {
    for mount in mounts {
        let below = |target: &String| {
            let target = target.strip_suffix(" (deleted)").unwrap_or(target);
            target
                .strip_prefix(mount.path.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        mount.in_use = scan
            .processes
            .iter()
            .any(|p| p.mapped.iter().any(below) || p.fds.iter().any(|f| below(&f.target)));
    }
}

/// Detects IPv4 and IPv6 sockets in the network namespace of `init`. CRIU before 4.2 cannot dump any on Linux 6.16 and
/// newer, which answers its question for `SO_PASSCRED` with an error (seen with 4.1.1 on 6.18).
pub fn undumpable_sockets(
    scan: &Scan,
    host: &Host,
    init: i32,
    criu: &[u32],
    kernel: &[u32],
) -> Option<Refusal> {
    if criu.is_empty() || criu >= [4, 2].as_slice() || kernel < [6, 16].as_slice() {
        return None;
    }
    // The kernel's tables take long to read.
    if !scan.processes.iter().any(has_socket) {
        return None;
    }
    let mut inodes = HashSet::new();
    for table in ["tcp", "tcp6", "udp", "udp6", "udplite", "udplite6"] {
        let text = host.text(format!("/proc/{init}/net/{table}"));
        for line in text.unwrap_or_default().lines().skip(1) {
            inodes.extend(line.split_whitespace().nth(9).map(str::to_owned));
        }
    }
    let inside = |f: &Fd| {
        if f.protocol
            .as_deref()
            .is_some_and(|p| sockets::RAW.contains(&p))
        {
            return true;
        }
        let inode = f.target.strip_prefix("socket:[");
        inode.is_some_and(|i| inodes.contains(i.trim_end_matches(']')))
    };
    let process = scan.processes.iter().find(|p| p.fds.iter().any(inside))?;
    let dotted = |n: &[u32]| n.iter().map(u32::to_string).collect::<Vec<_>>().join(".");
    Some(Refusal::of(
        process,
        format!(
            "has a network socket, and CRIU {} cannot dump one on Linux {}",
            dotted(criu),
            dotted(kernel)
        ),
        "install CRIU 4.2 or newer",
    ))
}

/// Returns the container's established TCP connections, as the network namespace of `init` shows them.
pub fn connections(scan: &Scan, host: &Host, init: i32) -> Vec<Connection> {
    let mut owners: HashMap<&str, &Process> = HashMap::new();
    for process in &scan.processes {
        for fd in &process.fds {
            if let Some(inode) = fd.target.strip_prefix("socket:[") {
                owners.insert(inode.trim_end_matches(']'), process);
            }
        }
    }
    if owners.is_empty() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for table in ["tcp", "tcp6"] {
        let text = host.text(format!("/proc/{init}/net/{table}"));
        for line in text.unwrap_or_default().lines().skip(1) {
            let mut words = line.split_whitespace().skip(1);
            let (Some(local), Some(remote), Some(state)) =
                (words.next(), words.next(), words.next())
            else {
                continue;
            };
            // CRIU's definition of connected: neither closed (07) nor listening (0A).
            if matches!(state, "07" | "0A") {
                continue;
            }
            let Some(owner) = words.nth(5).and_then(|inode| owners.get(inode)) else {
                continue;
            };
            let (local, remote) = (end(local), end(remote));
            found.push(Connection {
                process: (owner.pid, owner.comm.clone()),
                ends: format!("{} - {}", local.0, remote.0),
                loopback: local.1 && remote.1,
            });
        }
    }
    found
}

/// A seccomp profile whose decisions a process outside makes: after a restore nobody would.
fn spec_hazards(spec: &Spec) -> Option<Refusal> {
    let path = spec
        .json()
        .pointer("/linux/seccomp/listenerPath")?
        .as_str()?;
    Some(Refusal::new(
        format!("the container's seccomp profile has a listener outside of it ({path})"),
        "start the container with a seccomp profile without listener",
    ))
}

/// Formats an address of `/proc/net/tcp`; also returns whether it is loopback.
fn end(text: &str) -> (String, bool) {
    let (address, port) = text.split_once(':').unwrap_or((text, "0"));
    let port = u16::from_str_radix(port, 16).unwrap_or(0);
    // Words of four bytes, each in the machine's byte order.
    let bytes: Vec<u8> = (0..address.len() / 8)
        .filter_map(|i| u32::from_str_radix(address.get(i * 8..i * 8 + 8)?, 16).ok())
        .flat_map(u32::to_ne_bytes)
        .collect();
    let ip: Option<std::net::IpAddr> = match bytes.len() {
        4 => <[u8; 4]>::try_from(bytes).ok().map(Into::into),
        16 => <[u8; 16]>::try_from(bytes)
            .ok()
            .map(|b| std::net::Ipv6Addr::from(b).to_canonical()),
        _ => None,
    };
    match ip {
        Some(ip) => (
            std::net::SocketAddr::new(ip, port).to_string(),
            ip.is_loopback(),
        ),
        None => (text.to_owned(), false),
    }
}

fn has_socket(process: &Process) -> bool {
    let mut targets = process.fds.iter().map(|f| &f.target);
    targets.any(|t| t.starts_with("socket:["))
}

/// Returns what CRIU cannot dump, each kind once.
fn undumpable(process: &Process) -> impl Iterator<Item = (&'static str, &'static str)> {
    let mut seen = HashSet::new();
    UNDUMPABLE
        .iter()
        .filter(|(start, ..)| {
            let hit = |t: &String| t.starts_with(start);
            process.fds.iter().any(|f| hit(&f.target)) || process.mapped.iter().any(hit)
        })
        .map(|(_, what, remedy)| (*what, *remedy))
        .filter(move |(what, _)| seen.insert(*what))
}

/// The descriptors of POSIX message queues. Their names are those of files, in a file system that each IPC namespace has.
fn queues<'a>(process: &'a Process, host: &'a Host) -> impl Iterator<Item = &'a Fd> {
    let is_empty = |fd: &&Fd| {
        fd.file
            .is_some_and(|f| f.kind == libc::S_IFREG && f.bytes == 0)
    };
    let empty = process.fds.iter().filter(is_empty);
    empty.filter(|fd| is_queue(host, process.pid, &fd.number))
}

fn is_queue(host: &Host, pid: i32, number: &str) -> bool {
    /// `MQUEUE_MAGIC`, linux/magic.h.
    const MAGIC: u32 = 0x1980_0202;
    let fs = nix::sys::statfs::statfs(&host.path(format!("/proc/{pid}/fd/{number}")));
    fs.is_ok_and(|fs| u32::try_from(fs.filesystem_type().0).is_ok_and(|magic| magic == MAGIC))
}

/// Returns files, directories, named pipes and terminals whose mount is not in `mounts`, the container's: number and
/// name.
fn outside(process: &Process, mounts: &HashSet<u64>) -> Vec<(String, String)> {
    let mut found = Vec::new();
    // Other devices from outside are handled by a plugin.
    for (fd, id) in process.fds.iter().filter_map(|f| Some((f, f.mount?))) {
        if mounts.is_empty() || mounts.contains(&id) {
            continue;
        }
        let kind = fd.file.map(|f| f.kind);
        let terminal = fd
            .device
            .is_some_and(|(major, _)| TERMINALS.contains(&major));
        let file = matches!(kind, Some(libc::S_IFREG | libc::S_IFDIR | libc::S_IFIFO));
        if file || terminal {
            tracing::debug!("descriptor {} of {}: mount {id}", fd.number, process.pid);
            found.push((fd.number.clone(), fd.target.clone()));
        }
    }
    found
}

#[cfg(test)]
#[path = "hazards_tests.rs"]
mod tests;
