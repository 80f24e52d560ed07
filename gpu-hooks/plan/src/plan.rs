//! Plans a checkpoint: everything that it will do about GPUs, as data, before it is done.
//!
//! The plan refuses what cannot work while the container still runs untouched, with every reason at once.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::refusal::Refusal;
use cryopod_archive::metadata::{Gpu, GpuFacts, GpuProcess};
use cryopod_host::nodes::{DeviceNode, NodeRole, NodeSource, Vendor};

use crate::gpus::amd_gpus;
use crate::live;
use cryopod_cuda::gpus::nvidia;
use cryopod_cuda::{preflight, sharing};
use cryopod_host::files::Host;
use cryopod_host::nodes;
use cryopod_host::processes::Scan;
use cryopod_host::spec::Spec;

/// Paths of this host's CRIU plugins; `None`: not installed.
#[derive(Debug, Clone, Default)]
pub struct Plugins {
    /// cryopod's own.
    pub nvidia: Option<PathBuf>,
    pub amd: Option<PathBuf>,
    /// Known faults of a plugin: it is absent, or CRIU would not load it.
    pub faults: BTreeMap<Vendor, Refusal>,
}

impl Plugins {
    pub fn usable(&self, vendor: Vendor) -> Result<&PathBuf, Refusal> {
        if let Some(fault) = self.faults.get(&vendor) {
            return Err(fault.clone());
        }
        let path = match vendor {
            Vendor::Nvidia => self.nvidia.as_ref(),
            Vendor::Amd => self.amd.as_ref(),
        };
        path.ok_or_else(|| no_plugin(vendor))
    }
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error("the container's process {0} has exited; there is nothing left to checkpoint")]
    Gone(i32),
    #[error("the checkpoint was refused and the container goes on running: {}", list(.0))]
    Refused(Vec<Refusal>),
    #[error("the restore was refused and the checkpoint is untouched: {}", list(.0))]
    RestoreRefused(Vec<Refusal>),
}

fn list(refusals: &[Refusal]) -> String {
    refusals
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(" | ")
}

#[derive(Debug, Clone)]
pub struct CheckpointPlan {
    pub gpu: GpuFacts,
    /// The CRIU plugins that it needs, and no others.
    pub plugins: Vec<PathBuf>,
    /// All processes of the container, host pids, the init process first.
    pub pids: Vec<i32>,
    /// The processes' own memory, in bytes: about what CRIU writes.
    pub memory_bytes: u64,
}

impl CheckpointPlan {
    pub fn users_of(&self, vendor: Vendor) -> Vec<i32> {
        self.gpu
            .processes
            .iter()
            .filter(|p| p.vendors.contains(&vendor))
            .map(|p| p.pid)
            .collect()
    }
}

/// All GPU nodes of a container: those of its spec, then those found in it only. Empty: no GPU container.
pub fn container_nodes(host: &Host, spec: &Spec, init: i32) -> Vec<DeviceNode> {
    let mut nodes = spec.gpu_nodes(host);
    for mut node in live::nodes(host, init) {
        if !nodes.iter().any(|n| n.path == node.path) {
            node.allowed = spec.allows(node.major, node.minor);
            nodes.push(node);
        }
    }
    nodes
}

/// Makes the plan for a container with the GPU nodes `nodes` and the init process `init`, and finds what it does that
/// cannot be checkpointed. `scan`: its processes; empty if `init` is gone. `sharing`: the policy for processes that
/// share GPU memory.
pub fn checkpoint(
    host: &Host,
    nodes: Vec<DeviceNode>,
    init: i32,
    scan: &Scan,
    plugins: &Plugins,
    sharing: sharing::Policy,
) -> Result<(CheckpointPlan, Vec<Refusal>), PlanError> {
    let pids = scan.pids();
    if pids.is_empty() {
        return Err(PlanError::Gone(init));
    }
    let processes = live::users(scan, &nodes);
    let mut refusals = Vec::new();
    let mut needed = Vec::new();
    for vendor in [Vendor::Nvidia, Vendor::Amd] {
        let users: Vec<&GpuProcess> = processes
            .iter()
            .filter(|p| p.vendors.contains(&vendor))
            .collect();
        if users.is_empty() {
            continue;
        }
        match plugins.usable(vendor) {
            Ok(path) => needed.push(path.clone()),
            Err(fault) => {
                let who = match users.len() {
                    1 => "it uses".to_owned(),
                    n => format!("it and {} more use", n - 1),
                };
                refusals.extend(users.first().map(|p| {
                    Refusal::new(
                        format!("{who} the {vendor} driver, and {}", fault.what),
                        fault.remedy,
                    )
                    .about(p.pid, &p.comm)
                }));
            }
        }
    }
    let cuda = cuda_users(&processes);
    let found = preflight::preflight(host, &cuda);
    refusals.extend(found);
    refusals.extend(shared_memory(host, scan, &cuda, sharing));
    let mut gpu = describe(host, nodes, scan);
    gpu.processes = processes;
    gpu.plugins = needed
        .iter()
        .filter_map(|p| Some(p.file_name()?.to_string_lossy().into_owned()))
        .collect();
    let plan = CheckpointPlan {
        gpu,
        plugins: needed,
        pids,
        memory_bytes: scan.memory_bytes(),
    };
    Ok((plan, refusals))
}

pub fn cuda_users(processes: &[GpuProcess]) -> Vec<i32> {
    let users = processes
        .iter()
        .filter(|p| p.vendors.contains(&Vendor::Nvidia));
    users.map(|p| p.pid).collect()
}

/// Returns why the CUDA processes `cuda` cannot be checkpointed: GPU memory that they share.
pub fn shared_memory(
    host: &Host,
    scan: &Scan,
    cuda: &[i32],
    policy: sharing::Policy,
) -> Vec<Refusal> {
    policy.settle(sharing::plan(host, scan, cuda))
}

fn no_plugin(vendor: Vendor) -> Refusal {
    let remedy = match vendor {
        Vendor::Nvidia => {
            "install cryopod_nvidia.so (it comes with cryopod), or name it as `nvidia.plugin` in /etc/cryopod/config.toml"
        }
        Vendor::Amd => {
            "install CRIU's amdgpu_plugin.so (Fedora: criu-amdgpu-plugin; elsewhere: build CRIU with it), or name it as `amd.plugin` in /etc/cryopod/config.toml"
        }
    };
    Refusal::new("no CRIU plugin for it was found", remedy)
}

/// The GPUs behind the nodes, and the drivers, as the host describes them.
///
/// NVIDIA's library makes nodes of all the host's GPUs where it may, as under docker, and the container's device cgroup
/// lets it open those alone that it was given: the others are left out. Nodes that NVIDIA's older hook makes are in no
/// spec, all of them.
fn describe(host: &Host, mut nodes: Vec<DeviceNode>, scan: &Scan) -> GpuFacts {
    let named: Vec<Vendor> = nodes
        .iter()
        .filter(|n| n.source != NodeSource::Live && n.role == NodeRole::Gpu)
        .map(|n| n.vendor)
        .collect();
    let fds = scan.processes.iter().flat_map(|process| &process.fds);
    let open: BTreeSet<(u64, u64)> = fds.filter_map(|fd| fd.device).collect();
    let given = |n: &DeviceNode| {
        n.source != NodeSource::Live
            || n.allowed
            || open.contains(&(n.major, n.minor))
            || !named.contains(&n.vendor)
    };
    let mut vendors: Vec<Vendor> = nodes.iter().map(|n| n.vendor).collect();
    vendors.sort();
    vendors.dedup();
    let mut drivers = BTreeMap::new();
    let mut gpus: Vec<Gpu> = Vec::new();
    for vendor in &vendors {
        let (key, version, found) = match vendor {
            Vendor::Nvidia => ("nvidia", nvidia::driver_version(host), nvidia::gpus(host)),
            Vendor::Amd => ("amd", amd_gpus::driver_version(host), amd_gpus::gpus(host)),
        };
        if let Some(version) = version {
            drivers.insert(key.to_owned(), version);
        }
        for gpu in found {
            let mut used = false;
            for node in nodes.iter_mut().filter(|n| leads_to(n, &gpu)) {
                node.gpu = Some(gpu.id.clone());
                used |= given(node);
            }
            match used {
                true => gpus.push(gpu),
                false => nodes.retain(|node| !leads_to(node, &gpu)),
            }
        }
    }
    GpuFacts {
        vendors,
        nodes,
        gpus,
        drivers,
        ..GpuFacts::default()
    }
}

fn leads_to(node: &DeviceNode, gpu: &Gpu) -> bool {
    node.vendor == gpu.vendor
        && match node.role {
            NodeRole::Gpu => gpu.minor.is_some() && gpu.minor == nodes::nvidia_minor(node),
            NodeRole::Render => gpu.render_minor == Some(node.minor),
            _ => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;

    fn node(path: &str, vendor: Vendor, role: NodeRole, minor: u64) -> DeviceNode {
        DeviceNode::new(path, (vendor, role), (195, minor))
    }

    /// Process 100 with `target` open as fd 3, and one NVIDIA GPU of minor 0.
    fn host(target: &str) -> (tempfile::TempDir, Host) {
        let dir = tempfile::tempdir().unwrap();
        let p = dir.path().join("proc/100");
        p.put("stat", "100 (python3) S 1 0");
        p.put("comm", "python3\n");
        p.link("fd/3", target);
        dir.put(
            "proc/driver/nvidia/gpus/0000:65:00.0/information",
            "Model: X\nGPU UUID: GPU-1\nDevice Minor: 0\n",
        );
        let host = Host::at(dir.path());
        (dir, host)
    }

    fn checkpoint(
        host: &Host,
        nodes: Vec<DeviceNode>,
        init: i32,
        plugins: &Plugins,
    ) -> Result<CheckpointPlan, PlanError> {
        let scan = Scan::of(host, &live::tree(host, init));
        match super::checkpoint(host, nodes, init, &scan, plugins, sharing::Policy::Refuse)? {
            (plan, refusals) if refusals.is_empty() => Ok(plan),
            (_, refusals) => Err(PlanError::Refused(refusals)),
        }
    }

    #[test]
    fn an_idle_container_needs_no_plugin() {
        let (_dir, host) = host("/dev/null");
        let nodes = vec![node("/dev/nvidia0", Vendor::Nvidia, NodeRole::Gpu, 0)];
        let plan = checkpoint(&host, nodes, 100, &Plugins::default()).unwrap();
        assert!(plan.plugins.is_empty() && plan.gpu.processes.is_empty());
        assert_eq!(plan.gpu.gpus.len(), 1);
        assert_eq!(plan.gpu.nodes[0].gpu.as_deref(), Some("GPU-1"));
    }

    #[test]
    fn a_node_that_nobody_may_open_is_no_gpu_of_the_container() {
        let (dir, host) = host("/dev/null");
        dir.put(
            "proc/driver/nvidia/gpus/0000:66:00.0/information",
            "Model: X\nGPU UUID: GPU-2\nDevice Minor: 1\n",
        );
        let node = |path: &str, minor| node(path, Vendor::Nvidia, NodeRole::Gpu, minor);
        let made = DeviceNode {
            source: NodeSource::Live,
            allowed: false,
            ..node("/dev/nvidia1", 1)
        };
        let count = |nodes: &[&DeviceNode]| {
            let nodes = nodes.iter().map(|n| (*n).clone()).collect();
            let plan = checkpoint(&host, nodes, 100, &Plugins::default()).unwrap();
            assert_eq!(plan.gpu.nodes.len(), plan.gpu.gpus.len());
            plan.gpu.gpus.len()
        };
        assert_eq!(count(&[&node("/dev/nvidia0", 0), &made]), 1);
        assert_eq!(count(&[&made]), 1, "NVIDIA's hook made it");
        let allowed = DeviceNode {
            allowed: true,
            ..made
        };
        assert_eq!(count(&[&node("/dev/nvidia0", 0), &allowed]), 2);
    }

    #[test]
    fn a_user_of_the_driver_needs_its_plugin() {
        for (file, vendor, missing) in [
            ("/dev/nvidiactl", Vendor::Nvidia, "cryopod_nvidia.so"),
            ("/dev/kfd", Vendor::Amd, "amdgpu_plugin.so"),
        ] {
            let (_dir, host) = host(file);
            let nodes = || vec![node(file, vendor, NodeRole::Control, 255)];
            let refused = checkpoint(&host, nodes(), 100, &Plugins::default()).unwrap_err();
            let text = refused.to_string();
            for word in [
                "goes on running",
                "process 100 (python3)",
                missing,
                "config.toml",
            ] {
                assert!(text.contains(word), "{word}: {text}");
            }
            let plugins = Plugins {
                nvidia: Some("/p/cryopod_nvidia.so".into()),
                amd: Some("/p/amdgpu_plugin.so".into()),
                ..Plugins::default()
            };
            let plan = checkpoint(&host, nodes(), 100, &plugins).unwrap();
            assert_eq!(plan.gpu.plugins, [missing]);
            assert_eq!(plan.users_of(vendor), [100]);
        }
    }

    #[test]
    fn a_container_that_exited_has_no_plan() {
        let (_dir, host) = host("/dev/null");
        assert_eq!(
            checkpoint(&host, vec![], 7, &Plugins::default()).unwrap_err(),
            PlanError::Gone(7)
        );
    }
}
