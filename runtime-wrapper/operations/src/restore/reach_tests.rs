//! Tests that nothing that a restore writes or mounts goes beyond the engine's spec and the configuration, with
//! arbitrary metadata, annotations and images.
//!
//! The tests state the rules independently of the code: as a table of the host's nodes and files.
//! `PROPTEST_CASES=100000 cargo test -p cryopod-runtime reach` runs more cases than the 2000 of every run.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use cryopod_archive::criu::mounts::CriuMount;
use cryopod_archive::criu::privileges::{
    Capabilities, Credentials, Namespaces, Privileges, Thread,
};
use cryopod_archive::metadata::Metadata;
use cryopod_gpu_plan::ceiling::OtherGpus;
use cryopod_gpu_plan::mounts::Provider;
use cryopod_host::files::Host;
use cryopod_host::spec::Spec;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use crate::bundle::{Devices, DroppedHooks, Edit};
use crate::config::Config;
use crate::criu::conf::{self, ConfReader, Extra};
use crate::criu::opts::CriuOptions;
use crate::preflight::gpus::{self, GpuConstraints};
use crate::request::lowlevel::RuntimeKind;
use crate::run::operation::Operation;
use crate::security::host_facts::HostFacts;
use crate::security::privileges;

/// The host's nodes: path, number, and kind of GPU node; empty: none.
const NODES: [(&str, (u64, u64), &str); 12] = [
    ("/dev/nvidia0", (195, 0), "gpu"),
    ("/dev/nvidia1", (195, 1), "gpu"),
    ("/dev/nvidia2", (195, 2), "gpu"),
    ("/dev/nvidiactl", (195, 255), "ctl"),
    ("/dev/nvidia-modeset", (195, 254), "modeset"),
    ("/dev/nvidia-uvm", (511, 0), "uvm"),
    ("/dev/nvidia-caps/nvidia-cap1", (241, 1), "cap1"),
    ("/dev/nvidia-uvm-tools", (21, 1), ""), // left by a driver that had another major
    ("/dev/sg0", (21, 0), ""),
    ("/dev/mem", (1, 1), ""),
    ("/dev/fuse", (10, 229), ""),
    ("/dev/nvidia-caps/../mem", (1, 1), ""),
];
/// Files of the host that any restore may mount, and those that none may.
const DRIVERS: [&str; 2] = ["/usr/lib/libcuda.so.1", "/proc/driver/nvidia/version"];
const SECRET: [&str; 3] = ["/etc/shadow", "/root/key", "/srv/other/file"];
const LINKS: [(&str, &str); 4] = [
    ("/srv/vol/absolute", "/etc"),
    ("/srv/vol/up", "../../etc"),
    ("/usr/lib/link", "../../etc/shadow"),
    ("/srv/vol/file", "../../etc/shadow"),
];

struct World {
    _dir: tempfile::TempDir,
    host: Host,
    op: Operation,
    /// A configuration of CRIU that may be named, and one that may not.
    conf: [PathBuf; 2],
}

/// The host of all cases; `None` without root.
fn world() -> Option<&'static World> {
    static WORLD: OnceLock<Option<World>> = OnceLock::new();
    let make = || {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: mknod needs root");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |path: &str| {
            let path = dir.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            path
        };
        for (path, (major, minor), _) in NODES.iter().filter(|n| !n.0.contains("..")) {
            let number = makedev(*major, *minor);
            mknod(&at(path), SFlag::S_IFCHR, Mode::S_IRUSR, number).unwrap();
        }
        for file in DRIVERS.iter().chain(&SECRET) {
            fs::write(at(file), file).unwrap();
        }
        fs::write(at("/srv/vol/sub/own"), "").unwrap();
        for (link, to) in LINKS {
            let to = match to.strip_prefix('/') {
                Some(to) => dir.path().join(to),
                None => to.into(),
            };
            symlink(to, at(link)).unwrap();
        }
        for n in 0..3 {
            let text = format!("Model: X\nGPU UUID: {}\nDevice Minor: {n}\n", uuid(n));
            fs::write(
                at(&format!(
                    "/proc/driver/nvidia/gpus/0000:0{n}:00.0/information"
                )),
                text,
            )
            .unwrap();
        }
        let drivers = "Character devices:\n  1 mem\n 10 misc\n 21 sg\n195 nvidia\n241 nvidia-caps\n511 nvidia-uvm\n";
        fs::write(at("/proc/devices"), drivers).unwrap();
        let conf = ["good", "evil"].map(|name| at(&format!("/criu/{name}/x.conf")));
        for (path, text) in conf
            .iter()
            .zip(["ghost-limit 5M\n", "libdir /evil\nexternal mnt[/x]:/etc\n"])
        {
            fs::write(path, text).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
        }
        let op = Operation::below(&at("/run/cryopod"), &Host::system()).unwrap();
        Some(World {
            host: Host::at(dir.path()),
            op,
            conf,
            _dir: dir,
        })
    };
    WORLD.get_or_init(make).as_ref()
}

fn uuid(n: u64) -> String {
    format!("GPU-00000000-0000-0000-0000-00000000000{n}")
}

fn kind_of(path: &str) -> Option<&'static str> {
    NODES
        .iter()
        .find(|n| n.0 == path && !n.2.is_empty())
        .map(|n| n.2)
}

fn kind_of_number(number: (u64, u64)) -> Option<&'static str> {
    NODES
        .iter()
        .find(|n| n.1 == number && !n.2.is_empty())
        .map(|n| n.2)
}

// ---- what comes from strangers ----------------------------------------------------------------------

fn any_path() -> impl Strategy<Value = String> {
    let nodes: Vec<String> = NODES.iter().map(|n| n.0.to_owned()).collect();
    select(nodes)
}

fn any_file() -> impl Strategy<Value = String> {
    let others = [
        "/usr/lib",
        "/etc",
        "/",
        "/srv/vol",
        "/dev/mem",
        "/dev/sg0",
        "/data/sub/own",
        "/srv/vol/sub/own",
    ];
    let links = LINKS.iter().map(|l| l.0);
    let below = ["/srv/vol/absolute/shadow", "/srv/vol/up/shadow"];
    let all = DRIVERS
        .into_iter()
        .chain(SECRET)
        .chain(others)
        .chain(links)
        .chain(below);
    select(all.map(str::to_owned).collect::<Vec<_>>())
}

fn any_node() -> impl Strategy<Value = Value> {
    let roles = ["gpu", "control", "uvm", "capability", "render", "other"];
    let right = |path: &str| match kind_of(path) {
        Some("gpu") => "gpu",
        Some("ctl") => "control",
        Some("uvm") => "uvm",
        Some("cap1") => "capability",
        _ => "other",
    };
    let strange = (0u8..4).prop_map(|n| n == 0);
    let sources = select(vec!["device", "bind-mount", "live"]);
    (any_path(), any_path(), (strange.clone(), strange), select(roles.to_vec()), sources, 0u64..3)
        .prop_map(move |(path, other, (strange, wrong_role), role, source, gpu)| {
            let number = NODES.iter().find(|n| n.0 == path).unwrap().1;
            let host_path = match (strange, source) {
                (true, _) => Some(other),
                (false, "bind-mount") => Some(path.clone()),
                _ => None,
            };
            let role = if wrong_role { role } else { right(host_path.as_ref().unwrap_or(&path)) };
            json!({
                "path": path, "vendor": "nvidia", "role": role, "source": source, "major": number.0,
                "minor": number.1, "host_path": host_path, "allowed": true,
                "gpu": (role == "gpu").then(|| uuid(gpu))
            })
        })
}

fn any_gpu() -> impl Strategy<Value = Value> {
    (0u64..4, 0u64..4).prop_map(|(id, minor)| {
        json!({
            "id": uuid(id), "vendor": "nvidia", "index": 0, "model": "X", "pci": "0000:01:00.0", "minor": minor
        })
    })
}

fn any_move() -> impl Strategy<Value = Value> {
    (any_path(), proptest::option::of(any_path()), any_path()).prop_map(|(path, alias_of, engine)| {
        json!({"path": path, "alias_of": alias_of, "engine": {"path": engine, "major": 195, "minor": 0}})
    })
}

fn any_mount() -> impl Strategy<Value = Value> {
    let points = select(vec![
        "/usr/lib/libcuda.so.1",
        "/x",
        "/data/sub/own",
        "/data/absolute/shadow",
        "/data/up/shadow",
        "/data/file",
        "/data/absolute",
    ]);
    (points, any_file(), select(vec!["file", "directory", "device"])).prop_map(|(path, host_path, kind)| {
        json!({"path": path, "kind": kind, "host_path": host_path, "fs_type": "ext4"})
    })
}

fn any_metadata() -> impl Strategy<Value = Metadata> {
    let several = |most| 0..most;
    (
        prop::collection::vec(any_node(), several(4)),
        prop::collection::vec(any_gpu(), several(3)),
        prop::collection::vec(any_move(), several(3)),
        prop::collection::vec(any_mount(), several(3)),
        prop::collection::vec(select(vec!["tcp-established", "libdir /evil", "external"]), several(3)),
    )
        .prop_map(|(nodes, gpus, moved, foreign, options)| {
            let json = json!({
                "schema": Metadata::current_schema(), "cryopod": "0", "created": "2026-01-01T00:00:00Z",
                "container": {"id": "c", "low_level": "crun", "leave_running": false},
                "host": {"kernel": "6", "arch": "x86_64", "cgroup": "v2"},
                "gpu": {"vendors": ["nvidia"], "nodes": nodes, "gpus": gpus, "moved": moved, "processes": [], "plugins": []},
                "mounts": {"foreign": foreign, "own": []},
                "criu": {"options": options},
                "timings": {"plan_us": 0, "dump_us": 0}
            });
            Metadata::parse(json.to_string().as_bytes(), Path::new("x")).unwrap()
        })
}

fn any_annotations() -> impl Strategy<Value = Vec<(String, String)>> {
    let map = select(vec![
        "auto",
        "0=1",
        "0=2",
        "1=2,0=1",
        "/dev/nvidia0=/dev/nvidia2",
        "GPU-00000000-0000-0000-0000-000000000000=2",
    ]);
    let one = |key: &'static str, value: &str| (key.to_owned(), value.to_owned());
    let any = prop_oneof![
        map.prop_map(move |m| one("dev.cryopod.gpu.map", m)),
        Just(one("io.container.manager", "libpod")),
        Just(one("io.kubernetes.cri.container-type", "container")),
        select(vec!["good", "evil", "/dev/zero"]).prop_map(move |f| one("org.criu.config", f)),
        (
            select(vec![
                "libdir",
                "external",
                "tcp-close",
                "action-script",
                "ghost-limit"
            ]),
            select(vec!["true", "5M", "/evil", "1\nlibdir /evil"])
        )
            .prop_map(|(name, value)| (format!("dev.cryopod.criu.{name}"), value.to_owned())),
        Just(one("dev.cryopod.check.privileges", "off")),
    ];
    prop::collection::vec(any, 0..3)
}

/// An engine's spec with some of the host's GPU nodes, as devices and by bind mounts.
fn any_spec() -> impl Strategy<Value = Value> {
    let names: Vec<usize> = (0..NODES.len())
        .filter(|n| !NODES[*n].2.is_empty())
        .collect();
    let nodes = prop::collection::vec((select(names), any::<bool>()), 0..4);
    (nodes, any_annotations(), any::<bool>()).prop_map(|(nodes, annotations, fuse)| {
        let mut spec = json!({
            "ociVersion": "1.0.0", "annotations": {},
            "process": {"env": ["A=b"], "capabilities": {"bounding": ["CAP_CHOWN"]}, "noNewPrivileges": true},
            "mounts": [{"destination": "/data", "type": "bind", "source": "/srv/vol", "options": ["rbind"]}],
            "linux": {"devices": [], "resources": {"devices": [{"allow": false, "access": "rwm"}]}, "namespaces": [{"type": "pid"}, {"type": "mount"}]}
        });
        let mut seen = BTreeSet::new();
        for (n, bind) in nodes {
            let (path, (major, minor), _) = NODES[n];
            if !seen.insert(n) {
                continue;
            }
            let list = |spec: &mut Value, at: &str, v: Value| spec.pointer_mut(at).unwrap().as_array_mut().unwrap().push(v);
            match bind {
                true => list(&mut spec, "/mounts", json!({"destination": path, "type": "bind", "source": path})),
                false => list(&mut spec, "/linux/devices", json!({"path": path, "type": "c", "major": major, "minor": minor})),
            }
            list(&mut spec, "/linux/resources/devices", json!({"allow": true, "type": "c", "major": major, "minor": minor, "access": "rwm"}));
        }
        if fuse {
            let devices = spec.pointer_mut("/linux/devices").unwrap().as_array_mut().unwrap();
            devices.push(json!({"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}));
        }
        for (key, value) in annotations {
            spec["annotations"][key] = value.into();
        }
        spec
    })
}

fn any_config() -> impl Strategy<Value = Config> {
    let others = select(vec![
        OtherGpus::Auto,
        OtherGpus::Auto,
        OtherGpus::Never,
        OtherGpus::Always,
    ]);
    let map = proptest::option::weighted(0.1, select(vec!["0=1", "0=2"]));
    (others, map).prop_map(|(others, map)| {
        let mut config = Config::default();
        config.gpu.allow_others = others;
        config.gpu.map = map.map(str::to_owned);
        config
    })
}

fn any_images() -> impl Strategy<Value = Privileges> {
    let flags = (0u64..4, any::<bool>(), 0u32..3, 0u32..2);
    (
        flags,
        0u32..3,
        0u32..3,
        select(vec!["/", "/data", "/mnt"]),
        select(vec![0u32, 5, 11, 17]),
    )
        .prop_map(
            |((capabilities, no_new_privs, seccomp, uid), pid_ns, mnt_ns, path, fs_type)| {
                Privileges {
                    threads: vec![Thread {
                        pid: 1,
                        tid: 1,
                        credentials: Credentials {
                            uids: [uid; 4],
                            capabilities: Capabilities {
                                permitted: capabilities,
                                ..Capabilities::default()
                            },
                            ..Credentials::default()
                        },
                        no_new_privs,
                        seccomp,
                        ..Thread::default()
                    }],
                    namespaces: vec![Namespaces {
                        of: 1,
                        ids: [pid_ns, 0, 0, 0, mnt_ns, 0, 0, 0],
                    }],
                    host: Namespaces {
                        of: 0,
                        ids: [2, 0, 0, 0, 2, 0, 0, 0],
                    },
                    mounts: vec![CriuMount {
                        path: path.into(),
                        fs_type,
                        device: fs_type,
                        ..CriuMount::default()
                    }],
                }
            },
        )
}

// ---- what is right ----------------------------------------------------------------------------------

/// What the engine gave: kinds of nodes, and the minors of GPUs.
struct Gave {
    kinds: BTreeSet<&'static str>,
    gpus: BTreeSet<u64>,
    /// GPUs beyond these may be used as well.
    others: bool,
}

impl Gave {
    fn of(spec: &Value, config: &Config) -> Self {
        let annotation = |key: &str| spec["annotations"].get(key).and_then(Value::as_str);
        let devices = spec["linux"]["devices"]
            .as_array()
            .unwrap()
            .iter()
            .map(|d| &d["path"]);
        let mounts = spec["mounts"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| &m["source"]);
        let paths: Vec<&str> = devices.chain(mounts).filter_map(Value::as_str).collect();
        let kubernetes = annotation("io.kubernetes.cri.container-type").is_some();
        let podman = annotation("io.container.manager") == Some("libpod") && !kubernetes;
        let own_map = config.gpu.map.is_some() && annotation("dev.cryopod.gpu.map").is_none();
        Self {
            kinds: paths.iter().filter_map(|p| kind_of(p)).collect(),
            gpus: paths
                .iter()
                .filter(|p| kind_of(p) == Some("gpu"))
                .map(|p| NODES.iter().find(|n| n.0 == *p).unwrap().1.1)
                .collect(),
            others: own_map
                || match config.gpu.allow_others {
                    OtherGpus::Always => true,
                    OtherGpus::Auto => podman,
                    OtherGpus::Never => false,
                },
        }
    }

    fn node(&self, number: (u64, u64)) -> bool {
        let Some(kind) = kind_of_number(number) else {
            return false;
        };
        self.kinds.contains(kind) && (kind != "gpu" || self.others || self.gpus.contains(&number.1))
    }
}

fn number(entry: &Value) -> (u64, u64) {
    let n = |key: &str| entry[key].as_u64().unwrap_or(u64::MAX);
    (n("major"), n("minor"))
}

/// Asserts that the written spec differs in GPU nodes alone, and only within what was given.
fn spec_is_within(before: &Value, after: &Value, gave: &Gave) {
    let (old, new) = (
        Spec::from_json(before.clone()),
        Spec::from_json(after.clone()),
    );
    let mut opened = BTreeSet::new();
    for (path, n, kind) in NODES {
        if new.allows(n.0, n.1) {
            assert!(old.allows(n.0, n.1) || gave.node(n), "{path} may be opened");
            opened.extend((kind == "gpu").then_some(n));
        }
    }
    assert!(opened.len() <= gave.gpus.len(), "more GPUs than were given");
    for device in after["linux"]["devices"].as_array().unwrap() {
        let known = before["linux"]["devices"].as_array().unwrap();
        assert!(
            known.iter().any(|d| number(d) == number(device)) || gave.node(number(device)),
            "{device}"
        );
    }
    let mounts = |spec: &Value| spec["mounts"].as_array().unwrap().clone();
    for (was, is) in mounts(before).iter().zip(mounts(after)) {
        let path = |m: &Value| m["source"].as_str().unwrap().to_owned();
        let (was, is) = (path(was), path(&is));
        assert!(
            was == is || kind_of(&is).is_some() && kind_of(&was) == kind_of(&is),
            "{was} became {is}"
        );
    }
    let mut rest = after.clone();
    for pointer in ["/linux/devices", "/linux/resources/devices"] {
        *rest.pointer_mut(pointer).unwrap() = before.pointer(pointer).unwrap().clone();
    }
    for (i, mount) in mounts(before).into_iter().enumerate() {
        rest["mounts"][i]["source"] = mount["source"].clone();
    }
    let note = cryopod_gpu_plan::mapping::remap::ANNOTATION;
    rest["annotations"].as_object_mut().unwrap().remove(note);
    assert_eq!(rest, *before, "nothing else has changed");
}

proptest! {
    #![proptest_config({
        let mut config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
        if std::env::var_os("PROPTEST_CASES").is_none() {
            config.cases = 2000;
        }
        config
    })]
    #[test]
    fn nothing_goes_beyond_the_spec_and_the_configuration(
        metadata in any_metadata(), spec in any_spec(), config in any_config(), images in any_images(),
    ) {
        let Some(world) = world() else { return Ok(()) };
        let host = &world.host;
        let (mut spec, mut config) = (spec, config);
        config.criu.config_directories = vec![world.conf[0].parent().unwrap().into()];
        if let Some(file) = spec["annotations"].get_mut("org.criu.config") {
            match file.as_str() {
                Some("good") => *file = world.conf[0].display().to_string().into(),
                Some("evil") => *file = world.conf[1].display().to_string().into(),
                _ => {}
            }
        }
        let gave = Gave::of(&spec, &config);
        let engine = Spec::from_json(spec.clone());

        // GPUs, device nodes and config.json.
        let given = GpuConstraints { by_memory: false, any_model: true, amd: None };
        let mut nodes = Vec::new();
        if let Ok(chosen) = gpus::choose(host, &config, &metadata, &engine, None, given) {
            for choice in &chosen.gpus {
                let minor = choice.new.minor.unwrap();
                let fine = gave.others || gave.gpus.is_empty() || gave.gpus.contains(&minor);
                prop_assert!(fine, "{:?} was chosen", choice);
            }
            nodes = chosen.remap.targets.iter().map(|t| (t.path.clone(), t.host_path.clone())).collect();
            let mut written = spec.clone();
            let devices = Devices { remap: &chosen.remap };
            let hooks = DroppedHooks { drop: &config.hooks.drop };
            if devices.apply(host, &mut written).and_then(|()| hooks.apply(host, &mut written)).is_ok() {
                spec_is_within(&spec, &written, &gave);
            }
        }

        // Mounts.
        let provider = Provider {
            ceiling: config.ceiling(host, &engine),
            mounts: &cryopod_host::destinations::Destinations::of(host, &engine, Path::new("/none")),
            recorded_driver: None,
            driver: None,
            renamed: &[],
            nodes: &nodes,
        };
        for mount in provider.provide(&metadata.mounts.foreign).unwrap_or_default() {
            let real = fs::read_link(format!("/proc/self/fd/{}", mount.opened.as_raw_fd())).unwrap();
            let real = Path::new("/").join(real.strip_prefix(host.root()).unwrap());
            let volume = real.starts_with("/srv/vol") && mount.path.starts_with("/data/");
            let driver = DRIVERS.iter().any(|d| real == Path::new(d));
            let node = real.to_str().and_then(kind_of).is_some();
            prop_assert!(volume || driver || node, "{} from {}", mount.path, real.display());
            prop_assert!(volume || node || mount.read_only, "{} is writable", mount.path);
        }

        // CRIU's configuration.
        let ceiling = config.ceiling(host, &engine);
        if let Ok(mut options) = CriuOptions::of(&config.criu.options, &ceiling, &[]) {
            let args = ["restore".into(), "c".into()];
            let flags = crate::request::argv::decode(RuntimeKind::Crun, &args).unwrap().flags;
            options.as_at_the_checkpoint(&metadata.criu.options, &flags);
            let extra = Extra { options, ..Extra::default() };
            for (names_file, restore) in [(true, true), (false, true), (false, false)] {
                let reader = ConfReader { kind: RuntimeKind::Runc, names_file, restore };
                let Ok((text, libdirs)) = conf::merge(&world.op, &config, reader, &engine, None, &extra) else {
                    continue;
                };
                prop_assert!(!text.contains("evil") && !text.contains("external ") && libdirs.is_empty(), "{}", text);
                prop_assert_eq!(text.matches("libdir").count(), 1);
                prop_assert_eq!(text.matches("action-script").count(), 1);
            }
        }

        // Images.
        let facts = &HostFacts::of(host, &engine);
        let compared = privileges::Given { facts, spec: &engine, read_only: &[], relabelled: false, limited: false };
        if privileges::beyond(&images, compared).is_empty() {
            let thread = &images.threads[0];
            let of = &thread.credentials;
            prop_assert!(of.capabilities.permitted & !1 == 0 && thread.no_new_privs && of.uids[0] == 0);
            let ids = &images.namespaces[0].ids;
            prop_assert!(ids[0] != 2 && ids[4] != 2);
            let mount = &images.mounts[0];
            prop_assert!(mount.path == "/" || !matches!(mount.fs_type, 11 | 17));
        }
    }
}
