//! The VRAM files, with real CRIU and the simulated driver: every path, and every step that can fail.

use std::process::Command;

use cryopod_tests::bed::{Bed, Cgroup, bin_dir, workspace};

fn run(bed: Bed, script: &str, checks: usize) {
    let out = bed.sh(script).ok();
    let passed = out.lines().filter(|line| line.starts_with("ok: ")).count();
    assert_eq!(passed, checks, "{out}");
}

fn with_lib(script: &str) -> String {
    format!("{}\n{script}", include_str!("scripts/plugin/lib.sh"))
}

#[test]
fn gpu_memory_goes_by_the_vram() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    run(bed, &with_lib(include_str!("scripts/vram/criu.sh")), 39);
}

#[test]
fn whatever_fails_no_sum_is_wrong() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    // A plugin that can be told to fail is built apart: the one that is released cannot.
    let target = bin_dir().join("test-hooks");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
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
    assert!(built.success());
    let bed = bed.bind(&target.join("debug"), "/opt/test-hooks");
    run(bed, &with_lib(include_str!("scripts/vram/fails.sh")), 45);
}

fn podman(low: &str) {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    let script = format!("set -- {low}\n{}", include_str!("scripts/vram/podman.sh"));
    run(bed, &script, 30);
}

#[test]
fn podman_crun() {
    podman("crun");
}

#[test]
fn podman_runc() {
    podman("runc");
}

#[test]
fn checkpoints_that_build_upon_each_other() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    let script = format!("set -- runc\n{}", include_str!("scripts/vram/parents.sh"));
    run(bed, &script, 52);
}

fn suspended(low: &str, cgroup: Cgroup) {
    let Some(bed) = Bed::new(cgroup) else {
        return;
    };
    let script = format!("set -- {low}\n{}", include_str!("scripts/vram/suspend.sh"));
    run(bed, &script, 57);
}

#[test]
fn suspended_and_resumed_crun() {
    suspended("crun", Cgroup::V2);
}

#[test]
fn suspended_and_resumed_runc() {
    suspended("runc", Cgroup::V1);
}
