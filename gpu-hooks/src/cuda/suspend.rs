//! GPU memory to host memory or into files, and back, while the processes stay.
//!
//! The driver does at a suspend what it does at a checkpoint, and the memory that it asks for is the
//! lane's, as there: this program is the tracer of the driver's thread meanwhile, everything else in the
//! process runs on (and waits for the driver as soon as it calls it). Afterwards the process alone holds
//! the memory, so that nothing of cryopod needs to live; or it is in files, and nobody holds it.
//!
//! Everything here must be called on one thread. Whatever fails, and if this program dies: the agent brings
//! the processes back unless it has been told to [`Op::Keep`] them.

use super::client::{Client, ClientError};
use super::gpu::{GpuPair, GpuUuid};
use super::inject::{Injection, Seized};
use super::lane::{LaneBuffer, LaneConfig, LaneDone, NamedBuffer, SharedBuffer, WantedRegion};
use super::procfs;
use super::protocol::{Op, Outcome, ProcessState, Reply};
use super::released::{Attention, Released};
use cryopod_archive::lane::LaneFacts;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Limit of a query, which does no work, in milliseconds.
const QUERY_MS: u64 = 10_000;
/// How much later than the agent's own limit its answer may come.
const MARGIN: Duration = Duration::from_secs(10);
const TICK: Duration = Duration::from_micros(50);

/// A suspended process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspended {
    /// The process.
    pub pid: i32,
    /// When it was started, which with the pid names it.
    pub start_time: u64,
    /// Its name.
    pub comm: String,
    /// The GPUs that it had open.
    pub gpus: Vec<GpuUuid>,
    /// The memory of the lane's that the driver was given.
    pub buffers: Vec<LaneBuffer>,
}

/// How to suspend and resume.
#[derive(Debug, Clone)]
pub struct How {
    /// The lane.
    pub lane: LaneConfig,
    /// The folder that the memory is written to; `None`: it stays in host memory.
    pub folder: Option<PathBuf>,
    /// How long the driver may wait for GPU work to end.
    pub lock_timeout_ms: u64,
    /// How long each step may take.
    pub step_timeout_ms: u64,
}

/// What was done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Done {
    /// The processes.
    pub processes: Vec<Suspended>,
    /// What was written or read.
    pub lane: Option<LaneFacts>,
    /// The steps and their times in microseconds, of the slowest process.
    pub steps: Vec<(&'static str, u64)>,
    /// Why the driver's memory is not the lane's, where it is not.
    pub left_out: Option<String>,
}

/// Why it was not done.
#[derive(Debug, thiserror::Error)]
pub enum SuspendError {
    /// The agent cannot be reached.
    #[error("the driver agent: {0}")]
    Agent(#[from] ClientError),
    /// No process uses the driver.
    #[error("none of its processes uses CUDA: there is nothing to suspend")]
    Unused,
    /// It is suspended.
    #[error(
        "process {pid} ({comm}) is suspended already, or was checkpointed by another tool: resume it first"
    )]
    Already {
        /// The process.
        pid: i32,
        /// Its name.
        comm: String,
    },
    /// It is not suspended.
    #[error("none of its processes is suspended")]
    NotSuspended,
    /// A process is in a state in which nothing can be done.
    #[error("process {pid} ({comm}) is {state} for the driver; {remedy}")]
    State {
        /// The process.
        pid: i32,
        /// Its name.
        comm: String,
        /// The state.
        state: ProcessState,
        /// What to do.
        remedy: &'static str,
    },
    /// A step failed.
    #[error("{step} of process {pid} ({comm}): {cause}")]
    Step {
        /// Which.
        step: &'static str,
        /// The process.
        pid: i32,
        /// Its name.
        comm: String,
        /// Why.
        cause: String,
    },
    /// The files cannot be written or read.
    #[error("{0}")]
    Files(String),
}

fn step(step: &'static str, pid: i32, cause: impl ToString) -> SuspendError {
    SuspendError::Step {
        step,
        pid,
        comm: procfs::comm(pid),
        cause: cause.to_string(),
    }
}

/// Memory that the driver was given.
struct Captured {
    pid: i32,
    tid: i32,
    id: u64,
    address: u64,
    bytes: u64,
}

/// The processes and the driver's thread in each.
type Threads = Vec<(i32, i32)>;

/// Suspends the CUDA processes among `pids`. `note` is told of them when all is done and before they are left so.
///
/// # Errors
/// [`SuspendError`]; the agent brings the processes back when the client is dropped.
pub fn suspend(
    client: &mut Client,
    pids: &[i32],
    how: &How,
    note: &mut dyn FnMut(&Done) -> Result<(), String>,
) -> Result<Done, SuspendError> {
    let threads = find(client, pids)?;
    if threads.is_empty() {
        return Err(SuspendError::Unused);
    }
    for (pid, state) in states(client, &threads)? {
        let comm = procfs::comm(pid);
        let remedy = match state {
            ProcessState::Running => continue,
            ProcessState::Checkpointed => return Err(SuspendError::Already { pid, comm }),
            ProcessState::Locked => "another operation is under way, or was not finished",
            _ => "restart it: the driver does not recover such a process",
        };
        return Err(SuspendError::State {
            pid,
            comm,
            state,
            remedy,
        });
    }
    let by_minor: BTreeMap<u32, GpuUuid> = procfs::gpus_by_minor().into_iter().collect();
    let suspended = |(pid, _): &(i32, i32)| Suspended {
        pid: *pid,
        start_time: procfs::stat(*pid).map_or(0, |stat| stat.start_time),
        comm: procfs::comm(*pid),
        gpus: procfs::open_gpu_minors(*pid)
            .iter()
            .filter_map(|minor| by_minor.get(minor).copied())
            .collect(),
        buffers: Vec::new(),
    };
    let mut done = Done {
        processes: threads.iter().map(suspended).collect(),
        ..Done::default()
    };
    let timeout_ms = how.lock_timeout_ms;
    let micros = all(client, "lock", &threads, &|pid| Op::Lock {
        pid,
        timeout_ms,
    })?;
    done.steps.push(("lock", micros));
    let (captured, micros) = checkpoint(client, &threads, how, &mut done.left_out)?;
    done.steps.push(("checkpoint", micros));
    for captured in &captured {
        let process = done.processes.iter_mut().find(|p| p.pid == captured.pid);
        if let Some(process) = process {
            let region = format!("{}-{}", captured.pid, process.buffers.len());
            process.buffers.push(LaneBuffer {
                address: captured.address,
                bytes: captured.bytes,
                region,
            });
        }
    }
    if let Some(folder) = &how.folder {
        let (written, micros) = to_files(client, folder, &captured, &done, how)?;
        done.steps.push(("write", micros));
        done.lane = Some(written.facts);
    }
    note(&done).map_err(SuspendError::Files)?;
    call(client, Op::Keep)?;
    Ok(done)
}

/// Resumes processes; those that are gone or not suspended are left as they are.
///
/// # Errors
/// [`SuspendError`]; what is suspended stays so.
pub fn resume(
    client: &mut Client,
    processes: &[Suspended],
    gpu_map: &[GpuPair],
    how: &How,
) -> Result<Done, SuspendError> {
    let alive = |p: &&Suspended| {
        procfs::stat(p.pid).is_some_and(|s| !s.exiting && s.start_time == p.start_time)
    };
    let alive: Vec<Suspended> = processes.iter().filter(alive).cloned().collect();
    let pids: Vec<i32> = alive.iter().map(|p| p.pid).collect();
    let threads = find(client, &pids)?;
    let states: HashMap<i32, ProcessState> = states(client, &threads)?.into_iter().collect();
    let are = |state: ProcessState| -> Threads {
        let is = |(pid, _): &&(i32, i32)| states.get(pid) == Some(&state);
        threads.iter().filter(is).copied().collect()
    };
    let restore = are(ProcessState::Checkpointed);
    let mut unlock = are(ProcessState::Locked);
    if restore.is_empty() && unlock.is_empty() {
        return Err(SuspendError::NotSuspended);
    }
    let mut done = Done {
        processes: alive,
        ..Done::default()
    };
    let mut loaded = Vec::new();
    if let Some(folder) = &how.folder {
        let start = Instant::now();
        let wanted: Vec<(i32, i32, LaneBuffer)> = done
            .processes
            .iter()
            .filter_map(|p| Some((p, restore.iter().find(|(pid, _)| *pid == p.pid)?)))
            .flat_map(|(p, (pid, tid))| p.buffers.iter().map(|b| (*pid, *tid, b.clone())))
            .collect();
        let (read, buffers) = from_files(client, folder, &wanted, how)?;
        done.lane = read.map(|read| read.facts);
        loaded = wanted;
        for ((pid, tid, buffer), shared) in loaded.iter().zip(&buffers) {
            let mapped = File::options()
                .read(true)
                .write(true)
                .open(&shared.path)
                .and_then(|file| {
                    injected(*pid, *tid, |inject| {
                        inject.map_file(buffer.address, buffer.bytes, &file)
                    })
                });
            if let Err(error) = mapped {
                away(&loaded);
                return Err(step("mapping the memory", *pid, error));
            }
        }
        done.steps.push(("read", micros(start)));
    }
    let limit_ms = how.step_timeout_ms;
    let restored = all(client, "restore", &restore, &|pid| Op::Restore {
        pid,
        gpu_map: gpu_map.to_vec(),
        limit_ms,
    });
    match restored {
        Ok(micros) => done.steps.push(("restore", micros)),
        Err(error) => {
            away(&loaded);
            return Err(error);
        }
    }
    unlock.extend(restore);
    let micros = all(client, "unlock", &unlock, &|pid| Op::Unlock {
        pid,
        limit_ms,
    })?;
    done.steps.push(("unlock", micros));
    call(client, Op::Keep)?;
    Ok(done)
}

/// The CUDA processes among these.
fn find(client: &mut Client, pids: &[i32]) -> Result<Threads, SuspendError> {
    let mut threads = Vec::new();
    for pid in pids {
        let op = Op::Find {
            pid: *pid,
            limit_ms: QUERY_MS,
        };
        if let Outcome::Thread(Some(tid)) = call(client, op)?.outcome {
            threads.push((*pid, tid));
        }
    }
    Ok(threads)
}

fn states(
    client: &mut Client,
    threads: &Threads,
) -> Result<Vec<(i32, ProcessState)>, SuspendError> {
    let mut states = Vec::new();
    for (pid, _) in threads {
        let op = Op::Query {
            pid: *pid,
            limit_ms: QUERY_MS,
        };
        match call(client, op)?.outcome {
            Outcome::State(state) => states.push((*pid, state)),
            Outcome::Error(error) => return Err(step("query", *pid, error)),
            other => return Err(step("query", *pid, format!("unexpected answer {other:?}"))),
        }
    }
    Ok(states)
}

fn limit_of(op: &Op) -> Duration {
    Duration::from_millis(match op {
        Op::Lock { timeout_ms, .. } => *timeout_ms,
        Op::Checkpoint { limit_ms, .. }
        | Op::Restore { limit_ms, .. }
        | Op::Unlock { limit_ms, .. }
        | Op::LaneWait { limit_ms } => *limit_ms,
        _ => QUERY_MS,
    }) + MARGIN
}

fn call(client: &mut Client, op: Op) -> Result<Reply, SuspendError> {
    let limit = limit_of(&op);
    Ok(client.call(op, limit)?)
}

/// One step of all processes at once; the time of the slowest.
fn all(
    client: &mut Client,
    name: &'static str,
    threads: &Threads,
    op: &dyn Fn(i32) -> Op,
) -> Result<u64, SuspendError> {
    let mut sent = HashMap::new();
    let mut limit = MARGIN;
    for (pid, _) in threads {
        let op = op(*pid);
        limit = limit.max(limit_of(&op));
        sent.insert(client.send(op)?, *pid);
    }
    let deadline = Instant::now() + limit;
    let (mut slowest, mut failed) = (0, None);
    while !sent.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ClientError::Silent(limit.as_secs_f64()).into());
        }
        let Some(reply) = client.receive(left)? else {
            continue;
        };
        let Some(pid) = sent.remove(&reply.id) else {
            continue;
        };
        slowest = slowest.max(reply.micros);
        if let Outcome::Error(error) = reply.outcome {
            failed.get_or_insert(step(name, pid, error));
        }
    }
    failed.map_or(Ok(slowest), Err)
}

/// The driver's checkpoint of all processes at once, into the lane's memory.
fn checkpoint(
    client: &mut Client,
    threads: &Threads,
    how: &How,
    left_out: &mut Option<String>,
) -> Result<(Vec<Captured>, u64), SuspendError> {
    let start = Instant::now();
    let mut seized = Vec::new();
    let mut released = Vec::new();
    let begin = || -> Result<(), SuspendError> {
        for (pid, tid) in threads {
            let failed = |error: io::Error| step("tracing the driver's thread", *pid, error);
            seized.push(Seized::new(*tid).map_err(failed)?);
            let least = Some(how.lane.min_bytes);
            released.push(Released::new(*pid, *tid, least).map_err(failed)?);
        }
        Ok(())
    };
    let begun = { begin }();
    let result = begun.and_then(|()| watch(client, threads, how, &mut released, left_out));
    let mut stopped = Ok(());
    for thread in released {
        let (pid, _) = thread.ids();
        if let Err(error) = thread.stop() {
            stopped = Err(step("letting the driver's thread go", pid, error));
        }
    }
    drop(seized);
    let captured = result?;
    stopped?;
    Ok((captured, micros(start)))
}

/// Looks after the driver's threads until all checkpoints have been answered.
fn watch(
    client: &mut Client,
    threads: &Threads,
    how: &How,
    released: &mut [Released],
    left_out: &mut Option<String>,
) -> Result<Vec<Captured>, SuspendError> {
    let limit_ms = how.step_timeout_ms;
    let mut waiting = HashMap::new();
    for (pid, _) in threads {
        let op = Op::Checkpoint {
            pid: *pid,
            limit_ms,
        };
        waiting.insert(client.send(op)?, *pid);
    }
    let deadline = Instant::now() + Duration::from_millis(limit_ms) + MARGIN;
    let mut held: HashMap<u64, (usize, u64)> = HashMap::new();
    let mut ignored: HashSet<u64> = HashSet::new();
    let mut captured = Vec::new();
    let mut failed = None;
    while !waiting.is_empty() {
        let reply = client.receive(Duration::ZERO)?;
        let mut busy = reply.is_some();
        for (i, thread) in released.iter_mut().enumerate() {
            match thread.attend() {
                Attention::Quiet => {}
                Attention::Busy => busy = true,
                Attention::Asks(bytes) => {
                    busy = true;
                    let op = Op::LanePrepare {
                        pid: thread.ids().0,
                        bytes,
                        threads: how.lane.threads(),
                        limit_ms: 0,
                    };
                    held.insert(client.send(op)?, (i, bytes));
                }
            }
        }
        if !busy {
            std::thread::sleep(TICK);
        }
        if Instant::now() >= deadline {
            return Err(ClientError::Silent(limit_ms as f64 / 1000.0).into());
        }
        let Some(reply) = reply else { continue };
        if let Some((i, bytes)) = held.remove(&reply.id) {
            let thread = &mut released[i];
            match answer(thread, bytes, &reply.outcome) {
                Ok(one) => {
                    let Captured {
                        pid,
                        tid,
                        id,
                        address,
                        ..
                    } = one;
                    let op = Op::LanePlaced {
                        id,
                        pid,
                        tid,
                        address,
                    };
                    ignored.insert(client.send(op)?);
                    captured.push(one);
                }
                Err(reason) => {
                    thread.pass();
                    left_out.get_or_insert(reason);
                    if let Outcome::Buffer(buffer) = &reply.outcome {
                        ignored.insert(client.send(Op::LaneDrop { id: buffer.id })?);
                    }
                }
            }
        } else if let Some(pid) = waiting.remove(&reply.id) {
            if let Outcome::Error(error) = reply.outcome {
                failed.get_or_insert(step("checkpoint", pid, error));
            }
        } else {
            ignored.remove(&reply.id);
        }
    }
    match (failed, left_out, &how.folder) {
        (Some(failed), ..) => Err(failed),
        (None, Some(reason), Some(_)) => Err(SuspendError::Files(format!(
            "the GPU memory cannot go into files: {reason}"
        ))),
        _ => Ok(captured),
    }
}

/// Gives the driver the memory that it asks for.
fn answer(thread: &mut Released, bytes: u64, outcome: &Outcome) -> Result<Captured, String> {
    let (pid, tid) = thread.ids();
    let buffer = match outcome {
        Outcome::Buffer(buffer) => buffer,
        Outcome::Error(error) => return Err(error.message.clone()),
        other => return Err(format!("unexpected answer {other:?}")),
    };
    let file = File::options().read(true).write(true).open(&buffer.path);
    let address = file
        .and_then(|file| thread.substitute(&file, bytes))
        .map_err(|error| error.to_string())?;
    Ok(Captured {
        pid,
        tid,
        id: buffer.id,
        address,
        bytes,
    })
}

/// Writes the memory to files, and takes it out of the processes when it is on the disk.
fn to_files(
    client: &mut Client,
    folder: &Path,
    captured: &[Captured],
    done: &Done,
    how: &How,
) -> Result<(LaneDone, u64), SuspendError> {
    let start = Instant::now();
    let region = |one: &Captured| {
        let buffers = done.processes.iter().flat_map(|p| &p.buffers);
        let is = |b: &&LaneBuffer| {
            b.address == one.address && b.region.starts_with(&format!("{}-", one.pid))
        };
        buffers
            .filter(is)
            .map(|b| b.region.clone())
            .next()
            .unwrap_or_default()
    };
    let buffers = captured.iter().map(|one| NamedBuffer {
        id: one.id,
        name: region(one),
    });
    let op = Op::LaneWrite {
        dir: folder.to_owned(),
        buffers: buffers.collect(),
        config: how.lane.clone(),
    };
    if let Outcome::Error(error) = call(client, op)?.outcome {
        return Err(SuspendError::Files(error.message));
    }
    let written = wait(client, how)?.unwrap_or_default();
    for one in captured {
        injected(one.pid, one.tid, |inject| {
            inject.map_empty(one.address, one.bytes)
        })
        .map_err(|error| step("taking the memory away", one.pid, error))?;
    }
    Ok((written, micros(start)))
}

/// Reads the memory from files.
fn from_files(
    client: &mut Client,
    folder: &Path,
    wanted: &[(i32, i32, LaneBuffer)],
    how: &How,
) -> Result<(Option<LaneDone>, Vec<SharedBuffer>), SuspendError> {
    if wanted.is_empty() {
        return Ok((None, Vec::new()));
    }
    let regions = wanted.iter().map(|(_, _, buffer)| WantedRegion {
        name: buffer.region.clone(),
        bytes: buffer.bytes,
    });
    let op = Op::LaneLoad {
        dir: folder.to_owned(),
        regions: regions.collect(),
        config: how.lane.clone(),
    };
    let buffers = match call(client, op)?.outcome {
        Outcome::Buffers(buffers) if buffers.len() == wanted.len() => buffers,
        Outcome::Error(error) => return Err(SuspendError::Files(error.message)),
        other => return Err(SuspendError::Files(format!("unexpected answer {other:?}"))),
    };
    Ok((wait(client, how)?, buffers))
}

fn wait(client: &mut Client, how: &How) -> Result<Option<LaneDone>, SuspendError> {
    let limit_ms = how.step_timeout_ms;
    match call(client, Op::LaneWait { limit_ms })?.outcome {
        Outcome::Lane(done) => Ok(done),
        Outcome::Error(error) => Err(SuspendError::Files(error.message)),
        other => Err(SuspendError::Files(format!("unexpected answer {other:?}"))),
    }
}

/// System calls in a process that nobody traces.
fn injected(
    pid: i32,
    tid: i32,
    work: impl FnOnce(&mut Injection) -> io::Result<()>,
) -> io::Result<()> {
    let _seized = Seized::new(tid)?;
    let mut inject = Injection::begin(pid, tid, 0)?;
    let worked = work(&mut inject);
    let ended = inject.end();
    worked.and(ended)
}

/// Takes memory out of the processes that stay suspended: it is in the files.
fn away(loaded: &[(i32, i32, LaneBuffer)]) {
    for (pid, tid, buffer) in loaded {
        let done = injected(*pid, *tid, |inject| {
            inject.map_empty(buffer.address, buffer.bytes)
        });
        if let Err(error) = done {
            tracing::warn!(pid, "its memory stays in host memory: {error}");
        }
    }
}

fn micros(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX)
}
