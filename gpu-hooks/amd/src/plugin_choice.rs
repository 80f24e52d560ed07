//! Predicts which GPUs the amdgpu plugin of CRIU 4.1.1 and 4.2 will choose. The plugin takes no instructions.
//!
//! It takes the image's nodes and the host's in the order in which it reads them. It groups the nodes that are joined
//! by XGMI both ways (CPUs count as one, by their id 0). It gives each group of the checkpoint the first group of the
//! host that fits, and then goes through the remaining GPUs with both lists reversed. When it backtracks it puts a
//! target back at the front of the list that it is walking, so that some targets are skipped and some tried for ever.
//! When a group fails after another had succeeded, the pairs of the latter stay behind. Hence it refuses some mappings
//! that exist, and never ends on some inputs. This model keeps the same lists and pairs, step by step.

use super::checks::{KfdSwitches, Switch, matches};
use super::ring::{Broken, ListRing};
use super::topology::{LINK_PCIE, LINK_XGMI, Link, Node, Topology};

/// The plugin prints each list that it walks into a buffer of this size, `0xABCD ` a node, and does not check it. The
/// hives have `type:XGMI:` before that.
const PRINTED: usize = 200;

/// Comparisons of two nodes after which the model assumes that the plugin never ends.
const BUDGET: u64 = 200_000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PluginChoice {
    /// It maps: `gpu_id` of each GPU of the checkpoint, in the image's order, and of its target.
    Picks(Vec<(u32, u32)>),
    Refuses(String),
    Loops(String),
    Crashes(String),
}

/// Predicts the plugin's choice for an image and for the nodes that it can see, in the order in which it reads them.
pub fn choose(source: &Topology, visible: &Topology, switches: &KfdSwitches) -> PluginChoice {
    if let Some(trouble) = visible.unreadable.iter().find(|u| u.stops_plugin) {
        return PluginChoice::Refuses(format!(
            "node {} cannot be read: {}",
            trouble.node, trouble.what
        ));
    }
    let model = System::new(source).and_then(|source| {
        let target = System::new(visible)?;
        let alike = |i: usize, j: usize| {
            matches(source.nodes[i], target.nodes[j], switches)
                && source.valid[i] <= target.valid[j]
        };
        Ok(SearchModel {
            alike: (0..source.nodes.len())
                .map(|i| (0..target.nodes.len()).map(|j| alike(i, j)).collect())
                .collect(),
            switches,
            mapping: ListRing::new(source.nodes.len() + target.nodes.len()),
            source,
            target,
            gpus: Vec::new(),
            cpus: Vec::new(),
            steps: 0,
        })
    });
    match model.and_then(|mut m| m.choose()) {
        Ok(pairs) => PluginChoice::Picks(pairs),
        Err(SearchStop::Refuses(reason)) => PluginChoice::Refuses(reason),
        Err(SearchStop::Broken(Broken::Nowhere)) => {
            PluginChoice::Crashes("a list or link leads nowhere".into())
        }
        Err(SearchStop::Broken(Broken::TooLong)) => PluginChoice::Crashes(format!(
            "it writes {} GPUs of one list into a buffer for 27",
            source.gpus().count()
        )),
        Err(SearchStop::Broken(Broken::Endless)) => {
            PluginChoice::Loops("its search comes back to where it was".into())
        }
        Err(SearchStop::Budget) => PluginChoice::Loops(format!(
            "its search has not ended after {BUDGET} comparisons"
        )),
    }
}

fn fits_print<'a>(start: usize, nodes: impl Iterator<Item = &'a Node>) -> Result<(), Broken> {
    let text: usize = nodes.map(|n| format!("{:#06x} ", n.gpu_id).len()).sum();
    if start + text < PRINTED {
        Ok(())
    } else {
        Err(Broken::TooLong)
    }
}

enum SearchStop {
    Refuses(String),
    Broken(Broken),
    Budget,
}

impl From<Broken> for SearchStop {
    fn from(broken: Broken) -> Self {
        Self::Broken(broken)
    }
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
    nodes: Vec<&'a Node>,
    valid: Vec<usize>,
    links: Vec<Vec<LinkWay>>,
    /// The groups' members: elements are nodes.
    members: ListRing,
    /// The groups: elements are their numbers, then the head.
    groups: ListRing,
    /// The head of each group's members.
    heads: Vec<usize>,
    list: usize,
}

impl<'a> System<'a> {
    fn new(topology: &'a Topology) -> Result<Self, SearchStop> {
        let nodes: Vec<&Node> = topology.nodes.iter().collect();
        // There cannot be more groups than nodes.
        let mut groups = ListRing::new(nodes.len());
        let list = groups.head();
        let mut system = Self {
            members: ListRing::new(nodes.len()),
            valid: vec![0; nodes.len()],
            links: Vec::new(),
            nodes,
            groups,
            heads: Vec::new(),
            list,
        };
        for at in 0..system.nodes.len() {
            let ways: Vec<LinkWay> = system.nodes[at]
                .links
                .iter()
                .map(|l| system.way(at, *l))
                .collect();
            for way in ways.iter().filter(|w| w.to_gpu.is_some()) {
                system.valid[at] += 1;
                if let Some(peer) = system.at(way.to)
                    && way.kind == LINK_XGMI
                    && way.peered
                {
                    system.join(at, peer)?;
                }
            }
            system.links.push(ways);
        }
        for group in 0..system.heads.len() {
            let members = system.group(group)?;
            fits_print("type:XGMI:".len(), members.iter().map(|n| system.nodes[*n]))?;
        }
        Ok(system)
    }

    fn at(&self, id: u32) -> Option<usize> {
        self.nodes.iter().position(|n| n.id == id)
    }

    fn way(&self, at: usize, link: Link) -> LinkWay {
        let peer = self.at(link.to).map(|peer| self.nodes[peer]);
        let back = |n: &Node| {
            n.links
                .iter()
                .any(|l| l.kind == link.kind && l.to == self.nodes[at].id)
        };
        LinkWay {
            kind: link.kind,
            to: link.to,
            to_gpu: peer.map(Node::is_gpu),
            peered: peer.is_some_and(back),
        }
    }

    fn is_member(&self, group: usize, gpu_id: u32) -> Result<bool, SearchStop> {
        let same = |n: usize| self.nodes.get(n).is_some_and(|n| n.gpu_id == gpu_id);
        Ok(self.members.find(self.heads[group], same)?.is_some())
    }

    fn join(&mut self, at: usize, peer: usize) -> Result<(), SearchStop> {
        let mut group = None;
        for g in 0..self.heads.len() {
            if self.is_member(g, self.nodes[at].gpu_id)? {
                group = Some(g);
                break;
            }
        }
        let group = match group {
            Some(group) => group,
            None => {
                let group = self.heads.len();
                self.heads.push(self.members.head());
                self.groups.push_back(group, self.list)?;
                self.members.push_back(at, self.heads[group])?;
                group
            }
        };
        if !self.is_member(group, self.nodes[peer].gpu_id)? {
            self.members.push_back(peer, self.heads[group])?;
        }
        Ok(())
    }

    fn gpus(&self) -> usize {
        self.nodes.iter().filter(|n| n.is_gpu()).count()
    }

    fn group(&self, group: usize) -> Result<Vec<usize>, SearchStop> {
        let mut all = Vec::new();
        self.members.find(self.heads[group], |n| {
            all.push(n);
            false
        })?;
        if all.iter().any(|n| *n >= self.nodes.len()) {
            return Err(Broken::Nowhere.into());
        }
        Ok(all)
    }
}

struct SearchModel<'a> {
    switches: &'a KfdSwitches,
    source: System<'a>,
    target: System<'a>,
    /// By source and target: their properties match, and the target has enough valid links.
    alike: Vec<Vec<bool>>,
    /// Lists of nodes to be mapped: elements are the source's nodes, then the target's.
    mapping: ListRing,
    gpus: Vec<(u32, u32)>,
    cpus: Vec<(u32, u32)>,
    steps: u64,
}

/// Everything that decides how a walk goes on; compared to detect that it never ends.
type SearchMoment = (
    usize,
    usize,
    ListRing,
    ListRing,
    ListRing,
    Vec<(u32, u32)>,
    Vec<(u32, u32)>,
);

/// Detects that a walk comes back to an earlier state: keeps the states at powers of two.
#[derive(Default)]
struct Again {
    count: u64,
    kept: Option<SearchMoment>,
}

impl Again {
    fn check(&mut self, model: &SearchModel<'_>, at: usize, next: usize) -> Result<(), SearchStop> {
        self.count += 1;
        if self.count < 8 {
            return Ok(());
        }
        let same = self.kept.as_ref().is_some_and(|k| {
            (k.0, k.1) == (at, next)
                && k.2 == model.mapping
                && k.3 == model.source.groups
                && k.4 == model.target.groups
                && k.5 == model.gpus
                && k.6 == model.cpus
        });
        if same {
            return Err(Broken::Endless.into());
        }
        if self.count.is_power_of_two() {
            self.kept = Some((
                at,
                next,
                model.mapping.clone(),
                model.source.groups.clone(),
                model.target.groups.clone(),
                model.gpus.clone(),
                model.cpus.clone(),
            ));
        }
        Ok(())
    }
}

fn lookup(pairs: &[(u32, u32)], source: u32) -> Option<u32> {
    pairs.iter().rev().find(|p| p.0 == source).map(|p| p.1)
}

impl SearchModel<'_> {
    fn choose(&mut self) -> Result<Vec<(u32, u32)>, SearchStop> {
        let (recorded, here) = (self.source.gpus(), self.target.gpus());
        if recorded != here {
            return Err(SearchStop::Refuses(format!(
                "it wants to see {recorded} GPUs and sees {here}"
            )));
        }
        let (recorded, here) = (self.source.heads.len(), self.target.heads.len());
        if recorded > here {
            return Err(SearchStop::Refuses(format!(
                "the checkpoint has {recorded} hives and it sees {here}"
            )));
        }
        if recorded > 0 && !self.map_groups()? {
            return Err(SearchStop::Refuses(
                "its search finds no hive for a hive of the checkpoint".into(),
            ));
        }
        let (sources, targets) = (self.mapping.head(), self.mapping.head());
        for (at, node) in self.source.nodes.iter().enumerate() {
            if node.is_gpu() && lookup(&self.gpus, node.gpu_id).unwrap_or(0) == 0 {
                self.mapping.push_front(at, sources)?;
            }
        }
        let first = self.source.nodes.len();
        for (at, node) in self.target.nodes.iter().enumerate() {
            if node.is_gpu() && !self.gpus.iter().any(|p| p.1 == node.gpu_id) {
                self.mapping.push_front(first + at, targets)?;
            }
        }
        if !self.map_nodes(sources, targets)? {
            return Err(SearchStop::Refuses(
                "its search finds no GPU for a GPU of the checkpoint".into(),
            ));
        }
        let gpus = self.source.nodes.iter().filter(|n| n.is_gpu());
        gpus.map(|n| match lookup(&self.gpus, n.gpu_id) {
            Some(target) if target != 0 => Ok((n.gpu_id, target)),
            _ => Err(SearchStop::Refuses(format!("its search leaves out {n}"))),
        })
        .collect()
    }

    fn map_groups(&mut self) -> Result<bool, SearchStop> {
        let (sources, targets) = (self.source.list, self.target.list);
        if self.source.groups.is_empty(sources) {
            return Ok(true);
        }
        let group = self.source.groups.next(sources)?;
        self.source.groups.remove(group)?;
        let mut again = Again::default();
        let mut at = self.target.groups.next(targets)?;
        while at != targets {
            let next = self.target.groups.next(at)?;
            again.check(self, at, next)?;
            let len = self.mapping.len();
            let (from, to) = (self.mapping.head(), self.mapping.head());
            for n in self.source.group(group)? {
                self.mapping.push_back(n, from)?;
            }
            for n in self.target.group(at)? {
                self.mapping.push_back(self.source.nodes.len() + n, to)?;
            }
            if self.map_nodes(from, to)? {
                self.target.groups.remove(at)?;
                if self.map_groups()? {
                    return Ok(true);
                }
                self.target.groups.push_front(at, targets)?;
            }
            self.mapping.truncate(len);
            at = next;
        }
        self.source.groups.push_back(group, sources)?;
        Ok(false)
    }

    fn map_nodes(&mut self, sources: usize, targets: usize) -> Result<bool, SearchStop> {
        if self.mapping.is_empty(sources) {
            return Ok(true);
        }
        self.print(sources)?;
        self.print(targets)?;
        let source = self.mapping.next(sources)?;
        self.mapping.remove(source)?;
        let mut again = Again::default();
        let mut at = self.mapping.next(targets)?;
        while at != targets {
            let next = self.mapping.next(at)?;
            again.check(self, at, next)?;
            let target = at
                .checked_sub(self.source.nodes.len())
                .ok_or(Broken::Nowhere)?;
            if let Some(cpus) = self.map_node(source, target)? {
                self.mapping.remove(at)?;
                let pair = (
                    self.source.nodes[source].gpu_id,
                    self.target.nodes[target].gpu_id,
                );
                if !self.push(pair, &cpus) {
                    // The plugin gives up here without putting the two nodes back.
                    return Ok(false);
                }
                let (gpus_before, cpus_before) =
                    (self.gpus.len() - 1, self.cpus.len() - cpus.len());
                if self.map_nodes(sources, targets)? {
                    return Ok(true);
                }
                self.mapping.push_front(at, targets)?;
                self.gpus.truncate(gpus_before);
                self.cpus.truncate(cpus_before);
            }
            at = next;
        }
        self.mapping.push_front(source, sources)?;
        Ok(false)
    }

    /// The plugin prints both lists before it looks at them.
    fn print(&self, list: usize) -> Result<(), SearchStop> {
        let mut all = Vec::new();
        let ends = self.mapping.find(list, |at| {
            all.push(at);
            false
        });
        let first = self.source.nodes.len();
        let node = |at: &usize| match at.checked_sub(first) {
            None => self.source.nodes.get(*at),
            Some(at) => self.target.nodes.get(at),
        };
        fits_print(0, all.iter().map_while(node).copied())?;
        if all.iter().any(|at| node(at).is_none()) {
            return Err(Broken::Nowhere.into());
        }
        ends?;
        Ok(())
    }

    fn push(&mut self, gpu: (u32, u32), cpus: &[(u32, u32)]) -> bool {
        let clash = |held: &[(u32, u32)], new: (u32, u32)| {
            held.iter().any(|h| h.0 == new.0 || h.1 == new.1)
        };
        if cpus.iter().any(|c| clash(&self.cpus, *c)) || clash(&self.gpus, gpu) {
            return false;
        }
        self.gpus.push(gpu);
        self.cpus.extend_from_slice(cpus);
        true
    }

    /// Returns whether a node can replace another, and the CPUs that this binds to each other.
    fn map_node(
        &mut self,
        source: usize,
        target: usize,
    ) -> Result<Option<Vec<(u32, u32)>>, SearchStop> {
        self.steps += 1;
        if self.steps > BUDGET {
            return Err(SearchStop::Budget);
        }
        if !*self
            .alike
            .get(source)
            .and_then(|row| row.get(target))
            .ok_or(Broken::Nowhere)?
        {
            return Ok(None);
        }
        let mut bound: Vec<(u32, u32)> = Vec::new();
        let others = &self.target.links[target];
        for link in &self.source.links[source] {
            // A recorded link to a node that was not recorded: the plugin does not check that there is one.
            if link.to_gpu.ok_or(Broken::Nowhere)? {
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
