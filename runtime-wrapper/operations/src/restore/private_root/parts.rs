//! What the new root is made of: mounts, links and files of its own.

use std::collections::BTreeSet;
use std::fs::{self, File, Permissions};
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use cryopod_host::detached::Detached;
use cryopod_host::mountinfo;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl, open};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::Mode;

use cryopod_host::files::{Host, if_there};

use super::sharing;

use super::{EMPTY, SCRATCH};

const APPARMOR: &str = "/sys/kernel/security/apparmor";

/// What the new root is made of.
pub(super) struct Parts {
    pub(super) mounts: Vec<(PathBuf, Detached)>,
    /// Targets, and where the links are.
    pub(super) links: Vec<(PathBuf, PathBuf)>,
    pub(super) copies: Vec<(PathBuf, Vec<u8>)>,
    /// Directories that are to be empty.
    pub(super) covered: Vec<PathBuf>,
    /// The host's mount points.
    pub(super) host: Vec<PathBuf>,
    pub(super) empty: PathBuf,
    pub(super) scratch: PathBuf,
    pub(super) shows_whole: bool,
}

impl Parts {
    pub(super) fn new(operation: &Path) -> io::Result<Self> {
        let [empty, scratch] = [EMPTY, SCRATCH].map(|name| operation.join(name));
        for directory in [&empty, &scratch] {
            fs::create_dir_all(directory)?;
        }
        let none = None::<&str>;
        mount(
            Some("cryopod"),
            &scratch,
            Some("tmpfs"),
            MsFlags::empty(),
            none,
        )?;
        let host = mountinfo::of(&Host::system(), "self").into_iter();
        Ok(Self {
            mounts: Vec::new(),
            links: Vec::new(),
            copies: Vec::new(),
            covered: Vec::new(),
            host: host.map(|m| m.point).collect(),
            empty,
            scratch,
            shows_whole: false,
        })
    }

    /// Shows a file or directory with all that is mounted below it. Nothing where there is none: CRIU says so.
    pub(super) fn bind(&mut self, path: &Path) -> io::Result<()> {
        let mount = if_there(Detached::of(path, true)).map_err(at(path))?;
        self.mounts
            .extend(mount.map(|mount| (path.to_owned(), mount)));
        Ok(())
    }

    /// The same, read-only as long as nobody remounts it.
    pub(super) fn limited(&mut self, path: &Path) -> io::Result<()> {
        let mount = Detached::of(path, true).map_err(at(path))?;
        mount.set(libc::MOUNT_ATTR_RDONLY, 0).map_err(at(path))?;
        self.mounts.push((path.to_owned(), mount));
        Ok(())
    }

    /// Shows this program at a path. A package upgrade may have removed it since.
    pub(super) fn this_program(&mut self, path: PathBuf) -> io::Result<()> {
        let running = Path::new("/proc/self/exe");
        let id = |path: &Path| fs::metadata(path).map(|m| (m.dev(), m.ino()));
        let file = fs::read_link(running)?;
        if id(&file).ok() == id(running).ok() {
            let mount = Detached::of(&file, false).map_err(at(&file))?;
            mount.set(libc::MOUNT_ATTR_RDONLY, 0).map_err(at(&file))?;
            self.mounts.push((path, mount));
        } else {
            self.copies.push((path, fs::read(running)?));
        }
        Ok(())
    }

    /// Shows a directory read-only for good, with the directories that are mounted below it. Where no overlay can be made
    /// (of an overlay that lies on two others), it is a read-only mount.
    pub(super) fn read_only(&mut self, path: &Path) -> io::Result<()> {
        if let Ok(target) = fs::read_link(path) {
            self.links.push((target, path.to_owned()));
            return Ok(());
        }
        if !path.is_dir() {
            return Ok(());
        }
        let below = self
            .host
            .iter()
            .filter(|p| p.starts_with(path) && *p != path);
        let all: BTreeSet<PathBuf> = below.cloned().chain([path.to_owned()]).collect();
        for directory in all {
            match directory.is_dir().then(|| self.overlay(&directory, None)) {
                Some(Ok(mount)) => self.mounts.push((directory, mount)),
                _ => self.limited(&directory)?,
            }
        }
        Ok(())
    }

    /// Shows a directory; what is written to it goes nowhere.
    pub(super) fn private(&mut self, path: &Path) -> io::Result<()> {
        let upper = self.scratch.join("upper");
        fs::create_dir(&upper)?;
        let mount = self.overlay(path, Some(&upper)).map_err(at(path))?;
        self.mounts.push((path.to_owned(), mount));
        Ok(())
    }

    pub(super) fn overlay(&self, lower: &Path, upper: Option<&Path>) -> io::Result<Detached> {
        // By descriptor: the kernel takes 255 characters.
        let opened = |path: &Path| open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty());
        let name = |fd: &OwnedFd| format!("/proc/self/fd/{}", fd.as_raw_fd());
        let lower = opened(lower)?;
        let Some(upper) = upper else {
            let empty = opened(&self.empty)?;
            let layers = format!("{}:{}", name(&lower), name(&empty));
            return Detached::new(c"overlay", &[(c"lowerdir", &layers)]);
        };
        let work = self.scratch.join("work");
        fs::create_dir(&work)?;
        let (upper, work) = (opened(upper)?, opened(&work)?);
        Detached::new(
            c"overlay",
            &[
                (c"lowerdir", &name(&lower)),
                (c"upperdir", &name(&upper)),
                (c"workdir", &name(&work)),
            ],
        )
    }

    pub(super) fn tmpfs(&mut self, path: &str) -> io::Result<()> {
        let mount = Detached::new(c"tmpfs", &[(c"mode", "1777")])?;
        self.mounts.push((path.into(), mount));
        Ok(())
    }

    /// `/sys`, and what CRIU reads of AppArmor.
    pub(super) fn sysfs(&mut self) -> io::Result<()> {
        let sys = Path::new("/sys");
        let mount = Detached::of(sys, false).map_err(at(sys))?;
        mount.set(libc::MOUNT_ATTR_RDONLY, 0)?;
        self.mounts.push((sys.into(), mount));
        // GPU topologies that something else is mounted over.
        let devices = |p: &&PathBuf| p.starts_with("/sys/devices") || p.starts_with("/sys/class");
        for path in self
            .host
            .iter()
            .filter(devices)
            .cloned()
            .collect::<Vec<_>>()
        {
            self.limited(&path)?;
        }
        self.tmpfs("/sys/fs/cgroup")?;
        if Path::new(APPARMOR).is_dir() {
            self.tmpfs("/sys/kernel/security")?;
            self.copy(Path::new(APPARMOR).join("features"))?;
        }
        Ok(())
    }

    /// Shows what is mounted below `/proc` and `/sys` and has a source in it.
    pub(super) fn below_kernels_own(&mut self, sources: &BTreeSet<PathBuf>) -> io::Result<()> {
        let own = |p: &&PathBuf| {
            ["/proc", "/sys"]
                .iter()
                .any(|d| p.starts_with(d) && *p != Path::new(d))
        };
        let used = |p: &&PathBuf| sources.iter().any(|s| s.starts_with(p) && s != *p);
        let mounts: Vec<PathBuf> = self.host.iter().filter(own).filter(used).cloned().collect();
        mounts.iter().try_for_each(|path| self.limited(path))
    }

    /// What the images need beside their files.
    ///
    /// A mount namespace of a user namespace may mount a new `/proc` or `/sys` only where a whole one can be seen. They
    /// get a name that no image can guess.
    pub(super) fn image_directory(&mut self, images: &Path) -> io::Result<()> {
        for entry in fs::read_dir(images)?.flatten() {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            if name.starts_with("userns-") && !self.shows_whole {
                let mut random = [0; 16];
                File::open("/dev/urandom")?.read_exact(&mut random)?;
                let hidden = format!("/{:032x}", u128::from_ne_bytes(random));
                for path in ["/proc", "/sys"] {
                    let mount =
                        Detached::of(Path::new(path), false).map_err(at(Path::new(path)))?;
                    self.mounts.push((format!("{hidden}{path}").into(), mount));
                }
                self.shows_whole = true;
            }
            if name.starts_with("mountpoints-")
                && let Some(changed) = sharing::apart(&name, &fs::read(entry.path())?)
            {
                let file = self.scratch.join(&*name);
                fs::write(&file, changed)?;
                let mount = Detached::of(&file, false).map_err(at(&file))?;
                self.mounts.push((images.join(&*name), mount));
            }
        }
        Ok(())
    }

    /// Copies a small directory of the kernel's.
    pub(super) fn copy(&mut self, path: PathBuf) -> io::Result<()> {
        if !path.is_dir() {
            let content = fs::read(&path).unwrap_or_default();
            self.copies.push((path, content));
            return Ok(());
        }
        for entry in fs::read_dir(&path)? {
            self.copy(entry?.path())?;
        }
        Ok(())
    }

    /// Attaches all in the new root, parents first.
    pub(super) fn attach(mut self) -> io::Result<()> {
        let depth = |path: &Path| path.components().count();
        self.mounts.sort_by_key(|(path, _)| depth(path));
        // Paths lead through the links at the top.
        let (top, deep) = self
            .links
            .into_iter()
            .partition::<Vec<_>, _>(|(_, at)| depth(at) == 2);
        for (target, path) in top {
            symlink(target, &path).map_err(at(&path))?;
        }
        for (path, mount) in self.mounts {
            let attached = place(&path, &mount).and_then(|place| mount.attach(place.as_fd()));
            match attached {
                // A process has ended meanwhile.
                Err(e) if path.starts_with("/proc") && e.kind() == io::ErrorKind::NotFound => {}
                other => other.map_err(at(&path))?,
            }
        }
        // There may be thousands: one call each.
        fs::create_dir("/empty")?;
        let none = None::<&str>;
        for path in self.covered {
            match mount(Some("/empty"), &path, none, MsFlags::MS_BIND, none) {
                Err(Errno::ENOENT | Errno::ESRCH) => {}
                other => other.map_err(|e| at(&path)(e.into()))?,
            }
        }
        for (target, path) in deep {
            directory(path.parent())?;
            match symlink(target, &path) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(at(&path)(e)),
                _ => {}
            }
        }
        for (path, content) in self.copies {
            directory(path.parent())?;
            fs::write(&path, content).map_err(at(&path))?;
            fs::set_permissions(&path, Permissions::from_mode(0o755)).map_err(at(&path))?;
        }
        Ok(())
    }
}

pub(super) fn at(path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    let path = path.display().to_string();
    move |e| io::Error::new(e.kind(), format!("{path}: {e}"))
}

pub(super) fn directory(path: Option<&Path>) -> io::Result<()> {
    let Some(path) = path else { return Ok(()) };
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(path)
        .map_err(at(path))
}

/// The place for a mount, made if need be.
pub(super) fn place(path: &Path, mount: &Detached) -> io::Result<OwnedFd> {
    if !path.exists() {
        match mount.is_directory()? {
            true => directory(Some(path))?,
            false => {
                directory(path.parent())?;
                File::create(path)?;
            }
        }
    }
    Ok(open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?)
}

/// No descriptor of a directory goes to CRIU: from it `..` leads to the host.
pub(super) fn close_directories() -> io::Result<()> {
    for entry in fs::read_dir("/proc/self/fd")?.flatten() {
        let name = entry.file_name();
        let Some(fd) = name.to_str().and_then(|n| n.parse::<RawFd>().ok()) else {
            continue;
        };
        if fs::metadata(entry.path()).is_ok_and(|m| m.is_dir()) {
            // SAFETY: the descriptor is open, and only looked at.
            let fd = unsafe { BorrowedFd::borrow_raw(fd) };
            fcntl(fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
        }
    }
    Ok(())
}
