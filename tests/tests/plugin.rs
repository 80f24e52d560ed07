//! The CRIU plugin with real CRIU and the simulated driver, without a container engine: the directory of an
//! operation is written by hand, so that every corner can be reached.

use std::path::PathBuf;
use std::process::Command;

use cryopod_tests::bed::{Bed, Cgroup, bin_dir, workspace};

const LIB: &str = include_str!("scripts/plugin/lib.sh");

fn run(bed: &Bed, script: &str, checks: usize) {
    let out = bed.sh(&format!("{LIB}\n{script}")).ok();
    let passed = out.lines().filter(|line| line.starts_with("ok: ")).count();
    assert_eq!(passed, checks, "{out}");
}

#[test]
fn processes_of_all_kinds_come_back() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    run(&bed, include_str!("scripts/plugin/main.sh"), 18);
}

#[test]
fn a_driver_that_fails_at_a_dump_leaves_the_process_running() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    run(&bed, include_str!("scripts/plugin/dump_faults.sh"), 31);
}

#[test]
fn a_dump_that_ends_badly_leaves_the_process_running() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    run(&bed, include_str!("scripts/plugin/dump_ends.sh"), 18);
}

#[test]
fn a_driver_that_fails_at_a_restore_leaves_nothing_behind() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    run(&bed, include_str!("scripts/plugin/restore_faults.sh"), 32);
}

#[test]
fn a_panic_does_not_cross_the_boundary() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    // A plugin that can be told to panic is built apart: the one that is released cannot.
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
    run(&bed, include_str!("scripts/plugin/panics.sh"), 9);
}

#[test]
fn a_file_is_not_to_be_asked_for_again() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    let dir = tempfile::tempdir().expect("a directory");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
        .arg(dir.path().join("retry.so"))
        .arg(workspace().join("tests/tests/standin/retry.c"))
        .status()
        .expect("cc starts");
    assert!(built.success());
    let bed = bed.bind(dir.path(), "/standin");
    run(&bed, include_str!("scripts/plugin/retry.sh"), 3);
}

#[test]
fn the_plugin_shows_its_descriptor_and_nothing_else() {
    let plugin: PathBuf = bin_dir().join("libcryopod_nvidia.so");
    let listed = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(&plugin)
        .output();
    let listed = listed.expect("nm (package binutils) starts");
    assert!(listed.status.success(), "{}: {listed:?}", plugin.display());
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let names: Vec<&str> = text
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .collect();
    assert_eq!(names, ["CR_PLUGIN_DESC"]);
    let bytes = std::fs::read(&plugin).expect("the plugin can be read");
    for word in ["cusim", "libcuda.so", "was told to panic"] {
        let found = bytes
            .windows(word.len())
            .any(|window| window == word.as_bytes());
        assert!(!found, "the plugin contains `{word}`");
    }
}
