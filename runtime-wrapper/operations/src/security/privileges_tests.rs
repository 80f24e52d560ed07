use super::*;
use cryopod_archive::criu::privileges::Namespaces;
use cryopod_test_files::TestFiles;
use serde_json::json;

fn spec() -> Value {
    json!({
        "process": {
            "noNewPrivileges": true,
            "capabilities": {"bounding": ["CAP_CHOWN", "CAP_KILL"], "permitted": ["CAP_CHOWN", "CAP_KILL"]}
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
            {"destination": "/data", "type": "bind", "source": "/srv", "options": ["rbind", "rw", "ro"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]}
        ],
        "linux": {
            "namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "network", "path": "/run/netns/x"}],
            "seccomp": {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": []},
            "readonlyPaths": ["/proc/sys"],
            "maskedPaths": ["/proc/kcore", "/proc/strange"]
        }
    })
}

/// A number for the mount at this path.
fn id(path: &str) -> u32 {
    let next = |all: u32, b: u8| all.wrapping_mul(31).wrapping_add(b.into());
    path.bytes().fold(1, next)
}

/// A mount on the root's, or on `/proc`.
fn mount(path: &str, fs_type: u32, flags: u32) -> CriuMount {
    CriuMount {
        id: id(path),
        parent: match path {
            "/" => 0,
            _ if path.starts_with("/proc/") => id("/proc"),
            _ => id("/"),
        },
        namespace: 6,
        path: path.into(),
        fs_type,
        device: fs_type,
        root: "/".into(),
        flags,
        external: false,
        key: String::new(),
    }
}

fn credentials(permitted: u64) -> Credentials {
    Credentials {
        capabilities: Capabilities {
            permitted,
            ..Capabilities::default()
        },
        ..Credentials::default()
    }
}

/// The privileges that such a spec gives.
fn images() -> Privileges {
    let ids = |of: u32, base: u32| Namespaces {
        of,
        ids: [1, 2, 3, 4, 5, 6, 7, 0].map(|n| base + n),
    };
    Privileges {
        threads: vec![Thread {
            pid: 1,
            tid: 1,
            comm: "sh".into(),
            credentials: credentials(1 | 1 << 5),
            no_new_privs: true,
            seccomp: 2,
            label: None,
        }],
        namespaces: vec![ids(1, 10)],
        host: ids(0, 100),
        mounts: vec![
            mount("/", 17, 0),
            mount("/proc", 1, 2 | 4 | 8),
            mount("/proc/sys", 1, 1 | 2 | 4 | 8),
            mount("/proc/kcore", 5, 0),
            mount("/dev", 5, 0),
            mount("/sys", 2, 1),
            CriuMount {
                external: true,
                ..mount("/data", 0, 1)
            },
        ],
    }
}

fn told(spec: Value, change: impl FnOnce(&mut Privileges)) -> String {
    let mut found = images();
    change(&mut found);
    let dir = tempfile::tempdir().unwrap();
    for path in [
        "proc/sys",
        "proc/kcore",
        "proc/strange",
        "sys/kernel/security/apparmor",
    ] {
        dir.dir(path);
    }
    let host = Host::at(dir.path());
    let spec = Spec::from_json(spec);
    let given = Given {
        facts: &HostFacts::of(&host, &spec),
        spec: &spec,
        read_only: &["/usr/lib/libcuda.so.1".to_owned()],
        relabelled: false,
        limited: false,
    };
    let lines: Vec<String> = beyond(&found, given)
        .iter()
        .map(ToString::to_string)
        .collect();
    lines.join("\n")
}

#[test]
fn what_a_spec_gives_is_not_refused() {
    assert_eq!(told(spec(), |_| ()), "");
    let fewer = |p: &mut Privileges| {
        p.mounts.push(mount("/usr/own", 17, 0)); // a part of the root
        p.threads[0].credentials = credentials(0);
        p.mounts.push(mount("/tmp/own", 5, 0));
    };
    assert_eq!(told(spec(), fewer), "");
    // A spec without any of it gives a process no capability, and limits nothing else.
    let bare = json!({"linux": {"seccomp": null}});
    let none = |p: &mut Privileges| {
        p.threads[0].credentials = credentials(0);
        (p.threads[0].no_new_privs, p.threads[0].seccomp) = (false, 0);
        p.namespaces[0].ids = p.host.ids;
        p.mounts.truncate(1);
    };
    assert_eq!(told(bare, none), "");
}

#[test]
fn more_than_the_spec_gives_is_refused_by_name() {
    let one = |change: fn(&mut Privileges), want: &str| {
        let told = told(spec(), change);
        assert!(
            told.contains(want) && told.lines().count() == 1,
            "{want}: {told}"
        );
        assert!(
            told.contains("`privileges = false` under [checks]"),
            "{told}"
        );
    };
    one(
        |p| p.threads[0].credentials.capabilities.permitted |= 1 << 21 | 1 << 50,
        "process 1 (\"sh\") has capabilities in the images that the spec does not give: CAP_SYS_ADMIN, capability 50",
    );
    one(
        |p| p.threads[0].no_new_privs = false,
        "the spec says noNewPrivileges",
    );
    one(
        |p| p.threads[0].seccomp = 0,
        "no seccomp filter in the images",
    );
    one(
        |p| p.namespaces[0].ids[1] = p.host.ids[1],
        "process 1 is in the host's network namespace",
    );
    one(|p| p.namespaces.clear(), "name no process's namespaces");
    one(|p| p.mounts[6].flags = 0, "mount /data without ro");
    one(|p| p.mounts[1].flags = 2 | 4, "mount /proc without noexec");
    one(|p| p.mounts[2].flags = 0, "leave /proc/sys open");
    one(|p| drop(p.mounts.remove(3)), "leave /proc/kcore open");
    // Over the mount that closes it, the same file system once more.
    one(
        |p| {
            let closed = p.mounts[2].id;
            p.mounts.push(CriuMount {
                parent: closed,
                id: 77,
                ..mount("/proc/sys", 1, 0)
            });
        },
        "leave /proc/sys open",
    );
    one(
        |p| p.mounts.push(mount("/mnt", 11, 0)),
        "the images mount a debugfs at /mnt",
    );
    one(
        |p| p.mounts.push(mount("/mnt", 1, 0)),
        "the images mount a proc at /mnt",
    );
    one(
        |p| p.mounts.push(mount("/usr/lib/libcuda.so.1", 0, 0)),
        "mount the host's files at /usr/lib/libcuda.so.1 writable",
    );
}

#[test]
fn labels_where_the_host_has_the_module() {
    let mut spec = spec();
    spec["process"]["apparmorProfile"] = "containers".into();
    for (label, fine) in [
        (Some("containers"), true),
        (Some("containers//child"), true),
        (Some("containersx"), false),
        (Some("unconfined"), false),
        (None, false),
    ] {
        let told = told(spec.clone(), |p| {
            p.threads[0].label = label.map(str::to_owned)
        });
        assert_eq!(told.is_empty(), fine, "{label:?}: {told}");
    }
}

#[test]
fn a_spec_with_sys_admin_limits_no_mounts() {
    let mut spec = spec();
    spec["process"]["capabilities"]["permitted"] = json!(["CAP_SYS_ADMIN", "CHOWN", "CAP_KILL"]);
    assert_eq!(told(spec.clone(), |p| p.mounts.clear()), "");
    assert_eq!(
        told(spec, |p| p.threads[0].credentials.capabilities.permitted |=
            1 << 21),
        ""
    );
}

#[test]
fn a_running_process_is_held_against_its_own_spec() {
    let dir = tempfile::tempdir().unwrap();
    dir.put("proc/7/comm", "server\n");
    let status = "Name:\tserver\nUid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nGroups:\t \nCapInh:\t0000000000000000\nCapPrm:\t0000000000000001\nCapEff:\t0000000000000001\nCapBnd:\t0000000000200001\nCapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t0\nSeccomp_filters:\t0\n";
    dir.put("proc/7/task/7/status", status);
    let host = Host::at(dir.path());
    let told = |names: &[&str], on: bool| {
        let spec = serde_json::json!({"process": {"capabilities": {"bounding": names}}});
        let mut config = Config::default();
        config.checks.insert(PRIVILEGES_CHECK.into(), on);
        let found = running(&config, &host, &Spec::from_json(spec), &[7, 8]);
        found.into_iter().map(|r| r.what).collect::<Vec<_>>()
    };
    assert_eq!(
        told(&["CAP_CHOWN"], true),
        ["process 7 (\"server\") has capabilities that the spec does not give: CAP_SYS_ADMIN"]
    );
    assert_eq!(told(&["CAP_CHOWN", "CAP_SYS_ADMIN"], true), [""; 0]);
    assert_eq!(told(&["CAP_CHOWN"], false), [""; 0]);
}
