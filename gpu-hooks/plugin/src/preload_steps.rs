//! Runs the steps of a dump and a restore that concern the preload library.

use crate::criu::{self, Level};
use crate::session::{
    CudaThread, Failed, Session, failure, failure_with, reply_failure, unexpected,
};
use crate::vram::{PreloadedMemory, image_directory, open};
use cryopod_cuda::copy::Piece;
use cryopod_cuda::inject::take_descriptor;
use cryopod_cuda::messages::protocol::{
    ErrorKind, HeldPiece, Hold, Op, Outcome, TakenOut, WriteTo,
};
use cryopod_cuda::preload::Library;
use cryopod_cuda::released::is_ours;
use cryopod_cuda::vram::{SharedBuffer, VramConfig};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

/// Takes over the file with a process's memory, which CRIU would dump if the process kept it open, or the pieces that the
/// agent holds.
fn taken_over(
    pid: i32,
    buffer: &SharedBuffer,
    bytes: u64,
    pieces: &[HeldPiece],
) -> Result<PreloadedMemory, Failed> {
    let take = || {
        let file = open(buffer)?;
        if pieces.is_empty() {
            let library = Library::of(pid).ok_or(std::io::ErrorKind::NotFound)?;
            library.forget()?;
        }
        let held = pieces
            .iter()
            .map(|piece| Ok((*piece, take_descriptor(piece.handle)?)));
        Ok((file, held.collect::<std::io::Result<_>>()?))
    };
    let (file, held) = take().map_err(|error: std::io::Error| {
        failure(
            "preload",
            Some(pid),
            format!("taking over its memory: {error}"),
        )
    })?;
    let id = buffer.id;
    Ok(PreloadedMemory {
        pid,
        id,
        bytes,
        file,
        held,
    })
}

/// Has a process bring its memory back by itself: from these pieces, and from this file or the one that it keeps.
fn go_on_alone(pid: i32, held: Vec<(HeldPiece, OwnedFd)>, file: Option<&File>) {
    let Some(library) = Library::of(pid) else {
        return;
    };
    let pieces = held.into_iter().map(|(piece, handle)| Piece {
        offset: piece.offset,
        bytes: piece.bytes,
        handle,
    });
    if let Err(error) = library.go_on_alone(pieces.collect(), file.map(AsFd::as_fd)) {
        let text = format!("process {pid}: it waits for its GPU memory: {error}");
        criu::log(Level::Error, &text);
    }
}

fn left_to_the_driver(pid: i32, reason: &str) {
    let text = format!("process {pid}: its GPU memory is left to the driver: {reason}");
    criu::log(Level::Warn, &text);
}

/// The thread of the preload library in a restored process.
pub(crate) fn library_thread(pid: i32) -> Result<CudaThread, Failed> {
    let tid = Library::thread_of(pid).ok_or_else(|| {
        let what = "the preload library, which its GPU memory belongs to, is not in it";
        let remedy = "the checkpoint needs the library that the container was created with, and a cryopod of its version";
        failure_with("preload", Some(pid), what, remedy)
    })?;
    Ok(CudaThread { pid, tid })
}

impl Session {
    /// After a dump that failed: if the agent is gone, the processes bring their memory back by themselves as soon as they
    /// run.
    pub fn preload_recover(&mut self) {
        let nothing = self.vram.preloaded.is_empty() && self.communicators.is_empty();
        if nothing || self.ask(Op::Hello).is_ok() {
            return;
        }
        for pid in std::mem::take(&mut self.communicators) {
            if !self.vram.preloaded.iter().any(|memory| memory.pid == pid) {
                go_on_alone(pid, Vec::new(), None);
            }
        }
        for memory in std::mem::take(&mut self.vram.preloaded) {
            // The file is empty where pieces are held.
            let file = Some(&memory.file).filter(|_| memory.held.is_empty());
            go_on_alone(memory.pid, memory.held, file);
        }
    }

    /// Before all else, while the processes run: takes NCCL's communicators down through which they share memory. The agent
    /// makes them again when CRIU has let go of processes that go on running.
    pub fn nccl_down(&mut self, pids: &[i32]) -> Result<(), Failed> {
        let running: Vec<i32> = pids.iter().copied().filter(|pid| !is_ours(*pid)).collect();
        if !running.iter().any(|pid| Library::is_in(*pid)) {
            return Ok(());
        }
        self.communicators.clone_from(&running);
        let op = Op::NcclDown {
            pids: running,
            quiesce_ms: self.config.nccl_quiesce_ms,
            refuse_shared: !self.config.allow_shared,
        };
        self.nccl(op)
    }

    /// After a restore, when the processes run: makes the communicators again that are down.
    pub fn nccl_up(&mut self, pids: &[i32]) -> Result<(), Failed> {
        let mut pids = pids.to_vec();
        pids.retain(|pid| Library::is_in(*pid));
        match pids.is_empty() {
            true => Ok(()),
            false => self.nccl(Op::NcclUp { pids }),
        }
    }

    fn nccl(&mut self, op: Op) -> Result<(), Failed> {
        let remedy = "see docs/containers.md, GPU memory that processes share";
        match self
            .batch(vec![op], &mut [])?
            .pop()
            .map(|reply| reply.outcome)
        {
            Some(Outcome::Nccl(done)) => {
                if done.communicators > 0 {
                    criu::log(Level::Info, &done.to_string());
                    self.nccl_done = Some(done);
                }
                Ok(())
            }
            Some(Outcome::Error(error)) => Err(failure_with("nccl", None, error.message, remedy)),
            _ => Err(failure("nccl", None, "unexpected answer of the agent")),
        }
    }

    /// Before all else, while the processes work: copies the GPU memory of those that have the preload library.
    pub fn preload_ahead(&mut self, pids: &[i32]) -> Result<(), Failed> {
        let mut pids = pids.to_vec();
        pids.retain(|pid| !is_ours(*pid) && Library::is_in(*pid));
        let Some(config) = self.config.vram.clone().filter(|_| !pids.is_empty()) else {
            return Ok(());
        };
        let threads = config.threads_for(pids.len());
        let write = self.write_to(config, pids.len())?;
        let op = Op::PreloadAhead {
            pids,
            threads,
            hold: self.hold(),
            write,
        };
        let reply = self.batch(vec![op], &mut [])?.pop();
        match reply.map(|reply| reply.outcome) {
            Some(Outcome::Ahead(done)) => {
                self.vram.writes |= done.writes;
                for (pid, reason) in done.left_out {
                    let text = format!("process {pid}: no GPU memory is copied ahead: {reason}");
                    criu::log(Level::Info, &text);
                }
            }
            other => {
                let text = format!("no GPU memory is copied ahead: {other:?}");
                criu::log(Level::Warn, &text);
            }
        }
        Ok(())
    }

    fn hold(&self) -> Hold {
        match self.config.copy_later {
            true => Hold::CopyLater,
            false => Hold::Copied,
        }
    }

    fn write_to(&self, config: VramConfig, processes: usize) -> Result<WriteTo, Failed> {
        let dir = image_directory()
            .ok_or_else(|| failure("vram", None, "CRIU does not tell its image directory"))?;
        Ok(WriteTo {
            dir,
            config,
            processes,
        })
    }

    /// Before the driver's lock, while the processes run: takes the GPU memory out of those that have the preload library,
    /// and has the agent begin to write it. Returns the times, in microseconds.
    ///
    /// Memory that cannot be taken out is left to the driver. An error means that the checkpoint cannot go on.
    pub fn preload_out(&mut self, pids: &[i32]) -> Result<Vec<(i32, u64)>, Failed> {
        let Some(config) = self.config.vram.clone() else {
            return Ok(Vec::new());
        };
        // The library must run to answer.
        let running: Vec<i32> = pids.iter().copied().filter(|pid| !is_ours(*pid)).collect();
        let timeout_ms = self.config.lock_timeout_ms;
        let threads = (config.threads_for(running.len()) / running.len().max(1)).max(1);
        let to = self.write_to(config, running.len())?;
        let write = Some(to.clone()).filter(|_| !self.vram.writes);
        let hold = self.hold();
        let out = |pid: &i32| Op::PreloadOut {
            pid: *pid,
            timeout_ms,
            threads,
            hold,
            write: write.clone(),
        };
        let replies = match self.batch(running.iter().map(out).collect(), &mut []) {
            Ok(replies) => replies,
            Err(failed) => {
                // The agent is gone, and the processes keep their memory themselves.
                for pid in running {
                    go_on_alone(pid, Vec::new(), None);
                }
                return Err(failed);
            }
        };
        let (mut first, mut times, before) = (None, Vec::new(), self.vram.preloaded.len());
        for (pid, reply) in running.into_iter().zip(replies) {
            match reply.outcome {
                Outcome::TakenOut(TakenOut::Without) => {}
                Outcome::TakenOut(TakenOut::LeftOut(reason)) => {
                    left_to_the_driver(pid, &reason);
                }
                Outcome::TakenOut(TakenOut::Out {
                    buffer,
                    bytes,
                    writes,
                    copied,
                    held,
                }) => {
                    self.vram.writes |= writes;
                    let when = if held.is_empty() {
                        ""
                    } else {
                        " once it goes on"
                    };
                    let text = format!(
                        "process {pid}: {} of {} MiB of GPU memory are copied{when}",
                        copied >> 20,
                        bytes >> 20
                    );
                    criu::log(Level::Info, &text);
                    match taken_over(pid, &buffer, bytes, &held) {
                        Ok(memory) => self.vram.preloaded.push(memory),
                        Err(failed) => drop(first.get_or_insert(failed)),
                    }
                    times.push((pid, reply.micros));
                }
                outcome => {
                    first.get_or_insert(unexpected("preload", pid, &outcome));
                }
            }
        }
        if first.is_none() {
            first = self.release(before)?;
        }
        if let Some(failed) = first {
            // Whatever the others have begun to write is called off.
            self.vram.writes |= write.is_some();
            return Err(failed);
        }
        if self.vram.preloaded.len() > before && !self.vram.writes {
            self.ask(Op::VramWriteAhead {
                dir: to.dir,
                buffers: self.vram.preloaded.iter().map(|memory| memory.id).collect(),
                config: to.config,
            })?;
            self.vram.writes = true;
        }
        Ok(times)
    }

    /// Has the processes let go of GPU memory that is held, of which this program has handles by now. Returns the first
    /// failure; memory that a process keeps is left to the driver.
    fn release(&mut self, from: usize) -> Result<Option<Failed>, Failed> {
        let held = self.vram.preloaded[from..].iter();
        let held = held.filter(|memory| !memory.held.is_empty());
        let pids: Vec<i32> = held.map(|memory| memory.pid).collect();
        let release = pids.iter().map(|pid| Op::PreloadRelease { pid: *pid });
        let mut first = None;
        for (pid, reply) in pids.iter().zip(self.batch(release.collect(), &mut [])?) {
            match reply.outcome {
                Outcome::Done => {}
                Outcome::TakenOut(TakenOut::LeftOut(reason)) => {
                    left_to_the_driver(*pid, &reason);
                    self.vram.preloaded.retain(|memory| memory.pid != *pid);
                    // The agent has called it off.
                    self.vram.writes = false;
                }
                outcome => drop(first.get_or_insert(unexpected("preload", *pid, &outcome))),
            }
        }
        Ok(first)
    }

    /// After the driver's unlock: brings GPU memory back, each from its buffer. The library's thread of a stopped process
    /// is let run meanwhile. Returns the times, in microseconds.
    pub fn preload_in(&mut self, memory: &[(i32, u64)]) -> Result<Vec<(i32, u64)>, Failed> {
        let threads = memory.iter().map(|(pid, _)| library_thread(*pid));
        let threads = threads.collect::<Result<Vec<_>, _>>()?;
        let config = self.config.vram.clone().unwrap_or_default();
        let each = (config.threads_for(memory.len()) / memory.len().max(1)).max(1);
        let limit_ms = self.config.step_timeout_ms;
        let op = |pid| Op::PreloadIn {
            pid,
            buffer: memory.iter().find(|(of, _)| *of == pid).map(|(_, id)| *id),
            threads: each,
            limit_ms,
            keep: false,
        };
        let (replies, not_stopped) = self.released_batch("preload", &threads, op)?;
        let (mut first, mut times) = (None, Vec::new());
        let mut again = Vec::new();
        for (one, reply) in memory.iter().zip(replies) {
            let (pid, _) = one;
            if let Outcome::Error(error) = &reply.outcome
                && error.kind == ErrorKind::OutOfMemory
                && let Some(memory) = self.vram.preloaded.iter_mut().find(|m| m.pid == *pid)
                && !memory.held.is_empty()
            {
                // The agent has put it into host memory, and these handles keep it on the GPU.
                memory.held.clear();
                again.push(*one);
                continue;
            }
            match reply_failure("preload", *pid, &reply.outcome) {
                Some(failed) => drop(first.get_or_insert(failed)),
                None => times.push((*pid, reply.micros)),
            }
        }
        match (first, not_stopped) {
            (Some(failed), _) => Err(failed),
            (None, Some(what)) => Err(failure("preload", None, what)),
            (None, None) if again.is_empty() => Ok(times),
            (None, None) => {
                times.extend(self.preload_in(&again)?);
                Ok(times)
            }
        }
    }
}
