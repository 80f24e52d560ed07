//! Checks `cgroup.img`: which cgroups CRIU makes, what it writes into their files, and where it puts each process.
//!
//! CRIU joins the names of cgroups and of their properties to paths, and writes the properties of each cgroup that it
//! makes. The runtimes have it replace the root of each hierarchy's tree by the new container's cgroup, so that all of
//! the tree lies in there, if no name leads out of it.

use cryopod_archive::criu::message::Message;
use serde_json::Value;

use super::{CheckedImages, Subject, is_clean};

const NAME: &str = "cgroup.img";
/// Modes of a cgroup's files and directories beyond what the kernel gives them.
const FILE_MODE: u32 = 0o644;
const DIRECTORY_MODE: u32 = 0o755;

pub fn check(images: &mut CheckedImages, subject: Subject<'_>) -> Vec<String> {
    let owners = owners(subject.spec.json());
    let mut told = Vec::new();
    for message in images.messages_mut(NAME) {
        let mut roots: Vec<(String, String)> = Vec::new();
        for controller in message.messages_mut("controllers") {
            let names: Vec<String> = controller.texts("cnames").collect();
            for directory in controller.messages_mut("dirs") {
                let root = directory.text("dir_name").unwrap_or_default();
                if !root.is_empty() && !is_clean(&format!("/{root}")) {
                    told.push(format!("{NAME}: makes a cgroup {root:?}"));
                }
                roots.extend(names.iter().map(|name| (name.clone(), root.clone())));
                check_tree(directory, true, &owners, &mut told);
            }
        }
        for set in message.messages("sets") {
            told.extend(set.messages("ctls").filter_map(|of| outside(of, &roots)));
        }
    }
    told
}

/// Checks a directory and all below it.
fn check_tree(directory: &mut Message, is_root: bool, owners: &[[u64; 2]], told: &mut Vec<String>) {
    let name = directory.text("dir_name").unwrap_or_default();
    if !is_root && (name.contains('/') || matches!(&name[..], "" | "." | "..")) {
        told.push(format!("{NAME}: makes a cgroup {name:?}"));
    }
    limit_permissions(directory, "dir_perms", DIRECTORY_MODE, owners);
    for property in directory.messages_mut("properties") {
        let name = property.text("name").unwrap_or_default();
        let plain = |c: u8| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-');
        if name.starts_with('.') || name.is_empty() || !name.bytes().all(plain) {
            told.push(format!("{NAME}: has a property {name:?}"));
        }
        limit_permissions(property, "perms", FILE_MODE, owners);
    }
    for child in directory.messages_mut("children") {
        check_tree(child, false, owners, told);
    }
}

/// Leaves out an owner and a mode that a file of a cgroup does not have by itself and the container could not give it.
/// CRIU also writes some that it has never set.
fn limit_permissions(of: &mut Message, field: &str, mode: u32, owners: &[[u64; 2]]) {
    let fits = of.message(field).is_none_or(|perms| {
        let number = |name: &str| perms.number(name).unwrap_or(u64::MAX);
        let owned = |id: u64| {
            id == 0
                || owners
                    .iter()
                    .any(|[first, count]| id.checked_sub(*first).is_some_and(|at| at < *count))
        };
        let bits = perms.u32("mode").unwrap_or(u32::MAX) & 0o7777;
        bits & !mode == 0 && owned(number("uid")) && owned(number("gid"))
    });
    if !fits {
        of.remove(field);
    }
}

/// The host's ids that the container's user namespace has: first and count.
fn owners(spec: &Value) -> Vec<[u64; 2]> {
    let pointers = ["/linux/uidMappings", "/linux/gidMappings"];
    let maps = pointers
        .into_iter()
        .filter_map(|p| spec.pointer(p)?.as_array());
    let of = |m: &Value| Some([m.get("hostID")?.as_u64()?, m.get("size")?.as_u64()?]);
    maps.flatten().filter_map(of).collect()
}

/// Returns what is wrong with the cgroup of a process: it is none of those that the image makes.
fn outside(of: &Message, roots: &[(String, String)]) -> Option<String> {
    let name = of.text("name").unwrap_or_default();
    let path = of.text("path").unwrap_or_default();
    let is_below = |root: &str| {
        let rest = path.strip_prefix('/').and_then(|p| p.strip_prefix(root));
        rest.is_some_and(|r| root.is_empty() || r.is_empty() || r.starts_with('/'))
    };
    let root = roots
        .iter()
        .find(|(of, root)| *of == name && is_below(root));
    let Some((_, root)) = root.filter(|_| is_clean(&path)) else {
        return Some(format!(
            "{NAME}: puts a process into the cgroup {path:?} of {name:?}, which is outside of the container's"
        ));
    };
    // The length of the path of the cgroup namespace's root: CRIU cuts the path there.
    let root_len = root.len() as u64 + 1;
    match of.number("cgns_prefix") {
        Some(prefix) if prefix != 0 && prefix != root_len => Some(format!(
            "{NAME}: has a cgroup namespace whose root is not the container's cgroup ({path:?} of {name:?})"
        )),
        _ => None,
    }
}
