//! The preload library at a suspend and a resume.

use super::{Done, How, SuspendError, Suspended, Threads, all, call, step};
use crate::exchange::client::Client;
use crate::gpus::gpu::GpuUuid;
use crate::messages::protocol::{Hold, NcclDone, Op, Outcome, TakenOut};
use crate::preload::Library;
use crate::procfs;
use crate::vram::{SharedBuffer, VramBuffer};
use std::collections::BTreeMap;

/// A process's GPU memory in a buffer of the agent's.
pub(super) struct Out {
    pub pid: i32,
    pub id: u64,
    pub bytes: u64,
}

fn threads_each(how: &How, processes: usize) -> usize {
    (how.vram.threads_for(processes) / processes.max(1)).max(1)
}

/// Makes the GPUs of processes ready ahead of a copy out of them, and returns how long that took. Little is copied of those
/// that have kept a copy: their GPUs are not waited for, so that they stop meanwhile.
pub(super) fn prepare(client: &mut Client, pids: Vec<i32>) -> u64 {
    let mut with = pids.iter().filter(|pid| Library::is_in(**pid));
    let in_bulk = with.any(|pid| Library::spare_bytes(*pid) == 0);
    ahead(
        client,
        Op::PreloadPrepare {
            pids,
            gpus: Vec::new(),
            in_bulk,
            wait: in_bulk,
        },
    )
}

/// Returns the request to make GPUs ready ahead of a copy into them, which does not wait.
pub(super) fn ready(gpus: Vec<GpuUuid>) -> Op {
    Op::PreloadPrepare {
        pids: Vec::new(),
        gpus,
        in_bulk: true,
        wait: false,
    }
}

/// Asks for what makes the copy faster, and returns how long it took, in microseconds.
pub(super) fn ahead(client: &mut Client, prepare: Op) -> u64 {
    let prepared = call(client, prepare);
    let prepared =
        prepared.inspect_err(|error| tracing::debug!("the GPUs are not ready ahead: {error}"));
    prepared.map_or(0, |reply| reply.micros)
}

/// Takes the GPU memory out of the processes that have the library, while they run. What cannot be taken out is left to
/// the driver.
pub(super) fn take_out(
    client: &mut Client,
    threads: &Threads,
    how: &How,
    done: &mut Done,
) -> Result<Vec<Out>, SuspendError> {
    let each = threads_each(how, threads.len());
    let timeout_ms = how.lock_timeout_ms;
    let hold = match keeps(how) {
        true => Hold::Keep,
        false => Hold::No,
    };
    let op = |pid| Op::PreloadOut {
        pid,
        timeout_ms,
        threads: each,
        hold,
        write: None,
    };
    let (micros, answers) = all(client, "preload", threads, &op)?;
    let mut out = Vec::new();
    for (pid, outcome) in answers {
        match outcome {
            Outcome::TakenOut(TakenOut::Without) => {}
            Outcome::TakenOut(TakenOut::LeftOut(reason)) => {
                tracing::warn!(pid, "its GPU memory is left to the driver: {reason}");
            }
            Outcome::TakenOut(TakenOut::Out {
                buffer,
                bytes,
                copied,
                ..
            }) => {
                if keeps(how) {
                    *done.copied.get_or_insert_default() += copied;
                }
                let id = buffer.id;
                out.push(Out { pid, id, bytes });
            }
            other => return Err(step("preload", pid, format!("unexpected answer {other:?}"))),
        }
    }
    if !out.is_empty() {
        done.steps.push(("preload", micros));
    }
    Ok(out)
}

/// Takes NCCL's communicators down through which the processes share memory.
pub(super) fn nccl_down(
    client: &mut Client,
    threads: &Threads,
    how: &How,
    done: &mut Done,
) -> Result<(), SuspendError> {
    let op = Op::NcclDown {
        pids: threads.iter().map(|(pid, _)| *pid).collect(),
        quiesce_ms: how.nccl_quiesce_ms,
        refuse_shared: how.refuse_shared,
    };
    let (nccl, micros) = nccl(client, op)?;
    if nccl.communicators > 0 {
        tracing::info!("{nccl}");
        done.steps.push(("nccl", micros));
    }
    Ok(())
}

/// Makes those again that are down.
pub(super) fn nccl_up(client: &mut Client, processes: &[Suspended]) -> Result<(), SuspendError> {
    let pids = processes.iter().map(|process| process.pid).collect();
    match nccl(client, Op::NcclUp { pids }) {
        Err(SuspendError::Agent(error)) => Err(SuspendError::Nccl(format!(
            "its NCCL communicators may be down: {error}; resume it again"
        ))),
        done => done.map(drop),
    }
}

fn nccl(client: &mut Client, op: Op) -> Result<(NcclDone, u64), SuspendError> {
    let reply = call(client, op)?;
    match reply.outcome {
        Outcome::Nccl(done) => Ok((done, reply.micros)),
        Outcome::Error(error) => Err(SuspendError::Nccl(error.message)),
        other => Err(SuspendError::Nccl(format!("unexpected answer {other:?}"))),
    }
}

/// Has the processes let go of their memory, which is in files now.
pub(super) fn forget(out: &[Out]) -> Result<(), SuspendError> {
    for Out { pid, .. } in out {
        let forgot = Library::of(*pid).map(|library| library.forget());
        if let Some(Err(error)) = forgot {
            return Err(step("preload", *pid, error));
        }
    }
    Ok(())
}

/// When the agent is gone, and the driver's part is undone: has the processes go on by themselves.
pub fn recover(pids: &[i32]) {
    for pid in pids {
        let alone = Library::of(*pid).map(|library| library.go_on_alone(Vec::new(), None));
        if let Some(Err(error)) = alone {
            tracing::error!(pid, "its GPU memory stays in host memory: {error}");
        }
    }
}

/// Brings the GPU memory back: from buffers that were read, or from the files that the processes keep.
pub(super) fn bring_in(
    client: &mut Client,
    threads: &Threads,
    loaded: &[((i32, i32, VramBuffer), SharedBuffer)],
    how: &How,
) -> Result<u64, SuspendError> {
    let each = threads_each(how, threads.len());
    let buffers: BTreeMap<i32, u64> = loaded
        .iter()
        .filter(|((_, _, buffer), _)| buffer.preload)
        .map(|((pid, ..), shared)| (*pid, shared.id))
        .collect();
    let limit_ms = how.step_timeout_ms;
    let op = |pid| Op::PreloadIn {
        pid,
        buffer: buffers.get(&pid).copied(),
        threads: each,
        limit_ms,
        keep: keeps(how),
    };
    all(client, "preload", threads, &op).map(|(micros, _)| micros)
}

/// Whether the memory stays in host memory when the processes have it again.
fn keeps(how: &How) -> bool {
    how.keep > 0 && how.directory.is_none()
}

/// Has processes let go of their copies if this host's copies are larger than `limit` together. Returns what they hold.
pub(super) fn keep_within(limit: u64, threads: &Threads) -> u64 {
    let of = |pid: &i32| Library::spare_bytes(*pid);
    let kept: u64 = threads.iter().map(|(pid, _)| of(pid)).sum();
    if kept == 0 || procfs::pids().iter().map(of).sum::<u64>() <= limit {
        return kept;
    }
    drop_copies(threads);
    threads.iter().map(|(pid, _)| of(pid)).sum()
}

/// Has processes let go of their copies.
pub(super) fn drop_copies(threads: &Threads) {
    for (pid, _) in threads
        .iter()
        .filter(|(pid, _)| Library::spare_bytes(*pid) > 0)
    {
        if let Some(Err(error)) = Library::of(*pid).map(|library| library.forget()) {
            tracing::warn!(pid, "it keeps a copy of its GPU memory: {error}");
        }
    }
}
