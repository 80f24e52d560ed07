//! Analyses the links of a topology: which are valid, which have a peer, which GPUs form a hive.

use super::topology::{LINK_XGMI, Node, Topology};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct CpuLink {
    pub(super) kind: u32,
    pub(super) cpu: usize,
    /// The CPU has a link of the same kind back.
    pub(super) peered: bool,
}

impl CpuLink {
    /// XGMI can replace PCIe, and a link with a peer one without.
    pub(super) fn replaced_by(self, other: Self) -> bool {
        !(self.kind == LINK_XGMI && other.kind != LINK_XGMI) && (!self.peered || other.peered)
    }
}

/// A topology seen from its GPUs. Indices are positions in [`Graph::gpus`].
#[derive(Debug, Clone)]
pub(super) struct Graph<'a> {
    pub(super) gpus: Vec<&'a Node>,
    pub(super) cpus: Vec<u32>,
    pub(super) cpu_links: Vec<Vec<CpuLink>>,
    /// Number of links from a GPU to another.
    pub(super) between: Vec<Vec<u32>>,
    /// The hive of each GPU: GPUs joined by XGMI links with a peer.
    pub(super) hive: Vec<Option<usize>>,
    pub(super) hives: usize,
    /// Within each hive every GPU is linked with every other.
    pub(super) cliques: bool,
}

impl<'a> Graph<'a> {
    pub(super) fn new(topology: &'a Topology) -> Self {
        let gpus: Vec<&Node> = topology.gpus().collect();
        let cpus: Vec<u32> = topology
            .nodes
            .iter()
            .filter(|n| !n.is_gpu())
            .map(|n| n.id)
            .collect();
        let n = gpus.len();
        let mut between = vec![vec![0; n]; n];
        let mut joined = vec![vec![false; n]; n];
        let mut cpu_links = vec![Vec::new(); n];
        for (i, gpu) in gpus.iter().enumerate() {
            for link in &gpu.links {
                let Some(peer) = topology.node(link.to) else {
                    continue;
                };
                let peered = peer
                    .links
                    .iter()
                    .any(|l| l.kind == link.kind && l.to == gpu.id);
                if let Some(j) = gpus.iter().position(|g| g.id == peer.id) {
                    between[i][j] += 1;
                    if link.kind == LINK_XGMI && peered && i != j {
                        joined[i][j] = true;
                        joined[j][i] = true;
                    }
                } else if let Some(cpu) = cpus.iter().position(|c| *c == peer.id) {
                    cpu_links[i].push(CpuLink {
                        kind: link.kind,
                        cpu,
                        peered,
                    });
                }
            }
        }
        let mut graph = Self {
            gpus,
            cpus,
            cpu_links,
            between,
            hive: vec![None; n],
            hives: 0,
            cliques: true,
        };
        graph.find_hives(&joined);
        graph
    }

    fn find_hives(&mut self, joined: &[Vec<bool>]) {
        for first in 0..joined.len() {
            if self.hive[first].is_some() || !joined[first].contains(&true) {
                continue;
            }
            let mut members = vec![first];
            self.hive[first] = Some(self.hives);
            let mut next = 0;
            while let Some(&i) = members.get(next) {
                next += 1;
                for (j, also) in joined[i].iter().enumerate() {
                    if *also && self.hive[j].is_none() {
                        self.hive[j] = Some(self.hives);
                        members.push(j);
                    }
                }
            }
            self.cliques &= members
                .iter()
                .all(|i| members.iter().all(|j| i == j || joined[*i][*j]));
            self.hives += 1;
        }
    }

    /// Number of the GPU's valid links: to CPUs, and to GPUs that exist.
    pub(super) fn valid_links(&self, gpu: usize) -> u32 {
        self.cpu_valid(gpu) + self.between[gpu].iter().sum::<u32>()
    }

    pub(super) fn cpu_valid(&self, gpu: usize) -> u32 {
        u32::try_from(self.cpu_links[gpu].len()).unwrap_or(u32::MAX)
    }

    pub(super) fn cpus_of(&self, gpu: usize) -> Vec<usize> {
        let mut cpus: Vec<usize> = self.cpu_links[gpu].iter().map(|l| l.cpu).collect();
        cpus.sort_unstable();
        cpus.dedup();
        cpus
    }

    /// Returns true if every link of `gpu` to its CPU `cpu` can be replaced by one of `other_gpu` to `other_cpu`.
    pub(super) fn cpu_fits(
        &self,
        gpu: usize,
        cpu: usize,
        other: &Self,
        other_gpu: usize,
        other_cpu: usize,
    ) -> bool {
        self.cpu_links[gpu]
            .iter()
            .filter(|l| l.cpu == cpu)
            .all(|l| {
                other.cpu_links[other_gpu]
                    .iter()
                    .any(|o| o.cpu == other_cpu && l.replaced_by(*o))
            })
    }

    /// Returns true if every link of `gpu` to a CPU can be replaced by one of `other_gpu`, to whatever CPU.
    pub(super) fn cpu_links_fit(&self, gpu: usize, other: &Self, other_gpu: usize) -> bool {
        self.cpu_links[gpu]
            .iter()
            .all(|l| other.cpu_links[other_gpu].iter().any(|o| l.replaced_by(*o)))
    }
}

/// Finds a matching that gives each left side one of its rights (`choices[left]` is a set of bits), all different;
/// `None` if there is none.
pub(super) fn matching(choices: &[u64]) -> Option<[u8; 64]> {
    let mut left_of = [u8::MAX; 64];
    for left in 0..choices.len() {
        let mut seen = 0;
        if !augment(choices, left, &mut seen, &mut left_of) {
            return None;
        }
    }
    Some(left_of)
}

fn augment(choices: &[u64], left: usize, seen: &mut u64, left_of: &mut [u8; 64]) -> bool {
    // A free right first.
    let mut open = choices[left] & !*seen;
    for pass in 0..2 {
        let mut bits = open;
        while bits != 0 {
            let right = bits.trailing_zeros() as usize;
            bits &= bits - 1;
            let holder = left_of[right];
            if holder == u8::MAX {
                left_of[right] = u8::try_from(left).unwrap_or(u8::MAX);
                return true;
            }
            if pass == 1 && *seen & (1 << right) == 0 {
                *seen |= 1 << right;
                if augment(choices, usize::from(holder), seen, left_of) {
                    left_of[right] = u8::try_from(left).unwrap_or(u8::MAX);
                    return true;
                }
            }
        }
        open = choices[left] & !*seen;
    }
    false
}

pub(super) fn bits(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (set != 0).then(|| {
            let bit = set.trailing_zeros() as usize;
            set &= set - 1;
            bit
        })
    })
}
