//! Tests reading the topology of a host from its files.

use cryopod_test_files::TestFiles;
use std::fs;
use std::path::Path;

use super::super::topology::Topology;
use super::*;
use cryopod_host::files::Host;

fn write(root: &Path, t: &Topology) {
    for n in &t.nodes {
        let dir = root.join(format!("sys/class/kfd/kfd/topology/nodes/{}", n.id));
        dir.dir("mem_banks/0");
        dir.put("gpu_id", format!("{}\n", n.gpu_id));
        let p = &n.properties;
        let mut text = format!(
            "cpu_cores_count {}\nlocation_id {}\n",
            n.cpu_cores_count, 0x4300
        );
        let more = p.numbers();
        let more = more.iter().filter(|(name, _)| !name.starts_with("vram_"));
        for (name, value) in more {
            text.push_str(&format!("{name} {value}\n"));
        }
        dir.put("properties", text);
        let heap = if p.vram_public == 1 { 1 } else { 2 };
        dir.put(
            "mem_banks/0/properties",
            format!("heap_type {heap}\nsize_in_bytes {}\nflags 0\n", p.vram_size),
        );
    }
}

/// In an order that does not depend on the file system.
fn sorted(mut t: Topology) -> Topology {
    t.nodes.sort_by_key(|n| n.id);
    for n in &mut t.nodes {
        n.pci = None;
        n.unique_id = None;
    }
    t
}

#[test]
fn what_the_kernel_shows_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let mut t = machine(2, 4, 0xa000);
    t.nodes[4].properties.vram_public = 0;
    write(dir.path(), &t);
    let host = Host::at(dir.path());
    let read = Topology::read(&host);
    assert_eq!(
        read.gpus().next().unwrap().pci.as_deref(),
        Some("0000:43:00.0")
    );
    assert_eq!(sorted(read), sorted(t));
    assert_eq!(Topology::read(&Host::at("/nowhere")), Topology::default());
}

#[test]
fn what_cannot_be_read_is_left_out_and_noted() {
    let dir = tempfile::tempdir().unwrap();
    let t = machine(1, 4, 0xa000);
    write(dir.path(), &t);
    let node = |n: u32| {
        dir.path()
            .join(format!("sys/class/kfd/kfd/topology/nodes/{n}"))
    };
    // As for a GPU that the device cgroup hides.
    node(1).put("gpu_id", "");
    fs::remove_file(node(2).join("properties")).unwrap();
    node(3).put("mem_banks/0/properties", "heap_type 0\nsize_in_bytes 5\n");
    fs::create_dir_all(node(8)).unwrap();
    let read = Topology::read(&Host::at(dir.path()));
    let mut left: Vec<u32> = read.nodes.iter().map(|n| n.id).collect();
    left.sort_unstable();
    assert_eq!(left, [0, 4]);
    let mut noted: Vec<(u32, bool)> = read
        .unreadable
        .iter()
        .map(|u| (u.node, u.stops_plugin))
        .collect();
    noted.sort_unstable();
    assert_eq!(noted, [(1, false), (2, true), (3, true), (8, false)]);
    node(4).put("properties", "simd_count\n");
    let read = Topology::read(&Host::at(dir.path()));
    assert!(
        read.unreadable
            .iter()
            .any(|u| u.node == 4 && u.what.contains("is not a name and a number"))
    );
}

#[test]
fn a_masked_gpu_is_gone() {
    let view = machine(1, 4, 0xa000).visible(&[128, 130]);
    let left: Vec<u32> = view.gpus().map(Node::render_minor).collect();
    assert_eq!(left, [128, 130]);
}
