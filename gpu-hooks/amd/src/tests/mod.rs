//! Holds what the tests of the AMD library share: topologies made by hand or at random, and an encoder of the plugin's
//! images that knows nothing of the parser.

mod captures;
mod checks;
mod choose;
mod image;
mod machines;
mod plugin_choice;
mod real_matcher;
mod saved;
mod topology;

use super::topology::{KfdProperties, LINK_PCIE, LINK_XGMI, Link, Node, Topology};

/// A GPU like an MI250's, at node `id`, with render node `renderD(128 + index)`.
fn gpu(id: u32, gpu_id: u32, index: u32) -> Node {
    Node {
        id,
        gpu_id,
        properties: KfdProperties {
            simd_count: 416,
            mem_banks_count: 1,
            caches_count: 206,
            io_links_count: 8,
            max_waves_per_simd: 8,
            lds_size_in_kb: 64,
            num_gws: 64,
            wave_front_size: 64,
            array_count: 8,
            simd_arrays_per_engine: 1,
            cu_per_simd_array: 14,
            simd_per_cu: 4,
            max_slots_scratch_cu: 32,
            vendor_id: 0x1002,
            device_id: 0x740c,
            domain: 0,
            drm_render_minor: 128 + index,
            hive_id: 0,
            num_sdma_engines: 2,
            num_sdma_xgmi_engines: 3,
            num_sdma_queues_per_engine: 8,
            num_cp_queues: 24,
            fw_version: 80,
            capability: 0x2a9a_f280,
            sdma_fw_version: 8,
            vram_public: 1,
            vram_size: 68_702_699_520,
        },
        ..Node::default()
    }
}

/// `cpus` CPUs at nodes 0.., then `gpus` GPUs, without links.
fn machine(cpus: u32, gpus: u32, first_id: u32) -> Topology {
    let cpu = |id| Node {
        id,
        cpu_cores_count: 64,
        ..Node::default()
    };
    Topology {
        nodes: (0..cpus)
            .map(cpu)
            .chain((0..gpus).map(|i| gpu(cpus + i, first_id + i, i)))
            .collect(),
        unreadable: Vec::new(),
    }
}

fn at(topology: &mut Topology, id: u32) -> &mut Node {
    topology.nodes.iter_mut().find(|n| n.id == id).unwrap()
}

fn one(topology: &mut Topology, kind: u32, from: u32, to: u32) {
    at(topology, from).links.push(Link { kind, to });
}

fn both(topology: &mut Topology, kind: u32, a: u32, b: u32) {
    one(topology, kind, a, b);
    one(topology, kind, b, a);
}

fn mesh(topology: &mut Topology, kind: u32, nodes: &[u32]) {
    for (i, a) in nodes.iter().enumerate() {
        for b in &nodes[i + 1..] {
            both(topology, kind, *a, *b);
        }
    }
}

/// `gpus` GPUs over `cpus` CPUs in turn, PCIe both ways, in XGMI hives of `hive` (0: none).
fn server(cpus: u32, gpus: u32, hive: u32, first_id: u32) -> Topology {
    let mut t = machine(cpus, gpus, first_id);
    for i in 0..gpus {
        both(&mut t, LINK_PCIE, cpus + i, i % cpus);
    }
    for first in (0..gpus).step_by(hive.max(1) as usize) {
        let last = (first + hive).min(gpus);
        let members: Vec<u32> = (first..last).map(|i| cpus + i).collect();
        mesh(&mut t, LINK_XGMI, &members);
    }
    t
}

/// Numbers that depend on a seed alone.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % sides as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.roll(n) == 0
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.roll(i + 1));
        }
    }
}

/// A machine of `gpus` GPUs with random CPUs, hives, links and models.
fn random(dice: &mut Dice, gpus: u32) -> Topology {
    let cpus = 1 + dice.roll(3) as u32;
    let mut t = machine(cpus, gpus, 0xa000);
    let size = [0, 2, 2, 3, 4][dice.roll(5)];
    let chain = dice.one_in(8);
    let mut left: Vec<u32> = (cpus..cpus + gpus).collect();
    if dice.one_in(3) {
        dice.shuffle(&mut left);
    }
    while size > 0 && left.len() >= size && !dice.one_in(6) {
        let members: Vec<u32> = left.drain(..size).collect();
        if chain {
            members
                .windows(2)
                .for_each(|w| both(&mut t, LINK_XGMI, w[0], w[1]));
        } else {
            mesh(&mut t, LINK_XGMI, &members);
        }
    }
    for id in cpus..cpus + gpus {
        let kind = if dice.one_in(5) { LINK_XGMI } else { LINK_PCIE };
        let cpu = dice.roll(cpus as usize) as u32;
        one(&mut t, kind, id, cpu);
        if !dice.one_in(3) {
            one(&mut t, kind, cpu, id);
        }
        if dice.one_in(6) {
            one(&mut t, LINK_PCIE, id, dice.roll(cpus as usize) as u32);
        }
        if dice.one_in(4) {
            at(&mut t, id).properties.device_id += 1;
        }
        if dice.one_in(6) {
            at(&mut t, id).properties.fw_version += 1;
        }
    }
    let peers = dice.roll(3);
    for a in cpus..cpus + gpus {
        for b in cpus..cpus + gpus {
            if a != b && (peers == 1 || peers == 2 && dice.one_in(2)) {
                one(&mut t, LINK_PCIE, a, b);
            }
        }
    }
    t
}

/// The same machine with its nodes renumbered and reordered, `more` GPUs added, and some things changed.
fn other(dice: &mut Dice, from: &Topology, more: u32, changes: usize) -> Topology {
    let mut t = from.clone();
    let n = t.nodes.len() as u32;
    for i in 0..more {
        let like = t.gpus().nth(i as usize % t.gpus().count()).unwrap().clone();
        let (id, gpu_id) = (n + i, 0xa100 + i);
        for l in &like.links {
            one_back(&mut t, &like, *l, id);
        }
        let minor = 200 + i;
        let mut new = Node { id, gpu_id, ..like };
        new.properties.drm_render_minor = minor;
        t.nodes.push(new);
    }
    let n = t.nodes.len();
    let cpus = t.nodes.iter().filter(|n| !n.is_gpu()).count();
    let mut places: Vec<u32> = (cpus as u32..n as u32).collect();
    dice.shuffle(&mut places);
    let mut first: Vec<u32> = (0..cpus as u32).collect();
    dice.shuffle(&mut first);
    let place = |id: u32| {
        let id = id as usize;
        if id < cpus {
            first[id]
        } else {
            places[id - cpus]
        }
    };
    for node in &mut t.nodes {
        node.id = place(node.id);
        if node.is_gpu() {
            node.gpu_id += 0x1000;
            node.properties.drm_render_minor = 128 + node.id - cpus as u32;
        }
        node.links.iter_mut().for_each(|l| l.to = place(l.to));
        dice.shuffle(&mut node.links);
    }
    dice.shuffle(&mut t.nodes);
    for _ in 0..changes {
        let at = dice.roll(n);
        let node = &mut t.nodes[at];
        match dice.roll(4) {
            0 if !node.links.is_empty() => {
                let gone = dice.roll(node.links.len());
                node.links.remove(gone);
            }
            1 if node.is_gpu() => node.properties.device_id ^= 1,
            2 if node.is_gpu() => node.properties.fw_version -= 1,
            _ => {
                let to = dice.roll(n) as u32;
                if node.id != to {
                    node.links.push(Link {
                        kind: LINK_PCIE,
                        to,
                    });
                }
            }
        }
    }
    t
}

/// Adds the link back to a GPU that is like another, if that one has it.
fn one_back(t: &mut Topology, like: &Node, link: Link, id: u32) {
    let peer = at(t, link.to);
    if peer
        .links
        .iter()
        .any(|l| l.to == like.id && l.kind == link.kind)
    {
        peer.links.push(Link {
            kind: link.kind,
            to: id,
        });
    }
}
