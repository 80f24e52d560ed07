//! Tests the prediction against what the plugin's own code did with these inputs (CRIU 4.2).

use super::super::checks::{KfdSwitches, Switch};
use super::super::plugin_choice::choose;
use super::super::topology::Unreadable;
use super::machines::described;
use super::*;

fn picks(source: &Topology, target: &Topology) -> Vec<(u32, u32)> {
    choose(source, target, &KfdSwitches::default()).unwrap()
}

fn refuses(source: &Topology, target: &Topology) -> String {
    choose(source, target, &KfdSwitches::default()).unwrap_err()
}

#[test]
fn remaining_gpus_are_taken_from_the_end() {
    let (a, b) = (server(1, 4, 0, 0xa000), server(1, 4, 0, 0xb000));
    assert_eq!(
        picks(&a, &b),
        [
            (0xa000, 0xb000),
            (0xa001, 0xb001),
            (0xa002, 0xb002),
            (0xa003, 0xb003)
        ]
    );
    let mut reversed = b.clone();
    reversed.nodes.reverse();
    assert_eq!(
        picks(&a, &reversed),
        [
            (0xa000, 0xb003),
            (0xa001, 0xb002),
            (0xa002, 0xb001),
            (0xa003, 0xb000)
        ]
    );
}

#[test]
fn hives_come_first_and_in_order() {
    let (a, b) = (server(1, 8, 4, 0xa000), server(1, 8, 4, 0xb000));
    let expected: Vec<(u32, u32)> = (0..8).map(|i| (0xa000 + i, 0xb000 + i)).collect();
    assert_eq!(picks(&a, &b), expected);
    // The other model's hive is found at the second try.
    let mut models = (a.clone(), b.clone());
    models
        .0
        .nodes
        .iter_mut()
        .skip(5)
        .for_each(|n| n.properties.device_id += 1);
    models
        .1
        .nodes
        .iter_mut()
        .skip(1)
        .take(4)
        .for_each(|n| n.properties.device_id += 1);
    let expected: Vec<(u32, u32)> = (0..8).map(|i| (0xa000 + i, 0xb000 + (i + 4) % 8)).collect();
    assert_eq!(picks(&models.0, &models.1), expected);
}

#[test]
fn counts_must_agree() {
    let a = server(1, 2, 0, 0xa000);
    assert_eq!(
        refuses(&a, &server(1, 3, 0, 0xb000)),
        "would refuse (it wants to see 2 GPUs and sees 3)"
    );
    let hive = server(1, 2, 2, 0xa000);
    assert_eq!(
        refuses(&hive, &server(1, 2, 0, 0xb000)),
        "would refuse (the checkpoint has 1 hives and it sees 0)"
    );
    // A node that it cannot read stops it; one that the kernel hides does not.
    let mut here = server(1, 2, 0, 0xb000);
    here.unreadable.push(Unreadable {
        node: 7,
        render_minor: None,
        what: "mem_banks: no bank of VRAM".into(),
        stops_plugin: true,
    });
    assert!(refuses(&a, &here).contains("node 7 cannot be read: mem_banks"));
    here.unreadable[0].stops_plugin = false;
    picks(&a, &here);
    // A recorded link to nowhere.
    let mut torn = a.clone();
    torn.nodes[1].links[0].to = 99;
    let why = refuses(&torn, &server(1, 2, 0, 0xb000));
    assert_eq!(why, "would crash (a link leads nowhere)");
    // 28 GPUs of one list are more than its buffer holds.
    let full = server(1, 28, 28, 0xa000);
    assert!(refuses(&full, &full).contains("28 GPUs of one list"));
}

/// What the case amd_endless of the virtual machine shows of the plugin itself.
#[test]
fn a_search_that_never_ends_is_refused() {
    let (a, b) = (described("endless-a"), described("endless-b"));
    for target in [&a, &b] {
        let why = refuses(&a, target);
        assert!(why.contains("would never end"), "{why}");
    }
}

/// The first GPU of the checkpoint fits both, the second only the one that the first was given.
#[test]
fn a_pair_that_would_be_taken_back_is_refused() {
    let (mut a, mut b) = (server(1, 2, 0, 0xa000), server(1, 2, 0, 0xb000));
    a.nodes[1].properties.fw_version += 1;
    b.nodes[2].properties.fw_version += 1;
    let why = refuses(&a, &b);
    assert!(why.contains("would have to take a GPU back"), "{why}");
}

#[test]
fn numa_follows_its_switch() {
    let a = server(2, 4, 0, 0xa000);
    let mut b = server(1, 4, 0, 0xb000);
    b.nodes.insert(
        0,
        Node {
            id: 9,
            cpu_cores_count: 1,
            ..Node::default()
        },
    );
    refuses(&a, &b);
    let off = KfdSwitches::default().with(Switch::Numa, false);
    choose(&a, &b, &off).unwrap();
}
