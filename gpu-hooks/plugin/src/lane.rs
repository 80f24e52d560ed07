//! The lane, the plugin's part: which memory the driver was given in place of its own, and where that
//! memory is at the moment.

use crate::criu::{self, Level};
use crate::session::{Failed, QUERY_MS, Session, failure, reply_failure};
use cryopod_gpu_hooks::cuda::lane::{LaneConfig, LaneDone, NamedBuffer, SharedBuffer};
use cryopod_gpu_hooks::cuda::protocol::{ErrorKind, Op, Outcome, Reply};
use cryopod_gpu_hooks::cuda::released::{Released, inject, own_pid};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Instant;

/// How long a failed dump waits for the lane's own failure.
const LOOK_MS: u64 = 300;

/// Memory that the driver was given.
pub struct Captured {
    /// The process.
    pub pid: i32,
    /// The driver's thread in it.
    pub tid: i32,
    /// The agent's number of the buffer.
    pub id: u64,
    /// Where the driver has it.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// How long the driver waited for it, in microseconds.
    pub micros: u64,
    /// Kept open, so that the memory outlives the agent.
    file: File,
    /// Whether an empty mapping is in its place.
    away: bool,
}

/// The lane during one dump.
#[derive(Default)]
pub struct Lane {
    /// What the driver was given.
    pub captured: Vec<Captured>,
    /// Why the lane was not used where it might have been.
    pub left_out: Option<String>,
    /// Whether the agent writes.
    pub writes: bool,
}

/// Fails where the configuration says so.
#[cfg(feature = "test-hooks")]
fn test_fails(config: &LaneConfig, step: &str) -> io::Result<()> {
    match &config.test_fail_at {
        Some(at) if at == step => Err(io::Error::other(format!("test: {step} was told to fail"))),
        _ => Ok(()),
    }
}

#[cfg(not(feature = "test-hooks"))]
fn test_fails(_config: &LaneConfig, _step: &str) -> io::Result<()> {
    Ok(())
}

/// Opens memory of the agent's.
fn open(buffer: &SharedBuffer) -> io::Result<File> {
    File::options().read(true).write(true).open(&buffer.path)
}

/// CRIU's image folder, as another process can open it.
pub fn image_folder() -> Option<PathBuf> {
    let fd = criu::image_dir()?.as_raw_fd();
    Some(format!("/proc/{}/fd/{fd}", own_pid()?).into())
}

impl Lane {
    /// The agent's answer for a thread that is held: it gets the memory, or goes its own way.
    pub fn answer(
        &mut self,
        config: &LaneConfig,
        thread: &mut Released,
        bytes: u64,
        since: Instant,
        outcome: &Outcome,
    ) -> Option<u64> {
        let (pid, tid) = thread.ids();
        let mut dropped = None;
        let mut ahead = "";
        let mut answer = || -> Result<Captured, String> {
            let buffer = match outcome {
                Outcome::Buffer(buffer) => buffer,
                Outcome::Error(error) => return Err(error.message.clone()),
                other => return Err(format!("unexpected answer {other:?}")),
            };
            dropped = Some(buffer.id);
            if buffer.reserved {
                ahead = ", allocated before the freeze";
            }
            let told = |error: io::Error| error.to_string();
            test_fails(config, "open").map_err(told)?;
            let file = open(buffer).map_err(told)?;
            let given = match test_fails(config, "map") {
                Ok(()) => file.try_clone().map_err(told)?,
                // A descriptor that cannot be mapped: the call fails in the process.
                Err(_) => File::open("/").map_err(told)?,
            };
            let address = thread.substitute(&given, bytes).map_err(told)?;
            Ok(Captured {
                pid,
                tid,
                id: buffer.id,
                address,
                bytes,
                micros: u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX),
                file,
                away: false,
            })
        };
        match answer() {
            Ok(captured) => {
                let text = format!(
                    "process {pid}: {} MiB for the driver at {:#x} in {} ms{ahead}",
                    bytes >> 20,
                    captured.address,
                    captured.micros / 1000
                );
                criu::log(Level::Info, &text);
                self.captured.push(captured);
                None
            }
            Err(reason) => {
                self.leave_out(pid, reason);
                thread.pass();
                dropped
            }
        }
    }

    /// The lane is not used for a process.
    pub fn leave_out(&mut self, pid: i32, reason: String) {
        let text = format!("process {pid}: its GPU memory goes through CRIU: {reason}");
        criu::log(Level::Warn, &text);
        self.left_out.get_or_insert(reason);
    }
}

/// Asks the agent one thing of the lane.
fn ask(session: &mut Session, op: Op) -> Result<Reply, Failed> {
    let pid = op.pid();
    let reply = session
        .batch(vec![op], &mut [])?
        .pop()
        .ok_or_else(|| failure("lane", pid, "no answer"))?;
    match reply_failure("lane", pid.unwrap_or_default(), &reply.outcome) {
        Some(mut failed) => {
            failed.pid = pid;
            if pid.is_none() {
                failed.comm = None;
            }
            Err(failed)
        }
        None => Ok(reply),
    }
}

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
            let _ = ask(self, Op::LaneDrop { id });
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
        ask(self, write)?;
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
            ask(
                self,
                Op::LanePlaced {
                    id,
                    pid,
                    tid,
                    address,
                },
            )?;
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
        ask(
            self,
            Op::LaneCopy {
                id,
                pid,
                address,
                limit_ms,
            },
        )?;
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
        match ask(self, Op::LaneWait { limit_ms })?.outcome {
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
            let _ = ask(self, Op::LaneCancel);
        }
    }

    /// Gives up a buffer that was not used.
    pub fn lane_drop(&mut self, id: u64) {
        let _ = ask(self, Op::LaneDrop { id });
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
        ask(
            self,
            Op::LaneCopy {
                id,
                pid,
                address,
                limit_ms,
            },
        )
        .map(drop)
    }
}
