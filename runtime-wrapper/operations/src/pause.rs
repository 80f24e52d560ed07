//! Runs `pause` and `resume` for a container whose checkpoint must show the moment of its pause.
//!
//! Engines that checkpoint several containers as one pause all of them, checkpoint each, and resume all. The GPU driver
//! must lock a process's CUDA calls while the process runs. So the checkpoint of a paused container would resume it,
//! and it would move while the others stand still. With [`ANNOTATION`] the lock is taken at the pause. The checkpoint
//! finds it, needs only the drivers' threads from then on, and leaves the container paused and locked; `resume`
//! unlocks.
//!
//! A lock outlives the programs that took it. `resume` unlocks a container that is never checkpointed; a killed one
//! needs nothing. If somebody else thawed its cgroup, `cryopod resume` unlocks it.

pub mod suspended;

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use cryopod_cuda::exchange::client::Client;
use cryopod_cuda::messages::protocol::ProcessState;
use cryopod_cuda::messages::report::{AgentOutcome, AgentReport};
use cryopod_cuda::suspend::{self, Done, How, SuspendError, Suspended};
use cryopod_gpu_plan::live;
use cryopod_gpu_plan::plan;
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use cryopod_host::programs::{Output, SystemTools};
use cryopod_host::spec::Spec;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use self::suspended::{SuspendLock, SuspendedRecord};
use crate::bundle::lock::BundleLock;
use crate::config::Config;
use crate::criu::plugins;
use crate::error::Error;
use crate::request::argv::Invocation;
use crate::request::context::Context;
use crate::request::passthrough;
use crate::request::state::{self, ContainerState, verb};
use crate::rootfs::frozen;
use crate::run::log;
use crate::run::operation::{self, Operation};
use crate::vram::agent::{RunningAgent, SOCKET};

/// Asks for the driver's lock at the pause: `on` or `off`.
pub const ANNOTATION: &str = "dev.cryopod.checkpoint.at-pause";

/// `cryopod migrate` holds a lock on this file in the low-level runtime's directory of the container.
const HELD: &str = "cryopod-held";

/// In the low-level runtime's directory of a container that its engine has paused and a checkpoint has thawed.
const THAWED: &str = "cryopod-thawed";

/// How long a pause waits for a checkpoint of cryopod's own to give up, and a resume for any to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// A mark that a checkpoint has thawed the container: if the checkpoint is killed, the engine's `resume` finds it running.
pub fn mark_thawed(state_directory: &Path) -> io::Result<()> {
    File::create(state_directory.join(THAWED)).map(drop)
}

/// Returns true if there is a mark.
pub fn is_marked_thawed(state_directory: &Path) -> bool {
    state_directory.join(THAWED).exists()
}

/// Removes the mark. Returns true if there was one.
pub fn unmark_thawed(state_directory: &Path) -> bool {
    fs::remove_file(state_directory.join(THAWED)).is_ok()
}

/// Makes [`resume`] fail until the result is dropped or this process dies. (`ctr containers checkpoint` resumes a container
/// at its end.)
pub fn hold(state_directory: &Path) -> io::Result<Flock<File>> {
    let file = File::create(state_directory.join(HELD))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, e)| e.into())
}

fn is_held(state_directory: &Path) -> bool {
    File::open(state_directory.join(HELD)).is_ok_and(|file| {
        let lock = Flock::lock(file, FlockArg::LockSharedNonblock);
        matches!(lock, Err((_, Errno::EWOULDBLOCK)))
    })
}

/// Pauses a container. On error the container goes on running.
pub fn pause(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    // What a killed operation has frozen must not be thawed when it is paused.
    operation::sweep_dead();
    let host = Host::system();
    let tools = SystemTools::from_env();
    let state = ContainerState::ask(ctx, inv, &tools);
    let Some(mut state) = state.filter(|s| !s.created) else {
        return Err(passthrough::exec(&ctx.low, &ctx.args));
    };
    // A checkpoint of a running container ends with a running one, and may have it frozen meanwhile.
    let directory = state.lock_directory(ctx, inv);
    let _free = BundleLock::take(&directory, PATIENCE, || {
        format!(
            "pause of {} refused: a checkpoint of it is under way; try again when that has ended",
            inv.id
        )
    })?;
    state.ask_again(ctx, inv, &tools);
    if state.paused {
        return Err(passthrough::exec(&ctx.low, &ctx.args));
    }
    let spec = state.spec(ctx, inv);
    let nodes = plan::container_nodes(&host, &spec, state.init);
    // A container that moves to another host must not run on after its checkpoint.
    let wanted = wanted(&spec)? || is_held(&state::directory(ctx, inv));
    if !wanted || nodes.iter().all(|n| n.vendor != Vendor::Nvidia) {
        return Err(passthrough::exec(&ctx.low, &ctx.args));
    }
    suspended::sweep(&host);
    let failed = |e: io::Error| Error::Failed(format!("pause of {} failed: {e}", inv.id));
    let _lock = SuspendLock::take(&host, state.init, Duration::ZERO).map_err(failed)?;
    let record = SuspendedRecord::of(&host, state.init).map_err(failed)?;
    if record.is_some() {
        // `cryopod suspend` has locked it already.
        return Err(passthrough::exec(&ctx.low, &ctx.args));
    }
    let pids = live::tree(&host, state.init);
    let mut driver = PauseDriver::start(&ctx.config, &host)?;
    let record = |done: &Done| SuspendedRecord {
        version: SuspendedRecord::VERSION,
        name: inv.id.clone(),
        init: state.init,
        start_time: live::start_time(&host, state.init).unwrap_or(0),
        since: log::rfc3339(SystemTime::now()),
        directory: None,
        digest: None,
        processes: done.processes.clone(),
        locked_at_pause: true,
    };
    let mut note = |done: &Done| record(done).write().map_err(|e| e.to_string());
    let done = suspend::lock(&mut driver.connect()?, &pids, &driver.how, &mut note);
    let done = match done {
        Ok(done) => done,
        Err(SuspendError::Unused) => {
            drop(driver);
            return Err(passthrough::exec(&ctx.low, &ctx.args));
        }
        Err(e @ SuspendError::Unsettled(_)) => {
            drop(driver);
            return Err(Error::Failed(format!(
                "pause of {} failed: {e}; `cryopod resume pid:{}` unlocks it, or says that it runs",
                inv.id, state.init
            )));
        }
        Err(e) => {
            let agent = driver.agent.take();
            if let Some(left) = roll_back(&ctx.config, &host, &driver.op, agent, &pids, &e) {
                return Err(waits(
                    inv,
                    state.init,
                    &format!("pause failed: {e}; {left}"),
                ));
            }
            if let Ok(Some(record)) = SuspendedRecord::of(&host, state.init) {
                record.remove();
            }
            return Err(Error::Failed(format!(
                "pause of {} failed and it goes on running: {e}",
                inv.id
            )));
        }
    };
    let paused = verb(ctx, inv, "pause", &tools);
    if !paused.as_ref().is_ok_and(|out| out.code == 0) {
        // runc gives up after 10 s, and would leave it to freeze later (cgroup v2).
        frozen::thaw_left(&host, &spec, state.init);
        if !unlock(&driver, &host, &record(&done)) {
            return Err(waits(inv, state.init, "pause failed"));
        }
    }
    hand_on(inv, &paused?)
}

fn waits(inv: &Invocation, init: i32, why: &str) -> Error {
    Error::Failed(format!(
        "{}: {why}: it runs, but its CUDA calls wait: the GPU driver did not unlock it; try `cryopod resume pid:{init}`",
        inv.id
    ))
}

/// Resumes a container. An error says whether it runs.
pub fn resume(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    operation::sweep_dead();
    let directory = state::directory(ctx, inv);
    if is_held(&directory) {
        return Err(Error::Failed(format!(
            "{} stays paused: `cryopod migrate` moves it to another host",
            inv.id
        )));
    }
    let host = Host::system();
    let tools = SystemTools::from_env();
    if unmark_thawed(&directory)
        && ContainerState::ask(ctx, inv, &tools).is_some_and(|state| !state.paused)
    {
        tracing::info!("{}: a killed checkpoint has resumed it already", inv.id);
        return Ok(ExitCode::SUCCESS);
    }
    let stays = |e: io::Error| Error::Failed(format!("{} stays paused: {e}", inv.id));
    let find = || -> Result<_, Error> {
        Ok(suspended::any()
            .then(|| ContainerState::ask(ctx, inv, &tools))
            .flatten()
            .map_or(Ok(None), |state| SuspendedRecord::of(&host, state.init))
            .map_err(stays)?
            .filter(|record| record.locked_at_pause))
    };
    let mut locked = find()?;
    // A checkpoint under way needs the processes as they are; whoever had the lock may have resumed them.
    let _lock = match &locked {
        None => None,
        Some(record) => Some(SuspendLock::take(&host, record.init, PATIENCE).map_err(stays)?),
    };
    if locked.is_some() {
        locked = find()?;
    }
    let Some(record) = locked else {
        return Err(passthrough::exec(&ctx.low, &ctx.args));
    };
    // Before the container runs: without the driver it would hang in its next CUDA call.
    let driver = PauseDriver::start(&ctx.config, &host)
        .map_err(|e| Error::Failed(format!("{} stays paused: {e}; resume it again", inv.id)))?;
    let resumed = verb(ctx, inv, "resume", &tools)?;
    if resumed.code == 0 && !unlock(&driver, &host, &record) {
        return Err(waits(inv, record.init, "resumed"));
    }
    hand_on(inv, &resumed)
}

fn wanted(spec: &Spec) -> Result<bool, Error> {
    let asked = spec.switch(ANNOTATION).map_err(Error::untouched)?;
    Ok(asked == Some(true))
}

/// Unlocks the processes of a record and removes it; `false` if the driver failed.
fn unlock(driver: &PauseDriver, host: &Host, record: &SuspendedRecord) -> bool {
    let done = driver.connect().and_then(|mut client| {
        match suspend::resume(&mut client, &record.processes, &[], &driver.how) {
            // Somebody else has unlocked them.
            Ok(_) | Err(SuspendError::Running | SuspendError::NotSuspended) => Ok(()),
            Err(e) => Err(Error::Failed(e.to_string())),
        }
    });
    let gone = live::tree(host, record.init).is_empty();
    match done {
        Err(e) if !gone => {
            tracing::warn!("{}: not unlocked: {e}", record.name);
            false
        }
        _ => {
            record.remove();
            true
        }
    }
}

/// Ends the agent after an error, which brings the processes back; another one does so for an agent that was killed. Call it
/// when the agent's client is dropped. Returns what is not brought back.
pub fn roll_back(
    config: &Config,
    host: &Host,
    op: &Operation,
    agent: Option<RunningAgent>,
    pids: &[i32],
    error: &SuspendError,
) -> Option<String> {
    let report = agent.and_then(|agent| agent.end(op));
    let stopped = |report: &AgentReport| report.outcome == AgentOutcome::RollingBack;
    if error.has_lost_agent() || report.as_ref().is_some_and(stopped) {
        return bring_back(config, host, op, pids)
            .err()
            .map(|left| left.to_string());
    }
    let left: Vec<_> = report.iter().flat_map(AgentReport::not_put_back).collect();
    (!left.is_empty()).then(|| left.join("; "))
}

/// How long the driver may take to end what a killed agent had asked it for.
const SETTLED: Duration = Duration::from_secs(120);

/// Brings back processes that this operation's driver agent has left locked or checkpointed, because it was killed.
pub fn bring_back(config: &Config, host: &Host, op: &Operation, pids: &[i32]) -> Result<(), Error> {
    let left = pids.iter().filter_map(|pid| {
        Some(Suspended {
            pid: *pid,
            start_time: live::start_time(host, *pid)?,
            comm: String::new(),
            gpus: Vec::new(),
            buffers: Vec::new(),
        })
    });
    let left: Vec<_> = left.collect();
    let _ = fs::remove_file(op.file(SOCKET));
    let started = PauseDriver::agent(config, host, op)
        .and_then(|agent| Ok((agent, PauseDriver::client(op)?, PauseDriver::how(config)?)));
    let (_agent, mut client, how) = match started {
        Ok(started) => started,
        Err(e) => {
            // The driver may have locked nothing: then they wait for this alone.
            suspend::recover(pids);
            return Err(e);
        }
    };
    let deadline = Instant::now() + SETTLED;
    let back = loop {
        match suspend::resume(&mut client, &left, &[], &how) {
            Ok(_) | Err(SuspendError::Running | SuspendError::NotSuspended) => break Ok(()),
            Err(e) if may_pass(&e) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(250));
            }
            Err(e) => break Err(Error::Failed(e.to_string())),
        }
    };
    if back.is_ok() {
        // Those that the driver had not locked yet. After an error some may be locked, and would wait for the driver with
        // their library's mutex.
        suspend::recover(pids);
    }
    back
}

/// Returns true for what the driver may still end by itself.
fn may_pass(error: &SuspendError) -> bool {
    match error {
        SuspendError::State { state, .. } => *state != ProcessState::Failed,
        SuspendError::Step { .. } => true,
        _ => false,
    }
}

/// Prints the low-level runtime's output and returns its exit code.
fn hand_on(inv: &Invocation, out: &Output) -> Result<ExitCode, Error> {
    if out.code == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let why = out.stderr.trim();
    let word = if inv.verb == crate::request::argv::Verb::Pause {
        "pause"
    } else {
        "resume"
    };
    Err(Error::Failed(format!("{word} of {}: {why}", inv.id)))
}

struct PauseDriver {
    agent: Option<RunningAgent>,
    op: Operation,
    how: How,
}

impl PauseDriver {
    fn start(config: &Config, host: &Host) -> Result<Self, Error> {
        let op = Operation::new()?;
        let agent = Some(Self::agent(config, host, &op)?);
        let how = Self::how(config)?;
        Ok(Self { agent, op, how })
    }

    fn agent(config: &Config, host: &Host, op: &Operation) -> Result<RunningAgent, Error> {
        let found = Vec::from_iter(plugins::find(config, host).nvidia);
        Ok(RunningAgent::of_operation(config, &found, op)?)
    }

    fn how(config: &Config) -> Result<How, Error> {
        Ok(How {
            vram: config.vram.config().map_err(Error::Failed)?,
            directory: None,
            lock_timeout_ms: config.nvidia.lock_timeout_ms.unwrap_or(10_000),
            step_timeout_ms: config.limits.checkpoint_s.saturating_mul(1000),
            nccl_quiesce_ms: config.nccl.quiesce_ms(),
            refuse_shared: true,
            keep: 0,
            goes_on: false,
            meanwhile: Vec::new(),
        })
    }

    fn connect(&self) -> Result<Client, Error> {
        Self::client(&self.op)
    }

    fn client(op: &Operation) -> Result<Client, Error> {
        let client = Client::connect(&op.file(SOCKET));
        client.map_err(|e| Error::Failed(format!("the driver agent: {e}")))
    }
}

impl Drop for PauseDriver {
    /// Waits until the agent has put things in order; its directory goes after that.
    fn drop(&mut self) {
        drop(self.agent.take());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_wait_cures_a_process_that_failed() {
        let of = |state| SuspendError::State {
            pid: 7,
            comm: String::new(),
            state,
            remedy: "",
        };
        assert!(may_pass(&of(ProcessState::Checkpointing)));
        assert!(!may_pass(&of(ProcessState::Failed)));
        assert!(!may_pass(&SuspendError::Files(String::new())));
    }
}
