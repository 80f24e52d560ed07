//! What a restore that failed has left of a container: processes that CRIU had restored, and the runtime's folder.
//!
//! A runtime or a CRIU that is killed, as containerd's death has the stock shim kill the runtime, cleans nothing up: the
//! restored processes run on in a container that was never started, and the root that runc mounts for CRIU in its
//! folder of the container keeps `runc delete` from removing it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::{criu, limited, restore};

/// How long one `delete --force` may take.
const DELETE: Duration = Duration::from_secs(10);
/// How often it is tried: the last processes of a killed runtime end one after the other.
const TRIES: u32 = 5;
/// Folders of cgroups below one that are looked at; a container can make as many as it likes.
const MAX_BELOW: usize = 10_000;
const PAUSE: Duration = Duration::from_millis(200);

/// The low-level runtime's place of a container.
#[derive(Debug, Clone)]
pub struct Place {
    /// The runtime.
    pub runtime: PathBuf,
    /// Where it keeps the containers of this namespace of containerd's.
    pub root: PathBuf,
    /// The container's name there.
    pub id: String,
    /// Its cgroups, of those that nobody was in before: whatever is in them is the container's.
    pub cgroups: Vec<PathBuf>,
    /// Where CRIU works on it: [`criu::folders`].
    pub criu: Vec<PathBuf>,
}

impl Place {
    /// The runtime's folder of the container.
    pub fn folder(&self) -> PathBuf {
        self.root.join(&self.id)
    }

    /// Ends whatever is there.
    pub fn end(&self) {
        if self.id.is_empty() {
            return;
        }
        self.end_processes();
        remove(&self.cgroups);
    }

    fn end_processes(&self) {
        let folder = self.folder();
        for _ in 0..TRIES {
            let killed = kill_all(&self.cgroups);
            // It would keep what was killed, and that the runtime.
            let ended = criu::end(&self.criu);
            if !killed && !ended && !folder.is_dir() {
                return;
            }
            restore::unmount_below(&folder);
            let mut command = Command::new(&self.runtime);
            command.arg("--root").arg(&self.root);
            command
                .args(["delete", "--force", &self.id])
                .stderr(Stdio::null());
            let _ = limited::run(&mut command, &[], DELETE);
            thread::sleep(PAUSE);
        }
        sweep(&folder);
    }
}

/// The cgroups of this name, in each hierarchy, that nobody is in. Most are not there yet; a runtime that was killed leaves
/// its own behind, empty.
pub fn vacant(cgroup: &Path) -> Vec<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let cgroups = mounts.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let kind = kind.split(' ').next()?;
        let point = Path::new(mount.split(' ').nth(4)?);
        // Those that CRIU mounts in its work folder are the same ones.
        let real = point.starts_with("/sys/fs/cgroup") && (kind == "cgroup" || kind == "cgroup2");
        real.then(|| point.join(cgroup))
    });
    cgroups
        .filter(|folder| !folder.exists() || below(folder).iter().all(|f| no_process(f)))
        .collect()
}

/// Removes cgroups that nobody is in.
pub fn remove(cgroups: &[PathBuf]) {
    for folder in cgroups.iter().flat_map(|c| below(c).into_iter().rev()) {
        let _ = fs::remove_dir(folder);
    }
}

/// One that cannot be read, as a cgroup of threads cannot, may have some.
fn no_process(cgroup: &Path) -> bool {
    fs::read_to_string(cgroup.join("cgroup.procs")).is_ok_and(|pids| pids.is_empty())
}

/// A cgroup and those in it, parents first.
fn below(path: &Path) -> Vec<PathBuf> {
    let mut folders = vec![path.to_owned()];
    let mut next = 0;
    while next < folders.len().min(MAX_BELOW) {
        let entries = fs::read_dir(&folders[next]).into_iter().flatten().flatten();
        let entries = entries.filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
        let found: Vec<PathBuf> = entries.map(|e| e.path()).collect();
        folders.extend(found);
        next += 1;
    }
    folders
}

/// Kills the processes in cgroups: CRIU, killed before the runtime knew of them, leaves them to nobody. `true` if there
/// were any.
fn kill_all(cgroups: &[PathBuf]) -> bool {
    let mut any = false;
    for folder in cgroups.iter().flat_map(|c| below(c)) {
        let pids = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        for pid in pids
            .lines()
            .filter_map(|l| l.parse().ok())
            .filter(|p| *p > 1)
        {
            any |= kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok();
        }
    }
    any
}

/// Removes a runtime's folder of a container that is none any more.
pub fn sweep(folder: &Path) {
    // With a state it is a container still, and the runtime's.
    if !folder.is_dir() || folder.join("state.json").exists() {
        return;
    }
    restore::unmount_below(folder);
    let _ = fs::remove_dir_all(folder);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_with_a_state_is_left_to_its_runtime() {
        let root = tempfile::tempdir().unwrap();
        let place = Place {
            runtime: "/bin/false".into(),
            root: root.path().into(),
            id: "c1".into(),
            cgroups: vec![root.path().join("cgroup")],
            criu: Vec::new(),
        };
        let mut victim = Command::new("sleep").arg("1000").spawn().unwrap();
        fs::create_dir(root.path().join("cgroup")).unwrap();
        let procs = root.path().join("cgroup/cgroup.procs");
        fs::write(&procs, format!("0\n{}\n", victim.id())).unwrap();
        assert!(!no_process(&place.cgroups[0]));
        assert!(kill_all(&place.cgroups));
        assert!(!victim.wait().unwrap().success());
        fs::write(&procs, "").unwrap();
        assert!(no_process(&place.cgroups[0]));
        fs::remove_file(procs).unwrap();
        fs::create_dir(root.path().join("cgroup/below")).unwrap();
        assert!(!no_process(&place.cgroups[0]));
        place.end();
        assert!(!root.path().join("cgroup").exists());
        fs::create_dir_all(place.folder().join("criu-root")).unwrap();
        fs::write(place.folder().join("state.json"), "{}").unwrap();
        sweep(&place.folder());
        assert!(place.folder().exists());
        fs::remove_file(place.folder().join("state.json")).unwrap();
        place.end();
        assert!(!place.folder().exists());
        let none = Place {
            id: String::new(),
            ..place
        };
        none.end();
        assert!(root.path().exists());
    }
}
