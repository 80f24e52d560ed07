use super::*;
use crate::ceiling::Lifts;
use crate::gpus::driver_files::is_driver_place;
use cryopod_test_files::TestFiles;
use serde_json::json;

/// A host whose own mounts are `/` (0:43) and `/mnt` (0:50), and a container with these mounts.
fn host(container: &[&str]) -> (tempfile::TempDir, Host) {
    let dir = tempfile::tempdir().unwrap();
    let proc = dir.path().join("proc");
    proc.dir("100/root");
    proc.put("self/mountinfo", "20 1 0:43 / / rw - overlay overlay rw\n21 20 0:50 / /mnt rw - tmpfs tmpfs rw\n22 20 0:54 / /dev rw - tmpfs dev rw\n");
    proc.put("100/mountinfo", container.join("\n"));
    let host = Host::at(dir.path());
    (dir, host)
}

/// A file of the host, and the same file as the container sees it.
fn bound(dir: &Path, on_host: &str, inside: &str) {
    let from = dir.join(on_host.trim_start_matches('/'));
    let to = dir
        .join("proc/100/root")
        .join(inside.trim_start_matches('/'));
    for p in [&from, &to] {
        fs::create_dir_all(p.parent().unwrap()).unwrap();
    }
    fs::write(&from, format!("content of {on_host}")).unwrap();
    fs::hard_link(&from, &to).unwrap();
}

fn destinations(host: &Host) -> Destinations {
    Destinations::of(host, &spec(), Path::new("/bundle"))
}

fn spec() -> Spec {
    Spec::from_json(json!({
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/data/", "type": "bind", "source": "/mnt", "options": ["rbind"]}
        ],
        "linux": {"maskedPaths": ["/proc/keys"], "readonlyPaths": ["/proc/bus"]}
    }))
}

#[test]
fn what_no_spec_names() {
    let (dir, host) = host(&[
        "40 39 0:90 / / rw - overlay overlay rw",
        "41 40 0:58 / /proc rw - proc proc rw",
        "42 40 0:59 / /dev rw - tmpfs tmpfs rw",
        "43 40 0:50 / /data rw - tmpfs tmpfs rw",
        "44 41 0:54 /null /proc/keys rw - tmpfs dev rw",
        "45 41 0:58 /bus /proc/bus ro - proc proc rw",
        "46 42 0:59 /null /dev/xyz ro - tmpfs tmpfs rw",
        "47 40 0:43 /opt/nv/libcuda.so.560.35.03 /usr/lib/libcuda.so.560.35.03 ro,nosuid - overlay overlay rw",
        "48 41 0:63 / /proc/driver/nvidia rw - tmpfs tmpfs rw",
        "49 48 0:50 /gpus/0000:65:00.0 /proc/driver/nvidia/gpus/0000:65:00.0 ro - tmpfs tmpfs rw",
        "50 40 0:38 / /sys/fs/cgroup ro - cgroup2 cgroup2 rw",
        "51 40 0:43 /x /a\\040b ro - overlay overlay rw",
        "52 40 0:99 /y /nowhere ro - ext4 /dev/sdz rw",
    ]);
    bound(
        dir.path(),
        "/opt/nv/libcuda.so.560.35.03",
        "/usr/lib/libcuda.so.560.35.03",
    );
    bound(
        dir.path(),
        "/mnt/gpus/0000:65:00.0",
        "/proc/driver/nvidia/gpus/0000:65:00.0",
    );
    let (
        MountFacts {
            foreign: found,
            own,
        },
        refusals,
    ) = unnamed(&host, &spec(), &destinations(&host), 100);
    assert_eq!(own, ["/proc/driver/nvidia"]);
    let short: Vec<_> = found
        .iter()
        .map(|m| (m.path.as_str(), m.host_path.as_str()))
        .collect();
    assert_eq!(
        short,
        [
            (
                "/usr/lib/libcuda.so.560.35.03",
                "/opt/nv/libcuda.so.560.35.03"
            ),
            (
                "/proc/driver/nvidia/gpus/0000:65:00.0",
                "/mnt/gpus/0000:65:00.0"
            ),
        ]
    );
    assert_eq!(found[0].options, ["ro", "nosuid"]);
    assert!(found[0].sha256.as_ref().unwrap().len() == 64 && found[0].size.is_some());
    let told: Vec<String> = refusals.iter().map(ToString::to_string).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(
        told[0].contains("the mount /a b, which") && told[0].contains("cannot be told to CRIU")
    );
    assert!(told[1].contains("/nowhere") && told[1].contains("ext4"));
}

fn mount(path: &str, host_path: &str) -> ForeignMount {
    ForeignMount::new(path, MountKind::File, host_path)
}

struct Target {
    dir: tempfile::TempDir,
    driver: Option<&'static str>,
    allowed: Vec<PathBuf>,
    volume: Option<String>,
}

impl Target {
    fn with(files: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for file in files {
            let path = dir.path().join(file.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        Self {
            dir,
            driver: None,
            allowed: vec!["/opt/nv".into()],
            volume: None,
        }
    }

    fn provide(&self, mount: ForeignMount) -> Result<String, String> {
        let host = Host::at(self.dir.path());
        let renamed = [("0000:65:00.0".to_owned(), "0000:ca:00.0".to_owned())];
        let mut json = spec().json().clone();
        if let Some(source) = &self.volume {
            json["mounts"][2]["source"] = source.as_str().into();
        }
        let spec = Spec::from_json(json);
        let provider = Provider {
            ceiling: Ceiling {
                host: &host,
                spec: &spec,
                lifts: Lifts {
                    mounts: &self.allowed,
                    ..Lifts::default()
                },
            },
            mounts: &Destinations::of(&host, &spec, Path::new("/bundle")),
            recorded_driver: Some("560.35.03"),
            driver: self.driver,
            renamed: &renamed,
            nodes: &[],
        };
        match provider.provide(&[mount]) {
            Ok(p) => Ok(p[0].source.display().to_string()),
            Err(r) => Err(r[0].to_string()),
        }
    }
}

#[test]
fn the_same_path_or_the_targets_driver() {
    let old = "/opt/nv/560.35.03/libcuda.so.560.35.03";
    let new = "/opt/nv/570.10/libcuda.so.570.10";
    let m = || mount("/usr/lib/libcuda.so.560.35.03", old);
    assert_eq!(Target::with(&[old]).provide(m()).unwrap(), old);
    let mut both = Target::with(&[old, new]);
    assert_eq!(both.provide(m()).unwrap(), old);
    both.driver = Some("570.10");
    assert_eq!(both.provide(m()).unwrap(), new);
    assert_eq!(
        Target::with(&[new]).provide(m()).unwrap(),
        new,
        "by its name, where the driver does not tell"
    );
    let e = Target::with(&[new, "/opt/nv/575.1/libcuda.so.575.1"])
        .provide(m())
        .unwrap_err();
    assert!(
        e.contains("the mount /usr/lib/libcuda.so.560.35.03 cannot be provided: this host has no /opt/nv/560"),
        "two may be meant: {e}"
    );
    let firmware = Target::with(&["/lib/firmware/nvidia/570.10/gsp.bin"]).provide(mount(
        "/lib/firmware/nvidia/560.35.03/gsp.bin",
        "/lib/firmware/nvidia/560.35.03/gsp.bin",
    ));
    assert_eq!(firmware.unwrap(), "/lib/firmware/nvidia/570.10/gsp.bin");
}

#[test]
fn another_gpus_directory_and_a_volumes_mounts() {
    let t = Target::with(&["/proc/driver/nvidia/gpus/0000:ca:00.0", "/mnt/sub/x"]);
    let path = "/proc/driver/nvidia/gpus/0000:65:00.0";
    assert_eq!(
        t.provide(mount(path, path)).unwrap(),
        "/proc/driver/nvidia/gpus/0000:ca:00.0"
    );
    assert_eq!(
        t.provide(mount("/data/sub/x", "/old/sub/x")).unwrap(),
        "/mnt/sub/x"
    );
}

#[test]
fn refused_by_name() {
    let mut t = Target::with(&["/etc/shadow", "/opt/nv/lib.so"]);
    let e = t.provide(mount("/x", "/etc/shadow")).unwrap_err();
    assert!(e.contains("/etc/shadow is none of the driver's places") && e.contains("mounts.allow"));
    let e = t
        .provide(mount("/x", "/opt/nv/../../etc/shadow"))
        .unwrap_err();
    assert!(e.contains("no clean path"), "{e}");
    t.dir.link("opt/nv/link", t.dir.path().join("etc/shadow"));
    let e = t.provide(mount("/x", "/opt/nv/link")).unwrap_err();
    assert!(e.contains("none of the driver's places"), "{e}");
    let mut directory = mount("/x", "/opt/nv/lib.so");
    directory.kind = MountKind::Directory;
    let e = t.provide(directory).unwrap_err();
    assert!(
        e.contains("it was a directory and /opt/nv/lib.so is a file"),
        "{e}"
    );
    let mut used = mount("/x", "/opt/nv/lib.so");
    (used.in_use, used.size) = (true, Some(1));
    assert!(t.provide(used).unwrap_err().contains("another version"));
    t.allowed.clear();
    assert!(t.provide(mount("/x", "/opt/nv/lib.so")).is_err());
    for odd in ["/a b", "/a]:/etc", "relative"] {
        assert!(t.provide(mount(odd, "/opt/nv/lib.so")).is_err(), "{odd}");
    }
}

#[test]
fn a_link_in_the_containers_own_volume_leads_nowhere() {
    let t = Target::with(&["/mnt/sub/x", "/etc/shadow"]);
    let shadow = t.dir.path().join("etc/shadow");
    t.dir.link("mnt/sub/link", &shadow);
    t.dir.link("mnt/sub/directory", "../../etc");
    for inside in ["/data/sub/link", "/data/sub/directory/shadow"] {
        let e = t.provide(mount(inside, "/old/x")).unwrap_err();
        assert!(
            e.contains("cannot be opened without following links"),
            "{inside}: {e}"
        );
    }
    assert!(t.provide(mount("/data/sub/x", "/old/x")).is_ok());
}

#[test]
fn files_of_drivers_and_no_trees() {
    for (path, directory, is) in [
        (
            "/usr/lib/x86_64-linux-gnu/libcuda.so.560.35.03",
            false,
            true,
        ),
        ("/usr/lib", true, false),
        ("/usr/lib/x86_64-linux-gnu", true, false),
        ("/lib/firmware/nvidia/560.35.03", true, true),
        ("/lib/firmware/nvidia/560.35.03/gsp.bin", false, true),
        ("/run/nvidia-persistenced/socket", false, true),
        ("/run/nvidia", true, false),
        ("/run/nvidia/driver", true, false),
        ("/run/nvidia/driver/etc/shadow", false, false),
        ("/run/nvidia/driver/usr/lib/libcuda.so.1", false, true),
        ("/proc/driver/nvidia/gpus/0000:65:00.0", true, true),
        ("/etc", true, false),
        ("/etc/shadow", false, false),
        ("/usr/libexec/x", false, false),
    ] {
        assert_eq!(is_driver_place(Path::new(path), directory), is, "{path}");
    }
}

#[test]
fn versions_in_names() {
    for (word, version) in [
        ("libcuda.so.560.35.03", Some("560.35.03")),
        ("580.95", Some("580.95")),
        ("nvidia-560.35.03-server", Some("560.35.03")),
        ("libcuda.so.1", None),
        ("0000:65:00.0", None),
        ("gsp_tu10x.bin", None),
        ("é560.1", Some("560.1")),
    ] {
        assert_eq!(version_in(word), version, "{word}");
    }
}
