//! Gives the mounts of a restored container the flags that the images say: `ro`, `nosuid`, `nodev`, `noexec`, `nosymfollow`.
//! The root is `ro` where the spec says so: runc 1.1 and crun 1.21 mount it anew for CRIU, without (podman's `--read-only`).
//!
//! CRIU mounts what shows a part of another mount as a copy of that one, and takes the flags for set where both have the
//! same. A copy of an external mount does not have them: of `-v /srv:/a:ro -v /srv/x:/b:ro`, `/b` came back writable (CRIU
//! 4.1 and 4.2).

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use cryopod_archive::criu::mounts::CriuMount;
use cryopod_host::detached::{limit, within};
use cryopod_host::files::Host;
use cryopod_host::mountinfo::{self, Mount};
use cryopod_host::spec::Spec;
use nix::fcntl::OFlag;
use serde_json::Value;

use crate::error::Error;
use crate::security::mount_limits::of_flags;
use cryopod_host::files::open_in_root;

/// A container has as many processes as it likes.
const MAX_PROCESSES: usize = 100_000;

/// What the images say of the mounts on one path.
#[derive(Debug, Clone, Copy)]
struct Wanted {
    /// `MS_*`, of all of them.
    flags: u32,
    /// One of them is of the host's files, or the root that the spec makes read-only.
    demanded: bool,
}

/// Sets the flags in each mount namespace of the container with this init process, whose processes do not run. Fails if
/// a mount of the host's files, or a read-only root, cannot have them.
pub fn set(host: &Host, spec: &Spec, init: i32, images: &[CriuMount]) -> Result<(), Error> {
    let mut wanted: BTreeMap<&Path, Wanted> = BTreeMap::new();
    for mount in images {
        let on_path = wanted.entry(Path::new(&mount.path)).or_insert(Wanted {
            flags: u32::MAX,
            demanded: false,
        });
        on_path.flags &= mount.flags;
        on_path.demanded |= mount.external;
    }
    if spec.json().pointer("/root/readonly") == Some(&Value::Bool(true)) {
        let root = wanted.entry(Path::new("/"));
        let root = root.or_insert(Wanted {
            flags: 0,
            demanded: true,
        });
        root.flags |= libc::MS_RDONLY as u32;
        root.demanded = true;
    }
    let mut seen = BTreeSet::new();
    for pid in processes(host, init) {
        let namespace = host.path(format!("/proc/{pid}/ns/mnt")).read_link();
        if namespace.is_ok_and(|n| seen.insert(n)) {
            set_in(host, pid, &wanted)?;
        }
    }
    match seen.is_empty() {
        true => Err(Error::Failed(format!(
            "the init process {init}, which CRIU names, has no mounts"
        ))),
        false => Ok(()),
    }
}

fn set_in(host: &Host, pid: i32, wanted: &BTreeMap<&Path, Wanted>) -> Result<(), Error> {
    let lacking = || lacking(&mountinfo::of(host, &pid.to_string()), wanted);
    let found = lacking();
    if found.is_empty() {
        return Ok(());
    }
    let paths: BTreeMap<PathBuf, u64> = found.into_iter().map(|l| (l.path, l.attributes)).collect();
    within(pid, |root| {
        for (path, attributes) in &paths {
            let there = open_in_root(root, path, OFlag::O_PATH).map_err(std::io::Error::from);
            // Whether it has worked is looked up afterwards: the path may be another mount's.
            let _ = there.and_then(|there| limit(there.as_fd(), *attributes));
        }
        Ok::<_, Error>(())
    })?;
    for mount in lacking() {
        let path = mount.path.display();
        let what = format!(
            "the mount at {path} has come back without {}",
            mount.options
        );
        match mount.demanded {
            true => return Err(Error::Failed(what)),
            false => tracing::warn!("{what}"),
        }
    }
    Ok(())
}

struct Lacking {
    path: PathBuf,
    /// `MOUNT_ATTR_*`.
    attributes: u64,
    options: String,
    demanded: bool,
}

fn lacking(mounts: &[Mount], wanted: &BTreeMap<&Path, Wanted>) -> Vec<Lacking> {
    let of = |mount: &Mount| {
        let wanted = wanted.get(&*mount.point)?;
        let has = |option: &str| mount.options.iter().any(|o| o == option);
        let lacks: Vec<_> = of_flags(wanted.flags).filter(|l| !has(l.option)).collect();
        (!lacks.is_empty()).then(|| Lacking {
            path: mount.point.clone(),
            attributes: lacks.iter().fold(0, |all, l| all | l.attribute),
            options: lacks.iter().map(|l| l.option).collect::<Vec<_>>().join(","),
            demanded: wanted.demanded,
        })
    };
    mounts.iter().filter_map(of).collect()
}

/// The container's processes: this one and all that it has started.
pub fn processes(host: &Host, init: i32) -> Vec<i32> {
    let mut all = vec![init];
    let mut at = 0;
    while at < all.len() && all.len() < MAX_PROCESSES {
        let tasks = format!("/proc/{}/task", all[at]);
        for task in host.names(&tasks) {
            let children = host.text(format!("{tasks}/{task}/children"));
            let children = children.unwrap_or_default();
            all.extend(
                children
                    .split_whitespace()
                    .filter_map(|c| c.parse::<i32>().ok()),
            );
        }
        at += 1;
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;

    #[test]
    fn what_a_mount_lacks() {
        let dir = tempfile::tempdir().unwrap();
        let lines = "1 0 0:1 / /a ro,nosuid - ext4 x rw\n2 0 0:1 /x /b rw,relatime - ext4 x rw\n3 0 0:1 / /c rw - ext4 x rw\n";
        dir.put("proc/7/mountinfo", lines);
        let mounts = mountinfo::of(&Host::at(dir.path()), "7");
        let flags = |flags| Wanted {
            flags,
            demanded: true,
        };
        let wanted = BTreeMap::from([(Path::new("/a"), flags(1)), (Path::new("/b"), flags(1 | 8))]);
        let found = lacking(&mounts, &wanted);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].path, Path::new("/b"));
        assert_eq!(found[0].options, "ro,noexec");
        assert_eq!(
            found[0].attributes,
            libc::MOUNT_ATTR_RDONLY | libc::MOUNT_ATTR_NOEXEC
        );
    }

    #[test]
    fn an_init_process_that_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let said = set(&Host::at(dir.path()), &Spec::default(), 0, &[]).unwrap_err();
        assert!(said.to_string().contains("the init process 0"), "{said}");
    }

    #[test]
    fn children_of_every_thread() {
        let dir = tempfile::tempdir().unwrap();
        for (task, children) in [("1/task/1", "2 3 "), ("1/task/9", "4 "), ("4/task/4", "5 ")] {
            let task = dir.path().join("proc").join(task);
            task.put("children", children);
        }
        let mut found = processes(&Host::at(dir.path()), 1);
        found.sort_unstable();
        assert_eq!(found, [1, 2, 3, 4, 5]);
    }
}
