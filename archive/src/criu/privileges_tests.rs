use super::*;
use crate::criu::mounts::fs_type;
use crate::criu::proto::{COMMON_MAGIC, MOUNTS_MAGIC, MntEntry, TaskCoreEntry, ThreadCore};
use proptest::prelude::*;
use std::collections::BTreeMap;

type Files = BTreeMap<String, Vec<u8>>;

fn image<M: Message>(magic: &[u32], all: &[M]) -> Vec<u8> {
    let mut bytes: Vec<u8> = magic.iter().flat_map(|m| m.to_le_bytes()).collect();
    for message in all {
        let body = message.encode_to_vec();
        bytes.extend(u32::try_from(body.len()).unwrap().to_le_bytes());
        bytes.extend(body);
    }
    bytes
}

fn ids(base: u32) -> Ids {
    let id = |n: u32| Some(base + n);
    Ids {
        pid: id(1),
        net: id(2),
        ipc: id(3),
        uts: id(4),
        mnt: id(5),
        user: Some(9),
        cgroup: id(7),
        time: None,
    }
}

fn core(capabilities: [u32; 2]) -> CoreEntry {
    let set = capabilities.to_vec();
    CoreEntry {
        mtype: 1,
        tc: Some(TaskCoreEntry {
            task_state: 1,
            comm: "sh".into(),
            old_seccomp_mode: None,
        }),
        thread_core: Some(ThreadCore {
            creds: Some(Creds {
                uid: 1000,
                groups: vec![7],
                cap_inh: vec![0, 0],
                cap_prm: set.clone(),
                cap_eff: set.clone(),
                cap_bnd: set,
                lsm_profile: None,
                no_new_privs: Some(1),
                cap_amb: vec![],
                ..Creds::default()
            }),
            seccomp_mode: Some(2),
            seccomp_filter: Some(0),
        }),
    }
}

/// A container of one process with two threads.
fn files() -> Files {
    let common = |magic| [COMMON_MAGIC, magic];
    let root_ids = Some(ids(100));
    let tree = PstreeEntry {
        pid: 1,
        ppid: 0,
        threads: vec![1, 7],
    };
    let mount = MntEntry {
        fstype: 5,
        root_dev: 60,
        flags: 1,
        mountpoint: "./dev/shm".into(),
        sb_flags: Some(2),
        ..MntEntry::default()
    };
    [
        (
            "inventory.img",
            image(
                &[INVENTORY_MAGIC],
                &[InventoryEntry {
                    root_ids,
                    ..InventoryEntry::default()
                }],
            ),
        ),
        ("pstree.img", image(&common(PSTREE_MAGIC), &[tree])),
        ("ids-1.img", image(&common(IDS_MAGIC), &[ids(0)])),
        ("core-1.img", image(&common(CORE_MAGIC), &[core([5, 1])])),
        ("core-7.img", image(&common(CORE_MAGIC), &[core([2, 0])])),
        ("mountpoints-5.img", image(&common(MOUNTS_MAGIC), &[mount])),
    ]
    .map(|(name, content)| (name.to_owned(), content))
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
fn what_would_give_a_process_crius_own_credentials_is_an_error() {
    for (change, told) in [
        (0, "core-7.img: not there"),
        (1, "core-7.img: message 0: it has no credentials"),
        (2, "a set of capabilities has not two words"),
        (3, "which namespaces are the host's"),
    ] {
        let mut files = files();
        let with =
            |core: &CoreEntry| image(&[COMMON_MAGIC, CORE_MAGIC], std::slice::from_ref(core));
        let mut one = core([0, 0]);
        match change {
            0 => drop(files.remove("core-7.img")),
            1 => {
                one.thread_core = None;
                files.insert("core-7.img".into(), with(&one));
            }
            2 => {
                let creds = one.thread_core.as_mut().unwrap().creds.as_mut().unwrap();
                creds.cap_eff.push(1);
                files.insert("core-7.img".into(), with(&one));
            }
            _ => {
                let empty = image(&[INVENTORY_MAGIC], &[InventoryEntry::default()]);
                files.insert("inventory.img".into(), empty);
            }
        }
        let e = read_of(&files).unwrap_err().to_string();
        assert!(e.contains(told), "{e}");
    }
}

#[test]
fn a_thread_has_the_leaders_filters_where_these_go_to_all() {
    let filter = |prev, flags| Filter { prev, flags };
    for (filters, mode) in [
        (vec![filter(Some(1), 1), filter(None, 1)], 2),
        (vec![filter(Some(1), 1), filter(None, 0)], 0),
        (vec![filter(Some(0), 1)], 0),
        (vec![], 0),
    ] {
        let mut files = files();
        let mut thread = core([0, 0]);
        thread.thread_core.as_mut().unwrap().seccomp_mode = None;
        files.insert(
            "core-7.img".into(),
            image(&[COMMON_MAGIC, CORE_MAGIC], &[thread]),
        );
        let seccomp = Seccomp { filters };
        files.insert(
            "seccomp.img".into(),
            image(&[COMMON_MAGIC, SECCOMP_MAGIC], &[seccomp]),
        );
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
