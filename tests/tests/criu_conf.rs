//! The user's own CRIU configuration is merged, never lost.

use cryopod_tests::bed::{Bed, Cgroup};

fn kept(low: &str, cgroup: Cgroup) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!("set -- {low}\n{}", include_str!("scripts/criu_conf.sh"));
    assert_eq!(bed.sh(&script).ok(), "kept\n");
}

#[test]
fn crun() {
    kept("crun", Cgroup::V2);
}

#[test]
fn runc() {
    kept("runc", Cgroup::V1);
}
