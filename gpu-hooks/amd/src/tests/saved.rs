//! Tests what is found missing in a checkpoint, and in CRIU's log of a restore.

use std::fs;

use cryopod_archive::metadata::{Gpu, GpuFacts, GpuProcess};
use cryopod_host::nodes::Vendor;

use super::super::saved::{complete, failed_copy, note};
use super::image::{framed, kfd, sample};

/// The files of a process with three GPUs, whose buffers are all on the first: 3 MiB of VRAM and 4 KiB of GTT.
fn checkpoint() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let image = framed(&kfd(&sample(), 0, (0, 0)));
    fs::write(dir.path().join("amdgpu-kfd-7.img"), image).unwrap();
    for (gpu, bytes) in [("a000", (3 << 20) + 4096), ("a001", 0), ("a002", 0)] {
        let name = format!("amdgpu-pages-7-{gpu}.img");
        fs::write(dir.path().join(name), framed(&vec![1; bytes])).unwrap();
    }
    dir
}

#[test]
fn a_whole_checkpoint_is_complete() {
    let images = complete(checkpoint().path()).unwrap();
    let process = |ns_pid| GpuProcess {
        pid: 1000 + ns_pid,
        ns_pid,
        comm: String::new(),
        vendors: vec![Vendor::Amd],
        gpu_memory: Vec::new(),
    };
    let mut facts = GpuFacts {
        gpus: vec![Gpu {
            render_minor: Some(128),
            ..Gpu::new(Vendor::Amd, "00a1")
        }],
        processes: vec![process(41), process(42)],
        ..GpuFacts::default()
    };
    note(&images, &mut facts);
    assert!(facts.processes[0].gpu_memory.is_empty());
    let used = &facts.processes[1].gpu_memory;
    assert_eq!((used[0].gpu.as_str(), used[0].bytes), ("00a1", 3_149_824));
}

#[test]
fn what_is_missing_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let none = complete(dir.path()).unwrap_err();
    assert!(none.contains("no amdgpu-kfd-*.img"), "{none}");

    // A copy has failed: the plugin has announced everything, and written a part.
    let dir = checkpoint();
    let pages = dir.path().join("amdgpu-pages-7-a000.img");
    let bytes = fs::read(&pages).unwrap();
    fs::write(&pages, &bytes[..1 << 20]).unwrap();
    let short = complete(dir.path()).unwrap_err();
    assert!(
        short.contains("amdgpu-pages-7-a000.img announces 3149824 bytes and has 1048568"),
        "{short}"
    );

    // The process was restored on other GPUs: the plugin has looked for buffers under their ids.
    fs::rename(&pages, dir.path().join("amdgpu-pages-7-b000.img")).unwrap();
    let moved = complete(dir.path()).unwrap_err();
    assert!(
        moved.contains("amdgpu-pages-7-a000.img is not there: the process was restored"),
        "{moved}"
    );
    assert!(!moved.contains("a001"), "{moved}");
}

#[test]
fn a_copy_that_failed_is_found_in_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("restore.log");
    let well = "(00.1) amdgpu_plugin: Thread[0xa000] started\n(00.2) amdgpu_plugin: Restore successful (fd:3)\n";
    fs::write(&log, well).unwrap();
    assert_eq!(failed_copy(&log), None);
    let bad = "(00.3)      1: Error (amdgpu_plugin.c:680): amdgpu_plugin: failed to submit command for SDMA IB: Success";
    fs::write(
        &log,
        format!("{well}{}\n{bad}\n{well}", "x".repeat(1 << 20)),
    )
    .unwrap();
    assert_eq!(failed_copy(&log).as_deref(), Some(bad));
    assert_eq!(failed_copy(&dir.path().join("none")), None);
}
