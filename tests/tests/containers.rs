//! Containers as users have them: mounts made by hooks, hooks, io_uring and its like, real programs.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use cryopod_tests::bed::{self, Bed, Cgroup};

crate::scenarios! {
    criu_options_crun: V2 ["crun"] "containers/criu_options.sh";
    criu_options_runc: V2 ["runc"] "containers/criu_options.sh";
    as_created_crun: V2 ["crun"] "archive/lib.sh" + "containers/as_created.sh";
    as_created_runc: V1 ["runc"] "archive/lib.sh" + "containers/as_created.sh";
    goes_on_crun: V2 ["crun"] "archive/lib.sh" + "containers/goes_on.sh";
    goes_on_runc: V1 ["runc"] "archive/lib.sh" + "containers/goes_on.sh";
    unlinked_crun: V2 ["crun"] "containers/unlinked.sh";
    unlinked_runc: V1 ["runc"] "containers/unlinked.sh";
    reports_crun: V2 ["crun"] "containers/reports.sh";
    reports_runc: V1 ["runc"] "containers/reports.sh";
    late_conmon_crun: V2 ["crun"] "containers/late_conmon.sh";
    late_conmon_runc: V1 ["runc"] "containers/late_conmon.sh";
    exec_crun: V2 ["crun"] "archive/lib.sh" + "containers/exec.sh";
    exec_runc: V1 ["runc"] "archive/lib.sh" + "containers/exec.sh";
    mounts_crun: V2 ["crun"] "containers/mounts.sh";
    mounts_runc: V1 ["runc"] "containers/mounts.sh";
    hazards_crun: V2 ["crun"] "containers/hazards.sh";
    hazards_runc: V1 ["runc"] "containers/hazards.sh";
    criu_errors_crun: V2 ["crun"] "containers/criu_errors.sh";
    criu_errors_runc: V1 ["runc"] "containers/criu_errors.sh";
    programs_crun: V2 ["crun"] "containers/programs.sh";
    programs_runc: V2 ["runc"] "containers/programs.sh";
    application_crun: V2 ["crun"] "containers/application.sh";
    application_runc: V1 ["runc"] "containers/application.sh";
    failed_restore_crun: V2 ["crun"] "containers/failed_restore.sh";
    failed_restore_runc: V1 ["runc"] "containers/failed_restore.sh";
    upgrade_crun: V2 ["crun"] "containers/upgrade.sh";
    upgrade_runc: V1 ["runc"] "containers/upgrade.sh";
    refused_before_crun: V2 ["crun"] "archive/lib.sh" + "containers/refused_before.sh";
    refused_before_runc: V1 ["runc"] "archive/lib.sh" + "containers/refused_before.sh";
    helpers_crun: V2 ["crun"] "archive/lib.sh" + "containers/helpers.sh";
    helpers_runc: V2 ["runc"] "archive/lib.sh" + "containers/helpers.sh";
}

/// PyTorch's directory, unpacked on the first call.
#[allow(clippy::expect_used)] // part of a test
pub fn torch() -> PathBuf {
    let out = Command::new(bed::workspace().join("tests/torch/build"))
        .stderr(Stdio::inherit())
        .output()
        .expect("tests/torch/build starts");
    assert!(out.status.success(), "tests/torch/build: {}", out.status);
    PathBuf::from(String::from_utf8(out.stdout).expect("a path").trim_end())
}

/// A sample of the shapes, or with `SHAPES=each` or `SHAPES=all` more of them.
fn shapes(low: &str) {
    let which = std::env::var("SHAPES").unwrap_or_else(|_| "sample".into());
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    let bed = bed.limit(Duration::from_secs(4 * 3600));
    let scripts = [
        include_str!("scripts/archive/lib.sh"),
        include_str!("scripts/containers/shapes.sh"),
    ];
    println!("{}", crate::run_in(&bed, &[low, &which], &scripts));
}

#[test]
fn shapes_crun() {
    shapes("crun");
}

#[test]
fn shapes_runc() {
    shapes("runc");
}

fn train(low: &str) {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    let bed = bed.bind(&torch(), "/opt/torch");
    crate::run_in(&bed, &[low], &[include_str!("scripts/containers/train.sh")]);
}

#[test]
fn pytorch_example() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    let bed = bed.bind(&torch(), "/opt/torch");
    crate::run_in(&bed, &[], &[include_str!("scripts/examples/pytorch.sh")]);
}

#[test]
fn train_crun() {
    train("crun");
}

#[test]
fn train_runc() {
    train("runc");
}
