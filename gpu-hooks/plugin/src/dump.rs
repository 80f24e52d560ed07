//! Runs `criu dump`: locks, checkpoints, and puts back.
//!
//! CRIU calls PAUSE_DEVICES for each process while it still runs, just before it stops it. The first call locks every
//! CUDA process of the plan at once. When all are stopped, CRIU calls CHECKPOINT_DEVICES for each. The first call
//! checkpoints all at once, with each process's driver thread released meanwhile, so that N processes take as long as
//! the slowest.
//!
//! Processes that were locked when the container was paused stay in their frozen cgroup until CRIU has stopped them:
//! between the pause and the engine's resume only their drivers' threads run.
//!
//! At the end, when the dump failed or the container goes on running, every process is brought back to the state it was
//! found in while CRIU still holds it stopped (it unseizes after our exit, in 4.1 as in 4.2). A successful dump is
//! committed to the agent. The agent undoes whatever is left when the connection closes.

use crate::criu::{self, Level};
use crate::maps;
use crate::session::{
    CudaThread, Failed, Session, failure, failure_with, record_of, reply_failure, unexpected,
};
use cryopod_cuda::messages::image::{FILE_NAME, MAPS_VERSION, ProcessRecord, Step, StepTiming};
use cryopod_cuda::messages::protocol::{ErrorKind, Op, Outcome, ProcessState, QUERY_MS};
use cryopod_cuda::procfs;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

mod vram_out;

struct Task {
    tid: i32,
    found: ProcessState,
    now: ProcessState,
}

impl Task {
    fn thread(&self, pid: i32) -> CudaThread {
        CudaThread { pid, tid: self.tid }
    }
}

pub struct Dump {
    pub session: Session,
    tasks: BTreeMap<i32, Task>,
    /// Processes that CRIU has named, CUDA or not.
    seen: BTreeSet<i32>,
    /// Processes asked about.
    asked: BTreeSet<i32>,
    /// Number of PID namespaces outside that of the root process.
    depth: usize,
    checkpointed: bool,
    /// When the first process had to stop its work.
    paused: Option<Instant>,
    /// The NCCL communicators have been looked at.
    communicators: bool,
    in_inventory: bool,
}

impl Dump {
    pub fn new(session: Session) -> Self {
        Self {
            session,
            tasks: BTreeMap::new(),
            seen: BTreeSet::new(),
            asked: BTreeSet::new(),
            depth: 0,
            checkpointed: false,
            paused: None,
            communicators: false,
            in_inventory: false,
        }
    }

    /// PAUSE_DEVICES.
    pub fn pause(&mut self, pid: i32) -> Result<(), Failed> {
        self.session.check_abort("pause")?;
        let mut pids = vec![pid];
        if self.seen.is_empty() {
            self.session.connect()?;
            let outer = procfs::status(pid)
                .map(|status| status.ns_pids.len())
                .unwrap_or(1);
            self.depth = outer.saturating_sub(1);
            pids.extend(self.session.config.pids.iter().copied());
        }
        self.seen.insert(pid);
        pids.retain(|pid| self.asked.insert(*pid));
        self.take_in(&pids)
    }

    /// Asks about processes and locks those that use CUDA.
    fn take_in(&mut self, pids: &[i32]) -> Result<(), Failed> {
        let found = self.session.find(pids)?;
        let known = &self.session.config.locked;
        let (locked, threads): (Vec<CudaThread>, Vec<CudaThread>) =
            found.into_iter().partition(|t| known.contains(&t.pid));
        for thread in locked {
            self.take_in_one(thread, ProcessState::Locked, ProcessState::Running);
        }
        let mut lock = Vec::new();
        for (thread, state, micros) in self.states(&threads)? {
            let pid = thread.pid;
            match state {
                ProcessState::Running => lock.push(pid),
                ProcessState::Locked | ProcessState::Checkpointed => {
                    let what = format!("process {pid} was {state} by someone else");
                    criu::log(Level::Info, &what);
                }
                _ => {
                    let what = format!("the driver says that it is {state}");
                    let remedy = "restart it: the driver does not recover such a process";
                    return Err(failure_with("query", Some(pid), what, remedy));
                }
            }
            self.take_in_one(thread, state, state);
            self.time(pid, Step::Query, micros);
        }
        // Once, while all of them run.
        if !std::mem::replace(&mut self.communicators, true) {
            self.session.preload_ahead(&lock)?;
            self.paused = Some(Instant::now());
            self.session.nccl_down(&lock)?;
        }
        for (pid, micros) in self.session.preload_out(&lock)? {
            self.time(pid, Step::Preload, micros);
        }
        self.lock(&lock)
    }

    /// Adds a CUDA process, with its present state and the state after a restore.
    fn take_in_one(&mut self, thread: CudaThread, found: ProcessState, restored: ProcessState) {
        let CudaThread { pid, tid } = thread;
        let now = found;
        self.tasks.insert(pid, Task { tid, found, now });
        let record = self.new_record(pid, restored);
        self.session.image.processes.push(record);
    }

    fn states(
        &mut self,
        threads: &[CudaThread],
    ) -> Result<Vec<(CudaThread, ProcessState, u64)>, Failed> {
        let query = |pid| Op::Query {
            pid,
            limit_ms: QUERY_MS,
        };
        let (replies, not_stopped) = self.session.released_batch("query", threads, query)?;
        if let Some(what) = not_stopped {
            return Err(failure("query", None, what));
        }
        let told = threads
            .iter()
            .zip(replies)
            .map(|(thread, reply)| match reply.outcome {
                Outcome::State(state) => Ok((*thread, state, reply.micros)),
                outcome => Err(unexpected("query", thread.pid, &outcome)),
            });
        told.collect()
    }

    fn new_record(&self, pid: i32, initial_state: ProcessState) -> ProcessRecord {
        let status = procfs::status(pid).unwrap_or_default();
        let ns_pids = status
            .ns_pids
            .get(self.depth..)
            .filter(|pids| !pids.is_empty());
        let by_minor = procfs::gpus_by_minor();
        let minors = procfs::open_gpu_minors(pid);
        ProcessRecord {
            ns_pids: ns_pids.map_or_else(|| vec![pid], ToOwned::to_owned),
            host_pid: pid,
            comm: status.comm,
            initial_state,
            gpus: minors
                .iter()
                .filter_map(|minor| by_minor.get(minor).copied())
                .collect(),
            vram_bytes: None,
            vram: Vec::new(),
            steps: Vec::new(),
        }
    }

    fn time(&mut self, pid: i32, step: Step, micros: u64) {
        if let Some(record) = record_of(&mut self.session.image.processes, pid) {
            record.steps.push(StepTiming { step, micros });
        }
        if !matches!(step, Step::Query) {
            criu::log(
                Level::Info,
                &format!("process {pid}: {step} in {} ms", micros / 1000),
            );
        }
    }

    fn lock(&mut self, pids: &[i32]) -> Result<(), Failed> {
        let timeout_ms = self.session.config.lock_timeout_ms;
        self.step(Step::Lock, pids, ProcessState::Locked, |pid| Op::Lock {
            pid,
            timeout_ms,
        })
    }

    /// Does one step of several processes at once. Releases driver threads of stopped processes meanwhile, records
    /// every process's outcome, and returns the first error.
    fn step(
        &mut self,
        step: Step,
        pids: &[i32],
        then: ProcessState,
        op: impl Fn(i32) -> Op,
    ) -> Result<(), Failed> {
        if pids.is_empty() {
            return Ok(());
        }
        let name = step.to_string();
        let threads: Vec<CudaThread> = pids
            .iter()
            .filter_map(|pid| Some(self.tasks.get(pid)?.thread(*pid)))
            .collect();
        let (replies, not_stopped) = match self.session.released_batch(&name, &threads, op) {
            Ok(done) => done,
            Err(failed) => {
                for pid in pids {
                    if let Some(task) = self.tasks.get_mut(pid) {
                        task.now = ProcessState::Unknown;
                    }
                }
                return Err(failed);
            }
        };
        let mut first = None;
        for (pid, reply) in pids.iter().zip(&replies) {
            match reply_failure(&name, *pid, &reply.outcome) {
                None => {
                    if let Some(task) = self.tasks.get_mut(pid) {
                        task.now = then;
                    }
                    self.time(*pid, step, reply.micros);
                }
                Some(failed) => {
                    if let (Some(task), Outcome::Error(error)) =
                        (self.tasks.get_mut(pid), &reply.outcome)
                    {
                        // The driver is asked for the new state before anything else is done.
                        task.now = match error.kind {
                            ErrorKind::LockTimeout | ErrorKind::NoProcess => task.now,
                            _ => ProcessState::Unknown,
                        };
                    }
                    first.get_or_insert(failed);
                }
            }
        }
        match (first, not_stopped) {
            (Some(failed), _) => Err(failed),
            (None, Some(what)) => Err(failure(&name, None, what)),
            (None, None) => Ok(()),
        }
    }

    /// CHECKPOINT_DEVICES.
    pub fn checkpoint(&mut self) -> Result<(), Failed> {
        self.session.check_abort("checkpoint")?;
        if self.checkpointed {
            return Ok(());
        }
        self.checkpointed = true;
        // The plan may know processes outside the tree that CRIU dumps.
        let strays: Vec<i32> = self
            .tasks
            .keys()
            .copied()
            .filter(|pid| !self.seen.contains(pid))
            .collect();
        if !strays.is_empty() {
            criu::log(
                Level::Warn,
                &format!("not part of the dump, left as found: {strays:?}"),
            );
            self.bring_back(&strays)?;
            self.tasks.retain(|pid, _| self.seen.contains(pid));
            self.session
                .image
                .processes
                .retain(|record| !strays.contains(&record.host_pid));
        }
        // A process that was within cuInit when it was asked about uses CUDA by now.
        let late: Vec<i32> = self
            .seen
            .iter()
            .copied()
            .filter(|pid| !self.tasks.contains_key(pid))
            .collect();
        self.take_in(&late)?;

        let pids: Vec<i32> = self
            .tasks
            .iter()
            .filter(|(_, task)| task.now == ProcessState::Locked)
            .map(|(pid, _)| *pid)
            .collect();
        let rss = |pid: i32| procfs::status(pid).map_or(0, |status| status.rss);
        let before: Vec<u64> = pids.iter().map(|pid| rss(*pid)).collect();
        let limit_ms = self.session.config.step_timeout_ms;
        let result = self.step(Step::Checkpoint, &pids, ProcessState::Checkpointed, |pid| {
            Op::Checkpoint { pid, limit_ms }
        });
        for (pid, before) in pids.iter().zip(before) {
            if let Some(record) = record_of(&mut self.session.image.processes, *pid) {
                record.vram_bytes = Some(rss(*pid).saturating_sub(before));
            }
        }
        result?;
        self.vram_out()?;
        self.maps()?;
        let image = &self.session.image;
        if image.processes.is_empty() && image.inherited_maps == 0 {
            return Ok(());
        }
        self.write_image()
    }

    /// Records the remaining mappings of the device nodes.
    fn maps(&mut self) -> Result<(), Failed> {
        for pid in &self.seen {
            let count = maps::count(*pid);
            if count == 0 {
                continue;
            }
            if self.tasks.contains_key(pid) {
                let what = format!("{count} mappings of device nodes are left");
                return Err(failure("checkpoint", Some(*pid), what));
            }
            let what =
                format!("process {pid}: {count} mappings of the driver's, inherited, are not kept");
            criu::log(Level::Info, &what);
            self.session.image.inherited_maps += count;
            let image = &mut self.session.image;
            image.version = image.version.max(MAPS_VERSION);
        }
        Ok(())
    }

    pub fn write_image(&mut self) -> Result<(), Failed> {
        let failed = |cause: String| failure("image", None, cause);
        if !self.in_inventory {
            if !criu::add_to_inventory() {
                return Err(failed("cannot add the plugin to CRIU's inventory".into()));
            }
            self.in_inventory = true;
        }
        let path = criu::image_path(FILE_NAME)
            .ok_or_else(|| failed("CRIU does not tell its image directory".into()))?;
        cryopod_cuda::write_json(&path, &self.session.image)
            .map_err(|error| failed(format!("cannot write {FILE_NAME}: {error}")))
    }

    fn bring_back(&mut self, pids: &[i32]) -> Result<(), Failed> {
        let changed: Vec<i32> = pids
            .iter()
            .copied()
            .filter(|pid| {
                let preloaded = self.session.vram.preloaded.iter().any(|m| m.pid == *pid);
                let task = self.tasks.get(pid);
                preloaded || task.is_some_and(|task| task.now != task.found)
            })
            .collect();
        if changed.is_empty() {
            return Ok(());
        }
        // After an error only the driver knows.
        let unknown: Vec<CudaThread> = changed
            .iter()
            .filter_map(|pid| Some(self.tasks.get(pid)?.thread(*pid)))
            .filter(|thread| self.state(thread.pid) == ProcessState::Unknown)
            .collect();
        let mut first = None;
        match self.states(&unknown) {
            Ok(told) => {
                for (thread, state, _) in told {
                    if let Some(task) = self.tasks.get_mut(&thread.pid) {
                        task.now = state;
                    }
                }
            }
            Err(failed) => first = Some(failed),
        }
        let limit_ms = self.session.config.step_timeout_ms;
        use ProcessState::{Checkpointed, Locked, Running};
        let mut restore: Vec<i32> = changed
            .iter()
            .copied()
            .filter(|pid| self.state(*pid) == Checkpointed)
            .collect();
        // Without its memory a process must not be restored.
        restore.retain(|pid| match self.session.vram_back(*pid) {
            Ok(()) => true,
            Err(failed) => {
                first.get_or_insert(failed);
                false
            }
        });
        let restored = self.step(Step::Restore, &restore, Locked, |pid| Op::Restore {
            pid,
            gpu_map: Vec::new(),
            limit_ms,
        });
        first = first.or(restored.err());
        let unlock: Vec<i32> = changed
            .iter()
            .copied()
            .filter(|pid| {
                self.tasks
                    .get(pid)
                    .is_some_and(|t| t.now == Locked && t.found == Running)
            })
            .collect();
        let unlocked = self.step(Step::Unlock, &unlock, Running, |pid| Op::Unlock {
            pid,
            limit_ms,
        });
        first = first.or(unlocked.err());
        first = first.or(self.preload_back().err());
        if first.is_none() {
            let left = changed.iter().find(|pid| {
                self.tasks
                    .get(pid)
                    .is_some_and(|task| task.now != task.found)
            });
            first = left.map(|pid| {
                failure(
                    "bring back",
                    Some(*pid),
                    format!("it is {}", self.state(*pid)),
                )
            });
        }
        first.map_or(Ok(()), Err)
    }

    /// Brings the GPU memory back that the preload library handed over, to the processes that are unlocked.
    fn preload_back(&mut self) -> Result<(), Failed> {
        let preloaded = self.session.vram.preloaded.iter();
        let memory: Vec<(i32, u64)> = preloaded
            .filter(|memory| self.state(memory.pid) == ProcessState::Running)
            .map(|memory| (memory.pid, memory.id))
            .collect();
        if memory.is_empty() {
            return Ok(());
        }
        let times = self.session.preload_in(&memory)?;
        let preloaded = &mut self.session.vram.preloaded;
        preloaded.retain(|memory| !times.iter().any(|(pid, _)| *pid == memory.pid));
        for (pid, micros) in times {
            self.time(pid, Step::Preload, micros);
        }
        Ok(())
    }

    fn state(&self, pid: i32) -> ProcessState {
        self.tasks
            .get(&pid)
            .map_or(ProcessState::Unknown, |task| task.now)
    }

    pub fn finish(&mut self, succeeded: bool) {
        let mut good = succeeded && self.session.failed().is_none();
        let leave_running = self.session.config.leave_running;
        if good && self.session.vram.writes && !leave_running {
            // If the wrapper waited for it at post-dump, it is long done.
            match self.session.vram_wait() {
                Ok(done) => {
                    if let Some(done) = &done {
                        let (ahead, all) = (done.ahead, done.facts.chunks);
                        let text =
                            format!("{ahead} of {all} chunks of GPU memory were written ahead");
                        criu::log(Level::Info, &text);
                    }
                    self.session.vram_done = done;
                }
                Err(failed) => {
                    self.session.fail(failed);
                    good = false;
                }
            }
        }
        if !good {
            // The VRAM files may fail for the same reason as CRIU, and report it better: a full disk.
            if let Err(failed) = self.session.vram_look() {
                self.session.fail(failed);
            }
            self.session.vram_cancel();
        }
        if !self.tasks.is_empty() {
            let pids: Vec<i32> = self.tasks.keys().copied().collect();
            let result = if good && !leave_running {
                self.session.commit()
            } else {
                let back = self.bring_back(&pids);
                let pause = self
                    .paused
                    .map(|since| cryopod_host::micros(since.elapsed()));
                self.session.pause_us = pause;
                back
            };
            if let Err(failed) = result {
                criu::log(
                    Level::Warn,
                    "the driver agent will try again when CRIU has ended",
                );
                self.session.fail(failed);
                self.session.preload_recover();
            }
        }
        self.session.disconnect();
        self.session.write_last_report(succeeded);
    }
}
