//! Examines the container's processes once: what each has open and mapped, who traces it, how much memory it has.
//!
//! A checkpoint's plan reads `/proc` for every process, perhaps hundreds with thousands of descriptors. So everything
//! that the plan needs of a process is read together, by several threads. The container is not trusted: its files are
//! never opened, only looked at.

pub mod id_map;
pub mod maps;
pub mod signals;
pub mod stat;
pub mod thread_settings;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::num::NonZero;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{AtFlags, CWD, StatxFlags};

use self::maps::Mapping;
use self::stat::StatusFile;
use crate::files::{Host, split_rdev};

const MAX_PER_PROCESS: usize = 1 << 16;
/// Threads that read; more would wait for the same locks of the kernel.
const MAX_THREADS: usize = 8;
/// Processes that justify one more thread.
const PER_THREAD: usize = 16;

/// Namespaces of a process, as `/proc/PID/ns` names them. CRIU looks at the time namespace that children get.
const NAMESPACES: [&str; 8] = [
    "pid",
    "user",
    "ipc",
    "uts",
    "net",
    "mnt",
    "cgroup",
    "time_for_children",
];

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Fd {
    /// The number, as `/proc/PID/fd` lists it.
    pub number: String,
    pub target: String,
    /// The device number, for a character device in a file system.
    pub device: Option<(u64, u64)>,
    /// The mount, if it is in a file system.
    pub mount: Option<u64>,
    /// What the file is, if it is in a file system.
    pub file: Option<FileFacts>,
    /// The protocol's name, if it is a socket: `TCP`, `UNIX-STREAM`, `MPTCP`.
    pub protocol: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileFacts {
    /// `S_IFREG` and its like.
    pub kind: u32,
    /// Number of the file's names.
    pub links: u64,
    /// Disk space, in bytes.
    pub bytes: u64,
    /// Major and minor of the file system.
    pub device: (u64, u64),
    pub inode: u64,
}

#[derive(Debug, Clone, Default)]
pub struct Process {
    pub pid: i32,
    pub ns_pid: i32,
    /// Its name, as it chose it: not fit to be printed as it is.
    pub comm: String,
    pub fds: Vec<Fd>,
    pub mapped: HashSet<String>,
    /// The tracer's pid; 0 for nobody.
    pub tracer: i32,
    /// Its own memory: what CRIU writes.
    pub memory_bytes: u64,
    /// Target of `/proc/PID/ns/mnt`.
    pub mount_namespace: Option<PathBuf>,
    /// Targets of the links in `/proc/PID/ns`: `pid:[4026531836]`.
    pub namespaces: BTreeMap<&'static str, String>,
    /// `R`, `S`, `Z` ...
    pub state: char,
    pub threads: usize,
    /// Mappings of deleted files: the range, the file's name.
    pub deleted_maps: Vec<(String, String)>,
}

#[derive(Debug, Clone, Default)]
pub struct Scan {
    /// In the order of the given pids.
    pub processes: Vec<Process>,
}

impl Scan {
    /// Reads these processes, on several threads if there are many.
    pub fn of(host: &Host, pids: &[i32]) -> Self {
        let cores = thread::available_parallelism().map_or(1, NonZero::get);
        let threads = pids.len().div_ceil(PER_THREAD).min(cores).min(MAX_THREADS);
        let part = pids.len().div_ceil(threads.max(1)).max(1);
        let look = |pids: &[i32]| -> Vec<Process> {
            pids.iter().map(|pid| Process::read(host, *pid)).collect()
        };
        let mut parts = pids.chunks(part);
        let first = parts.next().unwrap_or_default();
        let processes = thread::scope(|scope| {
            let others: Vec<_> = parts
                .map(|part| (part, scope.spawn(|| look(part))))
                .collect();
            let mut all = look(first);
            for (part, other) in others {
                all.extend(other.join().unwrap_or_else(|_| look(part)));
            }
            all
        });
        Self { processes }
    }

    /// Returns the processes' ids, in this process's PID namespace.
    pub fn pids(&self) -> Vec<i32> {
        self.processes.iter().map(|p| p.pid).collect()
    }

    /// The processes' own memory, swapped or not, in bytes: about what CRIU writes. Shared memory counts for each.
    pub fn memory_bytes(&self) -> u64 {
        self.processes.iter().map(|p| p.memory_bytes).sum()
    }
}

impl Process {
    fn read(host: &Host, pid: i32) -> Self {
        let status = StatusFile::read(host, pid);
        let namespaces = NAMESPACES.iter().filter_map(|name| {
            let link = fs::read_link(host.path(format!("/proc/{pid}/ns/{name}"))).ok()?;
            Some((*name, link.to_string_lossy().into_owned()))
        });
        let (mapped, deleted_maps) = mapped(host, pid);
        let innermost = status
            .numbers("NSpid")
            .and_then(|pids| pids.last().copied());
        Self {
            pid,
            ns_pid: innermost.unwrap_or(pid),
            // From this file, as the name is there, too.
            comm: status
                .field("Name")
                .map(str::to_owned)
                .or_else(|| host.line(format!("/proc/{pid}/comm")))
                .unwrap_or_default(),
            fds: descriptors(host, pid),
            mapped,
            deleted_maps,
            namespaces: namespaces.collect(),
            state: status
                .field("State")
                .and_then(|s| s.chars().next())
                .unwrap_or('?'),
            threads: status.number("Threads").unwrap_or(1),
            tracer: status.number("TracerPid").unwrap_or(0),
            memory_bytes: ["RssAnon", "RssShmem", "VmSwap"]
                .into_iter()
                .filter_map(|name| status.number::<u64>(name))
                .sum::<u64>()
                .saturating_mul(1024),
            mount_namespace: fs::read_link(host.path(format!("/proc/{pid}/ns/mnt"))).ok(),
        }
    }
}

fn descriptors(host: &Host, pid: i32) -> Vec<Fd> {
    let entries = fs::read_dir(host.path(format!("/proc/{pid}/fd")));
    let entries = entries.into_iter().flatten().flatten();
    let fds = entries.take(MAX_PER_PROCESS).filter_map(|entry| {
        let number = entry.file_name().into_string().ok()?;
        let path = entry.path();
        let target = fs::read_link(&path).ok()?.to_string_lossy().into_owned();
        let mut fd = Fd {
            number,
            target,
            ..Fd::default()
        };
        let system = host.root() == Path::new("/");
        if in_a_file_system(&fd.target) {
            match system.then(|| statx(&path)).flatten() {
                Some(looked) => {
                    fd.device = looked.device;
                    fd.mount = Some(looked.mount);
                    fd.file = Some(looked.file);
                }
                None => {
                    (fd.device, fd.file) = stat(&path);
                    fd.mount = mount_of(host, pid, &fd.number);
                }
            }
        } else if system && fd.target.starts_with("socket:") {
            fd.protocol = protocol(&path);
        }
        Some(fd)
    });
    fds.collect()
}

/// Files without a mount of their own (memfd, System V shared memory, DMA buffers) have names like paths, too.
fn in_a_file_system(target: &str) -> bool {
    const NOT: [&str; 6] = [
        "/memfd:",
        "/dmabuf:",
        "/SYSV",
        "/anon_hugepage",
        "/dev/zero (deleted)",
        "/[",
    ];
    target.starts_with('/') && !NOT.iter().any(|start| target.starts_with(start))
}

struct Looked {
    device: Option<(u64, u64)>,
    mount: u64,
    file: FileFacts,
}

/// All in one call: a third of the time of two. `None` where the kernel does not report the mount (before 5.8).
fn statx(path: &Path) -> Option<Looked> {
    let mask = StatxFlags::BASIC_STATS | StatxFlags::MNT_ID;
    // Cached values: a network file system is not asked.
    let stat = rustix::fs::statx(CWD, path, AtFlags::STATX_DONT_SYNC, mask).ok()?;
    let kind = u32::from(stat.stx_mode) & libc::S_IFMT;
    let device = (stat.stx_rdev_major.into(), stat.stx_rdev_minor.into());
    (stat.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(Looked {
        device: (kind == libc::S_IFCHR).then_some(device),
        mount: stat.stx_mnt_id,
        file: FileFacts {
            kind,
            links: stat.stx_nlink.into(),
            bytes: stat.stx_blocks.saturating_mul(512),
            device: (stat.stx_dev_major.into(), stat.stx_dev_minor.into()),
            inode: stat.stx_ino,
        },
    })
}

/// The same without the mount. stat through the link reaches the open file itself, and opens nothing.
fn stat(path: &Path) -> (Option<(u64, u64)>, Option<FileFacts>) {
    let Ok(meta) = fs::metadata(path) else {
        return (None, None);
    };
    let kind = meta.mode() & libc::S_IFMT;
    let device = (kind == libc::S_IFCHR).then(|| split_rdev(meta.rdev()));
    let file = FileFacts {
        kind,
        links: meta.nlink(),
        bytes: meta.blocks().saturating_mul(512),
        device: split_rdev(meta.dev()),
        inode: meta.ino(),
    };
    (device, Some(file))
}

/// The name of a socket's protocol. Nothing else shows a socket's family from outside.
fn protocol(path: &Path) -> Option<String> {
    let mut name = [0u8; 32];
    let length = rustix::fs::getxattr(path, c"system.sockprotoname", &mut name).ok()?;
    let name = name.get(..length)?;
    let name = name.split(|b| *b == 0).next().unwrap_or(name);
    Some(String::from_utf8_lossy(name).into_owned())
}

fn mount_of(host: &Host, pid: i32, number: &str) -> Option<u64> {
    let info = host.text(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
    let id = info.lines().find_map(|l| l.strip_prefix("mnt_id:"))?;
    id.trim().parse().ok()
}

/// The files that a process has mapped, each once; and the mappings of deleted ones.
fn mapped(host: &Host, pid: i32) -> (HashSet<String>, Vec<(String, String)>) {
    let mut files = HashSet::new();
    let mut deleted = Vec::new();
    let _ = maps::for_each(host, pid, |Mapping { name, range, .. }| {
        let is_file = name.starts_with('/') || name.starts_with("anon_inode:");
        if is_file && !files.contains(name) && files.len() < MAX_PER_PROCESS {
            files.insert(name.to_owned());
            if name.ends_with(" (deleted)") && in_a_file_system(name) {
                deleted.push((range.to_owned(), name.to_owned()));
            }
        }
    });
    (files, deleted)
}

/// Refuses the namespace of this kind (`net`, `uts`) of a process if it is this program's too, the host's: what the spec of
/// a container gives its own namespace is not set there, whatever its images say.
pub fn ensure_other_namespace(pid: i32, kind: &str) -> std::io::Result<()> {
    let of = |process: &str| {
        use std::os::unix::fs::MetadataExt;
        let meta = std::fs::metadata(format!("/proc/{process}/ns/{kind}"))?;
        std::io::Result::Ok((meta.dev(), meta.ino()))
    };
    match of("self")? == of(&pid.to_string())? {
        true => Err(std::io::Error::other(format!(
            "the {kind} namespace of process {pid} is the host's"
        ))),
        false => Ok(()),
    }
}

/// Returns true if a process of this host has the name in its arguments.
pub fn named_by_a_process(name: &[u8]) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| fs::read(process.path().join("cmdline")).ok())
        .any(|line| line.windows(name.len()).any(|part| part == name))
}

/// Returns true if a process of this host has the file open, or one below the directory.
pub fn opened_by_a_process(path: &Path) -> bool {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .flat_map(|process| {
            fs::read_dir(process.path().join("fd"))
                .into_iter()
                .flatten()
        })
        .filter_map(|fd| fs::read_link(fd.ok()?.path()).ok())
        .any(|target| target.starts_with(&path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    #[test]
    fn one_call_tells_what_two_do() {
        let host = Host::system();
        let directory = tempfile::tempdir().unwrap();
        let file = File::create(directory.path().join("x")).unwrap();
        let null = File::open("/dev/null").unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let mut seen = (0, 0);
        // Other tests open and close files meanwhile.
        let own = [file.as_raw_fd(), null.as_raw_fd()].map(|n| n.to_string());
        let all = descriptors(&host, me).into_iter();
        for fd in all.filter(|fd| own.contains(&fd.number)) {
            if fd.target == "/dev/null" {
                assert_eq!(fd.device, Some((1, 3)));
                assert_eq!(fd.mount, mount_of(&host, me, &fd.number));
                seen.0 += 1;
            } else if Path::new(&fd.target) == directory.path().join("x") {
                assert_eq!(fd.mount, mount_of(&host, me, &fd.number));
                assert!(fd.mount.is_some());
                seen.1 += 1;
            }
        }
        assert_eq!(seen, (1, 1));
    }

    #[test]
    fn many_processes_in_the_order_given() {
        let dir = tempfile::tempdir().unwrap();
        let pids: Vec<i32> = (100..400).rev().collect();
        for pid in &pids {
            let of = dir.path().join(format!("proc/{pid}"));
            of.link("fd/3", "/dev/null");
            let text = format!(
                "Name:\tx\nNSpid:\t{pid}\t{}\nTracerPid:\t0\nRssAnon:\t 3 kB\nRssFile:\t 50 kB\nRssShmem:\t 1 kB\nVmSwap:\t 0 kB\n",
                pid - 99
            );
            of.put("status", text);
        }
        let scan = Scan::of(&Host::at(dir.path()), &pids);
        assert_eq!(scan.pids(), pids);
        assert_eq!(scan.memory_bytes(), 300 * 4096);
        assert!(scan.processes.iter().all(|p| p.ns_pid == p.pid - 99));
        assert!(
            scan.processes
                .iter()
                .all(|p| p.fds.len() == 1 && p.fds[0].device == Some((1, 3)))
        );
        assert!(Scan::of(&Host::at(dir.path()), &[]).pids().is_empty());
    }

    #[test]
    fn a_namespace_of_the_host_is_refused() {
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        assert!(ensure_other_namespace(own, "net").is_err());
        assert!(ensure_other_namespace(-1, "net").is_err());
    }
}
