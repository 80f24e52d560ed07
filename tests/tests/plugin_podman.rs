//! CUDA containers under podman, with crun and with runc, on the simulated driver.

use cryopod_tests::bed::{Bed, Cgroup};

fn run(low: &str, cgroup: Cgroup) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!("set -- {low}\n{}", include_str!("scripts/plugin/podman.sh"));
    let out = bed.sh(&script).ok();
    let passed = out.lines().filter(|line| line.starts_with("ok: ")).count();
    assert_eq!(passed, 41, "{out}");
}

#[test]
fn crun() {
    run("crun", Cgroup::V2);
}

#[test]
fn runc() {
    run("runc", Cgroup::V2);
}

#[test]
fn runc_v1() {
    run("runc", Cgroup::V1);
}

fn sharing(low: &str, cgroup: Cgroup) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!(
        "set -- {low}\n{}",
        include_str!("scripts/plugin/sharing.sh")
    );
    let out = bed.sh(&script).ok();
    let passed = out.lines().filter(|line| line.starts_with("ok: ")).count();
    assert_eq!(passed, 44, "{out}");
}

#[test]
fn shared_memory_crun() {
    sharing("crun", Cgroup::V2);
}

#[test]
fn shared_memory_runc() {
    sharing("runc", Cgroup::V1);
}
