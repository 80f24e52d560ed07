//! Detects namespaces below the container's own. CRIU dumps nested mount and network namespaces and refuses all others
//! (`Can't dump nested ... namespace`, namespaces.c).

use std::collections::HashSet;

use crate::refusal::Refusal;
use cryopod_host::processes::{Process, Scan};

/// The kinds that may not be nested, and their names for messages.
const NOT_NESTED: [(&str, &str); 6] = [
    ("pid", "PID"),
    ("user", "user"),
    ("ipc", "IPC"),
    ("uts", "UTS"),
    ("cgroup", "cgroup"),
    ("time_for_children", "time"),
];

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
                refusals.push(refusal(
                    process,
                    format!("is in a {name} namespace of its own, inside the container's"),
                    "run it without that sandbox (bubblewrap, unshare, a browser's own): CRIU cannot dump one",
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
                refusals.push(refusal(
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

fn refusal(process: &Process, what: String, remedy: &str) -> Refusal {
    Refusal {
        process: Some((process.pid, process.comm.clone())),
        what,
        remedy: remedy.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_host::processes::Fd;

    fn process(pid: i32, namespaces: &[(&'static str, &str)], fds: &[&str]) -> Process {
        Process {
            pid,
            comm: "python3".into(),
            state: 'S',
            namespaces: namespaces
                .iter()
                .map(|(k, v)| (*k, (*v).to_owned()))
                .collect(),
            fds: fds
                .iter()
                .map(|t| Fd {
                    number: "7".into(),
                    target: (*t).to_owned(),
                    ..Fd::default()
                })
                .collect(),
            ..Process::default()
        }
    }

    fn told(own_network: bool, processes: Vec<Process>) -> Vec<String> {
        let scan = Scan { processes };
        let refusals = namespaces(&scan, own_network);
        refusals.iter().map(ToString::to_string).collect()
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
