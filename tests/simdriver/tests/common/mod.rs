//! A simulated machine for one test: a device server with its nodes, client processes, and calls of
//! the checkpoint API from a process of its own. Everything goes when it is dropped.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that fails should stop"
)]

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use cuda_sim::install;
use cuda_sim::server::control;
use cuda_sim::uuid::GpuUuid;
use serde_json::Value;
use tempfile::TempDir;

pub struct Machine {
    dir: TempDir,
    server: Child,
    clients: Vec<Child>,
}

#[derive(Clone)]
pub struct Client {
    pub pid: i32,
    out: PathBuf,
}

/// What a call printed: the last word of the last line, or the error.
pub type Outcome = Result<String, String>;

impl Machine {
    /// Starts the server. `flags`, like those below: a line of words.
    pub fn new(flags: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        install::install(&dir.path().join("lib"), &dir.path().join("sock")).unwrap();
        let server = Command::new(env!("CARGO_BIN_EXE_cusim-server"))
            .arg("--socket")
            .arg(dir.path().join("sock"))
            .arg("--dev-root")
            .arg(dir.path().join("dev"))
            .arg("--log")
            .arg(dir.path().join("log"))
            .args(flags.split_whitespace())
            .stderr(File::create(dir.path().join("server.err")).unwrap())
            .spawn()
            .unwrap();
        let m = Self {
            dir,
            server,
            clients: Vec::new(),
        };
        wait_for("the server", || m.events("ready").len() == 1);
        m
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn environment(&self, c: &mut Command) {
        c.env("LD_LIBRARY_PATH", self.path("lib"))
            .env("CUSIM_DEV_ROOT", self.path("dev"));
        c.env_remove("CUSIM_SOCKET")
            .env_remove("CUDA_VISIBLE_DEVICES");
    }

    /// Starts a client and waits for its first tick.
    pub fn client(&mut self, flags: &str) -> Client {
        self.client_env(flags, &[])
    }

    pub fn client_env(&mut self, flags: &str, env: &[(&str, &str)]) -> Client {
        let mut all = flags.to_owned();
        for (flag, value) in [("--mib", 4), ("--chunk-mib", 2), ("--interval-ms", 20)] {
            if !flags.split_whitespace().any(|word| word == flag) {
                all += &format!(" {flag} {value}");
            }
        }
        self.program(env!("CARGO_BIN_EXE_cusim-client"), &all, env)
    }

    /// Starts another program that ticks as a client does.
    pub fn program(&mut self, program: &str, flags: &str, env: &[(&str, &str)]) -> Client {
        let out = self.path(&format!("out{}", self.clients.len()));
        let file = File::create(&out).unwrap();
        let mut c = Command::new(program);
        self.environment(&mut c);
        c.args(flags.split_whitespace())
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(file.try_clone().unwrap())
            .stderr(file);
        let mut child = c.spawn().unwrap();
        let client = Client {
            pid: i32::try_from(child.id()).unwrap(),
            out,
        };
        // A client that fails prints its error in several writes: only its exit ends them.
        wait_for("a first tick", || {
            client.ticks() > 0 || child.try_wait().unwrap().is_some()
        });
        self.clients.push(child);
        client
    }

    /// Does steps to a process, from a process of its own.
    pub fn step(&self, pid: i32, args: &str) -> Outcome {
        let mut c = Command::new(env!("CARGO_BIN_EXE_cusim-step"));
        self.environment(&mut c);
        let args = args.split_whitespace();
        c.arg(pid.to_string()).args(args).stdin(Stdio::null());
        let out = c.output().unwrap();
        let text = |b: &[u8]| String::from_utf8_lossy(b).trim().to_owned();
        if out.status.success() {
            let all = text(&out.stdout);
            Ok(all
                .lines()
                .last()
                .unwrap_or("")
                .split(' ')
                .nth(2)
                .unwrap_or("")
                .to_owned())
        } else {
            Err(text(&out.stderr))
        }
    }

    pub fn ok(&self, pid: i32, args: &str) -> String {
        self.step(pid, args)
            .unwrap_or_else(|e| panic!("{args:?}: {e}"))
    }

    /// Does a step that must fail with this code.
    pub fn fails(&self, pid: i32, args: &str, code: &str) {
        match self.step(pid, args) {
            Ok(t) => panic!("{args:?} succeeded: {t}"),
            Err(e) => assert!(e.contains(&format!("{code} (")), "{args:?}: {e}"),
        }
    }

    pub fn state(&self, pid: i32) -> String {
        self.ok(pid, "state")
    }

    pub fn control(&self, line: &str) -> Value {
        control::send(&self.path("sock"), line).unwrap()
    }

    /// Bytes that a process has on each GPU, by number.
    pub fn held(&self, pid: i32) -> Vec<u64> {
        let status = self.control("status");
        let gpus = status["gpus"].as_array().unwrap();
        gpus.iter()
            .map(|g| g["pids"][pid.to_string()].as_u64().unwrap_or(0))
            .collect()
    }

    pub fn events(&self, name: &str) -> Vec<Value> {
        let text = fs::read_to_string(self.path("log")).unwrap_or_default();
        text.lines()
            .filter_map(|l| serde_json::from_str::<Value>(l).ok())
            .filter(|e| e["event"] == name)
            .collect()
    }

    pub fn kill(&mut self, c: &Client) {
        for child in &mut self.clients {
            if i32::try_from(child.id()).unwrap() == c.pid {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        for c in &mut self.clients {
            let _ = c.kill();
            let _ = c.wait();
        }
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Client {
    pub fn text(&self) -> String {
        fs::read_to_string(&self.out).unwrap_or_default()
    }

    pub fn ticks(&self) -> usize {
        self.text()
            .lines()
            .filter(|l| l.contains(" ok ") || l.contains(" CORRUPT "))
            .count()
    }

    /// Waits until it ticked on, and checks that no tick was wrong.
    pub fn goes_on(&self) {
        let before = self.ticks();
        wait_for("the client to go on", || {
            self.is_right();
            self.ticks() > before + 2
        });
    }

    pub fn is_right(&self) {
        let text = self.text();
        assert!(
            !text.contains("CORRUPT") && !text.contains("Error"),
            "{text}"
        );
    }

    pub fn stands_still(&self) {
        let mut before = self.ticks();
        // What it was about to print when it was stopped may come.
        for _ in 0..10 {
            sleep(Duration::from_millis(250));
            let now = self.ticks();
            if now == before {
                return;
            }
            before = now;
        }
        panic!("it goes on");
    }

    pub fn fds(&self) -> Vec<String> {
        fs::read_dir(format!("/proc/{}/fd", self.pid))
            .unwrap()
            .filter_map(|e| fs::read_link(e.ok()?.path()).ok())
            .map(|p| p.to_string_lossy().into_owned())
            .collect()
    }

    pub fn maps(&self) -> String {
        fs::read_to_string(format!("/proc/{}/maps", self.pid)).unwrap()
    }
}

pub fn children(pid: i32) -> Vec<i32> {
    let text = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap();
    text.split_whitespace()
        .map(|p| p.parse().unwrap())
        .collect()
}

/// Starts a client with the preload library.
pub fn preloaded(machine: &mut Machine, flags: &str) -> Client {
    let client = Path::new(env!("CARGO_BIN_EXE_cusim-client"));
    let library = client.with_file_name("libcryopod_preload.so");
    assert!(
        library.exists(),
        "{} is missing: cargo build --workspace",
        library.display()
    );
    machine.client_env(flags, &[("LD_PRELOAD", library.to_str().unwrap())])
}

/// Waits for something, five minutes at most.
pub fn wait_for(what: &str, mut f: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(300);
    while !f() {
        assert!(Instant::now() < end, "waited too long for {what}");
        sleep(Duration::from_millis(5));
    }
}

/// The UUID of a GPU that the configuration does not name.
pub fn gpu(n: u8) -> GpuUuid {
    GpuUuid::numbered(n)
}
