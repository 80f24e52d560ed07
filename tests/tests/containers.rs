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
fn torch() -> PathBuf {
    let out = Command::new(bed::workspace().join("tests/torch/build"))
        .stderr(Stdio::inherit())
        .output()
        .expect("tests/torch/build starts");
    assert!(out.status.success(), "tests/torch/build: {}", out.status);
    PathBuf::from(String::from_utf8(out.stdout).expect("a path").trim_end())
}

/// A sample of the shapes, or with `SHAPES=each` or `SHAPES=all` more of them.
fn shapes(cgroup: Cgroup, low: &[&str], scripts: &[&str]) {
    let which = crate::setting("SHAPES", "sample");
    let limited = |bed: Bed| bed.limit(Duration::from_secs(4 * 3600));
    let out = crate::run_changed(cgroup, limited, &[low[0], &which], scripts);
    println!("{}", out.unwrap_or_default());
}

crate::scenarios! {
    with shapes;
    shapes_crun: V2 ["crun"] "archive/lib.sh" + "containers/shapes.sh";
    shapes_runc: V2 ["runc"] "archive/lib.sh" + "containers/shapes.sh";
}

/// Runs scripts in a bed that has PyTorch.
pub fn run_torch(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) {
    let bound = |bed: Bed| bed.bind(&torch(), "/opt/torch");
    crate::run_changed(cgroup, bound, arguments, scripts);
}

crate::scenarios! {
    with run_torch;
    pytorch_example: V2 [] "examples/pytorch.sh";
    train_crun: V2 ["crun"] "containers/train.sh";
    train_runc: V2 ["runc"] "containers/train.sh";
}
