use super::*;
use cryopod_archive::metadata::GpuUse;
use cryopod_test_files::TestFiles;
use serde_json::{Map, json};

const G: u64 = 1 << 30;

fn gpu(n: u32, edit: impl FnOnce(&mut Gpu)) -> Gpu {
    let mut properties = Map::new();
    properties.insert(COMPUTE_CAPABILITY.into(), json!("9.0"));
    properties.insert(MIG.into(), json!(false));
    let mut gpu = Gpu {
        index: n,
        model: "NVIDIA H200".into(),
        minor: Some(n.into()),
        memory_bytes: Some(140 * G),
        properties,
        ..Gpu::new(Vendor::Nvidia, format!("GPU-{n}"))
    };
    edit(&mut gpu);
    gpu
}

fn process(pid: i32, parts: &[(&str, u64)]) -> GpuProcess {
    GpuProcess {
        pid,
        ns_pid: 1,
        comm: "python3".into(),
        vendors: vec![Vendor::Nvidia],
        gpu_memory: parts
            .iter()
            .map(|(gpu, bytes)| GpuUse {
                gpu: (*gpu).into(),
                bytes: *bytes,
            })
            .collect(),
    }
}

fn recorded() -> GpuFacts {
    GpuFacts {
        gpus: vec![gpu(0, |_| ()), gpu(1, |_| ())],
        drivers: [("nvidia".to_owned(), "580.159.04".to_owned())].into(),
        processes: vec![process(7, &[("GPU-0", 80 * G)])],
        plugin_report: json!({"processes": [{"host_pid": 7, "vram_bytes": 79 * G, "gpus": ["GPU-0"]}]}),
        ..GpuFacts::default()
    }
}

fn found() -> FoundHost {
    let gpus = vec![gpu(0, |_| ()), gpu(1, |_| ())];
    FoundHost {
        free: gpus.iter().map(|g| (g.id.clone(), 130 * G)).collect(),
        gpus,
        driver: Some("580.159.04".into()),
        available: Some(200 * G),
        container_limit: Some(100 * G),
    }
}

/// Each recorded GPU on the one of the same number, or the other.
fn judge(recorded: &GpuFacts, found: &FoundHost, swapped: bool, off: &[&str]) -> Vec<Check> {
    let news = &found.gpus;
    let pairs: Vec<Pair<'_>> = recorded
        .gpus
        .iter()
        .enumerate()
        .filter_map(|(i, old)| Some((old, news.get(if swapped { 1 - i } else { i })?)))
        .collect();
    let off: Vec<String> = off.iter().map(|n| (*n).to_owned()).collect();
    let switches = Switches::default().without(&off);
    checks(recorded, found, Some(&pairs), &switches)
}

fn refused(checks: &[Check]) -> Vec<&Check> {
    checks
        .iter()
        .filter(|c| c.verdict == Verdict::Refused)
        .collect()
}

#[test]
fn all_is_well_and_every_check_is_told() {
    let checks = judge(&recorded(), &found(), true, &[]);
    assert!(
        checks.iter().all(|c| c.verdict == Verdict::Ok),
        "{checks:#?}"
    );
    let told: BTreeSet<&str> = checks.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(told, BTreeSet::from(crate::checks::switches::NVIDIA));
}

#[test]
fn each_mismatch_is_told_with_both_sides_and_the_remedy() {
    type Spoil = fn(&mut GpuFacts, &mut FoundHost);
    let cases: [(&str, Spoil, bool, &str, &str, &str); 10] = [
        (
            "nvidia-model",
            |_, f| f.gpus[0].model = "NVIDIA L4".into(),
            false,
            "NVIDIA H200",
            "NVIDIA L4",
            "a GPU of the same model",
        ),
        (
            "nvidia-compute-capability",
            |_, f| {
                f.gpus[0]
                    .properties
                    .insert(COMPUTE_CAPABILITY.into(), json!("8.9"));
            },
            false,
            "9.0",
            "8.9",
            "a GPU of the same model",
        ),
        (
            "nvidia-memory",
            |_, f| f.gpus[0].memory_bytes = Some(80 * G),
            false,
            "143360 MiB",
            "81920 MiB",
            "at least as much memory",
        ),
        (
            "nvidia-driver",
            |_, f| f.driver = Some("580.95.05".into()),
            false,
            "580.159.04",
            "580.95.05",
            "update this host's NVIDIA driver to the recorded version",
        ),
        (
            "nvidia-driver-minimum",
            |r, f| {
                f.driver = Some("575.1.1".into());
                r.drivers.clear();
            },
            true,
            "needs driver 580",
            "575.1.1",
            "update the driver, or restore where the checkpoint's own GPUs are",
        ),
        (
            "nvidia-gpu-count",
            |_, f| {
                f.gpus.pop();
            },
            false,
            "2",
            "1",
            "at least as many NVIDIA GPUs",
        ),
        (
            "nvidia-mig",
            |_, f| {
                f.gpus[0].properties.insert(MIG.into(), json!(true));
            },
            false,
            "MIG mode off",
            "MIG mode on",
            "nvidia-smi -mig 0",
        ),
        (
            "nvidia-free-memory",
            |_, f| {
                f.free.insert("GPU-0".into(), 79 * G);
            },
            false,
            "81920 MiB in use",
            "80896 MiB free",
            "end what uses that GPU",
        ),
        (
            "nvidia-host-memory",
            |_, f| f.available = Some(79 * G),
            false,
            "81152 MiB to be held",
            "80896 MiB available on the host",
            "free memory on this host",
        ),
        (
            "nvidia-host-memory",
            |_, f| f.container_limit = Some(16 * G),
            false,
            "81152 MiB to be held",
            "16384 MiB the container's limit",
            "raise the container's memory limit",
        ),
    ];
    for (name, spoil, swapped, recorded_says, found_says, remedy) in cases {
        let (mut r, mut f) = (recorded(), found());
        spoil(&mut r, &mut f);
        let checks = judge(&r, &f, swapped, &[]);
        let [only] = refused(&checks)[..] else {
            panic!("{name}: {:#?}", refused(&checks));
        };
        assert_eq!(only.name, name);
        let text = only.refusal().unwrap().to_string();
        let switch = format!("relaxed by `{name} = false` under [checks]");
        for want in [
            recorded_says,
            found_says,
            remedy,
            &switch,
            "the checkpoint has",
            "this host has",
        ] {
            assert!(text.contains(want), "{name}: {want}: {text}");
        }
        let relaxed = judge(&r, &f, swapped, &[name]);
        assert!(refused(&relaxed).is_empty(), "{name}");
        assert!(
            relaxed
                .iter()
                .any(|c| c.name == name && c.verdict == Verdict::Relaxed)
        );
    }
}

#[test]
fn all_mismatches_at_once() {
    let (r, mut f) = (recorded(), found());
    f.driver = Some("575.1.1".into());
    f.available = Some(G);
    for gpu in &mut f.gpus {
        gpu.model = "NVIDIA L4".into();
        gpu.memory_bytes = Some(24 * G);
        f.free.insert(gpu.id.clone(), G);
    }
    let checks = judge(&r, &f, true, &[]);
    let names: Vec<&str> = refused(&checks).iter().map(|c| c.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "nvidia-driver",
            "nvidia-driver-minimum",
            "nvidia-model",
            "nvidia-memory",
            "nvidia-model",
            "nvidia-memory",
            "nvidia-free-memory",
            "nvidia-host-memory"
        ]
    );
}

#[test]
fn what_is_not_known_refuses_nothing() {
    let bare = |n| {
        gpu(n, |g| {
            g.model.clear();
            g.memory_bytes = None;
            g.properties.clear();
        })
    };
    let r = GpuFacts {
        gpus: vec![bare(0), bare(1)],
        ..GpuFacts::default()
    };
    let f = FoundHost {
        gpus: vec![bare(0), bare(1)],
        ..FoundHost::default()
    };
    for (r, f) in [(&r, &found()), (&recorded(), &f), (&r, &f)] {
        assert!(refused(&judge(r, f, false, &[])).is_empty());
    }
    assert!(
        checks(&r, &f, None, &Switches::default())
            .iter()
            .all(|c| c.verdict != Verdict::Refused)
    );
}

#[test]
fn what_a_checkpoint_needs() {
    let mut facts = recorded();
    assert_eq!(
        need(&facts),
        Need {
            gpus: [("GPU-0".into(), 80 * G)].into(),
            host: Some(79 * G)
        }
    );
    // Without the driver's number: the process's growth counts for its only GPU, and says nothing of two.
    facts.processes = vec![process(7, &[]), process(8, &[]), process(9, &[])];
    facts.plugin_report = json!({"processes": [
        {"host_pid": 7, "vram_bytes": G, "gpus": ["GPU-1"]},
        {"host_pid": 8, "vram_bytes": 4 * G, "gpus": ["GPU-0", "GPU-1"]},
        {"host_pid": 9}
    ]});
    assert_eq!(
        need(&facts),
        Need {
            gpus: [("GPU-1".into(), G)].into(),
            host: Some(5 * G)
        }
    );
    facts.plugin_report = json!("nonsense");
    assert_eq!(need(&facts), Need::default());
}

#[test]
fn host_memory() {
    let dir = tempfile::tempdir().unwrap();
    let text = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   22000000 kB\n";
    dir.put("proc/meminfo", text);
    assert_eq!(
        available_memory(&Host::at(dir.path())),
        Some(22_000_000 << 10)
    );
    assert_eq!(available_memory(&Host::at("/nowhere")), None);
    let limit = |v: Value| {
        memory_limit(&Spec::from_json(
            json!({"linux": {"resources": {"memory": {"limit": v}}}}),
        ))
    };
    assert_eq!(
        (limit(json!(5)), limit(json!(-1)), limit(json!("x"))),
        (Some(5), None, None)
    );
}
