//! Ranks over the simulated NCCL, with `libcryopod_preload.so`: their communicators leave and come back, by what the
//! driver agent uses.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that fails should stop"
)]

mod common;

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use common::{Client, Machine, wait_for};
use cryopod_cuda::preload::nccl::Group;

const QUIESCE: Duration = Duration::from_secs(120);
const UP: Duration = Duration::from_secs(120);
const SHORT: Duration = Duration::from_secs(2);

struct Job {
    machine: Machine,
    client: Client,
}

impl Job {
    fn new(flags: &str, env: &[(&str, &str)]) -> Self {
        Self::with(flags, env, "")
    }

    fn with(flags: &str, env: &[(&str, &str)], more: &str) -> Self {
        let program = Path::new(env!("CARGO_BIN_EXE_cusim-nccl"));
        let library = program.with_file_name("libcryopod_preload.so");
        assert!(library.exists(), "cargo build --workspace");
        let mut machine = Machine::new("--gpus 2");
        assert!(
            machine.path("lib/libnccl.so.2").exists(),
            "cargo build --workspace"
        );
        fs::create_dir_all(machine.path("dev/shm")).unwrap();
        let libraries = format!("{}:{more}", library.display());
        let env = [env, &[("LD_PRELOAD", &libraries)]].concat();
        fs::write(machine.path("dev/shm/nccl-stay"), "").unwrap();
        let client = machine.program(program.to_str().unwrap(), flags, &env);
        Self { machine, client }
    }

    fn pids(&self) -> Vec<i32> {
        common::children(self.client.pid)
    }

    fn group(&self) -> Group {
        Group::settled(&self.pids()).unwrap()
    }

    /// What the driver does at a checkpoint and a restore, to all ranks.
    fn driver(&self) {
        for steps in ["lock checkpoint", "restore unlock"] {
            for pid in self.pids() {
                self.machine.ok(pid, steps);
            }
        }
    }

    fn kill(&self, rank: usize) {
        // SAFETY: a process of this test.
        unsafe { libc::kill(self.pids()[rank], libc::SIGKILL) };
    }

    /// The ranks that live see NCCL's own error.
    fn fails_as_nccl(&self) {
        wait_for("NCCL's error", || {
            self.client.text().contains("NCCL's error 6")
        });
        assert!(!self.client.text().contains("CORRUPT"));
    }
}

#[test]
fn ranks_out_of_step_stop_together_and_go_on() {
    let job = Job::new("--ranks 4 --mixed --slow-ms 15 --interval-ms 1", &[]);
    let rounds = std::env::var("NCCL_ROUNDS").ok();
    let rounds = rounds.and_then(|rounds| rounds.parse().ok()).unwrap_or(6);
    for round in 0..rounds {
        sleep(Duration::from_millis(37 * round % 211));
        let mut group = job.group();
        assert_eq!(group.obstacles(), []);
        group.down(QUIESCE).unwrap();
        if round < 6 {
            job.client.stands_still();
        }
        // The driver restores nothing that has memory of others mapped.
        if round % 2 == 0 {
            job.driver();
        }
        // A new agent.
        let mut group = Group::of(&job.pids()).unwrap();
        assert!(group.is_down());
        group.up(UP).unwrap();
        job.client.goes_on();
    }
    // Without this the job is lost.
    let pids = job.pids();
    for pid in &pids {
        job.machine.ok(*pid, "lock checkpoint");
    }
    job.machine.fails(pids[0], "restore", "NOT_SUPPORTED");
}

#[test]
fn ranks_far_ahead_are_caught_up_with() {
    let flags = "--ranks 3 --every 50 --slow-ms 5 --interval-ms 0";
    let job = Job::new(flags, &[]);
    for _ in 0..3 {
        let mut group = job.group();
        group.down(QUIESCE).unwrap();
        job.driver();
        group.up(UP).unwrap();
        job.client.goes_on();
    }
}

/// Communicators that were made and split without waiting, and whose addresses come again.
#[test]
fn children_that_come_later_are_known() {
    let job = Job::new(
        "--ranks 3 --mixed --interval-ms 1",
        &[("NCCL_SIM_ASYNC", "1")],
    );
    for _ in 0..3 {
        let mut group = job.group();
        assert_eq!(group.obstacles(), []);
        group.down(QUIESCE).unwrap();
        job.driver();
        group.up(UP).unwrap();
        job.client.goes_on();
    }
}

#[test]
fn whoever_dies_the_others_see_nccls_error() {
    for step in 0..4 {
        let job = Job::new("--ranks 3 --interval-ms 5", &[]);
        let die = |at| {
            if step == at {
                job.kill(1);
            }
        };
        let mut group = job.group();
        die(0);
        // Only the dead are waited for in vain.
        let down = group.down(if step == 0 { SHORT } else { QUIESCE });
        die(1);
        if step > 0 {
            down.unwrap();
        }
        match step {
            2 => {
                let pid = job.pids()[1];
                std::thread::scope(|scope| {
                    scope.spawn(move || {
                        sleep(Duration::from_millis(2));
                        // SAFETY: a process of this test.
                        unsafe { libc::kill(pid, libc::SIGKILL) };
                    });
                    let _ = group.up(SHORT);
                });
            }
            3 => {
                group.up(UP).unwrap();
                die(3);
            }
            1 => drop(group.up(SHORT).unwrap_err()),
            _ => {}
        }
        job.fails_as_nccl();
    }
}

#[test]
fn a_linked_function_that_nobody_knows_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let library = directory.path().join("libfuture.so");
    let source = directory.path().join("future.c");
    let text = "int ncclCommFuture(void *); int use(void *c) { return ncclCommFuture(c); }\n";
    fs::write(&source, text).unwrap();
    let built = std::process::Command::new("cc")
        .args(["-shared", "-fPIC", "-Wl,-z,lazy", "-o"])
        .args([&library, &source])
        .status();
    assert!(built.unwrap().success());
    let job = Job::with("--ranks 2", &[], library.to_str().unwrap());
    let obstacles = job.group().obstacles();
    assert!(
        obstacles
            .iter()
            .any(|(_, why)| why.contains("ncclCommFuture")),
        "{obstacles:?}"
    );
}

#[test]
fn what_cannot_be_made_again_is_told() {
    for (flags, env, why) in [
        ("--hinder window", vec![], "ncclCommWindowRegister"),
        ("--hinder novelty", vec![], "ncclCommNovelty"),
        ("", vec![("NCCL_SIM_VERSION", "21703")], "too old"),
    ] {
        let job = Job::new(&format!("--ranks 2 {flags}"), &env);
        let obstacles = job.group().obstacles();
        assert!(
            obstacles.iter().any(|(_, w)| w.contains(why)),
            "{obstacles:?}"
        );
        job.client.goes_on();
        // One rank alone lacks the other.
        let alone = Group::settled(&job.pids()[..1]).unwrap().obstacles();
        assert!(
            alone.iter().any(|(_, w)| w.contains("outside")),
            "{alone:?}"
        );
    }
}
