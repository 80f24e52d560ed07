//! What the agent and the plugin tell the runtime wrapper: the agent's ready line, and the two
//! report files that are read when CRIU has ended.

use super::gpu::GpuUuid;
use super::image::ProcessRecord;
use super::protocol::{AgentGpu, ProcessState};
use super::vram::VramDone;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The version of both report files.
pub const VERSION: u32 = 1;

/// The agent's only line on stdout, when it listens or has given up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentReady {
    /// Whether the driver works and the socket listens.
    pub ready: bool,
    /// The kernel driver's version ("580.159.04"), when it can be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// `cuDriverGetVersion`: 13000 is CUDA 13.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_version: Option<i32>,
    /// The library that was loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub libcuda: Option<PathBuf>,
    /// The GPUs it sees.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<AgentGpu>,
    /// Who uses their memory, as far as the driver tells.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<GpuUser>,
    /// Not ready: why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Not ready: what to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// A process's part of a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuUser {
    /// Its host pid.
    pub pid: i32,
    /// The GPU.
    pub gpu: GpuUuid,
    /// How much, in bytes, with what the driver needs for the process.
    pub bytes: u64,
}

/// What the plugin writes, at its first error and at its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginReport {
    /// [`VERSION`].
    pub version: u32,
    /// How far it came.
    pub outcome: PluginOutcome,
    /// The first thing that went wrong.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
    /// The CUDA processes, with the timings of the steps so far (pids of this host).
    #[serde(default)]
    pub processes: Vec<ProcessRecord>,
    /// Device files recorded or reopened.
    #[serde(default)]
    pub files: usize,
    /// What went through the vram.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vram: Option<VramDone>,
    /// Why the VRAM files was not used where it might have been.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vram_left_out: Option<String>,
}

/// How a plugin's work ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PluginOutcome {
    /// Written at the first error; the plugin's end has not been reached.
    Failing,
    /// CRIU's operation and the plugin's part succeeded.
    Done,
    /// CRIU's operation or the plugin's part failed.
    Failed,
}

/// What went wrong, in words for a user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The process it is about (host pid).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// That process's command name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm: Option<String>,
    /// The step: "lock", "checkpoint", "restore", …
    pub step: String,
    /// Why.
    pub cause: String,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.step)?;
        if let Some(pid) = self.pid {
            write!(f, " of process {pid}")?;
        }
        if let Some(comm) = &self.comm {
            write!(f, " ({comm})")?;
        }
        write!(f, ": {}", self.cause)?;
        if let Some(remedy) = &self.remedy {
            write!(f, "; {remedy}")?;
        }
        Ok(())
    }
}

/// What the agent writes when a plugin's connection has ended: once at the beginning if it has
/// something to do, and when nothing is left to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentReport {
    /// [`VERSION`].
    pub version: u32,
    /// What it had to do.
    pub outcome: AgentOutcome,
    /// The processes it had to put back.
    #[serde(default)]
    pub processes: Vec<RolledBack>,
}

/// What the agent had to do at the end, from good to bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentOutcome {
    /// Nothing: every process was as found, or committed and gone.
    Clean,
    /// Every process was put back into the state it was found in.
    RolledBack,
    /// It is putting processes back. A driver call that hangs can make this take long: there is no
    /// need to wait for it, the agent ends by itself.
    RollingBack,
    /// Some process could not be put back.
    RollbackFailed,
}

/// A process the agent put back, or tried to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolledBack {
    /// Its host pid.
    pub pid: i32,
    /// Its command name.
    pub comm: String,
    /// The state it was found in.
    pub found: ProcessState,
    /// The state it is in now.
    pub left: ProcessState,
    /// Why it could not be put back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
