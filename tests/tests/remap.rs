//! Containers whose device nodes lead elsewhere after a restore; no GPU is needed.

use cryopod_tests::bed::{Bed, Cgroup};

fn run(low: &str, cgroup: Cgroup, script: &str, cases: usize) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!("set -- {low}\n{script}");
    let out = bed.sh(&script).ok();
    let passed = out.lines().filter(|l| l.starts_with("ok: ")).count();
    assert_eq!(passed, cases, "{out}");
}

fn nodes(low: &str, cgroup: Cgroup) {
    run(low, cgroup, include_str!("scripts/remap/nodes.sh"), 6);
}

fn ways(low: &str, cgroup: Cgroup) {
    run(low, cgroup, include_str!("scripts/remap/ways.sh"), 1);
}

#[test]
fn nodes_crun_v1() {
    nodes("crun", Cgroup::V1);
}

#[test]
fn nodes_crun_v2() {
    nodes("crun", Cgroup::V2);
}

#[test]
fn nodes_runc_v1() {
    nodes("runc", Cgroup::V1);
}

#[test]
fn nodes_runc_v2() {
    nodes("runc", Cgroup::V2);
}

#[test]
fn ways_crun_v2() {
    ways("crun", Cgroup::V2);
}

#[test]
fn ways_runc_v1() {
    ways("runc", Cgroup::V1);
}

fn failed(low: &str, cgroup: Cgroup) {
    run(low, cgroup, include_str!("scripts/remap/failed.sh"), 1);
}

#[test]
fn failed_crun_v2() {
    failed("crun", Cgroup::V2);
}

#[test]
fn failed_runc_v1() {
    failed("runc", Cgroup::V1);
}
