//! Collects GPUs from a checkpoint's record, from this host, and from device nodes.

use cryopod_archive::metadata::{Gpu, GpuFacts};
use cryopod_cuda::gpus::nvidia;
use cryopod_host::files::Host;
use cryopod_host::nodes::{self, DeviceNode, NodeRole, Vendor};

use crate::gpus::amd_gpus;

/// The checkpoint's GPUs: those that the metadata describes, and the nodes that lead to none of them.
pub fn recorded(gpu: &GpuFacts) -> Vec<Gpu> {
    let mut all = gpu.gpus.clone();
    let alias = |n: &DeviceNode| {
        gpu.moved
            .iter()
            .any(|m| m.path == n.path && m.alias_of.is_some())
    };
    let bare = gpu.nodes.iter().filter(|n| n.gpu.is_none() && !alias(n));
    for gpu in of_nodes(&bare.cloned().collect::<Vec<_>>()) {
        if !all.iter().any(|g| same(g, &gpu)) {
            all.push(gpu);
        }
    }
    all
}

/// This host's GPUs of a vendor, from its driver, else from its device nodes.
pub fn here(host: &Host, vendor: Vendor) -> Vec<Gpu> {
    let described = match vendor {
        Vendor::Nvidia => nvidia::gpus(host),
        Vendor::Amd => amd_gpus::gpus(host),
    };
    if described.is_empty() {
        of_nodes(&nodes::of_host(host, vendor))
    } else {
        described
    }
}

/// Makes GPUs from device nodes alone, one for each device; the node's path is the id.
pub fn of_nodes(nodes: &[DeviceNode]) -> Vec<Gpu> {
    let mut found: Vec<Gpu> = Vec::new();
    for node in nodes {
        let (minor, render_minor) = match (node.vendor, node.role) {
            (Vendor::Nvidia, NodeRole::Gpu) => (nodes::number(node), None),
            (Vendor::Amd, NodeRole::Render) => (None, nodes::number(node)),
            _ => continue,
        };
        let id = node.host_path.as_ref().unwrap_or(&node.path);
        let gpu = Gpu {
            index: u32::try_from(found.iter().filter(|g| g.vendor == node.vendor).count())
                .unwrap_or(u32::MAX),
            minor,
            render_minor,
            ..Gpu::new(node.vendor, id)
        };
        if !found.iter().any(|g| same(g, &gpu)) {
            found.push(gpu);
        }
    }
    found
}

/// Returns true for the same GPU: the same identity, or the same node where one of them is only a node.
pub(crate) fn same(a: &Gpu, b: &Gpu) -> bool {
    let only_node = |g: &Gpu| g.id.starts_with('/');
    a.vendor == b.vendor && (a.id == b.id || (only_node(a) || only_node(b)) && same_place(a, b))
}

/// Returns true if the node of this GPU is known. The driver's library alone does not report it.
pub(crate) fn has_place(gpu: &Gpu) -> bool {
    gpu.minor.is_some() || gpu.render_minor.is_some()
}

pub(crate) fn same_place(a: &Gpu, b: &Gpu) -> bool {
    a.vendor == b.vendor
        && match a.vendor {
            Vendor::Nvidia => a.minor.is_some() && a.minor == b.minor,
            Vendor::Amd => a.render_minor.is_some() && a.render_minor == b.render_minor,
        }
}
