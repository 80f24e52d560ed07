//! Runs the steps of a dump and a restore that concern VRAM files.

use crate::criu::{self, Level};
use crate::session::{Failed, Session, failure};
use crate::vram::{Captured, image_directory, open, test_fails};
use cryopod_cuda::inject::{Descriptor, take_descriptor};
use cryopod_cuda::messages::protocol::{ErrorKind, Op, Outcome, QUERY_MS};
use cryopod_cuda::released::{inject, own_pid};
use cryopod_cuda::vram::{NamedBuffer, SharedBuffer, VramConfig, VramDone};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// How long a failed dump waits for a failure of the VRAM files.
const LOOK_MS: u64 = 300;

impl Session {
    /// After the driver's checkpoint: has the agent begin to write, and unmaps the memory from the processes, so that
    /// CRIU has nothing to dump. `names` gives each buffer its name in the VRAM files: first those that the preload
    /// library handed over, then the driver's.
    ///
    /// If that fails the processes get private memory with the same contents, which CRIU dumps. An error means that
    /// they have lost it, or that only VRAM files can hold it.
    pub fn vram_out(&mut self, config: &VramConfig, names: &[String]) -> Result<bool, Failed> {
        if self.vram.captured.is_empty() && self.vram.preloaded.is_empty() {
            return Ok(false);
        }
        let reason = match self.try_vram_out(config, names) {
            Ok(()) => return Ok(true),
            Err(failed) if !self.vram.preloaded.is_empty() => return Err(failed),
            Err(failed) => failed.cause,
        };
        self.vram_cancel();
        for i in 0..self.vram.captured.len() {
            self.make_private(i)?;
            let Captured { pid, id, .. } = self.vram.captured[i];
            self.vram.leave_out(pid, reason.clone());
            let _ = self.ask(Op::VramDrop { id });
        }
        self.vram.captured.clear();
        Ok(false)
    }

    fn try_vram_out(&mut self, config: &VramConfig, names: &[String]) -> Result<(), Failed> {
        let failed = |pid, error: io::Error| failure("vram", pid, error.to_string());
        let dir = image_directory()
            .ok_or_else(|| failure("vram", None, "CRIU does not tell its image directory"))?;
        let preloaded = self.vram.preloaded.iter().map(|memory| memory.id);
        let captured = self.vram.captured.iter().map(|captured| captured.id);
        let buffers = preloaded
            .chain(captured)
            .zip(names)
            .map(|(id, name)| NamedBuffer {
                id,
                name: name.clone(),
            });
        let write = Op::VramWrite {
            dir,
            buffers: buffers.collect(),
            config: config.clone(),
        };
        test_fails(config, "write").map_err(|error| failed(None, error))?;
        self.ask(write)?;
        self.vram.writes = true;
        for i in 0..self.vram.captured.len() {
            let Captured {
                pid,
                tid,
                id,
                address,
                bytes,
                ..
            } = self.vram.captured[i];
            self.ask(Op::VramPlaced {
                id,
                pid,
                tid,
                address,
            })?;
            let written = test_fails(config, "written");
            if written.is_err() {
                self.vram_wait()?;
            }
            let mut injection = inject(pid, tid).map_err(|error| failed(Some(pid), error))?;
            let emptied = test_fails(config, "empty")
                .and(written)
                .and_then(|()| injection.map_empty(address, bytes));
            self.vram.captured[i].away |= emptied.is_ok();
            let ended = injection.end();
            emptied
                .and(ended)
                .map_err(|error| failed(Some(pid), error))?;
        }
        Ok(())
    }

    /// Restores the process's memory as it would have been without VRAM files.
    fn make_private(&mut self, i: usize) -> Result<(), Failed> {
        let Captured {
            pid,
            tid,
            id,
            address,
            bytes,
            ..
        } = self.vram.captured[i];
        let map = || {
            let mut injection = inject(pid, tid)?;
            let mapped = injection.map_private(address, bytes);
            mapped.and(injection.end())
        };
        self.vram.captured[i].away = true;
        map().map_err(|error| failure("vram", Some(pid), error.to_string()))?;
        let limit_ms = self.config.step_timeout_ms;
        self.vram.captured[i].copied = true;
        self.ask(Op::VramCopy {
            id,
            pid,
            address,
            limit_ms,
        })?;
        self.vram.captured[i].away = false;
        Ok(())
    }

    /// Before the driver restores a process: maps the memory where it was.
    pub fn vram_back(&mut self, pid: i32) -> Result<(), Failed> {
        for i in 0..self.vram.captured.len() {
            let captured = &self.vram.captured[i];
            if captured.pid != pid || !captured.away {
                continue;
            }
            if captured.copied {
                let cause = "its GPU memory was not copied back whole";
                return Err(failure("vram", Some(pid), cause));
            }
            let config = self.config.vram.clone().unwrap_or_default();
            let map = || {
                test_fails(&config, "back")?;
                let mut injection = inject(pid, captured.tid)?;
                let file = match test_fails(&config, "back-map") {
                    Ok(()) => captured.file.try_clone()?,
                    Err(_) => File::open("/")?,
                };
                let mapped = injection.map_file(captured.address, captured.bytes, &file);
                mapped.and(injection.end())
            };
            match map() {
                Ok(()) => self.vram.captured[i].away = false,
                Err(error) => {
                    let text = format!("process {pid}: its memory is copied back: {error}");
                    criu::log(Level::Warn, &text);
                    test_fails(&config, "back")
                        .map_err(|error| failure("vram", Some(pid), error.to_string()))?;
                    self.make_private(i)?;
                }
            }
        }
        Ok(())
    }

    /// Waits until the agent has written or read everything; `None` when there was nothing.
    pub fn vram_wait(&mut self) -> Result<Option<VramDone>, Failed> {
        let limit_ms = self.config.step_timeout_ms;
        match self.ask(Op::VramWait { limit_ms })?.outcome {
            Outcome::Vram(done) => Ok(done),
            other => Err(failure(
                "vram",
                None,
                format!("unexpected answer {other:?}"),
            )),
        }
    }

    /// Returns the error if the writing has failed, or does so in a moment.
    pub fn vram_look(&mut self) -> Result<(), Failed> {
        if !self.vram.writes {
            return Ok(());
        }
        let limit_ms = LOOK_MS;
        let reply = self.batch(vec![Op::VramWait { limit_ms }], &mut [])?.pop();
        match reply.map(|reply| reply.outcome) {
            Some(Outcome::Error(error)) if error.kind != ErrorKind::TimedOut => {
                Err(failure("vram", None, error.message))
            }
            _ => Ok(()),
        }
    }

    pub fn vram_cancel(&mut self) {
        if std::mem::take(&mut self.vram.writes) {
            let _ = self.ask(Op::VramCancel);
        }
    }

    /// Frees a buffer that was not used.
    pub fn vram_drop(&mut self, id: u64) {
        let _ = self.ask(Op::VramDrop { id });
    }

    /// At a restore: maps memory of the agent's into a restored process. Returns true if the process waits where it
    /// touches what has not been read yet; else nothing may touch the memory before all has been read.
    pub fn vram_in(
        &mut self,
        pid: i32,
        tid: i32,
        buffer: &SharedBuffer,
        address: u64,
        bytes: u64,
    ) -> Result<bool, Failed> {
        let config = self.config.vram.clone().unwrap_or_default();
        let mut userfault = Err(io::Error::other("not asked for"));
        let mut map = || {
            test_fails(&config, "in")?;
            let file = open(buffer)?;
            let mut injection = inject(pid, tid)?;
            let mapped = injection.map_file(address, bytes, &file);
            if mapped.is_ok() {
                userfault = test_fails(&config, "userfault").and_then(|()| {
                    let device = buffer.userfault.ok_or(io::ErrorKind::NotFound)?;
                    injection.userfaultfd(&take_descriptor(device)?.into())
                });
            }
            mapped.and(injection.end())
        };
        if let Err(error) = map() {
            let text = format!("process {pid}: its memory is copied: {error}");
            criu::log(Level::Warn, &text);
            self.copy_in(pid, tid, buffer, address, bytes)?;
            return Ok(false);
        }
        let held_back = userfault
            .map_err(|error| error.to_string())
            .and_then(|fd| self.hold_back(buffer.id, address, &fd));
        if let Err(error) = &held_back {
            let text = format!("process {pid}: the driver waits until all has been read: {error}");
            criu::log(Level::Info, &text);
        }
        Ok(held_back.is_ok())
    }

    fn hold_back(&mut self, id: u64, address: u64, fd: &OwnedFd) -> Result<(), String> {
        let op = Op::VramUserfault {
            id,
            address,
            userfaultfd: Descriptor {
                pid: own_pid().ok_or("/proc is not there")?,
                fd: fd.as_raw_fd(),
            },
        };
        self.ask(op).map(drop).map_err(|failed| failed.cause)
    }

    fn copy_in(
        &mut self,
        pid: i32,
        tid: i32,
        buffer: &SharedBuffer,
        address: u64,
        bytes: u64,
    ) -> Result<(), Failed> {
        self.vram_wait()?;
        let map = || {
            let mut injection = inject(pid, tid)?;
            let mapped = injection.map_private(address, bytes);
            mapped.and(injection.end())
        };
        map().map_err(|error| failure("vram", Some(pid), error.to_string()))?;
        let limit_ms = self.config.step_timeout_ms.max(QUERY_MS);
        let id = buffer.id;
        self.ask(Op::VramCopy {
            id,
            pid,
            address,
            limit_ms,
        })
        .map(drop)
    }
}
