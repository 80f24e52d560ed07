//! Detects watches of files (inotify, fanotify) that CRIU cannot find again.
//!
//! CRIU opens a watched file by its file handle (`check_open_handle`, fsnotify.c), which overlayfs, the root of nearly
//! every container, does not allow. Then it searches a few directories, and those in `irmap-scan-path`, for the inode
//! (irmap.c); a watch in none of them fails the dump.
//!
//! CRIU 4.3 searches all of an overlayfs (`alloc_openable`). A watch that it does not find there passes the dump and
//! fails the restore, which can only open the file by its handle, unless it is a deleted file whose content CRIU saves.
//! This module searches as CRIU of either version.

use std::cell::OnceCell;
use std::collections::{BTreeSet, HashSet};
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

use crate::refusal::Refusal;
use cryopod_host::files::{Host, open_in_root, split_rdev};
use cryopod_host::mountinfo::{self, Mount};
use cryopod_host::processes::{Process, Scan};

/// The directories that CRIU searches by default.
const HINTS: [&str; 8] = [
    "/etc",
    "/var/spool",
    "/var/log",
    "/usr/share/dbus-1/services",
    "/usr/share/dbus-1/system-services",
    "/var/lib/polkit-1/localauthority",
    "/usr/share/polkit-1/actions",
    "/lib/udev",
];
/// The first CRIU that searches overlayfs.
const SEARCHES_OVERLAYFS: [u32; 2] = [4, 3];
/// At most so many files in those directories, or on overlayfs, are examined; with more CRIU decides.
const MAX_SEARCHED: usize = 50_000;
const MAX_WATCHES: usize = 65_536;
const MAX_HANDLE: usize = 128;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Watch {
    /// The file system's own device, and the inode.
    device: (u64, u64),
    inode: u64,
    /// The file handle: its type, its bytes. Kernels before 6.6 have none for overlayfs.
    handle: Option<(i32, Vec<u8>)>,
}

/// Returns one refusal for each process. `searched`: `irmap-scan-path`. `criu`: its version.
pub(super) fn watches(scan: &Scan, host: &Host, searched: &[String], criu: &[u32]) -> Vec<Refusal> {
    let Some(init) = scan.processes.first() else {
        return Vec::new();
    };
    let mut place = None;
    let mut refusals = Vec::new();
    for process in &scan.processes {
        let watches = watched(process, host);
        if watches.is_empty() {
            continue;
        }
        let place =
            place.get_or_insert_with(|| WatchPlace::of(scan, host, init.pid, searched, criu));
        let lost: Vec<&Watch> = watches.iter().filter(|w| place.is_lost(w)).collect();
        if lost.is_empty() {
            continue;
        }
        let on: BTreeSet<String> = lost.iter().map(|w| place.file_system(w)).collect();
        let on: Vec<String> = on.into_iter().collect();
        let remedy = match lost.iter().all(|w| place.searched_whole(w)) {
            true => {
                "another mount covers them, or they are on an overlayfs whose layers are on several file systems: unmount what covers them, or start it without watching (as uvicorn without --reload)"
            }
            false => {
                "name the directory that it watches as irmap-scan-path under [criu.options] in /etc/cryopod/config.toml, which CRIU then searches; or start it without watching (as uvicorn without --reload)"
            }
        };
        refusals.push(Refusal::of(
            process,
            format!(
                "watches files that CRIU cannot find again (inotify or fanotify, on {})",
                on.join(", ")
            ),
            remedy,
        ));
    }
    refusals
}

fn watched(process: &Process, host: &Host) -> HashSet<Watch> {
    let watcher = |target: &str| matches!(target, "anon_inode:inotify" | "anon_inode:[fanotify]");
    let mut all = HashSet::new();
    for fd in process.fds.iter().filter(|fd| watcher(&fd.target)) {
        let info = host.text(format!("/proc/{}/fdinfo/{}", process.pid, fd.number));
        all.extend(
            info.unwrap_or_default()
                .lines()
                .filter_map(parse)
                .take(MAX_WATCHES),
        );
    }
    all
}

/// Parses `inotify wd:1 ino:9 sdev:800001 mask:fce ignored_mask:0 fhandle-bytes:8 fhandle-type:1
/// f_handle:0900000000000000`, or `fanotify ino:9 sdev:800001 ...`. fanotify's marks of mounts and file systems have no
/// inode.
fn parse(line: &str) -> Option<Watch> {
    let words = line
        .strip_prefix("inotify ")
        .or_else(|| line.strip_prefix("fanotify "))?;
    let value = |name: &str| {
        words
            .split_whitespace()
            .find_map(|w| w.strip_prefix(name)?.strip_prefix(':'))
    };
    let hex = |name: &str| u64::from_str_radix(value(name)?, 16).ok();
    let device = hex("sdev")?;
    let handle = || {
        let bytes = value("f_handle")?.as_bytes().chunks_exact(2);
        let bytes = bytes.map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok());
        let bytes: Option<Vec<u8>> = bytes.take(MAX_HANDLE).collect();
        Some((i32::try_from(hex("fhandle-type")?).ok()?, bytes?))
    };
    Some(Watch {
        device: (device >> 20, device & 0xf_ffff),
        inode: hex("ino")?,
        handle: handle(),
    })
}

struct WatchPlace<'a> {
    scan: &'a Scan,
    host: &'a Host,
    init: i32,
    mounts: Vec<Mount>,
    hints: &'a [String],
    searches_overlayfs: bool,
    /// The inodes in the directories that CRIU searches; filled in when one is needed.
    in_hints: OnceCell<Searched>,
    /// The inodes on overlayfs, likewise.
    on_overlayfs: OnceCell<Searched>,
}

#[derive(Debug, Default)]
struct Searched {
    inodes: HashSet<((u64, u64), u64)>,
    cut: bool,
}

impl<'a> WatchPlace<'a> {
    fn of(scan: &'a Scan, host: &'a Host, init: i32, hints: &'a [String], criu: &[u32]) -> Self {
        Self {
            scan,
            host,
            init,
            mounts: mountinfo::of(host, &init.to_string()),
            hints,
            searches_overlayfs: criu >= SEARCHES_OVERLAYFS.as_slice(),
            in_hints: OnceCell::new(),
            on_overlayfs: OnceCell::new(),
        }
    }

    fn mounts(&self, watch: &Watch) -> impl Iterator<Item = &Mount> {
        let device = format!("{}:{}", watch.device.0, watch.device.1);
        self.mounts.iter().filter(move |m| m.device == device)
    }

    /// Names the file system of a watch by the mount in which the file is. Several may show parts of one file system.
    fn file_system(&self, watch: &Watch) -> String {
        let mut mounts: Vec<&Mount> = self.mounts(watch).collect();
        // The innermost first: a search goes through all that is below.
        mounts.sort_by_key(|m| std::cmp::Reverse(m.point.components().count()));
        let Some((outermost, inner)) = mounts.split_last() else {
            return "a file system that is not mounted there".into();
        };
        let found = inner.iter().find(|m| self.has(m, watch));
        let mount = found.unwrap_or(outermost);
        format!("{} at {}", mount.fs_type, mount.point.display())
    }

    /// Returns true if the watched file is below this mount point, for certain.
    fn has(&self, mount: &Mount, watch: &Watch) -> bool {
        let mut found = Searched::default();
        if let Some(root) = self.open(&mount.point, OFlag::empty()) {
            found.note(&root);
            self.search(mount.point.clone(), Some(watch.device), &mut found);
        }
        !found.cut && found.may_have(watch)
    }

    /// Returns true if CRIU searches all of the watch's file system.
    fn searched_whole(&self, watch: &Watch) -> bool {
        self.searches_overlayfs && self.mounts(watch).any(is_overlayfs)
    }

    fn is_lost(&self, watch: &Watch) -> bool {
        if self.mounts(watch).any(|mount| self.opens(mount, watch)) {
            return false;
        }
        if self.searched_whole(watch) {
            let found = self.on_overlayfs.get_or_init(|| self.search_overlayfs());
            if found.may_have(watch) || self.saves(watch) {
                return false;
            }
        }
        let found = self.in_hints.get_or_init(|| self.search_hints());
        !found.may_have(watch)
    }

    /// Returns true if the file was deleted and CRIU saves it, because a process has it open or mapped, or is in it.
    fn saves(&self, watch: &Watch) -> bool {
        let its = |meta: fs::Metadata| (split_rdev(meta.dev()), meta.ino());
        self.scan.processes.iter().any(|process| {
            let open = process.fds.iter().filter_map(|fd| {
                let deleted = fd.target.ends_with(" (deleted)");
                fd.file.filter(|_| deleted).map(|f| (f.device, f.inode))
            });
            let mapped = process
                .deleted_maps
                .iter()
                .map(|(range, _)| format!("map_files/{range}"));
            let others = mapped.chain(["cwd".into()]).filter_map(|name| {
                let path = self.host.path(format!("/proc/{}/{name}", process.pid));
                let link = fs::read_link(&path).ok()?;
                let deleted = link.to_string_lossy().ends_with(" (deleted)");
                fs::metadata(path).ok().filter(|_| deleted).map(its)
            });
            open.chain(others)
                .any(|file| file == (watch.device, watch.inode))
        })
    }

    /// Returns true if the handle leads to the file on this mount. A deleted file of a tmpfs does not count: CRIU needs
    /// its path.
    fn opens(&self, mount: &Mount, watch: &Watch) -> bool {
        let Some((kind, bytes)) = &watch.handle else {
            return false;
        };
        let Some(directory) = self.open(&mount.point, OFlag::O_DIRECTORY) else {
            return false;
        };
        // `struct file_handle`: length, type, bytes.
        let mut handle = Vec::with_capacity(8 + bytes.len());
        handle.extend(u32::try_from(bytes.len()).unwrap_or(0).to_ne_bytes());
        handle.extend(kind.to_ne_bytes());
        handle.extend(bytes);
        // SAFETY: an open directory, a handle that names its own length; the result is a new descriptor.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_open_by_handle_at,
                directory.as_raw_fd(),
                handle.as_ptr(),
                libc::O_PATH | libc::O_CLOEXEC,
            )
        };
        let Some(fd) = i32::try_from(fd).ok().filter(|fd| *fd >= 0) else {
            return false;
        };
        // SAFETY: just opened, owned by nobody else.
        let file = unsafe { OwnedFd::from_raw_fd(fd) };
        let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let deleted = path.is_ok_and(|p| p.to_string_lossy().ends_with(" (deleted)"));
        !(deleted && matches!(mount.fs_type.as_str(), "tmpfs" | "devtmpfs"))
    }

    /// Opens a directory of the container, by a path that does not leave it.
    fn open(&self, path: impl AsRef<Path>, flags: OFlag) -> Option<OwnedFd> {
        let root = File::open(self.host.path(format!("/proc/{}/root", self.init))).ok()?;
        inside(&root, path.as_ref(), flags)
    }

    fn search_hints(&self) -> Searched {
        let mut found = Searched::default();
        if let Some(root) = self.open("/", OFlag::O_DIRECTORY) {
            found.note(&root);
        }
        let paths = HINTS.iter().copied();
        for path in paths.chain(self.hints.iter().map(String::as_str)) {
            if let Some(file) = self.open(path, OFlag::empty()) {
                found.note(&file);
                self.search(path.into(), None, &mut found);
            }
        }
        found
    }

    fn search_overlayfs(&self) -> Searched {
        let mut found = Searched::default();
        for mount in self.mounts.iter().filter(|m| is_overlayfs(m)) {
            if let Some(root) = self.open(&mount.point, OFlag::O_DIRECTORY) {
                let device = found.note(&root);
                self.search(mount.point.clone(), device, &mut found);
            }
        }
        found
    }

    /// Notes what is in and below a directory: if `device` is given, only in directories of that file system.
    fn search(&self, path: PathBuf, device: Option<(u64, u64)>, found: &mut Searched) {
        // Names, not descriptors: a directory may have more directories than this process may open.
        let mut directories = vec![path];
        while let Some(path) = directories.pop() {
            let Some(directory) = self.open(&path, OFlag::O_DIRECTORY) else {
                continue;
            };
            let entries = fs::read_dir(format!("/proc/self/fd/{}", directory.as_raw_fd()));
            for entry in entries.into_iter().flatten().flatten() {
                let Ok(meta) = entry.metadata() else { continue };
                let its = split_rdev(meta.dev());
                found.inodes.insert((its, meta.ino()));
                if found.inodes.len() >= MAX_SEARCHED {
                    found.cut = true;
                    return;
                }
                if meta.is_dir() && device.is_none_or(|device| device == its) {
                    directories.push(path.join(entry.file_name()));
                }
            }
        }
    }
}

fn is_overlayfs(mount: &Mount) -> bool {
    mount.fs_type == "overlay"
}

fn inside(from: &impl AsFd, path: &Path, flags: OFlag) -> Option<OwnedFd> {
    open_in_root(from, path, OFlag::O_NONBLOCK | OFlag::O_NOCTTY | flags).ok()
}

impl Searched {
    /// Notes a file. Returns its device.
    fn note(&mut self, file: &OwnedFd) -> Option<(u64, u64)> {
        let meta = fs::metadata(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
        let device = split_rdev(meta.dev());
        self.inodes.insert((device, meta.ino()));
        Some(device)
    }

    fn may_have(&self, watch: &Watch) -> bool {
        self.cut || self.inodes.contains(&(watch.device, watch.inode))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_host::processes::{Fd, FileFacts};
    use std::path::Path;

    /// A container whose root is `root`, on a file system that opens no handle, with one watch.
    fn machine(dir: &Path, device: u64, inode: u64) -> Scan {
        let proc = dir.join("proc/700000001");
        fs::create_dir_all(proc.join("fdinfo")).unwrap();
        fs::create_dir_all(dir.join("root/etc/app")).unwrap();
        fs::create_dir_all(dir.join("root/srv/app")).unwrap();
        let _ = std::os::unix::fs::symlink(dir.join("root"), proc.join("root"));
        fs::write(
            proc.join("fdinfo/5"),
            format!("pos:\t0\nflags:\t00\ninotify wd:1 ino:{inode:x} sdev:{device:x} mask:fff ignored_mask:0 fhandle-bytes:8 fhandle-type:1 f_handle:0900000000000000 \n"),
        )
        .unwrap();
        let (major, minor) = (device >> 20, device & 0xf_ffff);
        let line = format!("50 49 {major}:{minor} / / rw - overlay overlay rw\n");
        fs::write(proc.join("mountinfo"), line).unwrap();
        Scan {
            processes: vec![Process {
                pid: 700_000_001,
                comm: "jupyter".into(),
                fds: vec![Fd {
                    number: "5".into(),
                    target: "anon_inode:inotify".into(),
                    ..Fd::default()
                }],
                ..Process::default()
            }],
        }
    }

    fn kernel_device(path: &Path) -> (u64, u64) {
        let meta = fs::metadata(path).unwrap();
        let (major, minor) = split_rdev(meta.dev());
        (major << 20 | minor, meta.ino())
    }

    #[test]
    fn a_watch_that_criu_would_not_find() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        machine(dir.path(), 0, 0);
        let (device, inode) = kernel_device(&dir.path().join("root/srv/app"));
        let scan = machine(dir.path(), device, inode);
        let said = watches(&scan, &host, &[], &[4, 2, 1]);
        assert_eq!(said.len(), 1, "{said:?}");
        let said = said[0].to_string();
        for want in [
            "process 700000001 (jupyter): watches files",
            "on overlay at /",
            "irmap-scan-path",
        ] {
            assert!(said.contains(want), "{want}: {said}");
        }
        // Directories that the administrator adds for CRIU are searched here, too.
        assert_eq!(watches(&scan, &host, &["/srv".into()], &[4, 2, 1]), []);
        assert_eq!(watches(&scan, &host, &["/srv/app".into()], &[4, 2, 1]), []);
    }

    #[test]
    fn criu_4_3_searches_all_of_overlayfs() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        machine(dir.path(), 0, 0);
        let path = dir.path().join("root/srv/app/one/more");
        fs::create_dir_all(&path).unwrap();
        let (device, inode) = kernel_device(&path);
        let scan = machine(dir.path(), device, inode);
        for (criu, lost) in [
            (&[][..], 1),
            (&[4, 2, 1], 1),
            (&[4, 3], 0),
            (&[4, 3, 1], 0),
            (&[5, 0], 0),
        ] {
            assert_eq!(watches(&scan, &host, &[], criu).len(), lost, "{criu:?}");
        }
        // One that no path leads to any more, which CRIU would not miss before the restore.
        let away = dir.path().join("away");
        fs::rename(&path, &away).unwrap();
        for (criu, remedy) in [
            (&[4, 2, 1][..], "irmap-scan-path"),
            (&[4, 3], "another mount covers"),
        ] {
            let said = watches(&scan, &host, &["/srv".into()], criu);
            assert!(said[0].to_string().contains(remedy), "{criu:?}: {said:?}");
        }
        // A deleted one that its process has open.
        let mut scan = scan;
        scan.processes[0].fds.push(Fd {
            number: "6".into(),
            target: "/srv/app/one/more (deleted)".into(),
            file: Some(FileFacts {
                kind: libc::S_IFDIR,
                links: 0,
                bytes: 0,
                device: split_rdev(fs::metadata(&away).unwrap().dev()),
                inode,
            }),
            ..Fd::default()
        });
        assert_eq!(watches(&scan, &host, &[], &[4, 3]), []);
        assert_eq!(watches(&scan, &host, &[], &[4, 2, 1]).len(), 1);
        // As its working directory.
        scan.processes[0].fds.pop();
        assert_eq!(watches(&scan, &host, &[], &[4, 3]).len(), 1);
        let deleted = dir.path().join("x (deleted)");
        fs::rename(&away, &deleted).unwrap();
        let cwd = dir.path().join("proc/700000001/cwd");
        std::os::unix::fs::symlink(&deleted, &cwd).unwrap();
        assert_eq!(watches(&scan, &host, &[], &[4, 3]), []);
        fs::remove_file(cwd).unwrap();
        // On a file system of another kind it searches as before.
        let path = dir.path().join("root/srv/app");
        let (device, inode) = kernel_device(&path);
        let scan = machine(dir.path(), device, inode);
        let mountinfo = dir.path().join("proc/700000001/mountinfo");
        let text = fs::read_to_string(&mountinfo).unwrap();
        fs::write(&mountinfo, text.replace("overlay", "9p")).unwrap();
        let said = watches(&scan, &host, &[], &[4, 3])[0].to_string();
        assert!(
            said.contains("on 9p at /") && said.contains("irmap-scan-path"),
            "{said}"
        );
    }

    #[test]
    fn watches_in_the_directories_that_criu_searches() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        machine(dir.path(), 0, 0);
        for path in ["root/etc/app", "root/etc", "root"] {
            let (device, inode) = kernel_device(&dir.path().join(path));
            assert_eq!(
                watches(&machine(dir.path(), device, inode), &host, &[], &[4, 2, 1]),
                [],
                "{path}"
            );
        }
    }

    #[test]
    fn lines_of_the_kernel() {
        let inotify = parse("inotify wd:1 ino:2b sdev:800001 mask:fce ignored_mask:0 fhandle-bytes:8 fhandle-type:fb f_handle:2b00").unwrap();
        assert_eq!(
            inotify,
            Watch {
                device: (8, 1),
                inode: 0x2b,
                handle: Some((0xfb, vec![0x2b, 0]))
            }
        );
        let old = parse("inotify wd:1 ino:2b sdev:2e mask:fce ignored_mask:0 ").unwrap();
        assert_eq!((old.device, old.handle), ((0, 0x2e), None));
        assert!(parse("fanotify ino:2b sdev:2e mflags:0 mask:8 ignored_mask:0").is_some());
        assert_eq!(
            parse("fanotify mnt_id:12 mflags:0 mask:8 ignored_mask:0"),
            None
        );
        assert_eq!(parse("fanotify flags:0 event-flags:0"), None);
    }
}
