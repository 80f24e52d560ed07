//! Tests what is found missing in a checkpoint, and in CRIU's log of a restore.

use std::fs;

use cryopod_archive::metadata::{Gpu, GpuFacts, GpuProcess};
use cryopod_host::nodes::Vendor;

use super::super::saved::{complete, note, restored_wrongly};
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
fn the_log_of_a_restore_shows_what_went_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("restore.log");
    let found = |text: &str, pairs: &[(u32, u32)]| {
        fs::write(&path, text).unwrap();
        restored_wrongly(&path, pairs)
    };
    let (one, two) = ([(0xa000, 0xb000)], [(0xa000, 0xb000), (0xa001, 0xb001)]);
    let well = "(00.1) amdgpu_plugin: Thread[0xa000] started\n(00.2) amdgpu_plugin: Restore successful (fd:3)\n";
    assert_eq!(found(well, &one), None);
    let bad = "(00.3)      1: Error (amdgpu_plugin.c:680): amdgpu_plugin: failed to submit command for SDMA IB: Success";
    let copy = found(
        &format!("{well}{}\n{bad}\n{well}", "x".repeat(1 << 20)),
        &one,
    );
    assert!(copy.unwrap().ends_with(bad));
    assert_eq!(restored_wrongly(&dir.path().join("none"), &two), None);

    // A process tries a pair, and another process prints its map between.
    let map = |process: u32, first: u32, second: u32| {
        ["Maps after all nodes matched", "===Maps===============",
            "GPU: 0x0000 -> 0x0000", &format!("GPU: 0xA000 -> 0x{first:04X}"), &format!("GPU: 0xA001 -> 0x{second:04X}"), "CPU: 00 -> 00", "======================"]
            .map(|said| format!("(00.4)     {process}: amdgpu_plugin: {said}\n    {process}: other\n(00.4)     7: amdgpu_plugin: GPU: 0xA000 -> 0xB001\n"))
            .concat()
    };
    assert_eq!(found(&map(1, 0xb000, 0xb001), &two), None);
    assert_eq!(
        found(&(map(1, 0xb000, 0xb001) + &map(2, 0xb000, 0xb001)), &two),
        None
    );
    let other = found(&(map(1, 0xb000, 0xb001) + &map(2, 0xb001, 0xb000)), &two).unwrap();
    assert!(
        other.ends_with("gpu.map=0xa000=0xb001,0xa001=0xb000"),
        "{other}"
    );
    assert_eq!(found(&map(2, 0xb001, 0xb000), &[]), None);
    let silent = found(well, &two).unwrap();
    assert!(silent.contains("does not say"), "{silent}");
}
