//! Moves the memory into files, and back.

use super::preload::Out;
use super::{Captured, Done, How, SuspendError, call, step};
use crate::exchange::client::Client;
use crate::inject::{Injection, Seized};
use crate::messages::protocol::{Op, Outcome};
use crate::vram::{NamedBuffer, SharedBuffer, VramBuffer, VramDone, WantedRegion};
use std::io;
use std::path::Path;
use std::time::Instant;

/// Writes the memory to files, and unmaps it from the processes when it is on the disk.
pub(super) fn to_files(
    client: &mut Client,
    directory: &Path,
    captured: &[Captured],
    preloaded: &[Out],
    done: &Done,
    how: &How,
) -> Result<(VramDone, u64), SuspendError> {
    let start = Instant::now();
    let region = |one: &Captured| {
        let buffers = done.processes.iter().flat_map(|p| &p.buffers);
        let is = |b: &&VramBuffer| {
            b.address == one.address && b.region.starts_with(&format!("{}-", one.pid))
        };
        buffers
            .filter(is)
            .map(|b| b.region.clone())
            .next()
            .unwrap_or_default()
    };
    let captured_buffers = captured.iter().map(|one| NamedBuffer {
        id: one.id,
        name: region(one),
    });
    let preloaded = preloaded.iter().map(|one| {
        let process = done.processes.iter().find(|p| p.pid == one.pid);
        let buffer = process.and_then(|p| p.buffers.iter().find(|b| b.preload));
        NamedBuffer {
            id: one.id,
            name: buffer.map(|b| b.region.clone()).unwrap_or_default(),
        }
    });
    let buffers = preloaded.chain(captured_buffers);
    let op = Op::VramWrite {
        dir: directory.to_owned(),
        buffers: buffers.collect(),
        config: how.vram.clone(),
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
    Ok((written, cryopod_host::micros(start.elapsed())))
}

pub(super) fn from_files(
    client: &mut Client,
    directory: &Path,
    wanted: &[(i32, i32, VramBuffer)],
    how: &How,
) -> Result<(Option<VramDone>, Vec<SharedBuffer>), SuspendError> {
    if wanted.is_empty() {
        return Ok((None, Vec::new()));
    }
    let regions = wanted.iter().map(|(_, _, buffer)| WantedRegion {
        name: buffer.region.clone(),
        bytes: buffer.bytes,
    });
    let op = Op::VramLoad {
        dir: directory.to_owned(),
        regions: regions.collect(),
        config: how.vram.clone(),
    };
    let buffers = match call(client, op)?.outcome {
        Outcome::Buffers(buffers) if buffers.len() == wanted.len() => buffers,
        Outcome::Error(error) => return Err(SuspendError::Files(error.message)),
        other => return Err(SuspendError::Files(format!("unexpected answer {other:?}"))),
    };
    Ok((wait(client, how)?, buffers))
}

fn wait(client: &mut Client, how: &How) -> Result<Option<VramDone>, SuspendError> {
    let limit_ms = how.step_timeout_ms;
    match call(client, Op::VramWait { limit_ms })?.outcome {
        Outcome::Vram(done) => Ok(done),
        Outcome::Error(error) => Err(SuspendError::Files(error.message)),
        other => Err(SuspendError::Files(format!("unexpected answer {other:?}"))),
    }
}

/// Makes system calls in a process that nobody traces.
pub(super) fn injected(
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

pub(super) fn away<'a>(loaded: impl Iterator<Item = &'a (i32, i32, VramBuffer)>) {
    for (pid, tid, buffer) in loaded {
        let done = injected(*pid, *tid, |inject| {
            inject.map_empty(buffer.address, buffer.bytes)
        });
        if let Err(error) = done {
            tracing::warn!(pid, "its memory stays in host memory: {error}");
        }
    }
}
