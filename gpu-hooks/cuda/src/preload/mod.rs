//! GPU memory of processes that have `libcryopod_preload.so`: taken out before the driver's checkpoint, and brought back
//! after its restore.
//!
//! The library hands every piece of the process's GPU memory to the agent as a descriptor. The agent imports it, copies
//! it through a small pinned ring ([`crate::copy`]), and lets go of it. Nothing that the library says is trusted: pieces must lie
//! within the memory that was made for them, and every wait has a limit. A process that lies harms its own memory.

pub mod nccl;
pub mod process;

use crate::copy::Piece;
use crate::procfs;
use cryopod_preload_wire::{self as wire, Answer, Card, MEMFD, Reason, Request, UNFILLED};
use rustix::fs::fcntl_get_seals;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::time::{Duration, Instant, SystemTime};

/// Most pieces that a process may have.
const MAX_PIECES: usize = 1 << 20;
/// Most bytes that an answer may have, by about a message.
const MAX_ANSWER: usize = 1 << 20;

/// The longest time from an answer's first message to its last.
const REST: Duration = Duration::from_secs(600);

/// Bytes of messages that may wait for a stopped process, with what the kernel adds: some 1,000 to each.
const QUEUED: usize = 8 << 20;
/// How long the library may take to tell its state.
pub const STATE_LIMIT: Duration = Duration::from_secs(5);
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const OUT_OF_MEMORY: u32 = 2;

/// The library in a process.
#[derive(Debug)]
pub struct Library {
    socket: OwnedFd,
    /// The thread that answers, in the process's PID namespace.
    pub tid: i32,
    spare: i32,
}

impl Library {
    /// Finds the library; `None` if the process has none that works.
    pub fn of(pid: i32) -> Option<Self> {
        Self::find(pid).ok().flatten()
    }

    /// Finds the library; `None` if the process has none.
    ///
    /// # Errors
    /// It has one that cannot be reached: one of another version ([`io::ErrorKind::Unsupported`]), say.
    pub fn find(pid: i32) -> io::Result<Option<Self>> {
        let Some(card) = card(pid)? else {
            return Ok(None);
        };
        // A forked child has its parent's descriptors.
        if procfs::status(pid)?.ns_pids.last() != Some(&card.pid) {
            return Ok(None);
        }
        let socket = cryopod_host::pidfd::take(pid, card.agent_end)?;
        Ok(Some(Self {
            socket,
            tid: card.tid,
            spare: card.spare,
        }))
    }

    /// Sends a request and collects the pieces of the answer. `limit` is for each message.
    ///
    /// # Errors
    /// The library's reason ([`io::ErrorKind::ResourceBusy`]: GPU work that did not end), or that it did not answer.
    pub fn ask(
        &self,
        request: Request,
        file: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> io::Result<Vec<Piece>> {
        let number = number();
        wire::send_request(&self.socket, number, request, &[], file)?;
        self.answer(number, limit, REST).map(|(pieces, _)| pieces)
    }

    /// Sends a request with bytes, and collects those of the answer. `limit` is for each message.
    ///
    /// # Errors
    /// As for [`Library::ask`].
    pub fn ask_data(&self, request: Request, data: &[u8], limit: Duration) -> io::Result<Vec<u8>> {
        let number = number();
        wire::send_request(&self.socket, number, request, data, None)?;
        self.answer(number, limit, REST).map(|(_, data)| data)
    }

    /// Collects the answer to the request of this number. Those to earlier ones, which came too late or whose agent has
    /// died, are passed over. The first message has `first`, all that follow have `rest`: a process that sends without
    /// end, whatever it sends, is one that does not answer.
    fn answer(
        &self,
        number: u64,
        first: Duration,
        rest: Duration,
    ) -> io::Result<(Vec<Piece>, Vec<u8>)> {
        let (mut pieces, mut all) = (Vec::new(), Vec::new());
        let silent = || {
            let what = "the preload library in it does not answer";
            io::Error::new(io::ErrorKind::TimedOut, what)
        };
        let (mut since, mut limit) = (Instant::now(), first);
        let mut begun = false;
        loop {
            let Some(left) = limit.checked_sub(since.elapsed()) else {
                return Err(silent());
            };
            let received = match wire::answer(&self.socket, left.min(first)) {
                Ok(received) if received.number == number => received,
                Ok(_) => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(silent()),
                Err(error) => return Err(error),
            };
            if !begun {
                (begun, since, limit) = (true, Instant::now(), rest);
            }
            match (received.what, received.fd) {
                (Answer::Done, _) => return Ok((pieces, all)),
                (Answer::Data, _) if all.len() <= MAX_ANSWER => {
                    all.extend_from_slice(&received.data);
                }
                (Answer::Failed(reason), _) => {
                    let kind = match reason {
                        Reason::Busy => io::ErrorKind::ResourceBusy,
                        Reason::Order => io::ErrorKind::InvalidInput,
                        Reason::Cuda(OUT_OF_MEMORY) => io::ErrorKind::OutOfMemory,
                        Reason::Multicast => io::ErrorKind::Unsupported,
                        _ => io::ErrorKind::Other,
                    };
                    return Err(io::Error::new(kind, reason.to_string()));
                }
                (Answer::Piece { offset, bytes }, Some(handle)) if pieces.len() < MAX_PIECES => {
                    pieces.push(Piece {
                        offset,
                        bytes,
                        handle,
                    });
                }
                (Answer::Piece { .. } | Answer::Data, _) => {
                    return Err(io::Error::other(
                        "the preload library's answer makes no sense",
                    ));
                }
            }
        }
    }

    /// Whether a process seems to have the library.
    pub fn is_in(pid: i32) -> bool {
        matches!(card(pid), Ok(Some(_)))
    }

    /// Whether the library in a process keeps a file with its GPU memory, or has it elsewhere: its calls wait. `false`:
    /// there is no library, or it says that they do not.
    ///
    /// # Errors
    /// It does not answer, or cannot be reached.
    pub fn waits(pid: i32, limit: Duration) -> io::Result<bool> {
        match Self::find(pid)? {
            Some(library) => library.is_away(limit),
            None => Ok(false),
        }
    }

    /// Whether the process's memory is away, as the library says.
    ///
    /// # Errors
    /// It does not answer: the memory may be away.
    pub fn is_away(&self, limit: Duration) -> io::Result<bool> {
        match self.ask(Request::State, None, limit) {
            Ok(_) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// The library's thread in a process, as this program's `/proc` numbers it.
    pub fn thread_of(pid: i32) -> Option<i32> {
        let tid = card(pid).ok()??.tid;
        let inner = |thread: &i32| {
            let status = procfs::status(*thread).ok();
            status.and_then(|status| status.ns_pids.last().copied())
        };
        procfs::threads(pid)
            .into_iter()
            .find(|thread| inner(thread) == Some(tid))
    }

    /// Returns the copy that the process holds ([`Request::Spare`]).
    fn spare(&self, pid: i32) -> Option<File> {
        // Versions without it say 0.
        let spare = Some(self.spare).filter(|fd| *fd > 0)?;
        let file = cryopod_host::pidfd::take(pid, spare).ok()?;
        // Only files in memory have seals; a process may name any.
        fcntl_get_seals(&file).ok()?;
        Some(file.into())
    }

    /// Whether a descriptor is that of the copy that the process holds. It lets go of it at a checkpoint.
    pub fn has_spare(pid: i32, fd: &str) -> bool {
        Self::of(pid).is_some_and(|own| own.spare.to_string() == fd && own.spare(pid).is_some())
    }

    /// Returns the host memory of the copy that a process holds, in bytes.
    pub fn spare_bytes(pid: i32) -> u64 {
        let spare = Self::of(pid).and_then(|library| library.spare(pid));
        let meta = spare.and_then(|file| file.metadata().ok());
        meta.map_or(0, |meta| meta.blocks().saturating_mul(512))
    }

    /// Has the process let go of the file with its memory.
    ///
    /// # Errors
    /// It does not answer.
    pub fn forget(&self) -> io::Result<()> {
        self.ask(Request::Forget, None, STATE_LIMIT).map(drop)
    }

    /// Says that the agent holds no memory of the process's pieces any more. Does not wait; a library that does not know of
    /// it needs nothing.
    pub fn let_go(&self) {
        self.say(Request::LetGo);
    }

    /// Lets the calls go on, after what the library does now. Does not wait.
    fn go_on(&self) {
        self.say(Request::Go { filled: UNFILLED });
    }

    fn say(&self, request: Request) {
        if let Err(error) = wire::send_request(&self.socket, number(), request, &[], None) {
            tracing::info!("the preload library: {error}");
        }
    }

    /// Lets the process go on without an agent: it brings its memory back by itself, however slowly, from these pieces,
    /// and from this file or the one that it keeps. Does not wait.
    pub fn go_on_alone(&self, pieces: Vec<Piece>, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        if !pieces.is_empty() {
            // Nobody reads them as long as the process is stopped.
            let _ = wire::set_room(&self.socket, QUEUED);
        }
        for Piece {
            offset,
            bytes,
            handle,
        } in pieces
        {
            let take_back = Request::TakeBack { offset, bytes };
            wire::send_request(&self.socket, number(), take_back, &[], Some(handle.as_fd()))?;
        }
        wire::send_request(&self.socket, number(), Request::Fill, &[], file)
    }
}

/// Returns a number for a request: the time, which no request of another agent to the same process had.
fn number() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| now.as_nanos() as u64)
}

/// Returns the size of the file that holds all pieces.
///
/// # Errors
/// A piece overflows the file.
pub fn size(pieces: &[Piece]) -> io::Result<u64> {
    let end = |piece: &Piece| piece.offset.checked_add(piece.bytes);
    let ends: Option<Vec<u64>> = pieces.iter().map(end).collect();
    let ends = ends.ok_or_else(|| io::Error::other("a piece of GPU memory has no end"))?;
    let end = ends.into_iter().max().unwrap_or_default();
    let all = pieces
        .iter()
        .fold(0u64, |sum, p| sum.saturating_add(p.bytes));
    match all <= end {
        true => Ok(end),
        false => Err(io::Error::other("pieces of GPU memory overlap")),
    }
}

fn card(pid: i32) -> io::Result<Option<Card>> {
    let name = format!("/memfd:{MEMFD} (deleted)");
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))?;
    let is_card = |path: &std::path::PathBuf| {
        fs::read_link(path).is_ok_and(|to| to.as_os_str() == name.as_str())
    };
    let mut paths = descriptors.flatten().map(|entry| entry.path());
    let Some(path) = paths.find(is_card) else {
        return Ok(None);
    };
    let mut bytes = [0; Card::BYTES];
    // A pipe can have such a name, too.
    File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?
        .read_exact(&mut bytes)?;
    let card = Card::decode(&bytes);
    card.map(Some).ok_or_else(|| {
        let what =
            "the preload library in it is of another version: use the cryopod that it came with";
        io::Error::new(io::ErrorKind::Unsupported, what)
    })
}

#[cfg(test)]
impl Library {
    /// Returns what a process with the library would be, at the other end of this socket.
    fn at(socket: OwnedFd) -> Self {
        Self {
            socket,
            tid: 0,
            spare: -1,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::os::fd::AsFd;

    fn piece(offset: u64, bytes: u64) -> Piece {
        let handle = File::open("/dev/null").unwrap().into();
        Piece {
            offset,
            bytes,
            handle,
        }
    }

    #[test]
    fn the_file_ends_where_the_last_piece_does() {
        assert_eq!(size(&[]).unwrap(), 0);
        assert_eq!(size(&[piece(8, 8), piece(0, 4)]).unwrap(), 16);
        assert!(size(&[piece(u64::MAX, 1)]).is_err());
    }

    #[test]
    fn a_late_answer_is_not_taken_for_another_one() {
        let (own, socket) = wire::pair().unwrap();
        let library = Library::at(socket);
        let short = Duration::from_millis(10);
        let late = library.ask(Request::Release, None, short).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        let answers = std::thread::spawn(move || {
            let release = wire::request(&own, None).unwrap();
            assert_eq!(release.what, Some(Request::Release));
            wire::send_answer(&own, release.number, Answer::Done, None).unwrap();
            let kept = wire::request(&own, None).unwrap();
            let piece = Answer::Piece {
                offset: 0,
                bytes: 5,
            };
            wire::send_answer(&own, kept.number, piece, Some(own.as_fd())).unwrap();
            wire::send_answer(&own, kept.number, Answer::Done, None).unwrap();
        });
        let long = Duration::from_secs(120);
        let pieces = library.ask(Request::Kept, None, long).unwrap();
        assert_eq!(pieces.iter().map(|p| p.bytes).collect::<Vec<_>>(), [5]);
        answers.join().unwrap();
    }

    #[test]
    fn memory_is_here_only_if_the_library_says_so() {
        let (own, socket) = wire::pair().unwrap();
        let library = Library::at(socket);
        let silent = library.is_away(Duration::from_millis(10)).unwrap_err();
        assert_eq!(silent.kind(), io::ErrorKind::TimedOut);
        let answers = std::thread::spawn(move || {
            // The one that came too late is answered, too.
            for answer in [Answer::Done, Answer::Failed(Reason::Order), Answer::Done] {
                let number = wire::request(&own, None).unwrap().number;
                wire::send_answer(&own, number, answer, None).unwrap();
            }
        });
        let long = Duration::from_secs(120);
        let said = [(); 2].map(|()| library.is_away(long).unwrap());
        assert_eq!(said, [false, true]);
        answers.join().unwrap();
    }

    /// Sends messages until nobody reads them.
    fn flood(own: OwnedFd, number: u64, what: fn() -> Answer) -> std::thread::JoinHandle<()> {
        let piece = Answer::Piece {
            offset: 0,
            bytes: 1,
        };
        // Here, as the thread may come first when nobody reads any more.
        wire::send_answer(&own, number, piece, Some(own.as_fd())).unwrap();
        std::thread::spawn(
            move || {
                while wire::send_answer(&own, number, what(), None).is_ok() {}
            },
        )
    }

    #[test]
    fn a_process_that_sends_without_end_does_not_answer() {
        let (short, long) = (Duration::from_millis(50), Duration::from_secs(3600));
        // Answers to another request, and one to this request that does not end.
        for (number, first, rest) in [(1, short, long), (2, long, short)] {
            let (own, socket) = wire::pair().unwrap();
            let library = Library::at(socket);
            let flood = flood(own, number, || Answer::Data);
            let endless = library.answer(2, first, rest).unwrap_err();
            assert_eq!(endless.kind(), io::ErrorKind::TimedOut, "{endless}");
            drop(library);
            flood.join().unwrap();
        }
    }

    #[test]
    fn a_library_of_another_version_is_not_none() {
        use std::io::Write;
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(Library::find(own).unwrap().is_none());
        assert!(Library::of(-1).is_none());
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let mut memory = File::from(rustix::fs::memfd_create(MEMFD, flags).unwrap());
        memory.write_all(b"CRYOPRE9________________").unwrap();
        let unknown = Library::waits(own, STATE_LIMIT).unwrap_err();
        assert_eq!(unknown.kind(), io::ErrorKind::Unsupported);
        assert!(Library::of(own).is_none() && !Library::is_in(own));
    }
}
