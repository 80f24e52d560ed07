//! Makes the driver calls and remembers them: in which state each process was found, what was done to it since, and how
//! to undo that.
//!
//! A driver call cannot be cancelled, so each runs on a thread of its own. A caller that has waited long enough gets
//! [`ErrorKind::TimedOut`] while the call goes on, and further calls for the same process get [`ErrorKind::Busy`] until
//! it returns. The result is recorded in any case, so that it can be undone.

pub mod server;

use crate::driver::{CallError, Driver};
use crate::gpus::gpu::effective_map;
use crate::messages::protocol::{
    DriverError, ErrorKind, Op, Outcome, ProcessState, TakenOut, Work,
};
use crate::preload::process::Preloads;
use crate::procfs;
use crate::vram::store::VramFiles;
use communicators::Communicators;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};
use std::time::Duration;

mod communicators;
mod settle;

/// How long after an "illegal state" a lock is tried again: the process may be within cuInit.
const RACE_PAUSE: Duration = Duration::from_millis(250);
const TICK: Duration = Duration::from_millis(20);

#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How long a process may stay traced before it is put back all the same.
    pub settle: Duration,
    /// How long a process that CRIU let go of after a commit may take to die.
    pub killed: Duration,
    pub step: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            settle: Duration::from_secs(15),
            killed: Duration::from_secs(3),
            step: Duration::from_secs(600),
        }
    }
}

#[derive(Debug, Clone)]
struct Tracked {
    start_time: u64,
    comm: String,
    found: ProcessState,
    now: ProcessState,
    busy: Option<&'static str>,
}

pub struct Agent<D> {
    driver: D,
    vram_files: Arc<VramFiles>,
    preloads: Arc<Preloads>,
    communicators: Communicators,
    tracked: Mutex<HashMap<i32, Tracked>>,
    idle: Condvar,
}

#[derive(Debug)]
pub struct Begun {
    name: &'static str,
    limit: Duration,
    receiver: mpsc::Receiver<Result<Outcome, DriverError>>,
}

impl Begun {
    /// Waits for the result; [`ErrorKind::TimedOut`] if the call exceeds its limit.
    pub fn wait(self) -> Outcome {
        self.result().unwrap_or_else(Outcome::Error)
    }

    fn result(self) -> Result<Outcome, DriverError> {
        let name = self.name;
        match self.receiver.recv_timeout(self.limit) {
            Ok(outcome) => outcome,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let limit = self.limit.as_secs_f64();
                let what = format!("the driver's {name} did not return within {limit:.1} s");
                Err(error(ErrorKind::TimedOut, what))
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let what = format!("the agent's {name} thread died");
                Err(error(ErrorKind::Driver, what))
            }
        }
    }
}

fn error(kind: ErrorKind, message: impl Into<String>) -> DriverError {
    DriverError {
        kind,
        code: None,
        message: message.into(),
    }
}

impl<D: Driver> Agent<D> {
    pub fn new(driver: D) -> Arc<Self> {
        Arc::new(Self {
            driver,
            vram_files: Arc::default(),
            preloads: Arc::default(),
            communicators: Communicators::default(),
            tracked: Mutex::default(),
            idle: Condvar::new(),
        })
    }

    pub fn driver(&self) -> &D {
        &self.driver
    }

    pub fn vram_files(&self) -> &Arc<VramFiles> {
        &self.vram_files
    }

    pub fn communicators(&self) -> &Communicators {
        &self.communicators
    }

    pub fn preloads(&self) -> &Arc<Preloads> {
        &self.preloads
    }

    /// Keeps every process as it is now; each keeps its memory itself.
    pub fn keep(&self) {
        self.table().retain(|_, entry| entry.busy.is_some());
        self.preloads.forget();
        self.communicators.take_down();
        self.vram_files.clear();
    }

    fn table(&self) -> MutexGuard<'_, HashMap<i32, Tracked>> {
        // A thread that panicked cannot have left the table half-changed: each change is one write.
        self.tracked
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Carries out a request about a process, waiting at most as long as the request says.
    pub fn perform(self: &Arc<Self>, op: &Op) -> Outcome {
        self.begin(op).map_or_else(Outcome::Error, Begun::wait)
    }

    /// Starts a request about a process, and marks the process as busy.
    pub fn begin(self: &Arc<Self>, op: &Op) -> Result<Begun, DriverError> {
        if op.work() == Work::Other {
            let what = format!("{} is not about a process", op.name());
            return Err(error(ErrorKind::BadRequest, what));
        }
        self.begin_within(op.clone(), op.limit())
    }

    fn begin_within(self: &Arc<Self>, op: Op, limit: Duration) -> Result<Begun, DriverError> {
        let name = op.name();
        let pid = op.pid().unwrap_or_default();
        if pid <= 0 {
            return Err(error(ErrorKind::BadRequest, format!("pid {pid}")));
        }
        self.enter(pid, name)?;
        let (sender, receiver) = mpsc::channel();
        let agent = Arc::clone(self);
        let spawned = std::thread::Builder::new()
            .name(format!("{name} {pid}"))
            .spawn(move || {
                let outcome = agent.call(pid, &op);
                agent.leave(pid);
                // After the limit nobody listens any more; the table has the result.
                let _ = sender.send(outcome);
            });
        if let Err(cause) = spawned {
            self.leave(pid);
            let what = format!("cannot start a thread for {name}: {cause}");
            return Err(error(ErrorKind::Driver, what));
        }
        Ok(Begun {
            name,
            limit,
            receiver,
        })
    }

    fn enter(&self, pid: i32, name: &'static str) -> Result<(), DriverError> {
        let Some(stat) = procfs::stat(pid).filter(|stat| !stat.exiting) else {
            return Err(error(
                ErrorKind::NoProcess,
                format!("there is no process {pid}"),
            ));
        };
        let mut table = self.table();
        let fresh = || Tracked {
            start_time: stat.start_time,
            comm: procfs::comm(pid),
            found: ProcessState::Unknown,
            now: ProcessState::Unknown,
            busy: None,
        };
        let entry = table.entry(pid).or_insert_with(fresh);
        if entry.start_time != stat.start_time {
            *entry = fresh();
        }
        if let Some(running) = entry.busy {
            let what = format!("the driver's {running} of process {pid} still runs");
            return Err(error(ErrorKind::Busy, what));
        }
        entry.busy = Some(name);
        Ok(())
    }

    fn leave(&self, pid: i32) {
        if let Some(entry) = self.table().get_mut(&pid) {
            entry.busy = None;
        }
        self.idle.notify_all();
    }

    fn record(&self, pid: i32, change: impl FnOnce(&mut Tracked)) {
        if let Some(entry) = self.table().get_mut(&pid) {
            change(entry);
        }
    }

    fn found(&self, pid: i32) -> ProcessState {
        self.table()
            .get(&pid)
            .map_or(ProcessState::Unknown, |entry| entry.found)
    }

    fn note_found(&self, pid: i32) -> Result<(), DriverError> {
        if self.found(pid) == ProcessState::Unknown {
            let state = self.driver.state(pid).map_err(|e| e.describe("query"))?;
            self.record(pid, |entry| (entry.found, entry.now) = (state, state));
        }
        Ok(())
    }

    fn call(&self, pid: i32, op: &Op) -> Result<Outcome, DriverError> {
        match op {
            Op::Find { .. } => Ok(Outcome::Thread(self.find(pid))),
            Op::Query { .. } => self.query(pid).map(Outcome::State),
            Op::Lock { timeout_ms, .. } => {
                self.note_found(pid)?;
                self.lock(pid, u32::try_from(*timeout_ms).unwrap_or(u32::MAX))?;
                Ok(Outcome::Done)
            }
            Op::Checkpoint { .. } => {
                self.note_found(pid)?;
                match self.driver.checkpoint(pid) {
                    Ok(()) => {
                        self.record(pid, |entry| entry.now = ProcessState::Checkpointed);
                        Ok(Outcome::Done)
                    }
                    Err(cause) => Err(self.after_failure(pid, &cause, "checkpoint")),
                }
            }
            Op::Restore { gpu_map, .. } => {
                let map = effective_map(gpu_map).unwrap_or_default();
                match self.driver.restore(pid, map) {
                    Ok(()) => {
                        self.record(pid, |entry| entry.now = ProcessState::Locked);
                        Ok(Outcome::Done)
                    }
                    Err(cause) => Err(self.after_failure(pid, &cause, "restore")),
                }
            }
            Op::Unlock { .. } => match self.driver.unlock(pid) {
                Ok(()) => {
                    self.record(pid, |entry| entry.now = ProcessState::Running);
                    Ok(Outcome::Done)
                }
                Err(cause) => Err(self.after_failure(pid, &cause, "unlock")),
            },
            Op::PreloadOut {
                timeout_ms,
                threads,
                hold,
                write,
                ..
            } => {
                self.note_found(pid)?;
                let limit = Duration::from_millis(*timeout_ms);
                let files = &self.vram_files;
                let write = write.as_ref();
                let taken = (self.preloads).take_out(pid, *threads, limit, *hold, write, files);
                taken.map(Outcome::TakenOut)
            }
            Op::PreloadRelease { .. } => {
                let released = self.preloads.release(pid, &self.vram_files)?;
                Ok(released.map_or(Outcome::Done, |why| {
                    Outcome::TakenOut(TakenOut::LeftOut(why))
                }))
            }
            Op::PreloadIn {
                buffer,
                threads,
                limit_ms,
                keep,
                ..
            } => {
                let limit = Duration::from_millis(*limit_ms);
                self.preloads
                    .bring_in(pid, *buffer, *threads, limit, *keep, &self.vram_files)
                    .map(|()| Outcome::Done)
            }
            _ => Err(error(ErrorKind::BadRequest, op.name())),
        }
    }

    fn find(&self, pid: i32) -> Option<i32> {
        // Any error here means that the process has no driver thread. One that uses CUDA after all is caught by the
        // device files and mappings that CRIU then finds.
        match self.driver.restore_tid(pid) {
            Ok(tid) => Some(tid),
            Err(cause) => {
                tracing::debug!(pid, code = cause.code, "no CUDA: {}", cause.text);
                None
            }
        }
    }

    fn query(&self, pid: i32) -> Result<ProcessState, DriverError> {
        let state = match self.driver.state(pid) {
            Err(cause) if cause.is_illegal_state() => {
                std::thread::sleep(RACE_PAUSE);
                self.driver.state(pid)
            }
            other => other,
        };
        state.map_err(|cause| cause.describe("query"))
    }

    fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), DriverError> {
        let result = match self.driver.lock(pid, timeout_ms) {
            Err(cause) if cause.is_illegal_state() => {
                tracing::debug!(pid, "lock: {}; once more", cause.text);
                std::thread::sleep(RACE_PAUSE);
                self.driver.lock(pid, timeout_ms)
            }
            other => other,
        };
        match result {
            Ok(()) => {
                self.record(pid, |entry| entry.now = ProcessState::Locked);
                Ok(())
            }
            Err(cause) => Err(self.after_failure(pid, &cause, "lock")),
        }
    }

    /// Asks the driver for the state: after a failed step only the driver knows it.
    fn after_failure(&self, pid: i32, cause: &CallError, what: &str) -> DriverError {
        let mut described = cause.describe(what);
        match self.driver.state(pid) {
            Ok(state) => {
                self.record(pid, |entry| entry.now = state);
                described.message = format!("{} (the process is now {state})", described.message);
            }
            Err(_) => self.record(pid, |entry| entry.now = ProcessState::Unknown),
        }
        described
    }
}

#[cfg(test)]
#[path = "agent_tests.rs"]
pub(crate) mod tests;
