//! Detects the host's cgroup set-up; finds, kills and removes the cgroups of a container.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::files::Host;
use crate::mountinfo;

/// Cgroups below one that are examined; a container can make as many as it likes.
const MAX_BELOW: usize = 10_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    /// Version 1 controllers only.
    V1,
    /// The unified hierarchy only.
    V2,
    /// Version 1 controllers, and a unified hierarchy besides.
    Hybrid,
}

impl Setup {
    /// Returns what `cryopod.json` calls it.
    pub fn label(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
            Self::Hybrid => "hybrid",
        }
    }
}

/// Detects the set-up from the hierarchies that this process is in. A mount namespace can hide hierarchies, but CRIU
/// goes by `/proc/PID/cgroup`, and so does this.
pub fn setup(host: &Host) -> Setup {
    let text = host.text("/proc/self/cgroup").unwrap_or_default();
    let unified = text.lines().any(|l| l.starts_with("0::"));
    // "4:memory:/path"; named hierarchies without a controller ("1:name=systemd:/") do not count.
    let v1 = text.lines().any(|l| {
        let controllers = l.split(':').nth(1).unwrap_or("");
        !controllers.is_empty() && !controllers.starts_with("name=")
    });
    match (v1, unified) {
        (true, true) => Setup::Hybrid,
        (true, false) => Setup::V1,
        (false, _) => Setup::V2,
    }
}

/// Returns the version 1 hierarchies in which no runtime makes a cgroup, because `/sys/fs/cgroup` is the unified
/// hierarchy: each controller, and the cgroup that this process is in and hands on to its containers.
pub fn unmanaged_v1(host: &Host) -> Vec<(String, String)> {
    let mount = nix::sys::statfs::statfs(&host.path("/sys/fs/cgroup"));
    if !mount.is_ok_and(|m| m.filesystem_type() == nix::sys::statfs::CGROUP2_SUPER_MAGIC) {
        return Vec::new();
    }
    memberships_in_v1(&host.text("/proc/self/cgroup").unwrap_or_default())
}

fn memberships_in_v1(text: &str) -> Vec<(String, String)> {
    // "4:cpu,cpuacct:/path", "1:name=systemd:/path", "0::/path"
    text.lines()
        .filter_map(|line| line.split_once(':')?.1.split_once(':'))
        .flat_map(|(names, path)| names.split(',').map(move |name| (name, path)))
        .filter(|(name, _)| !name.is_empty())
        .map(|(name, path)| (name.to_owned(), path.to_owned()))
        .collect()
}

/// Returns true if the cgroup of a process is frozen or is being frozen. A process that is busy in the kernel stops last.
pub fn is_frozen(host: &Host, pid: i32) -> bool {
    let text = host.text(format!("/proc/{pid}/cgroup"));
    text.unwrap_or_default().lines().any(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(kind), Some(path)) = (parts.next(), parts.next()) else {
            return false;
        };
        let says = |file: String, what: &[&str]| {
            let text = host.text(file);
            text.is_ok_and(|text| text.lines().any(|line| what.contains(&line)))
        };
        match kind {
            "" => ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
                .iter()
                .any(|root| {
                    // The first is also true below a frozen cgroup; the second is true at once.
                    says(format!("{root}{path}/cgroup.events"), &["frozen 1"])
                        || says(format!("{root}{path}/cgroup.freeze"), &["1"])
                }),
            "freezer" => says(
                format!("/sys/fs/cgroup/freezer{path}/freezer.state"),
                &["FROZEN", "FREEZING"],
            ),
            _ => false,
        }
    })
}

/// Controllers of the unified hierarchy on a host where other controllers are version 1's (`hugetlb`); `None`: there
/// are none. With any crun starts no container: "cgroups in hybrid mode not supported, drop all controllers from
/// cgroupv2" (`libcrun_cgroup_enter`, which reads the same file).
pub fn beside_v1(host: &Host) -> Option<String> {
    if setup(host) != Setup::Hybrid {
        return None;
    }
    let controllers = host.line("/sys/fs/cgroup/unified/cgroup.controllers");
    controllers.filter(|c| !c.is_empty())
}

/// A container's cgroups, one in each hierarchy, that had no process when they were looked up: processes that are in
/// them later were started since. Most do not exist yet; a runtime that was killed leaves its own behind, empty.
#[derive(Debug, Clone, Default)]
pub struct Cgroups(Vec<PathBuf>);

impl Cgroups {
    /// Looks up the cgroups with this path below each hierarchy, as [`crate::spec::Spec::cgroup`] gives it.
    pub fn vacant(host: &Host, path: &Path) -> Self {
        let vacant = in_hierarchies(host, path);
        Self(
            vacant
                .filter(|p| !p.exists() || below(p).iter().all(|f| no_process(f)))
                .collect(),
        )
    }

    /// Looks up the cgroups with this path below each hierarchy that exist, whoever is in them.
    pub fn present(host: &Host, path: &Path) -> Self {
        Self(in_hierarchies(host, path).filter(|p| p.is_dir()).collect())
    }

    /// Returns one of these processes that is in one of the cgroups neither itself nor below, and this cgroup.
    pub fn outsider(&self, pids: &[i32]) -> Option<(i32, &Path)> {
        self.paths().find_map(|cgroup| {
            let members = below(cgroup).into_iter().flat_map(|d| processes(&d));
            let members: BTreeSet<i32> = members.collect();
            let outsider = pids.iter().find(|pid| !members.contains(pid))?;
            Some((*outsider, cgroup))
        })
    }

    /// These, which had no process when they were looked up.
    pub fn named(paths: impl Iterator<Item = PathBuf>) -> Self {
        Self(paths.collect())
    }

    /// Returns the cgroups' directories on this host.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        self.0.iter().map(PathBuf::as_path)
    }

    /// Kills the processes in them. Returns true if there were any.
    pub fn kill(&self) -> bool {
        let mut any = false;
        for directory in self.0.iter().flat_map(|p| below(p)) {
            for pid in processes(&directory) {
                // 0 is a process of another PID namespace; kill(0) would be our own group.
                if pid > 1 {
                    any |= kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok();
                }
            }
        }
        any
    }

    /// Removes those that exist. Waits at most `patience` for processes that are still exiting. Returns those that
    /// stay, with the reason.
    pub fn remove(&self, patience: Duration) -> Vec<(PathBuf, io::Error)> {
        let end = Instant::now() + patience;
        let there = self.0.iter().filter(|p| p.is_dir());
        let all = there.flat_map(|p| below(p).into_iter().rev());
        all.filter_map(|directory| Some((directory.clone(), remove_one(&directory, end).err()?)))
            .collect()
    }
}

fn in_hierarchies(host: &Host, path: &Path) -> impl Iterator<Item = PathBuf> {
    let mounts = mountinfo::of(host, "self").into_iter();
    // CRIU mounts the same hierarchies in its work directory.
    let cgroups = mounts.filter(|m| {
        m.point.starts_with("/sys/fs/cgroup") && (m.fs_type == "cgroup" || m.fs_type == "cgroup2")
    });
    cgroups.map(move |m| host.path(m.point.join(path)))
}

fn processes(cgroup: &Path) -> Vec<i32> {
    let pids = fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    pids.lines().filter_map(|l| l.parse().ok()).collect()
}

/// A cgroup that cannot be read, such as a threaded one, may have some.
fn no_process(cgroup: &Path) -> bool {
    fs::read_to_string(cgroup.join("cgroup.procs")).is_ok_and(|pids| pids.is_empty())
}

fn below(path: &Path) -> Vec<PathBuf> {
    let mut directories = vec![path.to_owned()];
    let mut next = 0;
    while next < directories.len().min(MAX_BELOW) {
        let below = fs::read_dir(&directories[next])
            .into_iter()
            .flatten()
            .flatten();
        let below = below.filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
        let below: Vec<PathBuf> = below.map(|e| e.path()).collect();
        directories.extend(below);
        next += 1;
    }
    directories
}

fn remove_one(directory: &Path, end: Instant) -> io::Result<()> {
    loop {
        match fs::remove_dir(directory) {
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
    use cryopod_test_files::TestFiles;

    #[test]
    fn own_cgroups_in_version_1() {
        let text = "4:cpu,cpuacct:/a/b\n1:name=systemd:/c:d\n0::/e\n";
        let pair = |name: &str, path: &str| (name.to_owned(), path.to_owned());
        assert_eq!(
            memberships_in_v1(text),
            [
                pair("cpu", "/a/b"),
                pair("cpuacct", "/a/b"),
                pair("name=systemd", "/c:d")
            ]
        );
        assert!(memberships_in_v1("0::/e\n").is_empty());
    }

    #[test]
    fn only_what_was_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let make = |p: &str| dir.dir(p);
        make("proc/self");
        make("sys/fs/cgroup/there");
        dir.put("proc/self/mountinfo", "30 20 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n31 20 0:50 / /mnt rw - tmpfs tmpfs rw\n");
        let host = Host::at(dir.path());
        make("sys/fs/cgroup/left/sub");
        make("sys/fs/cgroup/taken/sub");
        for (cgroup, pids) in [
            ("left", ""),
            ("left/sub", ""),
            ("taken", ""),
            ("taken/sub", "1\n"),
        ] {
            let file = dir.path().join("sys/fs/cgroup").join(cgroup);
            file.put("cgroup.procs", pids);
        }
        let vacant = |path: &str| !Cgroups::vacant(&host, Path::new(path)).0.is_empty();
        assert!(vacant("left") && !vacant("taken"));
        let taken = Cgroups::present(&host, Path::new("taken"));
        assert_eq!(taken.outsider(&[1]), None);
        assert_eq!(taken.outsider(&[1, 2]).map(|(pid, _)| pid), Some(2));
        let nowhere = Cgroups::present(&host, Path::new("nowhere"));
        assert_eq!(nowhere.outsider(&[1]), None);
        let there = Cgroups::vacant(&host, Path::new("there"));
        let by_id = Cgroups::vacant(&host, Path::new("c1"));
        let named = Cgroups::vacant(&host, Path::new("a/b"));
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
            assert!(cgroups.remove(Duration::ZERO).is_empty());
        }
        let is = |p: &str| dir.path().join("sys/fs/cgroup").join(p).is_dir();
        assert_eq!(
            ["there", "c1", "a/b", "a"].map(is),
            [true, false, false, true]
        );
    }

    #[test]
    fn setups() {
        let dir = tempfile::tempdir().unwrap();
        dir.dir("proc/self");
        let with = |text: &str| {
            dir.put("proc/self/cgroup", text);
            setup(&Host::at(dir.path()))
        };
        assert_eq!(with("0::/x\n"), Setup::V2);
        assert_eq!(with("1:name=systemd:/\n0::/x\n"), Setup::V2);
        assert_eq!(with("4:memory:/\n1:name=systemd:/\n"), Setup::V1);
        assert_eq!(with("4:memory:/\n0::/\n"), Setup::Hybrid);
        assert_eq!(with(""), Setup::V2);
    }

    #[test]
    fn a_controller_of_v2_beside_v1() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let unified = dir.path().join("sys/fs/cgroup/unified");
        dir.dir("proc/self");
        std::fs::create_dir_all(&unified).unwrap();
        let own = dir.path().join("proc/self/cgroup");
        std::fs::write(&own, "4:memory:/\n0::/\n").unwrap();
        assert_eq!(beside_v1(&host), None);
        unified.put("cgroup.controllers", "\n");
        assert_eq!(beside_v1(&host), None);
        unified.put("cgroup.controllers", "hugetlb\n");
        assert_eq!(beside_v1(&host).as_deref(), Some("hugetlb"));
        std::fs::write(&own, "0::/\n").unwrap();
        assert_eq!(beside_v1(&host), None);
    }
}
