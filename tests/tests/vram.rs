//! VRAM files, with real CRIU and the simulated driver: every path, and every step that can fail.

use std::time::Duration;

use cryopod_tests::bed::Cgroup;

crate::scenarios! {
    with crate::plugin::run_hooked;
    whatever_fails_no_sum_is_wrong: V2 [] "plugin/lib.sh" + "vram/fails.sh";
}

crate::scenarios! {
    gpu_memory_goes_into_files: V2 [] "plugin/lib.sh" + "vram/criu.sh";
    podman_crun: V2 ["crun"] "vram/job.sh" + "vram/podman.sh";
    podman_runc: V2 ["runc"] "vram/job.sh" + "vram/podman.sh";
    checkpoints_that_build_upon_each_other: V2 ["runc"] "vram/parents.sh";
    not_copied: V2 ["crun"] "vram/job.sh" + "vram/not_copied.sh";
    handed_over_by_the_preload_library: V2 ["crun"] "vram/job.sh" + "vram/preload.sh";
    copied_once_it_goes_on: V2 ["crun"] "vram/job.sh" + "vram/preload_later.sh";
    a_copy_stays_between_suspends: V2 ["crun"] "vram/job.sh" + "vram/keep.sh";
    ranks_over_nccl: V2 ["crun"] "vram/job.sh" + "vram/nccl.sh";
    suspended_and_resumed_crun: V2 ["crun"] "vram/job.sh" + "vram/suspend.sh";
    suspended_and_resumed_runc: V1 ["runc"] "vram/job.sh" + "vram/suspend.sh";
}

/// `MOMENTS` checkpoints of a process that changes its memory at random, and `MOMENTS_SEED`.
fn run_moments(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) {
    let moments = crate::setting("MOMENTS", arguments[1]);
    let seed = crate::setting("MOMENTS_SEED", arguments[2]);
    let limit = Duration::from_secs(600 + moments.parse().unwrap_or(6) * 60);
    let arguments = [arguments[0], &moments, &seed];
    crate::run_changed(cgroup, |bed| bed.limit(limit), &arguments, scripts);
}

crate::scenarios! {
    with run_moments;
    one_moment: V2 ["crun" "6" "1"] "vram/job.sh" + "vram/one_moment.sh";
}
