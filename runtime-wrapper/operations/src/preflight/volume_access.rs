//! Refuses what CRIU would open, make or remove as root in a container's volumes, and the spec's user could not; and device
//! nodes there that the spec does not give.
//!
//! What CRIU makes or removes is asked before it starts, by the paths in its images. What it opens is asked of the restored
//! processes, before they run: the kernel has followed links and mounts. A checkpoint asks the same of the running ones.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use cryopod_archive::criu::mounts::CriuMount;
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::destinations::MountDestination;
use cryopod_host::files::open_in_root;
use cryopod_host::mountinfo::{self, Mount};
use cryopod_host::processes::maps;
use nix::fcntl::{OFlag, readlinkat};
use rustix::fs::{AtFlags, StatxFlags, statx};

use crate::request::Request;
use crate::rootfs::{SHM, own_shm};
use crate::security::image_check::opened::{ReachedPaths, WatchedHandle};
use crate::security::openable::{SpecUser, VolumeFile};

/// What links of `/proc/PID/fd` have behind the path of a deleted file.
const DELETED: &str = " (deleted)";
/// `/dev/null`, `zero`, `full`, `random`, `urandom`, `tty` and `ptmx`.
const EVERYBODYS: [(u32, u32); 7] = [(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 2)];
/// The majors of pseudo terminals, which every runtime allows.
const TERMINALS: std::ops::RangeInclusive<u32> = 136..=143;
/// As many files are held open to be asked for.
const MAX_ASKED: usize = 256;
/// The most links that a path may lead through, as in the kernel.
const MAX_LINKS: usize = 40;

/// What processes of a container reach in its volumes.
pub struct VolumeAccess<'a> {
    request: &'a Request<'a>,
    user: SpecUser,
    asked: Vec<VolumeFile>,
    /// One for each that is asked.
    answers: Vec<Refusal>,
    refused: Vec<Refusal>,
}

impl<'a> VolumeAccess<'a> {
    pub fn of(request: &'a Request<'_>) -> Self {
        Self {
            request,
            user: SpecUser::of(&request.spec),
            asked: Vec::new(),
            answers: Vec::new(),
            refused: Vec::new(),
        }
    }

    /// Asks for what CRIU makes, removes or watches by its path, and for what nobody has open before it runs.
    pub fn ask_paths(&mut self, reached: &ReachedPaths, devices: &[(u32, u32)]) {
        for file in &reached.in_flight {
            let found = self.locate(&file.path);
            if let Some((volume, found)) =
                found.and_then(|(volume, rest)| open_in(self.request, volume, &rest))
            {
                let found = File::from(found);
                if let Ok(meta) = found.metadata() {
                    self.ask_node(&file.path, &meta, devices);
                }
                self.ask_open(&file.path, volume, found.into(), file.flags, file.is_mapped);
            }
        }
        for path in &reached.watched {
            let found = self.locate(path);
            if let Some((volume, file)) =
                found.and_then(|(volume, rest)| open_in(self.request, volume, &rest))
            {
                self.ask_open(path, volume, file, libc::O_RDONLY, false);
            }
        }
        for made in &reached.made {
            let path = Path::new("/").join(&made.path);
            if made.is_directory && self.exists(&path) {
                // CRIU would give it the owner and the mode of the images.
                self.refused.push(Refusal::new(
                    format!("{}, a deleted directory, is there again", path.display()),
                    "move what is there away",
                ));
            }
            self.ask_make(&path);
        }
        for path in &reached.bound {
            self.ask_make(path);
        }
    }

    /// Asks for watched files that CRIU opens by a handle, anywhere on a mount's file system. Directories, whose events name
    /// files, have a path at the checkpoint if they are in the container. `mounts`: those of the images.
    pub fn ask_handles(&mut self, handles: &[WatchedHandle], mounts: &[CriuMount]) {
        for handle in handles {
            let on_device = mounts.iter().filter(|m| m.device == handle.device);
            for mount in on_device {
                let all = self.request.mounts.0.iter();
                let mut all = all.filter(|d| {
                    d.path == Path::new(&mount.key) || d.named == Path::new(&mount.key)
                });
                let directory = match (mount.external, all.next()) {
                    (true, Some(volume)) => {
                        open_in(self.request, volume, Path::new("")).map(|(_, fd)| File::from(fd))
                    }
                    (true, None) => None,
                    (false, _) if mount.path == "/" => self.root(),
                    (false, _) => None, // a file system of the container's own
                };
                let found = directory.and_then(|d| open_by_handle(&d, handle));
                if found.is_some_and(|f| f.metadata().is_ok_and(|m| m.is_dir())) {
                    self.refused.push(Refusal::new(
                        format!("a process watches a directory outside of the container, on the file system of {}", mount.path),
                        "make the checkpoint anew without the watch",
                    ));
                    break;
                }
            }
        }
    }

    /// Asks for what these processes have open. `init` has the container's mounts. `devices`: nodes that the container may
    /// have besides those that its rules allow.
    pub fn ask_opened(&mut self, init: i32, pids: &[i32], devices: &[(u32, u32)]) {
        let host = &self.request.host;
        let has_volumes = self.request.mounts.0.iter().any(|mount| mount.bind);
        if !has_volumes {
            return;
        }
        // Processes may have mount namespaces of their own.
        let mut mounts: BTreeMap<u64, Mount> = BTreeMap::new();
        let mut namespaces = BTreeSet::new();
        for pid in [init].iter().chain(pids) {
            let namespace = host.path(format!("/proc/{pid}/ns/mnt")).read_link();
            if namespace.is_ok_and(|n| namespaces.insert(n)) {
                let found = mountinfo::of(host, &pid.to_string());
                mounts.extend(found.into_iter().map(|m| (m.id, m)));
            }
        }
        let mut seen = BTreeSet::new();
        for pid in pids {
            let process = host.path(format!("/proc/{pid}"));
            let descriptors = entries(&process.join("fd"));
            let descriptors = descriptors.filter_map(|d| Some((flags_of(&d)?, false, d)));
            let mapped = entries(&process.join("map_files"));
            let mapped = mapped.map(|m| (flags_of_mapped(&m), true, m));
            // The directory in which a process is, a runtime enters as root, too.
            let program = [(libc::O_RDONLY, true, process.join("exe"))];
            for (flags, is_mapped, link) in descriptors.chain(mapped).chain(program) {
                let file = match open_path(&link) {
                    Ok(file) => file,
                    Err(e) if is_out_of_descriptors(&e) => {
                        self.refused.push(not_asked(&link, &e));
                        return;
                    }
                    // What has ended meanwhile has no links; CRIU has no more rights than this process.
                    Err(_) => continue,
                };
                // Pipes and sockets are in no mount.
                let Some((volume, identity)) = self.volume_of(&mounts, &file) else {
                    continue;
                };
                if !seen.insert((identity, flags, is_mapped)) {
                    continue;
                }
                let path = fs::read_link(&link).unwrap_or_default();
                if flags & libc::O_PATH == 0
                    && let Ok(meta) = file.metadata()
                {
                    self.ask_node(&path, &meta, devices);
                }
                self.ask_open(&path, volume, file.into(), flags, is_mapped);
            }
        }
    }

    /// Asks for what CRIU would make anew of these processes: files that are deleted, and sockets.
    pub fn ask_made(&mut self, pids: &[i32]) {
        let host = &self.request.host;
        let mut sockets = BTreeSet::new();
        for pid in pids {
            let process = host.path(format!("/proc/{pid}"));
            let others = ["cwd", "exe"].map(|name| process.join(name));
            let links = entries(&process.join("fd")).chain(others);
            let links = links.filter_map(|link| fs::read_link(link).ok());
            let mut names: BTreeSet<String> =
                links.map(|l| l.to_string_lossy().into_owned()).collect();
            let _ = maps::for_each(host, *pid, |mapping| {
                // The name of shared memory without a file.
                if mapping.name.ends_with(DELETED) && !mapping.name.starts_with("/dev/zero") {
                    names.insert(mapping.name.to_owned());
                }
            });
            for name in names {
                if let Some(path) = name.strip_suffix(DELETED) {
                    self.ask_make(Path::new(path));
                } else if name.starts_with("socket:") {
                    sockets.insert(name);
                }
            }
        }
        let Some(first) = pids.first().filter(|_| !sockets.is_empty()) else {
            return;
        };
        let all = fs::read_to_string(host.path(format!("/proc/{first}/net/unix")));
        for line in all.unwrap_or_default().lines() {
            // Num: RefCount Protocol Flags Type St Inode Path
            if let (Some(inode), Some(at)) = (line.split_ascii_whitespace().nth(6), line.find(" /"))
                && sockets.contains(&format!("socket:[{inode}]"))
            {
                self.ask_make(Path::new(&line[at + 1..]));
            }
        }
    }

    /// Returns what must not be.
    pub fn refusals(mut self) -> Vec<Refusal> {
        self.answer();
        self.refused.dedup_by(|a, b| a.what == b.what);
        self.refused
    }

    fn ask(&mut self, file: VolumeFile, refusal: Refusal) {
        self.asked.push(file);
        self.answers.push(refusal);
        if self.asked.len() >= MAX_ASKED {
            self.answer();
        }
    }

    fn answer(&mut self) {
        let may = self.user.may_open(&std::mem::take(&mut self.asked));
        let answers = may.into_iter().zip(self.answers.drain(..));
        let not = answers.filter(|(may, _)| !may).map(|(_, refusal)| refusal);
        self.refused.extend(not);
    }

    fn ask_open(
        &mut self,
        path: &Path,
        volume: &MountDestination,
        file: OwnedFd,
        flags: i32,
        is_mapped: bool,
    ) {
        if self.user.opens_all() {
            return;
        }
        let refusal = Refusal::new(
            format!(
                "a process has {} open (in {}), which the spec's user may not open",
                path.display(),
                shown(volume)
            ),
            "give that user or one of its groups the right to the file, or run the container as another user",
        );
        self.ask(VolumeFile::opened(file, flags, is_mapped), refusal);
    }

    fn ask_node(&mut self, path: &Path, meta: &Metadata, devices: &[(u32, u32)]) {
        let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
        let (spec, kind) = (&self.request.spec, meta.file_type());
        let is_given = match () {
            () if kind.is_char_device() => {
                TERMINALS.contains(&major)
                    || devices.contains(&(major, minor))
                    || spec.allows(major.into(), minor.into())
            }
            () if kind.is_block_device() => spec.allows_block(major.into(), minor.into()),
            () => true,
        };
        if !is_given {
            self.refused.push(Refusal::new(
                format!(
                    "a process has {} open, the device node {major}:{minor}, which the spec does not give",
                    path.display()
                ),
                "give the container that device, or make the checkpoint anew without it",
            ));
        }
    }

    /// Asks for a file that CRIU makes here, or removes.
    fn ask_make(&mut self, path: &Path) {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return;
        };
        let Some((volume, rest)) = self.locate(parent) else {
            return;
        };
        // CRIU makes the directories that are not there.
        let mut above = rest.ancestors();
        let Some((_, directory)) = above.find_map(|at| open_in(self.request, volume, at)) else {
            return;
        };
        let is_others = self.is_others(&directory, name);
        let refusal = Refusal::new(
            format!(
                "a process has {} open or bound, which a restore makes anew (in {}), and the spec's user may not",
                path.display(),
                shown(volume)
            ),
            "have the process close it: a file of a volume that was deleted or replaced, or a socket",
        );
        if is_others || has_option(self.request, volume, &["ro", "rro"]) {
            self.refused.push(refusal);
        } else if !self.user.opens_all() && !has_option(self.request, volume, &["idmap", "ridmap"])
        {
            self.ask(VolumeFile::changed(directory), refusal);
        }
    }

    /// Returns true for a file that another user has in a directory like `/tmp`.
    fn is_others(&self, directory: &OwnedFd, name: &std::ffi::OsStr) -> bool {
        let file = open_in_root(
            directory,
            Path::new(name),
            OFlag::O_PATH | OFlag::O_NOFOLLOW,
        );
        let meta = |fd: &OwnedFd| File::from(fd.try_clone().ok()?).metadata().ok();
        let both = file.ok().and_then(|file| meta(directory).zip(meta(&file)));
        both.is_some_and(|(directory, file)| !self.user.may_remove(&directory, &file))
    }

    /// Returns the volume to which a path of the container leads, and the rest of the path in it. The files of a tmpfs are
    /// in the images: a path of these must not lead through a link there (`image_check::mounts`).
    fn locate(&self, path: &Path) -> Option<(&'a MountDestination, PathBuf)> {
        let at = self.resolve(path)?;
        let (mount, rest) = innermost(self.request, &at)?;
        is_volume(self.request, mount).then_some((mount, rest))
    }

    /// Returns true if there is something at this path, or a mount.
    fn exists(&self, path: &Path) -> bool {
        let Some(at) = self.resolve(path) else {
            return true;
        };
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        match innermost(self.request, &at) {
            Some((_, rest)) if rest.as_os_str().is_empty() => true,
            Some((mount, rest)) => open_in(self.request, mount, &rest).is_some(),
            None => self
                .root()
                .is_some_and(|root| open_in_root(root, &at, flags).is_ok()),
        }
    }

    fn root(&self) -> Option<File> {
        let root = self.request.spec.json().pointer("/root/path")?.as_str()?;
        open_path(&self.request.bundle.join(root)).ok()
    }

    /// Follows the links of a path of the container.
    fn resolve(&self, path: &Path) -> Option<PathBuf> {
        let mut left: VecDeque<PathBuf> = parts(path).collect();
        let (mut at, mut links) = (PathBuf::from("/"), 0);
        while let Some(part) = left.pop_front() {
            if part == Path::new("..") {
                at.pop();
                continue;
            }
            let next = at.join(part);
            match self.link_at(&next) {
                None => at = next,
                Some(_) if links == MAX_LINKS => return None,
                Some(target) => {
                    links += 1;
                    if target.is_absolute() {
                        at = "/".into();
                    }
                    for part in parts(&target).collect::<Vec<_>>().into_iter().rev() {
                        left.push_front(part);
                    }
                }
            }
        }
        Some(at)
    }

    /// Reads a link of the container, whose directory leads through none.
    fn link_at(&self, path: &Path) -> Option<PathBuf> {
        let request = self.request;
        let (above, rest) = match innermost(request, path) {
            Some((mount, rest)) => {
                let source = mount.source.as_ref().filter(|_| mount.bind)?;
                (open_path(&request.bundle.join(source)).ok()?, rest)
            }
            None => (self.root()?, path.to_owned()),
        };
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let link = open_in_root(above, &rest, flags).ok()?;
        // Of what is no link: an error.
        readlinkat(link, "").ok().map(PathBuf::from)
    }

    /// Returns the volume in which an open file lies, and what names the file there: mount, device and inode.
    fn volume_of(
        &self,
        mounts: &BTreeMap<u64, Mount>,
        file: &File,
    ) -> Option<(&'a MountDestination, [u64; 3])> {
        let found = statx(
            file,
            c"",
            AtFlags::EMPTY_PATH,
            StatxFlags::MNT_ID | StatxFlags::INO,
        )
        .ok()?;
        let mount = mounts.get(&found.stx_mnt_id)?;
        let (volume, _) = innermost(self.request, &mount.point)?;
        let device = libc::makedev(found.stx_dev_major, found.stx_dev_minor);
        let identity = [found.stx_mnt_id, device, found.stx_ino];
        is_volume(self.request, volume).then_some((volume, identity))
    }
}

fn is_out_of_descriptors(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

fn not_asked(link: &Path, e: &io::Error) -> Refusal {
    Refusal::new(
        format!(
            "{}: whether the spec's user may open it is not known: {e}",
            link.display()
        ),
        "give the engine more descriptors (systemd: LimitNOFILE=)",
    )
}

/// Returns the device nodes that every container may have, and those of the spec.
pub fn devices(request: &Request<'_>) -> impl Iterator<Item = (u32, u32)> {
    let of_spec = request.spec.devices().into_iter();
    let of_spec = of_spec.filter_map(|d| {
        let number = |n: i64| u32::try_from(n).ok();
        Some((number(d.major())?, number(d.minor())?))
    });
    EVERYBODYS.into_iter().chain(of_spec)
}

fn parts(path: &Path) -> impl Iterator<Item = PathBuf> {
    let parts = path.components();
    let parts = parts.filter(|c| matches!(c, Component::Normal(_) | Component::ParentDir));
    parts.map(|c| PathBuf::from(c.as_os_str()))
}

/// Returns the spec's mount that shows a path, and the rest of the path in it.
fn innermost<'a>(request: &'a Request<'_>, path: &Path) -> Option<(&'a MountDestination, PathBuf)> {
    let above = request.mounts.0.iter();
    let above = above.filter_map(|d| Some((d, path.strip_prefix(&d.path).ok()?.to_owned())));
    above.min_by_key(|(_, rest)| rest.components().count())
}

/// Returns true if the mount shows the host's files. Those of the container's own `/dev/shm` are in the checkpoint.
fn is_volume(request: &Request<'_>, mount: &MountDestination) -> bool {
    let is_shm = mount.path == Path::new(SHM);
    mount.bind && !(is_shm && own_shm(&request.mounts, &request.bundle).is_some())
}

fn open_in<'a>(
    request: &Request<'_>,
    volume: &'a MountDestination,
    rest: &Path,
) -> Option<(&'a MountDestination, OwnedFd)> {
    let source = open_path(&request.bundle.join(volume.source.as_ref()?)).ok()?;
    if rest.as_os_str().is_empty() {
        return Some((volume, source.into()));
    }
    Some((volume, open_in_root(source, rest, OFlag::O_PATH).ok()?))
}

fn has_option(request: &Request<'_>, volume: &MountDestination, wanted: &[&str]) -> bool {
    let mounts = request.spec.mounts();
    let options = mounts.iter().filter(|m| *m.destination() == volume.named);
    let mut options = options.filter_map(|m| m.options().as_ref()).flatten();
    options.any(|o| wanted.contains(&o.as_str()))
}

fn open_by_handle(on: &File, handle: &WatchedHandle) -> Option<File> {
    // The kernel takes no `O_PATH` here.
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
    let on = open_in_root(on, Path::new(""), flags).ok()?;
    // `struct file_handle`: the length, the kind, the bytes.
    let length = u32::try_from(handle.bytes.len()).ok()?;
    let mut buffer = [length.to_ne_bytes(), handle.kind.to_ne_bytes()].concat();
    buffer.extend(&handle.bytes);
    // SAFETY: the kernel reads the two numbers, and as many bytes as the first one says, which the buffer has.
    let fd = unsafe {
        let flags = libc::O_PATH | libc::O_CLOEXEC;
        libc::syscall(
            libc::SYS_open_by_handle_at,
            on.as_raw_fd(),
            buffer.as_ptr(),
            flags,
        )
    };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the kernel has just made the descriptor, and nobody else has it.
    Some(unsafe { File::from_raw_fd(fd) })
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries.flatten().map(|e| e.path())
}

fn shown(volume: &MountDestination) -> String {
    let source = volume.source.as_deref().unwrap_or(&volume.path);
    source.display().to_string()
}

fn open_path(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    // To open a FIFO or a device would do more.
    options.read(true).custom_flags(libc::O_PATH).open(path)
}

/// Returns with which flags an entry of `/proc/PID/fd` was opened.
fn flags_of(descriptor: &Path) -> Option<i32> {
    let number = descriptor.file_name()?;
    let info = descriptor.parent()?.with_file_name("fdinfo").join(number);
    let text = fs::read_to_string(info).ok()?;
    let flags = text.lines().find_map(|l| l.strip_prefix("flags:"))?;
    i32::from_str_radix(flags.trim(), 8).ok()
}

/// Returns with which flags the file behind an entry of `/proc/PID/map_files` was opened: the link's mode says so.
fn flags_of_mapped(link: &Path) -> i32 {
    let mode = fs::symlink_metadata(link).map_or(0, |m| m.mode());
    match mode & libc::S_IWUSR {
        0 => libc::O_RDONLY,
        _ => libc::O_RDWR,
    }
}
