//! VRAM files, with real CRIU and the simulated driver: every path, and every step that can fail.

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
