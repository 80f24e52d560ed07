//! Detects mounts of the container's own whose file system CRIU cannot make anew (`unsupported id`, mount.c).

use cryopod_archive::container::surroundings::ForeignMount;

use crate::refusal::Refusal;
use cryopod_host::mountinfo::Mount;
use cryopod_host::spec::Spec;

/// The file systems that CRIU mounts again (filesystems.c).
const MADE: [&str; 20] = [
    "proc",
    "sysfs",
    "devtmpfs",
    "binfmt_misc",
    "tmpfs",
    "devpts",
    "simfs",
    "btrfs",
    "pstore",
    "mqueue",
    "securityfs",
    "fusectl",
    "debugfs",
    "tracefs",
    "cgroup",
    "cgroup2",
    "aufs",
    "fuse",
    "overlay",
    "autofs",
];

/// Returns whole file systems among `mounts`, those of the init process, that CRIU does not know. Leaves out those
/// bound from the host, by the spec or as `foreign` ones, which CRIU does not dump.
pub(crate) fn refusals(mounts: &[Mount], spec: &Spec, foreign: &[ForeignMount]) -> Vec<Refusal> {
    let bound = |mount: &Mount| {
        let by_spec = spec.mounts().iter().any(|m| {
            let options = m.options().iter().flatten();
            let bind = m.typ().as_deref() == Some("bind")
                || options.into_iter().any(|o| o == "bind" || o == "rbind");
            // Another may come with a bind mount, below it.
            bind && mount.point.starts_with(m.destination())
        });
        by_spec
            || foreign
                .iter()
                .any(|f| mount.point == std::path::Path::new(&f.path))
    };
    // Of directories on the host, which the engine removes with the container (podman's volumes with `:O`, images).
    let of_spec = |mount: &Mount| {
        let mut all = spec.mounts().into_iter();
        all.any(|m| m.typ().as_deref() == Some("overlay") && *m.destination() == mount.point)
    };
    let overlays = mounts.iter().filter(|m| of_spec(m)).map(|m| Refusal::new(
        format!(
            "the mount {} is an overlay of directories on the host, which CRIU cannot mount again",
            m.point.display()
        ),
        "use a volume without :O, or a copy of the image's files in one",
    ));
    let made = mounts
        .iter()
        .filter(|m| m.root == std::path::Path::new("/") && m.point != std::path::Path::new("/"))
        .filter(|m| !MADE.contains(&m.fs_type.as_str()) && !bound(m))
        .map(|m| Refusal::new(
            format!(
                "the mount {} is of a file system of the container's own that CRIU cannot make anew ({})",
                m.point.display(),
                m.fs_type
            ),
            "unmount it in the container, or use a tmpfs or a volume there",
        ));
    overlays.chain(made).collect()
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::texts;
    use super::*;
    use cryopod_archive::container::surroundings::MountKind;
    use serde_json::json;

    fn mount(point: &str, fs_type: &str, root: &str) -> Mount {
        Mount {
            id: 7,
            device: "0:9".into(),
            root: root.into(),
            point: point.into(),
            options: vec![],
            fs_type: fs_type.into(),
        }
    }

    #[test]
    fn only_those_that_criu_would_have_to_make() {
        let spec = Spec::from_json(json!({"mounts": [
            {"destination": "/data", "type": "bind", "source": "/srv", "options": ["rbind"]},
            {"destination": "/huge", "type": "hugetlbfs", "source": "none"},
            {"destination": "/over", "type": "overlay", "source": "overlay"},
        ]}));
        let firmware = "/usr/lib/firmware";
        let foreign = [ForeignMount::new(firmware, MountKind::Directory, firmware)];
        let mounts = [
            mount("/", "ext4", "/"),
            mount("/proc", "proc", "/"),
            mount("/tmp", "tmpfs", "/"),
            mount("/data", "xfs", "/"),
            mount("/data/below", "nfs4", "/"),
            mount("/usr/lib/firmware", "ext4", "/"),
            mount("/part", "ext4", "/of/it"),
            mount("/huge", "hugetlbfs", "/"),
            mount("/r", "ramfs", "/"),
            mount("/over", "overlay", "/"),
            mount("/in/it", "overlay", "/"),
        ];
        let said = texts(&refusals(&mounts, &spec, &foreign));
        assert_eq!(said.len(), 3, "{said:?}");
        assert!(
            said[0].contains("/over is an overlay of directories on the host"),
            "{said:?}"
        );
        assert!(
            said[1].contains("/huge") && said[1].contains("(hugetlbfs)"),
            "{said:?}"
        );
        assert!(said[2].contains("/r is of a file system"), "{said:?}");
    }
}
