//! Holds what dump and restore share: the configuration, the connection to the agent, batches of overlapping driver
//! calls, and the report.

use crate::criu::{self, Level};
use crate::vram::VramSteps;
use cryopod_cuda::exchange::client::{Client, ClientError};
use cryopod_cuda::exchange::{Attendant, ExchangeError, exchange};
use cryopod_cuda::inject::SUPPORTED;
use cryopod_cuda::messages::config::{self, Operation, PluginConfig};
use cryopod_cuda::messages::image::{NvidiaImage, ProcessRecord};
use cryopod_cuda::messages::protocol::{
    DriverError, ErrorKind, Hello, NcclDone, Op, Outcome, QUERY_MS, Reply,
};
use cryopod_cuda::messages::report::{Failure, PluginOutcome, PluginReport, VERSION};
use cryopod_cuda::procfs;
use cryopod_cuda::released::{Released, is_ours};
use cryopod_cuda::vram::{VramConfig, VramDone};
use std::ffi::c_void;
use std::time::Instant;

/// Boxed: it is rare and large.
pub type Failed = Box<Failure>;

pub fn failure(step: &str, pid: Option<i32>, cause: impl Into<String>) -> Failed {
    Box::new(Failure {
        pid,
        comm: pid.map(procfs::comm),
        step: step.to_owned(),
        cause: cause.into(),
        remedy: None,
    })
}

pub fn failure_with(
    step: &str,
    pid: Option<i32>,
    cause: impl Into<String>,
    remedy: &str,
) -> Failed {
    let mut failure = failure(step, pid, cause);
    failure.remedy = Some(remedy.to_owned());
    failure
}

/// The remedy for a driver's error, in words for a user.
pub fn remedy(kind: ErrorKind) -> Option<&'static str> {
    Some(match kind {
        ErrorKind::LockTimeout => {
            "its GPU work did not end in time; raise nvidia.lock_timeout_ms or let it reach a pause"
        }
        ErrorKind::TimedOut => {
            "the driver may be hanging (see NVRM in the kernel log); raise limits.checkpoint_s or limits.restore_s if the GPU memory is very large"
        }
        ErrorKind::WrongState => {
            "another tool may be checkpointing it, or it was just starting CUDA; try again"
        }
        ErrorKind::NotSupported => {
            "it uses something the driver cannot checkpoint (managed memory, CUDA IPC, MPS, MIG), or the driver is too old"
        }
        ErrorKind::OutOfMemory => "free GPU memory, or host memory for a copy of it, on this host",
        ErrorKind::Busy
        | ErrorKind::NoProcess
        | ErrorKind::Driver
        | ErrorKind::Vram
        | ErrorKind::BadRequest => {
            return None;
        }
    })
}

/// One operation of CRIU, from init to exit.
pub struct Session {
    pub config: PluginConfig,
    pub image: NvidiaImage,
    pub vram: VramSteps,
    pub vram_done: Option<VramDone>,
    /// Processes whose NCCL communicators may be down.
    pub communicators: Vec<i32>,
    pub nccl_done: Option<NcclDone>,
    /// How long the CUDA processes could not work, in microseconds, once they go on.
    pub pause_us: Option<u64>,
    client: Option<Client>,
    failed: Option<Failed>,
}

/// Reads the configuration beside this plugin and checks that it is for this operation.
pub fn read_config(
    own_symbol: *const c_void,
    operation: Operation,
) -> Result<PluginConfig, Failed> {
    let failed = |cause: String| {
        failure_with(
            "configuration",
            None,
            cause,
            "let cryopod-runtime start CRIU",
        )
    };
    let directory = criu::own_directory(own_symbol)
        .ok_or_else(|| failed("cannot tell where this plugin was loaded from".into()))?;
    let path = directory.join(config::FILE_NAME);
    let config = PluginConfig::read(&path)
        .map_err(|error| failed(format!("{}: {error}", path.display())))?;
    if config.operation != operation {
        let (is, should) = (config.operation, operation);
        return Err(failed(format!(
            "{}: it is for {is:?}, CRIU does {should:?}",
            path.display()
        )));
    }
    Ok(config)
}

impl Session {
    /// Sends the agent one request about VRAM files.
    pub fn ask(&mut self, op: Op) -> Result<Reply, Failed> {
        let pid = op.pid();
        let reply = self
            .batch(vec![op], &mut [])?
            .pop()
            .ok_or_else(|| failure("vram", pid, "no answer"))?;
        match reply_failure("vram", pid.unwrap_or_default(), &reply.outcome) {
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

    pub fn new(config: PluginConfig, image: NvidiaImage) -> Self {
        Self {
            config,
            image,
            vram: VramSteps::default(),
            vram_done: None,
            communicators: Vec::new(),
            nccl_done: None,
            pause_us: None,
            client: None,
            failed: None,
        }
    }

    pub fn failed(&self) -> Option<&Failure> {
        self.failed.as_deref()
    }

    /// Logs a failure and keeps the first one.
    pub fn fail(&mut self, failure: Failed) {
        criu::log(Level::Error, &failure.to_string());
        self.note(failure);
    }

    /// Keeps the first failure, for the report.
    pub fn note(&mut self, failure: Failed) {
        if self.failed.is_none() {
            self.failed = Some(failure);
            self.write_report(PluginOutcome::Failing);
        }
    }

    pub fn check_abort(&self, step: &str) -> Result<(), Failed> {
        match &self.config.abort_file {
            Some(file) if file.exists() => Err(failure(step, None, "the operation was called off")),
            _ => Ok(()),
        }
    }

    fn agent_failure(error: &ClientError) -> Failed {
        failure_with(
            "driver agent",
            None,
            error.to_string(),
            "cryopod-cuda-agent is started by cryopod-runtime; see its log",
        )
    }

    pub fn connect(&mut self) -> Result<(), Failed> {
        if self.client.is_some() {
            return Ok(());
        }
        let mut client =
            Client::connect(&self.config.socket).map_err(|e| Self::agent_failure(&e))?;
        let hello = Self::hello(&mut client)?;
        if self.config.operation == Operation::Checkpoint {
            self.image.driver_version = hello.driver_version;
            self.image.cuda_version = hello.cuda_version;
        }
        self.client = Some(client);
        Ok(())
    }

    pub fn disconnect(&mut self) {
        self.client = None;
    }

    fn hello(client: &mut Client) -> Result<Hello, Failed> {
        let reply = client
            .call(Op::Hello, Op::Hello.patience())
            .map_err(|e| Self::agent_failure(&e))?;
        match reply.outcome {
            Outcome::Hello(hello) => Ok(hello),
            other => Err(failure(
                "driver agent",
                None,
                format!("unexpected answer {other:?}"),
            )),
        }
    }

    /// Sends all requests at once and waits for all answers, in the order of the requests, as [`exchange`] does.
    pub fn batch(&mut self, ops: Vec<Op>, released: &mut [Released]) -> Result<Vec<Reply>, Failed> {
        let Some(client) = self.client.as_mut() else {
            return Err(failure("driver agent", None, "not connected"));
        };
        let mut attendant = Giver {
            config: self.config.vram.clone().unwrap_or_default(),
            vram: &mut self.vram,
            processes: released.len(),
        };
        exchange(client, ops, released, &mut attendant).map_err(|error| match error {
            ExchangeError::Agent(error) => Self::agent_failure(&error),
            ExchangeError::Fault { pid, .. } => failure("driver", Some(pid), error.to_string()),
            ExchangeError::Unread(error) => failure("vram", None, error.message),
            ExchangeError::CalledOff => failure_with(
                "freeze",
                None,
                "CRIU's timeout passed",
                "raise CRIU's `timeout` above the lock timeout",
            ),
        })
    }

    /// Finds the processes that use CUDA: each with its driver's thread.
    pub fn find(&mut self, pids: &[i32]) -> Result<Vec<CudaThread>, Failed> {
        let find = |pid: &i32| Op::Find {
            pid: *pid,
            limit_ms: QUERY_MS,
        };
        let replies = self.batch(pids.iter().map(find).collect(), &mut [])?;
        let mut found = Vec::new();
        for (pid, reply) in pids.iter().zip(replies) {
            match reply.outcome {
                Outcome::Thread(Some(tid)) => found.push(CudaThread { pid: *pid, tid }),
                Outcome::Thread(None) => {
                    criu::log(Level::Debug, &format!("process {pid} does not use CUDA"));
                }
                Outcome::Error(error) if error.kind == ErrorKind::NoProcess => {}
                outcome => return Err(unexpected("find", *pid, &outcome)),
            }
        }
        Ok(found)
    }

    /// Sends one request for each process, all at once, with the drivers' threads of stopped processes released.
    /// Returns the replies in the order of the processes, and a text if a thread could not be stopped again.
    pub fn released_batch(
        &mut self,
        step: &str,
        threads: &[CudaThread],
        op: impl Fn(i32) -> Op,
    ) -> Result<(Vec<Reply>, Option<String>), Failed> {
        // Only a checkpoint asks for memory that matters here.
        let vram = self
            .config
            .vram
            .as_ref()
            .filter(|_| step == "checkpoint" && SUPPORTED);
        let mut released = release(step, threads, vram.map(|vram| vram.min_bytes))?;
        let mut ops: Vec<Op> = threads.iter().map(|thread| op(thread.pid)).collect();
        let buffers = std::mem::take(&mut self.vram.reading);
        if !buffers.is_empty() {
            let limit_ms = self.config.step_timeout_ms;
            ops.push(Op::VramRead { buffers, limit_ms });
        }
        let result = self.batch(ops, &mut released);
        let not_stopped = stop(released);
        let mut replies = result?;
        replies.truncate(threads.len());
        Ok((replies, not_stopped))
    }

    pub fn commit(&mut self) -> Result<(), Failed> {
        self.batch(vec![Op::Commit], &mut []).map(drop)
    }

    pub fn write_last_report(&self, succeeded: bool) {
        self.write_report(match succeeded && self.failed().is_none() {
            true => PluginOutcome::Done,
            false => PluginOutcome::Failed,
        });
    }

    fn write_report(&self, outcome: PluginOutcome) {
        let Some(path) = &self.config.report else {
            return;
        };
        // The failing process may have been a child of CRIU, forked with this plugin in it.
        let theirs = || {
            let earlier = std::fs::read(path).ok()?;
            serde_json::from_slice::<PluginReport>(&earlier).ok()?.error
        };
        let report = PluginReport {
            version: VERSION,
            outcome,
            error: self.failed.as_deref().cloned().or_else(theirs),
            processes: self.image.processes.clone(),
            files: self.image.files.len(),
            vram: self.vram_done.clone(),
            vram_left_out: self.vram.left_out.clone(),
            pause_us: self.pause_us,
            nccl: self.nccl_done.clone(),
        };
        if let Err(error) = cryopod_cuda::write_json(path, &report) {
            let text = format!("cannot write {}: {error}", path.display());
            criu::log(Level::Warn, &text);
        }
    }
}

/// Gives the drivers' threads memory of the agent's.
struct Giver<'a> {
    config: VramConfig,
    vram: &'a mut VramSteps,
    processes: usize,
}

impl Attendant for Giver<'_> {
    fn threads(&self) -> usize {
        self.config.threads()
    }

    fn give(
        &mut self,
        thread: &mut Released,
        bytes: u64,
        since: Instant,
        outcome: &Outcome,
    ) -> Vec<Op> {
        let unused = self
            .vram
            .answer(&self.config, thread, bytes, since, outcome);
        let dropped = unused.map(|id| Op::VramDrop { id });
        let ahead = self.vram.write_ahead(&self.config, self.processes);
        dropped.into_iter().chain(ahead).collect()
    }

    fn refused(&mut self, error: &DriverError) {
        criu::log(Level::Info, &format!("the driver agent: {error}"));
    }

    fn called_off(&self) -> bool {
        criu::alarm_passed()
    }
}

/// A CUDA process and the thread in it that does the driver's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CudaThread {
    pub pid: i32,
    pub tid: i32,
}

pub fn reply_failure(step: &str, pid: i32, outcome: &Outcome) -> Option<Failed> {
    let Outcome::Error(error) = outcome else {
        return None;
    };
    let mut failure = failure(step, Some(pid), error.message.clone());
    failure.remedy = remedy(error.kind).map(ToOwned::to_owned);
    Some(failure)
}

/// Turns a driver's error or an invalid answer into a failure of the step.
pub fn unexpected(step: &str, pid: i32, outcome: &Outcome) -> Failed {
    reply_failure(step, pid, outcome)
        .unwrap_or_else(|| failure(step, Some(pid), "unexpected answer of the agent"))
}

/// Lets the drivers' threads run, each in its stopped process; a process that CRIU has not stopped needs nothing. All
/// or none.
fn release(
    step: &str,
    threads: &[CudaThread],
    watched: Option<u64>,
) -> Result<Vec<Released>, Failed> {
    let mut released = Vec::new();
    for CudaThread { pid, tid } in threads {
        if !is_ours(*tid) {
            continue;
        }
        match Released::new(*pid, *tid, watched) {
            Ok(thread) => released.push(thread),
            Err(error) => {
                stop(released);
                let what = format!("cannot let the driver's thread {tid} run: {error}");
                return Err(failure(step, Some(*pid), what));
            }
        }
    }
    Ok(released)
}

/// Stops them again. Tries all, and returns the first error.
fn stop(released: Vec<Released>) -> Option<String> {
    let mut first = None;
    for thread in released {
        if let Err(error) = thread.stop() {
            let what = format!("cannot stop the driver's thread again: {error}");
            criu::log(Level::Error, &what);
            first.get_or_insert(what);
        }
    }
    first
}

pub fn record_of(records: &mut [ProcessRecord], pid: i32) -> Option<&mut ProcessRecord> {
    records.iter_mut().find(|record| record.host_pid == pid)
}
