//! Detects sockets that CRIU cannot dump: families and protocols it does not know, Unix connections to a process
//! outside of the container.

use std::collections::{HashMap, HashSet};
use std::fs::File;

use crate::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::processes::{Fd, Process, Scan};
use cryopod_host::sock_diag::{self, UnixSocket};

const MAX_NAMESPACES: usize = 16;
/// The kernel's `TCP_ESTABLISHED`, used for Unix sockets as well.
const ESTABLISHED: u8 = 1;
/// Prefix of the CUDA library's own sockets (`@cuda-uvmfd-NAMESPACE-PID`, seen with driver 580). The driver closes them
/// at its checkpoint, before CRIU looks at any descriptor.
const OF_CUDA: &str = "@cuda-";
/// Both directions are shut down.
const SHUT: u8 = 3;

/// The kernel's names of the protocols that CRIU dumps (`dump_socket`, sockets.c, and `can_dump_ipproto`, sk-inet.c).
/// CRIU knows those of `ping` sockets since 4.2.
const DUMPED: [&str; 14] = [
    "UNIX",
    "UNIX-STREAM",
    "TCP",
    "TCPv6",
    "UDP",
    "UDPv6",
    "UDP-Lite",
    "UDPLITEv6",
    "RAW",
    "RAWv6",
    "PING",
    "PINGv6",
    "PACKET",
    "NETLINK",
];

/// Protocols on which one CRIU version fails on one kernel.
pub(super) const RAW: [&str; 3] = ["RAW", "RAWv6", "PACKET"];

/// Returns sockets of other protocols, one refusal for each process and protocol.
pub(super) fn protocols(scan: &Scan) -> Vec<Refusal> {
    let mut refusals = Vec::new();
    for process in &scan.processes {
        let mut told = HashSet::new();
        for fd in &process.fds {
            let Some(name) = fd.protocol.as_deref() else {
                continue;
            };
            if DUMPED.contains(&name) || !told.insert(name) {
                continue;
            }
            let remedy = match name {
                "MPTCP" | "MPTCPv6" => {
                    "start the container with GODEBUG=multipathtcp=0 (Go 1.24 and newer listen with it), or use plain TCP"
                }
                _ => {
                    "close it before the checkpoint: CRIU dumps Unix, TCP, UDP, raw, packet and netlink sockets"
                }
            };
            refusals.push(Refusal::of(
                process,
                format!("has a socket that CRIU cannot dump ({name})"),
                remedy,
            ));
        }
    }
    refusals
}

/// Returns Unix connections whose other end is outside of the container: CRIU would dump half of one.
pub(super) fn outside_connections(scan: &Scan, host: &Host) -> Vec<Refusal> {
    let mut sockets = HashMap::new();
    let mut seen = HashSet::new();
    for process in scan.processes.iter().filter(|p| has_unix_socket(p)) {
        let namespace = process.namespaces.get("net").cloned().unwrap_or_default();
        if seen.len() >= MAX_NAMESPACES || !seen.insert(namespace) {
            continue;
        }
        let file = File::open(host.path(format!("/proc/{}/ns/net", process.pid)));
        match file.and_then(sock_diag::unix_sockets) {
            Ok(found) => sockets.extend(found.into_iter().map(|s| (s.inode, s))),
            // CRIU checks what cannot be read here.
            Err(e) => tracing::debug!("process {}: Unix sockets: {e}", process.pid),
        }
    }
    if sockets.is_empty() || descriptors_under_way(scan, host) {
        return Vec::new();
    }
    halves(scan, &sockets)
}

/// Returns the connections in `sockets`, by inode, that end outside.
fn halves(scan: &Scan, sockets: &HashMap<u32, UnixSocket>) -> Vec<Refusal> {
    let own: HashSet<u32> = scan
        .processes
        .iter()
        .flat_map(|p| p.fds.iter().filter_map(inode))
        .collect();
    // Connections that a listener of the container has not accepted yet.
    let waiting: HashSet<u32> = sockets
        .values()
        .filter(|s| own.contains(&s.inode))
        .flat_map(|s| s.waiting.iter().copied())
        .collect();
    let mut told = HashSet::new();
    let mut refusals = Vec::new();
    for process in &scan.processes {
        for socket in process
            .fds
            .iter()
            .filter_map(inode)
            .filter_map(|i| sockets.get(&i))
        {
            let connected = socket.state == ESTABLISHED && socket.typ != libc::SOCK_DGRAM as u8;
            let outside = match socket.peer {
                0 => socket.shutdown != SHUT && !waiting.contains(&socket.inode),
                peer => !own.contains(&peer),
            };
            let of_cuda = socket.name.starts_with(OF_CUDA);
            if !connected || !outside || of_cuda || !told.insert(socket.inode) {
                continue;
            }
            let name = match sockets.get(&socket.peer).map(|s| s.name.as_str()) {
                Some("") | None if socket.name.is_empty() => String::new(),
                Some("") | None => format!(" ({})", socket.name),
                Some(name) => format!(" ({name})"),
            };
            refusals.push(Refusal::of(
                process,
                format!("is connected to a process outside of the container through a Unix socket{name}"),
                "close the connection before the checkpoint, or start the container without that socket: CRIU cannot dump one end of a connection",
            ));
        }
    }
    refusals
}

/// A socket may be in a message that nobody has received yet; then its owner does not show.
fn descriptors_under_way(scan: &Scan, host: &Host) -> bool {
    let under_way = |process: &Process, fd: &Fd| {
        let info = host.text(format!("/proc/{}/fdinfo/{}", process.pid, fd.number));
        let count = info.ok().and_then(|text| {
            let line = text.lines().find_map(|l| l.strip_prefix("scm_fds:"))?;
            line.trim().parse::<u64>().ok()
        });
        count.is_some_and(|n| n > 0)
    };
    scan.processes
        .iter()
        .any(|p| p.fds.iter().any(|fd| is_unix(fd) && under_way(p, fd)))
}

fn inode(fd: &Fd) -> Option<u32> {
    let inode = fd.target.strip_prefix("socket:[")?;
    inode.trim_end_matches(']').parse().ok()
}

fn is_unix(fd: &Fd) -> bool {
    fd.protocol
        .as_deref()
        .is_some_and(|p| p.starts_with("UNIX"))
}

fn has_unix_socket(process: &Process) -> bool {
    process.fds.iter().any(is_unix)
}

#[cfg(test)]
fn socket(inode: u32, protocol: &str) -> Fd {
    Fd {
        protocol: Some(protocol.to_owned()),
        ..super::fixtures::fd(inode, &format!("socket:[{inode}]"))
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{scan, texts};
    use super::*;

    #[test]
    fn protocols_that_criu_does_not_know() {
        let fds = DUMPED.iter().map(|name| socket(1, name)).collect();
        assert_eq!(protocols(&scan(fds)), []);
        let fds = vec![
            socket(1, "MPTCP"),
            socket(2, "MPTCP"),
            socket(3, "AF_VSOCK"),
            socket(4, "TCP"),
        ];
        let said = texts(&protocols(&scan(fds)));
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said[0].contains(
                "process 700000001 (python3): has a socket that CRIU cannot dump (MPTCP)"
            )
        );
        assert!(said[0].contains("GODEBUG=multipathtcp=0"), "{said:?}");
        assert!(said[1].contains("AF_VSOCK"), "{said:?}");
    }

    fn unix(inode: u32, peer: u32, typ: libc::c_int, name: &str) -> UnixSocket {
        UnixSocket {
            inode,
            peer,
            typ: typ as u8,
            state: ESTABLISHED,
            name: name.into(),
            ..UnixSocket::default()
        }
    }

    fn halves(own: &[u32], sockets: Vec<UnixSocket>) -> Vec<String> {
        let scan = scan(own.iter().map(|i| socket(*i, "UNIX")).collect());
        let sockets = sockets.into_iter().map(|s| (s.inode, s)).collect();
        texts(&super::halves(&scan, &sockets))
    }

    #[test]
    fn connections_within_the_container_pass() {
        let stream = libc::SOCK_STREAM;
        assert_eq!(
            halves(
                &[1, 2],
                vec![unix(1, 2, stream, ""), unix(2, 1, stream, "")]
            ),
            [""; 0]
        );
        // Not accepted yet, by a listener of the container.
        let listener = UnixSocket {
            inode: 3,
            state: 10,
            typ: stream as u8,
            waiting: vec![1],
            ..UnixSocket::default()
        };
        assert_eq!(
            halves(&[1, 3], vec![unix(1, 0, stream, ""), listener.clone()]),
            [""; 0]
        );
        // By a listener outside.
        assert_eq!(
            halves(&[1], vec![unix(1, 0, stream, ""), listener]).len(),
            1
        );
        // The other end is closed.
        let mut closed = unix(1, 0, stream, "");
        closed.shutdown = SHUT;
        assert_eq!(halves(&[1], vec![closed]), [""; 0]);
        // The driver's own.
        let mut of_cuda = unix(1, 9, stream, "");
        of_cuda.name = "@cuda-uvmfd-1-2".into();
        assert_eq!(halves(&[1], vec![of_cuda]), [""; 0]);
        // Datagrams are sent again, to a socket of that name.
        assert_eq!(
            halves(&[1], vec![unix(1, 9, libc::SOCK_DGRAM, "")]),
            [""; 0]
        );
    }

    #[test]
    fn a_connection_to_the_outside() {
        for typ in [libc::SOCK_STREAM, libc::SOCK_SEQPACKET] {
            let said = halves(
                &[1],
                vec![unix(1, 9, typ, ""), unix(9, 1, typ, "/run/x.sock")],
            );
            assert_eq!(said.len(), 1, "{said:?}");
            assert!(said[0].contains("process 700000001 (python3): is connected to a process outside of the container through a Unix socket (/run/x.sock)"), "{said:?}");
        }
    }
}
