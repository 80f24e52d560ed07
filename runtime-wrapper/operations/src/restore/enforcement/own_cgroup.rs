//! Refuses a restore with a process outside of the container's cgroup, where no limit of the spec holds.
//!
//! CRIU moves a process only if the images name a set of cgroups for it that is not its parent's (`restore_task_cgroup`).
//! Others stay in CRIU's own cgroup. runc starts CRIU in the container's, crun does not, and moves only the init process
//! later. To move the others here would be too late: version 2 has charged their memory elsewhere.

use std::path::PathBuf;

use cryopod_host::cgroups::Cgroups;
use cryopod_host::files::Host;
use cryopod_host::processes::stat::Stat;
use cryopod_host::spec::Spec;

use super::mount_flags::processes;
use crate::error::Error;

/// CRIU's stage at which each process is where it stays, and none runs.
pub const STAGE: &str = "post-restore";

/// Checks that all processes of this restored container are in its cgroup, or below it. A container that has none
/// (podman's `--cgroups=disabled`) passes.
pub fn check(host: &Host, spec: &Spec, id: &str, init: i32) -> Result<(), Error> {
    let by_systemd = || Some(PathBuf::from(spec.cgroup_path()?.trim_start_matches('/')));
    let Some(path) = spec.cgroup(id).map(PathBuf::from).or_else(by_systemd) else {
        return Ok(());
    };
    let cgroups = Cgroups::present(host, &path);
    // A zombie is in no cgroup.
    let lives = |pid: &i32| Stat::read(host, *pid).is_none_or(|s| !s.exiting);
    let pids: Vec<i32> = processes(host, init).into_iter().filter(lives).collect();
    match cgroups.outsider(&pids) {
        None => Ok(()),
        Some((pid, cgroup)) => Err(Error::Failed(format!(
            "the images leave process {pid} outside of the container's cgroup {}, where no limit of the spec holds",
            cgroup.display()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;
    use serde_json::json;

    #[test]
    fn a_child_left_behind() {
        let dir = tempfile::tempdir().unwrap();
        let v1 = "31 20 0:39 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n";
        let v2 = "30 20 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        dir.put("proc/self/mountinfo", format!("{v1}{v2}"));
        dir.put("proc/7/task/7/children", "8 9 ");
        for (pid, state) in [(7, 'S'), (8, 'S'), (9, 'Z')] {
            dir.put(
                format!("proc/{pid}/stat"),
                format!("{pid} (x) {state} 1 0 0"),
            );
        }
        let check = |cgroup: &str| {
            let spec = Spec::from_json(json!({"linux": {"cgroupsPath": cgroup}}));
            check(&Host::at(dir.path()), &spec, "c1", 7).map_err(|e| e.to_string())
        };
        for (named, path) in [
            ("/pod/c1", "pod/c1"),
            ("a-b.slice:libpod:1", "a.slice/a-b.slice/libpod-1.scope"),
            (":runc:1", "system.slice/runc-1.scope"),
            ("", "c1"),
        ] {
            assert_eq!(check(named), Ok(()), "it has no cgroup");
            let in_v2 = format!("sys/fs/cgroup/{path}");
            let in_v1 = format!("sys/fs/cgroup/pids/{path}");
            dir.put(format!("{in_v2}/cgroup.procs"), "7\n");
            dir.put(format!("{in_v2}/below/cgroup.procs"), "8\n");
            assert_eq!(check(named), Ok(()), "{named}");
            dir.put(format!("{in_v1}/cgroup.procs"), "7\n");
            let said = check(named).unwrap_err();
            assert!(said.contains("leave process 8 outside"), "{said}");
            assert!(said.contains(&in_v1), "{said}");
        }
    }
}
