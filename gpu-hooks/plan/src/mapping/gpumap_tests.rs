use super::*;
use crate::ceiling::{Lifts, OtherGpus};
use crate::gpus::inventory::recorded;
use cryopod_archive::metadata::{EngineNode, GpuFacts, MovedNode};
use cryopod_host::files::Host;
use cryopod_host::nodes::{NodeRole, NodeSource, Vendor};
use cryopod_host::spec::Spec;

fn gpu(n: u32, model: &str) -> Gpu {
    Gpu {
        index: n,
        model: model.into(),
        pci: format!("0000:0{n}:00.0"),
        minor: Some(n.into()),
        ..Gpu::new(
            Vendor::Nvidia,
            format!("GPU-00000000-0000-0000-0000-00000000000{n}"),
        )
    }
}

fn node(minor: u64) -> DeviceNode {
    let kind = (Vendor::Nvidia, NodeRole::Gpu);
    DeviceNode::new(format!("/dev/nvidia{minor}"), kind, (195, minor))
}

fn try_it(recorded: &[Gpu], here: &[Gpu], wish: &str) -> Result<Vec<(u8, u8)>, String> {
    let situation = Situation {
        recorded: recorded.to_vec(),
        here: here.to_vec(),
        ..Situation::default()
    };
    decide(&situation, &wish.parse().unwrap())
        .and_then(|chosen| driver_map(&chosen))
        .map(|pairs| pairs.iter().map(|p| (p.old.0[15], p.new.0[15])).collect())
        .map_err(text)
}

fn text(refusals: Vec<Refusal>) -> String {
    let lines: Vec<String> = refusals.iter().map(ToString::to_string).collect();
    lines.join("\n")
}

#[test]
fn the_same_gpus_need_no_map() {
    let two = [gpu(0, "X"), gpu(1, "X")];
    assert_eq!(try_it(&two, &two, "auto").unwrap(), []);
    assert_eq!(try_it(&two, &two, "0=0,1=1").unwrap(), []);
    assert_eq!(try_it(&[], &[], "").unwrap(), []);
}

#[test]
fn absent_gpus_get_another_of_their_model() {
    let here = [gpu(2, "Y"), gpu(1, "X"), gpu(3, "X")];
    assert_eq!(
        try_it(&[gpu(0, "X"), gpu(1, "X")], &here, "auto").unwrap(),
        [(0, 3), (1, 1)]
    );
    let e = try_it(&[gpu(0, "X"), gpu(1, "X"), gpu(4, "X")], &here, "auto").unwrap_err();
    assert!(
        e.contains("can take the place of GPU-00000000-0000-0000-0000-000000000004 (X)")
            && e.contains("(Y)"),
        "{e}"
    );
}

#[test]
fn an_explicit_map_by_every_kind_of_name() {
    let two = [gpu(0, "X"), gpu(1, "X")];
    for wish in [
        "0=1,1=0",
        "/dev/nvidia0=/dev/nvidia1, 1=0",
        "0000:00:00.0=0000:01:00.0,GPU-00000000-0000-0000-0000-000000000001=0",
    ] {
        assert_eq!(
            try_it(&two, &two, wish).unwrap(),
            [(0, 1), (1, 0)],
            "{wish}"
        );
    }
    assert_eq!(try_it(&two[..1], &two, "0=1").unwrap(), [(0, 1)]);
}

#[test]
fn every_reason_is_told() {
    let two = [gpu(0, "X"), gpu(1, "Y")];
    let e = try_it(&two, &two, "0=1,7=0,1=9").unwrap_err();
    for want in ["no GPU 7", "no GPU 9", "is not mapped"] {
        assert!(e.contains(want), "{want}: {e}");
    }
    assert!(
        try_it(&two, &two, "0=0,0=0")
            .unwrap_err()
            .contains("a second time")
    );
    assert!("0".parse::<Wish>().unwrap_err().contains("OLD=NEW"));
    assert!("0=".parse::<Wish>().is_err());
}

fn free(gib: &[(u32, u64)]) -> BTreeMap<String, u64> {
    gib.iter().map(|(n, g)| (gpu(*n, "").id, g << 30)).collect()
}

#[test]
fn a_gpu_without_room_is_left_for_one_that_has_it() {
    let mut situation = Situation {
        recorded: vec![gpu(0, "X")],
        here: vec![gpu(0, "X"), gpu(1, "Y"), gpu(2, "X"), gpu(3, "X")],
        free: free(&[(0, 1), (1, 99), (2, 3), (3, 40)]),
        need: free(&[(0, 30)]),
        ..Situation::default()
    };
    let chosen = decide(&situation, &Wish::Auto).unwrap();
    assert_eq!((chosen[0].new.index, chosen[0].moved()), (3, true));
    assert!(chosen[0].why.contains("memory"));
    situation.free.insert(gpu(3, "").id, 29 << 30);
    // None has room: it keeps its place, and the checks report the problem.
    assert!(!decide(&situation, &Wish::Auto).unwrap()[0].moved());
    situation.here.remove(0);
    assert_eq!(decide(&situation, &Wish::Auto).unwrap()[0].new.index, 2);
    situation.here.truncate(1);
    let e = text(decide(&situation, &Wish::Auto).unwrap_err());
    assert!(
        e.contains("(Y)") && e.contains("`nvidia-model = false`"),
        "{e}"
    );
    situation.any_model = true;
    assert_eq!(decide(&situation, &Wish::Auto).unwrap()[0].new.index, 1);
    situation.here = vec![gpu(0, "X")];
    situation.free.clear();
    assert!(
        !decide(&situation, &Wish::Auto).unwrap()[0].moved(),
        "not known"
    );
}

#[test]
fn what_the_engine_gave() {
    let mut situation = Situation {
        recorded: vec![gpu(0, "X"), gpu(1, "X")],
        here: (0..4).map(|n| gpu(n, "X")).collect(),
        offered: Some([gpu(1, "").id, gpu(3, "").id].into()),
        ..Situation::default()
    };
    let to = |s: &Situation, wish: &str| {
        decide(s, &wish.parse().unwrap())
            .map(|c| c.iter().map(|c| c.new.index).collect::<Vec<_>>())
            .map_err(text)
    };
    assert_eq!(to(&situation, "auto").unwrap(), [3, 1]);
    assert_eq!(
        to(&situation, "0=2").unwrap(),
        [2, 1],
        "the map comes first"
    );
    situation.offered = Some([gpu(1, "").id].into());
    let e = to(&situation, "auto").unwrap_err();
    assert!(e.contains("give the new container as many"), "{e}");
}

fn render(n: u64, major: u64) -> DeviceNode {
    let kind = (Vendor::Amd, NodeRole::Render);
    DeviceNode::new(format!("/dev/dri/renderD{n}"), kind, (major, n))
}

#[test]
fn nodes_stand_for_gpus_that_nobody_describes() {
    let nodes = [node(0), node(1), render(128, 226), render(129, 7)];
    let facts = GpuFacts {
        nodes: nodes.to_vec(),
        gpus: vec![gpu(1, "X")],
        ..GpuFacts::default()
    };
    // Node 1 leads to the GPU that the metadata describes.
    let all = recorded(&facts);
    let ids: Vec<&str> = all.iter().map(|g| g.id.as_str()).collect();
    assert_eq!(
        ids,
        [
            gpu(1, "").id.as_str(),
            "/dev/nvidia0",
            "/dev/dri/renderD128",
            "/dev/dri/renderD129"
        ]
    );
    let situation = Situation {
        recorded: all,
        here: of_nodes(&[
            node(0),
            node(1),
            node(2),
            render(130, 226),
            render(131, 226),
        ]),
        ..Situation::default()
    };
    let to = |wish: &str| {
        decide(&situation, &wish.parse().unwrap())
            .map(|c| c.into_iter().map(|c| c.new.id).collect::<Vec<_>>())
            .map_err(text)
    };
    assert_eq!(
        to("auto").unwrap(),
        [
            "/dev/nvidia1",
            "/dev/nvidia0",
            "/dev/dri/renderD130",
            "/dev/dri/renderD131"
        ]
    );
    assert_eq!(
        to("/dev/nvidia0=/dev/nvidia2,renderD128=131,129=/dev/dri/renderD130").unwrap(),
        [
            "/dev/nvidia2",
            "/dev/dri/renderD131",
            "/dev/dri/renderD130",
            "/dev/nvidia1"
        ]
    );
    let e = to("0=2").unwrap_err();
    assert!(e.contains("can mean several GPUs"), "{e}");
    let e = to("renderD128=/dev/nvidia1").unwrap_err();
    assert!(e.contains("no GPU /dev/nvidia1"), "another vendor's: {e}");
}

#[test]
fn a_map_of_an_annotation_stays_among_what_the_engine_gave() {
    let here: Vec<Gpu> = (0..4).map(|n| gpu(n, "X")).collect();
    let mut situation = Situation {
        recorded: vec![gpu(0, "X"), gpu(1, "X")],
        here: here.clone(),
        wished_by: "gpu.map",
        ..Situation::default()
    };
    let no = |what: &str| Refusal::new(what, "give it");
    situation.refused = [2, 3].map(|n| (gpu(n, "").id, no("not given"))).into();
    let to = |wish: &str| {
        let chosen = decide(&situation, &wish.parse().unwrap()).map_err(text)?;
        Ok::<_, String>(chosen.iter().map(|c| c.new.index).collect::<Vec<_>>())
    };
    assert_eq!(to("0=1,1=0").unwrap(), [1, 0]);
    let e = to("0=2").unwrap_err();
    assert!(
        e.contains("gpu.map: 0=2: not given") && !e.contains(ANNOTATION),
        "{e}"
    );
    situation.recorded = vec![gpu(0, "X"), gpu(3, "X")];
    let e = decide(&situation, &"0=1".parse().unwrap()).map_err(text);
    assert!(
        e.unwrap_err().contains("not given by the engine"),
        "by itself"
    );
}

#[test]
fn what_an_engine_says_by_its_devices() {
    let device = |n: u64| serde_json::json!({"path": format!("/dev/nvidia{n}"), "type": "c", "major": 195, "minor": n});
    let spec = |list: &[u64]| {
        let list: Vec<_> = list.iter().map(|n| device(*n)).collect();
        Spec::from_json(serde_json::json!({
            "annotations": {"io.container.manager": "libpod"},
            "linux": {"devices": list, "resources": {"devices": [{"allow": false}]}}
        }))
    };
    let here: Vec<Gpu> = (0..4).map(|n| gpu(n, "X")).collect();
    let mut facts = GpuFacts {
        nodes: vec![node(0), node(1)],
        ..GpuFacts::default()
    };
    let said_if = |others: OtherGpus, facts: &GpuFacts, list: &[u64]| {
        let ceiling = Ceiling {
            host: &Host::at("/nowhere"),
            spec: &spec(list),
            lifts: Lifts {
                other_gpus: others,
                ..Lifts::default()
            },
        };
        let ids = offered(&ceiling, facts, &here)?;
        Some(
            ids.iter()
                .map(|i| i.as_bytes()[i.len() - 1] - b'0')
                .collect::<Vec<_>>(),
        )
    };
    let said = |facts: &GpuFacts, list: &[u64]| said_if(OtherGpus::Auto, facts, list);
    let strict = |facts: &GpuFacts, list: &[u64]| said_if(OtherGpus::Never, facts, list);
    assert_eq!(strict(&facts, &[]), None, "no GPU can be opened");
    assert_eq!(strict(&facts, &[0, 1]), Some(vec![0, 1]));
    assert_eq!(strict(&facts, &[2]), Some(vec![2]));
    assert_eq!(said(&facts, &[]), None);
    assert_eq!(said(&facts, &[0, 1]), None);
    assert_eq!(said(&facts, &[2, 3]), Some(vec![2, 3]));
    assert_eq!(said(&facts, &[1, 2]), Some(vec![1, 2]));
    // A container that was moved from 0 to 1 before, unknown to its engine.
    facts.nodes = vec![node(1)];
    facts.moved = vec![MovedNode {
        path: "/dev/nvidia1".into(),
        alias_of: None,
        engine: EngineNode {
            path: "/dev/nvidia0".into(),
            major: 195,
            minor: 0,
        },
    }];
    assert_eq!(said(&facts, &[0]), None);
    assert_eq!(said(&facts, &[1]), Some(vec![1]));
}

#[test]
fn what_the_device_rules_open_beside_the_spec() {
    let spec = Spec::from_json(serde_json::json!({"linux": {
        "devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}],
        "resources": {"devices": [{"allow": false}, {"allow": true, "type": "c", "major": 195, "access": "rwm"}]},
    }}));
    let ceiling = Ceiling {
        host: &Host::at("/nowhere"),
        spec: &spec,
        lifts: Lifts::default(),
    };
    let here: Vec<Gpu> = (0..3).map(|n| gpu(n, "X")).collect();
    let of = |n: u32, source| DeviceNode {
        source,
        gpu: Some(gpu(n, "").id),
        ..node(n.into())
    };
    let offered_of = |source| {
        let facts = GpuFacts {
            nodes: vec![of(0, NodeSource::Device), of(1, source)],
            gpus: here[..2].to_vec(),
            ..GpuFacts::default()
        };
        offered(&ceiling, &facts, &here).unwrap()
    };
    let both = BTreeSet::from([gpu(0, "").id, gpu(1, "").id]);
    assert_eq!(offered_of(NodeSource::Live), both);
    let named = BTreeSet::from([gpu(0, "").id]);
    assert_eq!(
        offered_of(NodeSource::Device),
        named,
        "the engine gave others"
    );
}
