//! Reads and sets what threads have set for themselves and CRIU loses: CPU affinity (`taskset`, NCCL by a GPU's place), I/O
//! priority (`ionice`), timer slack, and what a core dump holds. What CRIU restores has CRIU's own, which is the engine's.

use std::collections::{BTreeMap, HashMap};

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::stat::StatusFile;
use crate::files::Host;

const ALLOWED: &str = "Cpus_allowed_list";
/// The kernel's for a new process (`init_task`).
const TIMER_SLACK_NS: u64 = 50_000;
/// The kernel's for a new process (`MMF_DUMP_FILTER_DEFAULT`).
const CORE_DUMP_FILTER: u32 = 0x33;
/// `ioprio_get`: one thread.
const WHO: i32 = 1;
/// I/O priority: the bits of the class, and the two classes that need no privilege (best effort, idle).
const CLASS_SHIFT: u32 = 13;
const FREE_CLASSES: [i32; 2] = [2, 3];
/// What a thread has that has set none: nothing, or best effort, 4 (Linux 5.15 to 5.19).
const NO_PRIORITY: [i32; 2] = [0, 2 << CLASS_SHIFT | 4];
/// Most groups that are read from an archive, and bytes of a list: one of 1024 CPUs has less.
const MAX_GROUPS: usize = 1024;
const MAX_LIST: usize = 4096;

/// Threads of a container with the same settings. What is not set is as in a new process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThreadGroup {
    #[serde(flatten)]
    pub settings: ThreadSettings,
    /// Thread ids in the PID namespace of the container's init process.
    pub threads: Vec<i32>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ThreadSettings {
    /// In the kernel's list format, `0-3,8`: some of its cgroup's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<String>,
    /// As `ioprio_set` takes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_priority: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timer_slack_ns: Option<u64>,
    /// Of a process, with its first thread.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub core_dump_filter: Option<u32>,
}

/// Returns the threads of these processes that have settings. `init`: the container's.
pub fn settings(host: &Host, init: i32, pids: &[i32]) -> Vec<ThreadGroup> {
    let mut of_cgroups: HashMap<String, CpuSet> = HashMap::new();
    let mut found: BTreeMap<ThreadSettings, Vec<i32>> = BTreeMap::new();
    // An older runc leaves the engine's to a new container.
    let engine = StatusFile::read(host, "self");
    for pid in pids {
        let cgroup = host.text(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let own = of_cgroups
            .entry(cgroup)
            .or_insert_with_key(|cgroup| of_cgroup(host, cgroup));
        for thread in threads(host, init, &[*pid]) {
            let mut settings = read(host, &thread, own);
            settings.cpus = settings
                .cpus
                .filter(|cpus| engine.field(ALLOWED) != Some(cpus));
            if settings != ThreadSettings::default() {
                found.entry(settings).or_default().push(thread.inside);
            }
        }
    }
    let found = found.into_iter();
    found
        .map(|(settings, threads)| ThreadGroup { settings, threads })
        .collect()
}

/// Gives the threads of restored processes their settings, and all others those of a new process. Returns in words what
/// threads could not be pinned, and why.
pub fn set(host: &Host, init: i32, pids: &[i32], groups: &[ThreadGroup]) -> Vec<String> {
    let me = i32::try_from(std::process::id()).unwrap_or_default();
    let online = online(host);
    let own = threads(host, me, &[me])
        .first()
        .map(|own| read(host, own, &online));
    let mut failed = Vec::new();
    let is_usual = own.is_none_or(|own| own == ThreadSettings::default())
        && io_priority(me).is_none_or(|priority| NO_PRIORITY.contains(&priority));
    if groups.is_empty() && is_usual {
        return failed;
    }
    let all = (None, parse(&format!("0-{}", CpuSet::count() - 1)));
    let usual = ThreadSettings::default();
    let groups = &groups[..groups.len().min(MAX_GROUPS)];
    let list = |group: &ThreadGroup| {
        let cpus = group.settings.cpus.as_ref()?;
        (cpus.len() <= MAX_LIST).then(|| (Some(cpus.clone()), parse(cpus)))
    };
    let lists: Vec<_> = groups.iter().map(list).collect();
    let mut of: HashMap<i32, usize> = HashMap::new();
    for (at, group) in groups.iter().enumerate() {
        of.extend(group.threads.iter().map(|thread| (*thread, at)));
    }
    for thread in threads(host, init, pids) {
        let at = of.get(&thread.inside).copied();
        write(host, &thread, at.map_or(&usual, |at| &groups[at].settings));
        let wanted = at.and_then(|at| lists[at].as_ref()).unwrap_or(&all);
        let pin = |cpus| sched_setaffinity(Pid::from_raw(thread.tid), cpus);
        let Err(e) = pin(&wanted.1) else { continue };
        let why = match e {
            Errno::EINVAL => "the container has none of them".into(),
            e => e.to_string(),
        };
        failed.push(match &wanted.0 {
            Some(cpus) => format!("threads that ran on CPUs {cpus} only run on all: {why}"),
            None => format!("threads run only where the engine may: {why}"),
        });
        let _ = pin(&all.1);
    }
    failed.sort_unstable();
    failed.dedup();
    failed
}

/// Reads a thread's settings. `own`: the CPUs that it has if it has set nothing.
fn read(host: &Host, thread: &ContainerThread, own: &CpuSet) -> ThreadSettings {
    let tid = thread.tid;
    let cpus = thread.status.field(ALLOWED);
    let slack = host.line(format!("/proc/{tid}/timerslack_ns"));
    let filter = thread
        .is_first
        .then(|| host.line(format!("/proc/{tid}/coredump_filter")))
        .flatten();
    let filter = filter.and_then(|f| u32::from_str_radix(f.trim(), 16).ok());
    ThreadSettings {
        cpus: cpus
            .filter(|cpus| !contains(&parse(cpus), own))
            .map(str::to_owned),
        io_priority: io_priority(tid).filter(|priority| is_free(*priority)),
        timer_slack_ns: slack
            .and_then(|s| s.parse().ok())
            .filter(|s| *s != TIMER_SLACK_NS),
        core_dump_filter: filter.filter(|f| *f != CORE_DUMP_FILTER),
    }
}

/// Writes all but the CPUs. What the kernel refuses is as in a new process.
fn write(host: &Host, thread: &ContainerThread, settings: &ThreadSettings) {
    let tid = thread.tid;
    let put = |file: &str, text: String| {
        let _ = std::fs::write(host.path(format!("/proc/{tid}/{file}")), text);
    };
    let priority = settings.io_priority.filter(|priority| is_free(*priority));
    // SAFETY: the system call takes three numbers and touches no memory.
    let set = |priority: i32| unsafe { libc::syscall(libc::SYS_ioprio_set, WHO, tid, priority) };
    if set(priority.unwrap_or(0)) != 0 {
        set(0);
    }
    let slack = settings.timer_slack_ns.unwrap_or(TIMER_SLACK_NS);
    put("timerslack_ns", slack.to_string());
    if thread.is_first {
        let filter = settings.core_dump_filter.unwrap_or(CORE_DUMP_FILTER);
        put("coredump_filter", format!("{filter:#x}"));
    }
}

fn io_priority(tid: i32) -> Option<i32> {
    // SAFETY: the system call takes two numbers and touches no memory.
    let priority = unsafe { libc::syscall(libc::SYS_ioprio_get, WHO, tid) };
    i32::try_from(priority).ok()
}

/// Returns true for an I/O priority that a process has set, and may set without a privilege.
fn is_free(priority: i32) -> bool {
    FREE_CLASSES.contains(&(priority >> CLASS_SHIFT)) && !NO_PRIORITY.contains(&priority)
}

struct ContainerThread {
    tid: i32,
    /// Its id in the PID namespace of the container's init process.
    inside: i32,
    /// The first of its process.
    is_first: bool,
    status: StatusFile,
}

fn threads(host: &Host, init: i32, pids: &[i32]) -> Vec<ContainerThread> {
    let ids = |status: &StatusFile| status.numbers::<i32>("NSpid").unwrap_or_default();
    let level = ids(&StatusFile::read(host, init)).len();
    let read = |pid: &i32| {
        let tasks = host.names(format!("/proc/{pid}/task"));
        let pid = *pid;
        tasks.into_iter().filter_map(move |name| {
            let status = StatusFile::read(host, format!("{pid}/task/{name}"));
            let tid = name.parse().ok()?;
            Some(ContainerThread {
                tid,
                inside: *ids(&status).get(level.checked_sub(1)?)?,
                is_first: tid == pid,
                status,
            })
        })
    };
    pids.iter().flat_map(read).collect()
}

/// Returns the CPUs that a cgroup has, by the text of `/proc/PID/cgroup`.
fn of_cgroup(host: &Host, text: &str) -> CpuSet {
    let list = text.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let (kind, path) = (parts.next()?, parts.next()?.trim_start_matches('/'));
        let (roots, file) = match kind {
            "" => (&["", "/unified"][..], "cpuset.cpus.effective"),
            kind if kind.split(',').any(|name| name == "cpuset") => {
                (&["/cpuset"][..], "cpuset.effective_cpus")
            }
            _ => return None,
        };
        // Where a cgroup has no such controller, that of the one above counts.
        let mut above = std::path::Path::new(path)
            .ancestors()
            .flat_map(|path| roots.iter().map(move |root| (root, path.display())));
        above.find_map(|(root, path)| host.line(format!("/sys/fs/cgroup{root}/{path}/{file}")))
    });
    list.map_or_else(|| online(host), |list| parse(&list))
}

fn online(host: &Host) -> CpuSet {
    let list = host.line("/sys/devices/system/cpu/online");
    parse(&list.unwrap_or_default())
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
    fn threads_that_have_settings() {
        let files = tempfile::tempdir().unwrap();
        files.put("sys/devices/system/cpu/online", "0-7\n");
        // No thread has these ids, so the I/O priority is none.
        let base = 2_000_000_000;
        let status = |pid: i32, tid: i32, inside: &str, cpus: &str| {
            let (pid, tid) = (base + pid, base + tid);
            let text = format!("NSpid:\t{tid}\t{inside}\nCpus_allowed_list:\t{cpus}\n");
            files.put(format!("proc/{pid}/task/{tid}/status"), &text);
            files.put(format!("proc/{tid}/status"), &text);
        };
        status(100, 100, "1", "0-3");
        status(100, 101, "7", "0,2");
        status(102, 102, "9\t1", "0-1023");
        let found = |cgroup: &str| {
            files.put(format!("proc/{}/cgroup", base + 100), cgroup);
            settings(
                &Host::at(files.path()),
                base + 100,
                &[base + 100, base + 102],
            )
        };
        let group = |cpus: &str, threads: &[i32]| ThreadGroup {
            settings: ThreadSettings {
                cpus: Some(cpus.into()),
                ..ThreadSettings::default()
            },
            threads: threads.to_vec(),
        };
        let both = [group("0,2", &[7]), group("0-3", &[1])];
        assert_eq!(found(""), both);
        // The controller is that of a cgroup above.
        files.put("sys/fs/cgroup/a/cpuset.cpus.effective", "0-3\n");
        assert_eq!(found("0::/a/b/c\n"), both[..1]);
        assert_eq!(found("0::/x\n"), both);
        files.put("sys/fs/cgroup/cpuset/x/cpuset.effective_cpus", "0,2\n");
        assert_eq!(found("4:cpu,cpuset:/x\n0::/a\n"), []);
        files.put(format!("proc/{}/timerslack_ns", base + 101), "50000\n");
        files.put(format!("proc/{}/timerslack_ns", base + 102), "1\n");
        files.put(format!("proc/{}/coredump_filter", base + 102), "00000003\n");
        files.put(format!("proc/{}/coredump_filter", base + 101), "00000003\n");
        let last = found("4:cpu,cpuset:/x\n").pop().unwrap();
        assert_eq!(last.threads, [9]);
        let text = serde_json::to_value(&last).unwrap();
        let want = serde_json::json!({"timer_slack_ns": 1, "core_dump_filter": 3, "threads": [9]});
        assert_eq!(text, want);
    }

    #[test]
    fn settings_come_back() {
        let host = Host::system();
        let own = i32::try_from(std::process::id()).unwrap();
        std::thread::spawn(move || {
            let tid = nix::unistd::gettid().as_raw();
            let now = || {
                let all = threads(&host, own, &[own]);
                all.into_iter().find(|thread| thread.tid == tid).unwrap()
            };
            let cpus = || now().status.field(ALLOWED).unwrap().to_owned();
            let before = cpus();
            let one = before.split(['-', ',']).next().unwrap().to_owned();
            let wanted = |cpus: &str, priority| {
                let settings = ThreadSettings {
                    cpus: Some(cpus.into()),
                    io_priority: Some(priority),
                    timer_slack_ns: Some(77_000),
                    core_dump_filter: None,
                };
                let threads = vec![now().inside];
                [ThreadGroup { settings, threads }]
            };
            let wants = wanted(&one, 3 << CLASS_SHIFT);
            assert!(set(&host, own, &[own], &wants).is_empty());
            assert_eq!(cpus(), one);
            assert_eq!(io_priority(tid), Some(3 << CLASS_SHIFT));
            let slack = host.line(format!("/proc/{tid}/timerslack_ns"));
            assert!(slack.is_none_or(|slack| slack == "77000"));
            // The host does not have it: it runs everywhere, as a new process. A priority that needs a privilege is not given.
            let said = set(&host, own, &[own], &wanted("1023", 1 << CLASS_SHIFT));
            let why = "the container has none of them";
            assert_eq!(
                said,
                [format!(
                    "threads that ran on CPUs 1023 only run on all: {why}"
                )]
            );
            assert!(contains(&parse(&cpus()), &parse(&before)));
            assert_eq!(io_priority(tid), Some(0));
        })
        .join()
        .unwrap();
    }
}
