//! Runs the driver's checkpoint into memory for VRAM files, with this program as the tracer of the driver's threads.

use super::{Captured, How, SuspendError, Threads, all_attended, step};
use crate::exchange::Attendant;
use crate::exchange::client::Client;
use crate::inject::Seized;
use crate::messages::protocol::{Op, Outcome};
use crate::released::Released;
use std::fs::File;
use std::io;
use std::time::Instant;

/// Has the driver checkpoint the processes. Returns what it asked memory for, and the time that it took.
pub(super) fn checkpoint(
    client: &mut Client,
    threads: &Threads,
    how: &How,
    meanwhile: &[Op],
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
    let mut attendant = Capture {
        threads: how.vram.threads(),
        let_go: !how.goes_on,
        captured: Vec::new(),
        left_out,
    };
    let limit_ms = how.step_timeout_ms;
    let op = |pid| Op::Checkpoint { pid, limit_ms };
    let begun = { begin }();
    let result = begun.and_then(|()| {
        all_attended(
            client,
            "checkpoint",
            threads,
            &op,
            meanwhile,
            &mut released,
            &mut attendant,
        )
    });
    let mut stopped = Ok(());
    for thread in released {
        let (pid, _) = thread.ids();
        if let Err(error) = thread.stop() {
            stopped = Err(step("letting the driver's thread go", pid, error));
        }
    }
    drop(seized);
    result?;
    stopped?;
    let Capture {
        captured, left_out, ..
    } = attendant;
    match (left_out, &how.directory) {
        (Some(reason), Some(_)) => Err(SuspendError::Files(format!(
            "the GPU memory cannot go into files: {reason}"
        ))),
        _ => Ok((captured, cryopod_host::micros(start.elapsed()))),
    }
}

/// Gives the drivers' threads memory of the agent's.
struct Capture<'a> {
    threads: usize,
    /// Whether the agent needs the GPUs no more. It frees what it has there while the driver copies.
    let_go: bool,
    captured: Vec<Captured>,
    left_out: &'a mut Option<String>,
}

impl Attendant for Capture<'_> {
    fn threads(&self) -> usize {
        self.threads
    }

    fn give(
        &mut self,
        thread: &mut Released,
        bytes: u64,
        _since: Instant,
        outcome: &Outcome,
    ) -> Vec<Op> {
        match answer(thread, bytes, outcome) {
            Ok(one) => {
                let Captured {
                    pid,
                    tid,
                    id,
                    address,
                    ..
                } = one;
                self.captured.push(one);
                let placed = Op::VramPlaced {
                    id,
                    pid,
                    tid,
                    address,
                };
                let let_go = self.let_go.then_some(Op::PreloadLetGo);
                std::iter::once(placed).chain(let_go).collect()
            }
            Err(reason) => {
                thread.pass();
                self.left_out.get_or_insert(reason);
                match outcome {
                    Outcome::Buffer(buffer) => vec![Op::VramDrop { id: buffer.id }],
                    _ => Vec::new(),
                }
            }
        }
    }
}

/// Gives the driver the memory that it asks for.
fn answer(thread: &mut Released, bytes: u64, outcome: &Outcome) -> Result<Captured, String> {
    let (pid, tid) = thread.ids();
    let buffer = outcome.buffer()?;
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
