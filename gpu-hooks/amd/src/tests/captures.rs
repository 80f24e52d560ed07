//! Tests with a real machine: 8 MI210 in two XGMI hives of 4, each hive on its own CPU. The numbers are those of the
//! topology that ROCm's k8s-device-plugin carries for its tests (testdata/topo-mi210-xgmi-pcie, Apache-2.0). It has no
//! `gpu_id` and no `mem_banks`, which are made up here.

use super::super::checks::KfdSwitches;
use super::super::choose::{ChoiceRequest, choose};
use super::super::plugin_choice::choose as stock;
use super::*;
use cryopod_gpu_plan::mapping::wish::Wish;

fn mi210() -> Topology {
    let mut t = machine(2, 8, 0xa000);
    for (i, node) in t.nodes.iter_mut().filter(|n| n.is_gpu()).enumerate() {
        let p = &mut node.properties;
        p.caches_count = 217;
        p.io_links_count = 4;
        p.device_id = 29_711;
        p.hive_id = if i < 4 {
            12_609_507_387_757_274_807
        } else {
            18_091_350_218_769_748_594
        };
        p.fw_version = 92;
        p.capability = 746_037_888;
        p.sdma_fw_version = 9;
    }
    for (cpu, gpus) in [(0, [2, 3, 4, 5]), (1, [6, 7, 8, 9])] {
        gpus.iter().for_each(|g| both(&mut t, LINK_PCIE, *g, cpu));
        mesh(&mut t, LINK_XGMI, &gpus);
    }
    t
}

/// What the plugin records where only some GPUs are visible: links that lead nowhere are not stored.
fn recorded(minors: &[u32]) -> Topology {
    let mut t = mi210().visible(minors);
    let ids: Vec<u32> = t.nodes.iter().map(|n| n.id).collect();
    t.nodes
        .iter_mut()
        .for_each(|n| n.links.retain(|l| ids.contains(&l.to)));
    t
}

/// The same machine whose KFD lists the nodes in reverse, with other ids.
fn elsewhere() -> Topology {
    let mut t = mi210();
    t.nodes.reverse();
    t.nodes
        .iter_mut()
        .filter(|n| n.is_gpu())
        .for_each(|n| n.gpu_id += 0x1000);
    t
}

fn decide(
    source: &Topology,
    target: &Topology,
    permitted: Option<&[u32]>,
) -> Result<Vec<u32>, String> {
    let request = ChoiceRequest {
        sources: std::slice::from_ref(source),
        target,
        permitted,
        wish: &Wish::Auto,
        switches: &KfdSwitches::default(),
    };
    choose(&request)
        .map(|c| c.visible)
        .map_err(|e| e.to_string())
}

#[test]
fn the_whole_machine() {
    assert_eq!(
        decide(&mi210(), &mi210(), None).unwrap(),
        (128..136).collect::<Vec<_>>()
    );
    assert_eq!(
        decide(&mi210(), &elsewhere(), None).unwrap(),
        (128..136).collect::<Vec<_>>()
    );
    stock(&mi210(), &elsewhere(), &KfdSwitches::default()).unwrap();
}

#[test]
fn two_gpus_of_a_hive_go_to_two_of_a_hive() {
    let two = recorded(&[129, 130]);
    assert_eq!(decide(&two, &elsewhere(), None).unwrap(), [129, 130]);
    assert_eq!(
        decide(&two, &elsewhere(), Some(&[128, 131, 133])).unwrap(),
        [128, 131]
    );
    assert_eq!(
        decide(&two, &elsewhere(), Some(&[128, 132, 134])).unwrap(),
        [132, 134]
    );
    assert!(decide(&two, &elsewhere(), Some(&[128, 132])).is_err());
    // Two of two hives were on two CPUs, and stay so.
    let apart = recorded(&[128, 132]);
    assert_eq!(
        decide(&apart, &elsewhere(), Some(&[129, 130, 133])).unwrap(),
        [129, 133]
    );
}
