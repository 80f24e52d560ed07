//! Everything but `checkpoint` and `restore` of a GPU container goes through the wrapper as if it was not there.

use cryopod_tests::bed::{Bed, Cgroup};

fn table(low: &str, cgroup: Cgroup) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!("set -- {low}\n{}", include_str!("scripts/passthrough.sh"));
    let out = bed.sh(&script).ok();
    assert!(out.contains("calls alike"), "{out}");
}

#[test]
fn crun_on_v2() {
    table("crun", Cgroup::V2);
}

#[test]
fn runc_on_v1() {
    table("runc", Cgroup::V1);
}

#[test]
fn runc_on_v2() {
    table("runc", Cgroup::V2);
}
