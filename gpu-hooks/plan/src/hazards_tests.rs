use super::*;
use cryopod_test_files::TestFiles;
use serde_json::json;
use std::fs;
use std::path::Path;

const MOUNTS: &str =
    "50 49 0:48 / / rw - overlay overlay rw\n51 50 0:58 / /proc rw - proc proc rw\n";

fn process(root: &Path, pid: i32, fds: &[(&str, u64)], maps: &str, tracer: i32) {
    let dir = root.join(format!("proc/{pid}"));
    dir.dir("fd");
    dir.dir("fdinfo");
    dir.link("ns/mnt", "mnt:[4026532]");
    dir.put("comm", "python3\n");
    dir.put("status", format!("Name:\tpython3\nTracerPid:\t{tracer}\n"));
    dir.put("maps", maps);
    dir.put("mountinfo", MOUNTS);
    for (n, (target, mount)) in fds.iter().enumerate() {
        dir.link(format!("fd/{n}"), target);
        dir.put(
            format!("fdinfo/{n}"),
            format!("pos:\t0\nflags:\t02\nmnt_id:\t{mount}\nino:\t7\n"),
        );
    }
}

fn told(root: &Path, pids: &[i32], spec: serde_json::Value) -> Vec<String> {
    let host = Host::at(root);
    refusals(
        &Scan::of(&host, pids),
        &host,
        &Spec::from_json(spec),
        &CriuLimits::default(),
    )
    .iter()
    .map(ToString::to_string)
    .collect()
}

#[test]
fn ordinary_processes_pass() {
    let dir = tempfile::tempdir().unwrap();
    let maps = "7f00-7f01 r-xp 00000000 00:05 12   /usr/lib/libc.so.6\n7f02-7f03 rw-p 00000000 00:00 0 \n7f04-7f05 rw-p 00000000 00:00 0  [heap]\n";
    let fds = [
        ("/dev/null", 50),
        ("pipe:[77]", 14),
        ("socket:[78]", 9),
        ("anon_inode:[eventpoll]", 15),
        ("anon_inode:[eventfd]", 15),
        ("/memfd:x (deleted)", 1),
        ("/dev/nvidia0", 50),
        ("/dev/nvidiactl", 50),
    ];
    process(dir.path(), 7, &fds, maps, 0);
    assert_eq!(told(dir.path(), &[7, 8], json!({})), [""; 0]);
}

#[test]
fn each_hazard_names_process_cause_and_remedy() {
    for (target, cause, remedy) in [
        ("anon_inode:[io_uring]", "io_uring", "env.avoid=io_uring"),
        ("/dev/gdrdrv", "GDRCopy", "env.avoid=gdrcopy"),
        ("/dev/infiniband/uverbs0", "RDMA verbs", "NCCL_IB_DISABLE=1"),
        ("/dev/nvidia-fs0", "GPUDirect Storage", "/dev/nvidia-fs"),
        ("anon_inode:seccomp notify", "user-notify", "supervisor"),
        ("anon_inode:[perf_event]", "perf_event", "stop profiling"),
        ("/dev/fuse", "FUSE", "on the host"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        process(dir.path(), 7, &[(target, 50), (target, 50)], "", 0);
        let said = told(dir.path(), &[7], json!({}));
        assert_eq!(said.len(), 1, "{said:?}");
        for word in ["process 7 (python3): ", cause, remedy] {
            assert!(said[0].contains(word), "{word}: {said:?}");
        }
    }
}

#[test]
fn what_has_no_descriptor_shows_in_the_maps() {
    for (maps, cause) in [
        (
            "7f00-7f01 rw-s 10000000 00:0f 1043    anon_inode:[io_uring]\n",
            "io_uring",
        ),
        (
            "7f00-7f01 rw-s 00000000 00:10 1043    /secretmem (deleted)\n",
            "memfd_secret",
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        process(dir.path(), 7, &[], maps, 0);
        assert!(told(dir.path(), &[7], json!({}))[0].contains(cause));
    }
}

#[test]
fn tracers_and_listeners() {
    let dir = tempfile::tempdir().unwrap();
    process(dir.path(), 7, &[], "", 9);
    process(dir.path(), 9, &[], "", 0);
    let said = told(dir.path(), &[7], json!({}));
    assert!(
        said[0].contains("process 7 (python3): is traced by process 9 (python3)"),
        "{said:?}"
    );
    let spec = json!({"linux": {"seccomp": {"listenerPath": "/run/x.sock"}}});
    let said = told(dir.path(), &[9], spec);
    assert!(said[0].contains("/run/x.sock"), "{said:?}");
}

#[test]
fn files_and_pipes_outside_the_container() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (file, inside, pipe) = (at("out.log"), at("inside"), at("in"));
    fs::write(&file, "").unwrap();
    fs::write(&inside, "").unwrap();
    nix::unistd::mkfifo(&*pipe, nix::sys::stat::Mode::S_IRUSR).unwrap();
    let fds = [
        ("/dev/null", 118),
        (&*file, 118),
        (&*inside, 50),
        (&*pipe, 118),
    ];
    process(dir.path(), 7, &fds, "", 0);
    let mut said = told(dir.path(), &[7], json!({}));
    said.sort();
    assert_eq!(said.len(), 2, "{said:?}");
    for (said, what) in said.iter().zip(["descriptor 1: ", "descriptor 3: "]) {
        assert!(said.contains(what), "{said}");
    }
}

#[test]
fn a_file_that_a_process_keeps_in_its_own_mount_namespace() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("lib.so");
    fs::write(&file, "").unwrap();
    process(dir.path(), 7, &[], "", 0);
    process(dir.path(), 8, &[(file.to_str().unwrap(), 50)], "", 0);
    let other = dir.path().join("proc/8");
    fs::remove_file(other.join("ns/mnt")).unwrap();
    other.link("ns/mnt", "mnt:[4026999]");
    other.put("mountinfo", "90 89 0:48 / / rw - overlay overlay rw\n");
    assert_eq!(told(dir.path(), &[7, 8], json!({})), [""; 0]);
    assert_eq!(told(dir.path(), &[8], json!({})).len(), 1);
}

#[test]
fn many_reasons_are_cut() {
    let dir = tempfile::tempdir().unwrap();
    let pids: Vec<i32> = (10..60).collect();
    for pid in &pids {
        process(dir.path(), *pid, &[("anon_inode:[io_uring]", 15)], "", 0);
    }
    let said = told(dir.path(), &pids, json!({}));
    assert_eq!(said.len(), MAX_TOLD + 1);
    assert!(said[MAX_TOLD].contains("30 more"), "{said:?}");
}

#[test]
fn connections_of_the_container_only() {
    let dir = tempfile::tempdir().unwrap();
    let fds = [("socket:[100]", 9), ("socket:[103]", 9)];
    process(dir.path(), 7, &fds, "", 0);
    let net = dir.path().join("proc/7/net");
    fs::create_dir_all(&net).unwrap();
    let head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n";
    let line = |local: &str, remote: &str, state: &str, inode: u32| {
        format!(
            "   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000     0        0 {inode} 1\n"
        )
    };
    let text = [
        head.to_owned(),
        line("0100007F:1F90", "0100007F:A000", "01", 100),
        line("0100007F:1F90", "0100007F:A002", "01", 101),
        line("00000000:1F90", "00000000:0000", "0A", 103),
    ]
    .concat();
    net.put("tcp", text);
    let six = format!(
        "{head}{}",
        line(
            "0000000000000000FFFF00000200000A:1F90",
            "0000000000000000FFFF00000900000A:A000",
            "08",
            103
        )
    );
    net.put("tcp6", six);
    let host = Host::at(dir.path());
    let scan = Scan::of(&host, &[7]);
    let sockets = |criu: &[u32], kernel: &[u32]| undumpable_sockets(&scan, &host, 7, criu, kernel);
    let told = sockets(&[4, 1, 1], &[6, 18]).unwrap().to_string();
    assert!(
        told.contains("process 7 (python3): has a network socket, and CRIU 4.1.1"),
        "{told}"
    );
    for (criu, kernel) in [
        (&[4, 2][..], &[6, 18][..]),
        (&[4, 1, 1], &[6, 12, 9]),
        (&[], &[6, 18]),
    ] {
        assert_eq!(sockets(criu, kernel), None);
    }
    let found = connections(&scan, &host, 7);
    let short: Vec<_> = found
        .iter()
        .map(|c| (c.ends.as_str(), c.loopback))
        .collect();
    assert_eq!(
        short,
        [
            ("127.0.0.1:8080 - 127.0.0.1:40960", true),
            ("10.0.0.2:8080 - 10.0.0.9:40960", false)
        ]
    );
}

#[test]
fn mounts_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let maps = "7f00-7f01 r-xp 00000000 00:05 12   /usr/lib/libcuda.so.560\n";
    process(dir.path(), 7, &[("/lib/firmware/gsp/a.bin", 50)], maps, 0);
    let kind = cryopod_archive::container::surroundings::MountKind::File;
    let mount = |path: &str| ForeignMount::new(path, kind, path);
    let mut mounts = [
        mount("/usr/lib/libcuda.so.560"),
        mount("/usr/lib/libcuda.so"),
        mount("/lib/firmware/gsp"),
    ];
    mark_used(&Scan::of(&Host::at(dir.path()), &[7]), &mut mounts);
    assert_eq!(mounts.map(|m| m.in_use), [true, false, true]);
}
