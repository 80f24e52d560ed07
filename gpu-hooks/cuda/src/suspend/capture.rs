//! Runs the driver's checkpoint into memory for VRAM files, with this program as the tracer of the driver's threads.

use super::super::client::{Client, ClientError};
use super::super::inject::Seized;
use super::super::protocol::{Op, Outcome};
use super::super::released::{Attention, Released};
use super::{Captured, How, MARGIN, SuspendError, TICK, Threads, micros, step};
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::time::{Duration, Instant};

/// Has the driver checkpoint the processes. Returns what it asked memory for, and the time that it took.
pub(super) fn checkpoint(
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
            let least = Some(how.vram.min_bytes);
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

/// Handles the stops of the driver's threads until all checkpoints have been answered.
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
                    let op = Op::VramPrepare {
                        pid: thread.ids().0,
                        bytes,
                        threads: how.vram.threads(),
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
                    let op = Op::VramPlaced {
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
                        ignored.insert(client.send(Op::VramDrop { id: buffer.id })?);
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
    match (failed, left_out, &how.directory) {
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
