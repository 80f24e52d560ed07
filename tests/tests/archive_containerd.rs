//! Archives of GPU containers under containerd and docker, on the simulated driver: containerd's CRI restores from
//! our image. `tests/run` runs it with `SUITE=forky`: containerd 1.7 has no CRI checkpoints, and it pauses a container
//! ahead of its checkpoint, which CRIU 4.1 answers with a driver that hangs.

use cryopod_tests::bed::{Bed, Cgroup, containerd_has_cri_checkpoints};

#[test]
fn containerd() {
    if !containerd_has_cri_checkpoints() {
        println!("only with SUITE=forky or CRYOPOD_CONTAINERD");
        return;
    }
    // On v2 containerd's shim starts no container in the bed (docs/testbed.md).
    let Some(bed) = Bed::new(Cgroup::V1) else {
        return;
    };
    let script = concat!(
        include_str!("scripts/archive/lib.sh"),
        "\n",
        include_str!("scripts/archive/containerd.sh")
    );
    let out = bed.sh(script).ok();
    let passed = out.lines().filter(|line| line.starts_with("ok: ")).count();
    let restored = !out.contains("no restore by the CRI");
    assert_eq!(passed, if restored { 26 } else { 23 }, "{out}");
}
