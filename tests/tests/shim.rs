//! The containerd shim under a real containerd: 1.7 with `SUITE=trixie`, 2.1 with `SUITE=forky`.

use cryopod_tests::bed::{Bed, Cgroup};

/// Runs a script after `lib.sh`; what it showed, a line each.
fn run(script: &str) -> Option<Vec<String>> {
    // On v2 containerd's shim starts no container in the bed (docs/testbed.md).
    let bed = Bed::new(Cgroup::V1)?;
    let libraries = concat!(
        include_str!("scripts/archive/lib.sh"),
        "\n",
        include_str!("scripts/shim/lib.sh")
    );
    let script = format!("{libraries}\n{script}");
    let out = bed.sh(&script).ok();
    let shown = out.lines().filter_map(|line| line.strip_prefix("ok: "));
    Some(shown.map(str::to_owned).collect())
}

#[test]
fn as_containerds_own() {
    let Some(shown) = run(include_str!("scripts/shim/parity.sh")) else {
        return;
    };
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
        assert!(shown.iter().any(|s| s == line), "{line}: {shown:#?}");
    }
    assert_eq!(shown.len(), 34, "{shown:#?}");
}

#[test]
fn checkpoint_and_restore() {
    let Some(shown) = run(include_str!("scripts/shim/checkpoint.sh")) else {
        return;
    };
    assert_eq!(shown.len(), 23, "{shown:#?}");
}

#[test]
fn locked_at_the_pause() {
    let Some(shown) = run(include_str!("scripts/shim/at_pause.sh")) else {
        return;
    };
    // Each check ends the script that fails.
    assert!(shown.iter().any(|s| s == "no operation is left"));
}

/// Nearly a hundred times something dies.
#[test]
fn what_dies_in_the_middle() {
    let Some(shown) = run(include_str!("scripts/shim/faults.sh")) else {
        return;
    };
    assert_eq!(shown.len(), 97, "{shown:#?}");
}
