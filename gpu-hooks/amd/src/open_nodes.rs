//! Refuses processes whose open nodes CRIU's amdgpu plugin could not restore.
//!
//! CRIU saves and restores a process's files in the order of their numbers. The plugin learns the process's GPUs from its
//! `/dev/kfd`, and up to CRIU 4.2 it cannot save or restore a render node before that: the checkpoint fails, or, if another
//! process came first, the restore does.

use cryopod_host::nodes::{DeviceNode, NodeRole, Vendor};
use cryopod_host::processes::{Process, Scan};

use cryopod_gpu_plan::refusal::Refusal;

/// `nodes`: the container's GPU nodes.
pub fn refusals(scan: &Scan, nodes: &[DeviceNode]) -> Vec<Refusal> {
    let refused = |process: &Process| {
        let (render, path) = lowest(process, nodes, NodeRole::Render)?;
        let (what, remedy) = match lowest(process, nodes, NodeRole::Control) {
            Some((kfd, _)) if kfd < render => return None,
            Some((kfd, _)) => (
                format!(
                    "it has {path} open as file {render}, below /dev/kfd, which is {kfd}; CRIU's amdgpu plugin restores a render node only after the KFD"
                ),
                "have the program open /dev/kfd first, as ROCm does",
            ),
            None => (
                format!(
                    "it has {path} open (file {render}) and not /dev/kfd; CRIU's amdgpu plugin saves only processes that use the KFD"
                ),
                "end the process before the checkpoint, or have it close the node",
            ),
        };
        Some(Refusal::of(process, what, remedy))
    };
    scan.processes.iter().filter_map(refused).collect()
}

/// The lowest file of the process that is a node of AMD's with this role, and the node's path.
fn lowest<'a>(
    process: &Process,
    nodes: &'a [DeviceNode],
    role: NodeRole,
) -> Option<(i32, &'a str)> {
    let amd = || {
        nodes
            .iter()
            .filter(|n| n.vendor == Vendor::Amd && n.role == role)
    };
    let open = process.fds.iter().filter_map(|fd| {
        let node = amd().find(|n| fd.device == Some((n.major, n.minor)))?;
        Some((fd.number.parse().ok()?, node.path.as_str()))
    });
    open.min_by_key(|(number, _)| *number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_host::processes::Fd;

    fn node(path: &str, role: NodeRole, major: u64, minor: u64) -> DeviceNode {
        DeviceNode::new(path, (Vendor::Amd, role), (major, minor))
    }

    #[test]
    fn a_render_node_must_come_after_the_kfd() {
        let nodes = [
            node("/dev/kfd", NodeRole::Control, 241, 0),
            node("/dev/dri/renderD128", NodeRole::Render, 226, 128),
        ];
        let (kfd, render, card, null) = ((241, 0), (226, 128), (226, 0), (1, 3));
        for (open, want) in [
            (vec![(0, null), (3, kfd), (4, render), (10, render)], None),
            (vec![(3, kfd)], None),
            (vec![(3, card)], None),
            (
                vec![(9, render), (10, kfd)],
                Some("renderD128 open as file 9, below /dev/kfd, which is 10"),
            ),
            (vec![(3, render)], Some("and not /dev/kfd")),
        ] {
            let fds = open.iter().map(|(number, device)| Fd {
                number: number.to_string(),
                device: Some(*device),
                ..Fd::default()
            });
            let scan = Scan {
                processes: vec![Process {
                    pid: 7,
                    fds: fds.collect(),
                    ..Process::default()
                }],
            };
            let found = refusals(&scan, &nodes);
            match want {
                None => assert!(found.is_empty(), "{found:?}"),
                Some(want) => assert!(found[0].what.contains(want), "{found:?}"),
            }
        }
    }
}
