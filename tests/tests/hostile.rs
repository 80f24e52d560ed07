//! Containers that work against cryopod while they are checkpointed, suspended and restored: the host's files stay what
//! they are, nothing of the host is in an archive, and no message speaks to a terminal.
//!
//! `HOSTILE_ROUNDS` says how many rounds each does, by default a handful.

use std::time::Duration;

use cryopod_tests::bed::Cgroup;

/// Runs `HOSTILE_ROUNDS` rounds: low-level runtime, rounds, mode.
fn run(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) {
    let count = crate::setting("HOSTILE_ROUNDS", "4");
    let limit = Duration::from_secs(900 + count.parse().unwrap_or(4) * 60);
    let arguments = [arguments[0], &count, arguments[1]];
    crate::run_changed(cgroup, |bed| bed.limit(limit), &arguments, scripts);
}

crate::scenarios! {
    with run;
    admin_podman_crun: V2 ["crun" "admin"] "hostile/podman.sh";
    admin_podman_runc: V1 ["runc" "admin"] "hostile/podman.sh";
    user_namespace_podman_crun: V2 ["crun" "user"] "hostile/podman.sh";
    user_namespace_podman_runc: V1 ["runc" "user"] "hostile/podman.sh";
    admin_docker_runc: V1 ["runc" ""] "hostile/docker.sh";
    admin_docker_crun: V1 ["crun" ""] "hostile/docker.sh";
}
