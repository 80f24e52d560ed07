use super::*;
use cryopod_host::programs::ToolError;
use cryopod_test_files::TestFiles;
use serde_json::json;

/// Programs by name: the exit code and the output.
struct Has(&'static [(&'static str, i32, &'static str)]);

impl Tools for Has {
    fn find(&self, name: &str) -> Option<PathBuf> {
        let known = self.0.iter().any(|(n, ..)| *n == name);
        known.then(|| Path::new("/usr/sbin").join(name))
    }

    fn output(&self, program: &Path, args: &[&OsStr], _: Duration) -> Result<Output, ToolError> {
        // The shell runs the program after its script.
        let asked = match program.ends_with("sh") {
            true => Path::new(args[2]),
            false => program,
        };
        let (_, code, text) = self.0.iter().find(|(n, ..)| asked.ends_with(n)).unwrap();
        let text = (*text).to_owned();
        let (stdout, stderr) = match code {
            0 => (text, String::new()),
            _ => (String::new(), text),
        };
        Ok(Output {
            code: *code,
            stdout,
            stderr,
        })
    }
}

fn probe(tools: &Has) -> Probe<'_> {
    Probe {
        tools,
        limit: Duration::from_secs(5),
    }
}

const ALL: Has = Has(&[
    ("tar", 0, "x"),
    ("gzip", 0, ""),
    ("ip", 0, "x"),
    ("sh", 0, ""),
    ("iptables-restore", 0, ""),
    ("ip6tables-restore", 0, ""),
    ("iptables", 0, ""),
    ("ip6tables", 0, ""),
    ("criu", 0, ""),
]);

#[test]
fn missing_and_unfit_programs() {
    let p = probe(&ALL);
    assert!(p.tar().is_ok() && p.ip().is_ok());
    assert_eq!(p.any_lock(false).unwrap().0, Lock::Iptables);
    let none = Has(&[]);
    let p = probe(&none);
    assert!(p.tar().unwrap_err().what.ends_with("tar is not on PATH"));
    let ip = p.ip().unwrap_err();
    assert!(ip.what.ends_with("ip is not on PATH") && ip.remedy.contains("iproute2"));
    assert!(
        p.any_lock(false)
            .unwrap_err()
            .what
            .contains("neither works")
    );
    assert!(p.lock(Lock::Skip, false).is_ok());
    let busybox = Has(&[
        ("ip", 1, "\nip: invalid argument 'save'"),
        ("tar", 1, "tar: unrecognized option '--no-unquote'"),
        ("gzip", 0, ""),
    ]);
    let p = probe(&busybox);
    assert!(p.ip().unwrap_err().what.contains("invalid argument 'save'"));
    assert!(p.tar().unwrap_err().what.contains("--no-unquote"));
    let no_gzip = Has(&[("tar", 2, "tar (child): gzip: Cannot exec")]);
    assert!(
        probe(&no_gzip)
            .tar()
            .unwrap_err()
            .what
            .ends_with("gzip is not on PATH")
    );
    let silent = Has(&[("ip", 0, "")]);
    assert!(
        probe(&silent)
            .ip()
            .unwrap_err()
            .what
            .contains("writes nothing")
    );
    let nft = Has(&[("criu", 0, ""), ("sh", 0, "")]);
    assert_eq!(probe(&nft).any_lock(true).unwrap().0, Lock::Nftables);
}

#[test]
fn what_a_restore_needs() {
    let dir = tempfile::tempdir().unwrap();
    let restore = |low: &str, recorded: &[&str]| {
        let path = dir.path().join(low);
        std::fs::write(&path, "").unwrap();
        use std::os::unix::fs::PermissionsExt;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut config = Config::default();
        config.runtime.low_level = path.to_str().map(str::to_owned);
        let recorded: Vec<String> = recorded.iter().map(|w| (*w).to_owned()).collect();
        restore(&config, &Has(&[]), &recorded).len()
    };
    assert_eq!(restore("crun", &["iptables", "tar", "ip"]), 3);
    // The engine's network: crun's CRIU locks nothing at a restore.
    assert_eq!(restore("crun", &["iptables", "tar"]), 1);
    assert_eq!(restore("runc", &["iptables", "tar", "ip"]), 2);
    assert_eq!(restore("runc", &["skip", "of a later version"]), 0);
    assert_eq!(restore("crun", &[]), 0);
}

/// A host with a container, process 7: its network namespace, and its mounts.
fn host(network: &str, mounts: &str) -> (tempfile::TempDir, Host) {
    let dir = tempfile::tempdir().unwrap();
    for (process, network, mounts) in [
        ("self", "net:[1]", "1 0 0:5 / /run rw - tmpfs tmpfs rw\n"),
        ("7", network, mounts),
    ] {
        let directory = dir.path().join("proc").join(process);
        directory.link("ns/net", network);
        directory.put("mountinfo", mounts);
    }
    let host = Host::at(dir.path());
    (dir, host)
}

fn found(
    network: &str,
    kind: RuntimeKind,
    namespaces: serde_json::Value,
    lock: Option<Lock>,
) -> HelperFindings {
    let (_dir, host) = host(network, "2 0 0:9 / /dev rw - tmpfs tmpfs rw\n");
    checkpoint(
        probe(&ALL),
        &HelperSubject {
            host: &host,
            kind,
            spec: &Spec::from_json(json!({"linux": {"namespaces": namespaces}})),
            init: 7,
            scan: &Scan::default(),
            connections: &[],
            lock,
        },
    )
}

#[test]
fn what_a_container_needs() {
    let own = || json!([{"type": "network"}]);
    let engines = || json!([{"type": "network", "path": "/run/netns/x"}]);
    let all = found("net:[2]", RuntimeKind::Crun, own(), None);
    assert_eq!(all.recorded, ["tar", "ip", "iptables"]);
    assert_eq!(all.lock, Some(Lock::Iptables));
    assert_eq!(
        found("net:[2]", RuntimeKind::Runc, own(), None).recorded,
        ["tar", "iptables"]
    );
    let engines = found(
        "net:[2]",
        RuntimeKind::Crun,
        engines(),
        Some(Lock::Nftables),
    );
    assert_eq!(
        (engines.recorded, engines.lock),
        (vec!["tar".into(), "nftables".into()], None)
    );
    assert_eq!(
        found("net:[2]", RuntimeKind::Crun, own(), Some(Lock::Skip)).recorded,
        ["tar", "ip"]
    );
    let hosts = found("net:[1]", RuntimeKind::Crun, json!([]), None);
    assert_eq!((hosts.recorded, hosts.lock), (vec!["tar".into()], None));
}

#[test]
fn whose_tmpfs_it_is() {
    let tmpfs = |mounts: &str| {
        let (_dir, host) = host("net:[1]", mounts);
        has_tmpfs(&host, 7)
    };
    assert!(tmpfs("2 0 0:9 / /dev rw - tmpfs tmpfs rw\n"));
    assert!(
        !tmpfs("2 0 0:5 /x /data rw - tmpfs tmpfs rw\n"),
        "the host's"
    );
    assert!(!tmpfs("2 0 0:9 / / rw - overlay overlay rw\n"));
}
