//! Computes SHA-256 of several streams, on all cores.
//!
//! One digest cannot be split between cores, and one stream does not fill a core: the SHA instructions wait for each
//! other. Interleaving two streams does (on one core of an EPYC from 1.4 to 2.5 GB/s). So streams have no threads of
//! their own. They hand their data to [`Hashers`], whose threads take two streams at a time if two are waiting.

#[cfg(target_arch = "x86_64")]
mod two;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::Scope;
use std::time::Instant;

use sha2::digest::generic_array::{GenericArray, typenum::U64};

use crate::digest::Digest;

const BLOCK: usize = 64;

/// Bytes of a single stream after which a thread looks for a second one.
const ALONE_BYTES: usize = 128 << 10;

/// FIPS 180-4, section 5.3.3.
const START: State = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

type State = [u32; 8];

/// Bytes that several threads read.
pub(crate) type Shared = Arc<dyn AsRef<[u8]> + Send + Sync>;

struct Sha {
    state: State,
    bytes: u64,
    /// The start of a block.
    rest: [u8; BLOCK],
    have: usize,
}

impl Sha {
    fn new() -> Self {
        Self {
            state: START,
            bytes: 0,
            rest: [0; BLOCK],
            have: 0,
        }
    }

    fn update(&mut self, data: &[u8]) {
        let data = self.complete(data);
        let whole = data.len() - data.len() % BLOCK;
        blocks(&mut self.state, &data[..whole]);
        self.keep(&data[whole..]);
    }

    /// Completes a partial block, and returns the rest. Counts all bytes.
    fn complete<'d>(&mut self, data: &'d [u8]) -> &'d [u8] {
        self.bytes += data.len() as u64;
        if self.have == 0 {
            return data;
        }
        let n = data.len().min(BLOCK - self.have);
        self.rest[self.have..self.have + n].copy_from_slice(&data[..n]);
        self.have += n;
        if self.have == BLOCK {
            let block = self.rest;
            blocks(&mut self.state, &block);
            self.have = 0;
        }
        &data[n..]
    }

    /// Keeps the start of a block.
    fn keep(&mut self, data: &[u8]) {
        if !data.is_empty() {
            self.rest[..data.len()].copy_from_slice(data);
            self.have = data.len();
        }
    }

    fn finish(mut self) -> Digest {
        let bits = self.bytes.wrapping_mul(8);
        let zeros = (2 * BLOCK - 9 - self.have) % BLOCK;
        let mut end = [0; 2 * BLOCK];
        end[0] = 0x80;
        end[1 + zeros..9 + zeros].copy_from_slice(&bits.to_be_bytes());
        self.update(&end[..9 + zeros]);
        let mut hash = [0; 32];
        for (to, word) in hash.chunks_exact_mut(4).zip(self.state) {
            to.copy_from_slice(&word.to_be_bytes());
        }
        Digest::from_bytes(hash)
    }
}

/// Hashes whole blocks of one stream.
fn blocks(state: &mut State, data: &[u8]) {
    // SAFETY: a GenericArray has the layout of an array of its length, and the count fits.
    let blocks: &[GenericArray<u8, U64>] =
        unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len() / BLOCK) };
    sha2::compress256(state, blocks);
}

#[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
fn update_two(a: &mut Sha, of_a: &[u8], b: &mut Sha, of_b: &[u8]) {
    let (mut of_a, mut of_b) = (a.complete(of_a), b.complete(of_b));
    #[cfg(target_arch = "x86_64")]
    {
        let both = of_a.len().min(of_b.len());
        let both = both - both % BLOCK;
        if two::blocks(&mut a.state, &mut b.state, &of_a[..both], &of_b[..both]) {
            (of_a, of_b) = (&of_a[both..], &of_b[both..]);
        }
    }
    for (sha, rest) in [(a, of_a), (b, of_b)] {
        let whole = rest.len() - rest.len() % BLOCK;
        blocks(&mut sha.state, &rest[..whole]);
        sha.keep(&rest[whole..]);
    }
}

/// Threads that hash the streams of an operation.
pub(crate) struct Hashers {
    queue: Arc<Queue>,
}

struct Queue {
    waiting: Mutex<Waiting>,
    more: Condvar,
    /// Interleaving two streams is faster than one core for each.
    in_pairs: bool,
}

#[derive(Default)]
struct Waiting {
    lines: VecDeque<Arc<Line>>,
    /// Threads that work on one stream, and keep looking for a second.
    halves: usize,
    idle: usize,
    closed: bool,
}

/// The queued pieces of a stream.
struct Line {
    held: Mutex<Held>,
    empty: Condvar,
}

struct Held {
    /// `None` while a thread works on it.
    sha: Option<Sha>,
    pieces: VecDeque<Shared>,
    /// A caller waits for the end.
    urgent: bool,
}

impl Line {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The piece that a thread works on.
struct Work {
    line: Arc<Line>,
    sha: Sha,
    piece: Shared,
    at: usize,
}

impl Work {
    fn begin(line: Arc<Line>) -> Option<Self> {
        let mut held = line.held();
        let piece = held.pieces.pop_front()?;
        let sha = held.sha.take()?;
        drop(held);
        Some(Self {
            line,
            sha,
            piece,
            at: 0,
        })
    }

    fn left(&self) -> usize {
        (*self.piece).as_ref().len() - self.at
    }

    /// Returns the stream when the piece is done. `Err`: the stream has more.
    fn done(self) -> Result<Option<Self>, Arc<Line>> {
        if self.left() > 0 {
            return Ok(Some(self));
        }
        let Self {
            line, sha, piece, ..
        } = self;
        drop(piece); // frees its memory for a waiting thread
        let mut held = line.held();
        held.sha = Some(sha);
        if held.pieces.is_empty() {
            line.empty.notify_all();
            return Ok(None);
        }
        drop(held);
        Err(line)
    }
}

impl Hashers {
    /// Starts threads for `cores` cores. They end when this is dropped and everything is hashed.
    pub(crate) fn new<'s>(scope: &'s Scope<'s, '_>, cores: usize) -> Self {
        let in_pairs = pairs_pay();
        // Created first, so that the threads are told to end even on a panic.
        let this = Self {
            queue: Arc::new(Queue {
                waiting: Mutex::default(),
                more: Condvar::new(),
                in_pairs,
            }),
        };
        // With fewer threads more streams find a partner.
        let threads = if in_pairs { cores.div_ceil(2) } else { cores };
        for _ in 0..threads {
            let queue = Arc::clone(&this.queue);
            scope.spawn(move || queue.work());
        }
        this
    }

    pub(crate) fn stream(&self) -> Stream {
        let held = Mutex::new(Held {
            sha: Some(Sha::new()),
            pieces: VecDeque::new(),
            urgent: false,
        });
        Stream {
            line: Arc::new(Line {
                held,
                empty: Condvar::new(),
            }),
            queue: Arc::clone(&self.queue),
        }
    }
}

impl Drop for Hashers {
    fn drop(&mut self) {
        self.queue.waiting().closed = true;
        self.queue.more.notify_all();
    }
}

/// Returns true if this processor interleaves two streams much faster than it hashes them one after the other.
/// Measured: 1.8 times as fast on an EPYC, 1.3 times on the Xeon of the H200 machine (docs/benchmarks.md).
fn pairs_pay() -> bool {
    let data = [0; 32 << 10];
    let (mut a, mut b) = (Sha::new(), Sha::new());
    let mut quickest = |work: &mut dyn FnMut(&mut Sha, &mut Sha)| {
        let times = (0..3).map(|_| {
            let start = Instant::now();
            work(&mut a, &mut b);
            start.elapsed()
        });
        times.min().unwrap_or_default()
    };
    let one_by_one = quickest(&mut |a, b| [a, b].into_iter().for_each(|sha| sha.update(&data)));
    let by_turns = quickest(&mut |a, b| update_two(a, &data, b, &data));
    by_turns * 3 < one_by_one * 2
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, line: Arc<Line>) {
        let mut waiting = self.waiting();
        waiting.lines.push_back(line);
        let pair = waiting.lines.len() > waiting.halves.max(1);
        if pair || !self.in_pairs {
            self.more.notify_one();
        }
    }

    /// Wakes a thread, as a stream that waits no longer needs a partner.
    fn nudge(&self) {
        drop(self.waiting()); // a thread that has just looked is asleep now
        self.more.notify_one();
    }

    /// Waits for work; returns `false` at the end.
    ///
    /// Begun work continues. Otherwise a single stream waits for a second stream, until it has a second piece itself.
    fn fill(&self, works: &mut Vec<Work>) -> bool {
        let mut waiting = self.waiting();
        loop {
            let enough = match self.in_pairs {
                true => {
                    let ripe = |line: &Arc<Line>| {
                        let held = line.held();
                        held.urgent || held.pieces.len() > 1
                    };
                    let lines = &waiting.lines;
                    let any = works.len() + lines.len() > 1 || lines.front().is_some_and(ripe);
                    if any || waiting.closed { 2 } else { 0 }
                }
                false if waiting.idle > 0 => 1,
                false => 2,
            };
            while works.len() < enough {
                let Some(line) = waiting.lines.pop_front() else {
                    break;
                };
                works.extend(Work::begin(line));
            }
            if !works.is_empty() {
                waiting.halves += usize::from(works.len() == 1);
                return true;
            }
            if waiting.closed {
                return false;
            }
            waiting.idle += 1;
            waiting = self
                .more
                .wait(waiting)
                .unwrap_or_else(PoisonError::into_inner);
            waiting.idle -= 1;
        }
    }

    fn work(&self) {
        let mut works: Vec<Work> = Vec::with_capacity(2);
        while self.fill(&mut works) {
            match &mut works[..] {
                [a, b] => {
                    let n = a.left().min(b.left());
                    let (of_a, of_b) = ((*a.piece).as_ref(), (*b.piece).as_ref());
                    let (of_a, of_b) = (&of_a[a.at..a.at + n], &of_b[b.at..b.at + n]);
                    update_two(&mut a.sha, of_a, &mut b.sha, of_b);
                    (a.at, b.at) = (a.at + n, b.at + n);
                }
                [one] => {
                    let n = one.left().min(ALONE_BYTES);
                    one.sha.update(&(*one.piece).as_ref()[one.at..one.at + n]);
                    one.at += n;
                    self.waiting().halves -= 1;
                }
                _ => {}
            }
            for work in std::mem::take(&mut works) {
                match work.done() {
                    Ok(unfinished) => works.extend(unfinished),
                    Err(line) => self.push(line),
                }
            }
        }
    }
}

/// The input side of a stream.
pub(crate) struct Stream {
    line: Arc<Line>,
    queue: Arc<Queue>,
}

impl Stream {
    pub(crate) fn feed(&self, piece: Shared) {
        let mut held = self.line.held();
        let with_nobody = held.sha.is_some();
        held.pieces.push_back(piece);
        let pieces = held.pieces.len();
        drop(held);
        match pieces {
            1 if with_nobody => self.queue.push(Arc::clone(&self.line)),
            2 if with_nobody => self.queue.nudge(),
            _ => {}
        }
    }

    /// Waits until all pieces are hashed.
    fn idle(&self) -> MutexGuard<'_, Held> {
        let mut held = self.line.held();
        while held.sha.is_none() || !held.pieces.is_empty() {
            if !held.urgent {
                held.urgent = true;
                drop(held);
                self.queue.nudge();
                held = self.line.held();
                continue;
            }
            held = self
                .line
                .empty
                .wait(held)
                .unwrap_or_else(PoisonError::into_inner);
        }
        held.urgent = false;
        held
    }

    /// Hashes data that the caller keeps, at once.
    pub(crate) fn update(&self, data: &[u8]) {
        if let Some(sha) = &mut self.idle().sha {
            sha.update(data);
        }
    }

    pub(crate) fn finish(self) -> Digest {
        let sha = self.idle().sha.take();
        sha.unwrap_or_else(Sha::new).finish()
    }
}

#[cfg(test)]
mod tests;
