//! Detects processes that are in a container and not below its init process: those that `exec` started.
//!
//! CRIU dumps the init process and its descendants (`collect_pstree`, seize.c). A process that `exec` started has its
//! parent outside of the container. CRIU freezes it with the others, reports no error and leaves it out. When the
//! container ends, the kernel kills it with its PID namespace, and no restore brings it back.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use cryopod_host::files::Host;
use cryopod_host::spec::Spec;

use crate::checks::switches::{EXEC, Switches};
use crate::live;
use crate::refusal::Refusal;

/// How long such processes may take to end: health checks and short commands do.
const LIMIT: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(50);
/// So many are named in a message.
const MAX_TOLD: usize = 5;

/// Returns why the processes that `exec` started in the container with this init process forbid a checkpoint. Waits a
/// moment for them to end, unless the container is frozen.
pub fn refusals(host: &Host, spec: &Spec, init: i32, frozen: bool) -> Vec<Refusal> {
    let limit = match frozen {
        true => Duration::ZERO,
        false => LIMIT,
    };
    let found = lasting(limit, &|| now(host, spec, init));
    found
        .into_iter()
        .take(MAX_TOLD)
        .map(|pid| {
            let refusal = Refusal::new(
                "was started in the container by exec: CRIU saves only the container's init process and what that has started, and this process would be lost",
                format!("end it, or have the container's own processes start it (or, if it need not come back, {})", Switches::how(EXEC)),
            );
            refusal.about(pid, &comm(host, pid))
        })
        .collect()
}

/// Returns the processes that are found again and again until the time is up. At least twice: a process whose parent
/// ends while `/proc` is read seems to be nobody's child.
fn lasting(limit: Duration, find: &dyn Fn() -> Vec<i32>) -> Vec<i32> {
    let end = Instant::now() + limit;
    let mut found = find();
    while !found.is_empty() {
        thread::sleep(PAUSE);
        let again = find();
        found.retain(|pid| again.contains(pid));
        if Instant::now() >= end {
            break;
        }
    }
    found
}

/// Returns the members of the container that are not below its init process.
fn now(host: &Host, spec: &Spec, init: i32) -> Vec<i32> {
    let mut members = members(host, spec, init);
    // Read last: what was started meanwhile is in it.
    let tree = live::tree(host, init);
    members.retain(|pid| !tree.contains(pid) && live::is_alive(host, *pid));
    if tree.is_empty() {
        members.clear();
    }
    members
}

/// The processes in the container's PID namespace. Where the container shares that with others, those in its cgroup.
fn members(host: &Host, spec: &Spec, init: i32) -> Vec<i32> {
    let pids = host.names("/proc");
    let pids = pids.iter().filter_map(|n| n.parse::<i32>().ok());
    let namespace = |pid: i32| fs::read_link(host.path(format!("/proc/{pid}/ns/pid"))).ok();
    if spec.has_own_namespace("pid") {
        let Some(own) = namespace(init) else {
            return Vec::new();
        };
        return pids
            .filter(|pid| namespace(*pid).as_ref() == Some(&own))
            .collect();
    }
    let Some(own) = cgroup(host, init) else {
        return Vec::new();
    };
    pids.filter(|pid| cgroup(host, *pid).is_some_and(|path| path.starts_with(&own)))
        .collect()
}

/// The cgroup of a process in the hierarchy that tells containers apart; `None` in its root.
fn cgroup(host: &Host, pid: i32) -> Option<PathBuf> {
    let text = host.text(format!("/proc/{pid}/cgroup")).ok()?;
    let path = |start: &str| {
        let lines = text.lines().filter_map(|l| l.split_once(':'));
        let path = lines
            .filter_map(|(_, rest)| rest.strip_prefix(start))
            .next()?;
        (path != "/").then(|| PathBuf::from(path))
    };
    path("freezer:").or_else(|| path(":"))
}

fn comm(host: &Host, pid: i32) -> String {
    host.line(format!("/proc/{pid}/comm")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;
    use serde_json::json;
    use std::cell::Cell;

    use std::path::Path;

    fn process(root: &Path, pid: i32, parent: i32, namespace: &str, cgroup: &str, state: char) {
        let dir = root.join(format!("proc/{pid}"));
        dir.put("stat", format!("{pid} (x) {state} {parent} 0"));
        dir.put("comm", "x\n");
        let cgroups = format!("3:cpu,cpuacct:/\n2:freezer:{cgroup}\n0::/\n");
        dir.put("cgroup", cgroups);
        dir.link("ns/pid", namespace);
    }

    #[test]
    fn members_that_are_not_below_the_init_process() {
        let dir = tempfile::tempdir().unwrap();
        for (pid, parent, namespace, cgroup, state) in [
            (1, 0, "pid:[1]", "/", 'S'),
            (100, 1, "pid:[2]", "/c1", 'S'),
            (101, 100, "pid:[2]", "/c1", 'S'),
            (102, 1, "pid:[2]", "/c1/sub", 'S'),
            (103, 1, "pid:[2]", "/c10", 'S'),
            (104, 1, "pid:[2]", "/c1", 'Z'),
        ] {
            process(dir.path(), pid, parent, namespace, cgroup, state);
        }
        let host = Host::at(dir.path());
        let own = Spec::from_json(json!({"linux": {"namespaces": [{"type": "pid"}]}}));
        assert_eq!(now(&host, &own, 100), [102, 103]);
        let shared = Spec::from_json(json!({"linux": {"namespaces": []}}));
        assert_eq!(now(&host, &shared, 100), [102]);
        assert_eq!(now(&host, &shared, 1), [0i32; 0], "all that is on the host");
        assert_eq!(now(&host, &own, 99), [0i32; 0], "gone");
        let said = refusals(&host, &own, 100, true);
        let said = said[0].to_string();
        assert!(
            said.starts_with("process 102 (x): was started") && said.contains("check.exec=off"),
            "{said}"
        );
    }

    #[test]
    fn those_that_end_are_no_reason() {
        let round = Cell::new(0);
        let find = || {
            round.set(round.get() + 1);
            match round.get() {
                1 => vec![7, 8],
                2 => vec![8, 9],
                _ => vec![],
            }
        };
        assert_eq!(lasting(Duration::from_secs(60), &find), [0i32; 0]);
        assert_eq!(lasting(Duration::ZERO, &|| vec![7]), [7]);
    }
}
