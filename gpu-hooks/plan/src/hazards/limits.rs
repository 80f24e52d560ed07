//! Detects processes of other users where this host keeps CAP_SYS_RESOURCE from CRIU: the kernel then does not let CRIU
//! read and set their resource limits (`prlimit`), and the dump fails after the freeze.

use crate::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::processes::Scan;
use cryopod_host::processes::stat::StatusFile;

const CAP_SYS_RESOURCE: u32 = 24;

/// Returns true if CRIU, which this process starts, may set other users' limits.
pub fn sets_others_limits(host: &Host) -> bool {
    let set = StatusFile::read(host, "self").set("CapEff");
    // Unknown: CRIU decides.
    set.is_none_or(|set| set >> CAP_SYS_RESOURCE & 1 != 0)
}

pub(super) fn limits(scan: &Scan, host: &Host) -> Vec<Refusal> {
    if sets_others_limits(host) {
        return Vec::new();
    }
    let own =
        ids(&StatusFile::read(host, "self")).and_then(|ids| Some((*ids.first()?, *ids.get(4)?)));
    let Some((uid, gid)) = own else {
        return Vec::new();
    };
    // CRIU has every capability over a user namespace below its own.
    let namespace = |pid: &str| std::fs::read_link(host.path(format!("/proc/{pid}/ns/user"))).ok();
    let ours = namespace("self");
    let others = |pid: i32| {
        if namespace(&pid.to_string()) != ours {
            return false;
        }
        let ids = ids(&StatusFile::read(host, pid)).unwrap_or_default();
        let (uids, gids) = ids.split_at(ids.len() / 2);
        // The kernel compares real, effective and saved ids.
        uids.iter().take(3).any(|id| *id != uid) || gids.iter().take(3).any(|id| *id != gid)
    };
    let found = scan
        .processes
        .iter()
        .filter(|p| p.state != 'Z' && others(p.pid));
    found
        .map(|process| Refusal::of(
            process,
            "runs as another user, and this host has no CAP_SYS_RESOURCE: CRIU may not read its resource limits",
            "give the engine CAP_SYS_RESOURCE (systemd: CapabilityBoundingSet=), or run the container's processes as root",
        ))
        .collect()
}

/// The four user ids and the four group ids.
fn ids(status: &StatusFile) -> Option<Vec<u32>> {
    let ids = [status.numbers("Uid")?, status.numbers("Gid")?].concat();
    (ids.len() == 8).then_some(ids)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_host::processes::Process;
    use cryopod_test_files::TestFiles;

    #[test]
    fn other_users_need_the_capability() {
        let dir = tempfile::tempdir().unwrap();
        let status = |who: &str, uid: &str, gid: &str, caps: &str| {
            let proc = dir.path().join("proc").join(who);
            let text = format!("Name:\tx\nUid:\t{uid}\nGid:\t{gid}\nCapEff:\t{caps}\n");
            proc.put("status", text);
        };
        let root = "0\t0\t0\t0";
        status("10", root, root, "0");
        status("11", "1000\t1000\t1000\t1000", root, "0");
        status("12", root, "0\t0\t5\t0", "0");
        status("13", "0\t1000\t0\t1000", root, "0");
        let processes = [10, 11, 12, 13].map(|pid| Process {
            pid,
            ..Process::default()
        });
        let scan = Scan {
            processes: processes.to_vec(),
        };
        let host = Host::at(dir.path());
        let found = |caps: &str| {
            status("self", root, root, caps);
            let found = limits(&scan, &host);
            let pids = found.iter().filter_map(|r| Some(r.process.as_ref()?.0));
            pids.collect::<Vec<i32>>()
        };
        assert_eq!(found("000001fffeffffff"), [11, 12, 13]);
        assert!(found("000001ffffffffff").is_empty());
    }
}
