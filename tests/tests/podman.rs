//! The main job under podman: run, checkpoint, export, remove, restore from the archive, go on.

use cryopod_tests::bed::{Bed, Cgroup};

fn run(cgroup: Cgroup, low: &str, script: &str) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let out = bed.sh(&format!("set -- {low}\n{script}")).ok();
    assert!(out.contains("continued from "), "{out}");
}

const PLAIN: &str = include_str!("scripts/plain.sh");
const GPU_NODES: &str = include_str!("scripts/gpu_nodes.sh");

#[test]
fn no_gpu_crun_v2() {
    run(Cgroup::V2, "crun", PLAIN);
}

#[test]
fn no_gpu_runc_v1() {
    run(Cgroup::V1, "runc", PLAIN);
}

#[test]
fn gpu_nodes_crun_v2() {
    run(Cgroup::V2, "crun", GPU_NODES);
}

#[test]
fn gpu_nodes_runc_v1() {
    run(Cgroup::V1, "runc", GPU_NODES);
}

#[test]
fn gpu_nodes_runc_v2() {
    run(Cgroup::V2, "runc", GPU_NODES);
}
