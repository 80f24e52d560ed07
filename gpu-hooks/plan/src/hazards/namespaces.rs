//! Detects namespaces below the container's own. CRIU dumps nested mount and network namespaces and refuses all others
//! (`Can't dump nested ... namespace`, namespaces.c).

use std::collections::HashSet;

use cryopod_host::files::Host;
use cryopod_host::processes::Scan;
use cryopod_host::spec::Spec;

use crate::refusal::Refusal;

/// The kinds that may not be nested, and their names for messages.
const NOT_NESTED: [(&str, &str); 6] = [
    ("pid", "PID"),
    ("user", "user"),
    ("ipc", "IPC"),
    ("uts", "UTS"),
    ("cgroup", "cgroup"),
    (TIME, "time"),
];
const TIME: &str = "time_for_children";
const OF_AN_EXEC: &str = "end it, and have the container start it: CRIU restores a container into a time namespace, and runc before 1.3 runs an exec in the host's";

/// Returns processes in namespaces of their own, and descriptors of namespaces without a process. `own_network`: CRIU
/// leaves out the container's network namespace; then there may be no second one either (`Unable to dump more than one
/// netns if the --emptyns is set`, net.c).
pub(super) fn namespaces(scan: &Scan, own_network: bool) -> Vec<Refusal> {
    let Some(init) = scan.processes.first() else {
        return Vec::new();
    };
    let mut kinds = NOT_NESTED.to_vec();
    if own_network {
        kinds.push(("net", "network"));
    }
    let inhabited: HashSet<&str> = scan
        .processes
        .iter()
        .flat_map(|p| p.namespaces.values().map(String::as_str))
        .collect();
    let mut told = HashSet::new();
    let mut refusals = Vec::new();
    for process in &scan.processes {
        // A zombie has none any more.
        for (kind, name) in kinds.iter().filter(|_| process.state != 'Z') {
            let (Some(its), Some(outer)) =
                (process.namespaces.get(kind), init.namespaces.get(kind))
            else {
                continue;
            };
            if its != outer && told.insert(its.clone()) {
                let remedy = match *kind {
                    TIME => OF_AN_EXEC,
                    _ => {
                        "run it without that sandbox (bubblewrap, unshare, a browser's own): CRIU cannot dump one"
                    }
                };
                refusals.push(Refusal::of(
                    process,
                    format!("is in a {name} namespace of its own, inside the container's"),
                    remedy,
                ));
            }
        }
        for fd in &process.fds {
            let Some((kind, _)) = fd.target.split_once(":[") else {
                continue;
            };
            let known = matches!(
                kind,
                "pid" | "user" | "ipc" | "uts" | "net" | "mnt" | "cgroup"
            );
            if known && !inhabited.contains(fd.target.as_str()) && told.insert(fd.target.clone()) {
                refusals.push(Refusal::of(
                    process,
                    format!(
                        "has a namespace open in which no process of the container is (descriptor {}: {})",
                        fd.number, fd.target
                    ),
                    "close it before the checkpoint: CRIU cannot dump it",
                ));
            }
        }
    }
    refusals
}

/// Returns what CRIU dumps of namespaces and then cannot restore: the container has another one's user namespace, as in a
/// pod with one, or a process of `tree` has another time namespace than the first (`Can't restore sub-task in NS`).
pub fn unrestorable(host: &Host, spec: &Spec, tree: &[i32]) -> Vec<Refusal> {
    let time = |pid: &i32| std::fs::read_link(host.path(format!("/proc/{pid}/ns/{TIME}"))).ok();
    let first = tree.first().and_then(time);
    let other = tree.iter().find(|pid| {
        let its = time(pid);
        its.is_some() && first.is_some() && its != first
    });
    let name = |pid: i32| host.line(format!("/proc/{pid}/comm")).unwrap_or_default();
    let what = "is in a time namespace of its own, inside the container's";
    let other = other.map(|&pid| Refusal::new(what, OF_AN_EXEC).about(pid, &name(pid)));
    shared_user_namespace(spec)
        .into_iter()
        .chain(other)
        .collect()
}

/// CRIU makes a new user namespace at a restore, and may join no other namespace of the pod from there (`Can't setns`).
pub(super) fn shared_user_namespace(spec: &Spec) -> Option<Refusal> {
    let namespaces = spec.json().pointer("/linux/namespaces")?.as_array()?;
    let mut users = namespaces.iter().filter(|n| n["type"] == "user");
    let path = users.find_map(|n| n["path"].as_str().filter(|p| !p.is_empty()))?;
    Some(Refusal::new(
        format!(
            "the container is in a user namespace that it shares ({path}), which CRIU cannot join at a restore"
        ),
        "start it outside of the pod, or in a pod without a user namespace (Kubernetes: hostUsers: true)",
    ))
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{self, fd, texts};
    use super::*;
    use cryopod_host::processes::Process;

    fn process(pid: i32, namespaces: &[(&'static str, &str)], fds: &[&str]) -> Process {
        let namespaces = namespaces.iter().map(|(k, v)| (*k, (*v).to_owned()));
        let fds = fds.iter().map(|target| fd(7, target));
        Process {
            namespaces: namespaces.collect(),
            ..fixtures::process(pid, fds.collect())
        }
    }

    fn told(own_network: bool, processes: Vec<Process>) -> Vec<String> {
        texts(&namespaces(&Scan { processes }, own_network))
    }

    #[test]
    fn a_pods_user_namespace() {
        let spec = |user: serde_json::Value| {
            Spec::from_json(serde_json::json!({"linux": {"namespaces": [{"type": "pid"}, user]}}))
        };
        let ask = |user| unrestorable(&Host::system(), &spec(user), &[]);
        let shared = serde_json::json!({"type": "user", "path": "/proc/7/ns/user"});
        assert_eq!(ask(shared).len(), 1);
        assert!(ask(serde_json::json!({"type": "user"})).is_empty());
        assert!(ask(serde_json::json!({"type": "uts", "path": "/proc/7/ns/uts"})).is_empty());
    }

    const INIT: [(&str, &str); 4] = [
        ("pid", "pid:[1]"),
        ("user", "user:[2]"),
        ("net", "net:[3]"),
        ("time_for_children", "time:[4]"),
    ];

    #[test]
    fn the_containers_own_pass() {
        let all = vec![
            process(7, &INIT, &["net:[3]", "pipe:[9]", "user:[2]"]),
            process(8, &INIT, &[]),
            process(
                9,
                &[("pid", "pid:[1]"), ("mnt", "mnt:[8]"), ("net", "net:[9]")],
                &["net:[9]"],
            ),
        ];
        assert_eq!(told(false, all.clone()), [""; 0]);
        // With --emptyns a second network namespace is one too many.
        let said = told(true, all);
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(
            said[0].contains("process 9 (python3): is in a network namespace"),
            "{said:?}"
        );
    }

    #[test]
    fn nested_ones_are_told_once_each() {
        let nested = [("user", "user:[5]"), ("time_for_children", "time:[6]")];
        let said = told(
            false,
            vec![
                process(7, &INIT, &[]),
                process(8, &nested, &[]),
                process(9, &nested, &[]),
            ],
        );
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains("process 8 (python3): is in a user namespace of its own"));
        assert!(
            said[1].contains("is in a time namespace of its own"),
            "{said:?}"
        );
        let mut zombie = process(8, &nested, &[]);
        zombie.state = 'Z';
        assert_eq!(told(false, vec![process(7, &INIT, &[]), zombie]), [""; 0]);
    }

    #[test]
    fn a_namespace_that_nobody_is_in() {
        let said = told(false, vec![process(7, &INIT, &["uts:[77]"])]);
        assert!(said[0].contains("descriptor 7: uts:[77]"), "{said:?}");
    }
}
