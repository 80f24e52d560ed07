//! Runs the steps of a dump and a restore that concern the preload library.

use crate::criu::{self, Level};
use crate::session::{Failed, Session, Thread, failure, failure_with, reply_failure, unexpected};
use crate::vram::{PreloadedMemory, image_directory, open};
use cryopod_cuda::messages::protocol::{Op, Outcome, TakenOut, WriteTo};
use cryopod_cuda::preload::Library;
use cryopod_cuda::released::is_ours;
use cryopod_cuda::vram::SharedBuffer;
use std::fs::File;
use std::os::fd::AsFd;

/// Takes over the file with a process's memory. CRIU would dump a file that the process has open.
fn taken_over(pid: i32, buffer: &SharedBuffer, bytes: u64) -> Result<PreloadedMemory, Failed> {
    let take = || {
        let file = open(buffer)?;
        let library = Library::of(pid).ok_or(std::io::ErrorKind::NotFound)?;
        library.forget()?;
        Ok(file)
    };
    let file = take().map_err(|error: std::io::Error| {
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
    })
}

/// Has a process bring its memory back by itself, from this file or the one that it keeps.
fn go_on_alone(pid: i32, file: Option<&File>) {
    let Some(library) = Library::of(pid) else {
        return;
    };
    if let Err(error) = library.go_on_alone(file.map(AsFd::as_fd)) {
        let text = format!("process {pid}: its GPU memory stays in host memory: {error}");
        criu::log(Level::Error, &text);
    }
}

/// The thread of the preload library in a restored process.
pub(crate) fn library_thread(pid: i32) -> Result<Thread, Failed> {
    let tid = Library::thread_of(pid).ok_or_else(|| {
        let what = "the preload library, which its GPU memory belongs to, is not in it";
        let remedy = "the checkpoint needs the library that the container was created with, and a cryopod of its version";
        failure_with("preload", Some(pid), what, remedy)
    })?;
    Ok(Thread { pid, tid })
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
                go_on_alone(pid, None);
            }
        }
        for memory in std::mem::take(&mut self.vram.preloaded) {
            go_on_alone(memory.pid, Some(&memory.file));
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
        let dir = image_directory()
            .ok_or_else(|| failure("vram", None, "CRIU does not tell its image directory"))?;
        let processes = running.len();
        let to = WriteTo {
            dir,
            config,
            processes,
        };
        let write = Some(to.clone()).filter(|_| !self.vram.writes);
        let out = |pid: &i32| Op::PreloadOut {
            pid: *pid,
            timeout_ms,
            threads,
            hold: true,
            write: write.clone(),
        };
        let replies = match self.batch(running.iter().map(out).collect(), &mut []) {
            Ok(replies) => replies,
            Err(failed) => {
                // The agent is gone, and the processes keep their memory themselves.
                for pid in running {
                    go_on_alone(pid, None);
                }
                return Err(failed);
            }
        };
        let (mut first, mut times, before) = (None, Vec::new(), self.vram.preloaded.len());
        for (pid, reply) in running.into_iter().zip(replies) {
            match reply.outcome {
                Outcome::TakenOut(TakenOut::Without) => {}
                Outcome::TakenOut(TakenOut::LeftOut(reason)) => {
                    let text =
                        format!("process {pid}: its GPU memory is left to the driver: {reason}");
                    criu::log(Level::Warn, &text);
                }
                Outcome::TakenOut(TakenOut::Out {
                    buffer,
                    bytes,
                    writes,
                }) => {
                    self.vram.writes |= writes;
                    match taken_over(pid, &buffer, bytes) {
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
        };
        let (replies, not_stopped) = self.released_batch("preload", &threads, op)?;
        let (mut first, mut times) = (None, Vec::new());
        for ((pid, _), reply) in memory.iter().zip(replies) {
            match reply_failure("preload", *pid, &reply.outcome) {
                Some(failed) => drop(first.get_or_insert(failed)),
                None => times.push((*pid, reply.micros)),
            }
        }
        match (first, not_stopped) {
            (Some(failed), _) => Err(failed),
            (None, Some(what)) => Err(failure("preload", None, what)),
            (None, None) => Ok(times),
        }
    }
}
