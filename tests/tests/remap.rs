//! Containers whose device nodes lead elsewhere after a restore; no GPU is needed.

use std::time::Duration;

use cryopod_tests::bed::{Bed, Cgroup};

fn nodes(low: &str, cgroup: Cgroup) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!("set -- {low}\n{}", include_str!("scripts/remap/nodes.sh"));
    let out = bed.limit(Duration::from_secs(240)).sh(&script).ok();
    assert_eq!(
        out.lines().filter(|l| l.starts_with("ok: ")).count(),
        6,
        "{out}"
    );
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
