//! Undoes the steps at the end: puts every process back into the state in which it was found.

use super::{Agent, Begun, Limits, TICK, Tracked, communicators, error};
use crate::driver::Driver;
use crate::messages::protocol::{DriverError, ErrorKind, Op, Outcome, ProcessState};
use crate::messages::report::{AgentOutcome, AgentReport, RolledBack, VERSION};
use crate::procfs;
use cryopod_archive::vram::usual_threads;
use std::sync::Arc;
use std::time::{Duration, Instant};

impl<D: Driver> Agent<D> {
    /// Puts every process back into the state it was found in. With `committed`, dead or dying processes are as
    /// expected.
    ///
    /// Ends within a few times the limits, whatever the driver does. `begin` gets a first report if there is work to
    /// do.
    pub fn settle(
        self: &Arc<Self>,
        committed: bool,
        limits: Limits,
        begin: impl FnOnce(&AgentReport),
    ) -> AgentReport {
        let changed: Vec<(i32, Tracked)> = self
            .table()
            .iter()
            .filter(|(pid, entry)| {
                entry.busy.is_some() || needs_undoing(entry) || self.preloads.is_out(**pid)
            })
            .map(|(pid, entry)| (*pid, entry.clone()))
            .collect();
        let listed = |(pid, entry): &(i32, Tracked)| RolledBack {
            pid: *pid,
            comm: entry.comm.clone(),
            found: entry.found,
            left: entry.now,
            error: None,
        };
        if !changed.is_empty() {
            begin(&AgentReport {
                version: VERSION,
                outcome: AgentOutcome::RollingBack,
                processes: changed.iter().map(listed).collect(),
            });
        }
        let mut processes: Vec<RolledBack> = std::thread::scope(|scope| {
            let handles: Vec<_> = changed
                .iter()
                .map(|(pid, entry)| scope.spawn(|| self.settle_one(*pid, entry, committed, limits)))
                .collect();
            handles
                .into_iter()
                .filter_map(|handle| handle.join().ok().flatten())
                .collect()
        });
        processes.extend(self.communicators_up(committed, limits));
        processes.sort_by_key(|process| process.pid);
        let outcome = if processes.is_empty() {
            AgentOutcome::Clean
        } else if processes.iter().all(|process| process.error.is_none()) {
            AgentOutcome::RolledBack
        } else {
            AgentOutcome::RollbackFailed
        };
        self.table().retain(|_, entry| entry.busy.is_some());
        AgentReport {
            version: VERSION,
            outcome,
            processes,
        }
    }

    /// Makes the NCCL communicators again that were taken down, once all processes run. Those of processes that have died
    /// are gone.
    fn communicators_up(&self, committed: bool, limits: Limits) -> Option<RolledBack> {
        let alive = |pid: &i32| procfs::stat(*pid).is_some_and(|stat| !stat.exiting);
        let traced = |pid: &i32| procfs::status(*pid).is_ok_and(|status| status.tracer != 0);
        let mut pids = self.communicators.take_down();
        let deadline = Instant::now() + limits.settle;
        let grace = Instant::now()
            + if committed {
                limits.killed
            } else {
                Duration::ZERO
            };
        loop {
            pids.retain(alive);
            let now = Instant::now();
            if pids.is_empty() || now >= deadline || (now >= grace && !pids.iter().any(traced)) {
                break;
            }
            std::thread::sleep(TICK);
        }
        let pid = *pids.first()?;
        let error = communicators::up(&pids).err()?;
        tracing::error!("NCCL's communicators were not made again: {error}");
        Some(RolledBack {
            pid,
            comm: procfs::comm(pid),
            found: ProcessState::Running,
            left: ProcessState::Running,
            error: Some(format!("NCCL's communicators were not made again: {error}")),
        })
    }

    fn settle_one(
        self: &Arc<Self>,
        pid: i32,
        entry: &Tracked,
        committed: bool,
        limits: Limits,
    ) -> Option<RolledBack> {
        let deadline = Instant::now() + limits.settle;
        let mut let_go: Option<Instant> = None;
        let alive =
            || procfs::stat(pid).is_some_and(|s| !s.exiting && s.start_time == entry.start_time);
        // CRIU lets go of its tasks after the plugin's end, and after a commit kills them.
        let grace = if committed {
            limits.killed
        } else {
            Duration::ZERO
        };
        loop {
            if !alive() {
                self.preloads.forget_process(pid, &self.vram_files);
                return None;
            }
            let traced = procfs::status(pid).is_ok_and(|status| status.tracer != 0);
            let_go = if traced {
                None
            } else {
                let_go.or_else(|| Some(Instant::now()))
            };
            let over = let_go.is_some_and(|since| since.elapsed() >= grace);
            if over || Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(TICK);
        }
        let result = self.undo(pid, limits.step);
        if result.is_err() && !alive() {
            self.preloads.forget_process(pid, &self.vram_files);
            return None;
        }
        let (found, left) = match self.table().get(&pid) {
            Some(entry) => (entry.found, entry.now),
            None => (entry.found, ProcessState::Unknown),
        };
        let error = result.err().map(|cause| cause.to_string());
        match &error {
            None => tracing::info!(pid, %found, "process put back"),
            Some(error) => tracing::error!(pid, %found, %left, error, "process not put back"),
        }
        Some(RolledBack {
            pid,
            comm: entry.comm.clone(),
            found,
            left,
            error,
        })
    }

    fn undo(self: &Arc<Self>, pid: i32, limit: Duration) -> Result<(), DriverError> {
        let outcome = self.perform_in_turn(Op::Query { pid, limit_ms: 0 }, limit)?;
        let Outcome::State(state) = outcome else {
            return Err(error(
                ErrorKind::Driver,
                "the driver does not tell the state",
            ));
        };
        self.record(pid, |entry| entry.now = state);
        let found = self.found(pid);
        let limit_ms = 0;
        use ProcessState::{Checkpointed, Locked, Running};
        if state == Checkpointed && matches!(found, Running | Locked) {
            self.vram_files.put_back(pid).map_err(|cause| {
                let what = format!("its GPU memory cannot be mapped back: {cause}");
                error(ErrorKind::Vram, what)
            })?;
            let restore = Op::Restore {
                pid,
                gpu_map: Vec::new(),
                limit_ms,
            };
            self.perform_in_turn(restore, limit)?;
        }
        if found == Running && matches!(state, Checkpointed | Locked) {
            self.perform_in_turn(Op::Unlock { pid, limit_ms }, limit)?;
        }
        if self.preloads.is_out(pid) {
            self.put_back_preloaded(pid, limit)?;
        }
        match self.table().get(&pid) {
            Some(entry) if needs_undoing(entry) => {
                let what = format!("the process is {} and was found {found}", entry.now);
                Err(error(ErrorKind::WrongState, what))
            }
            _ => Ok(()),
        }
    }

    /// Brings a process's GPU memory back. If that fails the process keeps the memory, and waits.
    fn put_back_preloaded(self: &Arc<Self>, pid: i32, limit: Duration) -> Result<(), DriverError> {
        let limit_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let bring_in = Op::PreloadIn {
            pid,
            buffer: None,
            threads: usual_threads(),
            limit_ms,
            keep: false,
        };
        let mut done = self.perform_in_turn(bring_in.clone(), limit);
        if matches!(&done, Err(cause) if cause.kind == ErrorKind::OutOfMemory) {
            // What was held on the GPU has been put into host memory, and made room.
            done = self.perform_in_turn(bring_in, limit);
        }
        let Err(mut cause) = done else {
            return Ok(());
        };
        if self.preloads.keep(pid, limit, &self.vram_files).is_ok() {
            cause.message +=
                "; it keeps its GPU memory in host memory and waits: `cryopod resume` tries again";
        }
        Err(cause)
    }

    fn perform_in_turn(self: &Arc<Self>, op: Op, limit: Duration) -> Result<Outcome, DriverError> {
        let deadline = Instant::now() + limit;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            self.wait_idle(op.pid().unwrap_or_default(), left)?;
            match self.begin_within(op.clone(), limit).and_then(Begun::result) {
                Err(error) if error.kind == ErrorKind::Busy => {}
                other => return other,
            }
        }
    }

    fn wait_idle(&self, pid: i32, limit: Duration) -> Result<(), DriverError> {
        let deadline = Instant::now() + limit;
        let mut table = self.table();
        while let Some(name) = table.get(&pid).and_then(|entry| entry.busy) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let what = format!("the driver's {name} of process {pid} never returned");
                return Err(error(ErrorKind::TimedOut, what));
            }
            table = match self.idle.wait_timeout(table, left) {
                Ok((table, _)) => table,
                Err(poisoned) => poisoned.into_inner().0,
            };
        }
        Ok(())
    }
}

/// Returns true if our steps left the process worse than found. A restore is never undone: a process found checkpointed
/// and now further on is the purpose of a restore.
fn needs_undoing(entry: &Tracked) -> bool {
    use ProcessState::{Checkpointed, Locked, Running};
    match entry.found {
        Running => entry.now != Running,
        Locked => !matches!(entry.now, Locked | Running),
        Checkpointed | ProcessState::Failed | ProcessState::Unknown => false,
        ProcessState::Checkpointing | ProcessState::Restoring => false,
    }
}
