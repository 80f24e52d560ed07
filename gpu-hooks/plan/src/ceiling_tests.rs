use super::*;
use cryopod_host::nodes::Vendor;
use serde_json::{Value, json};

fn gpu(minor: u64) -> Gpu {
    Gpu {
        minor: Some(minor),
        ..Gpu::new(Vendor::Nvidia, format!("GPU-{minor}"))
    }
}

fn spec(annotations: Value, rules: Value) -> Spec {
    Spec::from_json(json!({
        "annotations": annotations,
        "linux": {
            "devices": [{"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0}],
            "resources": {"devices": rules}
        }
    }))
}

fn given(spec: &Spec, other_gpus: OtherGpus) -> Option<Vec<String>> {
    let ceiling = Ceiling {
        host: &Host::at("/nowhere"),
        spec,
        lifts: Lifts {
            other_gpus,
            ..Lifts::default()
        },
    };
    let here = [gpu(0), gpu(1)];
    let given = ceiling.gpus(&here);
    for gpu in &here {
        let asked = AskedNode::Gpu { gpu, here: &here };
        let allowed = given.as_ref().is_none_or(|g| g.contains(&gpu.id));
        assert_eq!(ceiling.admit(asked).is_ok(), allowed);
    }
    Some(given?.into_iter().collect())
}

#[test]
fn gpus_are_those_that_the_engine_gave() {
    let deny = || json!([{"allow": false}]);
    let all =
        || json!([{"allow": false}, {"allow": true, "type": "c", "major": 195, "access": "rwm"}]);
    let one = Some(vec!["GPU-0".to_owned()]);
    let both = Some(vec!["GPU-0".to_owned(), "GPU-1".to_owned()]);
    let docker = spec(json!({}), deny());
    assert_eq!(given(&docker, OtherGpus::Auto), one);
    assert_eq!(given(&docker, OtherGpus::Always), None);
    assert_eq!(given(&spec(json!({}), all()), OtherGpus::Auto), both);
    let podman = spec(json!({"io.container.manager": "libpod"}), deny());
    assert_eq!(given(&podman, OtherGpus::Auto), None);
    assert_eq!(given(&podman, OtherGpus::Never), one);
    // A pod claims to be podman's.
    let pod = spec(
        json!({"io.container.manager": "libpod", "io.kubernetes.cri.container-type": "container"}),
        deny(),
    );
    assert_eq!(given(&pod, OtherGpus::Auto), one);
}

#[test]
fn files_and_options() {
    let spec = Spec::from_json(json!({}));
    let directories = [PathBuf::from("/etc/criu")];
    let ceiling = Ceiling {
        host: &Host::at("/nowhere"),
        spec: &spec,
        lifts: Lifts {
            criu_directories: &directories,
            ..Lifts::default()
        },
    };
    let file = |path: &str| ceiling.admit(AskedNode::CriuFile(Path::new(path))).is_ok();
    assert!(file("/etc/criu/mine.conf"));
    for other in [
        "/tmp/x",
        "/etc/criu/../x",
        "/etc/criu/a/b",
        "/dev/zero",
        "x",
    ] {
        assert!(!file(other), "{other}");
    }
    let option = |name| ceiling.admit(AskedNode::CriuOption(name)).is_ok();
    assert!(option("tcp-close") && !option("libdir") && !option("action-script"));
}

#[test]
fn a_container_without_any_gpu() {
    let deny = json!([{"allow": false}]);
    let bare = |more: Value| {
        let mut spec = json!({"linux": {"resources": {"devices": deny}}});
        for (key, value) in more.as_object().unwrap() {
            spec[key] = value.clone();
        }
        Spec::from_json(spec)
    };
    let refused = |spec: &Spec| {
        let ceiling = Ceiling {
            host: &Host::at("/nowhere"),
            spec,
            lifts: Lifts::default(),
        };
        assert!(ceiling.ensure_a_gpu(&[]).is_ok());
        ceiling.ensure_a_gpu(&[gpu(0)]).is_err()
    };
    assert!(refused(&bare(json!({}))));
    let environ =
        |value: &str| json!({"process": {"env": [format!("NVIDIA_VISIBLE_DEVICES={value}")]}});
    assert!(refused(&bare(environ("void"))));
    assert!(!refused(&bare(environ("all"))));
    assert!(!refused(&bare(
        json!({"hooks": {"prestart": [{"path": "/h"}]}})
    )));
    assert!(!refused(&spec(json!({}), deny.clone())));
    assert!(!refused(&Spec::from_json(json!({}))), "no rules allow all");
}
