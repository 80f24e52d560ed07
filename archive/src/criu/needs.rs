//! Reads what a restore takes from its host and its container: tasks, process ids, memory, ports.

use serde::{Deserialize, Serialize};

use super::image_files::{ImageError, first_message, messages};
use super::message::Message;

const PSTREE: &str = "pstree.img";
const FILES: &str = "files.img";
const TCP: u64 = 6;
const UDP: u64 = 17;
/// The kernel's `TCP_LISTEN`.
const LISTENING: u64 = 10;
/// A mapping of huge pages, which do not count as a container's memory.
const MAP_HUGETLB: u64 = 0x40000;
/// At most so many ports are compared.
const MAX_PORTS: usize = 4096;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreNeeds {
    /// Processes and threads.
    pub tasks: u64,
    /// The highest process id.
    pub highest_pid: u64,
    /// The largest file of memory pages, in bytes: of one process, or shared. Processes may share pages of several files, so
    /// their sum could be too much. 0 if some are huge pages.
    pub memory: u64,
    /// The ports of the first process's network namespace that nobody else may have.
    pub ports: Vec<Port>,
}

/// A socket's own port, and its address in the kernel's words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    pub protocol: Protocol,
    pub number: u64,
    pub address: Vec<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    Tcp,
    Udp,
}

impl Port {
    /// Returns true if a socket with this port lets no other have that one.
    pub fn excludes(&self, other: &Self) -> bool {
        let is_any = |address: &[u64]| address.iter().all(|word| *word == 0);
        self.protocol == other.protocol
            && self.number == other.number
            && self.address.len() == other.address.len()
            && (self.address == other.address || is_any(&self.address) || is_any(&other.address))
    }
}

/// Reads the needs. `open` returns the content of an image, or `None` if there is no such file. `pages`: the
/// size of the largest file of memory pages.
///
/// # Errors
/// [`ImageError`]: an image is damaged. Errors of `open` pass through unchanged.
pub fn read<E: From<ImageError>>(
    mut open: impl FnMut(&str) -> Result<Option<Vec<u8>>, E>,
    pages: u64,
) -> Result<RestoreNeeds, E> {
    let mut needs = RestoreNeeds {
        memory: pages,
        ..RestoreNeeds::default()
    };
    let mut first = None;
    let processes = open(PSTREE)?.ok_or_else(|| ImageError::missing(PSTREE))?;
    for process in messages(PSTREE, &processes)? {
        let process = process?;
        let pid = process.number("pid").unwrap_or(0);
        first = first.or(Some(pid));
        // Older CRIUs write no thread of a zombie, which is a task.
        needs.tasks += process.numbers("threads").count().max(1) as u64;
        // CRIU 4.2 writes no thread ids of a dead one, but what its memory held.
        needs.highest_pid = needs.highest_pid.max(pid);
        if has_huge_pages(pid, &mut open)? {
            needs.memory = 0;
        }
    }
    let ids = format!("ids-{}.img", first.unwrap_or(0));
    let ids = open(&ids)?.map(|content| first_message(&ids, &content));
    let network = ids
        .transpose()?
        .flatten()
        .and_then(|i| i.number("net_ns_id"));
    let files = open(FILES)?.ok_or_else(|| ImageError::missing(FILES))?;
    for file in messages(FILES, &files)? {
        let file = file?;
        let socket = file.message("isk");
        let socket = socket.filter(|s| network.is_none() || s.number("ns_id") == network);
        let port = socket.and_then(port);
        needs
            .ports
            .extend(port.filter(|_| needs.ports.len() < MAX_PORTS));
    }
    Ok(needs)
}

/// Returns true if the process has huge pages.
fn has_huge_pages<E: From<ImageError>>(
    pid: u64,
    open: &mut impl FnMut(&str) -> Result<Option<Vec<u8>>, E>,
) -> Result<bool, E> {
    let name = format!("mm-{pid}.img");
    let mm = open(&name)?.map(|content| first_message(&name, &content));
    let mm = mm.transpose()?.flatten();
    let mut mappings = mm.iter().flat_map(|m| m.messages("vmas"));
    Ok(mappings.any(|vma| vma.number("flags").unwrap_or(0) & MAP_HUGETLB != 0))
}

/// The port of a socket that keeps it to itself.
fn port(socket: &Message) -> Option<Port> {
    let on = |option| {
        let options = socket.message("opts");
        options.and_then(|o| o.number(option)).unwrap_or(0) != 0
    };
    let number = socket.number("src_port").filter(|port| *port != 0)?;
    let protocol = match socket.number("proto")? {
        TCP if socket.number("state") == Some(LISTENING) => Protocol::Tcp,
        UDP if !on("reuseaddr") => Protocol::Udp,
        _ => return None,
    };
    (!on("so_reuseport")).then(|| Port {
        protocol,
        number,
        address: socket.numbers("src_addr").collect(),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::criu::image_files::making::{image, message};

    fn socket(numbers: &[(&str, u64)], options: &[(&str, u64)], address: &[u64]) -> Message {
        let mut socket = message("inet_sk_entry", numbers);
        socket.push("opts", message("sk_opts_entry", options));
        socket.set_numbers("src_addr", address);
        let mut file = message("file_entry", &[]);
        file.push("isk", socket);
        file
    }

    #[test]
    fn tasks_ids_pages_and_ports() {
        let mut first = message("pstree_entry", &[("pid", 1)]);
        first.set_numbers("threads", &[1, 40, 7]);
        let zombie = message("pstree_entry", &[("pid", 9)]);
        let listens = [("proto", 6), ("state", 10), ("src_port", 80), ("ns_id", 3)];
        let with = |name, value| listens.map(|(n, v)| (n, if n == name { value } else { v }));
        let files = [
            socket(&listens, &[("reuseaddr", 1)], &[0]),
            socket(&listens, &[("so_reuseport", 1)], &[0]),
            socket(&with("state", 1), &[], &[0]),
            socket(&with("src_port", 0), &[], &[0]),
            socket(&with("ns_id", 4), &[], &[0]),
            socket(&with("proto", 17), &[], &[5]),
            socket(&with("proto", 17), &[("reuseaddr", 1)], &[5]),
        ];
        let mut images: BTreeMap<String, Vec<u8>> = BTreeMap::new();
        let mut put = |name: &str, messages: &[Message]| {
            images.insert(name.to_owned(), image(name, messages));
        };
        put("pstree.img", &[first, zombie]);
        put("files.img", &files);
        put(
            "ids-1.img",
            &[message("task_kobj_ids_entry", &[("net_ns_id", 3)])],
        );
        let ask = |images: &BTreeMap<String, Vec<u8>>| {
            read::<ImageError>(|name| Ok(images.get(name).cloned()), 5000).unwrap()
        };
        let needs = ask(&images);
        assert_eq!((needs.tasks, needs.highest_pid, needs.memory), (4, 9, 5000));
        let of = |protocol, address: &[u64]| Port {
            protocol,
            number: 80,
            address: address.to_vec(),
        };
        let (tcp, udp) = (of(Protocol::Tcp, &[0]), of(Protocol::Udp, &[5]));
        assert_eq!(needs.ports, [tcp.clone(), udp.clone()]);
        assert!(tcp.excludes(&of(Protocol::Tcp, &[7])) && !tcp.excludes(&udp));
        assert!(!udp.excludes(&of(Protocol::Udp, &[6])), "other addresses");
        assert!(
            !tcp.excludes(&of(Protocol::Tcp, &[0; 4])),
            "IPv6 may be for itself"
        );

        let mut mm = message("mm_entry", &[]);
        mm.push("vmas", message("vma_entry", &[("flags", 0x40022)]));
        images.insert("mm-1.img".into(), image("mm-1.img", &[mm]));
        assert_eq!(
            ask(&images).memory,
            0,
            "huge pages are no memory of a container"
        );
    }
}
