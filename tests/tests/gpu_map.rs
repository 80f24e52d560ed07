//! Restores on other GPUs, on the simulated driver.

use cryopod_tests::bed::{Bed, Cgroup};

fn map(low: &str, cgroup: Cgroup) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!("set -- {low}\n{}", include_str!("scripts/gpu_map.sh"));
    let out = bed.sh(&script).ok();
    assert_eq!(
        out.lines().filter(|l| l.starts_with("ok: ")).count(),
        10,
        "{out}"
    );
}

#[test]
fn crun() {
    map("crun", Cgroup::V2);
}

#[test]
fn runc() {
    map("runc", Cgroup::V1);
}
