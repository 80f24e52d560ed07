//! Refuses what CRIU would open, make or remove as root in a container's volumes, and the spec's user could not; and device
//! nodes there that the spec does not give.
//!
//! What CRIU makes or removes is asked before it starts, by the paths in its images. What it opens is asked of the restored
//! processes, before they run: the kernel has followed links and mounts. A checkpoint asks the same of the running ones.

use std::collections::{BTreeSet, VecDeque};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::destinations::MountDestination;
use cryopod_host::files::open_in_root;
use cryopod_host::mountinfo::{self, Mount};
use cryopod_host::processes::maps;
use nix::fcntl::{OFlag, readlinkat};
use rustix::fs::{AtFlags, StatxFlags, statx};

use crate::request::Request;
use crate::rootfs::{SHM, own_shm};
use crate::security::image_check::opened::ReachedPaths;
use crate::security::openable::{SpecUser, VolumeFile};

/// What links of `/proc/PID/fd` have behind the path of a deleted file.
const DELETED: &str = " (deleted)";
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

    /// Asks for what CRIU makes, removes or watches by its path.
    pub fn ask_paths(&mut self, reached: &ReachedPaths) {
        for path in &reached.watched {
            let found = self.locate(path);
            if let Some((volume, file)) =
                found.and_then(|(volume, rest)| open_in(self.request, volume, &rest))
            {
                self.ask_open(path, volume, file, libc::O_RDONLY, false);
            }
        }
        let made = reached.made.iter().map(|path| Path::new("/").join(path));
        for path in made.chain(reached.bound.iter().cloned()) {
            self.ask_make(&path);
        }
    }

    /// Asks for what these processes have open. `init` has the container's mounts. `devices`: nodes that the container may
    /// have besides those that its rules allow; `None`: they are not asked for.
    pub fn ask_opened(&mut self, init: i32, pids: &[i32], devices: Option<&[(u32, u32)]>) {
        let host = &self.request.host;
        let has_volumes = self.request.mounts.0.iter().any(|mount| mount.bind);
        if !has_volumes || devices.is_none() && self.user.opens_all() {
            return;
        }
        let mounts = mountinfo::of(host, &init.to_string());
        let mut seen = BTreeSet::new();
        for pid in pids {
            let process = host.path(format!("/proc/{pid}"));
            let descriptors = entries(&process.join("fd"));
            let descriptors = descriptors.filter_map(|d| Some((flags_of(&d)?, false, d)));
            let mapped = entries(&process.join("map_files"));
            let mapped = mapped.map(|m| (flags_of_mapped(&m), true, m));
            let others = ["cwd", "exe"].map(|name| (libc::O_RDONLY, true, process.join(name)));
            for (flags, is_mapped, link) in descriptors.chain(mapped).chain(others) {
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
                    && let (Some(devices), Ok(meta)) = (devices, file.metadata())
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
                devices.contains(&(major, minor)) || spec.allows(major.into(), minor.into())
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
        if is_others || is_read_only(self.request, volume) {
            self.refused.push(refusal);
        } else if !self.user.opens_all() {
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
        let (mount, rest) = innermost(self.request, &at)?;
        is_volume(self.request, mount).then_some((mount, rest))
    }

    /// Reads a link of the container, whose directory leads through none.
    fn link_at(&self, path: &Path) -> Option<PathBuf> {
        let request = self.request;
        let (source, rest) = match innermost(request, path) {
            Some((mount, rest)) => (mount.source.clone().filter(|_| mount.bind)?, rest),
            None => {
                let root = request.spec.json().pointer("/root/path");
                (root?.as_str()?.into(), path.to_owned())
            }
        };
        let above = open_path(&request.bundle.join(source)).ok()?;
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        let link = open_in_root(above, &rest, flags).ok()?;
        // Of what is no link: an error.
        readlinkat(link, "").ok().map(PathBuf::from)
    }

    /// Returns the volume in which an open file lies, and what names the file there: mount, device and inode.
    fn volume_of(&self, mounts: &[Mount], file: &File) -> Option<(&'a MountDestination, [u64; 3])> {
        let found = statx(
            file,
            c"",
            AtFlags::EMPTY_PATH,
            StatxFlags::MNT_ID | StatxFlags::INO,
        )
        .ok()?;
        let mount = mounts.iter().find(|m| m.id == found.stx_mnt_id)?;
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

fn is_read_only(request: &Request<'_>, volume: &MountDestination) -> bool {
    let mounts = request.spec.mounts();
    let options = mounts.iter().filter(|m| *m.destination() == volume.named);
    let mut options = options.filter_map(|m| m.options().as_ref()).flatten();
    options.any(|o| matches!(o.as_str(), "ro" | "rro"))
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
