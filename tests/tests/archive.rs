//! Archives of GPU containers, on the simulated driver: made of and restored by the real engines, read by other
//! tools, moved through a registry.

use std::time::Duration;

use cryopod_tests::bed::{Bed, Cgroup};

fn run(cgroup: Cgroup, script: &str, checks: usize) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!("{}\n{script}", include_str!("scripts/archive/lib.sh"));
    let out = bed.limit(Duration::from_secs(400)).sh(&script).ok();
    let passed = out.lines().filter(|line| line.starts_with("ok: ")).count();
    assert_eq!(passed, checks, "{out}");
}

#[test]
fn podman() {
    run(Cgroup::V2, include_str!("scripts/archive/podman.sh"), 0);
}

#[test]
fn registry() {
    run(Cgroup::V2, include_str!("scripts/archive/registry.sh"), 0);
}

/// On v1: on v2 containerd's shim cannot start a container in the bed (docs/testbed.md).
#[test]
fn containerd() {
    run(Cgroup::V1, include_str!("scripts/archive/containerd.sh"), 0);
}
