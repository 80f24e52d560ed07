use super::*;
use crate::criu::image_files::making::{image, message};
use crate::criu::mounts::fs_type;
use proptest::prelude::*;
use std::collections::BTreeMap;

type Files = BTreeMap<String, Vec<u8>>;

fn ids(base: u64) -> Message {
    let of = |kind, n: u64| (kind, base + n);
    message(
        "task_kobj_ids_entry",
        &[
            of("pid_ns_id", 1),
            of("net_ns_id", 2),
            of("ipc_ns_id", 3),
            of("uts_ns_id", 4),
            of("mnt_ns_id", 5),
            ("user_ns_id", 9),
            of("cgroup_ns_id", 7),
        ],
    )
}

fn core(capabilities: &[u64], seccomp: Option<u64>) -> Message {
    let mut creds = message("creds_entry", &[("uid", 1000), ("no_new_privs", 1)]);
    creds.set_numbers("groups", &[7]);
    creds.set_numbers("cap_inh", &[0, 0]);
    for set in ["cap_prm", "cap_eff", "cap_bnd"] {
        creds.set_numbers(set, capabilities);
    }
    let mut thread = message("thread_core_entry", &[("seccomp_filter", 0)]);
    seccomp.inspect(|mode| thread.set_number("seccomp_mode", *mode));
    thread.push("creds", creds);
    let mut core = message("core_entry", &[("mtype", 1)]);
    let mut task = message("task_core_entry", &[("task_state", 1)]);
    task.set_text("comm", "sh");
    core.push("tc", task);
    core.push("thread_core", thread);
    core
}

/// A container of one process with two threads.
fn files() -> Files {
    let mut inventory = message("inventory_entry", &[]);
    inventory.push("root_ids", ids(100));
    let mut tree = message("pstree_entry", &[("pid", 1)]);
    tree.set_numbers("threads", &[1, 7]);
    let numbers = [
        ("fstype", 5),
        ("root_dev", 60),
        ("flags", 1),
        ("sb_flags", 2),
    ];
    let mut mount = message("mnt_entry", &numbers);
    mount.set_text("mountpoint", "./dev/shm");
    [
        ("inventory.img", inventory),
        ("pstree.img", tree),
        ("ids-1.img", ids(0)),
        ("core-1.img", core(&[5, 1], Some(2))),
        ("core-7.img", core(&[2, 0], Some(2))),
        ("mountpoints-5.img", mount),
    ]
    .map(|(name, message)| (name.to_owned(), image(name, &[message])))
    .into()
}

fn read_of(files: &Files) -> Result<Privileges, ImageError> {
    read(|name| Ok(files.get(name).cloned()))
}

#[test]
fn every_thread_and_mount() {
    let found = read_of(&files()).unwrap();
    let short: Vec<_> = found
        .threads
        .iter()
        .map(|t| {
            (
                t.pid,
                t.tid,
                t.credentials.capabilities.permitted,
                t.no_new_privs,
                t.seccomp,
            )
        })
        .collect();
    assert_eq!(short, [(1, 1, 1 << 32 | 5, true, 2), (1, 7, 2, true, 2)]);
    assert_eq!(found.host.ids[0], 101);
    assert_eq!(found.namespaces[0].ids, [1, 2, 3, 4, 5, 9, 7, 0]);
    let mount = &found.mounts[0];
    assert_eq!((mount.path.as_str(), mount.flags), ("/dev/shm", 3));
    assert_eq!(fs_type(mount.fs_type), Some("tmpfs"));
}

#[test]
fn what_would_give_a_process_more_is_an_error() {
    let mut bare = core(&[0, 0], None);
    bare.remove("thread_core");
    let three = core(&[0, 0, 1], None);
    let mut old = core(&[0, 0], Some(2));
    let task = old.message_mut("tc").unwrap();
    task.set_number("old_seccomp_mode", 0);
    let empty = message("inventory_entry", &[]);
    for (file, content, told) in [
        ("core-7.img", None, "core-7.img: not there"),
        (
            "core-7.img",
            Some(bare),
            "core-7.img: message 0: it has no credentials",
        ),
        (
            "core-7.img",
            Some(three),
            "a set of capabilities has not two words",
        ),
        (
            "core-1.img",
            Some(old),
            "core-1.img: message 0: it has two seccomp modes",
        ),
        (
            "inventory.img",
            Some(empty),
            "which namespaces are the host's",
        ),
    ] {
        let mut files = files();
        match content {
            Some(content) => files.insert(file.into(), image(file, &[content])),
            None => files.remove(file),
        };
        let e = read_of(&files).unwrap_err().to_string();
        assert!(e.contains(told), "{e}");
    }
}

#[test]
fn a_thread_has_the_leaders_filters_where_these_go_to_all() {
    for (filters, mode) in [
        (vec![vec![("prev", 1), ("flags", 1)], vec![("flags", 1)]], 2),
        (vec![vec![("prev", 1), ("flags", 1)], vec![("flags", 0)]], 0),
        (vec![vec![("prev", 0), ("flags", 1)]], 0),
        (vec![], 0),
    ] {
        let mut files = files();
        let thread = core(&[0, 0], None);
        files.insert("core-7.img".into(), image("core-7.img", &[thread]));
        let mut seccomp = message("seccomp_entry", &[]);
        for filter in filters {
            seccomp.push("seccomp_filters", message("seccomp_filter", &filter));
        }
        files.insert("seccomp.img".into(), image("seccomp.img", &[seccomp]));
        assert_eq!(read_of(&files).unwrap().threads[1].seccomp, mode);
    }
}

proptest! {
    #[test]
    fn any_bytes(which in 0usize..6, at in 0usize..200, byte in any::<u8>(), cut in 0usize..200) {
        let mut files = files();
        let name = files.keys().nth(which).unwrap().clone();
        let content = files.get_mut(&name).unwrap();
        let length = content.len();
        content[at % length] = byte;
        let _ = read_of(&files);
        files.get_mut(&name).unwrap().truncate(cut);
        let _ = read_of(&files);
    }
}
