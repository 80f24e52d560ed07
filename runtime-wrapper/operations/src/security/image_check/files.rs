//! Checks the open files in `files.img`, and the deleted ones in `ghost-file-*.img`. Gives CUDA's sockets names of their
//! own.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};

use cryopod_archive::criu::message::Message;

use super::{CheckedImages, Subject};
use crate::security::ceiling::CredentialsCeiling;

const NAME: &str = "files.img";
/// What CUDA's library calls the socket of each process, before the inode of its PID namespace and its process id (driver
/// 580). A restored process has another PID namespace, so nobody finds the socket by this name any more.
const OF_CUDA: &[u8] = b"\0cuda-uvmfd-";
/// CRIU's numbers of kinds of sockets (`SOCK_RAW`, `SOCK_DGRAM`).
const RAW: u32 = 3;
const DATAGRAM: u32 = 2;
/// CRIU's mark of a socket of another process (`USK_EXTERN`).
const OUTSIDE: u64 = 1;

pub fn check(
    images: &CheckedImages,
    subject: Subject<'_>,
    ceiling: &CredentialsCeiling,
) -> Vec<String> {
    let files = images.messages(NAME).iter();
    let mut told: Vec<String> = files
        .filter_map(|file| Some(format!("{NAME}: {}", wrong_file(file, ceiling)?)))
        .collect();
    for (name, messages) in &images.with_data {
        if !name.starts_with("ghost-file-") {
            continue;
        }
        // The first message; the others say where its content lies.
        let first = messages.first();
        told.extend(first.and_then(|ghost| {
            Some(format!(
                "{name}: {}",
                wrong_deleted(ghost, subject, ceiling)?
            ))
        }));
    }
    if !ceiling.has("SYS_CHROOT") {
        told.extend(roots(images));
    }
    told
}

/// Gives CUDA's sockets names that nothing else has: copies of one checkpoint may share a network namespace, the host's
/// or a pod's, and the second one could not be restored (`Address already in use`).
pub fn settle(images: &mut CheckedImages) {
    for file in images.messages_mut(NAME) {
        let Some(socket) = file.message_mut("usk") else {
            continue;
        };
        let name = socket.bytes("name").and_then(another_name);
        if let Some(name) = name {
            socket.set_bytes("name", &name);
        }
    }
}

/// Returns a name of the same length with another number; `None`: it is not CUDA's.
fn another_name(name: &[u8]) -> Option<Vec<u8>> {
    let rest = name.strip_prefix(OF_CUDA)?;
    let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
    let random = RandomState::new().build_hasher().finish();
    let number = format!("{random:020}").into_bytes().into_iter().rev();
    let mut name = name.to_vec();
    let at = name.iter_mut().skip(OF_CUDA.len()).take(digits);
    at.zip(number.cycle()).for_each(|(old, new)| *old = new);
    Some(name)
}

/// Returns the processes whose root directory is another one than the container's.
fn roots(images: &CheckedImages) -> impl Iterator<Item = String> {
    let files = images.messages(NAME).iter();
    let is_root = |file: &&Message| {
        let name = file.message("reg").and_then(|f| f.text("name"));
        name.as_deref() == Some("/")
    };
    let roots: BTreeSet<u64> = files
        .filter(is_root)
        .filter_map(|file| file.number("id"))
        .collect();
    let others = images.numbered("fs-").filter(move |(_, messages)| {
        let root = messages.first().and_then(|m| m.number("root_id"));
        root.is_some_and(|id| !roots.contains(&id))
    });
    others.map(|(name, _)| {
        format!("{name}: a root directory of its own, for which a process needs CAP_SYS_CHROOT, and the spec does not give it")
    })
}

fn wrong_file(file: &Message, ceiling: &CredentialsCeiling) -> Option<String> {
    let needs = |what: &str, capability: &str| {
        (!ceiling.has(capability)).then(|| {
            format!(
                "{what}, for which a process needs CAP_{capability}, and the spec does not give it"
            )
        })
    };
    if let Some(name) = file.message("reg").and_then(|f| f.text("name")) {
        let plain = name.starts_with('/') && name.split('/').all(|n| !matches!(n, "." | ".."));
        if !plain {
            return Some(format!("the file {name:?} has no plain path"));
        }
    }
    if file.has("bpf") {
        return Some("a BPF map".into());
    }
    if file.has("psk") {
        return needs("a packet socket", "NET_RAW");
    }
    if file.has("tunf") {
        return needs("a tun device", "NET_ADMIN");
    }
    if file.has("ffy") {
        return needs("a fanotify group", "SYS_ADMIN");
    }
    if let Some(socket) = file.message("isk")
        && socket.u32("type") == Some(RAW)
    {
        return needs("a raw socket", "NET_RAW");
    }
    if let Some(socket) = file.message("usk")
        && socket.number("uflags").unwrap_or(0) & OUTSIDE != 0
        && socket.u32("type") != Some(DATAGRAM)
    {
        // CRIU would connect as root, and no checkpoint of cryopod's has one.
        return Some("a connection to a process outside of the container".into());
    }
    let options = ["isk", "usk", "nlsk", "psk"];
    let mut options = options
        .iter()
        .filter_map(|s| file.message(s)?.message("opts"));
    if options.any(|o| o.number("so_mark").unwrap_or(0) != 0) {
        return needs("a socket with a mark", "NET_ADMIN");
    }
    None
}

fn wrong_deleted(
    file: &Message,
    subject: Subject<'_>,
    ceiling: &CredentialsCeiling,
) -> Option<String> {
    let mode = file.u32("mode")?;
    let (kind, permissions) = (mode & libc::S_IFMT, mode & 0o7777);
    if matches!(kind, libc::S_IFCHR | libc::S_IFBLK) {
        let device = file.number("rdev").unwrap_or(0);
        let (major, minor) = (libc::major(device), libc::minor(device));
        let is_given = kind == libc::S_IFCHR && subject.devices.contains(&(major, minor));
        return (!is_given).then(|| {
            format!("a deleted device node {major}:{minor}, which the spec does not give")
        });
    }
    if permissions & 0o6000 != 0 && kind == libc::S_IFREG && !ceiling.has("SETUID") {
        return Some("a deleted program that gives others its user or group".into());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cudas_sockets_get_other_names() {
        let name = b"\0cuda-uvmfd-4026532345-17\0\0";
        let (one, two) = (another_name(name).unwrap(), another_name(name).unwrap());
        assert!(one != two && one != name);
        assert_eq!(one.len(), name.len());
        assert!(one.starts_with(OF_CUDA) && one.ends_with(b"-17\0\0"));
        assert_eq!(
            another_name(b"\0cuda-uvmfd--1").unwrap(),
            b"\0cuda-uvmfd--1"
        );
        assert!(another_name(b"\0tmp/nccl-socket-0-1").is_none());
        assert!(another_name(b"/run/cuda-uvmfd-1").is_none());
    }
}
