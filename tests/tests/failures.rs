//! Checkpoints that fail: the container goes on running, nothing is left, the message names the cause.

use cryopod_tests::bed::{Bed, Cgroup};

fn failures(low: &str, cgroup: Cgroup) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!("set -- {low}\n{}", include_str!("scripts/failures.sh"));
    let out = bed.sh(&script).ok();
    assert_eq!(
        out.lines().filter(|l| l.starts_with("ok: ")).count(),
        21,
        "{out}"
    );
}

#[test]
fn crun() {
    failures("crun", Cgroup::V2);
}

#[test]
fn runc() {
    failures("runc", Cgroup::V1);
}

fn interrupted(low: &str, cgroup: Cgroup) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!(
        "set -- {low}\n{}",
        include_str!("scripts/restore_interrupted.sh")
    );
    let out = bed.sh(&script).ok();
    assert_eq!(
        out.lines().filter(|l| l.starts_with("ok: ")).count(),
        9,
        "{out}"
    );
}

#[test]
fn restore_crun() {
    interrupted("crun", Cgroup::V2);
}

#[test]
fn restore_runc() {
    interrupted("runc", Cgroup::V1);
}

fn messages(low: &str, cgroup: Cgroup) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!("set -- {low}\n{}", include_str!("scripts/messages.sh"));
    let out = bed.sh(&script).ok();
    assert_eq!(
        out.lines().filter(|l| l.starts_with("ok: ")).count(),
        5,
        "{out}"
    );
}

#[test]
fn messages_crun() {
    messages("crun", Cgroup::V2);
}

#[test]
fn messages_runc() {
    messages("runc", Cgroup::V1);
}
