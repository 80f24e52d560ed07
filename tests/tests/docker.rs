//! docker's checkpoints with our shim: docker 26 with `SUITE=trixie`, 28 with `SUITE=forky`.

use cryopod_tests::bed::{Bed, Cgroup};

#[test]
fn docker() {
    // On v2 containerd's shim starts no container in the bed (docs/testbed.md).
    let Some(bed) = Bed::new(Cgroup::V1) else {
        return;
    };
    let script = concat!(
        include_str!("scripts/archive/lib.sh"),
        "\n",
        include_str!("scripts/shim/lib.sh"),
        "\n",
        include_str!("scripts/shim/docker.sh")
    );
    let out = bed.sh(script).ok();
    let passed = out.lines().filter(|line| line.starts_with("ok: ")).count();
    // docker 26 may restore with containerd's own shim, when containerd was quick to throw a tar away.
    let own = usize::from(!out.contains("containerd's own shim: restored"));
    assert_eq!(passed, 64 + own, "{out}");
}
