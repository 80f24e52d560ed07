//! Detects open files that CRIU cannot save: deleted ones above its limit, and those that another mount covers.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::fstatat;

use crate::refusal::Refusal;
use cryopod_host::files::{Host, open_without_links, split_rdev};
use cryopod_host::mountinfo;
use cryopod_host::processes::{Fd, Process, Scan};

/// File systems whose paths are looked up: those of a network or of another process may never answer.
const LOCAL: [&str; 9] = [
    "overlay", "ext4", "ext3", "ext2", "xfs", "btrfs", "tmpfs", "zfs", "f2fs",
];

/// A regular file that a process has open or mapped by a deleted name.
struct Deleted {
    name: String,
    links: u64,
    device: (u64, u64),
    inode: u64,
    bytes: u64,
}

fn deleted(process: &Process, host: &Host) -> Vec<Deleted> {
    const SUFFIX: &str = " (deleted)";
    let open = process.fds.iter().filter_map(|fd| {
        let file = fd.file.filter(|f| f.kind == libc::S_IFREG)?;
        Some(Deleted {
            name: fd.target.strip_suffix(SUFFIX)?.to_owned(),
            links: file.links,
            device: file.device,
            inode: file.inode,
            bytes: file.bytes,
        })
    });
    let mapped = process.deleted_maps.iter().filter_map(|(range, name)| {
        let meta = fs::metadata(host.path(format!("/proc/{}/map_files/{range}", process.pid)));
        let meta = meta.ok().filter(|m| m.is_file())?;
        Some(Deleted {
            name: name.strip_suffix(SUFFIX)?.to_owned(),
            links: meta.nlink(),
            device: split_rdev(meta.dev()),
            inode: meta.ino(),
            bytes: meta.blocks() * 512,
        })
    });
    open.chain(mapped).collect()
}

/// Returns deleted files, open or mapped, that take up more than `limit` bytes: CRIU saves their content up to that
/// (`ghost-limit`).
pub(super) fn deleted_files(scan: &Scan, host: &Host, limit: u64) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let mut told = HashSet::new();
    for process in &scan.processes {
        for file in deleted(process, host) {
            let (name, bytes) = (&file.name, file.bytes);
            if file.links == 0 && bytes > limit && told.insert((file.device, file.inode)) {
                refusals.push(Refusal::of(
                    process,
                    format!(
                        "has a deleted file of {} MiB open ({name}), and CRIU carries {} MiB of one",
                        bytes >> 20,
                        limit >> 20
                    ),
                    "raise the limit with the annotation dev.cryopod.criu.ghost-limit=SIZE (as 8G), or ghost-limit under [criu.options] in /etc/cryopod/config.toml",
                ));
            }
        }
    }
    refusals
}

/// Returns files that CRIU saves as a link in their directory (`link_remap.N`) and that are `lost` with it. When a
/// container goes on, CRIU removes these links at the end of the dump (`delete_link_remaps`), and a restore fails.
pub fn linked_elsewhere(scan: &Scan, host: &Host, lost: impl Fn(&Path) -> bool) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let mut told = HashSet::new();
    for process in &scan.processes {
        for file in deleted(process, host) {
            let missed = file.links > 0 && lost(Path::new(&file.name));
            if missed && told.insert((file.device, file.inode)) {
                refusals.push(Refusal::of(
                    process,
                    format!(
                        "has {} open, which is deleted and has another name; when the container goes on, CRIU removes the link by which a restore would find it",
                        file.name
                    ),
                    "checkpoint it without --leave-running, or have it open the file anew",
                ));
            }
        }
    }
    refusals
}

/// Returns files whose path leads elsewhere now, because something is mounted over it.
pub(super) fn covered_files(scan: &Scan, host: &Host) -> Vec<Refusal> {
    let Some(init) = scan.processes.first() else {
        return Vec::new();
    };
    let Ok(root) = File::open(host.path(format!("/proc/{}/root", init.pid))) else {
        return Vec::new();
    };
    let mounts: HashMap<u64, String> = mountinfo::of(host, &init.pid.to_string())
        .into_iter()
        .filter(|m| LOCAL.contains(&m.fs_type.as_str()))
        .map(|m| (m.id, m.point.display().to_string()))
        .collect();
    let mut refusals = Vec::new();
    let mut seen = HashSet::new();
    let inside = |p: &&Process| p.mount_namespace == init.mount_namespace;
    for process in scan.processes.iter().filter(inside) {
        for fd in &process.fds {
            let Some(point) = fd.mount.and_then(|id| mounts.get(&id)) else {
                continue;
            };
            if seen.insert((fd.mount, &fd.target)) && covered(&root, fd) {
                refusals.push(Refusal::of(
                    process,
                    format!(
                        "has {} open (descriptor {}, on the mount {point}), and another mount covers it",
                        fd.target, fd.number
                    ),
                    "unmount what covers it, or close the file: CRIU cannot reach it",
                ));
            }
        }
    }
    refusals
}

/// Returns true if the path of an open, not deleted file leads to nothing or to something else. CRIU refuses the former
/// (`Unaccessible path opened`), and would link the latter anew, which does not work across mounts.
fn covered(root: &File, fd: &Fd) -> bool {
    let Some(file) = fd
        .file
        .filter(|f| f.links > 0 && matches!(f.kind, libc::S_IFREG | libc::S_IFDIR))
    else {
        return false;
    };
    if fd.target.ends_with(" (deleted)") {
        return false;
    }
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
    match open_without_links(root, Path::new(&fd.target), flags) {
        Ok(found) => fstatat(found.as_fd(), "", AtFlags::AT_EMPTY_PATH)
            .is_ok_and(|s| s.st_ino != file.inode || split_rdev(s.st_dev) != file.device),
        Err(e) => e == nix::errno::Errno::ENOENT,
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{file as fd, scan};
    use super::*;

    #[test]
    fn deleted_files_above_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let big = fd("/dev/shm/x (deleted)", libc::S_IFREG, 0, 5 << 20, 7);
        let told = |limit, one: Fd| deleted_files(&scan(vec![one.clone(), one]), &host, limit);
        assert_eq!(told(5 << 20, big.clone()), []);
        let said = told(4 << 20, big);
        assert_eq!(said.len(), 1, "{said:?}");
        let said = said[0].to_string();
        for want in [
            "deleted file of 5 MiB open (/dev/shm/x)",
            "carries 4 MiB",
            "dev.cryopod.criu.ghost-limit=",
        ] {
            assert!(said.contains(want), "{want}: {said}");
        }
        let linked = fd("/srv/x", libc::S_IFREG, 1, 5 << 20, 7);
        assert_eq!(told(4 << 20, linked), [], "not deleted");
    }

    #[test]
    fn a_file_with_another_name() {
        let host = Host::at("/nowhere");
        let both = scan(vec![
            fd("/v/x (deleted)", libc::S_IFREG, 1, 0, 7),
            fd("/v/x (deleted)", libc::S_IFREG, 1, 0, 7),
            fd("/v/gone (deleted)", libc::S_IFREG, 0, 0, 8),
            fd("/v/there", libc::S_IFREG, 2, 0, 9),
        ]);
        let said = linked_elsewhere(&both, &host, |path| path.starts_with("/v"));
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].to_string().contains("has /v/x open"), "{said:?}");
        assert_eq!(linked_elsewhere(&both, &host, |_| false), []);
    }

    #[test]
    fn a_mapped_one_whose_descriptor_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let maps = dir.path().join("proc/700000001/map_files");
        fs::create_dir_all(&maps).unwrap();
        // A link to an open file that has no name any more, as the kernel's own are.
        let gone = tempfile::tempfile_in(dir.path()).unwrap();
        fs::write(
            format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&gone)),
            vec![1u8; 1 << 20],
        )
        .unwrap();
        let at = format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            std::os::fd::AsRawFd::as_raw_fd(&gone)
        );
        std::os::unix::fs::symlink(at, maps.join("7f00-7f01")).unwrap();
        let mut scan = scan(vec![]);
        scan.processes[0].deleted_maps = vec![("7f00-7f01".into(), "/dev/shm/t (deleted)".into())];
        assert_eq!(deleted_files(&scan, &host, 64 << 20), []);
        let said = deleted_files(&scan, &host, 1 << 10);
        assert!(said[0].to_string().contains("(/dev/shm/t)"), "{said:?}");
    }

    #[test]
    fn files_that_a_mount_covers() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(root.join("x"), "").unwrap();
        let meta = fs::metadata(root.join("x")).unwrap();
        let open = File::open(&root).unwrap();
        let mut same = fd("/x", libc::S_IFREG, 1, 0, meta.ino());
        same.file.as_mut().unwrap().device = split_rdev(meta.dev());
        assert!(!covered(&open, &same));
        assert!(
            covered(&open, &fd("/x", libc::S_IFREG, 1, 0, meta.ino() + 1)),
            "another file"
        );
        assert!(
            covered(&open, &fd("/y", libc::S_IFREG, 1, 0, 1)),
            "nothing there"
        );
        assert!(
            !covered(&open, &fd("/y (deleted)", libc::S_IFREG, 1, 0, 1)),
            "CRIU links it"
        );
        assert!(
            !covered(&open, &fd("/y", libc::S_IFREG, 0, 0, 1)),
            "CRIU carries it"
        );
    }
}
