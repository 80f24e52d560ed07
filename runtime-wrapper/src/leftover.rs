//! Cgroups that a failed restore leaves behind: crun and CRIU make them before they fail, and no engine knows of them.

use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use cryopod_gpu_hooks::host::Host;
use cryopod_gpu_hooks::mountinfo;
use cryopod_gpu_hooks::spec::Spec;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Folders of cgroups below one that are removed; a container can make as many as it likes.
const MAX_BELOW: usize = 10_000;
/// How long the processes of a failed restore may take to be gone.
const PATIENCE: Duration = Duration::from_secs(5);

/// The container's cgroups that had no process before the restore. Most were not there; a runtime that was killed leaves its
/// own behind, empty.
#[derive(Debug, Default)]
pub struct Cgroups(Vec<PathBuf>);

impl Cgroups {
    /// To be asked before the restore.
    pub fn vacant(host: &Host, spec: &Spec, id: &str) -> Self {
        let path = spec.json().pointer("/linux/cgroupsPath");
        let path = path.and_then(|p| p.as_str()).filter(|p| !p.is_empty());
        // `slice:prefix:name` is systemd's, which removes it itself.
        let path = match path {
            Some(p) if p.contains(':') => return Self::default(),
            Some(p) => p.trim_start_matches('/'),
            None => id,
        };
        let plain = Path::new(path)
            .components()
            .all(|c| matches!(c, Component::Normal(_)));
        if !plain || path.is_empty() {
            return Self::default();
        }
        let mounts = mountinfo::of(host, "self").into_iter();
        let cgroups = mounts.filter(|m| m.fs_type == "cgroup" || m.fs_type == "cgroup2");
        let vacant = cgroups
            .map(|m| host.path(m.point.join(path)))
            .filter(|p| !p.exists() || below(p).iter().all(|f| no_process(f)));
        Self(vacant.collect())
    }

    /// Kills the processes in them: those of the failed restore, as nobody was in them before. CRIU, killed late,
    /// leaves a whole container running. `true` if there were any.
    pub fn kill(&self) -> bool {
        let mut any = false;
        for folder in self.0.iter().flat_map(|p| below(p)) {
            let pids = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
            for pid in pids.lines().filter_map(|l| l.parse().ok()) {
                // 0 is a process of another namespace of pids; it would be our own group.
                if pid > 1 {
                    any |= kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok();
                }
            }
        }
        any
    }

    /// Removes those that are there now.
    pub fn remove(&self) {
        let end = Instant::now() + PATIENCE;
        for path in self.0.iter().filter(|p| p.is_dir()) {
            for folder in below(path).iter().rev() {
                if let Err(e) = patiently(folder, end) {
                    tracing::warn!("the cgroup {}: left behind: {e}", folder.display());
                }
            }
        }
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
        let below = fs::read_dir(&folders[next]).into_iter().flatten().flatten();
        let below = below.filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
        let below: Vec<PathBuf> = below.map(|e| e.path()).collect();
        folders.extend(below);
        next += 1;
    }
    folders
}

/// The processes in it may still be on their way out.
fn patiently(folder: &Path, end: Instant) -> io::Result<()> {
    loop {
        match fs::remove_dir(folder) {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_what_was_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let make = |p: &str| fs::create_dir_all(dir.path().join(p)).unwrap();
        make("proc/self");
        make("sys/fs/cgroup/there");
        fs::write(
            dir.path().join("proc/self/mountinfo"),
            "30 20 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n31 20 0:50 / /mnt rw - tmpfs tmpfs rw\n",
        )
        .unwrap();
        let host = Host::at(dir.path());
        let spec = |path: &str| Spec::from_json(json!({"linux": {"cgroupsPath": path}}));
        make("sys/fs/cgroup/left/sub");
        make("sys/fs/cgroup/taken/sub");
        for (cgroup, pids) in [
            ("left", ""),
            ("left/sub", ""),
            ("taken", ""),
            ("taken/sub", "1\n"),
        ] {
            let file = dir.path().join("sys/fs/cgroup").join(cgroup);
            fs::write(file.join("cgroup.procs"), pids).unwrap();
        }
        let vacant = |path: &str| !Cgroups::vacant(&host, &spec(path), "c1").0.is_empty();
        assert!(vacant("/left") && !vacant("/taken"));
        let there = Cgroups::vacant(&host, &spec("/there"), "c1");
        let by_id = Cgroups::vacant(&host, &Spec::from_json(json!({})), "c1");
        let named = Cgroups::vacant(&host, &spec("/a/b"), "c1");
        make("sys/fs/cgroup/c1/sub");
        make("sys/fs/cgroup/a/b");
        let mut victim = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let procs = |p: &str| {
            dir.path()
                .join("sys/fs/cgroup")
                .join(p)
                .join("cgroup.procs")
        };
        let text = format!("0\n{}\n", victim.id());
        fs::write(procs("there"), &text).unwrap();
        fs::write(procs("c1/sub"), text).unwrap();
        assert!(!there.kill());
        assert_eq!(victim.try_wait().unwrap(), None);
        assert!(by_id.kill());
        assert!(!victim.wait().unwrap().success());
        assert!(!by_id.kill());
        fs::remove_file(procs("c1/sub")).unwrap();
        for cgroups in [&there, &by_id, &named] {
            cgroups.remove();
        }
        let is = |p: &str| dir.path().join("sys/fs/cgroup").join(p).is_dir();
        assert_eq!(
            ["there", "c1", "a/b", "a"].map(is),
            [true, false, false, true]
        );
        for odd in ["system.slice:crun:c1", "../x", "/"] {
            assert!(Cgroups::vacant(&host, &spec(odd), "").0.is_empty(), "{odd}");
        }
    }
}
