//! Containers that work against cryopod while they are checkpointed, suspended and restored: the host's files stay what
//! they are, nothing of the host is in an archive, and no message speaks to a terminal.
//!
//! `HOSTILE_ROUNDS` says how many rounds each does, by default a handful.

use std::time::Duration;

use cryopod_tests::bed::{Bed, Cgroup};

const PODMAN: &str = include_str!("scripts/hostile/podman.sh");
const DOCKER: &str = include_str!("scripts/hostile/docker.sh");

/// Rounds of each test.
fn rounds() -> u32 {
    std::env::var("HOSTILE_ROUNDS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(4)
}

fn run(cgroup: Cgroup, arguments: &str, script: &str) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let limit = Duration::from_secs(900 + u64::from(rounds()) * 60);
    let out = bed
        .limit(limit)
        .sh(&format!("set -- {arguments}\n{script}"));
    let out = out.ok();
    assert_eq!(
        out.lines().filter(|l| l.starts_with("ok: ")).count(),
        1,
        "{out}"
    );
}

#[test]
fn admin_podman_crun() {
    run(Cgroup::V2, &format!("crun {} admin", rounds()), PODMAN);
}

#[test]
fn admin_podman_runc() {
    run(Cgroup::V1, &format!("runc {} admin", rounds()), PODMAN);
}

#[test]
fn user_namespace_podman_crun() {
    run(Cgroup::V2, &format!("crun {} user", rounds()), PODMAN);
}

#[test]
fn user_namespace_podman_runc() {
    run(Cgroup::V1, &format!("runc {} user", rounds()), PODMAN);
}

#[test]
fn admin_docker_runc() {
    run(Cgroup::V1, &format!("runc {}", rounds()), DOCKER);
}

#[test]
fn admin_docker_crun() {
    run(Cgroup::V1, &format!("crun {}", rounds()), DOCKER);
}
