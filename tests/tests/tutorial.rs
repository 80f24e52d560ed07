//! The commands of docs/tutorial.md.

use cryopod_tests::bed::{Bed, Cgroup, containerd_has_cri_checkpoints};

crate::scenarios! {
    engines: V1 [] "shim/lib.sh" + "setup/lib.sh" + "tutorial/lib.sh" + "tutorial/engines.sh";
}

#[test]
fn gpu() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    let bed = bed.bind(&crate::containers::torch(), "/opt/torch");
    let scripts = [
        include_str!("scripts/tutorial/lib.sh"),
        include_str!("scripts/tutorial/gpu.sh"),
    ];
    crate::run_in(&bed, &[], &scripts);
}

/// The chart, and `kubectl cryopod`.
#[test]
fn cluster() {
    if !containerd_has_cri_checkpoints() {
        println!("only with SUITE=forky or CRYOPOD_CONTAINERD");
        return;
    }
    let scripts = [
        include_str!("scripts/archive/lib.sh"),
        include_str!("scripts/shim/lib.sh"),
        include_str!("scripts/setup/lib.sh"),
        include_str!("scripts/kubernetes/cluster.sh"),
    ];
    crate::run(Cgroup::V1, &[], &scripts);
}
