//! Containers as users have them: mounts made by hooks, hooks, io_uring and its like, real programs.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use cryopod_tests::bed::{self, Bed, Cgroup};

fn out(low: &str, cgroup: Cgroup, script: &str) -> Option<String> {
    let bed = Bed::new(cgroup)?;
    Some(bed.sh(&format!("set -- {low}\n{script}")).ok())
}

fn oks(out: &str) -> usize {
    out.lines().filter(|l| l.starts_with("ok: ")).count()
}

fn run(low: &str, cgroup: Cgroup, script: &str, want: usize) {
    if let Some(out) = out(low, cgroup, script) {
        assert_eq!(oks(&out), want, "{out}");
    }
}

const MOUNTS: &str = include_str!("scripts/containers/mounts.sh");

#[test]
fn mounts_crun() {
    run("crun", Cgroup::V2, MOUNTS, 7);
}

#[test]
fn mounts_runc() {
    run("runc", Cgroup::V1, MOUNTS, 7);
}

const HAZARDS: &str = include_str!("scripts/containers/hazards.sh");

#[test]
fn hazards_crun() {
    run("crun", Cgroup::V2, HAZARDS, 11);
}

#[test]
fn hazards_runc() {
    run("runc", Cgroup::V1, HAZARDS, 11);
}

const CRIU_ERRORS: &str = include_str!("scripts/containers/criu_errors.sh");

#[test]
fn criu_errors_crun() {
    run("crun", Cgroup::V2, CRIU_ERRORS, 23);
}

/// And one more, as runc has CRIU leave out network namespaces.
#[test]
fn criu_errors_runc() {
    run("runc", Cgroup::V1, CRIU_ERRORS, 24);
}

const PROGRAMS: &str = include_str!("scripts/containers/programs.sh");

/// Three that need no sockets; then redis and uvicorn, or where CRIU cannot dump sockets its refusal.
fn programs(low: &str) {
    if let Some(out) = out(low, Cgroup::V2, PROGRAMS) {
        let refused = out.contains("ok: sockets are refused");
        assert_eq!(oks(&out), if refused { 4 } else { 7 }, "{out}");
    }
}

#[test]
fn programs_crun() {
    programs("crun");
}

#[test]
fn programs_runc() {
    programs("runc");
}

const TRAIN: &str = include_str!("scripts/containers/train.sh");

/// PyTorch's directory, unpacked on the first call.
#[allow(clippy::expect_used)] // part of a test
fn torch() -> PathBuf {
    let out = Command::new(bed::workspace().join("tests/torch/build"))
        .stderr(Stdio::inherit())
        .output()
        .expect("tests/torch/build starts");
    assert!(out.status.success(), "tests/torch/build: {}", out.status);
    PathBuf::from(String::from_utf8(out.stdout).expect("a path").trim_end())
}

fn train(low: &str) {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    let bed = bed.bind(&torch(), "/opt/torch");
    let out = bed.sh(&format!("set -- {low}\n{TRAIN}")).ok();
    assert_eq!(oks(&out), 1, "{out}");
}

#[test]
fn train_crun() {
    train("crun");
}

#[test]
fn train_runc() {
    train("runc");
}

const FAILED: &str = include_str!("scripts/containers/failed_restore.sh");

#[test]
fn failed_restore_crun() {
    run("crun", Cgroup::V2, FAILED, 5);
}

#[test]
fn failed_restore_runc() {
    run("runc", Cgroup::V2, FAILED, 5);
}

/// On the simulated driver.
fn helpers(low: &str, cgroup: Cgroup, want: usize) {
    let lib = include_str!("scripts/archive/lib.sh");
    let script = include_str!("scripts/containers/helpers.sh");
    run(low, cgroup, &format!("{lib}\n{script}"), want);
}

#[test]
fn helpers_crun() {
    helpers("crun", Cgroup::V2, 26);
}

#[test]
fn helpers_runc() {
    helpers("runc", Cgroup::V2, 21);
}
