//! The host's cgroup set-up, and where CRIU cannot follow it.

use cryopod_gpu_hooks::host::Host;

/// A cgroup set-up.
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
    /// As the seal names it.
    pub fn label(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
            Self::Hybrid => "hybrid",
        }
    }
}

/// The set-up, from the hierarchies that this process is in. A mount namespace can hide hierarchies, but CRIU
/// goes by what `/proc/PID/cgroup` says, and so does this.
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

/// `true` if CRIU, started by crun, fails to restore cgroups here: it finds the controllers of version 1 in
/// the image and writes to files of them that the unified hierarchy of crun has not got
/// (`cpuset.cpus: Permission denied`, measured with CRIU 4.1.1 and 4.2.1). crun sets up the container's
/// cgroup itself, so that CRIU can be told to leave cgroups alone.
pub fn crun_restore_must_ignore(host: &Host) -> bool {
    setup(host) == Setup::Hybrid
}

/// Controllers of the unified hierarchy on a host where other controllers are version 1's (`hugetlb`); `None`: there are
/// none. With any crun starts no container: "cgroups in hybrid mode not supported, drop all controllers from
/// cgroupv2" (`libcrun_cgroup_enter`, which reads the same file).
pub fn beside_v1(host: &Host) -> Option<String> {
    if setup(host) != Setup::Hybrid {
        return None;
    }
    let controllers = host.line("/sys/fs/cgroup/unified/cgroup.controllers");
    controllers.filter(|c| !c.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setups() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("proc/self")).unwrap();
        let with = |text: &str| {
            std::fs::write(dir.path().join("proc/self/cgroup"), text).unwrap();
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
        std::fs::create_dir_all(dir.path().join("proc/self")).unwrap();
        std::fs::create_dir_all(&unified).unwrap();
        let own = dir.path().join("proc/self/cgroup");
        std::fs::write(&own, "4:memory:/\n0::/\n").unwrap();
        assert_eq!(beside_v1(&host), None);
        std::fs::write(unified.join("cgroup.controllers"), "\n").unwrap();
        assert_eq!(beside_v1(&host), None);
        std::fs::write(unified.join("cgroup.controllers"), "hugetlb\n").unwrap();
        assert_eq!(beside_v1(&host).as_deref(), Some("hugetlb"));
        std::fs::write(&own, "0::/\n").unwrap();
        assert_eq!(beside_v1(&host), None);
    }
}
