//! Reads the descriptions of machines in tests/amd/machines, which the mock KFD of the virtual machine takes too.
//!
//! `cpus` and `gpus` give properties of the nodes that follow, `node ID GPU_ID` a node and its own properties, `bank HEAP
//! SIZE` its memory, `links TYPE:TO...` its links.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::*;

pub(super) const ALL: [&str; 11] = [
    "endless-a",
    "endless-b",
    "mi210-4",
    "mi210-8",
    "mi250x-8",
    "mi300x-8",
    "mi300x-cpx-64",
    "mi308x-32",
    "radeon-1",
    "vega-1",
    "vega-2",
];

pub(super) fn described(name: &str) -> Topology {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/amd/machines");
    let text = fs::read_to_string(dir.join(format!("{name}.topology"))).unwrap();
    let mut topology = Topology::default();
    let (mut cpus, mut gpus) = (BTreeMap::new(), BTreeMap::new());
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let mut words = line.split(' ');
        let kind = words.next().unwrap();
        let mut number = || words.next().unwrap().parse::<u64>().unwrap();
        match kind {
            "cpus" => cpus = properties(words),
            "gpus" => gpus = properties(words),
            "node" => {
                let (id, gpu_id) = (number() as u32, number() as u32);
                let mut all = if gpu_id == 0 { &cpus } else { &gpus }.clone();
                all.extend(properties(words));
                let mut node = Node {
                    id,
                    gpu_id,
                    ..Node::default()
                };
                node.take(&all);
                topology.nodes.push(node);
            }
            "bank" => {
                let (heap, size) = (number(), number());
                let node = topology.nodes.last_mut().unwrap();
                node.properties.vram_public = u32::from(heap == 1);
                node.properties.vram_size = size;
            }
            "links" => {
                let links = words.filter_map(|w| {
                    let (kind, to) = w.split_once(':').unwrap();
                    let kind = kind.parse().unwrap();
                    let to = to.parse().unwrap();
                    matches!(kind, LINK_PCIE | LINK_XGMI).then_some(Link { kind, to })
                });
                topology.nodes.last_mut().unwrap().links = links.collect();
            }
            _ => panic!("{name}: {line}"),
        }
    }
    topology
}

fn properties<'a>(words: impl Iterator<Item = &'a str>) -> BTreeMap<String, u64> {
    words
        .map(|w| {
            let (key, value) = w.split_once('=').unwrap();
            (key.to_owned(), value.parse().unwrap())
        })
        .collect()
}
