//! The plan of a checkpoint's own restore: what comes back, and what is refused before the container is gone.

use cryopod_tests::bed::{Bed, Cgroup};

fn run(low: &str, cgroup: Cgroup, script: &str, checks: usize) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let out = bed.sh(&format!("set -- {low}\n{script}")).ok();
    let passed = out.lines().filter(|line| line.starts_with("ok: ")).count();
    assert_eq!(passed, checks, "{out}");
}

const BUNDLES: &str = include_str!("scripts/restore_here/bundles.sh");

#[test]
fn bundles_crun() {
    run("crun", Cgroup::V2, BUNDLES, 4);
}

#[test]
fn bundles_runc() {
    run("runc", Cgroup::V1, BUNDLES, 4);
}

const REFUSED: &str = include_str!("scripts/restore_here/refused.sh");

#[test]
fn refused_crun() {
    run("crun", Cgroup::V2, REFUSED, 3);
}

#[test]
fn refused_runc() {
    run("runc", Cgroup::V2, REFUSED, 3);
}

const HYBRID: &str = include_str!("scripts/restore_here/hybrid.sh");

#[test]
fn hybrid_with_v1_mounted() {
    run("crun", Cgroup::Host, HYBRID, 2);
}

#[test]
fn hybrid_with_v2_alone_mounted() {
    run("crun", Cgroup::HostV2, HYBRID, 2);
}
