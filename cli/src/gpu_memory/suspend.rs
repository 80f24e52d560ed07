//! `cryopod suspend`: moves a container's GPU memory to host memory, or into files; the container stays.

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use cryopod_cuda::exchange::client::Client;
use cryopod_cuda::messages::protocol::Op;
use cryopod_cuda::messages::report::GpuUser;
use cryopod_cuda::preload::Library;
use cryopod_cuda::sharing::Policy;
use cryopod_cuda::suspend::{Done, How, SuspendError, suspend};
use cryopod_cuda::vram::memory;
use cryopod_gpu_plan::live;
use cryopod_gpu_plan::plan;
use cryopod_host::files::Host;
use cryopod_host::processes::Scan;
use cryopod_host::spec::Spec;
use cryopod_operations::config::Config;
use cryopod_operations::criu::plugins;
use cryopod_operations::pause;
use cryopod_operations::pause::suspended::{self, SuspendLock, SuspendedRecord};
use cryopod_operations::run::log;
use cryopod_operations::run::operation::Operation;
use cryopod_operations::vram::agent::{RunningAgent, SOCKET, StartedAgent};

use crate::engines::container::Container;
use crate::terminal::ui;

/// Host memory that must remain free besides the container's GPU memory, in bytes.
const SPARE: u64 = 1 << 30;

#[derive(clap::Args)]
pub struct Args {
    /// The container: its name or id with podman or docker, its id with containerd, crun or runc, or pid:N for its init
    /// process.
    container: String,
    /// Write the GPU memory to files, in a new directory of this name, instead of keeping it in host memory.
    #[arg(long, value_name = "PATH")]
    to: Option<PathBuf>,
    /// Print only errors.
    #[arg(short, long)]
    quiet: bool,
}

/// Runs the subcommand. After an error the container continues to run.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let host = Host::system();
    let config = Config::load()?;
    let work = StartedWork::new(&config, &host);
    let container = Container::find(&host, &args.container)?;
    let container = RunningContainer::of(&host, &config, container, &args.container)?;
    // The agent uses it until it ends.
    let directory = args.to.as_deref().map(SuspendDirectory::make).transpose()?;
    let work = work?.begin(&config)?;
    let client = work.connect()?;
    let (said, work, client) =
        container.suspend(&host, &config, work, client, directory.as_ref(), None)?;
    drop(client);
    work.end();
    if !args.quiet {
        print!("{said}");
    }
    Ok(ExitCode::SUCCESS)
}

/// A running container that may be suspended.
pub struct RunningContainer {
    name: String,
    container: Container,
    pids: Vec<i32>,
    policy: Policy,
    _lock: SuspendLock,
}

impl RunningContainer {
    /// Locks it, and checks that the driver can bring back what it has.
    pub fn of(
        host: &Host,
        config: &Config,
        container: Container,
        name: &str,
    ) -> anyhow::Result<Self> {
        let (record, lock) = locked(host, &container, name)?;
        if let Some(record) = record {
            bail!(
                "{name}: it is suspended already, since {}; its GPU memory is {}; `cryopod resume {name}` brings it back",
                record.since,
                record.place()
            );
        }
        container.is_unpaused(host, name)?;
        let pids = container.processes(host);
        let policy = shares_nothing(host, config, &container, name, &pids)?;
        Ok(Self {
            name: name.into(),
            container,
            pids,
            policy,
            _lock: lock,
        })
    }

    /// Suspends it, and returns what to tell. `meanwhile`: what the agent, which then resumes another container, does during
    /// the driver's checkpoint. On error the agent has brought it back, or the error says what is left.
    pub fn suspend(
        &self,
        host: &Host,
        config: &Config,
        work: SuspendWork,
        mut client: Client,
        to: Option<&SuspendDirectory>,
        meanwhile: Option<Vec<Op>>,
    ) -> anyhow::Result<(String, SuspendWork, Client)> {
        let name = &self.name;
        let mut how = work.how(config, to.map(|directory| directory.path.clone()))?;
        how.refuse_shared = self.policy == Policy::Refuse;
        how.goes_on = meanwhile.is_some();
        how.meanwhile = meanwhile.unwrap_or_default();
        room(&work.agent, &self.pids)?;
        let started = Instant::now();
        let mut note = |done: &Done| {
            let record = SuspendedRecord {
                version: SuspendedRecord::VERSION,
                name: name.clone(),
                init: self.container.init,
                start_time: self.container.start_time,
                since: log::rfc3339(SystemTime::now()),
                directory: how.directory.clone(),
                digest: done.vram.as_ref().map(|vram| vram.digest.clone()),
                processes: done.processes.clone(),
                locked_at_pause: false,
            };
            let written = record.write();
            written.map_err(|e| format!("the record of it cannot be written: {e}"))
        };
        match suspend(&mut client, &self.pids, &how, &mut note) {
            Ok(done) => {
                to.inspect(|directory| directory.keep());
                Ok((self.told(&done, &how, started.elapsed()), work, client))
            }
            Err(error @ SuspendError::Unsettled(_)) => {
                // Its memory may be only in the files.
                to.inspect(|directory| directory.keep());
                bail!(
                    "{name}: {error}; `cryopod resume {name}` brings it back, or says that it runs"
                );
            }
            Err(error) => {
                drop(client);
                let SuspendWork { agent, op } = work;
                let left = pause::roll_back(config, host, &op, Some(agent), &self.pids, &error);
                let record = SuspendedRecord::of(host, self.container.init)
                    .ok()
                    .flatten();
                if let Some(left) = left {
                    // The record names the files.
                    record.and(to).inspect(|directory| directory.keep());
                    bail!(
                        "{name}: not suspended: {error}; it runs, but its CUDA calls may wait: {left}; `cryopod resume {name}` tries again"
                    );
                }
                record.inspect(SuspendedRecord::remove);
                bail!("{name}: not suspended, and it runs on: {error}");
            }
        }
    }

    fn told(&self, done: &Done, how: &How, took: Duration) -> String {
        let buffers = done.processes.iter().flat_map(|p| &p.buffers);
        let bytes: u64 = buffers.map(|b| b.bytes).sum();
        let place = match &how.directory {
            Some(to) => format!("in {}", to.display()),
            None => "in host memory".into(),
        };
        let moved = done
            .copied
            .map(|bytes| format!(", {} moved", ui::bytes(bytes)));
        let mut said = format!(
            "{}: suspended in {:.2} s ({}): {} of GPU memory of {} processes {place}{}\n",
            self.name,
            took.as_secs_f64(),
            steps(done),
            ui::bytes(bytes),
            done.processes.len(),
            moved.unwrap_or_default(),
        );
        if let Some(reason) = &done.left_out {
            said += &format!("without VRAM files: {}\n", ui::plain(reason));
        }
        said
    }
}

/// How long a checkpoint that the container makes periodically may be under way.
const PATIENCE: Duration = Duration::from_secs(10);

/// Returns a container's record if it is suspended. Nobody else suspends or resumes it meanwhile.
pub fn locked(
    host: &Host,
    container: &Container,
    name: &str,
) -> anyhow::Result<(Option<SuspendedRecord>, SuspendLock)> {
    let lock = SuspendLock::take(host, container.init, PATIENCE);
    let lock = lock.with_context(|| name.to_owned())?;
    suspended::sweep(host);
    let record = SuspendedRecord::of(host, container.init);
    let record = record.with_context(|| name.to_owned())?;
    Ok((record, lock))
}

/// Formats the steps and their times.
pub fn steps(done: &Done) -> String {
    let steps = done.steps.iter();
    let words: Vec<_> = steps
        .map(|(name, micros)| format!("{name} {}", ui::micros(*micros)))
        .collect();
    words.join(", ")
}

/// An operation whose agent loads the driver while its containers are looked for.
pub struct StartedWork {
    agent: StartedAgent,
    op: Operation,
}

/// Shared by suspend and resume: an operation's directory and the driver agent.
pub struct SuspendWork {
    pub agent: RunningAgent,
    op: Operation,
}

impl StartedWork {
    pub fn new(config: &Config, host: &Host) -> anyhow::Result<Self> {
        let op = Operation::new()?;
        let found = plugins::find(config, host);
        let found: Vec<PathBuf> = found.nvidia.into_iter().collect();
        // Only a copy by the preload library is kept, and those who keep copies wait for this: it takes up to 0.1 s.
        let has_context = config.suspend.keep > 0;
        let agent = StartedAgent::of_operation(config, &found, &op, has_context)?;
        Ok(Self { agent, op })
    }

    /// Waits for the agent, and asks it for what uses the GPUs. From here on only the time limits end this program: if a
    /// signal ended it, the container would depend on the agent, which brings it back.
    pub fn begin(self, config: &Config) -> anyhow::Result<SuspendWork> {
        use nix::sys::signal::{SigHandler, Signal, signal};
        for name in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            // SAFETY: ignoring a signal runs no code of ours.
            unsafe { signal(name, SigHandler::SigIgn) }?;
        }
        let Self { agent, op } = self;
        let agent = agent.ready(Duration::from_secs(config.limits.agent_s))?;
        Ok(SuspendWork { agent, op })
    }
}

impl SuspendWork {
    /// Connects to the driver agent.
    pub fn connect(&self) -> anyhow::Result<Client> {
        Client::connect(&self.op.file(SOCKET)).context("the driver agent")
    }

    /// Returns the options of a suspend; `directory` gets the VRAM files.
    pub fn how(&self, config: &Config, directory: Option<PathBuf>) -> anyhow::Result<How> {
        let vram = config.vram.config().map_err(anyhow::Error::msg)?;
        Ok(How {
            vram,
            directory,
            lock_timeout_ms: config.nvidia.lock_timeout_ms.unwrap_or(10_000),
            step_timeout_ms: config.limits.checkpoint_s.saturating_mul(1000),
            nccl_quiesce_ms: config.nccl.quiesce_ms(),
            refuse_shared: true,
            goes_on: false,
            meanwhile: Vec::new(),
            keep: u64::from(config.suspend.keep) << 30,
        })
    }

    /// Waits for the agent, which cleans up.
    pub fn end(self) {
        drop(self.agent);
        drop(self.op);
    }

    /// Ends the agent without waiting: it has nothing to put back, and the driver takes 0.1 s to free its GPU memory.
    pub fn leave(self) {
        self.agent.leave();
    }
}

/// Checks that host memory has room for the processes' GPU memory.
fn room(agent: &RunningAgent, pids: &[i32]) -> anyhow::Result<()> {
    let users = agent.ready.users.iter().filter(|u| pids.contains(&u.pid));
    let lacks = |user: &GpuUser| user.bytes.saturating_sub(Library::spare_bytes(user.pid));
    let need: u64 = users.map(lacks).sum();
    let available = memory::available();
    if need > 0 && need.saturating_add(SPARE) > available {
        bail!(
            "{} of host memory are needed for the GPU memory, and {} to spare; {} are available: free some, or raise the memory limit of this cgroup",
            ui::bytes(need),
            ui::bytes(SPARE),
            ui::bytes(available)
        );
    }
    Ok(())
}

/// Refuses, like a checkpoint, what the driver could not bring back.
fn shares_nothing(
    host: &Host,
    config: &Config,
    container: &Container,
    name: &str,
    pids: &[i32],
) -> anyhow::Result<Policy> {
    let bundle = container.bundle();
    let spec = bundle.and_then(|bundle| Spec::of_bundle(&bundle).ok());
    let spec = spec.unwrap_or_else(|| Spec::from_json(serde_json::Value::Null));
    let policy = Policy::of(&spec, config.nvidia.sharing)
        .map_err(|e| anyhow::anyhow!("{name}: {e}. Nothing was touched"))?;
    let scan = Scan::of(host, pids);
    let cuda = plan::cuda_users(&live::users(&scan, &[]));
    let refusals = plan::shared_memory(host, &scan, &cuda, policy);
    if !refusals.is_empty() {
        let reasons: Vec<String> = refusals.iter().map(ToString::to_string).collect();
        bail!(
            "{name}: not suspended, and it runs on: {}",
            reasons.join(" | ")
        );
    }
    Ok(policy)
}

/// The directory for the files; removed unless kept.
pub struct SuspendDirectory {
    path: PathBuf,
    kept: Cell<bool>,
}

impl SuspendDirectory {
    fn make(path: &Path) -> anyhow::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let path = std::path::absolute(path)?;
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&path)
            .with_context(|| {
                format!(
                    "{}: cannot be made: it must be a new name in a directory that can be written",
                    path.display()
                )
            })?;
        Ok(Self {
            path,
            kept: Cell::new(false),
        })
    }

    fn keep(&self) {
        self.kept.set(true);
    }
}

impl Drop for SuspendDirectory {
    fn drop(&mut self) {
        if !self.kept.get() {
            cryopod_archive::vram::remove(&self.path);
            let _ = fs::remove_dir(&self.path);
        }
    }
}
