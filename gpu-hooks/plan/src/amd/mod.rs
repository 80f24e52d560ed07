//! Reads the host's AMD GPUs from the KFD topology and DRM, and predicts whether a checkpoint of CRIU's amdgpu plugin
//! would restore on them.
//!
//! - [`image`]: reads the plugin's images.
//! - [`topology`]: reads CPUs, GPUs and links, of an image or of this host.
//! - [`checks`]: compares what the plugin compares; its switches.
//! - [`matcher`]: finds a mapping, whenever one exists.
//! - [`plugin_choice`]: predicts the plugin's own choice.
//! - [`choose`]: combines both.
//! - [`open_nodes`]: refuses processes whose open nodes the plugin could not restore.
//! - [`saved`]: finds what the plugin has left out without an error, of a checkpoint and of a restore.
//! - [`unpause`]: lets queues run again that a failed checkpoint has left paused.
//!
//! A topology node with `gpu_id` 0 is a CPU. The kernel refuses `gpu_id` and `properties` to a reader whose device
//! cgroup does not allow the render node; such nodes are left out (facts of CRIU's amdgpu plugin).

pub mod checks;
pub mod choose;
mod graph;
pub mod image;
pub mod matcher;
pub mod open_nodes;
pub mod plugin_choice;
mod proto;
mod reasons;
mod ring;
pub mod saved;
mod search;
pub mod topology;
pub mod unpause;

use cryopod_archive::metadata::Gpu;
use cryopod_host::nodes::Vendor;
use serde_json::{Map, Value};

use cryopod_host::files::Host;

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
            id,
            vendor: Vendor::Amd,
            index: u32::try_from(found.len()).unwrap_or(u32::MAX),
            model,
            pci,
            minor: None,
            render_minor,
            memory_bytes,
            properties,
        });
    }
    found
}

/// `location_id` packs bus, device and function as PCI does.
fn pci_address(domain: u64, location: u64) -> String {
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
mod tests;
