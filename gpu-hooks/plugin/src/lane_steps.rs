//! The steps of a dump and a restore that concern the lane.

use crate::criu::{self, Level};
use crate::lane::{Captured, image_folder, open, test_fails};
use crate::session::{Failed, QUERY_MS, Session, failure};
use cryopod_cuda::lane::{LaneConfig, LaneDone, NamedBuffer, SharedBuffer};
use cryopod_cuda::protocol::{ErrorKind, Op, Outcome};
use cryopod_cuda::released::inject;
use std::fs::File;
use std::io;

/// How long a failed dump waits for the lane's own failure.
const LOOK_MS: u64 = 300;

impl Session {
    /// After the driver's checkpoint: the agent begins to write, and the processes lose the memory, so
    /// that CRIU has nothing to dump. `names` gives each buffer its name in the lane.
    ///
    /// Where that fails the processes get private memory with the same contents, which CRIU dumps; an
    /// error is one after which they have lost it.
    pub fn lane_out(&mut self, config: &LaneConfig, names: &[String]) -> Result<bool, Failed> {
        if self.lane.captured.is_empty() {
            return Ok(false);
        }
        let reason = match self.try_lane_out(config, names) {
            Ok(()) => return Ok(true),
            Err(failed) => failed.cause,
        };
        self.lane_cancel();
        for i in 0..self.lane.captured.len() {
            self.make_private(i)?;
            let Captured { pid, id, .. } = self.lane.captured[i];
            self.lane.leave_out(pid, reason.clone());
            let _ = self.ask(Op::LaneDrop { id });
        }
        self.lane.captured.clear();
        Ok(false)
    }

    fn try_lane_out(&mut self, config: &LaneConfig, names: &[String]) -> Result<(), Failed> {
        let failed = |pid, error: io::Error| failure("lane", pid, error.to_string());
        let dir = image_folder()
            .ok_or_else(|| failure("lane", None, "CRIU does not tell its image folder"))?;
        let buffers = self
            .lane
            .captured
            .iter()
            .zip(names)
            .map(|(captured, name)| NamedBuffer {
                id: captured.id,
                name: name.clone(),
            });
        let write = Op::LaneWrite {
            dir,
            buffers: buffers.collect(),
            config: config.clone(),
        };
        test_fails(config, "write").map_err(|error| failed(None, error))?;
        self.ask(write)?;
        self.lane.writes = true;
        for i in 0..self.lane.captured.len() {
            let Captured {
                pid,
                tid,
                id,
                address,
                bytes,
                ..
            } = self.lane.captured[i];
            self.ask(Op::LanePlaced {
                id,
                pid,
                tid,
                address,
            })?;
            let mut injection = inject(pid, tid).map_err(|error| failed(Some(pid), error))?;
            let emptied =
                test_fails(config, "empty").and_then(|()| injection.map_empty(address, bytes));
            self.lane.captured[i].away |= emptied.is_ok();
            let ended = injection.end();
            emptied
                .and(ended)
                .map_err(|error| failed(Some(pid), error))?;
        }
        Ok(())
    }

    /// The process's memory as it would have been without the lane.
    fn make_private(&mut self, i: usize) -> Result<(), Failed> {
        let Captured {
            pid,
            tid,
            id,
            address,
            bytes,
            ..
        } = self.lane.captured[i];
        let map = || {
            let mut injection = inject(pid, tid)?;
            let mapped = injection.map_private(address, bytes);
            mapped.and(injection.end())
        };
        self.lane.captured[i].away = true;
        map().map_err(|error| failure("lane", Some(pid), error.to_string()))?;
        let limit_ms = self.config.step_timeout_ms;
        self.ask(Op::LaneCopy {
            id,
            pid,
            address,
            limit_ms,
        })?;
        self.lane.captured[i].away = false;
        Ok(())
    }

    /// Before the driver restores a process: the memory where it was.
    pub fn lane_back(&mut self, pid: i32) -> Result<(), Failed> {
        for i in 0..self.lane.captured.len() {
            let captured = &self.lane.captured[i];
            if captured.pid != pid || !captured.away {
                continue;
            }
            let config = self.config.lane.clone().unwrap_or_default();
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
                Ok(()) => self.lane.captured[i].away = false,
                Err(error) => {
                    let text = format!("process {pid}: its memory is copied back: {error}");
                    criu::log(Level::Warn, &text);
                    test_fails(&config, "back")
                        .map_err(|error| failure("lane", Some(pid), error.to_string()))?;
                    self.make_private(i)?;
                }
            }
        }
        Ok(())
    }

    /// Waits until the agent has written or read everything; `None` when there was nothing.
    pub fn lane_wait(&mut self) -> Result<Option<LaneDone>, Failed> {
        let limit_ms = self.config.step_timeout_ms;
        match self.ask(Op::LaneWait { limit_ms })?.outcome {
            Outcome::Lane(done) => Ok(done),
            other => Err(failure(
                "lane",
                None,
                format!("unexpected answer {other:?}"),
            )),
        }
    }

    /// Whether the writing has failed, or does so in a moment.
    pub fn lane_look(&mut self) -> Result<(), Failed> {
        if !self.lane.writes {
            return Ok(());
        }
        let limit_ms = LOOK_MS;
        let reply = self.batch(vec![Op::LaneWait { limit_ms }], &mut [])?.pop();
        match reply.map(|reply| reply.outcome) {
            Some(Outcome::Error(error)) if error.kind != ErrorKind::TimedOut => {
                Err(failure("lane", None, error.message))
            }
            _ => Ok(()),
        }
    }

    /// Ends the writing; what there is of it is removed.
    pub fn lane_cancel(&mut self) {
        if std::mem::take(&mut self.lane.writes) {
            let _ = self.ask(Op::LaneCancel);
        }
    }

    /// Gives up a buffer that was not used.
    pub fn lane_drop(&mut self, id: u64) {
        let _ = self.ask(Op::LaneDrop { id });
    }

    /// At a restore: memory of the agent's into a restored process.
    pub fn lane_in(
        &mut self,
        pid: i32,
        tid: i32,
        buffer: &SharedBuffer,
        address: u64,
        bytes: u64,
    ) -> Result<(), Failed> {
        let config = self.config.lane.clone().unwrap_or_default();
        let map = || {
            test_fails(&config, "in")?;
            let file = open(buffer)?;
            let mut injection = inject(pid, tid)?;
            let mapped = injection.map_file(address, bytes, &file);
            mapped.and(injection.end())
        };
        let Err(error) = map() else { return Ok(()) };
        criu::log(
            Level::Warn,
            &format!("process {pid}: its memory is copied: {error}"),
        );
        let map = || {
            let mut injection = inject(pid, tid)?;
            let mapped = injection.map_private(address, bytes);
            mapped.and(injection.end())
        };
        map().map_err(|error| failure("lane", Some(pid), error.to_string()))?;
        let limit_ms = self.config.step_timeout_ms.max(QUERY_MS);
        let id = buffer.id;
        self.ask(Op::LaneCopy {
            id,
            pid,
            address,
            limit_ms,
        })
        .map(drop)
    }
}
