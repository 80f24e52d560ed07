//! containerd's CRI with our shim as a runtime class. `tests/run` runs it with `SUITE=forky`: containerd 1.7 has no CRI
//! checkpoints. containerd 2.4 has no restores.

use cryopod_tests::bed::{Bed, Cgroup, containerd_has_cri_checkpoints};

#[test]
fn cri() {
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
        include_str!("scripts/shim/lib.sh"),
        "\n",
        include_str!("scripts/shim/cri.sh")
    );
    let out = bed.sh(script).ok();
    let passed = out.lines().filter(|line| line.starts_with("ok: ")).count();
    let restored = !out.contains("no restore by the CRI");
    assert_eq!(passed, if restored { 21 } else { 16 }, "{out}");
}
