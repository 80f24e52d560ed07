//! Reads the host's AMD GPUs and the version of their kernel driver (NVIDIA's: `cryopod_cuda::gpus::nvidia`).

use cryopod_archive::metadata::Gpu;
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use serde_json::{Map, Value};

pub const TOPOLOGY: &str = "/sys/class/kfd/kfd/topology/nodes";

/// The amdgpu kernel driver's version: that of the out-of-tree module, or the kernel's; `None` if the driver is not
/// loaded.
pub fn driver_version(host: &Host) -> Option<String> {
    if let Some(version) = host.line("/sys/module/amdgpu/version") {
        return Some(version);
    }
    (host.is_dir("/sys/module/amdgpu") || host.is_dir(TOPOLOGY))
        .then(|| host.line("/proc/sys/kernel/osrelease"))
        .flatten()
}

pub fn gpus(host: &Host) -> Vec<Gpu> {
    let mut found = Vec::new();
    for node in host.names(TOPOLOGY) {
        let dir = format!("{TOPOLOGY}/{node}");
        let Some(gpu_id) = host
            .line(format!("{dir}/gpu_id"))
            .and_then(|s| s.parse::<u64>().ok())
            .filter(|id| *id != 0)
        else {
            continue;
        };
        let Ok(text) = host.text(format!("{dir}/properties")) else {
            continue;
        };
        let mut properties: Map<String, Value> = Map::new();
        for line in text.lines() {
            if let Some((key, value)) = line.split_once(' ')
                && let Ok(value) = value.trim().parse::<u64>()
            {
                properties.insert(key.to_owned(), value.into());
            }
        }
        let number = |key: &str| properties.get(key).and_then(Value::as_u64);
        let pci = pci_address(
            number("domain").unwrap_or(0),
            number("location_id").unwrap_or(0),
        );
        let id = match number("unique_id") {
            Some(id) if id != 0 => format!("{id:016x}"),
            _ => pci.clone(),
        };
        let render_minor = number("drm_render_minor").filter(|m| *m != 0);
        let model = host
            .line(format!("{dir}/name"))
            .filter(|n| !n.is_empty())
            .unwrap_or_else(|| format!("gfx target {}", number("gfx_target_version").unwrap_or(0)));
        let memory_bytes = vram_bytes(host, &dir);
        properties.insert("gpu_id".into(), gpu_id.into());
        found.push(Gpu {
            index: u32::try_from(found.len()).unwrap_or(u32::MAX),
            model,
            pci,
            render_minor,
            memory_bytes,
            properties,
            ..Gpu::new(Vendor::Amd, id)
        });
    }
    found
}

/// `location_id` packs bus, device and function as PCI does.
pub fn pci_address(domain: u64, location: u64) -> String {
    format!(
        "{domain:04x}:{:02x}:{:02x}.{:x}",
        (location >> 8) & 0xff,
        (location >> 3) & 0x1f,
        location & 7
    )
}

/// Size of the first memory bank that is VRAM: heap type 1 (host-visible) or 2 (private).
fn vram_bytes(host: &Host, dir: &str) -> Option<u64> {
    host.names(format!("{dir}/mem_banks"))
        .iter()
        .find_map(|bank| {
            let text = host
                .text(format!("{dir}/mem_banks/{bank}/properties"))
                .ok()?;
            let number = |key: &str| {
                text.lines().find_map(|l| {
                    let (k, v) = l.split_once(' ')?;
                    if k == key {
                        v.trim().parse::<u64>().ok()
                    } else {
                        None
                    }
                })
            };
            matches!(number("heap_type"), Some(1 | 2)).then(|| number("size_in_bytes"))?
        })
}

#[cfg(test)]
mod tests {

    use super::*;
    use cryopod_test_files::TestFiles;

    #[test]
    fn the_hosts_gpus() {
        let dir = tempfile::tempdir().unwrap();
        let node = |n: u32, gpu_id: &str, properties: &str| {
            let d = dir
                .path()
                .join(format!("sys/class/kfd/kfd/topology/nodes/{n}"));
            d.put("gpu_id", gpu_id);
            d.put("name", "aldebaran\n");
            d.put("properties", properties);
            d.put(
                "mem_banks/0/properties",
                "heap_type 1\nsize_in_bytes 68702699520\n",
            );
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
        dir.put("proc/sys/kernel/osrelease", "6.12.1\n");
        assert_eq!(driver_version(&host).as_deref(), Some("6.12.1"));
    }
}
