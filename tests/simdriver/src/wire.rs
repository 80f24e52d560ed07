//! The protocol between a client process (or a caller of the checkpoint API) and the device server.
//!
//! A Unix stream socket carries frames of sixteen little-endian words each way; word 0 of a request
//! is the operation, word 0 of a reply the `CUresult`. Fixed frames need no heap, which matters in
//! the restore thread: it runs while every other thread of its process is stopped, possibly inside
//! malloc.

use rustix::io::retry_on_intr;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use std::fs::File;
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

pub const WORDS: usize = 16;
pub type Frame = [u64; WORDS];
pub const BYTES: usize = WORDS * 8;

/// Operations. The comments give the request words from word 1 and the reply words from word 1.
pub mod op {
    /// (kind: 0 fresh, 1 restored; ns pid; ns tid) → (GPUs, driver major, CUDA version, context bytes)
    pub const HELLO: u64 = 1;
    /// (index) → (minor, uuid hi, uuid lo, total bytes, name in 8 words, compute capability major << 8 | minor)
    pub const GPU_INFO: u64 = 2;
    /// (uuid hi, uuid lo, address, bytes, flags) → ()
    pub const ALLOC: u64 = 3;
    /// (address) → ()
    pub const FREE: u64 = 4;
    /// (address, session or 0 for the own one) → (bytes) and a file descriptor of the memory
    pub const GET_FD: u64 = 5;
    /// (address, offset, bytes, session or 0 for the own one) → (sum)
    pub const SUM: u64 = 6;
    /// (address, offset, bytes, value) → ()
    pub const MEMSET: u64 = 7;
    /// (step, timeout ms, bytes) → (directive, code, delay ms)
    pub const STEP_BEGIN: u64 = 8;
    /// (step, code, bytes, microseconds) → ()
    pub const STEP_END: u64 = 9;
    /// () → (): frees everything that the process holds
    pub const RELEASE_ALL: u64 = 10;
    /// (what: 1 managed memory, 2 memory that others may import) → (session)
    pub const MARK: u64 = 11;
    /// (uuid hi, uuid lo) → (free bytes, total bytes)
    pub const MEM_INFO: u64 = 12;
    /// (step) → (1 while the step is still to hang)
    pub const STILL_HANGING: u64 = 13;
    /// (pid, step) → (): from a caller; returns when no other call on that pid is under way
    pub const CALL_BEGIN: u64 = 20;
    /// (code, microseconds) → ()
    pub const CALL_END: u64 = 21;
}

/// Name of a file of memory, before the GPU's UUID.
pub const VRAM: &str = "cusim-vram-";
/// Flag of [`op::ALLOC`]: the memory is a context, not an allocation of the program.
pub const ALLOC_CONTEXT: u64 = 1;

/// What the server tells the restore thread to do with a step.
pub mod directive {
    pub const PROCEED: u64 = 0;
    pub const FAIL: u64 = 1;
    /// Return the code and end in the failed state.
    pub const BREAK: u64 = 2;
    /// Wait until the timeout of the call, then say not ready.
    pub const HANG: u64 = 3;
    pub const HANG_FOREVER: u64 = 4;
}

/// The steps of the checkpoint API, as they appear in requests, in switches and in the log.
#[derive(
    Clone, Copy, PartialEq, Eq, Debug, strum::AsRefStr, strum::FromRepr, strum::VariantArray,
)]
#[repr(u64)]
#[strum(serialize_all = "kebab-case")]
pub enum Step {
    Init = 0,
    GetState = 1,
    Lock = 2,
    Checkpoint = 3,
    Restore = 4,
    Unlock = 5,
    Unmap = 6,
    Export = 7,
    Launch = 8,
    Synchronize = 9,
}

pub fn send(mut s: &UnixStream, f: &Frame) -> io::Result<()> {
    let mut b = [0u8; BYTES];
    for (chunk, w) in b.chunks_exact_mut(8).zip(f) {
        chunk.copy_from_slice(&w.to_le_bytes());
    }
    s.write_all(&b)
}

pub fn decode(b: &[u8; BYTES]) -> Frame {
    let mut f = [0u64; WORDS];
    for (w, chunk) in f.iter_mut().zip(b.chunks_exact(8)) {
        let mut le = [0u8; 8];
        le.copy_from_slice(chunk);
        *w = u64::from_le_bytes(le);
    }
    f
}

pub fn recv(mut s: &UnixStream) -> io::Result<Frame> {
    let mut b = [0u8; BYTES];
    s.read_exact(&mut b)?;
    Ok(decode(&b))
}

/// Sends a request and waits for its reply.
pub fn ask(s: &UnixStream, op: u64, args: &[u64]) -> io::Result<Frame> {
    send(s, &request(op, args))?;
    recv(s)
}

/// Sends a request whose reply brings a file descriptor.
pub fn ask_fd(s: &UnixStream, op: u64, args: &[u64]) -> io::Result<(Frame, Option<File>)> {
    send(s, &request(op, args))?;
    let mut b = [0u8; BYTES];
    let (n, fd) = recv_first(s, &mut b)?;
    let mut rest = s;
    rest.read_exact(&mut b[n..])?;
    Ok((decode(&b), fd.map(File::from)))
}

fn request(op: u64, args: &[u64]) -> Frame {
    let mut f = [0u64; WORDS];
    f[0] = op;
    for (w, a) in f[1..].iter_mut().zip(args) {
        *w = *a;
    }
    f
}

/// The first bytes of a reply, and the descriptor that came with them. Uses no heap.
fn recv_first(s: &UnixStream, b: &mut [u8; BYTES]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = retry_on_intr(|| recvmsg(s, &mut [IoSliceMut::new(b)], &mut control, flags))?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((received.bytes, fd))
}
