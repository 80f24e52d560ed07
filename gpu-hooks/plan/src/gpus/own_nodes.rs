//! Finds device nodes that a runtime binds into a container by itself.
//!
//! Where a container is in a user namespace of its own, or the runtime in one, no node can be made. Then runc and crun
//! bind the host's: those of `linux.devices` and six that every container has. runc declares them external to CRIU, at
//! a checkpoint and at a restore; crun declares none, and CRIU then fails on them ("doesn't have a proper root mount").
//! So both operations declare the bound nodes.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use cryopod_host::files::{Host, split_rdev};
use cryopod_host::mountinfo;
use cryopod_host::mountinfo::declarable;
use cryopod_host::spec::Spec;

/// The nodes that the runtimes put into every container.
const DEFAULT: [&str; 6] = [
    "/dev/null",
    "/dev/zero",
    "/dev/full",
    "/dev/tty",
    "/dev/random",
    "/dev/urandom",
];

/// Returns true if the container is in a user namespace of its own, or this process in one.
pub fn in_user_namespace(host: &Host, spec: &Spec) -> bool {
    let namespaces = spec.json().pointer("/linux/namespaces");
    let mut namespaces = namespaces.and_then(|n| n.as_array()).into_iter().flatten();
    let own = namespaces.any(|n| n.get("type").is_some_and(|t| t == "user"));
    // "0 0 4294967295": all ids, as they are outside of any user namespace.
    let map = host.text("/proc/self/uid_map").unwrap_or_default();
    let map: Vec<&str> = map.split_whitespace().collect();
    own || !map.is_empty() && map != ["0", "0", "4294967295"]
}

/// Paths at which the runtime binds nodes of the host under the same name; empty where it makes nodes.
pub fn paths(host: &Host, spec: &Spec) -> Vec<PathBuf> {
    if !in_user_namespace(host, spec) {
        return Vec::new();
    }
    let devices = spec.devices();
    let named = devices.iter().map(|d| d.path().clone());
    let mut all: Vec<PathBuf> = DEFAULT.iter().map(PathBuf::from).chain(named).collect();
    all.sort();
    all.dedup();
    all.retain(|p| declarable(&p.to_string_lossy()).is_ok());
    all
}

/// Returns true if the container with init process `init` has the host's node of that name at `point`.
pub(crate) fn bound(host: &Host, init: i32, paths: &[PathBuf], point: &Path) -> bool {
    let number = |path: &Path| {
        let meta = fs::symlink_metadata(path).ok()?;
        let char_device = meta.file_type().is_char_device();
        char_device.then(|| split_rdev(meta.rdev()))
    };
    let inside = host.path(format!("/proc/{init}/root{}", point.display()));
    let there = number(&inside);
    paths.iter().any(|p| p == point) && there.is_some() && there == host.char_device(point)
}

/// The nodes that are bound in the container with init process `init`.
pub fn found(host: &Host, spec: &Spec, init: i32) -> Vec<PathBuf> {
    let paths = paths(host, spec);
    if paths.is_empty() {
        return paths;
    }
    let points = mountinfo::of(host, &init.to_string()).into_iter();
    let points = points.map(|m| m.point);
    points.filter(|p| bound(host, init, &paths, p)).collect()
}
