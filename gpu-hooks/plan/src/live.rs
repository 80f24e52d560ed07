//! Examines what a running container really has, whatever its spec says.
//!
//! NVIDIA's hooks make device nodes that no spec names, so this looks into the container's own `/dev`. A process uses a
//! driver if it has the driver's files open or mapped. The container is not trusted: its `/dev` is resolved inside its
//! own root, and its files are never opened.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use cryopod_archive::metadata::GpuProcess;
use cryopod_host::nodes::{DeviceNode, NodeSource, Vendor};
use nix::fcntl::OFlag;

use cryopod_host::files::{Host, open_in_root, split_rdev};
use cryopod_host::nodes;
use cryopod_host::processes::Scan;
use cryopod_host::processes::stat::Stat;

const DIRECTORIES: [&str; 4] = [
    "dev",
    "dev/dri",
    "dev/nvidia-caps",
    "dev/nvidia-caps-imex-channels",
];
/// Entries of one such directory that are examined; a container can make as many as it likes.
const MAX_ENTRIES: usize = 4096;

/// The kernel's own memory devices (`/dev/null`, `/dev/zero`): a node of this major is no GPU, whatever its
/// name, and nearly every process has one open.
const MEM_MAJOR: u64 = 1;

/// The GPU nodes in the `/dev` of the container with the init process `init`.
pub fn nodes(host: &Host, init: i32) -> Vec<DeviceNode> {
    let mut found = Vec::new();
    let Ok(root) = File::open(host.path(format!("/proc/{init}/root"))) else {
        return found;
    };
    for directory in DIRECTORIES {
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let Ok(dir) = open_in_root(&root, Path::new(directory), flags) else {
            continue;
        };
        let Ok(entries) = fs::read_dir(format!("/proc/self/fd/{}", dir.as_raw_fd())) else {
            continue;
        };
        for entry in entries.take(MAX_ENTRIES).flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let path = format!("/{directory}/{name}");
            if nodes::classify(&path).is_none() {
                continue;
            }
            // DirEntry::metadata does not follow links.
            let Ok(meta) = entry.metadata() else { continue };
            if !meta.file_type().is_char_device() {
                continue;
            }
            let (major, minor) = split_rdev(meta.rdev());
            if let Some(kind) = nodes::identify(host, &path, major, minor) {
                found.push(DeviceNode {
                    source: NodeSource::Live,
                    file_mode: Some(meta.mode() & 0o7777),
                    uid: Some(meta.uid()),
                    gid: Some(meta.gid()),
                    allowed: false,
                    ..DeviceNode::new(path, kind, (major, minor))
                });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// `init` and all its descendants: the processes that CRIU will dump. Empty if `init` is gone.
pub fn tree(host: &Host, init: i32) -> Vec<i32> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    let mut seen_init = false;
    for pid in host
        .names("/proc")
        .iter()
        .filter_map(|n| n.parse::<i32>().ok())
    {
        let Some(stat) = Stat::read(host, pid) else {
            continue;
        };
        if pid == init {
            seen_init = !matches!(stat.state, 'Z' | 'X');
        }
        children.entry(stat.parent).or_default().push(pid);
    }
    if !seen_init {
        return Vec::new();
    }
    let mut found = vec![init];
    let mut next = 0;
    while let Some(pid) = found.get(next).copied() {
        next += 1;
        // A process can be re-parented while /proc is read: never take one twice.
        for child in children.remove(&pid).into_iter().flatten() {
            if !found.contains(&child) {
                found.push(child);
            }
        }
    }
    found
}

/// Drops the zombies. One that CRIU has restored shows CRIU's privileges, and runs no more.
pub fn retain_living(host: &Host, pids: &mut Vec<i32>) {
    pids.retain(|pid| is_alive(host, *pid));
}

/// Returns true if there is such a process, and it is no zombie, is not exiting and was not killed. On a busy machine a
/// killed process is there for a while as if nothing had happened.
pub fn is_alive(host: &Host, pid: i32) -> bool {
    Stat::read(host, pid).is_some_and(|stat| !stat.exiting && !stat.kill_pending)
}

/// When a process was started, in clock ticks since boot: with the pid, its identity.
pub fn start_time(host: &Host, pid: i32) -> Option<u64> {
    Stat::read(host, pid).map(|stat| stat.start_time)
}

/// Returns the processes that have a GPU driver open or mapped. `nodes` are the container's GPU nodes: an open file
/// counts by its device number, under whatever name.
pub fn users(scan: &Scan, nodes: &[DeviceNode]) -> Vec<GpuProcess> {
    let users = scan.processes.iter().filter_map(|process| {
        let names = process.fds.iter().map(|fd| fd.target.as_str());
        let names = names.chain(process.mapped.iter().map(String::as_str));
        let mut vendors: BTreeSet<Vendor> = names
            .filter(|name| name.starts_with('/'))
            .filter_map(|name| vendor_of_file(Path::new(name)))
            .collect();
        let devices = process.fds.iter().filter_map(|fd| fd.device);
        for device in devices.filter(|(major, _)| *major != MEM_MAJOR) {
            let same = nodes.iter().filter(|n| (n.major, n.minor) == device);
            vendors.extend(same.map(|n| n.vendor));
        }
        (!vendors.is_empty()).then(|| GpuProcess {
            pid: process.pid,
            ns_pid: process.ns_pid,
            comm: process.comm.clone(),
            vendors: vendors.into_iter().collect(),
            gpu_memory: Vec::new(),
        })
    });
    users.collect()
}

/// The vendor of the driver that an open or mapped file belongs to. NVIDIA's user library counts too: a process that
/// another tool has checkpointed has no node open, but needs the plugin all the same.
fn vendor_of_file(path: &Path) -> Option<Vendor> {
    let text = path.to_str()?;
    let text = text.strip_suffix(" (deleted)").unwrap_or(text);
    match nodes::classify(text) {
        Some(nodes::Class::Known(vendor, _)) => return Some(vendor),
        Some(nodes::Class::Drm(_)) | None => {}
    }
    let name = text.rsplit('/').next()?;
    name.starts_with("libcuda.so").then_some(Vendor::Nvidia)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;

    fn process(root: &Path, pid: i32, parent: i32, comm: &str) {
        let dir = root.join(format!("proc/{pid}"));
        dir.dir("fd");
        let tail = "0 ".repeat(17);
        dir.put("stat", format!("{pid} ({comm}) S {parent} {tail}4711 0"));
        dir.put("comm", format!("{comm}\n"));
        dir.put(
            "status",
            format!("Name:\t{comm}\nNSpid:\t{pid}\t{}\n", pid - 99),
        );
        dir.put("maps", "");
    }

    #[test]
    fn trees_with_awkward_names() {
        let dir = tempfile::tempdir().unwrap();
        for (pid, parent, comm) in [
            (1, 0, "init"),
            (100, 1, "a) S 1 ("),
            (101, 100, "b"),
            (103, 101, "c"),
            (102, 1, "other"),
        ] {
            process(dir.path(), pid, parent, comm);
        }
        let host = Host::at(dir.path());
        assert_eq!(tree(&host, 100), [100, 101, 103]);
        assert_eq!(tree(&host, 555), [0i32; 0]);
        assert_eq!(start_time(&host, 100), Some(4711));
    }

    #[test]
    fn users_by_open_file_and_by_mapping() {
        let dir = tempfile::tempdir().unwrap();
        for pid in 100..106 {
            process(dir.path(), pid, 1, "worker");
        }
        let proc = dir.path().join("proc");
        proc.link("100/fd/3", "/dev/nvidiactl");
        proc.put("101/maps", "7f00-7f01 rw-s 00000000 00:05 12   /dev/kfd\n");
        proc.put(
            "102/maps",
            "7f00-7f01 r-xp 00000000 00:05 12   /usr/lib/libcuda.so.580.1 (deleted)\n",
        );
        proc.link("103/fd/0", "/dev/null");
        proc.put("104/maps", "7f00-7f01 rw-p 00000000 00:00 0  [heap]\n");
        let host = Host::at(dir.path());
        let found = users(&Scan::of(&host, &[100, 101, 102, 103, 104, 105, 999]), &[]);
        let short: Vec<_> = found
            .iter()
            .map(|p| (p.pid, p.ns_pid, p.vendors.as_slice()))
            .collect();
        assert_eq!(
            short,
            [
                (100, 1, &[Vendor::Nvidia][..]),
                (101, 2, &[Vendor::Amd]),
                (102, 3, &[Vendor::Nvidia])
            ]
        );
    }

    #[test]
    fn an_open_node_counts_by_number() {
        let host = Host::system();
        let _open = File::open("/dev/ptmx").unwrap();
        let _null = File::open("/dev/null").unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let kind = (Vendor::Nvidia, cryopod_host::nodes::NodeRole::Gpu);
        let mut node = DeviceNode::new("/dev/nvidia0", kind, (5, 2));
        let scan = Scan::of(&host, &[me]);
        assert_eq!(users(&scan, std::slice::from_ref(&node)).len(), 1);
        (node.major, node.minor) = (1, 3);
        assert_eq!(users(&scan, std::slice::from_ref(&node)).len(), 0);
        (node.major, node.minor) = (5, 77);
        assert_eq!(users(&scan, &[node]).len(), 0);
        assert!(tree(&host, me).contains(&me));
    }

    #[test]
    fn a_containers_dev_is_resolved_inside_its_root() {
        let dir = tempfile::tempdir().unwrap();
        dir.link("proc/5/root/dev", "/dev");
        assert!(nodes(&Host::at(dir.path()), 5).is_empty());
        assert!(nodes(&Host::at(dir.path()), 6).is_empty());
    }
}
