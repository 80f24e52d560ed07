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

fn run(cgroup: Cgroup, low: &str, mode: &str, script: &str) {
    let count = rounds().to_string();
    let arguments = [low, &count, mode];
    let Some(bed) = Bed::new(cgroup) else { return };
    let limit = Duration::from_secs(900 + u64::from(rounds()) * 60);
    crate::run_in(&bed.limit(limit), &arguments, &[script]);
}

#[test]
fn admin_podman_crun() {
    run(Cgroup::V2, "crun", "admin", PODMAN);
}

#[test]
fn admin_podman_runc() {
    run(Cgroup::V1, "runc", "admin", PODMAN);
}

#[test]
fn user_namespace_podman_crun() {
    run(Cgroup::V2, "crun", "user", PODMAN);
}

#[test]
fn user_namespace_podman_runc() {
    run(Cgroup::V1, "runc", "user", PODMAN);
}

#[test]
fn admin_docker_runc() {
    run(Cgroup::V1, "runc", "", DOCKER);
}

#[test]
fn admin_docker_crun() {
    run(Cgroup::V1, "crun", "", DOCKER);
}
