//! CRIU loads the GPU plugins that a container needs and no others; one that it cannot load is refused beforehand,
//! as is all else for which a restore could not work.
use std::path::Path;
use std::process::Command;

use cryopod_tests::bed::{Bed, Cgroup, workspace};

/// Stand-ins for CRIU's plugins, good and bad, built in a directory by the machine's C compiler.
fn stand_ins(dir: &Path) {
    let source = workspace().join("tests/tests/standin/plugin.c");
    let built = |name: &str, flags: &[&str]| {
        let mut cc = Command::new("cc");
        cc.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror"]);
        if !flags.iter().any(|f| f.starts_with("-DNAME")) {
            cc.arg("-DNAME=\"amdgpu_plugin\"");
        }
        cc.arg(&source).args(flags);
        let done = cc.arg("-o").arg(dir.join(name)).status().unwrap();
        assert!(done.success(), "{name}");
    };
    built("amdgpu_plugin.so", &[]);
    built("cuda_plugin.so", &["-DNAME=\"cuda_plugin\""]);
    built("newer-abi.so", &["-DVERSION=0x400"]);
    built("more-hooks.so", &["-DHOOKS=99"]);
    built("other-symbols.so", &["-DWANTS=criu_of_another_time"]);
    // A library that is there when the plugin is linked, and not in the bed.
    let library = dir.join("libnowhere.so");
    let flags = ["-shared", "-fPIC", "-Wl,-soname,libnowhere.so", "-x", "c"];
    let mut cc = Command::new("cc");
    cc.args(flags).arg("/dev/null").arg("-o").arg(&library);
    assert!(cc.status().unwrap().success());
    let at = format!("-L{}", dir.display());
    built("no-library.so", &[&at, "-Wl,--no-as-needed", "-lnowhere"]);
    std::fs::remove_file(library).unwrap();
}

fn run(low: &str, cgroup: Cgroup, script: &str) {
    let Some(bed) = Bed::new(cgroup) else { return };
    let dir = tempfile::tempdir().unwrap();
    stand_ins(dir.path());
    crate::run_in(&bed.bind(dir.path(), "/standin"), &[low], &[script]);
}

const PLUGINS: &str = include_str!("scripts/gpu_plugins.sh");
const CHECKS: &str = include_str!("scripts/gpu_checks.sh");

#[test]
fn crun() {
    run("crun", Cgroup::V2, PLUGINS);
}

#[test]
fn runc() {
    run("runc", Cgroup::V1, PLUGINS);
}

#[test]
fn checks_crun() {
    run("crun", Cgroup::V2, CHECKS);
}

#[test]
fn checks_runc() {
    run("runc", Cgroup::V1, CHECKS);
}
