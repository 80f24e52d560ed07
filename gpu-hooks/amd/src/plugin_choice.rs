//! Predicts which GPUs the amdgpu plugin of CRIU 4.1.1 and 4.2 will choose, as far as it goes straight there. The plugin
//! takes no instructions.
//!
//! It takes the image's nodes and the host's in the order in which it reads them. It groups the nodes that are joined
//! by XGMI both ways (CPUs count as one, by their id 0). It gives each group of the checkpoint the first group of the
//! host that fits, and then goes through the remaining GPUs with both lists reversed. Where it would have to take a pair
//! back it skips some targets, crashes, or never ends, so there is no prediction.

use super::checks::{KfdSwitches, Switch, matches};
use super::topology::{LINK_PCIE, LINK_XGMI, Link, Node, Topology};

/// The plugin prints each list that it walks into a buffer of this size, `0xABCD ` a node, and does not check it. The
/// hives have `type:XGMI:` before that.
const PRINTED: usize = 200;

/// Returns `gpu_id` of each GPU of the checkpoint, in the image's order, and of the one that the plugin chooses of the
/// nodes that it can see, in the order in which it reads them. The error says what it would do instead.
pub fn choose(
    source: &Topology,
    visible: &Topology,
    switches: &KfdSwitches,
) -> Result<Vec<(u32, u32)>, String> {
    if let Some(trouble) = visible.unreadable.iter().find(|u| u.stops_plugin) {
        let (node, what) = (trouble.node, &trouble.what);
        return refuses(&format!("node {node} cannot be read: {what}"));
    }
    let (source, target) = (System::new(source)?, System::new(visible)?);
    let (recorded, here) = (source.gpus().count(), target.gpus().count());
    if recorded != here {
        return refuses(&format!("it wants to see {recorded} GPUs and sees {here}"));
    }
    let (recorded, here) = (source.hives.len(), target.hives.len());
    if recorded > here {
        return refuses(&format!(
            "the checkpoint has {recorded} hives and it sees {here}"
        ));
    }
    let mut map = PairMap {
        switches,
        source: &source,
        target: &target,
        gpus: Vec::new(),
        cpus: Vec::new(),
    };
    let mut hives: Vec<&[usize]> = target.hives.iter().map(Vec::as_slice).collect();
    for hive in &source.hives {
        let mut fitting = None;
        for (at, other) in hives.iter().enumerate() {
            if map.take_all(hive, other)? {
                fitting = Some(at);
                break;
            }
        }
        let Some(at) = fitting else {
            return refuses("its search finds no hive for a hive of the checkpoint");
        };
        hives.remove(at);
    }
    let left = |system: &System<'_>, mapped: &dyn Fn(u32) -> bool| -> Vec<usize> {
        let all = system.nodes.iter().enumerate().rev();
        all.filter(|(_, n)| n.is_gpu() && !mapped(n.gpu_id))
            .map(|(at, _)| at)
            .collect()
    };
    let sources = left(&source, &|id| map.target_of(id).is_some());
    let targets = left(&target, &|id| map.gpus.iter().any(|p| p.1 == id));
    if !map.take_all(&sources, &targets)? {
        return refuses("its search finds no GPU for a GPU of the checkpoint");
    }
    let pair = |gpu: &Node| Some((gpu.gpu_id, map.target_of(gpu.gpu_id)?));
    let pairs: Option<_> = source.gpus().map(pair).collect();
    pairs.map_or_else(|| refuses("its search leaves out a GPU"), Ok)
}

fn refuses<T>(reason: &str) -> Result<T, String> {
    Err(format!("would refuse ({reason})"))
}

fn fits_print<'a>(start: &str, nodes: impl Iterator<Item = &'a Node>) -> Result<(), String> {
    let mut count = 0;
    let text: usize = nodes
        .inspect(|_| count += 1)
        .map(|n| format!("{:#06x} ", n.gpu_id).len())
        .sum();
    if start.len() + text < PRINTED {
        return Ok(());
    }
    Err(format!(
        "would crash (it writes {count} GPUs of one list into a buffer for 27)"
    ))
}

/// A link as the search sees it.
#[derive(Clone, Copy)]
struct LinkWay {
    kind: u32,
    to: u32,
    /// True if the other end is a GPU; `None` if it does not exist.
    to_gpu: Option<bool>,
    peered: bool,
}

impl LinkWay {
    /// Returns true if `other` can replace this link to a CPU.
    fn fits(self, other: Self) -> bool {
        other.to_gpu == Some(false)
            && (self.kind != LINK_XGMI || other.kind != LINK_PCIE)
            && (!self.peered || other.peered)
    }
}

struct System<'a> {
    nodes: &'a [Node],
    valid: Vec<usize>,
    links: Vec<Vec<LinkWay>>,
    hives: Vec<Vec<usize>>,
}

impl<'a> System<'a> {
    fn new(topology: &'a Topology) -> Result<Self, String> {
        let mut system = Self {
            nodes: &topology.nodes,
            valid: Vec::new(),
            links: Vec::new(),
            hives: Vec::new(),
        };
        for (at, node) in system.nodes.iter().enumerate() {
            let ways: Vec<LinkWay> = node.links.iter().map(|l| system.way(node, *l)).collect();
            system
                .valid
                .push(ways.iter().filter(|w| w.to_gpu.is_some()).count());
            for way in ways.iter().filter(|w| w.kind == LINK_XGMI && w.peered) {
                system.join(at, way.to)?;
            }
            system.links.push(ways);
        }
        for hive in &system.hives {
            fits_print("type:XGMI:", hive.iter().map(|n| &system.nodes[*n]))?;
        }
        Ok(system)
    }

    fn at(&self, id: u32) -> Option<usize> {
        self.nodes.iter().position(|n| n.id == id)
    }

    fn way(&self, node: &Node, link: Link) -> LinkWay {
        let peer = self.at(link.to).map(|peer| &self.nodes[peer]);
        let back = |l: &Link| l.kind == link.kind && l.to == node.id;
        LinkWay {
            kind: link.kind,
            to: link.to,
            to_gpu: peer.map(Node::is_gpu),
            peered: peer.is_some_and(|n| n.links.iter().any(back)),
        }
    }

    /// Puts a node and its peer into one hive. A hive has each `gpu_id` once.
    fn join(&mut self, at: usize, peer: u32) -> Result<(), String> {
        let Some(peer) = self.at(peer) else {
            return Ok(());
        };
        let nodes = self.nodes;
        let has = |hive: &Vec<usize>, node: usize| {
            let mut members = hive.iter();
            members.any(|n| nodes[*n].gpu_id == nodes[node].gpu_id)
        };
        let hive = self.hives.iter().position(|hive| has(hive, at));
        let hive = hive.unwrap_or_else(|| {
            self.hives.push(vec![at]);
            self.hives.len() - 1
        });
        if has(&self.hives[hive], peer) {
            return Ok(());
        }
        if self.hives.iter().flatten().any(|n| *n == peer) {
            // The plugin's list of the other hive then leads into this one, and has no end.
            return Err("would never end (its list of a hive leads into another one)".into());
        }
        self.hives[hive].push(peer);
        Ok(())
    }

    fn gpus(&self) -> impl Iterator<Item = &'a Node> {
        self.nodes.iter().filter(|n| n.is_gpu())
    }
}

struct PairMap<'a> {
    switches: &'a KfdSwitches,
    source: &'a System<'a>,
    target: &'a System<'a>,
    gpus: Vec<(u32, u32)>,
    cpus: Vec<(u32, u32)>,
}

fn lookup(pairs: &[(u32, u32)], source: u32) -> Option<u32> {
    pairs.iter().rev().find(|p| p.0 == source).map(|p| p.1)
}

impl PairMap<'_> {
    fn target_of(&self, gpu: u32) -> Option<u32> {
        lookup(&self.gpus, gpu).filter(|id| *id != 0)
    }

    /// Gives each source the first target that fits. Returns false, and changes nothing, if none fits the first.
    fn take_all(&mut self, sources: &[usize], targets: &[usize]) -> Result<bool, String> {
        if sources.is_empty() {
            return Ok(true);
        }
        fits_print("", sources.iter().map(|n| &self.source.nodes[*n]))?;
        fits_print("", targets.iter().map(|n| &self.target.nodes[*n]))?;
        let backtracks = || "would have to take a GPU back, and never end, crash or refuse then";
        let mut targets = targets.to_vec();
        for (done, source) in sources.iter().enumerate() {
            let mut fitting = None;
            for (at, target) in targets.iter().enumerate() {
                if let Some(cpus) = self.bound_cpus(*source, *target)? {
                    fitting = Some((at, cpus));
                    break;
                }
            }
            let Some((at, cpus)) = fitting else {
                return if done == 0 {
                    Ok(false)
                } else {
                    Err(backtracks().into())
                };
            };
            let target = targets.remove(at);
            let pair = (
                self.source.nodes[*source].gpu_id,
                self.target.nodes[target].gpu_id,
            );
            let clash = |held: &[(u32, u32)], new: (u32, u32)| {
                held.iter().any(|h| h.0 == new.0 || h.1 == new.1)
            };
            if cpus.iter().any(|c| clash(&self.cpus, *c)) || clash(&self.gpus, pair) {
                return Err(backtracks().into());
            }
            self.gpus.push(pair);
            self.cpus.extend(cpus);
        }
        Ok(true)
    }

    /// Returns the CPUs that are bound to each other if the target replaces the source; `None` if it cannot.
    fn bound_cpus(&self, source: usize, target: usize) -> Result<Option<Vec<(u32, u32)>>, String> {
        let like = matches(
            &self.source.nodes[source],
            &self.target.nodes[target],
            self.switches,
        );
        if !like || self.source.valid[source] > self.target.valid[target] {
            return Ok(None);
        }
        let mut bound: Vec<(u32, u32)> = Vec::new();
        let others = &self.target.links[target];
        for link in &self.source.links[source] {
            // A recorded link to a node that was not recorded: the plugin does not check that there is one.
            if link.to_gpu.ok_or("would crash (a link leads nowhere)")? {
                continue;
            }
            let good = if !self.switches.is_on(Switch::Numa) {
                others.iter().any(|o| link.fits(*o))
            } else if let Some(place) =
                lookup(&self.cpus, link.to).or_else(|| lookup(&bound, link.to))
            {
                // Once the CPU is mapped, only a link of the same kind counts, and only the first.
                others
                    .iter()
                    .find(|o| o.to == place && o.kind == link.kind)
                    .is_some_and(|o| link.fits(*o))
            } else {
                let taken = |id: u32| self.cpus.iter().chain(&bound).any(|p| p.1 == id);
                let free = others
                    .iter()
                    .find(|o| link.fits(**o) && !taken(o.to))
                    .map(|o| o.to);
                bound.extend(free.map(|id| (link.to, id)));
                free.is_some()
            };
            if !good {
                return Ok(None);
            }
        }
        Ok(Some(bound))
    }
}
