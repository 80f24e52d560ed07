//! What an archive gives the restored container, against what the engine's spec gives it.

use cryopod_tests::bed::{Bed, Cgroup};

fn privileges(low: &str, cgroup: Cgroup) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let script = format!(
        "set -- {low}\n{}",
        include_str!("scripts/security/privileges.sh")
    );
    let out = bed.sh(&script).ok();
    assert_eq!(
        out.lines().filter(|l| l.starts_with("ok: ")).count(),
        27,
        "{out}"
    );
}

#[test]
fn privileges_crun() {
    privileges("crun", Cgroup::V2);
}

#[test]
fn privileges_runc() {
    privileges("runc", Cgroup::V1);
}
