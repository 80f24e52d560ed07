//! Gives a process a descriptor of ours.

use super::{Injection, arch};
use cryopod_host::pidfd;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

/// Bytes below the stack pointer that the ABI lets a function use without moving it.
const RED_ZONE: u64 = 128;
const SCRATCH: usize = 256;
/// linux/userfaultfd.h: makes a userfaultfd for the caller's memory.
const USERFAULTFD_IOC_NEW: u64 = 0xaa00;

/// A descriptor of another process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Descriptor {
    pub pid: i32,
    pub fd: RawFd,
}

impl Injection {
    /// Gives the process a descriptor of ours, over a socket pair that the process makes; we take one end.
    pub(super) fn give(&mut self, file: &File) -> io::Result<RawFd> {
        let at = (arch::stack(&self.regs) - RED_ZONE - SCRATCH as u64) & !63;
        let mut saved = [0u8; SCRATCH];
        self.memory.read_exact_at(&mut saved, at)?;
        let given = self.give_at(file, at);
        let back = self.memory.write_all_at(&saved, at);
        given.and_then(|fd| back.map(|()| fd))
    }

    /// Has the process make a userfaultfd of its memory, and takes it from the process. `device` is `/dev/userfaultfd`.
    /// Who can open that may handle the kernel's faults too, which the process itself may not.
    pub fn userfaultfd(&mut self, device: &File) -> io::Result<OwnedFd> {
        let device = self.give(device)?;
        let flags = libc::O_CLOEXEC as u64;
        let made = self.call(
            libc::SYS_ioctl,
            [device as u64, USERFAULTFD_IOC_NEW, flags, 0, 0, 0],
        );
        let closed = self.close(device);
        let fd = RawFd::try_from(made?).map_err(io::Error::other)?;
        let taken = take_descriptor(self.descriptor(fd));
        self.close(fd).and(closed)?;
        taken
    }

    fn descriptor(&self, fd: RawFd) -> Descriptor {
        Descriptor { pid: self.pid, fd }
    }

    fn give_at(&mut self, file: &File, at: u64) -> io::Result<RawFd> {
        let kind = (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC) as u64;
        self.call(
            libc::SYS_socketpair,
            [libc::AF_UNIX as u64, kind, 0, at, 0, 0],
        )?;
        let mut pair = [0u8; 8];
        self.memory.read_exact_at(&mut pair, at)?;
        let ours = RawFd::from_ne_bytes([pair[0], pair[1], pair[2], pair[3]]);
        let theirs = RawFd::from_ne_bytes([pair[4], pair[5], pair[6], pair[7]]);
        let received = self.receive(file, at, ours, theirs);
        let closed = self.close(ours).and(self.close(theirs));
        received.and_then(|fd| closed.map(|()| fd))
    }

    fn receive(&mut self, file: &File, at: u64, ours: RawFd, theirs: RawFd) -> io::Result<RawFd> {
        send_descriptor(&take_descriptor(self.descriptor(ours))?, file)?;
        // A msghdr, an iovec, one byte, and room for one descriptor's control message.
        let (vector, byte, control) = (at + 64, at + 80, at + 96);
        let words: [u64; 10] = [0, 0, vector, 1, control, 24, 0, 0, byte, 1];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.memory.write_all_at(&bytes, at)?;
        self.memory.write_all_at(&[0; 24], control)?;
        let flags = (libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC) as u64;
        self.call(libc::SYS_recvmsg, [theirs as u64, at, flags, 0, 0, 0])?;
        let mut message = [0u8; 24];
        self.memory.read_exact_at(&mut message, control)?;
        let word = |i: usize| {
            i32::from_ne_bytes([message[i], message[i + 1], message[i + 2], message[i + 3]])
        };
        if word(8) != libc::SOL_SOCKET || word(12) != libc::SCM_RIGHTS || word(16) < 0 {
            return Err(io::Error::other("the process did not get the descriptor"));
        }
        Ok(word(16))
    }
}

/// Duplicates a descriptor of another process into this one.
pub fn take_descriptor(Descriptor { pid, fd }: Descriptor) -> io::Result<OwnedFd> {
    pidfd::take(pid, fd)
}

fn send_descriptor(socket: &OwnedFd, file: &File) -> io::Result<()> {
    let files = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&files));
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(socket, &[IoSlice::new(&[0])], &mut control, flags)?;
    Ok(())
}
