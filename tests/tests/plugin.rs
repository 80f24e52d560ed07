//! The CRIU plugin with real CRIU and the simulated driver, without a container engine: the directory of an
//! operation is written by hand, so that every corner can be reached.

use std::path::PathBuf;
use std::process::Command;

use cryopod_tests::bed::{Bed, Cgroup, bin_dir, test_hooks, workspace};

crate::scenarios! {
    processes_of_all_kinds_come_back: V2 [] "plugin/lib.sh" + "plugin/main.sh";
    a_driver_that_fails_at_a_dump_leaves_the_process_running: V2 [] "plugin/lib.sh" + "plugin/dump_faults.sh";
    a_dump_that_ends_badly_leaves_the_process_running: V2 [] "plugin/lib.sh" + "plugin/dump_ends.sh";
    a_driver_that_fails_at_a_restore_leaves_nothing_behind: V2 [] "plugin/lib.sh" + "plugin/restore_faults.sh";
}

/// A plugin that can be told to fail and to panic is built apart: the one that is released cannot.
pub fn run_hooked(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) {
    let bound = |bed: Bed| bed.bind(test_hooks(), "/opt/test-hooks");
    crate::run_changed(cgroup, bound, arguments, scripts);
}

crate::scenarios! {
    with run_hooked;
    a_panic_does_not_cross_the_boundary: V2 [] "plugin/lib.sh" + "plugin/panics.sh";
}

fn run_with_retry(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) {
    let dir = tempfile::tempdir().expect("a directory");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
        .arg(dir.path().join("retry.so"))
        .arg(workspace().join("tests/tests/standin/retry.c"))
        .status()
        .expect("cc starts");
    assert!(built.success());
    let bound = |bed: Bed| bed.bind(dir.path(), "/standin");
    crate::run_changed(cgroup, bound, arguments, scripts);
}

crate::scenarios! {
    with run_with_retry;
    a_file_is_not_to_be_asked_for_again: V2 [] "plugin/lib.sh" + "plugin/retry.sh";
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
