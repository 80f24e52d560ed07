//! Sends requests to the agent and waits for all answers. Meanwhile the drivers' threads run in stopped processes, stop
//! where the driver asks for memory, and get it.

pub mod client;

use crate::exchange::client::{Client, ClientError};
use crate::messages::protocol::{DriverError, Op, Outcome, Reply};
use crate::released::{Attention, Released};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// How often the released threads are handled while the driver works.
const TICK: Duration = Duration::from_millis(5);
/// The same for threads that stop at each of their system calls.
const WATCH_TICK: Duration = Duration::from_micros(50);
/// How long an answer is waited for where nothing else is to be done.
const IDLE: Duration = Duration::from_millis(200);
/// How long the driver may take to notice that a process was killed.
const KILLED: Duration = Duration::from_secs(10);

/// Decides what [`exchange`] does for its caller meanwhile.
pub trait Attendant {
    /// Returns how many threads allocate memory.
    fn threads(&self) -> usize {
        1
    }

    /// Gives a held thread the memory that the agent has for it (`outcome`), or lets the driver's own call pass. Returns
    /// what else the agent is to do; nobody waits for that.
    fn give(
        &mut self,
        thread: &mut Released,
        _bytes: u64,
        _since: Instant,
        _outcome: &Outcome,
    ) -> Vec<Op> {
        thread.pass();
        Vec::new()
    }

    /// Handles an error of what nobody waits for.
    fn refused(&mut self, error: &DriverError) {
        tracing::debug!("{error}");
    }

    /// Returns true if the caller must not wait longer.
    fn called_off(&self) -> bool {
        false
    }
}

impl Attendant for () {}

/// Why not all answers came.
#[derive(Debug, thiserror::Error)]
pub enum ExchangeError {
    #[error("{0}")]
    Agent(#[from] ClientError),
    #[error("signal {signal} ended it in the driver's thread")]
    Fault { pid: i32, signal: i32 },
    /// The memory that the threads wait for cannot be read. Their processes were killed: only that ends the driver's work.
    #[error("{0}")]
    Unread(DriverError),
    #[error("called off")]
    CalledOff,
}

/// Sends all requests at once and waits for all answers, in the order of the requests.
///
/// The driver cannot be stopped half-way, so this waits for every answer even after an error. An answer that does not
/// come in time is an error of all. If memory that the released threads wait for cannot be read (an error as the answer
/// to [`Op::VramRead`]), their processes are killed. A fault in a released thread ends its process.
pub fn exchange(
    client: &mut Client,
    ops: Vec<Op>,
    released: &mut [Released],
    attendant: &mut dyn Attendant,
) -> Result<Vec<Reply>, ExchangeError> {
    let longest = ops.iter().map(Op::patience).max().unwrap_or_default();
    let mut deadline = Instant::now() + longest;
    let tick = match (released.iter().any(Released::is_watched), released.len()) {
        (true, _) => Duration::ZERO,
        (false, 0) => IDLE,
        (false, _) => TICK,
    };
    let (mut ids, mut reading, mut over) = (Vec::new(), None, None);
    for op in ops {
        let waits = matches!(op, Op::VramRead { .. }) && !released.is_empty();
        let id = client.send(op)?;
        ids.push(id);
        reading = reading.or(waits.then_some(id));
    }
    let mut replies: HashMap<u64, Reply> = HashMap::new();
    // Threads that are held until the agent has memory for them.
    let mut held: HashMap<u64, (usize, u64, Instant)> = HashMap::new();
    while replies.len() < ids.len() {
        let reply = client.receive(tick)?;
        let mut busy = reply.is_some();
        for (i, thread) in released.iter_mut().enumerate() {
            let bytes = match thread.attend() {
                Attention::Quiet => continue,
                Attention::Busy => 0,
                Attention::Asks(bytes) => bytes,
            };
            busy = true;
            let pid = thread.ids().0;
            if let (Some(signal), None) = (thread.fault(), &over) {
                over = Some(ExchangeError::Fault { pid, signal });
                deadline = Instant::now() + KILLED;
            }
            if bytes > 0 {
                let (threads, limit_ms) = (attendant.threads(), 0);
                let op = Op::VramPrepare {
                    pid,
                    bytes,
                    threads,
                    limit_ms,
                };
                held.insert(client.send(op)?, (i, bytes, Instant::now()));
            }
        }
        if tick.is_zero() && !busy {
            std::thread::sleep(WATCH_TICK);
        }
        let Some(reply) = reply else {
            if attendant.called_off() {
                return Err(ExchangeError::CalledOff);
            }
            if Instant::now() >= deadline {
                let silent = || ClientError::Silent(longest.as_secs_f64()).into();
                return Err(over.unwrap_or_else(silent));
            }
            continue;
        };
        if let Some((i, bytes, since)) = held.remove(&reply.id) {
            for op in attendant.give(&mut released[i], bytes, since, &reply.outcome) {
                client.send(op)?;
            }
        } else if ids.contains(&reply.id) {
            if let (true, Outcome::Error(error)) = (reading == Some(reply.id), &reply.outcome) {
                over = Some(ExchangeError::Unread(error.clone()));
                deadline = Instant::now() + KILLED;
                released.iter_mut().for_each(Released::kill);
            }
            replies.insert(reply.id, reply);
        } else if let Outcome::Error(error) = &reply.outcome {
            attendant.refused(error);
        }
    }
    match over {
        Some(over) => Err(over),
        None => Ok(ids.iter().filter_map(|id| replies.remove(id)).collect()),
    }
}
