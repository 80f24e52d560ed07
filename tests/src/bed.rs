//! Runs scripts in the test bed (`tests/testbed/testbed`): a Debian with the whole container stack, of which
//! nothing remains when the script has ended.
//!
//! ```no_run
//! use cryopod_tests::bed::{Bed, Cgroup};
//! let Some(bed) = Bed::new(Cgroup::V2) else { return };
//! let counted = bed.sh("mkimage; pod run --rm localhost/busybox echo hello").ok();
//! assert_eq!(counted, "hello\n");
//! ```
//!
//! Where the bed cannot run (no root, no Debian mirror, no such cgroups), [`Bed::new`] says why and returns
//! `None`, and the test counts as skipped: a line in the file that `CRYOPOD_SKIPPED` names. With `CI=true` or
//! `CRYOPOD_REQUIRE_REAL=1` that is a failure, unless all that the machine lacks is cgroup v1.
#![allow(
    clippy::panic,
    clippy::expect_used,
    reason = "a test's helper reports by failing the test"
)]

use std::env;
use std::fmt;
use std::fs;
use std::fs::OpenOptions;
use std::io::{Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The test bed's exit code for "cannot run on this machine".
const CANNOT: i32 = 77;
/// How long a run may take unless the test says otherwise: longer than `limits.checkpoint_s`, so that an operation that is stuck says where.
const LIMIT: Duration = Duration::from_secs(1200);
/// How long the bed may take to clean up after it was told to end.
const GRACE: Duration = Duration::from_secs(15);

/// The cgroup set-up that a run shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cgroup {
    /// The machine's v1 hierarchies, with its v2 mount beside them.
    V1,
    /// Pure v2.
    V2,
    /// The machine's own v1 hierarchies and v2, without a cgroup namespace: engines are told `$TESTBED_CGROUP_PARENT`.
    Host,
    /// Its v2 alone, likewise.
    HostV2,
}

impl Cgroup {
    /// As on the test bed's command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V2 => "v2",
            Self::Host => "host",
            Self::HostV2 => "host-v2",
        }
    }
}

/// A test bed that can run scripts.
#[derive(Debug, Clone)]
pub struct Bed {
    cgroup: Cgroup,
    binds: Vec<String>,
    limit: Duration,
}

impl Bed {
    /// The bed with this cgroup set-up, built if need be; `None`, said and counted, where it cannot run.
    ///
    /// With `SUITE=experimental` version 2 alone in place of 1: podman 6 starts nothing where version 1 is mounted.
    pub fn new(cgroup: Cgroup) -> Option<Self> {
        let experimental = env::var("SUITE").is_ok_and(|suite| suite == "experimental");
        let cgroup = match cgroup {
            Cgroup::V1 if experimental => Cgroup::V2,
            Cgroup::Host if experimental => Cgroup::HostV2,
            cgroup => cgroup,
        };
        match unavailable(cgroup) {
            None => Some(Self {
                cgroup,
                binds: Vec::new(),
                limit: LIMIT,
            }),
            Some(reason) => {
                skip(cgroup, reason);
                None
            }
        }
    }

    /// Shows a file or directory of this machine in the bed, writable.
    #[must_use]
    pub fn bind(mut self, src: &Path, dst: &str) -> Self {
        self.binds.push(format!("{}:{dst}", src.display()));
        self
    }

    /// Another limit than twenty minutes.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs a bash script, with `-eu -o pipefail` and the functions of `tests/testbed/lib.sh`. Whatever it
    /// started is gone afterwards.
    ///
    /// # Panics
    /// When it runs longer than the limit, with what it printed until then.
    pub fn sh(&self, script: &str) -> Output {
        let script = format!(". /src/tests/testbed/lib.sh\n{script}");
        let mut command = enter(self.cgroup);
        for bind in &self.binds {
            command.args(["--bind", bind]);
        }
        command.args(["--", "bash", "-eu", "-o", "pipefail", "-c", &script]);
        let started = Instant::now();
        let (output, in_time) = run(command, self.limit);
        note_duration(started.elapsed());
        assert!(
            in_time,
            "the script ran longer than {:?} and was ended\n{output}",
            self.limit
        );
        output
    }
}

/// Adds a line with seconds and the test's name to the file `CRYOPOD_DURATIONS`, if there is one.
fn note_duration(took: Duration) {
    let Some(path) = env::var_os("CRYOPOD_DURATIONS") else {
        return;
    };
    let suite = env::var("SUITE").unwrap_or_default();
    let name = thread::current().name().unwrap_or_default().to_owned();
    let file = OpenOptions::new().append(true).create(true).open(path);
    let line = format!("{:5} s  {suite} {name}\n", took.as_secs());
    let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
}

/// What a script did.
#[derive(Debug)]
pub struct Output {
    /// How it ended.
    pub status: ExitStatus,
    /// What it printed.
    pub stdout: String,
    /// What it complained of.
    pub stderr: String,
}

impl Output {
    /// The standard output of a script that succeeded.
    ///
    /// # Panics
    /// When it failed, with all that it printed.
    #[track_caller]
    pub fn ok(self) -> String {
        assert!(self.status.success(), "the script failed\n{self}");
        self.stdout
    }

    /// The standard error of a script that failed.
    ///
    /// # Panics
    /// When it succeeded, with all that it printed.
    #[track_caller]
    pub fn fails(self) -> String {
        assert!(
            !self.status.success(),
            "the script should have failed\n{self}"
        );
        self.stderr
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            status,
            stdout,
            stderr,
        } = self;
        write!(f, "{status}\n--- stdout\n{stdout}\n--- stderr\n{stderr}")
    }
}

/// The root of the workspace.
pub fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// Where the binaries under test are: `CRYOPOD_BIN_DIR`, else this test's own profile, built now, so that no
/// test ever runs an old one.
pub fn bin_dir() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        if let Some(dir) = env::var_os("CRYOPOD_BIN_DIR") {
            return dir.into();
        }
        let test = env::current_exe().expect("the test's own path");
        let dir = test
            .ancestors()
            .nth(2)
            .expect("a test is in target/PROFILE/deps");
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args([
            "build",
            "--quiet",
            "--workspace",
            "--exclude",
            "cryopod-tests",
        ]);
        if dir.ends_with("release") {
            build.arg("--release");
        }
        let built = build
            .current_dir(workspace())
            .status()
            .expect("cargo starts");
        assert!(built.success(), "the binaries under test do not build");
        dir.to_owned()
    })
}

/// Where the plugin is that can be told to fail and to panic: built on the first call, apart from what is released.
pub fn test_hooks() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| {
        if let Some(built) = env::var_os("CRYOPOD_TEST_HOOKS") {
            return built.into();
        }
        let target = bin_dir().join("test-hooks");
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built = Command::new(cargo)
            .current_dir(workspace())
            .args([
                "build",
                "--quiet",
                "--lib",
                "--package",
                "cryopod-criu-plugin",
            ])
            .args(["--features", "test-hooks", "--target-dir"])
            .arg(&target)
            .status()
            .expect("cargo starts");
        assert!(built.success(), "the plugin with test hooks does not build");
        target.join("debug")
    })
}

/// `testbed enter`, which dies with the thread that starts it.
fn enter(cgroup: Cgroup) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "TERM"])
        .arg(workspace().join("tests/testbed/testbed"))
        .args(["enter", "--cgroup", cgroup.name()])
        .env("CRYOPOD_BIN_DIR", bin_dir());
    if let Ok(dir) = env::var("CRYOPOD_CONTAINERD") {
        for program in ["containerd", "ctr", "containerd-shim-runc-v2"] {
            let bind = format!("{dir}/{program}:/usr/bin/{program}");
            command.args(["--bind", &bind]);
        }
    }
    if let Ok(dir) = env::var("CRYOPOD_CRIO") {
        command.args(["--bind", &format!("{dir}:/opt/crio")]);
    }
    command
}

/// Whether the bed's containerd has CRI checkpoints: 1.7, that of trixie, has none.
pub fn containerd_has_cri_checkpoints() -> bool {
    env::var("SUITE").as_deref() == Ok("forky") || env::var_os("CRYOPOD_CONTAINERD").is_some()
}

/// The bed has a server of object storage: that of trixie has, which is the default.
pub fn has_object_storage() -> bool {
    env::var("SUITE").map_or(true, |suite| suite == "trixie")
}

/// Why this machine cannot run the bed with this cgroup set-up; asked once per test program.
fn unavailable(cgroup: Cgroup) -> Option<&'static str> {
    static REASONS: [OnceLock<Option<String>>; 4] = [const { OnceLock::new() }; 4];
    let reason = REASONS[cgroup as usize].get_or_init(|| {
        let mut command = enter(cgroup);
        command.args(["--", "true"]);
        let (output, in_time) = run(command, Duration::from_secs(600)); // it may have to build the root
        assert!(in_time, "the test bed does not come up\n{output}");
        match output.status.code() {
            Some(0) => None,
            Some(CANNOT) => Some(output.stderr),
            _ => panic!("the test bed does not come up\n{output}"),
        }
    });
    reason.as_deref()
}

fn skip(cgroup: Cgroup, reason: &str) {
    let required = env::var("CI").is_ok_and(|v| v == "true")
        || env::var("CRYOPOD_REQUIRE_REAL").is_ok_and(|v| v == "1");
    // Many a machine has cgroup v2 alone: there the bed runs, but no test of v1.
    let excused = cgroup != Cgroup::V2 && unavailable(Cgroup::V2).is_none();
    assert!(
        excused || !required,
        "this test must run here, but: {reason}"
    );
    let test = thread::current().name().unwrap_or("a test").to_owned();
    let line = format!("{test}: {}\n", reason.trim());
    eprint!("SKIPPED {line}");
    if let Some(path) = env::var_os("CRYOPOD_SKIPPED") {
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.and_then(|mut f| f.write_all(line.as_bytes()))
            .expect("the file that CRYOPOD_SKIPPED names can be written");
    }
}

/// Runs a command to its end, or to the limit and then no longer than its cleaning up takes.
fn run(mut command: Command, limit: Duration) -> (Output, bool) {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("setpriv (package util-linux) starts");
    let stdout = child.stdout.take().map(collect);
    let stderr = child.stderr.take().map(collect);
    let mut status = wait(&mut child, limit);
    let in_time = status.is_some();
    let left = if in_time {
        String::new()
    } else {
        below(child.id())
    };
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        if status.is_none() {
            let pid = i32::try_from(child.id()).expect("a pid is positive");
            kill(Pid::from_raw(pid), signal).expect("a child can be signalled");
            status = wait(&mut child, GRACE);
        }
    }
    let text = |reader: Option<thread::JoinHandle<String>>| {
        reader.and_then(|r| r.join().ok()).unwrap_or_default()
    };
    let output = Output {
        status: status.expect("a killed process ends"),
        stdout: text(stdout),
        stderr: text(stderr) + &left,
    };
    (output, in_time)
}

/// What a script that does not end waits for: its processes with their states, and where they are in the kernel.
fn below(ancestor: u32) -> String {
    let read = |pid: u32, file: &str| {
        let text = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text).replace('\0', " ");
        text.chars().take(600).collect::<String>()
    };
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    // A pid is not always higher than its parent's.
    let parents: Vec<(u32, u32, String)> = pids
        .filter_map(|pid| {
            let stat = read(pid, "stat");
            let mut words = stat.rsplit_once(") ")?.1.split(' ');
            let state = words.next()?.to_owned();
            Some((pid, words.next()?.parse().ok()?, state))
        })
        .collect();
    let mut text = String::from("\n--- its processes\n");
    let mut todo = vec![ancestor];
    while let Some(parent) = todo.pop() {
        for (pid, _, state) in parents.iter().filter(|(_, of, _)| *of == parent) {
            let command: String = read(*pid, "cmdline").chars().take(100).collect();
            let calls = read(*pid, "stack").replace('\n', " ");
            text += &format!("{pid} of {parent} {state} {command:?} {calls}\n");
            todo.push(*pid);
        }
    }
    text
}

fn wait(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return Some(status);
        }
        if Instant::now() >= end {
            return None;
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn collect(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from.read_to_end(&mut bytes); // what came before an error is what there is to show
        String::from_utf8_lossy(&bytes).into_owned()
    })
}
