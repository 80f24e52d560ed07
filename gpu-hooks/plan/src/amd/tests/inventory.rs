//! Tests the host's GPUs as the metadata records them.

use std::fs;

use super::super::{driver_version, gpus};
use cryopod_host::files::Host;

#[test]
fn the_hosts_gpus() {
    let dir = tempfile::tempdir().unwrap();
    let node = |n: u32, gpu_id: &str, properties: &str| {
        let d = dir
            .path()
            .join(format!("sys/class/kfd/kfd/topology/nodes/{n}"));
        fs::create_dir_all(d.join("mem_banks/0")).unwrap();
        fs::write(d.join("gpu_id"), gpu_id).unwrap();
        fs::write(d.join("name"), "aldebaran\n").unwrap();
        fs::write(d.join("properties"), properties).unwrap();
        fs::write(
            d.join("mem_banks/0/properties"),
            "heap_type 1\nsize_in_bytes 68702699520\n",
        )
        .unwrap();
    };
    node(0, "0\n", "cpu_cores_count 64\n");
    node(
        1,
        "51110\n",
        "drm_render_minor 128\nlocation_id 17152\ndomain 0\nunique_id 8235863091\nvendor_id 4098\n",
    );
    node(
        10,
        "7\n",
        "drm_render_minor 129\nlocation_id 17408\ndomain 1\n",
    );
    node(2, "", "");
    let host = Host::at(dir.path());
    let gpus = gpus(&host);
    assert_eq!(gpus.len(), 2);
    assert_eq!(gpus[0].id, format!("{:016x}", 8_235_863_091_u64));
    assert_eq!(
        (
            gpus[0].pci.as_str(),
            gpus[0].render_minor,
            gpus[0].memory_bytes
        ),
        ("0000:43:00.0", Some(128), Some(68_702_699_520))
    );
    assert_eq!((gpus[1].id.as_str(), gpus[1].index), ("0001:44:00.0", 1));
    assert_eq!(driver_version(&host), None);
    fs::create_dir_all(dir.path().join("proc/sys/kernel")).unwrap();
    fs::write(dir.path().join("proc/sys/kernel/osrelease"), "6.12.1\n").unwrap();
    assert_eq!(driver_version(&host).as_deref(), Some("6.12.1"));
}
