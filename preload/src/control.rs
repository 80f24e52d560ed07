//! The thread that answers the driver agent.
//!
//! The process's calls go on by themselves if the agent dies between [`Request::Stop`] and [`Request::Release`]. After
//! that the contents are in the agent's file; whoever has the file can bring them back with [`Request::Fill`].

use crate::imports::foreign;
use crate::memory::{self, Exported};
use crate::nccl::{moves, state};
use crate::{contexts, driver, gate, idle, linked, process};
use cryopod_preload_wire::{self as wire, Answer, Card, MEMFD, Reason, Request, UNFILLED, nccl};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::cell::Cell;
use std::ffi::c_int;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use std::sync::mpsc;
use std::time::{Duration, Instant};

const TICK: Duration = Duration::from_millis(1);
/// Until memory that could not be brought back is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// Longest that a request may hold the calls.
const LONGEST: Duration = Duration::from_secs(3600);
/// How long another agent, which first waits for the driver, may take to come when one has died.
const ANOTHER_AGENT: Duration = Duration::from_secs(300);

static STARTED: AtomicBool = AtomicBool::new(false);
/// Descriptors that a forked child must not keep: our end, the agent's, the card, the copy that stays, and the memory that is kept.
static DESCRIPTORS: [AtomicI32; 5] = [const { AtomicI32::new(-1) }; 5];

/// Starts the thread, once, and in no forked child. A process in which that fails works, and its memory is the driver's
/// affair.
pub fn start() {
    if STARTED.swap(true, SeqCst) {
        return;
    }
    // SAFETY: the handler makes system calls and touches atomics.
    unsafe { libc::pthread_atfork(None, None, Some(forked)) };
    let _ = try_start();
}

/// A forked child has neither the thread nor the driver.
extern "C" fn forked() {
    for fd in &DESCRIPTORS {
        let fd = fd.swap(-1, SeqCst);
        if fd >= 0 {
            // SAFETY: the child's copy, which nobody uses there.
            unsafe { libc::close(fd) };
        }
    }
    // Nobody would open it: the child has the driver's error instead of a call that never returns.
    process::forked();
    gate::open();
}

fn try_start() -> io::Result<()> {
    let (own, agents) = wire::pair()?;
    let (sender, tid) = mpsc::channel();
    let work = move || {
        idle::block_signals();
        // SAFETY: takes nothing.
        let tid = unsafe { libc::syscall(libc::SYS_gettid) };
        let _ = sender.send(i32::try_from(tid).unwrap_or(-1));
        let mut mode = idle::RELAXED;
        // In the default mode a capture in any thread would forbid some of our calls.
        contexts::other_call(
            c"cuThreadExchangeStreamCaptureMode",
            [&raw mut mode as usize, 0, 0],
        );
        serve(&own);
        // Its number may be another file's by now.
        let _ = own.into_raw_fd();
    };
    DESCRIPTORS[1].store(agents.as_raw_fd(), SeqCst);
    std::thread::Builder::new()
        .name("cryopod-preload".into())
        .stack_size(idle::STACK)
        .spawn(work)?;
    let tid = tid.recv().map_err(io::Error::other)?;
    let card = Card {
        pid: i32::try_from(std::process::id()).unwrap_or(-1),
        tid,
        agent_end: agents.as_raw_fd(),
        spare: -1,
    };
    let mut file = File::from(memfd_create(MEMFD, MemfdFlags::CLOEXEC)?);
    file.write_all(&card.encode())?;
    // Both stay open as long as the process lives.
    DESCRIPTORS[2].store(file.into_raw_fd(), SeqCst);
    let _ = agents.into_raw_fd();
    Ok(())
}

enum State {
    Open,
    /// The gate is shut, until then.
    Stopped(Instant),
    /// The memory is in the file.
    Away,
}

struct Control<'a> {
    socket: &'a OwnedFd,
    state: State,
    kept: Option<OwnedFd>,
    /// `kept` stays when the calls go on.
    stays: bool,
    /// What has stayed.
    spare: Option<OwnedFd>,
    /// Pieces keep their places.
    placed: bool,
    /// Memory that could not be taken back yet: nothing else has the contents.
    untaken: Vec<(u64, u64, OwnedFd)>,
    /// Of the request that is answered.
    number: u64,
    /// Nobody reads the answers: the agent has died.
    deaf: Cell<bool>,
    /// When communicators that are down are given up, as the agent that took them down has died.
    given_up: Option<Instant>,
}

fn serve(socket: &OwnedFd) {
    DESCRIPTORS[0].store(socket.as_raw_fd(), SeqCst);
    let mut control = Control {
        socket,
        state: State::Open,
        kept: None,
        stays: false,
        spare: None,
        placed: false,
        untaken: Vec::new(),
        number: 0,
        deaf: Cell::new(false),
        given_up: None,
    };
    loop {
        let stopped = match control.state {
            State::Stopped(until) => Some(until),
            State::Open | State::Away => None,
        };
        let until = stopped.into_iter().chain(control.given_up).min();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let received = match wire::request(socket, left) {
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if control
                    .given_up
                    .is_some_and(|until| Instant::now() >= until)
                {
                    control.given_up = None;
                    state::give_up();
                }
                // Another holder of the socket may have read what was there.
                if matches!(control.state, State::Stopped(until) if Instant::now() >= until) {
                    control.go_on();
                }
                continue;
            }
            Err(_) => return,
        };
        control.number = received.number;
        let answer = match received.what {
            Some(request) => match control.nccl(request, &received.data) {
                Some(answer) => answer,
                None => control.carry_out(request, received.fd),
            },
            None => Err(Reason::Order),
        };
        let answer = answer.map_or_else(Answer::Failed, |()| Answer::Done);
        if !control.deaf.take() {
            let _ = wire::send_answer(socket, control.number, answer, None);
        }
        if matches!(received.what, Some(Request::NcclUp { .. })) {
            state::give_up();
        }
    }
}

fn cuda(code: c_int) -> Reason {
    Reason::Cuda(code.unsigned_abs())
}

impl Control<'_> {
    /// Carries out what is about communicators; `None` for anything else. It does not depend on where the memory is: the
    /// agent knows the order.
    fn nccl(&mut self, request: Request, data: &[u8]) -> Option<Result<(), Reason>> {
        let limit = |ms| Duration::from_millis(ms).min(LONGEST);
        if matches!(request, Request::NcclUp { .. }) {
            self.given_up = None;
        }
        let answer = match request {
            Request::NcclLook => Ok(moves::look().encode()),
            Request::NcclHold { hold_ms } => {
                let targets = nccl::decode_clocks(data);
                let until = Instant::now() + limit(hold_ms);
                match targets.is_some_and(|targets| state::hold(targets, until)) {
                    true => Ok(moves::report().encode()),
                    false => Err(Reason::Order),
                }
            }
            Request::NcclOpen => {
                state::let_go();
                Ok(Vec::new())
            }
            Request::NcclIdle { limit_ms } => moves::idle(limit(limit_ms)).map(|()| Vec::new()),
            Request::NcclDown { limit_ms } => moves::down(limit(limit_ms)).map(|()| Vec::new()),
            Request::NcclUniqueId => moves::unique_id().map(|id| id.to_vec()),
            // After the answer: a program may exit as soon as it meets a communicator that is lost.
            Request::NcclUp { limit_ms } => match nccl::decode_fresh(data) {
                Some(fresh) => moves::up(fresh, limit(limit_ms)).map(|()| Vec::new()),
                None => Err(Reason::Order),
            },
            _ => return None,
        };
        Some(answer.map(|bytes| {
            if !self.deaf.get() {
                self.deaf
                    .set(wire::send_data(self.socket, self.number, &bytes).is_err());
            }
        }))
    }

    fn carry_out(&mut self, request: Request, fd: Option<OwnedFd>) -> Result<(), Reason> {
        match (request, &self.state) {
            (Request::Stop { limit_ms, hold_ms }, State::Open | State::Stopped(_)) => {
                let limits = [limit_ms, hold_ms].map(Duration::from_millis);
                self.stop(limits)
            }
            (Request::Export, State::Open) => {
                self.set_spare(None);
                memory::be_patient();
                self.placed = true;
                self.export(false)
            }
            (Request::Release, State::Stopped(_)) => {
                self.set_kept(fd);
                self.state = State::Away;
                memory::release_all().map_err(cuda)
            }
            (Request::Allocate { from, bytes }, State::Away) => self.allocate(from, bytes),
            (Request::TakeBack { offset, bytes }, State::Away) => {
                let from = fd.ok_or(Reason::Order)?;
                self.take_back(offset, bytes, from)
            }
            (Request::Go { .. }, State::Open) => Ok(()),
            (Request::Go { .. }, State::Stopped(_)) => {
                self.go_on();
                Ok(())
            }
            (Request::Go { filled }, State::Away) => match memory::is_back(filled != UNFILLED) {
                true => {
                    memory::be_patient();
                    self.go_on();
                    Ok(())
                }
                false => Err(Reason::Order),
            },
            (Request::Keep, State::Away) => {
                self.set_kept(fd);
                self.kept.is_some().then_some(()).ok_or(Reason::Order)
            }
            (Request::Kept, State::Away) => {
                let kept = self.kept.as_ref().ok_or(Reason::Order)?;
                self.piece(0, 0, kept);
                Ok(())
            }
            (Request::Fill, State::Away) => {
                if fd.is_some() {
                    self.set_kept(fd);
                }
                let filled = self.fill();
                memory::be_impatient();
                self.give_up();
                filled
            }
            (Request::Spare, State::Away) => {
                self.stays = self.kept.is_some();
                self.stays.then_some(()).ok_or(Reason::Order)
            }
            (Request::Forget, State::Away) => {
                self.set_kept(None);
                Ok(())
            }
            (Request::Forget, State::Open) => {
                self.set_spare(None);
                Ok(())
            }
            (Request::Fill, State::Open | State::Stopped(_)) => {
                self.go_on();
                memory::be_impatient();
                self.give_up();
                Ok(())
            }
            (Request::State, State::Away) => Ok(()),
            (Request::LetGo, _) => {
                memory::be_impatient();
                Ok(())
            }
            _ => Err(Reason::Order),
        }
    }

    /// Lets NCCL's calls go on. Communicators that are down stay so for a while: whoever has started the agent starts
    /// another one, which makes them again.
    fn give_up(&mut self) {
        match state::lacks_comms() {
            true => self.given_up = Some(Instant::now() + ANOTHER_AGENT),
            false => state::give_up(),
        }
    }

    /// Opens the gate.
    fn go_on(&mut self) {
        self.state = State::Open;
        self.placed = false;
        DESCRIPTORS[4].store(-1, SeqCst);
        let kept = self.kept.take();
        if std::mem::take(&mut self.stays) {
            self.set_spare(kept);
        }
        self.untaken.clear();
        gate::open();
    }

    fn set_kept(&mut self, kept: Option<OwnedFd>) {
        let fd = kept.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        DESCRIPTORS[4].store(fd, SeqCst);
        self.kept = kept;
    }

    /// Notes the copy where the agent looks for it, and lets go of the one before.
    fn set_spare(&mut self, spare: Option<OwnedFd>) {
        let fd = spare.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        DESCRIPTORS[3].store(fd, SeqCst);
        let number = fd.to_le_bytes();
        let card = DESCRIPTORS[2].load(SeqCst);
        // SAFETY: reads four bytes.
        unsafe {
            libc::pwrite(
                card,
                number.as_ptr().cast(),
                number.len(),
                Card::SPARE_AT as i64,
            )
        };
        self.spare = spare;
    }

    fn piece(&self, offset: u64, bytes: u64, fd: &OwnedFd) {
        let piece = Answer::Piece { offset, bytes };
        if !self.deaf.get() {
            let sent = wire::send_answer(self.socket, self.number, piece, Some(fd.as_fd()));
            self.deaf.set(sent.is_err());
        }
    }

    fn stop(&mut self, [limit, hold]: [Duration; 2]) -> Result<(), Reason> {
        // So that no copy that others change is left, whatever fails, and none is in a checkpoint.
        let placed = self.placed || (self.spare.is_some() && memory::is_compact());
        self.set_spare(None);
        // If this fails, the calls must not go on in a state in which memory can be released.
        self.go_on();
        let (limit, hold) = (limit.min(LONGEST), hold.min(LONGEST));
        let until = Instant::now() + limit;
        // First: the driver's own checkpoint, to which an unknown function leaves the process, would not end.
        if foreign().has_multicast() {
            return Err(Reason::Multicast);
        }
        if !gate::holds_all() || !linked::names(driver::is_unknown).is_empty() {
            return Err(Reason::Unknown);
        }
        loop {
            if !gate::shut(until) {
                return Err(Reason::Busy);
            }
            if foreign().has_multicast() {
                gate::open();
                return Err(Reason::Multicast);
            }
            if !gate::is_capturing() {
                break;
            }
            // It needs calls to come to its end.
            gate::open();
            if Instant::now() >= until {
                return Err(Reason::Busy);
            }
            std::thread::sleep(TICK);
        }
        let exported = idle::finished(until).and_then(|()| self.export(placed));
        match exported {
            Ok(()) => self.state = State::Stopped(Instant::now() + hold),
            Err(_) => self.go_on(),
        }
        exported
    }

    fn export(&self, keep: bool) -> Result<(), Reason> {
        let each = |one: Exported| self.piece(one.offset, one.bytes, &one.descriptor);
        memory::export_all(keep, each).map_err(cuda)
    }

    fn allocate(&mut self, from: u64, bytes: u64) -> Result<(), Reason> {
        let places = match bytes {
            0 => from..u64::MAX,
            bytes => from..from.saturating_add(bytes),
        };
        memory::restore(&places).map_err(cuda)?;
        let each = |one: Exported| self.piece(one.offset, one.bytes, &one.descriptor);
        memory::export_empty(&places, each).map_err(cuda)
    }

    fn take_back(&mut self, offset: u64, bytes: u64, from: OwnedFd) -> Result<(), Reason> {
        let back = in_a_context(|| memory::take_back(offset, bytes, from.as_fd()));
        if back.is_err() {
            self.untaken.push((offset, bytes, from));
        }
        back
    }

    fn fill(&mut self) -> Result<(), Reason> {
        for (offset, bytes, from) in std::mem::take(&mut self.untaken) {
            let _ = self.take_back(offset, bytes, from);
        }
        if !self.untaken.is_empty() {
            return Err(Reason::Order);
        }
        memory::restore(&(0..u64::MAX)).map_err(cuda)?;
        if !memory::has_all() {
            let file = self.kept.as_ref().ok_or(Reason::Order)?;
            let contents = Contents::map(file).map_err(|_| Reason::Order)?;
            in_a_context(|| memory::fill_from(contents.bytes()))?;
        }
        match memory::is_back(true) {
            true => self.go_on(),
            false => return Err(Reason::Order),
        }
        Ok(())
    }
}

/// Lets the calls go on, as nobody can ask for it any more: the program has closed the socket, say.
impl Drop for Control<'_> {
    fn drop(&mut self) {
        // Their numbers may be the program's by now.
        for fd in &DESCRIPTORS {
            fd.store(-1, SeqCst);
        }
        memory::be_impatient();
        state::give_up();
        while matches!(self.state, State::Away) && self.fill().is_err() {
            let in_file = self.kept.as_ref().map(Contents::map);
            if self.untaken.is_empty() && !matches!(in_file, Some(Ok(_))) {
                // Nobody has the contents. What uses the memory fails.
                memory::unmap_empty();
                break;
            }
            std::thread::sleep(AGAIN);
        }
        std::mem::forget((self.kept.take(), self.spare.take()));
        self.go_on();
    }
}

/// Does work that needs a context of CUDA's.
fn in_a_context(work: impl FnOnce() -> Result<(), c_int>) -> Result<(), Reason> {
    let context = contexts::all().first().copied().unwrap_or_default();
    let done = contexts::with(context, work);
    done.and_then(|done| done).map_err(cuda)
}

/// A file's contents, mapped.
struct Contents {
    address: *const u8,
    bytes: usize,
}

impl Contents {
    fn map(file: &OwnedFd) -> io::Result<Self> {
        let size = File::from(file.try_clone()?).metadata()?.len();
        let bytes = usize::try_from(size).map_err(io::Error::other)?;
        let (prot, flags) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: a new mapping of a file.
        let address = unsafe { mmap(std::ptr::null_mut(), bytes, prot, flags, file, 0)? };
        Ok(Self {
            address: address.cast(),
            bytes,
        })
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.address, self.bytes) }
    }
}

impl Drop for Contents {
    fn drop(&mut self) {
        // SAFETY: the mapping made above, to which no reference is left.
        let _ = unsafe { munmap(self.address.cast_mut().cast(), self.bytes) };
    }
}
