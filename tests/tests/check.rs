//! `cryopod check` says what is so: in the test bed, with parts of it taken away, and on a bare machine.

use std::process::Command;

use cryopod_tests::bed::{Bed, Cgroup, bin_dir};

#[test]
fn in_the_bed() {
    let Some(bed) = Bed::new(Cgroup::V2) else {
        return;
    };
    assert_eq!(bed.sh(include_str!("scripts/check.sh")).ok(), "checked\n");
}

/// A machine without CRIU and runtimes, as far as PATH says.
#[test]
fn on_a_bare_machine() {
    let out = Command::new(bin_dir().join("cryopod"))
        .arg("check")
        .env("PATH", "/nowhere")
        .env("CRYOPOD_CONFIG", "/dev/null")
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(1));
    let text = String::from_utf8(out.stdout).unwrap();
    for want in [
        "missing criu ",
        "install the package cryopod-criu",
        "missing low-level runtime",
        "note    engines",
        "A checkpoint cannot work on this host yet",
    ] {
        assert!(text.contains(want), "{want}: {text}");
    }
}
