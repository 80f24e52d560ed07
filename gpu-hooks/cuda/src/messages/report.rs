//! Defines what agent and plugin report to the runtime wrapper: the agent's ready line, and the two report files that
//! are read after CRIU's end.

use super::buffers::VramDone;
use crate::gpus::gpu::GpuUuid;
use crate::messages::image::ProcessRecord;
use crate::messages::protocol::{AgentGpu, NcclDone, ProcessState};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

pub const VERSION: u32 = 1;

/// The agent's only line on stdout, when it listens or has given up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentReady {
    /// The driver works and the socket listens.
    pub ready: bool,
    /// [`crate::VERSION`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cryopod: Option<String>,
    /// The kernel driver's version ("580.159.04"), when it can be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// `cuDriverGetVersion`: 13000 is CUDA 13.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cuda_version: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub libcuda: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<AgentGpu>,
    /// Processes that use their memory, as far as the driver reports them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub users: Vec<GpuUser>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuUser {
    pub pid: i32,
    pub gpu: GpuUuid,
    /// Bytes, including the driver's own for the process.
    pub bytes: u64,
}

/// What the plugin writes, at its first error and at its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PluginReport {
    pub version: u32,
    pub outcome: PluginOutcome,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
    /// The CUDA processes, with the timings of the steps so far (pids of this host).
    #[serde(default)]
    pub processes: Vec<ProcessRecord>,
    /// Number of device files recorded or reopened.
    #[serde(default)]
    pub files: usize,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vram: Option<VramDone>,
    /// Why VRAM files were not used, where they might have been.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vram_left_out: Option<String>,
    /// How long the CUDA processes of a container that goes on could not work, in microseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
    /// What was done with NCCL's communicators, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nccl: Option<NcclDone>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PluginOutcome {
    /// Written at the first error, before the plugin's end.
    Failing,
    /// CRIU's operation and the plugin both succeeded.
    Done,
    /// CRIU's operation or the plugin failed.
    Failed,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comm: Option<String>,
    /// The step: "lock", "checkpoint", "restore", …
    pub step: String,
    pub cause: String,
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

/// What the agent writes when a plugin's connection has ended: first if it has work to do, and again when nothing is
/// left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentReport {
    pub version: u32,
    pub outcome: AgentOutcome,
    #[serde(default)]
    pub processes: Vec<RolledBack>,
}

impl AgentReport {
    /// Returns the processes that could not be put back, each with the reason.
    pub fn not_put_back(&self) -> impl Iterator<Item = String> {
        self.processes.iter().filter_map(|p| {
            let error = p.error.as_deref()?;
            Some(format!(
                "process {} ({}) is left {} by the driver: {error}",
                p.pid, p.comm, p.left
            ))
        })
    }
}

/// What the agent had to do at the end, from good to bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AgentOutcome {
    /// Nothing: every process was as found, or committed and gone.
    Clean,
    /// Every process was put back into the state it was found in.
    RolledBack,
    /// It is putting processes back. A driver call that hangs can make this take long: there is no need to wait, the
    /// agent ends by itself.
    RollingBack,
    RollbackFailed,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolledBack {
    pub pid: i32,
    pub comm: String,
    /// The state it was found in.
    pub found: ProcessState,
    /// The state it is in now.
    pub left: ProcessState,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
