//! What a container's processes show of themselves below `/proc`: mounts, mapped files, status, descriptors, and what a
//! plan makes of them. The parts of the input are separated by NUL.
#![no_main]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use cryopod_gpu_plan::hazards::{self, CriuLimits};
use cryopod_gpu_plan::live;
use cryopod_gpu_plan::mounts;
use cryopod_host::destinations::Destinations;
use cryopod_host::files::Host;
use cryopod_host::mountinfo;
use cryopod_host::processes::Scan;
use cryopod_host::spec::Spec;
use libfuzzer_sys::fuzz_target;

static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
    let root = cryopod_fuzz::scratch("proc");
    let directories = ["proc/7/fd", "proc/7/fdinfo", "proc/7/ns", "proc/self"];
    for directory in directories {
        let _ = fs::create_dir_all(root.join(directory));
    }
    // A descriptor of a file, so that its mount is asked for.
    let _ = std::os::unix::fs::symlink("/etc/hostname", root.join("proc/7/fd/3"));
    let host = "1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:50 / /run/c/rootfs rw - overlay o rw\n";
    let _ = fs::write(root.join("proc/self/mountinfo"), host);
    root
});

fuzz_target!(|data: &[u8]| {
    let files = [
        "proc/7/mountinfo",
        "proc/7/maps",
        "proc/7/status",
        "proc/7/fdinfo/3",
        "proc/7/stat",
        "proc/7/cgroup",
    ];
    let mut parts = data.split(|b| *b == 0);
    for file in files {
        let part = parts.next().unwrap_or_default();
        if fs::write(ROOT.join(file), part).is_err() {
            return;
        }
        let text = String::from_utf8_lossy(part);
        cryopod_host::processes::stat::Stat::parse(&text);
    }
    let host = Host::at(&*ROOT);
    let spec = Spec::from_json(serde_json::json!({
        "root": {"path": "/run/c/rootfs"},
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}],
    }));
    for mount in mountinfo::of(&host, "7") {
        assert!(!mount.fs_type.contains(' '));
    }
    let destinations = Destinations::of(&host, &spec, Path::new("/run/c"));
    let (found, _) = mounts::unnamed(&host, &spec, &destinations, 7);
    assert!(found.foreign.len() <= 4096 && found.own.len() <= 4096);
    let scan = Scan::of(&host, &[7]);
    scan.memory_bytes();
    for refusal in hazards::refusals(&scan, &host, &spec, &CriuLimits::default()) {
        let _ = refusal.to_string();
    }
    live::tree(&host, 7);
    live::start_time(&host, 7);
});
