//! Lists the Unix sockets of a network namespace by netlink (`sock_diag(7)`), as CRIU does. `/proc/net/unix` does not
//! show who is connected to whom.

use std::fs::File;
use std::io;
use std::thread;
use std::time::Duration;

use nix::sched::{CloneFlags, setns};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// Sockets that are examined; a container can make as many as it likes.
const MAX_SOCKETS: usize = 1 << 20;
/// Parts of an answer, 32 KiB at most each.
const BUFFER: usize = 64 << 10;
/// How long the kernel may take for a part.
const LIMIT: Duration = Duration::from_secs(2);

/// `SOCK_DIAG_BY_FAMILY`, `UDIAG_SHOW_*`, `UNIX_DIAG_*` of `<linux/sock_diag.h>` and `<linux/unix_diag.h>`.
const BY_FAMILY: u16 = 20;
const SHOW_NAME_PEER_ICONS: u32 = 1 | 4 | 8;
const NAME: u16 = 0;
const PEER: u16 = 2;
const ICONS: u16 = 3;
const SHUTDOWN: u16 = 6;

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnixSocket {
    /// As in `socket:[INODE]`.
    pub inode: u32,
    /// `SOCK_STREAM` and its like.
    pub typ: u8,
    /// As of TCP: 1 connected, 10 listening.
    pub state: u8,
    /// The inode of the other end; 0: none, or one that nobody has accepted yet.
    pub peer: u32,
    /// Which directions are shut down: 1 reading, 2 writing.
    pub shutdown: u8,
    /// Its address; an abstract one begins with `@`. Empty: none.
    pub name: String,
    /// The inodes of those that wait to be accepted, if it listens.
    pub waiting: Vec<u32>,
}

/// The Unix sockets of this network namespace. A thread of its own enters it and ends.
pub fn unix_sockets(namespace: File) -> io::Result<Vec<UnixSocket>> {
    let ask = move || {
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        list()
    };
    let done = thread::Builder::new().spawn(ask)?.join();
    done.unwrap_or_else(|_| Err(io::Error::other("the thread that asks has failed")))
}

fn list() -> io::Result<Vec<UnixSocket>> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )?;
    set_socket_timeout(&socket, Timeout::Recv, Some(LIMIT))?;
    send(&socket, &request(), SendFlags::empty())?;
    let mut found = Vec::new();
    let mut buffer = vec![0u8; BUFFER];
    loop {
        let (got, _) = recv(&socket, &mut buffer[..], RecvFlags::empty())?;
        if got == 0
            || parse(buffer.get(..got).unwrap_or_default(), &mut found)?
            || found.len() > MAX_SOCKETS
        {
            return Ok(found);
        }
    }
}

/// `struct nlmsghdr` and `struct unix_diag_req`: all Unix sockets.
fn request() -> Vec<u8> {
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
    let mut out = Vec::with_capacity(40);
    out.extend(40u32.to_ne_bytes());
    out.extend(BY_FAMILY.to_ne_bytes());
    out.extend(flags.to_ne_bytes());
    out.extend([0; 8]); // sequence, port
    out.extend([libc::AF_UNIX as u8, 0, 0, 0]);
    out.extend(u32::MAX.to_ne_bytes()); // states
    out.extend(0u32.to_ne_bytes()); // inode
    out.extend(SHOW_NAME_PEER_ICONS.to_ne_bytes());
    out.extend([0; 8]); // cookie
    out
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Parses messages of an answer. Returns true after the last one.
fn parse(mut bytes: &[u8], found: &mut Vec<UnixSocket>) -> io::Result<bool> {
    while let (Some(length), Some(kind)) = (u32_at(bytes, 0), u16_at(bytes, 4)) {
        let length = length as usize;
        let Some(message) = bytes.get(16..length) else {
            break;
        };
        match libc::c_int::from(kind) {
            libc::NLMSG_DONE => return Ok(true),
            libc::NLMSG_ERROR => {
                let code = u32_at(message, 0).unwrap_or(0) as i32;
                return Err(io::Error::from_raw_os_error(-code));
            }
            _ => found.extend(socket(message)),
        }
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

/// `struct unix_diag_msg` and its attributes.
fn socket(message: &[u8]) -> Option<UnixSocket> {
    let mut one = UnixSocket {
        typ: *message.get(1)?,
        state: *message.get(2)?,
        inode: u32_at(message, 4)?,
        ..UnixSocket::default()
    };
    let mut rest = message.get(16..)?;
    while let (Some(length), Some(kind)) = (u16_at(rest, 0), u16_at(rest, 2)) {
        let length = usize::from(length);
        let Some(value) = rest.get(4..length) else {
            break;
        };
        match kind {
            NAME => one.name = name(value),
            PEER => one.peer = u32_at(value, 0)?,
            ICONS => one.waiting = value.chunks_exact(4).filter_map(|c| u32_at(c, 0)).collect(),
            SHUTDOWN => one.shutdown = value.first().copied().unwrap_or(0),
            _ => {}
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(one)
}

fn name(value: &[u8]) -> String {
    let (start, value) = match value.split_first() {
        Some((0, rest)) => ("@", rest),
        _ => ("", value),
    };
    let text = String::from_utf8_lossy(value);
    // It may hold anything, and goes into a message.
    let shown: String = text.trim_end_matches('\0').chars().take(108).collect();
    format!("{start}{}", shown.escape_debug())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    fn inode(fd: &impl AsRawFd) -> u32 {
        let meta = std::fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd())).unwrap();
        u32::try_from(meta.ino()).unwrap()
    }

    #[test]
    fn the_kernel_tells_who_is_connected_to_whom() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        let find = |all: &[UnixSocket], one: u32| all.iter().find(|s| s.inode == one).cloned();
        let all = list().unwrap();
        let early = find(&all, inode(&client)).unwrap();
        assert_eq!(
            (early.peer, early.state, early.typ),
            (0, 1, libc::SOCK_STREAM as u8)
        );
        let listening = find(&all, inode(&listener)).unwrap();
        assert_eq!(
            (listening.state, listening.waiting),
            (10, vec![inode(&client)])
        );
        assert_eq!(listening.name, path.to_str().unwrap());
        let (server, _) = listener.accept().unwrap();
        let all = list().unwrap();
        assert_eq!(find(&all, inode(&client)).unwrap().peer, inode(&server));
        let accepted = find(&all, inode(&server)).unwrap();
        assert_eq!(
            (accepted.peer, accepted.name.as_str()),
            (inode(&client), path.to_str().unwrap())
        );
        drop(server);
        let left = find(&list().unwrap(), inode(&client)).unwrap();
        assert_eq!((left.peer, left.shutdown), (0, 3));
    }

    #[test]
    fn names() {
        assert_eq!(name(b"/run/x\0"), "/run/x");
        assert_eq!(name(b"\0abstract"), "@abstract");
        assert_eq!(name(b"/a\nb"), "/a\\nb");
    }

    proptest! {
        #[test]
        fn any_answer_is_harmless(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&bytes, &mut Vec::new());
            let _ = socket(&bytes);
        }
    }
}
