//! Ends what a killed wrapper has left of a container that it was restoring, and thaws one that it was checkpointing.
//!
//! CRIU asks nobody after its last stages, and the container's processes would run, or stay frozen, with no runtime that
//! knows of them. So the operation's directory names the container's cgroups while they are filled. The next operation,
//! or a `delete`, finds the directory of a dead wrapper and kills its CRIU and what is in them.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_archive::format::names;
use cryopod_cuda::procfs;
use cryopod_host::cgroups::Cgroups;
use cryopod_host::files::read_bounded;
use cryopod_host::mountinfo;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::bundle::put_back;
use crate::error::Error;
use crate::request::Request;
use crate::request::state;
use crate::rootfs::frozen;
use crate::run::stuck_restore::criu_with;

const FILE: &str = "restoring";
const MAX_BYTES: u64 = 1 << 20;
/// This program's name, as the kernel cuts it.
const WRAPPER: &str = "cryopod-runtime";
/// How often processes are killed: CRIU may still be making some, and takes a moment to exit.
const ROUNDS: usize = 20;
const PAUSE: Duration = Duration::from_millis(100);
/// How long they may take to exit.
const EXIT_LIMIT: Duration = Duration::from_secs(5);

/// What a restore leaves behind if it is killed.
#[derive(Debug)]
pub struct RestoreNote {
    /// CRIU's log; in its directory CRIU mounts cgroups.
    log: PathBuf,
    /// The low-level runtime's directory of the container, where runc mounts the root for CRIU.
    state: PathBuf,
    bundle: PathBuf,
    cgroups: Cgroups,
}

impl RestoreNote {
    /// `cgroups`: those of the container, which have no processes yet.
    pub fn of(request: &Request<'_>, cgroups: Cgroups) -> Self {
        // As `/proc/PID/fd` and mountinfo show it.
        let real = |path: PathBuf| path.canonicalize().unwrap_or(path);
        let log = request.log(names::RESTORE_LOG);
        let directory = log.parent().map(Path::to_owned).unwrap_or_default();
        Self {
            log: real(directory).join(names::RESTORE_LOG),
            state: state::directory(request.ctx, request.inv),
            bundle: real(request.bundle.clone()),
            cgroups,
        }
    }

    /// Notes it in this directory of an operation.
    pub fn note(&self, operation: &Path) -> Result<(), Error> {
        let paths = [&*self.log, &*self.state, &*self.bundle].into_iter();
        let paths = paths.chain(self.cgroups.paths());
        let paths: Vec<&[u8]> = paths.map(|p| p.as_os_str().as_bytes()).collect();
        let file = operation.join(FILE);
        let what = format!("{}: cannot be written", file.display());
        // Whole or not at all: a path that is cut short names other cgroups.
        let partial = file.with_extension("partial");
        fs::write(&partial, paths.join(&0))
            .and_then(|()| fs::rename(&partial, &file))
            .map_err(Error::io(what))
    }

    /// The container is restored: nothing is to be ended any more.
    pub fn done(operation: &Path) {
        let _ = fs::remove_file(operation.join(FILE));
    }

    fn noted(directory: &Path) -> Option<Self> {
        let text = read_bounded(&directory.join(FILE), MAX_BYTES).ok()?;
        let paths = text.split(|b| *b == 0);
        let mut paths = paths.map(|p| Path::new(OsStr::from_bytes(p)).to_owned());
        Some(Self {
            log: paths.next()?,
            state: paths.next()?,
            bundle: paths.next()?,
            cgroups: Cgroups::named(paths),
        })
    }

    /// Kills a CRIU that nobody watches any more. It waits for ever for processes that were killed, or has yet to make some.
    pub fn end_criu(&self) {
        for _ in 0..ROUNDS {
            let mut criu = criu_with(&self.log);
            criu.retain(|pid| !is_watched(*pid));
            if criu.is_empty() {
                break;
            }
            for pid in criu {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Unmounts what a CRIU that was killed has left mounted in its work directory, and crun for it. Whoever removed the
    /// bundle would reach the host's cgroups through it. Does nothing while a CRIU writes its log there.
    pub fn unmount(&self) {
        if !criu_with(&self.log).is_empty() {
            return;
        }
        let root = self.bundle.join("criu-root");
        mountinfo::unmount_below(&root);
        // crun restores nothing where this directory exists.
        let _ = fs::remove_dir(&root);
        let work = self.log.parent().unwrap_or(&self.bundle);
        for entry in fs::read_dir(work).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name.as_bytes().starts_with(b".criu.") {
                mountinfo::unmount_below(&entry.path());
                let _ = fs::remove_dir(entry.path());
            }
        }
    }
}

/// Thaws the cgroup that a dead wrapper's directory names, and ends what else it names: its CRIU, the processes in the container's cgroups, and mounts.
pub fn end(directory: &Path) {
    frozen::thaw_noted(directory);
    let Some(left) = RestoreNote::noted(directory) else {
        return;
    };
    left.end_criu();
    for _ in 0..ROUNDS {
        if !left.cgroups.kill() {
            break;
        }
        tracing::warn!(
            "{}: a runtime was killed while it restored a container; its processes are killed",
            directory.display()
        );
        left.cgroups.paths().for_each(frozen::thaw);
        std::thread::sleep(PAUSE);
    }
    left.unmount();
    put_back(&left.bundle, directory);
    mountinfo::unmount_below(&left.state);
    for (cgroup, error) in left.cgroups.remove(EXIT_LIMIT) {
        tracing::warn!("the cgroup {}: left behind: {error}", cgroup.display());
    }
    RestoreNote::done(directory);
}

/// Returns true if the low-level runtime above this CRIU has a wrapper that lives.
fn is_watched(criu: i32) -> bool {
    let parent = |pid: i32| Some(procfs::stat(pid)?.parent);
    let wrapper = parent(criu).and_then(parent);
    wrapper.is_some_and(|pid| procfs::comm(pid) == WRAPPER)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn processes_of_a_dead_wrapper() {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = dir.path().join("c1");
        let cgroups = Cgroups::named([cgroup.clone(), dir.path().join("none")].into_iter());
        let restoring = RestoreNote {
            log: dir.path().join("work/restore.log"),
            state: dir.path().join("state"),
            bundle: dir.path().join("bundle"),
            cgroups,
        };
        restoring.note(dir.path()).unwrap();
        fs::create_dir(&cgroup).unwrap();
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        fs::write(cgroup.join("cgroup.procs"), child.id().to_string()).unwrap();
        fs::write(cgroup.join("cgroup.freeze"), "1").unwrap();
        // A directory is no cgroup: its files stay until the killed process is gone.
        end(dir.path());
        assert!(!child.wait().unwrap().success());
        assert_eq!(fs::read(cgroup.join("cgroup.freeze")).unwrap(), b"0");
        end(&dir.path().join("other"));
    }
}
