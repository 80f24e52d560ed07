//! The communicators of this process, the counters of their calls, and the gate at which calls wait.
//!
//! A call that enqueues work on a communicator is counted for it, and so is one that all ranks of it make together. While
//! the gate is held a call waits unless the process is behind: if a counter is below what the agent wants it to reach,
//! all calls may pass, as it cannot be known which of them lead there. A group passes as a whole.

use super::{REMOTE_ERROR, SUCCESS};
use crate::process::PerProcess;
use cryopod_preload_wire::nccl::{self as wire, Clock, Kind, Report};
use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CStr, CString, c_int};
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Communicators that are remembered after their end.
const MAX_GONE: usize = 256;

/// A communicator, by the program's handle.
#[derive(Default)]
pub struct Comm {
    /// NCCL's handle; 0: it is down, or lost.
    pub real: usize,
    /// The same in all of its ranks.
    pub id: u64,
    /// 0: not known yet.
    pub ranks: u32,
    pub rank: u32,
    pub config: Option<Config>,
    /// The CUDA context that was current; 0: none was.
    pub context: usize,
    pub device: i32,
    /// Communicators that were split from it.
    pub children: u64,
    /// By the program's handle: NCCL's handle, address and size.
    pub registered: BTreeMap<usize, [usize; 3]>,
    /// Reductions that the program has defined for it and not destroyed yet.
    pub reductions: u32,
    /// The program will only destroy it.
    pub finalized: bool,
    /// What every call returns if it is lost.
    pub error: c_int,
}

/// A copy of an `ncclConfig_t`.
#[derive(Clone)]
pub struct Config {
    words: Vec<u64>,
    network: Option<CString>,
    name: Option<CString>,
}

impl Config {
    const MAGIC: u32 = 0xcafe_beef;
    /// `netName` and `commName`, as words.
    const NETWORK: usize = 4;
    const NAME: usize = 6;
    const MAX_BYTES: usize = 4096;

    /// Copies it, if it is one.
    ///
    /// # Safety
    /// The pointer must be null or the program's for an `ncclConfig_t`.
    pub unsafe fn copy(config: *const u64) -> Option<Self> {
        // SAFETY: the size comes first, and then magic and version, in all versions.
        let (size, head) = unsafe {
            let config = (!config.is_null()).then_some(config)?;
            (usize::try_from(*config).ok()?, *config.add(1))
        };
        let known = (24..=Self::MAX_BYTES).contains(&size) && head as u32 == Self::MAGIC;
        if !known {
            return None;
        }
        // SAFETY: it is as long as it says.
        let words = unsafe { std::slice::from_raw_parts(config, size / 8) }.to_vec();
        let text = |at: usize| {
            let pointer = *words.get(at)? as *const std::ffi::c_char;
            // SAFETY: null or a C string, as NCCL defines.
            (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_owned())
        };
        Some(Self {
            network: text(Self::NETWORK),
            name: text(Self::NAME),
            words,
        })
    }

    /// Calls of the communicator do not wait for their end.
    pub fn is_nonblocking(&self) -> bool {
        self.words.get(2).is_some_and(|word| *word as u32 == 0)
    }

    /// The words, valid as long as `self`.
    pub fn raw(&self) -> Vec<u64> {
        let mut words = self.words.clone();
        for (at, text) in [(Self::NETWORK, &self.network), (Self::NAME, &self.name)] {
            if let (Some(word), Some(text)) = (words.get_mut(at), text) {
                *word = text.as_ptr() as u64;
            }
        }
        words
    }
}

/// A communicator that is being made from another one, and whose handle NCCL will write.
pub struct Child {
    /// Where.
    pub to: usize,
    /// The program's handle of the other one.
    pub parent: usize,
    pub id: u64,
    pub config: Option<Config>,
    pub context: usize,
}

enum Mode {
    Open,
    /// Calls wait, until then.
    Held(Instant),
    /// The communicators are being taken down, or are down, or come up.
    Down,
}

pub struct State {
    mode: Mode,
    pub comms: BTreeMap<usize, Comm>,
    /// Being made: id, ranks, rank.
    pending: Vec<(u64, u32, u32)>,
    pub children: Vec<Child>,
    gone: VecDeque<wire::Comm>,
    clocks: BTreeMap<(u64, u32, Kind), u64>,
    targets: BTreeMap<(u64, u32, Kind), u64>,
    /// Threads within a call or a group.
    inside: u32,
    /// Threads that only ask for something; they never wait.
    asking: u32,
    waiting: Vec<&'static str>,
    /// With the communicator, by the program's handle, that it is about.
    obstacles: Vec<(Option<usize>, String)>,
}

impl State {
    const fn new() -> Self {
        Self {
            mode: Mode::Open,
            comms: BTreeMap::new(),
            pending: Vec::new(),
            children: Vec::new(),
            gone: VecDeque::new(),
            clocks: BTreeMap::new(),
            targets: BTreeMap::new(),
            inside: 0,
            asking: 0,
            waiting: Vec::new(),
            obstacles: Vec::new(),
        }
    }
}

static STATE: PerProcess<State> = PerProcess::new(State::new(), State::new());
static CHANGED: Condvar = Condvar::new();

thread_local! {
    /// Calls and groups that this thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Locks the state of all communicators.
pub fn state() -> MutexGuard<'static, State> {
    STATE.lock()
}

fn wait(state: MutexGuard<'static, State>, limit: Duration) -> MutexGuard<'static, State> {
    let waited = CHANGED.wait_timeout(state, limit);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

/// A call that waits while the gate is held.
pub struct Section(());

/// Waits until the call may be made, unless it is part of a group.
pub fn enter(name: &'static str) -> Section {
    if depth_was(|depth| depth + 1) == 0 {
        let mut state = state();
        while !state.lets_pass() {
            state.waiting.push(name);
            // A held gate opens by itself, which nobody tells.
            state = wait(state, Duration::from_secs(1));
            let at = state.waiting.iter().position(|other| *other == name);
            at.map(|at| state.waiting.swap_remove(at));
        }
        state.inside += 1;
    }
    Section(())
}

impl Drop for Section {
    fn drop(&mut self) {
        leave();
    }
}

/// Begins a group: the thread stays in it until [`end_group`].
pub fn begin_group() {
    std::mem::forget(enter("ncclGroupStart"));
}

/// Ends a group that [`begin_group`] began.
pub fn end_group() {
    leave();
}

fn leave() {
    if depth_was(|depth| depth.saturating_sub(1)) == 1 {
        state().inside -= 1;
    }
}

fn depth_was(change: impl Fn(u32) -> u32) -> u32 {
    DEPTH.with(|depth| depth.replace(change(depth.get())))
}

/// A call that only asks. `None`: the communicators are down, and only what is known here counts.
pub struct Asking(());

/// Begins a call that only asks; it never waits.
pub fn ask() -> Option<Asking> {
    let mut state = state();
    if matches!(state.mode, Mode::Down) {
        return None;
    }
    state.asking += 1;
    Some(Asking(()))
}

impl Drop for Asking {
    fn drop(&mut self) {
        state().asking -= 1;
    }
}

impl State {
    fn is_behind(&self) -> bool {
        let mut targets = self.targets.iter();
        targets.any(|(key, target)| self.clocks.get(key).copied().unwrap_or(0) < *target)
    }

    /// They end with their communicators.
    fn reductions(&self) -> u32 {
        self.comms.values().map(|comm| comm.reductions).sum()
    }

    fn lets_pass(&mut self) -> bool {
        match self.mode {
            Mode::Open => true,
            Mode::Held(until) if Instant::now() >= until => {
                self.open();
                true
            }
            // A reduction that the program has defined is about to be used.
            Mode::Held(_) => self.is_behind() || self.reductions() > 0,
            Mode::Down => false,
        }
    }

    fn open(&mut self) {
        self.mode = Mode::Open;
        self.targets.clear();
        CHANGED.notify_all();
    }

    /// Counts a call.
    pub fn count(&mut self, handle: usize, kind: Kind) {
        if let Some(comm) = self.comms.get(&handle) {
            let clock = self.clocks.entry((comm.id, comm.rank, kind)).or_default();
            *clock += 1;
            // To wake nobody is a system call, too.
            if !self.waiting.is_empty() {
                CHANGED.notify_all();
            }
        }
    }

    /// NCCL's handle for the program's; an error if the communicator is lost.
    pub fn real(&self, handle: usize) -> Result<usize, c_int> {
        match self.comms.get(&handle) {
            Some(comm) if comm.real == 0 => Err(match comm.error {
                SUCCESS => REMOTE_ERROR,
                error => error,
            }),
            Some(comm) => Ok(comm.real),
            None => Ok(handle),
        }
    }

    /// Notes that a communicator is being made: id, ranks, rank.
    pub fn begin_comm(&mut self, comm: (u64, u32, u32)) {
        self.pending.push(comm);
    }

    /// Takes that back when it is made, or failed.
    pub fn end_comm(&mut self, comm: (u64, u32, u32)) {
        let at = self.pending.iter().position(|other| *other == comm);
        at.map(|at| self.pending.swap_remove(at));
    }

    /// Adds a communicator; returns the program's handle.
    pub fn add(&mut self, comm: Comm) -> usize {
        // After a checkpoint a new communicator can have the address that another one had, whose handle is in use.
        let handle = match self.comms.contains_key(&comm.real) {
            true => Box::leak(Box::new(0u64)) as *mut u64 as usize,
            false => comm.real,
        };
        self.comms.insert(handle, comm);
        handle
    }

    /// Removes a communicator that the program destroys.
    pub fn remove(&mut self, handle: usize) -> Option<Comm> {
        let comm = self.comms.remove(&handle)?;
        self.forget_children(handle);
        self.obstacles.retain(|(of, _)| *of != Some(handle));
        self.clocks
            .retain(|(id, rank, _), _| (*id, *rank) != (comm.id, comm.rank));
        self.gone.push_back(wire::Comm {
            id: comm.id,
            ranks: comm.ranks,
            rank: comm.rank,
            state: wire::State::Gone,
        });
        if self.gone.len() > MAX_GONE {
            self.gone.pop_front();
        }
        Some(comm)
    }

    /// Nothing comes of a communicator's children any more.
    pub fn forget_children(&mut self, parent: usize) {
        self.children.retain(|child| child.parent != parent);
    }

    /// Notes why a communicator, or none of them, can be made again.
    pub fn hinder(&mut self, handle: Option<usize>, why: impl Into<String>) {
        let obstacle = (handle, why.into());
        if !self.obstacles.contains(&obstacle) {
            self.obstacles.push(obstacle);
        }
    }

    /// False also where the gate is shut and nothing has been destroyed: if the agent dies then, the gate can open.
    fn lacks_comms(&self) -> bool {
        let is_away = |comm: &Comm| comm.real == 0 && !comm.finalized && comm.error == SUCCESS;
        matches!(self.mode, Mode::Down) && self.comms.values().any(is_away)
    }

    /// Returns what the driver agent is told of all communicators.
    pub fn report(&self) -> Report {
        let children = self.children.iter().map(|child| (child.id, 0, 0));
        let pending = self.pending.iter().copied().chain(children);
        let pending = pending.map(|(id, ranks, rank)| wire::Comm {
            id,
            ranks,
            rank,
            state: wire::State::Pending,
        });
        let comms = self.comms.values().map(|comm| wire::Comm {
            id: comm.id,
            ranks: comm.ranks,
            rank: comm.rank,
            state: match (comm.real, comm.ranks) {
                _ if comm.finalized || comm.error != SUCCESS => wire::State::Gone,
                (0, _) => wire::State::Down,
                (_, 0) => wire::State::Pending,
                _ => wire::State::Up,
            },
        });
        let clocks = self.clocks.iter().map(|((comm, rank, kind), count)| Clock {
            comm: *comm,
            rank: *rank,
            kind: *kind,
            count: *count,
        });
        let mut obstacles: Vec<String> =
            self.obstacles.iter().map(|(_, why)| why.clone()).collect();
        if self.comms.len() + self.pending.len() + MAX_GONE > wire::MAX_COMMS
            || self.clocks.len() > wire::MAX_CLOCKS
        {
            obstacles.push("it has too many NCCL communicators".into());
        }
        Report {
            comms: pending
                .chain(comms)
                .chain(self.gone.iter().copied())
                .collect(),
            clocks: clocks.collect(),
            // A reduction that the program has defined is used at once, and destroyed.
            inside: self.inside + self.reductions(),
            waiting: self.waiting.iter().map(|name| (*name).to_owned()).collect(),
            obstacles,
        }
    }
}

/// Holds the gate until then, for a process that has reached these targets; not while communicators are down.
pub fn hold(targets: Vec<Clock>, until: Instant) -> bool {
    let mut state = state();
    if state.lacks_comms() {
        return false;
    }
    state.mode = Mode::Held(until);
    let targets = targets.into_iter();
    state.targets = targets
        .map(|t| ((t.comm, t.rank, t.kind), t.count))
        .collect();
    CHANGED.notify_all();
    true
}

/// Opens the gate, unless the communicators are down.
pub fn let_go() {
    let mut state = state();
    if !state.lacks_comms() {
        state.open();
    }
}

/// Opens the gate, whatever the state: communicators that are down are lost.
pub fn give_up() {
    let mut state = state();
    for comm in state.comms.values_mut().filter(|comm| comm.real == 0) {
        comm.error = REMOTE_ERROR;
    }
    state.open();
}

/// Shuts the gate for all, if it is held and nobody is inside, and waits for those who ask.
pub fn shut(until: Instant) -> bool {
    let mut state = state();
    let held = matches!(state.mode, Mode::Held(_)) && !state.is_behind();
    if !held || state.inside + state.reductions() > 0 {
        return false;
    }
    state.mode = Mode::Down;
    while state.asking > 0 {
        let now = Instant::now();
        if now >= until {
            state.open();
            return false;
        }
        drop(state);
        std::thread::sleep(Duration::from_millis(1));
        state = self::state();
    }
    true
}

/// Returns true from the moment at which the gate is shut for all until it opens.
pub fn is_down() -> bool {
    matches!(state().mode, Mode::Down)
}

/// Returns true while a communicator is down that can be made again.
pub fn lacks_comms() -> bool {
    state().lacks_comms()
}

/// A number for bytes that is the same in all processes: FNV-1a.
pub fn hash(parts: &[&[u8]]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    let parts = parts.iter().copied().flatten();
    parts.fold(0xcbf2_9ce4_8422_2325, step)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::sync::mpsc;

    fn comm(real: usize, id: u64) -> Comm {
        Comm {
            real,
            id,
            ranks: 2,
            ..Comm::default()
        }
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    fn target(count: u64) -> Clock {
        Clock {
            comm: 7,
            rank: 0,
            kind: Kind::Collective,
            count,
        }
    }

    /// One test, for there is one state.
    #[test]
    fn a_process_runs_on_until_it_is_level() {
        let handle = state().add(comm(0x1000, 7));
        assert_eq!(handle, 0x1000);
        assert_eq!(state().real(handle), Ok(0x1000));
        let (sender, made) = mpsc::channel();
        let calls = std::thread::spawn(move || {
            for _ in 0..3 {
                let _section = enter("ncclAllReduce");
                state().count(handle, Kind::Collective);
                sender.send(()).unwrap();
            }
            begin_group();
            let _section = enter("ncclSend");
            state().count(handle, Kind::SendTo(1));
            sender.send(()).unwrap();
        });
        for _ in 0..3 {
            made.recv().unwrap();
        }
        made.recv().unwrap();
        // Only then its calls have returned.
        calls.join().unwrap();
        // The thread ends within its group.
        assert_eq!(state().report().inside, 1);
        state().inside = 0;

        // A reduction that the program has not destroyed.
        let last = state().add(Comm {
            reductions: 1,
            ..comm(0x3000, 9)
        });
        assert_eq!(state().report().inside, 1);
        state().remove(last).unwrap();
        assert_eq!(state().report().inside, 0);

        assert!(hold(vec![target(3)], soon()));
        let (sender, made) = mpsc::channel();
        let calls = std::thread::spawn(move || {
            for _ in 0..3 {
                let _section = enter("ncclAllReduce");
                state().count(handle, Kind::Collective);
                sender.send(()).unwrap();
            }
        });
        let level = |count: u64| {
            let report = state().report();
            let clocks = report.clocks.iter();
            let mut clocks = clocks.filter(|clock| clock.kind == Kind::Collective);
            report.waiting == ["ncclAllReduce"] && clocks.all(|clock| clock.count == count)
        };
        let wait_for = |count| {
            while !level(count) {
                std::thread::yield_now();
            }
        };
        wait_for(3);
        assert!(made.try_recv().is_err(), "it is level and waits");
        assert!(hold(vec![target(5)], soon()));
        wait_for(5);
        // The agent may die before anything is destroyed, and another one comes.
        assert!(shut(soon()));
        assert!(is_down() && !lacks_comms() && ask().is_none());
        assert!(hold(vec![target(5)], soon()));
        assert!(shut(soon()));
        state().comms.get_mut(&handle).unwrap().real = 0;
        assert!(lacks_comms() && !hold(Vec::new(), soon()), "it is down");
        let_go();
        assert!(is_down());
        // Lost communicators have an error, and the calls go on.
        give_up();
        for _ in 0..3 {
            made.recv().unwrap();
        }
        calls.join().unwrap();
        assert_eq!(state().real(handle), Err(REMOTE_ERROR));

        // The address of a communicator whose handle is in use.
        let other = state().add(comm(0x1000, 8));
        assert_ne!(other, handle);
        assert_eq!(state().real(other), Ok(0x1000));
        state().hinder(Some(other), "a graph");
        state().hinder(Some(other), "a graph");
        assert_eq!(state().report().obstacles, ["a graph"]);
        state().remove(other).unwrap();
        assert!(state().report().obstacles.is_empty());
        let gone = |comm: &wire::Comm| comm.id == 8 && comm.state == wire::State::Gone;
        assert!(state().report().comms.iter().any(gone));

        // A reduction that the program has not destroyed.
        let last = state().add(Comm {
            reductions: 1,
            ..comm(0x3000, 9)
        });
        assert_eq!(state().report().inside, 1);
        state().remove(last).unwrap();
        assert_eq!(state().report().inside, 0);

        // A gate that nobody opens.
        assert!(hold(Vec::new(), Instant::now()));
        drop(enter("ncclAllReduce"));
    }

    #[test]
    fn a_configuration_is_copied_with_its_texts() {
        let (network, words) = (c"Socket", 8);
        let mut raw = vec![0u64; words];
        (raw[0], raw[1]) = (8 * words as u64, u64::from(Config::MAGIC));
        raw[Config::NETWORK] = network.as_ptr() as u64;
        // SAFETY: a configuration of our own.
        let copy = unsafe { Config::copy(raw.as_ptr()) }.unwrap();
        assert!(copy.is_nonblocking());
        assert_eq!(copy.network.as_deref(), Some(network));
        assert_ne!(copy.raw()[Config::NETWORK], raw[Config::NETWORK]);
        raw[1] = 0;
        // SAFETY: as above.
        unsafe {
            assert!(Config::copy(raw.as_ptr()).is_none());
            assert!(Config::copy(std::ptr::null()).is_none());
        }
    }

    #[test]
    fn the_hash_is_that_of_all_ranks() {
        assert_eq!(hash(&[b"a"]), 0xaf63_dc4c_8601_ec8c);
    }
}
