use super::*;
use cryopod_host::nodes::{DeviceNode, NodeRole, Vendor};

/// The node that a container has as its own device.
fn device(path: &str, major: u64, minor: u64) -> Value {
    json!({"path": path, "type": "c", "major": major, "minor": minor})
}

/// A spec with these devices and rules, after one that denies all.
fn spec(devices: &[Value], rules: &[Value]) -> Value {
    let mut all = vec![json!({"allow": false, "access": "rwm"})];
    all.extend_from_slice(rules);
    json!({"linux": {"devices": devices, "resources": {"devices": all}}})
}

fn rules(spec: &Value) -> &[Value] {
    spec["linux"]["resources"]["devices"].as_array().unwrap()
}

/// Nodes of the recorded GPU 0 on GPU 1: its own name is one for the other's.
fn alias() -> NodeTarget {
    target(
        "/dev/nvidia0",
        (195, 1),
        "/dev/nvidia0",
        Some("/dev/nvidia1"),
    )
}

fn moved(path: &str, alias: Option<&str>) -> MovedNode {
    MovedNode {
        path: path.into(),
        alias_of: alias.map(str::to_owned),
        engine: EngineNode {
            path: "/dev/nvidia0".into(),
            major: 195,
            minor: 0,
        },
    }
}

fn recorded(path: &str, major: u64, minor: u64, host_path: Option<&str>) -> DeviceNode {
    DeviceNode {
        source: match host_path {
            Some(_) => NodeSource::BindMount,
            None => NodeSource::Device,
        },
        host_path: host_path.map(str::to_owned),
        ..DeviceNode::new(path, (Vendor::Nvidia, NodeRole::Gpu), (major, minor))
    }
}

fn target(path: &str, number: Number, from: &str, alias_of: Option<&str>) -> NodeTarget {
    NodeTarget {
        path: path.into(),
        host_path: alias_of.unwrap_or(path).into(),
        major: number.0,
        minor: number.1,
        from: from.into(),
        alias_of: alias_of.map(str::to_owned),
    }
}

fn apply(remap: &Remap, mut spec: Value) -> Value {
    Devices { remap }
        .apply(&Host::at("/nowhere"), &mut spec)
        .unwrap();
    spec
}

fn rule(major: u64, minor: u64, access: &str) -> Value {
    json!({"allow": true, "type": "c", "major": major, "minor": minor, "access": access})
}

fn zero_to_one() -> Remap {
    Remap {
        recorded: vec![recorded("/dev/nvidia0", 195, 0, None)],
        targets: vec![
            alias(),
            target("/dev/nvidia1", (195, 1), "/dev/nvidia0", None),
        ],
        moved: vec![],
    }
}

#[test]
fn another_node_and_its_rule() {
    let deny = json!({"allow": false, "access": "rwm"});
    let spec = apply(
        &zero_to_one(),
        json!({"ociVersion": "1", "linux": {
            "devices": [
                {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 8630, "gid": 44, "unknown": {}},
                {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}
            ],
            "resources": {"devices": [deny, rule(195, 0, "rw"), rule(10, 229, "rwm")], "unknown": 1}
        }}),
    );
    let node = |path: &str| json!({"path": path, "type": "c", "major": 195, "minor": 1, "fileMode": 8630, "gid": 44, "unknown": {}});
    assert_eq!(
        spec["linux"],
        json!({
            "devices": [node("/dev/nvidia0"), node("/dev/nvidia1"), {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}],
            "resources": {"devices": [deny, rule(10, 229, "rwm"), rule(195, 1, "rw")], "unknown": 1}
        })
    );
    let note: Vec<MovedNode> =
        serde_json::from_str(spec["annotations"][ANNOTATION].as_str().unwrap()).unwrap();
    assert_eq!(note.len(), 2);
    assert_eq!((note[0].engine.major, note[0].engine.minor), (195, 0));
    assert_eq!(note[0].alias_of.as_deref(), Some("/dev/nvidia1"));
    // A second run changes nothing.
    assert_eq!(apply(&zero_to_one(), spec.clone()), spec);
}

#[test]
fn nothing_is_granted_that_the_engine_did_not_grant() {
    let none = spec(&[], &[]);
    assert_eq!(apply(&zero_to_one(), none.clone()), none);
    // A rule for the whole major allows all: it stays, and nothing is added.
    let all = json!({"allow": true, "type": "c", "major": 195, "access": "rwm"});
    for granted in [&[][..], &[all]] {
        let given = spec(&[device("/dev/nvidia0", 195, 0)], granted);
        assert_eq!(rules(&apply(&zero_to_one(), given.clone())), rules(&given));
    }
}

#[test]
fn a_chain_of_moves_keeps_the_access_of_each() {
    let remap = Remap {
        recorded: vec![
            recorded("/dev/nvidia0", 195, 0, None),
            recorded("/dev/nvidia1", 195, 1, None),
        ],
        targets: vec![
            alias(),
            target("/dev/nvidia1", (195, 1), "/dev/nvidia0", None),
            target("/dev/nvidia2", (195, 2), "/dev/nvidia1", None),
        ],
        moved: vec![],
    };
    let spec = apply(
        &remap,
        spec(
            &[
                device("/dev/nvidia0", 195, 0),
                device("/dev/nvidia1", 195, 1),
            ],
            &[rule(195, 0, "rwm"), rule(195, 1, "rwm")],
        ),
    );
    let list = |pointer: &str, key: &str| -> Vec<Value> {
        let list = spec.pointer(pointer).unwrap().as_array().unwrap();
        list.iter().map(|v| v[key].clone()).collect()
    };
    assert_eq!(
        list("/linux/devices", "path"),
        ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidia2"]
    );
    assert_eq!(list("/linux/devices", "minor"), [1, 1, 2]);
    let rules = Spec::from_json(spec.clone());
    assert!(!rules.allows(195, 0) && rules.allows(195, 1) && rules.allows(195, 2));
}

#[test]
fn a_spec_whose_engine_still_names_what_was_moved_before() {
    // Moved from 0 to 1 once, checkpointed there, restored in place.
    let remap = Remap {
        recorded: vec![
            recorded("/dev/nvidia0", 195, 1, None),
            recorded("/dev/nvidia1", 195, 1, None),
        ],
        targets: vec![
            alias(),
            target("/dev/nvidia1", (195, 1), "/dev/nvidia1", None),
        ],
        moved: vec![
            moved("/dev/nvidia0", Some("/dev/nvidia1")),
            moved("/dev/nvidia1", None),
        ],
    };
    assert!(remap.changed().is_empty());
    let spec = apply(
        &remap,
        spec(&[device("/dev/nvidia0", 195, 0)], &[rule(195, 0, "rwm")]),
    );
    assert_eq!(spec["linux"]["devices"][1]["path"], "/dev/nvidia1");
    let rules = Spec::from_json(spec.clone());
    assert!(!rules.allows(195, 0) && rules.allows(195, 1));
}

#[test]
fn bind_mounted_nodes_get_another_source() {
    let remap = Remap {
        recorded: vec![recorded("/dev/nvidia0", 195, 0, Some("/dev/nvidia0"))],
        ..zero_to_one()
    };
    let mount = |source: &str| json!({"destination": "/dev/nvidia0", "type": "bind", "source": source, "options": ["rbind"]});
    let spec = apply(
        &remap,
        json!({"mounts": [{"destination": "/dev", "source": "tmpfs", "type": "tmpfs"}, mount("/dev/nvidia0"), {"destination": "/proc"}], "linux": {
            "resources": {"devices": [{"allow": false}, rule(195, 0, "rw")]}
        }}),
    );
    assert_eq!(spec["mounts"][1], mount("/dev/nvidia1"));
    let rules = Spec::from_json(spec.clone());
    assert!(!rules.allows(195, 0) && rules.allows(195, 1));
}

#[test]
fn a_stranger_gets_no_more_gpus_than_the_engine_gave() {
    // The record claims that the engine's nvidia0 was four GPUs.
    let paths: Vec<String> = (0..4).map(|n| format!("/dev/nvidia{n}")).collect();
    let remap = Remap {
        recorded: (0..4)
            .zip(&paths)
            .map(|(n, p)| recorded(p, 195, n, None))
            .collect(),
        targets: (0..4)
            .zip(&paths)
            .map(|(n, p)| target(p, (195, n), p, None))
            .collect(),
        moved: paths.iter().map(|p| moved(p, None)).collect(),
    };
    let mut spec = spec(
        &[device("/dev/nvidia0", 195, 0), device("/dev/fuse", 10, 229)],
        &[rule(195, 0, "rwm"), rule(10, 229, "rwm"), rule(1, 3, "rwm")],
    );
    let host = Host::at("/nowhere");
    let e = Devices { remap: &remap }.apply(&host, &mut spec.clone());
    let e = e.unwrap_err().to_string();
    assert!(
        e.contains("has 4 NVIDIA GPUs and the engine gave the container 1"),
        "{e}"
    );
    // Nor may a record turn another device into a GPU.
    let remap = Remap {
        recorded: vec![
            recorded("/dev/fuse", 195, 0, None),
            recorded("/dev/null", 1, 3, Some("/dev/null")),
        ],
        targets: vec![
            target("/dev/fuse", (195, 1), "/dev/fuse", None),
            target("/dev/null", (195, 1), "/dev/null", None),
        ],
        moved: vec![],
    };
    spec["mounts"] = json!([{"destination": "/dev", "type": "tmpfs", "source": "tmpfs"}]);
    assert_eq!(apply(&remap, spec.clone()), spec);
}

#[test]
fn no_node_takes_the_place_of_another_kind() {
    let spec = json!({
        "mounts": [{"destination": "/dev/nvidiactl", "type": "bind", "source": "/dev/nvidiactl"}],
        "linux": {"devices": [], "resources": {"devices": [{"allow": false}, rule(195, 255, "rwm")]}}
    });
    for other in ["/dev/sg0", "/dev/mem", "/dev/nvidia-uvm", "/dev/nvidia0"] {
        let mut ctl = recorded("/dev/nvidiactl", 195, 255, Some("/dev/nvidiactl"));
        ctl.role = NodeRole::Control;
        let target = NodeTarget {
            host_path: other.into(),
            ..target("/dev/nvidiactl", (21, 0), "/dev/nvidiactl", None)
        };
        let remap = Remap {
            recorded: vec![ctl],
            targets: vec![target],
            moved: vec![],
        };
        let e = Devices { remap: &remap }.apply(&Host::at("/nowhere"), &mut spec.clone());
        let e = e.unwrap_err().to_string();
        assert!(
            e.contains("which the record names for /dev/nvidiactl"),
            "{other}: {e}"
        );
    }
}
