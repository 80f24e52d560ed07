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

fn run(cgroup: Cgroup, arguments: &[&str], scripts: &[&str]) {
    let dir = tempfile::tempdir().unwrap();
    let bound = |bed: Bed| {
        stand_ins(dir.path());
        bed.bind(dir.path(), "/standin")
    };
    crate::run_changed(cgroup, bound, arguments, scripts);
}

crate::scenarios! {
    with run;
    crun: V2 ["crun"] "gpu_plugins.sh";
    runc: V1 ["runc"] "gpu_plugins.sh";
    checks_crun: V2 ["crun"] "gpu_checks.sh";
    checks_runc: V1 ["runc"] "gpu_checks.sh";
}
