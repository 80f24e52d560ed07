//! Sets up what checkpoint and restore share: plugins, the driver agent, CRIU's configuration, the action script.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_cuda::gpus::gpu::GpuPair;
use cryopod_cuda::messages::config::{
    FILE_NAME, MAX_TIMEOUT_MS, Operation as PluginOperation, PluginConfig,
};
use cryopod_cuda::messages::report::{AgentOutcome, AgentReport, PluginReport};
use cryopod_cuda::sharing::Policy;
use cryopod_cuda::vram::VramConfig;
use cryopod_gpu_plan::checks::nvidia_compat;
use cryopod_gpu_plan::plan::CheckpointPlan;
use cryopod_host::nodes::Vendor;
use nix::fcntl::Flock;

use crate::criu::conf::{self, ConfReader, Extra};
use crate::criu::{self, Criu};
use crate::error::Error;
use crate::request::Request;
use crate::request::argv::Verb;
use crate::request::lowlevel::RuntimeKind;
use crate::run::action_script::ActionScript;
use crate::run::operation::Operation;
use crate::vram;
use crate::vram::agent::{self, RunningAgent};

/// The file in the operation's directory that tells the plugin to give up.
pub const ABORT_FILE: &str = "exchange/abort";
const CRIU_CONF: &str = "criu.conf";
const PLUGIN_REPORT: &str = "exchange/plugin-report.json";

/// What CRIU is set up for.
#[derive(Clone, Copy)]
pub struct CriuSetup<'a> {
    pub request: &'a Request<'a>,
    pub criu: &'a Criu,
    /// The first line of the low-level runtime's `--version`.
    pub low_version: Option<&'a str>,
    /// Checkpoint only: processes whose CUDA calls were locked when the container was paused.
    pub locked: &'a [i32],
    /// Checkpoint only: the container goes on as soon as CRIU is done.
    pub goes_on: bool,
}

/// Estimates what a checkpoint has to save, in bytes: the processes' memory, and their GPU memory as the driver reports
/// it, or else all memory of the GPUs.
fn data(plan: &CheckpointPlan, agent: Option<&RunningAgent>) -> u64 {
    let mut gpus = plan.gpu.gpus.clone();
    let ready = agent.map(|a| &a.ready);
    nvidia_compat::enrich(&mut gpus, ready.map_or(&[], |r| &r.gpus));
    let told = ready.map_or(0, |r| {
        let own = r.users.iter().filter(|u| plan.pids.contains(&u.pid));
        own.map(|u| u.bytes).sum()
    });
    let vendors = [Vendor::Nvidia, Vendor::Amd].into_iter();
    let gpu_memory = vendors.map(|vendor| {
        let whole = || {
            let of = gpus.iter().filter(|g| g.vendor == vendor);
            of.filter_map(|g| g.memory_bytes).sum()
        };
        match vendor {
            _ if plan.users_of(vendor).is_empty() => 0,
            Vendor::Nvidia if told > 0 => told,
            _ => whole(),
        }
    });
    plan.memory_bytes.saturating_add(gpu_memory.sum())
}

/// All that CRIU needs for one operation, in place.
#[derive(Debug)]
pub struct CriuEnvironment {
    pub action_script: ActionScript,
    /// Environment of the low-level runtime, and through it of CRIU.
    pub env: Vec<(&'static str, OsString)>,
    /// The driver agent, if a process uses the NVIDIA driver.
    pub agent: Option<RunningAgent>,
    /// The first line of the low-level runtime's `--version`.
    pub low_version: Option<String>,
    pub limit: Duration,
    /// Checkpoint only: an estimate of what it has to save, in bytes.
    pub bytes: u64,
    /// Checkpoint only: the lock of the checkpoint that it builds upon.
    _parent: Option<Flock<File>>,
}

impl CriuSetup<'_> {
    /// Sets up a checkpoint. On error nothing was touched.
    pub fn checkpoint(
        &self,
        op: &Operation,
        plan: &CheckpointPlan,
        extra: &Extra,
    ) -> Result<CriuEnvironment, Error> {
        let pre_dump = self.request.pre_dump();
        let users = plan.users_of(Vendor::Nvidia);
        let (vram, parent) = match pre_dump {
            true => (None, None),
            false => vram::checkpoint(self.request)?,
        };
        let operation = if pre_dump {
            PluginOperation::PreDump
        } else {
            PluginOperation::Checkpoint
        };
        let nvidia = (!users.is_empty()).then(|| PluginConfig {
            pids: users,
            locked: self.locked.to_vec(),
            leave_running: self.request.leave_running(),
            copy_later: self.goes_on,
            action_script_file: Some(op.file(vram::ACTION_SCRIPT_FILE)),
            vram,
            nccl_quiesce_ms: self.request.config().nccl.quiesce_ms(),
            allow_shared: self.request.sharing() == Ok(Policy::Allow),
            ..PluginConfig::new(operation, op.file(agent::SOCKET))
        });
        let agent = match nvidia {
            Some(_) if !pre_dump => Some(self.agent(op, &plan.plugins)?),
            _ => None,
        };
        let limits = &self.request.config().limits;
        let bytes = data(plan, agent.as_ref());
        let limit = limits.checkpoint(bytes);
        let extra = Extra {
            limit_s: limit.as_secs(),
            ..extra.clone()
        };
        let ready = self.ready(op, &plan.plugins, nvidia, agent, &extra)?;
        Ok(CriuEnvironment {
            bytes,
            _parent: parent,
            ..ready
        })
    }

    /// Sets up a restore with these plugins. `nvidia`: the driver agent, and the map that the driver gets, if the
    /// images hold the state of NVIDIA GPUs. On error nothing was touched.
    pub fn restore(
        &self,
        op: &Operation,
        plugins: &[PathBuf],
        nvidia: Option<(RunningAgent, Vec<GpuPair>)>,
        vram: VramConfig,
        extra: &Extra,
    ) -> Result<CriuEnvironment, Error> {
        let (agent, map) = nvidia.map_or((None, Vec::new()), |(a, m)| (Some(a), m));
        let config = agent.is_some().then(|| PluginConfig {
            gpu_map: map,
            vram: Some(vram),
            ..PluginConfig::new(PluginOperation::Restore, op.file(agent::SOCKET))
        });
        self.ready(op, plugins, config, agent, extra)
    }

    /// Starts the driver agent.
    pub fn agent(&self, op: &Operation, plugins: &[PathBuf]) -> Result<RunningAgent, Error> {
        Ok(RunningAgent::of_operation(
            self.request.config(),
            plugins,
            op,
        )?)
    }

    fn ready(
        &self,
        op: &Operation,
        plugins: &[PathBuf],
        nvidia: Option<PluginConfig>,
        agent: Option<RunningAgent>,
        extra: &Extra,
    ) -> Result<CriuEnvironment, Error> {
        let config = self.request.config();
        let restore = self.request.inv.verb == Verb::Restore;
        let reader = self.reader(self.low_version, restore);
        let env_conf = std::env::var_os("CRIU_CONFIG_FILE")
            .filter(|v| !v.is_empty())
            .map(PathBuf::from);
        let spec = &self.request.spec;
        let (text, libdirs) = conf::merge(op, config, reader, spec, env_conf.as_deref(), extra)?;
        for plugin in plugins.iter().chain(&conf::user_plugins(&libdirs)) {
            op.link_plugin(plugin)?;
        }
        write(&op.file(CRIU_CONF), text.as_bytes())?;
        if let Some(plugin) = nvidia {
            self.nvidia(op, plugin, extra.limit_s)?;
        }
        Ok(CriuEnvironment {
            action_script: ActionScript::open(op)?,
            env: vec![
                ("CRIU_LIBS_DIR", op.plugins().into()),
                ("CRIU_CONFIG_FILE", op.file(CRIU_CONF).into()),
            ],
            agent,
            low_version: self.low_version.map(str::to_owned),
            limit: Duration::from_secs(extra.limit_s),
            bytes: 0,
            _parent: None,
        })
    }

    fn nvidia(&self, op: &Operation, mut plugin: PluginConfig, limit_s: u64) -> Result<(), Error> {
        plugin.abort_file = Some(op.file(ABORT_FILE));
        plugin.report = Some(op.file(PLUGIN_REPORT));
        if let Some(limit) = self.request.config().nvidia.lock_timeout_ms {
            plugin.lock_timeout_ms = limit;
        }
        // A longer operation's step may take longer. A step that exceeds its time counts as one that hangs, so a shorter
        // operation is interrupted instead.
        let most_ms = (limit_s.saturating_mul(1000) / 3 * 2).min(MAX_TIMEOUT_MS);
        plugin.step_timeout_ms = plugin.step_timeout_ms.max(most_ms);
        let text = serde_json::to_vec_pretty(&plugin).map_err(|e| {
            Error::Failed(format!("the plugin's configuration cannot be written: {e}"))
        })?;
        write(&op.plugins().join(FILE_NAME), &text)
    }

    /// crun names a configuration file to CRIU from 1.26 on, where libcriu can (4.2).
    fn reader(&self, low_version: Option<&str>, restore: bool) -> ConfReader {
        let at_least = |line: Option<&str>, want: [u32; 2]| {
            line.and_then(criu::numbers)
                .is_some_and(|n| n.as_slice() >= want.as_slice())
        };
        let kind = self.request.low();
        ConfReader {
            restore,
            kind,
            names_file: kind == RuntimeKind::Runc
                || at_least(low_version, [1, 26]) && at_least(self.criu.version.as_deref(), [4, 2]),
        }
    }
}

impl CriuEnvironment {
    /// Ends the agent, which first puts back what was not committed, and reads both reports.
    pub fn finish(self, op: &Operation) -> OperationReports {
        drop(self.action_script);
        let had_agent = self.agent.is_some();
        let agent = self.agent.and_then(|agent| agent.end(op));
        let plugin = read_report(op);
        OperationReports {
            error: plugin.and_then(|r| r.error).map(|e| e.to_string()),
            agent_was_killed: had_agent
                && agent
                    .as_ref()
                    .is_none_or(|r| r.outcome == AgentOutcome::RollingBack),
            not_put_back: agent.iter().flat_map(AgentReport::not_put_back).collect(),
        }
    }
}

/// How long the CUDA processes could not work, in microseconds, if they go on already.
pub fn pause(op: &Operation) -> Option<u64> {
    read_report(op)?.pause_us
}

/// What the plugin and the driver agent report when the operation has ended.
#[derive(Debug, Default)]
pub struct OperationReports {
    pub error: Option<String>,
    /// Nobody has put the processes back.
    pub agent_was_killed: bool,
    /// The processes whose GPU state could not be put back.
    pub not_put_back: Vec<String>,
}

impl OperationReports {
    /// Returns the reported errors.
    pub fn reasons(self) -> impl Iterator<Item = String> {
        self.error.into_iter().chain(self.not_put_back)
    }
}

fn read_report(op: &Operation) -> Option<PluginReport> {
    serde_json::from_slice(&std::fs::read(op.file(PLUGIN_REPORT)).ok()?).ok()
}

fn write(path: &Path, text: &[u8]) -> Result<(), Error> {
    std::fs::write(path, text).map_err(Error::at(path, "cannot be written"))
}
