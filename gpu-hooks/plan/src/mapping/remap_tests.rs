use super::*;
use crate::ceiling::Lifts;
use crate::gpus::inventory;
use crate::mapping::gpumap::{self, Situation, Wish};
use cryopod_archive::metadata::EngineNode;
use cryopod_host::files::Host;
use cryopod_host::nodes::NodeSource;
use cryopod_test_files::TestFiles;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::json;

/// A host with these nodes: path, major, minor. `None` without root.
fn host(nodes: &[(&str, u64, u64)]) -> Option<(tempfile::TempDir, Host)> {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("skipped: mknod needs root");
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    for (path, major, minor) in nodes {
        let path = dir.path().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let number = makedev(*major, *minor);
        mknod(&path, SFlag::S_IFCHR, Mode::S_IRUSR, number).unwrap();
    }
    let list = "Character devices:\n  1 mem\n 21 sg\n195 nvidia\n195 nvidiactl\n238 nvidia-uvm\n241 nvidia-caps\n242 kfd\n510 kfd\n511 nvidia-uvm\n";
    dir.put("proc/devices", list);
    let host = Host::at(dir.path());
    Some((dir, host))
}

fn ceiling<'a>(host: &'a Host, spec: &'a Spec) -> Ceiling<'a> {
    Ceiling {
        host,
        spec,
        lifts: Lifts::default(),
    }
}

fn node(path: &str, major: u64, minor: u64) -> DeviceNode {
    let kind = match nodes::classify(path) {
        Some(nodes::Class::Known(vendor, role)) => (vendor, role),
        _ => (Vendor::Amd, NodeRole::Render),
    };
    DeviceNode::new(path, kind, (major, minor))
}

fn facts(nodes: &[(&str, u64, u64)]) -> GpuFacts {
    let mut facts = GpuFacts {
        nodes: nodes.iter().map(|(p, a, i)| node(p, *a, *i)).collect(),
        ..GpuFacts::default()
    };
    facts.vendors = facts.nodes.iter().map(|n| n.vendor).collect();
    facts.vendors.sort();
    facts.vendors.dedup();
    facts
}

fn go(host: &Host, facts: &GpuFacts, wish: &str) -> Result<Remap, String> {
    let situation = Situation {
        recorded: inventory::recorded(facts),
        here: facts
            .vendors
            .iter()
            .flat_map(|v| inventory::here(host, *v))
            .collect(),
        ..Situation::default()
    };
    let wish: Wish = wish.parse().unwrap();
    gpumap::decide(&situation, &wish)
        .and_then(|chosen| remap(&ceiling(host, &Spec::from_json(json!({}))), facts, &chosen))
        .map_err(|r| {
            r.iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join("\n")
        })
}

fn short(remap: &Remap) -> Vec<(&str, u64, u64, &str, bool)> {
    let one = |t: &'_ NodeTarget| (t.major, t.minor, t.alias_of.is_some());
    remap
        .targets
        .iter()
        .map(|t| {
            let (major, minor, alias) = one(t);
            (t.path.as_str(), major, minor, t.from.as_str(), alias)
        })
        .collect()
}

const NVIDIA: [(&str, u64, u64); 4] = [
    ("/dev/nvidia0", 195, 0),
    ("/dev/nvidia1", 195, 1),
    ("/dev/nvidiactl", 195, 255),
    ("/dev/nvidia-uvm", 511, 0),
];

#[test]
fn nothing_moves_where_all_is_as_it_was() {
    let Some((_dir, host)) = host(&NVIDIA) else {
        return;
    };
    let remap = go(&host, &facts(&NVIDIA), "auto").unwrap();
    assert!(remap.changed().is_empty() && remap.targets.len() == 4);
}

#[test]
fn another_gpu_and_another_major() {
    let here = [
        ("/dev/nvidia0", 195, 0),
        ("/dev/nvidia1", 195, 1),
        ("/dev/nvidiactl", 195, 255),
        ("/dev/nvidia-uvm", 238, 0),
    ];
    let Some((_dir, host)) = host(&here) else {
        return;
    };
    let before = facts(&[NVIDIA[0], NVIDIA[2], NVIDIA[3]]);
    let remap = go(&host, &before, "0=1").unwrap();
    assert_eq!(
        short(&remap),
        [
            ("/dev/nvidia0", 195, 1, "/dev/nvidia0", true),
            ("/dev/nvidiactl", 195, 255, "/dev/nvidiactl", false),
            ("/dev/nvidia-uvm", 238, 0, "/dev/nvidia-uvm", false),
            ("/dev/nvidia1", 195, 1, "/dev/nvidia0", false),
        ]
    );
    assert_eq!(remap.changed().len(), 3);
}

#[test]
fn native_names_win_over_aliases() {
    let four: Vec<_> = [
        "/dev/nvidia0",
        "/dev/nvidia1",
        "/dev/nvidia2",
        "/dev/nvidia3",
    ]
    .into_iter()
    .zip(0..)
    .map(|(p, n)| (p, 195, n))
    .collect();
    let Some((_dir, host)) = host(&four) else {
        return;
    };
    let remap = go(&host, &facts(&four[..2]), "0=1,1=0").unwrap();
    assert!(remap.changed().is_empty(), "swapped: {remap:?}");
    let remap = go(&host, &facts(&four[..2]), "0=1,1=2").unwrap();
    assert_eq!(
        short(&remap),
        [
            ("/dev/nvidia0", 195, 1, "/dev/nvidia0", true),
            ("/dev/nvidia1", 195, 1, "/dev/nvidia0", false),
            ("/dev/nvidia2", 195, 2, "/dev/nvidia1", false),
        ]
    );
}

#[test]
fn amd_nodes_with_another_major_and_minor() {
    let here = [("/dev/kfd", 242, 0), ("/dev/dri/renderD130", 226, 130)];
    let Some((_dir, host)) = host(&here) else {
        return;
    };
    let before = facts(&[("/dev/kfd", 510, 0), ("/dev/dri/renderD128", 226, 128)]);
    let remap = go(&host, &before, "auto").unwrap();
    assert_eq!(
        short(&remap),
        [
            ("/dev/kfd", 242, 0, "/dev/kfd", false),
            ("/dev/dri/renderD128", 226, 130, "/dev/dri/renderD128", true),
            (
                "/dev/dri/renderD130",
                226,
                130,
                "/dev/dri/renderD128",
                false
            ),
        ]
    );
}

#[test]
fn a_container_that_was_moved_before() {
    let Some((_dir, host)) = host(&[("/dev/nvidia0", 195, 0), ("/dev/nvidia2", 195, 2)]) else {
        return;
    };
    let mut before = facts(&[("/dev/nvidia0", 195, 1), ("/dev/nvidia1", 195, 1)]);
    let engine = EngineNode {
        path: "/dev/nvidia0".into(),
        major: 195,
        minor: 0,
    };
    let moved = |path: &str, alias_of: Option<&str>| MovedNode {
        path: path.into(),
        alias_of: alias_of.map(str::to_owned),
        engine: engine.clone(),
    };
    let note = [
        moved("/dev/nvidia1", None),
        moved("/dev/nvidia0", Some("/dev/nvidia1")),
        moved("/dev/nvidia9", None),
    ];
    let note = serde_json::to_string(&note).unwrap();
    let spec = serde_json::json!({"annotations": {ANNOTATION: note}});
    complete(&mut before, &Spec::from_json(spec));
    assert_eq!(
        before.moved.len(),
        2,
        "what is no longer there is forgotten"
    );
    let remap = go(&host, &before, "1=2").unwrap_err();
    assert!(remap.contains("no GPU 1"), "one GPU, of index 0: {remap}");
    let remap = go(&host, &before, "/dev/nvidia1=/dev/nvidia2").unwrap();
    assert_eq!(
        short(&remap),
        [
            ("/dev/nvidia0", 195, 2, "/dev/nvidia0", true),
            ("/dev/nvidia1", 195, 2, "/dev/nvidia1", true),
            ("/dev/nvidia2", 195, 2, "/dev/nvidia1", false),
        ]
    );
    let paths: Vec<&str> = remap.engine_paths("/dev/nvidia1").collect();
    assert_eq!(paths, ["/dev/nvidia1", "/dev/nvidia0"]);
}

#[test]
fn what_is_absent_is_told_at_once() {
    let Some((_dir, host)) = host(&[("/dev/nvidia0", 195, 0)]) else {
        return;
    };
    let e = go(&host, &facts(&NVIDIA[..1]), "auto");
    assert!(e.is_ok());
    let lost = [
        NVIDIA[0],
        NVIDIA[2],
        NVIDIA[3],
        ("/dev/nvidia-modeset", 195, 254),
    ];
    let e = go(&host, &facts(&lost), "auto").unwrap_err();
    for want in [
        "/dev/nvidiactl, which this host has not got",
        "/dev/nvidia-uvm, which",
    ] {
        assert!(e.contains(want), "{want}: {e}");
    }
    assert!(!e.contains("modeset"), "{e}");
    let mut made = facts(&[NVIDIA[0], NVIDIA[3]]);
    made.nodes[1].source = NodeSource::Live;
    assert!(go(&host, &made, "auto").is_err());
    made.nodes[1].allowed = false;
    assert!(go(&host, &made, "auto").is_ok(), "it could not be opened");
    made.nodes[0].source = NodeSource::Live;
    assert!(go(&host, &made, "auto").is_err(), "NVIDIA's hook made both");
}

#[test]
fn a_record_names_no_gpu_that_was_not_chosen() {
    let Some((_dir, host)) = host(&NVIDIA) else {
        return;
    };
    let mut before = facts(&NVIDIA[1..2]);
    before.nodes[0].source = NodeSource::BindMount;
    before.nodes[0].host_path = Some("/dev/nvidia1".into());
    assert!(go(&host, &before, "auto").is_ok());
    before.nodes[0].host_path = Some("/dev/nvidia0".into());
    before.nodes[0].gpu = Some("GPU-other".into());
    let e = go(&host, &before, "auto").unwrap_err();
    assert!(e.contains("of a GPU that was not chosen"), "{e}");
}

#[test]
fn a_record_names_no_other_device_than_a_gpus() {
    let here = [
        ("/dev/nvidia0", 195, 0),
        ("/dev/nvidiactl", 195, 255),
        ("/dev/nvidia-uvm", 21, 0),
        ("/dev/nvidia-caps/nvidia-cap1", 241, 1),
        ("/dev/sg0", 21, 0),
        ("/dev/mem", 1, 1),
    ];
    let Some((_dir, host)) = host(&here) else {
        return;
    };
    let try_it = |path: &str, host_path: &str| {
        let mut before = facts(&[here[0], (path, 195, 255)]);
        before.nodes[1].host_path = Some(host_path.into());
        go(&host, &before, "auto")
    };
    assert!(try_it("/dev/nvidiactl", "/dev/nvidiactl").is_ok());
    for (path, host_path, told) in [
        ("/dev/nvidiactl", "/dev/sg0", "is no GPU node"),
        ("/dev/nvidiactl", "/dev/mem", "is no GPU node"),
        (
            "/dev/nvidiactl",
            "/dev/nvidia-caps/../mem",
            "is no GPU node",
        ),
        ("/dev/nvidiactl", "/dev/nvidia0", "another role"),
        (
            "/dev/nvidiactl",
            "/dev/nvidia-caps/nvidia-cap1",
            "another role",
        ),
        (
            "/dev/nvidia-uvm",
            "/dev/nvidia-uvm",
            "21 is that of the driver sg",
        ),
    ] {
        let e = try_it(path, host_path).unwrap_err();
        assert!(e.contains(told), "{path} {host_path}: {e}");
    }
}
