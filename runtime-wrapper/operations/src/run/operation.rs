//! Makes and removes the private directory of one operation, `/run/cryopod/PID-STARTTIME`.
//!
//! It holds the CRIU plugins of this operation and no others, CRIU's configuration, the sockets of the action script
//! and of the driver agent. Its name identifies the process that owns it, so that the next operation can recognize and
//! remove the directory of a killed wrapper.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use cryopod_archive::container::surroundings::MountKind;
use cryopod_gpu_plan::live;
use cryopod_gpu_plan::mounts::Provided;
use cryopod_host::files::{Host, if_there};
use cryopod_host::processes::id_map::IdMap;
use cryopod_host::spec::Spec;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statvfs::FsFlags;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::error::Error;
use crate::run::abandoned;

/// Parent of these directories, unless `CRYOPOD_RUN_DIR` names another.
pub const BASE: &str = "/run/cryopod";

/// Where an operation's directory shows the files that are mounted into the container.
pub const SHOWN: &str = "mounts";
/// What CRIU's plugin writes for the wrapper, and the wrapper for a plugin that is at work.
pub const EXCHANGE: &str = "exchange";

/// Returns the parent of all operations' directories.
pub fn base() -> PathBuf {
    std::env::var_os("CRYOPOD_RUN_DIR").map_or_else(|| BASE.into(), PathBuf::from)
}

/// Lets the root of a container in a user namespace, whose processes CRIU has open images and mounts, enter a directory of
/// an operation; nobody else.
pub fn open_to_container(directory: &Path, spec: &Spec) -> io::Result<()> {
    let mut mode = fs::metadata(directory)?.permissions().mode();
    match container_group(spec) {
        Some(group) => {
            chown(directory, None, Some(group))?;
            mode |= 0o010;
        }
        None => mode |= 0o001,
    }
    fs::set_permissions(directory, Permissions::from_mode(mode))
}

/// Returns the group of the container's root, as this process sees it. `None`: a user namespace that is given by path does
/// not tell.
fn container_group(spec: &Spec) -> Option<u32> {
    let namespaces = spec.json().pointer("/linux/namespaces");
    let mut namespaces = namespaces.and_then(Value::as_array).into_iter().flatten();
    match namespaces.find(|n| n.get("type").is_some_and(|t| t == "user")) {
        None => Some(nix::unistd::getegid().as_raw()),
        Some(_) => {
            let group = IdMap::of_spec(spec.json(), "gidMappings").outside(0)?;
            group.try_into().ok()
        }
    }
}

/// Removes the directories of dead processes, and what these have left of containers.
pub fn sweep_dead() {
    let base = base();
    if ours(&base).is_ok() {
        sweep(&base, &Host::system());
    }
}

/// The directory of one operation. Dropped, it is removed.
#[derive(Debug)]
pub struct Operation {
    dir: PathBuf,
    /// The container's [`BundleLock`](crate::bundle::lock::BundleLock), for the driver agent.
    pub lock_of_agent: Option<OwnedFd>,
}

impl Operation {
    /// Makes the directory for this process, and removes those of dead processes.
    pub fn new() -> Result<Self, Error> {
        Self::below(&base(), &Host::system())
    }

    pub(crate) fn below(base: &Path, host: &Host) -> Result<Self, Error> {
        let made = |p: &Path| format!("{}: cannot make the operation's directory", p.display());
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(base)
            .map_err(Error::io(made(base)))?;
        ours(base)?;
        sweep(base, host);
        let pid = i32::try_from(std::process::id()).unwrap_or(0);
        let start = live::start_time(host, pid).unwrap_or(0);
        let op = Self {
            dir: base.join(format!("{pid}-{start}")),
            lock_of_agent: None,
        };
        DirBuilder::new()
            .mode(0o700)
            .create(&op.dir)
            .map_err(Error::io(made(&op.dir)))?;
        op.subdirectory("plugins")?;
        op.subdirectory(EXCHANGE)?;
        Ok(op)
    }

    fn subdirectory(&self, name: &str) -> Result<(), Error> {
        let path = self.dir.join(name);
        let what = format!("{}: cannot make it", path.display());
        DirBuilder::new()
            .mode(0o700)
            .create(path)
            .map_err(Error::io(what))
    }

    /// Returns its path.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the path of a file in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Writes a value for the operation's hooks, which [`noted`] reads.
    pub fn note(&self, name: &str, value: &impl Serialize) -> Result<(), Error> {
        let file = self.file(name);
        let text = serde_json::to_vec(value).map_err(|e| Error::Failed(e.to_string()))?;
        let what = format!("{}: cannot be written", file.display());
        fs::write(file, text).map_err(Error::io(what))
    }

    /// Returns the directory from which CRIU loads its plugins.
    pub fn plugins(&self) -> PathBuf {
        self.dir.join("plugins")
    }

    /// Bind-mounts the target of an O_PATH descriptor at a path of its own in the directory, until the directory is
    /// removed.
    pub fn show(&self, provided: &Provided) -> Result<PathBuf, Error> {
        let path = self.place(provided.kind)?;
        let (opened, none) = (provided.opened.as_fd(), None::<&str>);
        self.bind(opened, &path)?;
        if provided.read_only {
            let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
            let what = format!("{}: cannot be made read-only", path.display());
            mount(none, &path, none, flags | kept(opened), none)
                .map_err(|e| Error::io(what)(e.into()))?;
        }
        Ok(path)
    }

    /// Makes an empty file or directory to mount something at. What is there is unmounted when the directory is removed.
    pub fn place(&self, kind: MountKind) -> Result<PathBuf, Error> {
        let directory = self.dir.join(SHOWN);
        let what = format!("{}: a mount cannot be made below it", directory.display());
        let made = || -> io::Result<PathBuf> {
            match DirBuilder::new().mode(0o700).create(&directory) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            }
            let path = directory.join(fs::read_dir(&directory)?.count().to_string());
            match kind {
                MountKind::Directory => DirBuilder::new().mode(0o700).create(&path)?,
                _ => drop(fs::File::create_new(&path)?),
            }
            Ok(path)
        };
        made().map_err(Error::io(what))
    }

    /// Bind-mounts the target of a descriptor at such a place.
    pub fn bind(&self, opened: BorrowedFd<'_>, place: &Path) -> Result<(), Error> {
        let none = None::<&str>;
        let from = format!("/proc/self/fd/{}", opened.as_raw_fd());
        mount(Some(from.as_str()), place, none, MsFlags::MS_BIND, none)
            .map_err(|e| Error::at(place, "cannot mount anything there")(e.into()))
    }

    /// Links a plugin into the directory under its own file name; CRIU skips names that do not end in `.so`.
    pub fn link_plugin(&self, plugin: &Path) -> Result<(), Error> {
        let mut name = plugin.file_name().unwrap_or_default().to_owned();
        if !name.as_encoded_bytes().ends_with(b".so") {
            name.push(".so");
        }
        let link = self.plugins().join(name);
        symlink(plugin, &link).map_err(Error::at(&link, "cannot link the plugin"))
    }
}

/// Reads what the operation in this directory has noted under this name, if anything.
pub fn noted<T: DeserializeOwned>(directory: &Path, name: &str) -> Option<T> {
    let text = fs::read(directory.join(name)).ok()?;
    serde_json::from_slice(&text).ok()
}

/// CRIU loads plugins from below this directory: nobody else may write there.
fn ours(base: &Path) -> Result<(), Error> {
    let meta = fs::symlink_metadata(base).map_err(Error::at(base, "cannot be read"))?;
    let user = nix::unistd::geteuid().as_raw();
    let why = if !meta.is_dir() {
        "it is no directory".to_owned()
    } else if meta.uid() != user {
        format!("it belongs to user {}, and this is user {user}", meta.uid())
    } else if meta.mode() & 0o022 != 0 {
        format!("others may write to it (mode {:o})", meta.mode() & 0o7777)
    } else {
        return Ok(());
    };
    Err(Error::untouched(format!(
        "{}: not used for CRIU's plugins: {why}; remove it, it is made anew",
        base.display()
    )))
}

/// The flags of a mount that a bind mount of it must keep.
fn kept(opened: BorrowedFd<'_>) -> MsFlags {
    let flags = nix::sys::statvfs::fstatvfs(opened).map(|s| s.flags());
    let flags = flags.unwrap_or(FsFlags::empty());
    let mut kept = MsFlags::empty();
    for (has, set) in [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ] {
        if flags.contains(has) {
            kept |= set;
        }
    }
    kept
}

/// Removes an operation's directory, and nothing that is mounted in it.
fn remove(dir: &Path) -> io::Result<()> {
    let shown = dir.join(SHOWN);
    if let Ok(entries) = fs::read_dir(&shown) {
        for entry in entries {
            match umount2(
                &entry?.path(),
                MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW,
            ) {
                Ok(()) | Err(Errno::EINVAL) => {} // EINVAL: nothing is mounted there
                Err(e) => return Err(e.into()),
            }
        }
        // Not recursive: should anything still be mounted, nothing in it is touched.
        for entry in fs::read_dir(&shown)? {
            let path = entry?.path();
            match path.symlink_metadata()?.is_dir() {
                true => fs::remove_dir(&path)?,
                false => fs::remove_file(&path)?,
            }
        }
        fs::remove_dir(&shown)?;
    }
    fs::remove_dir_all(dir)
}

impl Drop for Operation {
    fn drop(&mut self) {
        if let Err(e) = remove(&self.dir) {
            tracing::warn!("{}: left behind: {e}", self.dir.display());
        }
    }
}

/// Removes the directories of dead processes. Best effort: another wrapper may do so at the same time.
fn sweep(base: &Path, host: &Host) {
    let Ok(entries) = fs::read_dir(base) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some((pid, start)) = name.to_str().and_then(owner) else {
            continue;
        };
        if live::start_time(host, pid) == Some(start) {
            continue;
        }
        // Another process may be at it. What it is to end may exist anew once that one is done.
        let held = fs::File::open(entry.path()).ok();
        let held = held.and_then(|d| Flock::lock(d, FlockArg::LockExclusiveNonblock).ok());
        if held.is_none() {
            continue;
        }
        abandoned::end(&entry.path());
        if let Err(e) = if_there(remove(&entry.path())) {
            tracing::warn!("{}: cannot be removed: {e}", entry.path().display());
        }
    }
}

fn owner(name: &str) -> Option<(i32, u64)> {
    let (pid, start) = name.split_once('-')?;
    Some((pid.parse().ok()?, start.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn made_swept_removed() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("run");
        fs::create_dir_all(base.join("999999999-1/plugins")).unwrap();
        fs::create_dir_all(base.join("notes")).unwrap();
        let host = Host::system();
        let op = Operation::below(&base, &host).unwrap();
        assert!(!base.join("999999999-1").exists() && base.join("notes").exists());
        op.link_plugin(Path::new("/x/y.so")).unwrap();
        op.link_plugin(Path::new("/x/z.so.2")).unwrap();
        assert!(op.plugins().join("z.so.2.so").is_symlink());
        assert_eq!(
            fs::read_link(op.plugins().join("y.so")).unwrap(),
            Path::new("/x/y.so")
        );
        sweep(&base, &host);
        assert!(op.dir().exists(), "its owner lives");
        drop(op);
        assert_eq!(fs::read_dir(&base).unwrap().count(), 1);
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_not_used() {
        use std::os::unix::fs::{PermissionsExt, chown};
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("run");
        let refused = |what: &str| {
            let error = Operation::below(&base, &Host::system()).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        };
        fs::create_dir(&base).unwrap();
        fs::set_permissions(&base, fs::Permissions::from_mode(0o1777)).unwrap();
        refused("mode 1777");
        fs::set_permissions(&base, fs::Permissions::from_mode(0o755)).unwrap();
        if nix::unistd::geteuid().is_root() {
            chown(&base, Some(4711), None).unwrap();
            refused("user 4711");
        }
        fs::remove_dir(&base).unwrap();
        symlink(dir.path(), &base).unwrap();
        refused("no directory");
    }

    /// Needs root and a mount namespace that can be changed, as the test bed and CI have.
    #[test]
    fn what_is_shown_is_read_only_and_survives_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().join("driver");
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("file"), "kept").unwrap();
        let op = Operation::below(&dir.path().join("run"), &Host::system()).unwrap();
        let provided = |path: &Path, kind| {
            use nix::fcntl::{OFlag, open};
            Provided {
                path: "/x".into(),
                source: path.into(),
                kind,
                opened: open(path, OFlag::O_PATH, nix::sys::stat::Mode::empty()).unwrap(),
                read_only: true,
                in_volume: true,
            }
        };
        let shown = match op.show(&provided(&directory, MountKind::Directory)) {
            Ok(shown) => shown,
            Err(e) => {
                eprintln!("skipped: no mounts can be made here: {e}");
                return;
            }
        };
        let file = op
            .show(&provided(&directory.join("file"), MountKind::File))
            .unwrap();
        assert_eq!(fs::read(shown.join("file")).unwrap(), b"kept");
        assert!(fs::write(shown.join("new"), "").is_err() && fs::write(&file, "").is_err());
        let left = op.dir().to_owned();
        drop(op);
        assert!(!left.exists());
        assert_eq!(fs::read(directory.join("file")).unwrap(), b"kept");
    }
}
