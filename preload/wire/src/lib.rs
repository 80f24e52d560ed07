//! Messages between the driver agent and `libcryopod_preload.so` in a workload.
//!
//! The library makes a socket pair and keeps both ends. It writes a [`Card`] into a memfd named [`MEMFD`], which tells
//! the agent the descriptor of the agent's end; the agent takes it with pidfd_getfd(2). So nothing has a name in the
//! container, only who may trace the process can talk to the library, and CRIU sees a socket pair inside one process.
//!
//! Every message is one packet of four numbers, and bytes where the message has some, with at most one descriptor. The
//! agent asks and the library answers: any number of [`Answer::Piece`]s and [`Answer::Data`], then [`Answer::Done`] or
//! [`Answer::Failed`]. The first number is the agent's choice, and comes back with each answer: an answer that is late is
//! not taken for that to the next request.

pub mod nccl;

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::set_socket_send_buffer_size_force;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

/// The memfd's name. `/proc/PID/fd` shows it as `/memfd:cryopod-preload (deleted)`.
pub const MEMFD: &str = "cryopod-preload";
/// Longest time that a message may take to be sent.
pub const SEND_LIMIT: Duration = Duration::from_secs(10);

const MAGIC: u64 = u64::from_le_bytes(*b"CRYOPRE2");
const PACKET: usize = 32;
/// Most bytes that a message carries besides its numbers.
pub const MAX_DATA: usize = 128 << 10;
/// Bytes of an answer that go into one packet: a socket holds one of any size that it was made for.
const CHUNK: usize = 32 << 10;

/// Tells the agent how to reach the library. All numbers are those of the process itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Card {
    /// The process in its PID namespace: a forked child inherits the memfd, but has another pid.
    pub pid: i32,
    /// The thread that answers.
    pub tid: i32,
    /// The agent's end of the socket pair.
    pub agent_end: i32,
    /// The copy that [`Request::Spare`] left; `-1`: none.
    pub spare: i32,
}

impl Card {
    pub const BYTES: usize = 24;
    /// Where `spare` is.
    pub const SPARE_AT: u64 = 20;

    /// Returns the bytes that the memfd holds.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        for (to, number) in
            bytes[8..]
                .chunks_exact_mut(4)
                .zip([self.pid, self.tid, self.agent_end, self.spare])
        {
            to.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// `None` if the bytes are no card, or one of another version.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<8>()?;
        if u64::from_le_bytes(*magic) != MAGIC {
            return None;
        }
        let number = |at: usize| {
            let bytes = rest.get(at..at + 4)?;
            Some(i32::from_le_bytes(bytes.try_into().ok()?))
        };
        Some(Self {
            pid: number(0)?,
            tid: number(4)?,
            agent_end: number(8)?,
            spare: number(12)?,
        })
    }
}

/// [`Request::Go`]: what was allocated again has its contents. Agents before 2026-11-27 sent 0, and meant this.
pub const FILLED: u64 = 1;
/// [`Request::Go`]: it has none.
pub const UNFILLED: u64 = 2;

/// What the agent asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Holds all calls that enqueue GPU work, waits up to `limit_ms` for the work, and answers with a piece for each
    /// allocation. Calls go on by themselves if nothing else is asked for within `hold_ms`.
    Stop { limit_ms: u64, hold_ms: u64 },
    /// Answers with a piece for each allocation, while calls go on. Until they have stopped and gone on, each piece keeps its
    /// place, and new ones come behind.
    Export,
    /// Releases the GPU memory of all pieces; their addresses stay reserved. Keeps the attached file, which holds their
    /// contents, so that they are not lost whoever dies.
    Release,
    /// Allocates the GPU memory of the pieces again whose places begin in these bytes of the file, and answers with each
    /// that has no contents yet. No bytes: of all from there on.
    Allocate { from: u64, bytes: u64 },
    /// The contents of the piece at this place are in the GPU memory of the attached handle: copies them from there.
    TakeBack { offset: u64, bytes: u64 },
    /// Lets the calls go on. All memory must be there; `filled` is [`FILLED`] or [`UNFILLED`].
    Go { filled: u64 },
    /// Keeps the attached file, which holds the contents of all pieces.
    Keep,
    /// Lets go of the file kept: somebody else has it, or nobody needs it.
    Forget,
    /// Answers with a piece that has the file kept.
    Kept,
    /// Lets the calls go on, whatever the state: memory that was released is allocated again and copied from the attached
    /// file, or from the one kept. The slow way back for when there is no agent. NCCL's communicators that are down wait a
    /// while for another agent.
    Fill,
    /// Answers [`Answer::Done`] if the memory is away.
    State,
    /// Has the file kept stay when the calls go on, until [`Request::Stop`], [`Request::Export`] or [`Request::Forget`].
    Spare,
    /// Nobody else holds memory of the pieces any more: an allocation that finds none need not wait for it.
    LetGo,
    /// Answers with the [`nccl::Report`].
    NcclLook,
    /// Lets NCCL's calls wait, but for a process whose counters are behind the attached ones ([`nccl::encode_clocks`]).
    /// Answers with the report. The calls go on by themselves if nothing else is asked for within `hold_ms`.
    NcclHold { hold_ms: u64 },
    /// Lets NCCL's calls go on.
    NcclOpen,
    /// Waits up to `limit_ms` for the GPU's work. NCCL's calls must be held; they wait from then on until
    /// [`Request::NcclUp`], or go on if this fails.
    NcclIdle { limit_ms: u64 },
    /// Destroys the communicators, after [`Request::NcclIdle`].
    NcclDown { limit_ms: u64 },
    /// Answers with a fresh unique id of NCCL's.
    NcclUniqueId,
    /// Makes the communicators again that the attached list names ([`nccl::encode_fresh`]), in its order, and lets NCCL's
    /// calls go on. Those that it does not name, and those that fail, have NCCL's error from then on.
    NcclUp { limit_ms: u64 },
}

/// What the library answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// An allocation's place in the file with all contents. The descriptor is its handle for another process.
    Piece {
        offset: u64,
        bytes: u64,
    },
    /// Bytes that the request asked for, with the message.
    Data,
    Done,
    Failed(Reason),
}

/// Why the library did not do what it was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The GPU work or a call did not end in time.
    Busy,
    /// A call of CUDA failed, with this code.
    Cuda(u32),
    /// It makes no sense now: the calls went on by themselves, say.
    Order,
    /// The process uses a function that the library does not know and that may enqueue work.
    Unknown,
    /// A function of NCCL's failed, with this result.
    Nccl(u32),
    /// Memory of another process is still mapped, with so many mappings.
    Shared(u32),
    /// There is a multicast object, with which the driver's checkpoint does not end.
    Multicast,
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Busy => f.write_str("its GPU work did not end in time"),
            Self::Cuda(code) => write!(f, "CUDA's error {code}"),
            Self::Order => f.write_str("its calls have gone on meanwhile"),
            Self::Unknown => {
                f.write_str("it uses a CUDA function that the preload library does not know")
            }
            Self::Nccl(code) => write!(f, "NCCL's error {code}"),
            Self::Shared(count) => {
                write!(
                    f,
                    "{count} mappings of another process's GPU memory are left"
                )
            }
            Self::Multicast => f.write_str(
                "it uses multicast memory (NVLS), which the driver cannot checkpoint; NCCL_NVLS_ENABLE=0 avoids it",
            ),
        }
    }
}

/// A kind and what belongs to it.
type Packet = [u64; 3];

/// Defines the packet of each request, both ways.
macro_rules! packets {
    ($($kind:literal $name:ident $($field:ident)*;)*) => {
        impl Request {
            fn packet(self) -> Packet {
                let mut packet = [0; 3];
                let numbers: &[u64] = match &self {
                    $(Self::$name { $($field),* } => &[$kind, $(*$field),*],)*
                };
                packet[..numbers.len()].copy_from_slice(numbers);
                packet
            }

            fn from_packet(packet: Packet) -> Option<Self> {
                match packet {
                    $([$kind, $($field,)* ..] => Some(Self::$name { $($field),* }),)*
                    _ => None,
                }
            }
        }
    };
}

packets! {
    1 Stop limit_ms hold_ms;
    2 Release;
    3 Allocate from bytes;
    4 Go filled;
    5 Keep;
    6 Kept;
    7 Fill;
    8 State;
    9 Forget;
    10 NcclLook;
    11 NcclHold hold_ms;
    12 NcclOpen;
    13 NcclDown limit_ms;
    14 NcclUniqueId;
    15 NcclUp limit_ms;
    16 NcclIdle limit_ms;
    17 TakeBack offset bytes;
    18 Export;
    19 Spare;
    20 LetGo;
}

impl Answer {
    fn packet(self) -> Packet {
        match self {
            Self::Piece { offset, bytes } => [1, offset, bytes],
            Self::Done => [2, 0, 0],
            Self::Failed(Reason::Busy) => [3, 0, 0],
            Self::Failed(Reason::Cuda(code)) => [3, 1, code.into()],
            Self::Failed(Reason::Order) => [3, 2, 0],
            Self::Failed(Reason::Unknown) => [3, 3, 0],
            Self::Failed(Reason::Nccl(code)) => [3, 4, code.into()],
            Self::Failed(Reason::Shared(count)) => [3, 5, count.into()],
            Self::Failed(Reason::Multicast) => [3, 6, 0],
            Self::Data => [4, 0, 0],
        }
    }

    fn from_packet(packet: Packet) -> Option<Self> {
        Some(match packet {
            [1, offset, bytes] => Self::Piece { offset, bytes },
            [2, ..] => Self::Done,
            [3, 0, _] => Self::Failed(Reason::Busy),
            [3, 1, code] => Self::Failed(Reason::Cuda(u32::try_from(code).ok()?)),
            [3, 2, _] => Self::Failed(Reason::Order),
            [3, 3, _] => Self::Failed(Reason::Unknown),
            [3, 4, code] => Self::Failed(Reason::Nccl(u32::try_from(code).ok()?)),
            [3, 5, count] => Self::Failed(Reason::Shared(u32::try_from(count).ok()?)),
            [3, 6, _] => Self::Failed(Reason::Multicast),
            [4, ..] => Self::Data,
            _ => return None,
        })
    }
}

/// Makes the socket pair: the library's end and the agent's.
pub fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Lets messages wait that nobody reads yet, up to so many bytes with what the kernel adds to each. Needs CAP_NET_ADMIN.
pub fn set_room(socket: &OwnedFd, bytes: usize) -> io::Result<()> {
    Ok(set_socket_send_buffer_size_force(socket, bytes)?)
}

/// Sends a request with up to [`MAX_DATA`] bytes. Fails with [`io::ErrorKind::FileTooLarge`] if there are more.
pub fn send_request(
    socket: &OwnedFd,
    number: u64,
    request: Request,
    data: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    if data.len() > MAX_DATA {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    send(socket, number, request.packet(), data, fd)
}

/// Sends an answer to the request of this number.
pub fn send_answer(
    socket: &OwnedFd,
    number: u64,
    answer: Answer,
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    send(socket, number, answer.packet(), &[], fd)
}

/// Sends bytes as any number of [`Answer::Data`].
pub fn send_data(socket: &OwnedFd, number: u64, data: &[u8]) -> io::Result<()> {
    let mut chunks = data.chunks(CHUNK);
    chunks.try_for_each(|chunk| send(socket, number, Answer::Data.packet(), chunk, None))
}

/// A message with its bytes and its descriptor.
#[derive(Debug)]
pub struct Received<T> {
    /// The request's number.
    pub number: u64,
    pub what: T,
    pub data: Vec<u8>,
    pub fd: Option<OwnedFd>,
}

impl<T> Received<T> {
    fn map<U>(self, change: impl FnOnce(T) -> U) -> Received<U> {
        Received {
            number: self.number,
            what: change(self.what),
            data: self.data,
            fd: self.fd,
        }
    }
}

/// Waits for a request, without a limit for ever; `None` for one that this version does not know.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] when the limit has passed.
pub fn request(socket: &OwnedFd, limit: Option<Duration>) -> io::Result<Received<Option<Request>>> {
    receive(socket, limit)
        .map(|received| received.map(|packet| packet.and_then(Request::from_packet)))
}

/// Waits for an answer.
///
/// # Errors
/// [`io::ErrorKind::WouldBlock`] when the limit has passed, and for an answer that makes no sense.
pub fn answer(socket: &OwnedFd, limit: Duration) -> io::Result<Received<Answer>> {
    let received = receive(socket, Some(limit))?;
    let answer = received.what.and_then(Answer::from_packet);
    let answer = answer.ok_or_else(|| io::Error::other("the library's answer makes no sense"))?;
    Ok(received.map(|_| answer))
}

fn send(
    socket: &OwnedFd,
    number: u64,
    [kind, first, second]: Packet,
    data: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let numbers = [number, kind, first, second].map(u64::to_le_bytes);
    let parts = [IoSlice::new(numbers.as_flattened()), IoSlice::new(data)];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if fd.is_some() {
        control.push(SendAncillaryMessage::ScmRights(fd.as_slice()));
    }
    // The container has the socket, too, and may change its time limits: no call may block.
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let end = Instant::now() + SEND_LIMIT;
    loop {
        match sendmsg(socket, &parts, &mut control, flags) {
            Err(Errno::AGAIN) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(Errno::INTR) => {}
            sent => return Ok(sent.map(drop)?),
        }
    }
}

/// Longest limit that the kernel is given.
const YEAR: Duration = Duration::from_secs(365 * 86_400);

fn receive(socket: &OwnedFd, limit: Option<Duration>) -> io::Result<Received<Option<Packet>>> {
    let limit = limit.and_then(|limit| Timespec::try_from(limit.min(YEAR)).ok());
    retry_on_intr(|| {
        let mut one = [PollFd::new(socket, PollFlags::IN)];
        poll(&mut one, limit.as_ref())
    })?;
    let mut bytes = vec![0u8; PACKET + MAX_DATA];
    // There may be room for two descriptors. The second one is closed.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // As for `send`. Nothing there after the limit is an error like any other.
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = retry_on_intr(|| {
        let mut into = [IoSliceMut::new(&mut bytes)];
        recvmsg(socket, &mut into, &mut control, flags)
    })?;
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    bytes.truncate(received.bytes);
    let data = bytes.get(PACKET..).unwrap_or_default().to_vec();
    let number = |at: usize| {
        let le = bytes.get(8 * at..8 * at + 8)?;
        Some(u64::from_le_bytes(le.try_into().ok()?))
    };
    let packet = || Some([number(1)?, number(2)?, number(3)?]);
    Ok(Received {
        number: number(0).unwrap_or_default(),
        what: packet(),
        data,
        fd,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    use std::os::fd::AsFd;

    const SHORT: Duration = Duration::from_millis(10);

    #[test]
    fn messages_arrive_as_they_were_sent() {
        let (library, agent) = pair().unwrap();
        let requests = [
            Request::Stop {
                limit_ms: 7,
                hold_ms: 8,
            },
            Request::Release,
            Request::Allocate { from: 7, bytes: 8 },
            Request::Go { filled: FILLED },
            Request::Keep,
            Request::Kept,
            Request::Fill,
            Request::State,
            Request::Forget,
            Request::NcclLook,
            Request::NcclHold { hold_ms: 9 },
            Request::NcclOpen,
            Request::NcclIdle { limit_ms: 9 },
            Request::NcclDown { limit_ms: 9 },
            Request::NcclUniqueId,
            Request::NcclUp { limit_ms: 9 },
            Request::TakeBack {
                offset: 7,
                bytes: 8,
            },
            Request::Export,
            Request::LetGo,
        ];
        for sent in requests {
            send_request(&agent, 3, sent, &[5; MAX_DATA], None).unwrap();
            let got = request(&library, None).unwrap();
            assert_eq!((got.number, got.what), (3, Some(sent)));
            assert_eq!(got.data, [5; MAX_DATA]);
            assert!(got.fd.is_none());
        }
        let failed = [
            Reason::Busy,
            Reason::Cuda(2),
            Reason::Order,
            Reason::Unknown,
            Reason::Nccl(6),
            Reason::Shared(2),
            Reason::Multicast,
        ];
        let piece = Answer::Piece {
            offset: 1,
            bytes: u64::MAX,
        };
        for sent in [piece, Answer::Data, Answer::Done]
            .into_iter()
            .chain(failed.map(Answer::Failed))
        {
            send_answer(&library, 4, sent, Some(library.as_fd())).unwrap();
            let got = answer(&agent, SHORT).unwrap();
            assert_eq!((got.number, got.what), (4, sent));
            assert!(got.fd.is_some());
        }
        send_data(&library, 4, &[6; CHUNK + 1]).unwrap();
        for length in [CHUNK, 1] {
            assert_eq!(answer(&agent, SHORT).unwrap().data, vec![6; length]);
        }
        assert!(send_request(&agent, 1, Request::State, &[0; MAX_DATA + 1], None).is_err());
    }

    #[test]
    fn silence_and_nonsense_are_errors() {
        let (library, agent) = pair().unwrap();
        // What another holder of the socket sets changes nothing.
        set_socket_timeout(&agent, Timeout::Recv, None).unwrap();
        let silent = answer(&agent, SHORT).unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::WouldBlock);
        send(&library, 1, [99, 0, 0], &[], None).unwrap();
        assert!(answer(&agent, SHORT).is_err());
        send(&agent, 1, [99, 0, 0], &[], None).unwrap();
        assert_eq!(request(&library, None).unwrap().what, None);
        rustix::net::send(&agent, b"x", SendFlags::empty()).unwrap();
        assert_eq!(request(&library, None).unwrap().what, None);
    }

    #[test]
    fn a_card_is_read_back() {
        let card = Card {
            pid: 1,
            tid: -2,
            agent_end: 30,
            spare: -1,
        };
        assert_eq!(Card::decode(&card.encode()), Some(card));
        assert_eq!(Card::decode(&[0; Card::BYTES]), None);
    }
}
