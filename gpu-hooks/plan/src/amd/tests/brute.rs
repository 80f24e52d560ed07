//! Implements the rules of a mapping once more, by brute force.

use std::collections::BTreeMap;

use super::super::checks::{Switch, Switches, matches};
use super::super::topology::{LINK_XGMI, Link, Node, Topology};

struct View<'a> {
    nodes: Vec<&'a Node>,
}

impl<'a> View<'a> {
    fn node(&self, id: u32) -> Option<&'a Node> {
        self.nodes.iter().find(|n| n.id == id).copied()
    }

    fn peered(&self, from: &Node, link: Link) -> bool {
        self.node(link.to).is_some_and(|n| {
            n.links.contains(&Link {
                kind: link.kind,
                to: from.id,
            })
        })
    }

    fn valid(&self, node: &Node) -> usize {
        node.links
            .iter()
            .filter(|l| self.node(l.to).is_some())
            .count()
    }

    /// GPU ids joined by XGMI, each with the smallest node id of its hive; GPUs in none are absent.
    fn hives(&self) -> BTreeMap<u32, u32> {
        let joined = |a: &Node| -> Vec<u32> {
            a.links
                .iter()
                .filter(|l| l.kind == LINK_XGMI && l.to != a.id && self.peered(a, **l))
                .filter_map(|l| self.node(l.to).filter(|n| n.is_gpu()).map(|n| n.id))
                .collect()
        };
        let gpus: Vec<&Node> = self.nodes.iter().copied().filter(|n| n.is_gpu()).collect();
        let mut hive: BTreeMap<u32, u32> = gpus
            .iter()
            .filter(|g| !joined(g).is_empty())
            .map(|g| (g.id, g.id))
            .collect();
        for _ in 0..gpus.len() {
            for g in &gpus {
                for j in joined(g) {
                    let least = hive[&g.id].min(hive[&j]);
                    hive.insert(g.id, least);
                    hive.insert(j, least);
                }
            }
        }
        hive
    }

    fn cpu_links(&self, node: &Node) -> Vec<(Link, bool)> {
        node.links
            .iter()
            .filter(|l| self.node(l.to).is_some_and(|n| !n.is_gpu()))
            .map(|l| (*l, self.peered(node, *l)))
            .collect()
    }
}

fn good(a: (Link, bool), b: (Link, bool)) -> bool {
    (a.0.kind != LINK_XGMI || b.0.kind == LINK_XGMI) && (!a.1 || b.1)
}

/// Returns true if this mapping keeps all rules: `targets` are node ids by source.
pub(super) fn valid(
    source: &Topology,
    target: &Topology,
    switches: &Switches,
    targets: &[u32],
) -> bool {
    let s = View {
        nodes: source.nodes.iter().collect(),
    };
    let v = View {
        nodes: target
            .nodes
            .iter()
            .filter(|n| !n.is_gpu() || targets.contains(&n.id))
            .collect(),
    };
    let pairs: Vec<(&Node, &Node)> = source
        .gpus()
        .zip(targets.iter().map(|t| v.node(*t).unwrap()))
        .collect();
    let (hs, hv) = (s.hives(), v.hives());
    for (a, b) in &pairs {
        if !matches(a, b, switches) || s.valid(a) > v.valid(b) {
            return false;
        }
        if !s
            .cpu_links(a)
            .iter()
            .all(|x| v.cpu_links(b).iter().any(|y| good(*x, *y)))
        {
            return false;
        }
        for (c, d) in &pairs {
            if let (Some(x), Some(y)) = (hs.get(&a.id), hs.get(&c.id)) {
                let (Some(p), Some(q)) = (hv.get(&b.id), hv.get(&d.id)) else {
                    return false;
                };
                if (x == y) != (p == q) {
                    return false;
                }
            }
        }
    }
    if !switches.is_on(Switch::Numa) {
        return true;
    }
    let cpus = |v: &View<'_>| {
        v.nodes
            .iter()
            .filter(|n| !n.is_gpu())
            .map(|n| n.id)
            .collect::<Vec<_>>()
    };
    place(&cpus(&s), &cpus(&v), &mut BTreeMap::new(), &|map| {
        pairs.iter().all(|(a, b)| {
            s.cpu_links(a).iter().all(|x| match map.get(&x.0.to) {
                None => true,
                Some(None) => false,
                Some(Some(d)) => v.cpu_links(b).iter().any(|y| y.0.to == *d && good(*x, *y)),
            })
        })
    })
}

type Places = BTreeMap<u32, Option<u32>>;

/// Tries every placement of the CPUs; a CPU may have none.
fn place(left: &[u32], free: &[u32], map: &mut Places, good: &dyn Fn(&Places) -> bool) -> bool {
    if !good(map) {
        return false;
    }
    let Some((cpu, rest)) = left.split_first() else {
        return true;
    };
    for choice in free.iter().map(|f| Some(*f)).chain([None]) {
        map.insert(*cpu, choice);
        let free: Vec<u32> = free
            .iter()
            .copied()
            .filter(|f| Some(*f) != choice)
            .collect();
        if place(rest, &free, map, good) {
            map.remove(cpu);
            return true;
        }
    }
    map.remove(cpu);
    false
}

pub(super) fn feasible(source: &Topology, target: &Topology, switches: &Switches) -> bool {
    fn go(
        s: &[&Node],
        source: &Topology,
        target: &Topology,
        switches: &Switches,
        chosen: &mut Vec<u32>,
    ) -> bool {
        let Some((first, rest)) = s.split_first() else {
            return valid(source, target, switches, chosen);
        };
        for t in target.gpus() {
            if !chosen.contains(&t.id) && matches(first, t, switches) {
                chosen.push(t.id);
                if go(rest, source, target, switches, chosen) {
                    return true;
                }
                chosen.pop();
            }
        }
        false
    }
    let gpus: Vec<&Node> = source.gpus().collect();
    go(&gpus, source, target, switches, &mut Vec::new())
}
