//! Maps each GPU device node of a checkpoint to its place on this host.
//!
//! The driver's library opens nodes by their native names: `/dev/nvidia1` is the GPU of minor 1, `renderD130` the
//! render node of minor 130. So the nodes of a GPU that moves get the native names of the new one. The old names are
//! kept as aliases for processes that hold them, except where they are now the native name of another GPU. When two
//! GPUs are swapped, every name keeps its meaning. Numbers are those of this host's nodes, as the majors of
//! `nvidia-uvm`, `nvidia-caps` and `kfd` differ between hosts.

use cryopod_archive::metadata::{Gpu, GpuFacts, MovedNode};
use cryopod_host::nodes::{DeviceNode, NodeRole, NodeSource, Vendor};

use crate::ceiling::{AskedNode, Ceiling};
use crate::checks::switches::HOW_TO_MAP;
use crate::mapping::gpumap::Choice;
use crate::refusal::Refusal;
use cryopod_host::nodes;
use cryopod_host::spec::Spec;

/// The annotation in a restored container's spec that lists its moved nodes: JSON, a list of [`MovedNode`].
pub const ANNOTATION: &str = "dev.cryopod.gpu.moved";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeTarget {
    pub path: String,
    /// The node of this host.
    pub host_path: String,
    pub major: u64,
    pub minor: u64,
    /// Path of the recorded node that it replaces.
    pub from: String,
    /// Its native name, if this is only an alias.
    pub alias_of: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Remap {
    /// The nodes, those of the checkpoint in their order, then the new names.
    pub targets: Vec<NodeTarget>,
    pub recorded: Vec<DeviceNode>,
    pub moved: Vec<MovedNode>,
}

impl Remap {
    /// The nodes that the checkpoint lacks or has otherwise.
    pub fn changed(&self) -> Vec<&NodeTarget> {
        self.targets
            .iter()
            .filter(|t| {
                !self
                    .recorded
                    .iter()
                    .any(|n| n.path == t.path && (n.major, n.minor) == (t.major, t.minor))
            })
            .collect()
    }

    pub fn recorded(&self, path: &str) -> Option<&DeviceNode> {
        self.recorded.iter().find(|n| n.path == path)
    }

    /// The paths under which an engine's spec may name the checkpoint's node at `path`.
    pub fn engine_paths<'a>(&'a self, path: &'a str) -> impl Iterator<Item = &'a str> {
        let moved = self.moved.iter().filter(move |m| m.path == path);
        std::iter::once(path).chain(moved.map(|m| m.engine.path.as_str()))
    }
}

/// Maps every node.
pub fn remap(
    ceiling: &Ceiling<'_>,
    gpu: &GpuFacts,
    chosen: &[Choice],
) -> Result<Remap, Vec<Refusal>> {
    let mut refusals = Vec::new();
    let mut natives: Vec<NodeTarget> = Vec::new();
    let mut aliases: Vec<NodeTarget> = Vec::new();
    for node in &gpu.nodes {
        let Some((target, native)) = place(ceiling, gpu, node, chosen, &mut refusals) else {
            continue;
        };
        if target.path != node.path {
            aliases.push(NodeTarget {
                path: node.path.clone(),
                alias_of: Some(target.path.clone()),
                ..target.clone()
            });
        }
        if native {
            natives.push(target);
        } else {
            aliases.push(target);
        }
    }
    if !refusals.is_empty() {
        return Err(refusals);
    }
    let mut all: Vec<NodeTarget> = Vec::new();
    for target in natives.into_iter().chain(aliases) {
        if !all.iter().any(|t| t.path == target.path) {
            all.push(target);
        }
    }
    let order = |t: &NodeTarget| {
        let at = gpu.nodes.iter().position(|n| n.path == t.path);
        at.unwrap_or(usize::MAX)
    };
    all.sort_by_key(order);
    Ok(Remap {
        targets: all,
        recorded: gpu.nodes.clone(),
        moved: gpu.moved.clone(),
    })
}

/// Returns the node's new place, and whether that is more than an alias.
fn place(
    ceiling: &Ceiling<'_>,
    gpu: &GpuFacts,
    node: &DeviceNode,
    chosen: &[Choice],
    refusals: &mut Vec<Refusal>,
) -> Option<(NodeTarget, bool)> {
    let host = ceiling.host;
    let own = node.host_path.as_ref().unwrap_or(&node.path);
    let behind = behind(gpu, node);
    let old = nodes::number(behind);
    let choice = chosen.iter().find(|c| {
        let known = behind.gpu.as_ref() == Some(&c.old.id);
        c.old.vendor == node.vendor && old.is_some() && (known || number_of(&c.old) == old)
    });
    let new = choice.and_then(|c| number_of(&c.new));
    let (path, host_path, alias_of) = match (old, new) {
        (Some(old), Some(new)) => {
            let native = nodes::native(node.vendor, new);
            let beside = renamed(own, old, new).filter(|p| host.char_device(p).is_some());
            let host_path = beside.unwrap_or_else(|| native.clone());
            match renamed(&node.path, old, new).filter(|_| behind.path == node.path) {
                Some(path) => (path, host_path, None),
                None => (node.path.clone(), host_path, Some(native)),
            }
        }
        _ => (node.path.clone(), own.clone(), None),
    };
    let asked = AskedNode::Node {
        given: own,
        host_path: &host_path,
    };
    let role = |class| match class {
        nodes::Class::Known(vendor, role) => (vendor, role) == (node.vendor, node.role),
        nodes::Class::Drm(role) => role == node.role,
    };
    let refused = match ceiling.admit(asked) {
        Ok(()) if nodes::classify(&host_path).is_some_and(role) => None,
        Ok(()) => Some(Refusal::new(
            format!(
                "{host_path}, which the record names for {}, has another role than it says",
                node.path
            ),
            "the checkpoint cannot be used as it is: its record was changed",
        )),
        Err(refused) => Some(refused),
    };
    if let Some(refused) = refused {
        refusals.push(refused);
        return None;
    }
    // A render node may be another vendor's here.
    let ours = |n: &(u64, u64)| {
        nodes::identify(host, &host_path, n.0, n.1) == Some((node.vendor, node.role))
    };
    let Some((major, minor)) = host.char_device(&host_path).filter(ours) else {
        let is_used = matches!(node.role, NodeRole::Gpu | NodeRole::Control | NodeRole::Uvm)
            || (node.vendor, node.role) == (Vendor::Amd, NodeRole::Render);
        if is_used && is_given(gpu, node) {
            refusals.push(absent(node, &host_path));
        } else {
            tracing::warn!(
                "{}: this host has no {host_path}; the node stays what it was",
                node.path
            );
        }
        return None;
    };
    if !of_a_choice(node, &host_path, (major, minor), chosen) {
        refusals.push(Refusal::new(
            format!(
                "{host_path}, which the record names for {}, is the node of a GPU that was not chosen",
                node.path
            ),
            "the checkpoint cannot be used as it is: its record was changed",
        ));
        return None;
    }
    let target = NodeTarget {
        path,
        host_path,
        major,
        minor,
        from: node.path.clone(),
        alias_of,
    };
    let native = target.alias_of.is_none();
    Some((target, native))
}

/// Returns true if the container could open the node. NVIDIA's library makes nodes beside those that the spec names, which
/// it cannot open. Where NVIDIA's older hook made the nodes, the spec names none of them.
fn is_given(gpu: &GpuFacts, node: &DeviceNode) -> bool {
    let is_named = |n: &DeviceNode| n.source != NodeSource::Live;
    let is_gpu = |n: &&DeviceNode| n.vendor == node.vendor && n.role == NodeRole::Gpu;
    is_named(node) || node.allowed || !gpu.nodes.iter().filter(is_gpu).any(is_named)
}

/// Returns true if this host's node belongs to a GPU that replaces some GPU. A node that is no GPU's always counts, and
/// so does every one where only the driver's library describes the GPUs: it reports no nodes.
fn of_a_choice(
    node: &DeviceNode,
    host_path: &str,
    (major, minor): (u64, u64),
    chosen: &[Choice],
) -> bool {
    let here = nodes::number(&DeviceNode {
        host_path: Some(host_path.to_owned()),
        major,
        minor,
        ..node.clone()
    });
    let ours = || chosen.iter().filter(|c| c.new.vendor == node.vendor);
    here.is_none()
        || ours().any(|c| number_of(&c.new).is_none())
        || ours().any(|c| number_of(&c.new) == here)
}

/// The node that an alias stands for, else the node itself.
fn behind<'a>(gpu: &'a GpuFacts, node: &'a DeviceNode) -> &'a DeviceNode {
    let moved = gpu.moved.iter().find(|m| m.path == node.path);
    moved
        .and_then(|m| m.alias_of.as_ref())
        .and_then(|path| gpu.nodes.iter().find(|n| n.path == *path))
        .unwrap_or(node)
}

fn number_of(gpu: &Gpu) -> Option<u64> {
    match gpu.vendor {
        Vendor::Nvidia => gpu.minor,
        Vendor::Amd => gpu.render_minor,
    }
}

/// A native name with another number; `None` if the name is not the native one of `old`.
fn renamed(path: &str, old: u64, new: u64) -> Option<String> {
    let stem = path.strip_suffix(&old.to_string())?;
    (stem.ends_with("/nvidia") || stem.ends_with("/renderD")).then(|| format!("{stem}{new}"))
}

fn absent(node: &DeviceNode, host_path: &str) -> Refusal {
    let remedy = match node.vendor {
        Vendor::Nvidia => {
            "load NVIDIA's driver and make its nodes (nvidia-modprobe -c 0 -u), or name another GPU"
        }
        Vendor::Amd => "load the amdgpu driver, or name another render node",
    };
    Refusal::new(
        format!(
            "the checkpoint's {} would be {host_path}, which this host has not got",
            node.path
        ),
        format!("{remedy} with {HOW_TO_MAP}"),
    )
}

/// The nodes that an earlier restore has moved, from the container's spec.
pub fn moved(spec: &Spec) -> Vec<MovedNode> {
    spec.annotation(ANNOTATION)
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default()
}

/// Completes the record of a container that was restored before: records the moved nodes, and that an alias is no GPU
/// of its own.
pub fn complete(gpu: &mut GpuFacts, spec: &Spec) {
    gpu.moved = moved(spec);
    gpu.moved
        .retain(|m| gpu.nodes.iter().any(|n| n.path == m.path));
    for m in &gpu.moved {
        let Some(native) = &m.alias_of else { continue };
        let id = gpu.nodes.iter().find(|n| n.path == *native);
        let id = id.and_then(|n| n.gpu.clone());
        for node in gpu.nodes.iter_mut().filter(|n| n.path == m.path) {
            node.gpu.clone_from(&id);
        }
    }
    if !gpu.moved.is_empty() {
        gpu.gpus
            .retain(|g| gpu.nodes.iter().any(|n| n.gpu.as_ref() == Some(&g.id)));
    }
}

#[cfg(test)]
#[path = "remap_tests.rs"]
mod tests;
