//! Detects processes that CRIU cannot handle: no room for its own descriptors in them, a main thread that has ended,
//! memory shared between processes by `clone(CLONE_VM)`, System V memory of the host.

use std::cmp::Ordering;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::Duration;

use crate::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::processes::{Process, Scan};

/// Free descriptors that CRIU's parasite needs in each process: its socket, its log, `/proc`. With fewer the dump
/// fails, and with one the process dies of it (seen with 4.1.1).
const FREE_DESCRIPTORS: usize = 3;
/// From this many open descriptors on the limit is looked up.
const MANY: usize = 8;
/// A process made by vfork shares its parent's memory until it calls exec.
const VFORK: Duration = Duration::from_millis(100);
const KCMP_VM: libc::c_int = 1;

pub(super) fn tasks(scan: &Scan, host: &Host) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    let own = |name: &str| {
        let link = fs::read_link(host.path(format!("/proc/self/ns/{name}")));
        link.map(|l| l.to_string_lossy().into_owned()).ok()
    };
    let (ipc, cgroup) = (own("ipc"), own("cgroup"));
    for process in &scan.processes {
        let mut add = |what: String, remedy: &str| {
            refusals.push(Refusal::of(process, what, remedy));
        };
        if process.state == 'Z' {
            if process.threads > 1 {
                add(
                    "its first thread has ended and others run on".into(),
                    "have the first thread wait for the others (pthread_join): CRIU cannot dump a process without it",
                );
            }
            continue;
        }
        // The parasite opens its cgroup file as well where there is a cgroup namespace.
        let inside = |name: &str, outer: &Option<String>| {
            outer.is_some()
                && process
                    .namespaces
                    .get(name)
                    .is_some_and(|n| Some(n) != outer.as_ref())
        };
        let needed = FREE_DESCRIPTORS + usize::from(inside("cgroup", &cgroup));
        if let Some((free, limit)) =
            free_descriptors(process, host).filter(|(free, _)| *free < needed)
        {
            add(
                format!(
                    "has {free} of {limit} file descriptors left, and CRIU needs {needed} in it"
                ),
                "close some, or start the container with a higher limit (podman, docker: --ulimit nofile=65536)",
            );
        }
        let shared = process.mapped.iter().any(|name| name.starts_with("/SYSV"));
        if shared && ipc.is_some() && process.namespaces.get("ipc") == ipc.as_ref() {
            add(
                "has System V shared memory mapped, in the host's IPC namespace".into(),
                "start the container with an IPC namespace of its own (podman, docker: --ipc=private --shm-size=SIZE)",
            );
        }
    }
    // kcmp takes real pids: never used with the made-up hosts of tests.
    if host.root() == Path::new("/") {
        refusals.extend(shared_memory(scan, &same_memory));
    }
    refusals
}

/// Finds two processes with one address space. `compare`: how the kernel orders two processes by their address spaces.
fn shared_memory(scan: &Scan, compare: &dyn Fn(i32, i32) -> Option<Ordering>) -> Option<Refusal> {
    let same = |a: &Process, b: &Process| compare(a.pid, b.pid) == Some(Ordering::Equal);
    // Not sort_by, which may panic where processes that end meanwhile leave no order.
    let mut ordered: Vec<&Process> = Vec::with_capacity(scan.processes.len());
    let mut pairs = Vec::new();
    for process in scan.processes.iter().filter(|p| p.state != 'Z') {
        let less = |p: &&Process| compare(p.pid, process.pid) == Some(Ordering::Less);
        let at = ordered.partition_point(less);
        match ordered.get(at) {
            Some(other) if same(other, process) => pairs.push((*other, process)),
            _ => ordered.insert(at, process),
        }
    }
    if pairs.is_empty() {
        return None;
    }
    thread::sleep(VFORK);
    let (other, process) = pairs.into_iter().find(|(a, b)| same(a, b))?;
    Some(Refusal::of(
        process,
        format!(
            "shares its memory with process {} (clone with CLONE_VM, or a vfork that has not come to its exec)",
            other.pid
        ),
        "wait until it has ended, or start it another way: CRIU cannot dump memory that two processes share",
    ))
}

/// Returns the number of free descriptors below the limit, and the limit.
fn free_descriptors(process: &Process, host: &Host) -> Option<(usize, usize)> {
    if process.fds.len() < MANY {
        return None;
    }
    let limits = host.text(format!("/proc/{}/limits", process.pid)).ok()?;
    let line = limits
        .lines()
        .find_map(|l| l.strip_prefix("Max open files"))?;
    let limit: usize = line.split_whitespace().next()?.parse().ok()?;
    let below = |number: &String| number.parse().is_ok_and(|n: usize| n < limit);
    let used = process.fds.iter().filter(|fd| below(&fd.number)).count();
    Some((limit.saturating_sub(used), limit))
}

/// How the kernel orders the address spaces of two processes; `None`: one is gone, or the kernel does not say.
fn same_memory(a: i32, b: i32) -> Option<Ordering> {
    // SAFETY: takes numbers only.
    match unsafe { libc::syscall(libc::SYS_kcmp, a, b, KCMP_VM, 0, 0) } {
        0 => Some(Ordering::Equal),
        1 => Some(Ordering::Less),
        2 => Some(Ordering::Greater),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{self, fd, texts};
    use super::*;
    use cryopod_test_files::TestFiles;

    fn process(pid: i32, fds: usize) -> Process {
        fixtures::process(pid, vec![fd(3, ""); fds])
    }

    fn told(host: &Host, processes: Vec<Process>) -> Vec<String> {
        texts(&tasks(&Scan { processes }, host))
    }

    #[test]
    fn a_process_needs_free_descriptors() {
        let dir = tempfile::tempdir().unwrap();
        let proc = dir.path().join("proc/700000001");
        proc.put("limits", "Limit                     Soft Limit           Hard Limit           Units     \nMax open files            64                   64                   files     \n");
        dir.link("proc/self/ns/cgroup", "cgroup:[1]");
        let host = Host::at(dir.path());
        assert_eq!(told(&host, vec![process(700_000_001, 61)]), [""; 0]);
        let said = told(&host, vec![process(700_000_001, 62)]);
        assert!(
            said[0].contains("has 2 of 64 file descriptors left, and CRIU needs 3"),
            "{said:?}"
        );
        let mut nested = process(700_000_001, 61);
        nested.namespaces.insert("cgroup", "cgroup:[2]".into());
        let said = told(&host, vec![nested]);
        assert!(
            said[0].contains("has 3 of 64 file descriptors left, and CRIU needs 4"),
            "{said:?}"
        );
    }

    #[test]
    fn a_first_thread_that_has_ended() {
        let dir = tempfile::tempdir().unwrap();
        let mut gone = process(700_000_001, 0);
        gone.state = 'Z';
        assert_eq!(
            told(&Host::at(dir.path()), vec![gone.clone()]),
            [""; 0],
            "a mere zombie"
        );
        gone.threads = 3;
        let said = told(&Host::at(dir.path()), vec![gone]);
        assert!(said[0].contains("its first thread has ended"), "{said:?}");
    }

    #[test]
    fn system_v_memory_of_the_host() {
        let dir = tempfile::tempdir().unwrap();
        dir.link("proc/self/ns/ipc", "ipc:[1]");
        for (ipc, refused) in [("ipc:[1]", true), ("ipc:[2]", false)] {
            let mut one = process(700_000_001, 0);
            one.mapped.insert("/SYSV00000000 (deleted)".into());
            one.namespaces.insert("ipc", ipc.into());
            assert_eq!(
                told(&Host::at(dir.path()), vec![one]).len(),
                usize::from(refused)
            );
        }
    }

    #[test]
    fn memory_that_two_share() {
        let scan = |pids: &[i32]| Scan {
            processes: pids.iter().map(|pid| process(*pid, 0)).collect(),
        };
        // Processes 8 and 9 have one memory.
        let memory = |pid: i32| if pid == 9 { 8 } else { pid };
        let compare = |a: i32, b: i32| Some(memory(a).cmp(&memory(b)));
        let said = shared_memory(&scan(&[7, 8, 5, 9]), &compare)
            .unwrap()
            .to_string();
        assert!(
            said.contains("process 9 (python3): shares its memory with process 8"),
            "{said}"
        );
        assert_eq!(shared_memory(&scan(&[7, 9, 5]), &compare), None);
        assert_eq!(shared_memory(&scan(&[7, 9]), &|_, _| None), None);
    }

    #[test]
    fn the_kernel_tells_ones_own_memory() {
        let me = i32::try_from(std::process::id()).unwrap();
        assert!(matches!(same_memory(me, me), Some(Ordering::Equal) | None));
    }
}
