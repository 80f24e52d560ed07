//! Moves GPU memory to host memory or into files, and back, while the processes stay.
//!
//! At a suspend the driver does the same as at a checkpoint, and likewise gets memory of the agent's. Meanwhile this
//! program is the tracer of the driver's thread; everything else in the process runs on (and waits for the driver as
//! soon as it calls it). Afterwards only the process holds the memory, so that no program of cryopod needs to live; or
//! it is in files, and nobody holds it.
//!
//! Everything here must be called on one thread. Whatever fails, and if this program dies: the agent brings the
//! processes back unless it was asked to [`Op::Keep`] them.

mod capture;
mod files;
mod preload;

pub use preload::recover;

use crate::exchange::client::{Client, ClientError};
use crate::exchange::{Attendant, ExchangeError, exchange};
use crate::gpus::gpu::{GpuPair, GpuUuid, mapped};
use crate::messages::protocol::{AgentGpu, Op, Outcome, ProcessState, QUERY_MS, Reply};
use crate::preload::nccl::Group;
use crate::preload::{Library, STATE_LIMIT};
use crate::procfs;
use crate::released::Released;
use crate::vram::{SharedBuffer, VramBuffer, VramConfig};
use cryopod_archive::vram::VramFacts;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Suspended {
    pub pid: i32,
    /// Its start time, which with the pid identifies it.
    pub start_time: u64,
    pub comm: String,
    pub gpus: Vec<GpuUuid>,
    /// The memory that the driver was given.
    pub buffers: Vec<VramBuffer>,
}

impl Suspended {
    fn has_preload(&self) -> bool {
        self.buffers.iter().any(|buffer| buffer.preload)
    }
}

#[derive(Debug, Clone)]
pub struct How {
    pub vram: VramConfig,
    /// The directory that the memory is written to; `None`: it stays in host memory.
    pub directory: Option<PathBuf>,
    pub lock_timeout_ms: u64,
    pub step_timeout_ms: u64,
    /// How long NCCL's ranks may take to come level.
    pub nccl_quiesce_ms: u64,
    /// Whether processes that share GPU memory are refused.
    pub refuse_shared: bool,
    /// Host memory for the copies that stay with processes after a resume, in bytes, of all processes of this host.
    pub keep: u64,
    /// Whether the agent resumes another container afterwards.
    pub goes_on: bool,
    /// What the agent does during the driver's checkpoint: [`resumed_beside`]. If it fails, the resume does it.
    pub meanwhile: Vec<Op>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Done {
    pub processes: Vec<Suspended>,
    pub vram: Option<VramFacts>,
    /// The steps and their times in microseconds, of the slowest process.
    pub steps: Vec<(&'static str, u64)>,
    /// Why the driver's memory is not the agent's, where it is not.
    pub left_out: Option<String>,
    /// Bytes that had changed since the last suspend, where a copy of it is kept.
    pub copied: Option<u64>,
    /// Host memory of the copies that stay, in bytes.
    pub kept: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum SuspendError {
    #[error("the driver agent: {0}")]
    Agent(#[from] ClientError),
    #[error("none of its processes uses CUDA: there is nothing to suspend")]
    Unused,
    #[error(
        "process {pid} ({comm}) is suspended already, or was checkpointed by another tool: resume it first"
    )]
    Already { pid: i32, comm: String },
    /// Not suspended: the process does not exist, or none uses the driver.
    #[error("none of its processes is suspended")]
    NotSuspended,
    /// According to the driver all of them run.
    #[error("none of its processes is suspended: they run")]
    Running,
    /// All was done but the last step, whose outcome is unknown: they are suspended, or run again.
    #[error("whether its processes stay suspended is not known: {0}")]
    Unsettled(ClientError),
    /// A process is in a state in which nothing can be done.
    #[error("process {pid} ({comm}) is {state} for the driver; {remedy}")]
    State {
        pid: i32,
        comm: String,
        state: ProcessState,
        remedy: &'static str,
    },
    #[error("{step} of process {pid} ({comm}): {cause}")]
    Step {
        step: &'static str,
        pid: i32,
        comm: String,
        cause: String,
    },
    #[error("{0}")]
    Files(String),
    #[error("{0}")]
    Nccl(String),
}

impl SuspendError {
    /// Returns true if the agent has ended before it could undo what was done.
    pub fn has_lost_agent(&self) -> bool {
        matches!(self, Self::Agent(error) if error.is_end())
    }
}

fn step(step: &'static str, pid: i32, cause: impl ToString) -> SuspendError {
    SuspendError::Step {
        step,
        pid,
        comm: procfs::comm(pid),
        cause: cause.to_string(),
    }
}

struct Captured {
    pid: i32,
    tid: i32,
    id: u64,
    address: u64,
    bytes: u64,
}

type Threads = Vec<(i32, i32)>;
/// A buffer of a process with its driver's thread, and the memory into which it was read.
type Loaded = ((i32, i32, VramBuffer), SharedBuffer);

/// Suspends the CUDA processes among `pids`. Calls `note` with them when all is done, before it leaves them so. On
/// error the agent brings the processes back when the client is dropped; one that was killed cannot.
pub fn suspend(
    client: &mut Client,
    pids: &[i32],
    how: &How,
    note: &mut dyn FnMut(&Done) -> Result<(), String>,
) -> Result<Done, SuspendError> {
    let (threads, mut done) = found_running(client, pids)?;
    let threads = &threads;
    let pids = threads.iter().map(|(pid, _)| *pid).collect();
    let micros = preload::prepare(client, pids);
    preload::nccl_down(client, threads, how, &mut done)?;
    let out = preload::take_out(client, threads, how, &mut done)?;
    if !out.is_empty() {
        done.steps.insert(0, ("prepare", micros));
    }
    lock_all(client, threads, how, &mut done)?;
    // There is room for more when this one has let go of its memory.
    let meanwhile = match out.is_empty() {
        true => &[],
        false => &how.meanwhile[..],
    };
    let left_out = &mut done.left_out;
    let (captured, micros) = capture::checkpoint(client, threads, how, meanwhile, left_out)?;
    done.steps.push(("checkpoint", micros));
    let preloaded = out.iter();
    let preloaded = preloaded.map(|one| (one.pid, VramBuffer::of_preload(one.bytes)));
    let given = captured.iter();
    let given = given.map(|one| (one.pid, VramBuffer::of_driver(one.address, one.bytes)));
    for (pid, buffer) in preloaded.chain(given) {
        let process = done.processes.iter_mut().find(|p| p.pid == pid);
        if let Some(process) = process {
            let region = format!("{pid}-{}", process.buffers.len());
            process.buffers.push(VramBuffer { region, ..buffer });
        }
    }
    if let Some(directory) = &how.directory {
        let (written, micros) = files::to_files(client, directory, &captured, &out, &done, how)?;
        done.steps.push(("write", micros));
        done.vram = Some(written.facts);
        preload::forget(&out)?;
    }
    leave(client, &done, note)?;
    Ok(done)
}

/// GPU memory that must stay unused beside what processes are given meanwhile, in bytes.
const SPARE: u64 = 1 << 30;

/// How long the library of a process that the driver has locked may take to tell its state. One whose agent has died brings
/// its memory back by itself, for which it waits for the driver: it is asked again when the process runs.
const BRIEF: Duration = Duration::from_millis(500);
/// How long a process may take to bring its memory back by itself, once it runs.
const ALONE: Duration = Duration::from_secs(60);

/// How long the other container, which may be running, waits for such a restore.
const MEANWHILE_MS: u64 = 20_000;

/// Returns the steps of a resume that can be done before another container has made room: the agent's buffers and the
/// driver's restores. Most of the memory belongs to the preload library, and comes back at the resume. The driver's part
/// must fit beside all that is in use, so that the other container comes back, too, if it cannot be suspended.
pub fn resumed_beside(processes: &[Suspended], gpu_map: &[GpuPair], gpus: &[AgentGpu]) -> Vec<Op> {
    let of_driver = |p: &Suspended| -> u64 {
        let buffers = p.buffers.iter().filter(|buffer| !buffer.preload);
        buffers.map(|buffer| buffer.bytes).sum()
    };
    let needed: u64 = processes.iter().map(of_driver).sum();
    let used = processes.iter().flat_map(|p| &p.gpus);
    let used: BTreeSet<GpuUuid> = used.map(|gpu| mapped(*gpu, gpu_map)).collect();
    let all_may_be = processes.iter().any(|p| p.gpus.is_empty());
    let concerns = |gpu: &&AgentGpu| all_may_be || used.contains(&gpu.uuid);
    let fits = |gpu: &AgentGpu| {
        let free = gpu.free_memory;
        free.is_some_and(|free| free >= needed.saturating_add(SPARE))
    };
    // Without a buffer of the driver's nobody knows how much it has.
    let is_known = |p: &Suspended| {
        let has_driver = p.buffers.iter().any(|buffer| !buffer.preload);
        p.has_preload() && has_driver && is_alive(&p)
    };
    if !processes.iter().all(is_known) || !gpus.iter().filter(concerns).all(fits) {
        return Vec::new();
    }
    let prepare = preload::ready(used.iter().copied().collect());
    let restore = |p: &Suspended| Op::Restore {
        pid: p.pid,
        gpu_map: gpu_map.to_vec(),
        limit_ms: MEANWHILE_MS,
    };
    let restores = processes.iter().map(restore);
    std::iter::once(prepare).chain(restores).collect()
}

/// Locks the CUDA processes among `pids`: their CUDA calls wait until [`resume`]. `note` as for [`suspend`]. On error
/// the agent brings the processes back when the client is dropped.
pub fn lock(
    client: &mut Client,
    pids: &[i32],
    how: &How,
    note: &mut dyn FnMut(&Done) -> Result<(), String>,
) -> Result<Done, SuspendError> {
    let (threads, mut done) = found_running(client, pids)?;
    // CRIU would dump them.
    preload::drop_copies(&threads);
    lock_all(client, &threads, how, &mut done)?;
    leave(client, &done, note)?;
    Ok(done)
}

/// Calls `note`, and asks the agent to leave the processes as they are.
fn leave(
    client: &mut Client,
    done: &Done,
    note: &mut dyn FnMut(&Done) -> Result<(), String>,
) -> Result<(), SuspendError> {
    note(done).map_err(SuspendError::Files)?;
    // The agent may have accepted it before it died: the written files must stay until that is known.
    let kept = client.call(Op::Keep, Op::Keep.patience());
    kept.map_err(SuspendError::Unsettled).map(drop)
}

/// The CUDA processes among `pids`, which must all run.
fn found_running(client: &mut Client, pids: &[i32]) -> Result<(Threads, Done), SuspendError> {
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
    let by_minor = procfs::gpus_by_minor();
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
    let done = Done {
        processes: threads.iter().map(suspended).collect(),
        ..Done::default()
    };
    Ok((threads, done))
}

fn lock_all(
    client: &mut Client,
    threads: &Threads,
    how: &How,
    done: &mut Done,
) -> Result<(), SuspendError> {
    let timeout_ms = how.lock_timeout_ms;
    let lock = |pid| Op::Lock { pid, timeout_ms };
    let (micros, _) = all(client, "lock", threads, &lock)?;
    done.steps.push(("lock", micros));
    Ok(())
}

/// Resumes processes; those that are gone or not suspended are left as they are. On error suspended ones stay so, but for
/// [`SuspendError::Nccl`]: they are resumed.
pub fn resume(
    client: &mut Client,
    processes: &[Suspended],
    gpu_map: &[GpuPair],
    how: &How,
) -> Result<Done, SuspendError> {
    let alive: Vec<Suspended> = processes.iter().filter(is_alive).cloned().collect();
    let pids: Vec<i32> = alive.iter().map(|p| p.pid).collect();
    let threads = find(client, &pids)?;
    let states: HashMap<i32, ProcessState> = states(client, &threads)?.into_iter().collect();
    let are = |state: ProcessState| -> Threads {
        let is = |(pid, _): &&(i32, i32)| states.get(pid) == Some(&state);
        threads.iter().filter(is).copied().collect()
    };
    settled(&alive, &threads, &states)?;
    let restore = are(ProcessState::Checkpointed);
    let mut unlock = are(ProcessState::Locked);
    // A resume may have failed after the driver's part.
    let with_library: Vec<i32> = (alive.iter().filter(|p| p.has_preload()))
        .map(|p| p.pid)
        .collect();
    // Nobody may have noted what it had.
    let (mut waiting, mut silent) = (BTreeSet::new(), Vec::new());
    for process in &alive {
        let runs = states.get(&process.pid) == Some(&ProcessState::Running);
        // Before the driver's part: after it the process runs, and its memory is in the files alone.
        if process.has_preload()
            && let Err(error) = reachable(process.pid)
            && is_alive(&process)
        {
            return Err(step("finding the preload library", process.pid, error));
        }
        if !runs && !process.buffers.is_empty() {
            continue;
        }
        let limit = if runs { STATE_LIMIT } else { BRIEF };
        let asked = match Library::waits(process.pid, limit) {
            // Nothing was taken out of it.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => false,
            Err(error) if runs && is_alive(&process) => {
                return Err(step("asking the preload library", process.pid, error));
            }
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                silent.push(process.pid);
                false
            }
            asked => asked.unwrap_or(false),
        };
        if asked {
            waiting.insert(process.pid);
        }
    }
    let mut wait = are(ProcessState::Running);
    wait.retain(|(pid, _)| waiting.contains(pid));
    // As after a checkpoint whose agent has died.
    let communicators = || Group::of(&pids).is_ok_and(|group| group.is_down());
    if restore.is_empty() && unlock.is_empty() && wait.is_empty() && !communicators() {
        let run = !threads.is_empty() && threads.len() == alive.len();
        if run && let Err(error) = Group::bring_up(&pids) {
            // Their calls may be held by an agent that has died.
            tracing::warn!("NCCL: {error}");
        }
        return Err(
            match run && are(ProcessState::Running).len() == alive.len() {
                true => SuspendError::Running,
                false => SuspendError::NotSuspended,
            },
        );
    }
    let gpus = alive.iter().filter(|p| p.has_preload());
    let gpus = gpus.flat_map(|p| &p.gpus).map(|gpu| mapped(*gpu, gpu_map));
    preload::ahead(client, preload::ready(gpus.collect()));
    let mut done = Done {
        processes: alive,
        ..Done::default()
    };
    let mut loaded: Vec<Loaded> = Vec::new();
    if let Some(directory) = &how.directory {
        let start = Instant::now();
        let wanted: Vec<(i32, i32, VramBuffer)> = done
            .processes
            .iter()
            .filter_map(|p| Some((p, restore.iter().find(|(pid, _)| *pid == p.pid)?)))
            .flat_map(|(p, (pid, tid))| p.buffers.iter().map(|b| (*pid, *tid, b.clone())))
            .collect();
        // The driver has done its part of them, at least the restore.
        let driven = || wait.iter().chain(&unlock);
        let again = done
            .processes
            .iter()
            .filter_map(|p| Some((p, driven().find(|(pid, _)| *pid == p.pid)?)));
        let again = again.flat_map(|(p, (pid, tid))| {
            let buffers = p.buffers.iter().filter(|b| b.preload);
            buffers.map(|b| (*pid, *tid, b.clone()))
        });
        let wanted = wanted.into_iter().chain(again).collect::<Vec<_>>();
        let (read, buffers) = files::from_files(client, directory, &wanted, how)?;
        done.vram = read.map(|read| read.facts);
        loaded = wanted.into_iter().zip(buffers).collect();
        for ((pid, tid, buffer), shared) in loaded.iter().filter(|((.., b), _)| !b.preload) {
            let mapped = File::options()
                .read(true)
                .write(true)
                .open(&shared.path)
                .and_then(|file| {
                    files::injected(*pid, *tid, |inject| {
                        inject.map_file(buffer.address, buffer.bytes, &file)
                    })
                });
            if let Err(error) = mapped {
                take_away(client, &threads, &loaded);
                return Err(step("mapping the memory", *pid, error));
            }
        }
        done.steps
            .push(("read", cryopod_host::micros(start.elapsed())));
    }
    let limit_ms = how.step_timeout_ms;
    let restored = all(client, "restore", &restore, &|pid| Op::Restore {
        pid,
        gpu_map: gpu_map.to_vec(),
        limit_ms,
    });
    match restored {
        Ok((micros, _)) => done.steps.push(("restore", micros)),
        Err(error) => {
            take_away(client, &threads, &loaded);
            return Err(error);
        }
    }
    unlock.extend(restore);
    let (micros, _) = all(client, "unlock", &unlock, &|pid| Op::Unlock {
        pid,
        limit_ms,
    })?;
    done.steps.push(("unlock", micros));
    waiting.extend(silent.into_iter().filter(|pid| {
        let asked = Library::waits(*pid, ALONE);
        asked.unwrap_or_else(|error| {
            tracing::warn!(pid, "its GPU memory may still be away: {error}");
            false
        })
    }));
    let preloaded = |pid: &i32| with_library.contains(pid) || waiting.contains(pid);
    wait.extend(unlock.into_iter().filter(|(pid, _)| preloaded(pid)));
    if !wait.is_empty() {
        let micros = preload::bring_in(client, &wait, &loaded, how)?;
        done.steps.push(("preload", micros));
        done.kept = preload::keep_within(how.keep, &wait);
    }
    // Whatever fails now, they are resumed: the agent undoes no restore.
    let lost = preload::nccl_up(client, &done.processes);
    if let Err(error) = call(client, Op::Keep) {
        tracing::warn!("they are resumed; {error}");
    }
    lost.map(|()| done)
}

fn reachable(pid: i32) -> io::Result<Library> {
    let gone = || io::Error::new(io::ErrorKind::NotFound, "it is not in it any more");
    Library::find(pid)?.ok_or_else(gone)
}

fn is_alive(process: &&Suspended) -> bool {
    let stat = procfs::stat(process.pid);
    stat.is_some_and(|s| !s.exiting && s.start_time == process.start_time)
}

/// Fails if a process's memory is somewhere, and the driver does not say where the process stands: whoever took it for one
/// that runs would remove the only copy.
fn settled(
    alive: &[Suspended],
    threads: &Threads,
    states: &HashMap<i32, ProcessState>,
) -> Result<(), SuspendError> {
    for process in alive {
        let pid = process.pid;
        let is_found = threads.iter().any(|(found, _)| *found == pid);
        if !is_found && !process.buffers.is_empty() && is_alive(&process) {
            return Err(step("finding the driver's thread", pid, "there is none"));
        }
        let state = states.get(&pid).copied();
        if let Some(
            state @ (ProcessState::Checkpointing
            | ProcessState::Restoring
            | ProcessState::Failed
            | ProcessState::Unknown),
        ) = state
            && is_alive(&process)
        {
            return Err(SuspendError::State {
                pid,
                comm: procfs::comm(pid),
                state,
                remedy: "resume it later again",
            });
        }
    }
    Ok(())
}

/// Unmaps the memory from the processes that stay suspended, for it is in the files. From the others the driver has
/// removed it, or is working on it: its address may hold anything now.
fn take_away(client: &mut Client, threads: &Threads, loaded: &[Loaded]) {
    match states(client, threads) {
        Ok(states) => {
            let stays = |pid: i32| states.contains(&(pid, ProcessState::Checkpointed));
            let loaded = loaded.iter().map(|(one, _)| one);
            files::away(loaded.filter(|(pid, _, buffer)| stays(*pid) && !buffer.preload));
        }
        Err(error) => tracing::warn!("the memory that was read stays mapped: {error}"),
    }
}

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

fn call(client: &mut Client, op: Op) -> Result<Reply, SuspendError> {
    let limit = op.patience();
    Ok(client.call(op, limit)?)
}

/// Does one step of all processes at once; returns the time of the slowest, and the answers.
fn all(
    client: &mut Client,
    name: &'static str,
    threads: &Threads,
    op: &dyn Fn(i32) -> Op,
) -> Result<(u64, Vec<(i32, Outcome)>), SuspendError> {
    all_attended(client, name, threads, op, &[], &mut [], &mut ())
}

/// The same while the drivers' threads are released, and with what the agent is to do meanwhile, whether or not it can.
fn all_attended(
    client: &mut Client,
    name: &'static str,
    threads: &Threads,
    op: &dyn Fn(i32) -> Op,
    meanwhile: &[Op],
    released: &mut [Released],
    attendant: &mut dyn Attendant,
) -> Result<(u64, Vec<(i32, Outcome)>), SuspendError> {
    let ops = threads.iter().map(|(pid, _)| op(*pid));
    let ops = ops.chain(meanwhile.iter().cloned()).collect();
    let replies = exchange(client, ops, released, attendant).map_err(|error| match error {
        ExchangeError::Agent(error) => SuspendError::Agent(error),
        ExchangeError::Fault { pid, .. } => step(name, pid, error),
        other => SuspendError::Files(other.to_string()),
    })?;
    for reply in replies.iter().skip(threads.len()) {
        tracing::debug!("meanwhile: {:?} in {} us", reply.outcome, reply.micros);
    }
    let (mut slowest, mut answers) = (0, Vec::new());
    for ((pid, _), reply) in threads.iter().zip(replies) {
        slowest = slowest.max(reply.micros);
        match reply.outcome {
            Outcome::Error(error) => return Err(step(name, *pid, error)),
            outcome => answers.push((*pid, outcome)),
        }
    }
    Ok((slowest, answers))
}
