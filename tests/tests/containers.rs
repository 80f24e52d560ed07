//! Containers as users have them: mounts made by hooks, hooks, io_uring and its like, real programs.

use std::time::Duration;

use cryopod_tests::bed::{Bed, Cgroup};

fn run(low: &str, cgroup: Cgroup, script: &str, oks: usize) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!("set -- {low}\n{script}");
    let out = bed.limit(Duration::from_secs(300)).sh(&script).ok();
    assert_eq!(
        out.lines().filter(|l| l.starts_with("ok: ")).count(),
        oks,
        "{out}"
    );
}

const MOUNTS: &str = include_str!("scripts/containers/mounts.sh");

#[test]
fn mounts_crun() {
    run("crun", Cgroup::V2, MOUNTS, 7);
}

#[test]
fn mounts_runc() {
    run("runc", Cgroup::V1, MOUNTS, 7);
}
