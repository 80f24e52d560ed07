//! The real stack in the test bed: CRIU, runc, crun, podman, docker and containerd, on the simulated driver where a GPU is
//! needed. Each scenario is one test: `make test-one T=archive::registry`.
//!
//! A scenario is one or more scripts of `scripts/`, run one after the other in one shell with `-eu -o pipefail`. Each check
//! ends the script that fails.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "tests report by failing"
)]

use cryopod_tests::bed::{Bed, Cgroup, containerd_has_cri_checkpoints, has_object_storage};

mod check;
mod containers;
mod gpu_plugins;
mod hostile;
mod plugin;
mod shim;
mod testbed;
mod tutorial;
mod vram;

/// What a scenario prints when all of it has run.
const END: &str = "the scenario has ended";

/// Runs scripts with these arguments in a bed, and returns what they print.
fn run_in(bed: &Bed, arguments: &[&str], scripts: &[&str]) -> String {
    let script = scripts.join("\n");
    let script = format!("set -- {}\n{script}\necho '{END}'", arguments.join(" "));
    let out = bed.sh(&script).ok();
    assert!(out.trim_end().ends_with(END), "it ended early\n{out}");
    out
}

/// Likewise in a new bed, changed before; `None` where the bed cannot run.
fn run_changed(
    cgroup: Cgroup,
    change: impl FnOnce(Bed) -> Bed,
    arguments: &[&str],
    scripts: &[&str],
) -> Option<String> {
    Some(run_in(&change(Bed::new(cgroup)?), arguments, scripts))
}

/// Likewise in a new bed as it is.
fn run(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) -> Option<String> {
    run_changed(cgroup, |bed| bed, arguments, scripts)
}

/// Likewise if containerd has CRI checkpoints: 1.7, that of trixie, has none.
fn run_cri(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) -> Option<String> {
    if !containerd_has_cri_checkpoints() {
        println!("only with SUITE=forky or CRYOPOD_CONTAINERD");
        return None;
    }
    run(cgroup, arguments, scripts)
}

/// Likewise if the bed has a server of object storage.
fn run_with_objects(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) -> Option<String> {
    if !has_object_storage() {
        println!("only with SUITE=trixie: another bed has no S3 server");
        return None;
    }
    run(cgroup, arguments, scripts)
}

/// An environment variable that asks for more than CI runs.
fn setting(name: &str, default: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| default.into())
}

/// `name: CGROUP [ARGUMENT...] SCRIPT + SCRIPT...;`, run by [`run`], or by the function that `with` names.
macro_rules! scenarios {
    (with $run:path; $($(#[$doc:meta])* $name:ident: $cgroup:ident [$($argument:literal)*] $script:literal $(+ $more:literal)*;)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            $run(
                cryopod_tests::bed::Cgroup::$cgroup,
                &[$($argument),*],
                &[include_str!(concat!("scripts/", $script)), $(include_str!(concat!("scripts/", $more))),*],
            );
        }
    )*};
    ($($all:tt)*) => { crate::scenarios! { with crate::run; $($all)* } };
}
pub(crate) use scenarios;

/// Archives of GPU containers: made of and restored by podman, read by other tools, moved through a registry.
mod archive {
    crate::scenarios! {
        podman: V2 [] "archive/lib.sh" + "archive/podman.sh";
        page: V2 [] "archive/lib.sh" + "archive/page.sh";
        streams: V2 [] "archive/lib.sh" + "archive/streams.sh";
        killed: V2 [] "archive/lib.sh" + "archive/killed.sh";
        registry: V2 [] "archive/lib.sh" + "archive/registry.sh";
        encrypted: V2 [] "archive/lib.sh" + "archive/encrypted.sh";
        signed: V2 ["crun"] "archive/lib.sh" + "archive/signed.sh";
        elsewhere: V2 [] "archive/lib.sh" + "archive/elsewhere.sh";
    }
}

/// containerd's CRI. containerd 1.7, that of trixie, has no CRI checkpoints, and 2.4 has no restores. On cgroup v2
/// containerd's shim starts no container in the bed (docs/testbed.md).
mod cri {
    use super::*;

    crate::scenarios! {
        with crate::run_cri;
        /// containerd's CRI restores from our image.
        archive: V1 [] "archive/lib.sh" + "archive/containerd.sh";
        /// The same, encrypted and signed.
        sealed: V1 ["sealed"] "archive/lib.sh" + "archive/containerd.sh";
        /// Our plugin of NRI.
        nri: V1 [] "archive/lib.sh" + "shim/lib.sh" + "kubernetes/nri.sh";
        /// StopContainer is a checkpoint, and the pod goes on under another containerd.
        on_stop: V1 [] "archive/lib.sh" + "shim/lib.sh" + "on_stop/cri.sh";
        /// Two containers of a pod, each from its own checkpoint of one moment.
        one_moment: V1 [] "archive/lib.sh" + "shim/lib.sh" + "kubernetes/one_moment.sh";
        /// What the owner of a pod sees of a refusal.
        refusals: V1 [] "archive/lib.sh" + "shim/lib.sh" + "kubernetes/refusals.sh";
        /// Our shim as a runtime class.
        runtime_class: V1 [] "archive/lib.sh" + "shim/lib.sh" + "shim/cri.sh";
    }

    /// Debian has no CRI-O: with SUITE=forky and one that you have built.
    fn run_crio(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) {
        match std::env::var_os("CRYOPOD_CRIO") {
            Some(_) => drop(crate::run(cgroup, arguments, scripts)),
            None => println!(
                "only with CRYOPOD_CRIO: a directory with crio, pinns and libraries that they need"
            ),
        }
    }

    crate::scenarios! {
        with run_crio;
        crio: V2 [] "archive/lib.sh" + "kubernetes/crio.sh";
    }
}

/// A `create` that is a restore: containers that name a checkpoint.
mod create_from {
    crate::scenarios! {
        podman_crun: V2 ["crun"] "archive/lib.sh" + "create_from/podman.sh";
        podman_runc: V1 ["runc"] "archive/lib.sh" + "create_from/podman.sh";
        podman_runc_v2: V2 ["runc"] "archive/lib.sh" + "create_from/podman.sh";
        engines: V1 [] "archive/lib.sh" + "shim/lib.sh" + "create_from/engines.sh";
        many_crun: V2 ["crun"] "archive/lib.sh" + "create_from/many.sh";
        many_runc: V1 ["runc"] "archive/lib.sh" + "create_from/many.sh";
        other_gpu_crun: V2 ["crun"] "archive/lib.sh" + "create_from/other_gpu.sh";
        other_gpu_runc: V1 ["runc"] "archive/lib.sh" + "create_from/other_gpu.sh";
        matrix: V1 [] "archive/lib.sh" + "shim/lib.sh" + "create_from/matrix.sh";
        parts: V2 ["crun"] "archive/lib.sh" + "create_from/parts.sh";
        sources: V2 ["crun"] "archive/lib.sh" + "create_from/sources.sh";
        tenants_crun: V2 ["crun"] "archive/lib.sh" + "create_from/tenants.sh";
        tenants_runc: V1 ["runc"] "archive/lib.sh" + "create_from/tenants.sh";
        swarm: V1 [] "archive/lib.sh" + "swarm/lib.sh" + "create_from/swarm.sh";
    }
}

/// A stop that is a checkpoint.
mod on_stop {
    crate::scenarios! {
        every_crun: V2 ["crun"] "archive/lib.sh" + "on_stop/every.sh";
        every_runc: V1 ["runc"] "archive/lib.sh" + "on_stop/every.sh";
        podman_crun: V2 ["crun"] "archive/lib.sh" + "on_stop/podman.sh";
        podman_runc: V1 ["runc"] "archive/lib.sh" + "on_stop/podman.sh";
        engines: V1 [] "archive/lib.sh" + "shim/lib.sh" + "on_stop/engines.sh";
        compose: V1 [] "archive/lib.sh" + "shim/lib.sh" + "on_stop/compose.sh";
        systemd: V2 [] "archive/lib.sh" + "on_stop/systemd.sh";
        replicas: V2 ["crun"] "archive/lib.sh" + "on_stop/replicas.sh";
    }

    crate::scenarios! {
        with crate::run_with_objects;
        objects: V2 ["crun"] "archive/lib.sh" + "on_stop/storage.sh" + "on_stop/objects.sh";
    }

    /// `SWARM_PART=all`: more than CI runs.
    fn run_part(cgroup: super::Cgroup, arguments: &[&str], scripts: &[&str]) {
        let part = crate::setting("SWARM_PART", arguments[0]);
        crate::run(cgroup, &[&part], scripts);
    }

    crate::scenarios! {
        with run_part;
        swarm: V1 ["drain"] "archive/lib.sh" + "swarm/lib.sh" + "on_stop/swarm.sh";
    }

    /// `FAULT_ROUNDS`, of two faults each, and `FAULT_SEED`: by default what CI runs.
    fn run_rounds(cgroup: super::Cgroup, arguments: &[&str], scripts: &[&str]) {
        let rounds = crate::setting("FAULT_ROUNDS", arguments[1]);
        let seed = crate::setting("FAULT_SEED", arguments[2]);
        let all = [&[arguments[0], &rounds, &seed], &arguments[3..]].concat();
        let needs_objects = arguments[3..].contains(&"objects");
        let run = if needs_objects {
            crate::run_with_objects
        } else {
            crate::run
        };
        run(cgroup, &all, scripts);
    }

    crate::scenarios! {
        with run_rounds;
        faults: V2 ["crun" "5" "1000"] "on_stop/faults.sh";
        faults_objects: V2 ["crun" "5" "1001" "objects"] "on_stop/storage.sh" + "on_stop/faults.sh";
    }
}

/// Random operations with random faults, a sample: `make campaign` runs more.
mod campaign {
    crate::scenarios! {
        crun: V2 ["crun" "110" "2"] "campaign/campaign.sh";
        runc: V1 ["runc" "510" "2"] "campaign/campaign.sh";
    }
}

/// The user's own CRIU configuration is merged, never lost.
mod criu_conf {
    crate::scenarios! {
        crun: V2 ["crun"] "criu_conf.sh";
        runc: V1 ["runc"] "criu_conf.sh";
    }
}

/// docker's checkpoints with our shim: docker 26 with `SUITE=trixie`, 28 with `SUITE=forky`.
mod docker {
    crate::scenarios! {
        docker: V1 [] "archive/lib.sh" + "shim/lib.sh" + "shim/docker.sh";
    }
}

/// The examples, on containers without a GPU.
mod examples {
    crate::scenarios! {
        podman: V2 [] "examples/podman.sh";
        turns: V2 ["crun"] "vram/job.sh" + "examples/turns.sh";
        containerd: V1 [] "archive/lib.sh" + "shim/lib.sh" + "examples/containerd.sh";
        docker: V1 [] "archive/lib.sh" + "shim/lib.sh" + "examples/docker.sh";
        kubernetes: V2 [] "examples/kubernetes.sh";
    }
}

/// `cryopod setup`, with the engine's own daemon.
mod setup {
    crate::scenarios! {
        podman_crun: V2 ["crun"] "setup/podman.sh";
        docker: V1 [] "shim/lib.sh" + "setup/lib.sh" + "setup/docker.sh";
        containerd: V1 [] "shim/lib.sh" + "setup/containerd.sh";
        node: V1 [] "shim/lib.sh" + "setup/lib.sh" + "setup/node.sh";
    }
}

/// Checkpoints that fail: the container goes on running, nothing is left, the message names the cause.
mod failures {
    crate::scenarios! {
        crun: V2 ["crun"] "failures.sh";
        runc: V1 ["runc"] "failures.sh";
        restore_crun: V2 ["crun"] "restore_interrupted.sh";
        restore_runc: V1 ["runc"] "restore_interrupted.sh";
        messages_crun: V2 ["crun"] "messages.sh";
        messages_runc: V1 ["runc"] "messages.sh";
    }
}

/// Restores on other GPUs.
mod gpu_map {
    crate::scenarios! {
        crun: V2 ["crun"] "gpu_map.sh";
        runc: V1 ["runc"] "gpu_map.sh";
    }
}

/// Everything but `checkpoint` and `restore` of a GPU container goes through the wrapper as if it was not there.
mod passthrough {
    crate::scenarios! {
        crun_on_v2: V2 ["crun"] "passthrough.sh";
        runc_on_v1: V1 ["runc"] "passthrough.sh";
        runc_on_v2: V2 ["runc"] "passthrough.sh";
    }
}

/// CUDA containers under podman.
mod plugin_podman {
    crate::scenarios! {
        crun: V2 ["crun"] "plugin/podman.sh";
        runc: V2 ["runc"] "plugin/podman.sh";
        runc_v1: V1 ["runc"] "plugin/podman.sh";
        shared_memory_crun: V2 ["crun"] "plugin/sharing.sh";
        shared_memory_runc: V1 ["runc"] "plugin/sharing.sh";
    }
}

/// A running container moves to another host: a bed within the bed.
mod migrate {
    crate::scenarios! {
        podman: V2 ["podman" "crun"] "archive/lib.sh" + "shim/lib.sh" + "migrate/lib.sh" + "migrate/migrate.sh";
        docker: V1 ["docker" "runc"] "archive/lib.sh" + "shim/lib.sh" + "migrate/lib.sh" + "migrate/migrate.sh";
        ctr: V1 ["ctr" "runc"] "archive/lib.sh" + "shim/lib.sh" + "migrate/lib.sh" + "migrate/migrate.sh";
    }
}

/// The main job under podman: run, checkpoint, export, remove, restore from the archive, go on.
mod podman {
    crate::scenarios! {
        no_gpu_crun_v2: V2 ["crun"] "plain.sh";
        no_gpu_runc_v1: V1 ["runc"] "plain.sh";
        gpu_nodes_crun_v2: V2 ["crun"] "gpu_nodes.sh";
        gpu_nodes_runc_v1: V1 ["runc"] "gpu_nodes.sh";
        gpu_nodes_runc_v2: V2 ["runc"] "gpu_nodes.sh";
    }
}

/// Containers whose device nodes lead elsewhere after a restore; no GPU is needed.
mod remap {
    crate::scenarios! {
        nodes_crun_v1: V1 ["crun"] "remap/nodes.sh";
        nodes_crun_v2: V2 ["crun"] "remap/nodes.sh";
        nodes_runc_v1: V1 ["runc"] "remap/nodes.sh";
        nodes_runc_v2: V2 ["runc"] "remap/nodes.sh";
        ways_crun_v2: V2 ["crun"] "remap/ways.sh";
        ways_runc_v1: V1 ["runc"] "remap/ways.sh";
        failed_crun_v2: V2 ["crun"] "remap/failed.sh";
        failed_runc_v1: V1 ["runc"] "remap/failed.sh";
    }
}

/// The plan of a checkpoint's own restore: what comes back, and what is refused before the container is gone.
mod restore_here {
    crate::scenarios! {
        bundles_crun: V2 ["crun"] "restore_here/bundles.sh";
        bundles_runc: V1 ["runc"] "restore_here/bundles.sh";
        refused_crun: V2 ["crun"] "restore_here/refused.sh";
        refused_runc: V2 ["runc"] "restore_here/refused.sh";
        hybrid_with_v1_mounted: Host ["crun"] "restore_here/hybrid.sh";
        hybrid_with_v2_alone_mounted: HostV2 ["crun"] "restore_here/hybrid.sh";
    }
}

/// What an archive gives the restored container, against what the engine's spec gives it.
mod security {
    use super::*;

    /// Variants of CRIU's images: `MUTATIONS` of them, by default 150, chosen by `MUTATIONS_SEED`.
    fn mutations(cgroup: Cgroup, low: &[&str], scripts: &[&str]) {
        let (count, seed) = (setting("MUTATIONS", "150"), setting("MUTATIONS_SEED", "1"));
        let limited = |bed: Bed| bed.limit(std::time::Duration::from_secs(4 * 3600));
        let out = run_changed(cgroup, limited, &[low[0], &count, &seed], scripts);
        println!("{}", out.unwrap_or_default());
    }

    crate::scenarios! {
        with mutations;
        mutations_crun: V2 ["crun"] "security/mutations.sh";
        mutations_runc: V1 ["runc"] "security/mutations.sh";
    }

    crate::scenarios! {
        privileges_crun: V2 ["crun"] "security/privileges.sh";
        privileges_runc: V1 ["runc"] "security/privileges.sh";
        /// The fields of CRIU's messages are those of the bed's CRIU.
        schema: V2 [] "security/schema.sh";
        crafted_crun: V2 ["crun"] "security/crafted.sh";
        crafted_runc: V1 ["runc"] "security/crafted.sh";
        volumes_crun: V2 ["crun"] "security/volumes.sh";
        volumes_runc: V1 ["runc"] "security/volumes.sh";
        walls_crun: V2 ["crun"] "security/walls.sh";
        walls_runc: V1 ["runc"] "security/walls.sh";
        host_mounts_crun: V2 ["crun"] "archive/lib.sh" + "security/host_mounts.sh";
        host_mounts_runc: V1 ["runc"] "archive/lib.sh" + "security/host_mounts.sh";
        confined_crun: V2 ["crun"] "archive/lib.sh" + "security/confined.sh";
    }
}

/// The large files of checkpoints in a store, under a real containerd and podman.
mod store {
    crate::scenarios! {
        under_containerd_and_podman: V1 [] "archive/lib.sh" + "shim/lib.sh" + "shim/store.sh";
    }

    /// `STORE_ROUNDS` of a script, by default as many as CI runs.
    fn rounds(cgroup: super::Cgroup, arguments: &[&str], scripts: &[&str]) {
        let rounds = crate::setting("STORE_ROUNDS", arguments[0]);
        crate::run(cgroup, &[&rounds], scripts);
    }

    crate::scenarios! {
        with rounds;
        as_it_comes: V1 ["30"] "archive/lib.sh" + "shim/lib.sh" + "shim/store_default.sh";
        killed: V1 ["8"] "archive/lib.sh" + "shim/lib.sh" + "shim/store_killed.sh";
    }
}
