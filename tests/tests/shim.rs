//! The containerd shim under a real containerd: 1.7 with `SUITE=trixie`, 2.1 with `SUITE=forky`.

use cryopod_tests::bed::Cgroup;

// On v2 containerd's shim starts no container in the bed (docs/testbed.md).
crate::scenarios! {
    checkpoint_and_restore: V1 [] "archive/lib.sh" + "shim/lib.sh" + "shim/checkpoint.sh";
    nerdctl_crun: V1 ["crun"] "archive/lib.sh" + "shim/lib.sh" + "shim/nerdctl.sh";
    nerdctl_runc: V1 ["runc"] "archive/lib.sh" + "shim/lib.sh" + "shim/nerdctl.sh";
    locked_at_the_pause: V1 [] "archive/lib.sh" + "shim/lib.sh" + "shim/at_pause.sh";
}

fn run_parity(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) {
    let Some(out) = crate::run(cgroup, arguments, scripts) else {
        return;
    };
    let shown: Vec<&str> = out.lines().filter_map(|l| l.strip_prefix("ok: ")).collect();
    // That both are alike the script has shown; that both worked, these.
    for line in [
        "run: 7 out err",
        "logs by a driver: tick 1",
        "exec: 5 hello err",
        "exec -t: 3 terminal",
        "pause: PAUSED still",
        "resume of what runs: 1 cannot resume a running process RUNNING",
        "update: 134217728",
        "kill and delete: code 9 term",
        "attach: got hello",
        "oom: 137  1 /tasks/create 1 /tasks/exit 1 /tasks/oom 1 /tasks/start ",
        "fifty: 50",
        "fifty, containerd killed and started again: 50",
        "exec after that: 6",
        "exit code after a restart: code 9",
        "after all: 1 0 0",
        "shims: none",
    ] {
        assert!(shown.contains(&line), "{line}: {shown:#?}");
    }
}

crate::scenarios! {
    with run_parity;
    as_containerds_own: V1 [] "archive/lib.sh" + "shim/lib.sh" + "shim/parity.sh";
}

/// A sample of the moments, or with `FAULTS=all` all of them.
fn run_faults(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) {
    let which = crate::setting("FAULTS", arguments[0]);
    crate::run(cgroup, &[&which], scripts);
}

crate::scenarios! {
    with run_faults;
    what_dies_in_the_middle: V1 ["some"] "archive/lib.sh" + "shim/lib.sh" + "shim/faults.sh";
}
