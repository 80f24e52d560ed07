//! The test bed's own promises: apart from the machine, and nothing left behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cryopod_tests::bed::{Bed, Cgroup, bin_dir, workspace};

/// How long the kernel may take to end processes that were killed.
const DYING: Duration = Duration::from_secs(60);
/// A script that leaves as much as it can: a container, a mount, an interface, a daemon of its own.
const MESS: &str = "
    mkimage
    RUNTIME=runc pod run -d --name left localhost/busybox sleep 100000
    mkdir /tmp/left && mount -t tmpfs left /tmp/left
    ip link add left0 type dummy || true
    setsid sleep 100001 &
    touch /left";

#[test]
fn the_workspace_is_read_only_and_the_root_is_new_each_time() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    bed.sh("! touch /src/left; touch /usr/bin/left; [ -e /src/Cargo.toml ]")
        .ok();
    bed.sh("[ ! -e /usr/bin/left ]").ok();
}

/// A scenario that changes something of the host fails.
#[test]
fn a_change_of_the_host_is_told() {
    let common = [
        (
            "echo 78 > /proc/sys/net/ipv4/ip_default_ttl",
            "ip_default_ttl",
        ),
        ("echo 1 > /proc/sys/kernel/sem", "/proc/sys/kernel/sem"),
        ("hostname other", "/proc/sys/kernel/hostname"),
        ("umount /dev/mqueue", "/dev/mqueue"),
        ("mount -o remount,bind,ro /dev/shm", "/dev/shm ro"),
    ];
    // The processes leave a cgroup, and it is removed.
    let removed = "cd /sys/fs/cgroup && mkdir x && for p in $(cat init/cgroup.procs); do
         echo $p > x/cgroup.procs || true; done; rmdir init";
    let limited = "echo 1000 > /sys/fs/cgroup/pids/pids.max";
    for (cgroup, change) in [
        (Cgroup::V1, (limited, "/pids/pids.max")),
        (Cgroup::V2, (removed, "cgroup /sys/fs/cgroup/init")),
    ] {
        let Some(bed) = Bed::new(cgroup) else {
            continue;
        };
        bed.sh("true").ok();
        let changes = common.into_iter().chain([change]);
        let (scripts, wanted): (Vec<_>, Vec<_>) = changes.unzip();
        let output = bed.sh(&scripts.join("\n"));
        assert_eq!(output.status.code(), Some(1), "{}", output.stderr);
        let told = |want: &&str| {
            let mut lines = output.stderr.lines();
            lines.any(|l| l.contains("the host differs") && l.contains(*want))
        };
        for want in wanted {
            assert!(told(&want), "{want}: {}", output.stderr);
        }
    }
}

/// Writes what a process of this run is known by on the machine: its PID namespace.
const REPORT: &str = "readlink /proc/self/ns/pid > /out/mark";

#[test]
fn a_run_over_its_limit_is_ended_with_all_it_started() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    let out = tempfile::tempdir().expect("a directory");
    let bed = bed.bind(out.path(), "/out");
    let script = format!("{MESS}\n{REPORT}\nsleep 100002");
    let run = |seconds| {
        let bed = bed.clone().limit(Duration::from_secs(seconds));
        let ended = std::panic::catch_unwind(|| bed.sh(&script));
        let said = ended.expect_err("a run over its limit must fail the test");
        let said = said.downcast::<String>().expect("a message");
        if !said.contains("sleep 100002") {
            eprintln!("after {seconds} s it did not wait yet: {said}");
            return None;
        }
        Mark::of(&out.path().join("mark"))
    };
    // A slow machine needs more than 15 s to get to the end of the script.
    let mark = [15, 60, 240].into_iter().find_map(run);
    let mark = mark.expect("the script got to the end, and the message tells what it waits for");
    within(DYING, || mark.remains().is_empty());
}

#[test]
fn a_killed_run_dies_and_the_next_one_sweeps_its_cgroups() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    let out = tempfile::tempdir().expect("a directory");
    let mut testbed = Command::new(workspace().join("tests/testbed/testbed"))
        .args(["enter", "--bind"])
        .arg(format!("{}:/out", out.path().display()))
        .args([
            "--",
            "bash",
            "-c",
            &format!("{REPORT}.new; mv /out/mark.new /out/mark; sleep 100003"),
        ])
        .env("CRYOPOD_BIN_DIR", bin_dir())
        .stdin(Stdio::null())
        .spawn()
        .expect("the test bed starts");
    let mark = out.path().join("mark");
    within(Duration::from_secs(60), || mark.exists());
    testbed.kill().expect("it runs");
    testbed.wait().expect("it was started here");
    let mark = Mark::of(&mark).expect("just seen");
    within(DYING, || mark.remains().is_empty());
    bed.sh("true").ok();
    let name = format!("cryopod-test-{}-", testbed.id());
    let left = find(Path::new("/sys/fs/cgroup"), &name, 4);
    assert!(left.is_empty(), "{left:?}");
}

/// What the processes of a run that is over are known by.
struct Mark {
    /// Their PID namespace. The kernel gives its number to another one soon.
    namespace: String,
    /// When the run was over, in clock ticks since boot: later ones are not of it.
    over: u64,
}

impl Mark {
    /// Of the run that wrote this file, and is over now.
    fn of(file: &Path) -> Option<Self> {
        let namespace = fs::read_to_string(file).ok()?;
        let uptime = fs::read_to_string("/proc/uptime").ok()?;
        let seconds: f64 = uptime.split(' ').next()?.parse().ok()?;
        Some(Self {
            namespace: namespace.trim().to_owned(),
            over: (seconds * 100.0) as u64,
        })
    }

    /// Its processes that are still there.
    fn remains(&self) -> Vec<String> {
        let processes = fs::read_dir("/proc").expect("/proc is mounted").flatten();
        let of_run = processes.filter(|p| {
            fs::read_link(p.path().join("ns/pid"))
                .is_ok_and(|ns| ns.as_os_str() == self.namespace.as_str())
                && started(&p.path()).is_some_and(|at| at <= self.over)
        });
        of_run
            .map(|p| fs::read_to_string(p.path().join("cmdline")).unwrap_or_default())
            .collect()
    }
}

/// When a process started, in clock ticks since boot.
fn started(process: &Path) -> Option<u64> {
    let stat = fs::read_to_string(process.join("stat")).ok()?;
    stat.rsplit_once(')')?.1.split(' ').nth(20)?.parse().ok()
}

fn find(directory: &Path, prefix: &str, depth: usize) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(prefix) {
            found.push(entry.path());
        } else if depth > 1 && entry.file_type().is_ok_and(|t| t.is_dir()) {
            found.extend(find(&entry.path(), prefix, depth - 1));
        }
    }
    found
}

fn within(limit: Duration, condition: impl Fn() -> bool) {
    let end = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < end, "not within {limit:?}");
        thread::sleep(Duration::from_millis(20));
    }
}
