//! A communicator: a thread that carries out its calls in their order, as NCCL's kernels do on a stream.

use crate::board::{self, Board, DONE, HANDLE, JOINED, PID, RECEIVED, RING, STAMP, VALUE};
use crate::driver;
use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

pub const REMOTE_ERROR: i32 = 6;
const POLL: Duration = Duration::from_micros(200);
const BUFFER: usize = 1 << 20;

/// A call: the first word at the first address is the value, the second one is passed on with the result. With what was
/// received comes a 1.
#[derive(Clone, Copy)]
pub enum Call {
    AllReduce { from: u64, to: u64 },
    Send { from: u64, peer: usize },
    Receive { to: u64, peer: usize },
}

pub struct Comm {
    shared: Arc<Shared>,
    sender: Option<mpsc::Sender<Vec<Call>>>,
    worker: Option<JoinHandle<()>>,
    pub device: i32,
    pub splits: AtomicU64,
    buffer: u64,
    imports: Vec<u64>,
    _socket: UnixDatagram,
}

pub struct Shared {
    board: Board,
    pub name: String,
    pub ranks: usize,
    pub rank: usize,
    pub error: AtomicI32,
    aborted: AtomicBool,
    collectives: AtomicU64,
}

impl Shared {
    /// Waits; false if a rank has died, or it was aborted.
    fn until(&self, mut what: impl FnMut(&Board) -> bool) -> bool {
        while !what(&self.board) {
            if self.aborted.load(SeqCst) {
                return false;
            }
            let alive = |rank: usize| {
                let pid = self.board.get(rank, PID);
                // SAFETY: asks whether there is such a process.
                pid == 0 || unsafe { libc::kill(pid as i32, 0) } == 0
            };
            if !(0..self.ranks).all(alive) {
                self.error.store(REMOTE_ERROR, SeqCst);
                return false;
            }
            std::thread::sleep(POLL);
        }
        true
    }

    pub fn exchange(&self, value: u64) -> Option<Vec<u64>> {
        let number = self.collectives.fetch_add(1, SeqCst);
        let at = (number as usize) % RING;
        let all = 0..self.ranks;
        let room = |board: &Board| {
            let mut done = (0..self.ranks).map(|r| board.get(r, DONE));
            done.all(|done| done + RING as u64 > number)
        };
        if !self.until(room) {
            return None;
        }
        self.board.set(self.rank, VALUE + at, value);
        self.board.set(self.rank, STAMP + at, number + 1);
        let here = |board: &Board| (0..self.ranks).all(|r| board.get(r, STAMP + at) == number + 1);
        if !self.until(here) {
            return None;
        }
        let values = all.map(|r| self.board.get(r, VALUE + at)).collect();
        self.board.set(self.rank, DONE, number + 1);
        Some(values)
    }

    fn carry_out(&self, calls: &[Call], sends: &mut [u64], receives: &mut [u64]) -> Option<()> {
        for call in calls {
            let Call::Send { from, peer } = *call else {
                continue;
            };
            let number = sends[peer];
            sends[peer] += 1;
            let room = |board: &Board| board.get(peer, RECEIVED + self.rank) + RING as u64 > number;
            self.until(room).then_some(())?;
            let (value, stamp) = board::sent(peer, number);
            self.board.set(self.rank, value, driver::read::<1>(from)[0]);
            self.board.set(self.rank, stamp, number + 1);
        }
        for call in calls {
            match *call {
                Call::Send { .. } => {}
                Call::AllReduce { from, to } => {
                    let [value, tag] = driver::read::<2>(from);
                    let values = self.exchange(value)?;
                    let sum = values.into_iter().fold(0, u64::wrapping_add);
                    driver::write(to, [sum, tag]);
                }
                Call::Receive { to, peer } => {
                    let number = receives[peer];
                    receives[peer] += 1;
                    let (value, stamp) = board::sent(self.rank, number);
                    self.until(|board| board.get(peer, stamp) == number + 1)
                        .then_some(())?;
                    driver::write(to, [self.board.get(peer, value), 1]);
                    self.board.set(self.rank, RECEIVED + peer, number + 1);
                }
            }
        }
        Some(())
    }
}

impl Comm {
    /// Meets the other ranks; blocks until all are there, as NCCL does.
    pub fn new(name: &str, ranks: usize, rank: usize) -> Result<Self, i32> {
        let system = |_| 2;
        if ranks > board::RANKS || rank >= ranks || board::directory().join("nccl-fail").exists() {
            return Err(2);
        }
        let board = Board::open(name).map_err(system)?;
        let buffer = driver::allocate(BUFFER);
        for (at, word) in driver::export(buffer).into_iter().enumerate() {
            board.set(rank, HANDLE + at, word);
        }
        let address = format!("tmp/nccl-socket-{rank}-{name}{}", std::process::id());
        let address = SocketAddr::from_abstract_name(address).map_err(system)?;
        let socket = UnixDatagram::bind_addr(&address).map_err(system)?;
        let shared = Shared {
            board,
            name: name.to_owned(),
            ranks,
            rank,
            error: AtomicI32::new(0),
            aborted: AtomicBool::new(false),
            collectives: AtomicU64::new(0),
        };
        let board = &shared.board;
        board.set(rank, PID, std::process::id().into());
        board.set(rank, JOINED, 1);
        if !shared.until(|board| (0..ranks).all(|r| board.get(r, JOINED) >= 1)) {
            return Err(REMOTE_ERROR);
        }
        let mut imports = Vec::new();
        for other in (0..ranks).filter(|other| *other != rank) {
            let handle = std::array::from_fn(|at| board.get(other, HANDLE + at));
            imports.push(driver::import(handle));
        }
        board.set(rank, JOINED, 2);
        if !shared.until(|board| (0..ranks).all(|r| board.get(r, JOINED) == 2)) {
            return Err(REMOTE_ERROR);
        }
        let _ = fs::remove_file(&shared.board.path);
        let shared = Arc::new(shared);
        let (sender, receiver) = mpsc::channel::<Vec<Call>>();
        let (theirs, context, device) = (Arc::clone(&shared), driver::context(), driver::device());
        let worker = std::thread::spawn(move || {
            driver::use_context(context);
            let (mut sends, mut receives) = ([0; board::RANKS], [0; board::RANKS]);
            for calls in receiver {
                if theirs
                    .carry_out(&calls, &mut sends, &mut receives)
                    .is_none()
                {
                    return;
                }
            }
        });
        Ok(Self {
            shared,
            sender: Some(sender),
            worker: Some(worker),
            device,
            splits: AtomicU64::new(0),
            buffer,
            imports,
            _socket: socket,
        })
    }

    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub fn enqueue(&self, calls: Vec<Call>) {
        if let Some(sender) = &self.sender {
            let _ = sender.send(calls);
        }
    }

    pub fn abort(&self) {
        self.shared.aborted.store(true, SeqCst);
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        drop(self.sender.take());
        if let Some(worker) = self.worker.take() {
            let _ = worker.join();
        }
        for import in &self.imports {
            driver::close(*import);
        }
        driver::free(self.buffer);
    }
}
