//! Checks the open files in `files.img`, and the deleted ones in `ghost-file-*.img`. Gives CUDA's sockets names of their
//! own.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, Hasher, RandomState};

use cryopod_archive::criu::message::Message;

use super::opened::{self, LostFile, OUTSIDE};
use super::{CheckedImages, Subject};
use crate::security::ceiling::CredentialsCeiling;

const NAME: &str = "files.img";
/// What CUDA's library calls the socket of each process, before the inode of its PID namespace and its process id (driver
/// 580). A restored process has another PID namespace, so nobody finds the socket by this name any more.
const OF_CUDA: &[u8] = b"\0cuda-uvmfd-";
/// CRIU's numbers of kinds of sockets (`SOCK_RAW`, `SOCK_DGRAM`).
const RAW: u32 = 3;
const DATAGRAM: u32 = 2;
/// Flags of `open` that no open file has.
const ONCE: i32 = libc::O_CREAT | libc::O_EXCL | libc::O_TRUNC;
/// How the name of a link begins by which CRIU finds a file that has lost its own. CRIU removes it.
const LINK: &str = "link_remap.";

pub fn check(
    images: &CheckedImages,
    subject: Subject<'_>,
    ceiling: &CredentialsCeiling,
) -> Vec<String> {
    let rights = SocketRights {
        ceiling,
        first_port: subject.facts.first_port,
    };
    let mut told = Vec::new();
    for file in images.messages(NAME) {
        let owner = file.all_messages().find_map(|m| m.message("fown"));
        let what = wrong_file(file, ceiling)
            .or_else(|| rights.wrong(file))
            .or_else(|| wrong_owner(owner?, ceiling));
        told.extend(what.map(|what| format!("{NAME}: {what}")));
    }
    told.extend(removed(images));
    told.extend(no_text(images));
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

/// Returns the files that CRIU would remove at the end, and has not made.
fn removed(images: &CheckedImages) -> Vec<String> {
    let links = opened::lost(images).into_values();
    let links = links.filter_map(|lost| match lost {
        LostFile::Link(link) => Some(link),
        _ => None,
    });
    let links: BTreeSet<u64> = links.collect();
    let files = images
        .messages(NAME)
        .iter()
        .filter_map(|m| m.message("reg"));
    let links = files.filter(|f| f.number("id").is_some_and(|id| links.contains(&id)));
    let names = links.filter_map(|f| f.text("name"));
    let others = names.filter(|path| {
        let name = path.rsplit('/').next().unwrap_or_default();
        let number = name.strip_prefix(LINK).unwrap_or_default();
        number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit())
    });
    others
        .map(|path| format!("{NAME}: {path:?}, which CRIU would remove, is no link of CRIU's"))
        .collect()
}

/// Returns names that are compared with paths, and are other bytes than what is compared.
fn no_text(images: &CheckedImages) -> Vec<String> {
    let lost = opened::lost(images);
    let is_lost = |file: &Message| {
        let links = lost.values().filter_map(|lost| match lost {
            LostFile::Link(link) => Some(*link),
            _ => None,
        });
        let id = file.number("id").unwrap_or(0);
        lost.contains_key(&id) || links.into_iter().any(|link| link == id)
    };
    let mut told = Vec::new();
    for file in images.messages(NAME) {
        let names = [
            file.message("reg")
                .filter(|f| is_lost(f))
                .and_then(|f| f.bytes("name")),
            file.message("usk")
                .and_then(|s| s.bytes("name"))
                .filter(|n| n.first() != Some(&0)),
            file.message("usk").and_then(|s| s.bytes("name_dir")),
        ];
        let watches = file
            .message("ify")
            .into_iter()
            .flat_map(|group| group.messages("wd"));
        let watched = watches.filter_map(|watch| watch.message("f_handle")?.bytes("path"));
        let mut names = names.into_iter().flatten().chain(watched);
        if names.any(|name| std::str::from_utf8(name).is_err()) {
            told.push(format!(
                "{NAME}: a path that is no UTF-8, of a file that CRIU makes, removes or watches"
            ));
        }
        let name = file.message("reg").and_then(|f| f.bytes("name"));
        if name.is_some_and(|name| name.len() >= libc::PATH_MAX.unsigned_abs() as usize) {
            told.push(format!(
                "{NAME}: a path that is longer than the kernel takes"
            ));
        }
    }
    told
}

/// The kernel takes the owner's rights where it sends signals about a file.
fn wrong_owner(owner: &Message, ceiling: &CredentialsCeiling) -> Option<String> {
    let number = |field| owner.u32(field).unwrap_or(0);
    let (spec, _) = ceiling.ids();
    let other = [number("uid"), number("euid")]
        .into_iter()
        .find(|uid| *uid != spec);
    let other = other.filter(|_| number("pid") != 0 && !ceiling.has("SETUID"))?;
    Some(format!(
        "signals about a file are sent with the rights of user {other}, and the spec says {spec}"
    ))
}

/// What a process needs for a socket besides the socket.
struct SocketRights<'a> {
    ceiling: &'a CredentialsCeiling,
    /// The first port that needs no capability.
    first_port: u64,
}

impl SocketRights<'_> {
    fn wrong(&self, file: &Message) -> Option<String> {
        /// Protocols of netlink whose groups anybody may join: routes, SELinux, devices, the generic one.
        const ANYBODYS: [u64; 4] = [0, 7, 15, 16];
        let sockets = ["isk", "usk", "nlsk", "psk"];
        let (kind, socket) = sockets
            .into_iter()
            .find_map(|s| Some((s, file.message(s)?)))?;
        let number = |field| socket.number(field).unwrap_or(0);
        let option = |field| socket.message("opts").and_then(|o| o.number(field));
        let port = number("src_port");
        let joins = socket.numbers("groups").any(|group| group != 0);
        let rules = [
            (kind == "psk", "a packet socket", "NET_RAW"),
            (
                kind == "isk" && socket.u32("type") == Some(RAW),
                "a raw socket",
                "NET_RAW",
            ),
            (
                kind == "isk" && (1..self.first_port).contains(&port),
                "a socket with a privileged port",
                "NET_BIND_SERVICE",
            ),
            (
                kind == "nlsk" && joins && !ANYBODYS.contains(&number("protocol")),
                "a netlink socket with groups",
                "NET_ADMIN",
            ),
            (
                option("so_mark").unwrap_or(0) != 0,
                "a socket with a mark",
                "NET_ADMIN",
            ),
            (
                option("so_priority").unwrap_or(0) > 6,
                "a socket with a high priority",
                "NET_ADMIN",
            ),
        ];
        let mut broken = rules.iter().filter(|(is_so, ..)| *is_so);
        broken.find_map(|(_, what, capability)| needs(self.ceiling, what, capability))
    }
}

fn needs(ceiling: &CredentialsCeiling, what: &str, capability: &str) -> Option<String> {
    (!ceiling.has(capability)).then(|| {
        format!("{what}, for which a process needs CAP_{capability}, and the spec does not give it")
    })
}

fn wrong_file(file: &Message, ceiling: &CredentialsCeiling) -> Option<String> {
    let needs = |what, capability| needs(ceiling, what, capability);
    if let Some(file) = file.message("reg") {
        let name = file.text("name").unwrap_or_default();
        if file.u32("flags").unwrap_or(0).cast_signed() & ONCE != 0 {
            return Some(format!("the file {name:?} is to be made or emptied"));
        }
        let plain = name.starts_with('/') && name.split('/').all(|n| !matches!(n, "." | ".."));
        if !plain {
            return Some(format!("the file {name:?} has no plain path"));
        }
    }
    if file.has("bpf") {
        return Some("a BPF map".into());
    }
    if file.has("tunf") {
        return needs("a tun device", "NET_ADMIN");
    }
    if file.has("ffy") {
        return needs("a fanotify group", "SYS_ADMIN");
    }
    if let Some(socket) = file.message("usk")
        && socket.number("uflags").unwrap_or(0) & OUTSIDE != 0
        && socket.u32("type") != Some(DATAGRAM)
    {
        // CRIU would connect as root, and no checkpoint of cryopod's has one.
        return Some("a connection to a process outside of the container".into());
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
    // CRIU would make the next deleted file through it.
    if kind == libc::S_IFLNK {
        return Some("a deleted link".into());
    }
    if permissions & 0o6000 != 0 && kind != libc::S_IFDIR && !ceiling.has("SETUID") {
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
