//! Reads and sets the CPUs on which threads may run (`sched_setaffinity`, `taskset`, NCCL by a GPU's place). CRIU does
//! not: what it restores may run where CRIU may.

use std::collections::{BTreeMap, HashMap};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::stat::StatusFile;
use crate::files::Host;

const ALLOWED: &str = "Cpus_allowed_list";

/// Threads of a container that may run on some of its CPUs only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PinnedThreads {
    /// In the kernel's list format: `0-3,8`.
    pub cpus: String,
    /// Thread ids in the PID namespace of the container's init process.
    pub threads: Vec<i32>,
}

/// Returns the pinned threads of these processes, by their CPUs. `init`: the container's.
pub fn pinned(host: &Host, init: i32, pids: &[i32]) -> Vec<PinnedThreads> {
    let own = of_cgroup(host, init);
    let mut found: BTreeMap<String, Vec<i32>> = BTreeMap::new();
    for thread in threads(host, init, pids) {
        let Some(cpus) = thread.status.field(ALLOWED) else {
            continue;
        };
        if !contains(&parse(cpus), &own) {
            found.entry(cpus.into()).or_default().push(thread.inside);
        }
    }
    let found = found.into_iter();
    found
        .map(|(cpus, threads)| PinnedThreads { cpus, threads })
        .collect()
}

/// Pins the threads of restored processes, and lets the others run on all CPUs of their cgroup. Returns the CPUs that
/// this container does not have.
pub fn pin(host: &Host, init: i32, pids: &[i32], pinned: &[PinnedThreads]) -> Vec<String> {
    let all = parse(&format!("0-{}", CpuSet::count() - 1));
    let sets: Vec<CpuSet> = pinned.iter().map(|group| parse(&group.cpus)).collect();
    let mut of: HashMap<i32, usize> = HashMap::new();
    for (at, group) in pinned.iter().enumerate() {
        of.extend(group.threads.iter().map(|thread| (*thread, at)));
    }
    let mut lacking = Vec::new();
    // CRIU's own is the engine's, which may be pinned itself.
    let free = contains(&parse(&own_list(host)), &online(host));
    if pinned.is_empty() && free {
        return lacking;
    }
    for thread in threads(host, init, pids) {
        let set = |cpus| sched_setaffinity(Pid::from_raw(thread.tid), cpus).is_ok();
        match of.get(&thread.inside) {
            Some(&at) if set(&sets[at]) => continue,
            Some(&at) => lacking.push(pinned[at].cpus.clone()),
            None => {}
        }
        set(&all);
    }
    lacking.sort_unstable();
    lacking.dedup();
    lacking
}

struct ContainerThread {
    tid: i32,
    /// Its id in the PID namespace of the container's init process.
    inside: i32,
    status: StatusFile,
}

fn threads(host: &Host, init: i32, pids: &[i32]) -> Vec<ContainerThread> {
    let ids = |status: &StatusFile| status.numbers::<i32>("NSpid").unwrap_or_default();
    let level = ids(&StatusFile::read(host, init)).len();
    let read = |pid: &i32| {
        let tasks = host.names(format!("/proc/{pid}/task"));
        let pid = *pid;
        tasks.into_iter().filter_map(move |tid| {
            let status = StatusFile::read(host, format!("{pid}/task/{tid}"));
            Some(ContainerThread {
                tid: tid.parse().ok()?,
                inside: *ids(&status).get(level.checked_sub(1)?)?,
                status,
            })
        })
    };
    pids.iter().flat_map(read).collect()
}

/// Returns the CPUs that a process's cgroup has.
fn of_cgroup(host: &Host, pid: i32) -> CpuSet {
    let text = host.text(format!("/proc/{pid}/cgroup"));
    let text = text.unwrap_or_default();
    let list = text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (kind, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        let (root, file) = match kind {
            "" => ("/sys/fs/cgroup", "cpuset.cpus.effective"),
            kind if kind.split(',').any(|name| name == "cpuset") => {
                ("/sys/fs/cgroup/cpuset", "cpuset.effective_cpus")
            }
            _ => return None,
        };
        // Where a cgroup has no such controller, that of the one above counts.
        let mut above = std::path::Path::new(path).ancestors();
        above.find_map(|path| host.line(format!("{root}/{}/{file}", path.display())))
    });
    list.map_or_else(|| online(host), |list| parse(&list))
}

fn online(host: &Host) -> CpuSet {
    let list = host.line("/sys/devices/system/cpu/online");
    parse(&list.unwrap_or_default())
}

fn own_list(host: &Host) -> String {
    let status = StatusFile::read(host, "self");
    status.field(ALLOWED).unwrap_or_default().to_owned()
}

/// Reads the kernel's list format. What is no list, or beyond what a `CpuSet` has, counts for nothing.
fn parse(list: &str) -> CpuSet {
    let mut set = CpuSet::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else {
            continue;
        };
        for cpu in first..=last.min(CpuSet::count() - 1) {
            let _ = set.set(cpu);
        }
    }
    set
}

fn contains(set: &CpuSet, all: &CpuSet) -> bool {
    let has = |set: &CpuSet, cpu| set.is_set(cpu).unwrap_or(false);
    (0..CpuSet::count()).all(|cpu| !has(all, cpu) || has(set, cpu))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;

    #[test]
    fn lists_of_cpus() {
        let same = |a: &str, b: &str| {
            let (a, b) = (parse(a), parse(b));
            contains(&a, &b) && contains(&b, &a)
        };
        assert!(same("0-2,5\n", "5,0,1,2"));
        assert!(same("3-1", ""));
        assert!(same("x,1-y,,-,99999999999999999999,7", "7"));
        assert!(same("1000-18446744073709551615", "1000-1023"));
        assert!(contains(&parse("0-63"), &parse("0-15")));
        assert!(!contains(&parse("0-3"), &parse("0-15")));
    }

    #[test]
    fn threads_that_may_not_run_on_all_cpus_of_their_cgroup() {
        let files = tempfile::tempdir().unwrap();
        files.put("sys/devices/system/cpu/online", "0-7\n");
        let status = |pid: i32, tid: i32, inside: &str, cpus: &str| {
            let text = format!("NSpid:\t{tid}\t{inside}\nCpus_allowed_list:\t{cpus}\n");
            files.put(format!("proc/{pid}/task/{tid}/status"), &text);
            files.put(format!("proc/{tid}/status"), &text);
        };
        status(100, 100, "1", "0-3");
        status(100, 101, "7", "0,2");
        status(102, 102, "9\t1", "0-1023");
        let found = |cgroup: &str| {
            files.put("proc/100/cgroup", cgroup);
            pinned(&Host::at(files.path()), 100, &[100, 102])
        };
        let group = |cpus: &str, threads: &[i32]| PinnedThreads {
            cpus: cpus.into(),
            threads: threads.to_vec(),
        };
        let both = [group("0,2", &[7]), group("0-3", &[1])];
        assert_eq!(found(""), both);
        // The controller is that of a cgroup above.
        files.put("sys/fs/cgroup/a/cpuset.cpus.effective", "0-3\n");
        assert_eq!(found("0::/a/b/c\n"), both[..1]);
        assert_eq!(found("0::/x\n"), both);
        files.put("sys/fs/cgroup/cpuset/x/cpuset.effective_cpus", "0,2\n");
        assert_eq!(found("4:cpu,cpuset:/x\n0::/a\n"), both[..1]);
    }

    #[test]
    fn what_is_pinned_comes_back() {
        let host = Host::system();
        let own = i32::try_from(std::process::id()).unwrap();
        std::thread::spawn(move || {
            let tid = nix::unistd::gettid().as_raw();
            let now = || {
                let status = StatusFile::read(&Host::system(), format!("{own}/task/{tid}"));
                status.field(ALLOWED).unwrap().to_owned()
            };
            let before = now();
            let one = before.split(['-', ',']).next().unwrap().to_owned();
            let inside = *StatusFile::read(&host, tid)
                .numbers::<i32>("NSpid")
                .unwrap()
                .last()
                .unwrap();
            let group = |cpus: &str| {
                [PinnedThreads {
                    cpus: cpus.into(),
                    threads: vec![inside],
                }]
            };
            assert!(pin(&host, own, &[own], &group(&one)).is_empty());
            assert_eq!(now(), one);
            // The host does not have it: it is free, as a new process.
            assert_eq!(pin(&host, own, &[own], &group("1023")), ["1023"]);
            assert!(contains(&parse(&now()), &parse(&before)));
        })
        .join()
        .unwrap();
    }
}
