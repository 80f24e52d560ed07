//! Closes in `mountpoints-*.img` what a runtime closes by itself: the cgroup file systems, and the spec's masked and
//! read-only paths. Whoever can write to a cgroup file system gives itself devices.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cryopod_archive::criu::message::Message;
use cryopod_host::spec::Spec;
use serde_json::Value;

use super::CheckedImages;
use super::mounts::PREFIX;
use crate::security::ceiling::CredentialsCeiling;
use crate::security::mount_limits::limits;

/// CRIU's numbers of the file systems `cgroup` and `cgroup2`.
const CGROUP: [u32; 2] = [12, 23];
const READ_ONLY: u64 = libc::MS_RDONLY;
/// A cgroup file system has no programs and no devices.
const WITHOUT_PROGRAMS: u64 = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;

pub fn settle(images: &mut CheckedImages, spec: &Spec, ceiling: &CredentialsCeiling) {
    // Such a container can open all of it by itself.
    if ceiling.has("SYS_ADMIN") {
        return;
    }
    let pointers = ["/linux/readonlyPaths", "/linux/maskedPaths"];
    let lists = pointers.map(|p| spec.json().pointer(p).and_then(Value::as_array));
    let paths = lists.into_iter().flatten().flatten();
    let mounted: Vec<PathBuf> = spec
        .mounts()
        .iter()
        .map(|m| m.destination().clone())
        .collect();
    let closed = paths.filter_map(Value::as_str);
    let closed: BTreeSet<&str> = closed
        .filter(|p| !mounted.iter().any(|m| m.as_path() == Path::new(p)))
        .collect();
    let of_cgroups = match cgroups_are_writable(spec) {
        true => WITHOUT_PROGRAMS,
        false => WITHOUT_PROGRAMS | READ_ONLY,
    };
    for name in images.names(PREFIX) {
        for mount in images.messages_mut(&name) {
            if mount.u32("fstype").is_some_and(|t| CGROUP.contains(&t)) {
                close(mount, of_cgroups);
                continue;
            }
            let at = mount.text("mountpoint").unwrap_or_default();
            if closed.contains(at.strip_prefix('.').unwrap_or(&at)) {
                // A device such as `/dev/null`, over a masked file, is written to all the same.
                close(mount, libc::MS_NOSUID | READ_ONLY);
            } else if is_device(&at, mount, &mounted) {
                close(mount, libc::MS_NOSUID | libc::MS_NOEXEC);
            }
        }
    }
}

/// Returns true for a device node of the host's, which runtimes bind in a user namespace.
fn is_device(at: &str, mount: &Message, of_spec: &[PathBuf]) -> bool {
    let at = Path::new(at.strip_prefix('.').unwrap_or(at));
    let is_external = mount.text("ext_key").is_some_and(|key| !key.is_empty());
    is_external && at.starts_with("/dev") && !of_spec.iter().any(|m| m == at)
}

fn close(mount: &mut Message, flags: u64) {
    let has = mount.number("flags").unwrap_or(0);
    mount.set_number("flags", has | flags);
}

/// Returns true if the spec has a cgroup mount without `ro`.
fn cgroups_are_writable(spec: &Spec) -> bool {
    let list = spec.json().get("mounts").and_then(Value::as_array);
    list.into_iter().flatten().any(|mount| {
        let text = |key: &str| mount.get(key).and_then(Value::as_str);
        let options = mount.get("options").and_then(Value::as_array);
        let options = options.into_iter().flatten().filter_map(Value::as_str);
        let options: Vec<String> = options.map(str::to_owned).collect();
        text("type").is_some_and(|t| t.starts_with("cgroup"))
            && !limits(&options).any(|limit| limit.option == "ro")
    })
}
