//! The large files of checkpoints in a store, under a real containerd and podman, on the simulated driver.

use cryopod_tests::bed::{Bed, Cgroup};

#[test]
fn under_containerd_and_podman() {
    // On v2 containerd's shim starts no container in the bed (docs/testbed.md).
    let Some(bed) = Bed::new(Cgroup::V1) else {
        return;
    };
    let script = concat!(
        include_str!("scripts/archive/lib.sh"),
        "\n",
        include_str!("scripts/shim/lib.sh"),
        "\n",
        include_str!("scripts/shim/store.sh")
    );
    let out = bed.sh(script).ok();
    let passed = out.lines().filter(|line| line.starts_with("ok: ")).count();
    assert_eq!(passed, 42, "{out}");
}
