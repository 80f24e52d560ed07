//! Archives of GPU containers, on the simulated driver: made of and restored by podman, read by other tools, moved
//! through a registry.

use cryopod_tests::bed::{Bed, Cgroup};

fn run(script: &str, checks: usize) {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    let script = format!("{}\n{script}", include_str!("scripts/archive/lib.sh"));
    let out = bed.sh(&script).ok();
    let passed = out.lines().filter(|line| line.starts_with("ok: ")).count();
    assert_eq!(passed, checks, "{out}");
}

#[test]
fn podman() {
    run(include_str!("scripts/archive/podman.sh"), 46);
}

#[test]
fn killed() {
    run(include_str!("scripts/archive/killed.sh"), 6);
}

#[test]
fn registry() {
    run(include_str!("scripts/archive/registry.sh"), 23);
}

#[test]
fn elsewhere() {
    run(include_str!("scripts/archive/elsewhere.sh"), 35);
}
