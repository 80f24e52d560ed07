//! Starts and ends the driver agent of one operation. It starts before the freeze, so that loading the driver's library
//! costs no frozen time.

use crate::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use cryopod_cuda::VERSION;
use cryopod_cuda::messages::report::{AgentReady, AgentReport};
use cryopod_host::limited::wait_until;

use crate::config::{Config, Nvidia};
use crate::criu::plugins::NVIDIA_PLUGIN;
use crate::run::operation::Operation;

/// The driver agent's socket, in the operation's directory.
pub const SOCKET: &str = "driver.sock";
/// The driver agent's report, in the operation's directory.
pub const REPORT: &str = "agent-report.json";
/// How long the agent may take to put processes back in order when the operation is over.
const GOODBYE: Duration = Duration::from_secs(300);

/// Why the driver agent cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    #[error(
        "cryopod-cuda-agent was not found beside the plugin; install it, or name it as `nvidia.agent` in {}",
        crate::config::PATH
    )]
    Missing,
    #[error("{path}: cannot be started: {source}")]
    Start {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the NVIDIA driver cannot be used for a checkpoint: {error}; {remedy}")]
    Driver { error: String, remedy: String },
    #[error("cryopod-cuda-agent is of {0}, this is version {VERSION}: install all of one version")]
    Version(String),
    #[error(
        "the NVIDIA driver's library gave no answer within {0:?}; look at the kernel log for driver errors, or raise limits.agent_s"
    )]
    Silent(Duration),
}

/// An agent that loads the driver. It asks for what uses the GPUs once [`StartedAgent::ready`] is called. Dropped, it is
/// killed, and nobody waits for its end: it has locked nothing.
#[derive(Debug)]
pub struct StartedAgent {
    child: Option<Child>,
    answer: mpsc::Receiver<String>,
}

impl Drop for StartedAgent {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
        }
    }
}

/// A running agent. Dropped, it puts back what was not committed, and ends.
#[derive(Debug)]
pub struct RunningAgent {
    child: Child,
    pub ready: AgentReady,
    /// [`Drop`] does not wait for its end.
    is_left: bool,
}

/// Finds the agent's program: the configured one, else beside the plugin, else on PATH.
pub fn find(config: &Nvidia, plugin: Option<&std::path::Path>) -> Option<PathBuf> {
    if let Some(path) = &config.agent {
        return path.is_file().then(|| path.clone());
    }
    plugin
        .and_then(|p| Some(p.parent()?.join("cryopod-cuda-agent")))
        .filter(|p| p.is_file())
}

impl StartedAgent {
    /// Starts the configured agent, or the one beside one of these plugins. `has_context`: with a context on the first GPU,
    /// which a copy needs.
    pub fn of_operation(
        config: &Config,
        plugins: &[PathBuf],
        op: &Operation,
        has_context: bool,
    ) -> Result<Self, AgentError> {
        let beside = plugins
            .iter()
            .find(|p| p.ends_with(NVIDIA_PLUGIN))
            .map(PathBuf::as_path);
        let program = find(&config.nvidia, beside).ok_or(AgentError::Missing)?;
        let mut command = Command::new(&program);
        if has_context {
            command.arg("--context");
        }
        command.arg("--socket").arg(op.file(SOCKET));
        command.arg("--report").arg(op.file(REPORT));
        for library in &config.nvidia.libcuda {
            command.arg("--libcuda").arg(library);
        }
        for identity in &config.encrypt.identities {
            command.arg("--identity").arg(identity);
        }
        if let Some(lock) = op.lock_of_agent.as_ref().map(AsRawFd::as_raw_fd) {
            // SAFETY: between fork and exec only fcntl is called, which is async-signal-safe.
            unsafe {
                command.pre_exec(move || match libc::fcntl(lock, libc::F_SETFD, 0) {
                    -1 => Err(std::io::Error::last_os_error()),
                    _ => Ok(()),
                });
            }
        }
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|source| AgentError::Start {
                path: program,
                source,
            })?;
        let (tx, rx) = mpsc::channel();
        if let Some(out) = child.stdout.take() {
            std::thread::spawn(move || {
                let mut line = String::new();
                let _ = BufReader::new(out.take(1 << 20)).read_line(&mut line);
                let _ = tx.send(line);
            });
        }
        Ok(Self {
            child: Some(child),
            answer: rx,
        })
    }

    /// Waits until it is ready. On failure nothing is left running.
    pub fn ready(mut self, limit: Duration) -> Result<RunningAgent, AgentError> {
        let mut child = self.child.take().ok_or(AgentError::Silent(limit))?;
        // If it has died, so says its answer.
        let _ = child.stdin.as_ref().map(|mut stdin| stdin.write_all(b"\n"));
        let answer = self.answer.recv_timeout(limit).ok();
        let failed = match answer.as_deref().map(serde_json::from_str::<AgentReady>) {
            Some(Ok(ready)) if ready.ready => match of_another_version(&ready) {
                None => {
                    return Ok(RunningAgent {
                        child,
                        ready,
                        is_left: false,
                    });
                }
                Some(other) => other,
            },
            Some(Ok(ready)) => AgentError::Driver {
                error: ready.error.unwrap_or_else(|| "no reason given".into()),
                remedy: ready.remedy.unwrap_or_else(|| "see `cryopod check`".into()),
            },
            Some(Err(_)) => AgentError::Driver {
                error: "the agent ended without an answer".into(),
                remedy: "run `cryopod check`, and look at the kernel log for driver errors".into(),
            },
            None => AgentError::Silent(limit),
        };
        let _ = child.kill();
        let _ = child.wait();
        Err(failed)
    }
}

fn of_another_version(ready: &AgentReady) -> Option<AgentError> {
    match ready.cryopod.as_deref() {
        Some(VERSION) => None,
        Some(other) => Some(AgentError::Version(format!("version {other}"))),
        None => Some(AgentError::Version("an older version".into())),
    }
}

impl RunningAgent {
    /// Starts an agent as [`StartedAgent::of_operation`] does, and waits until it is ready. On failure nothing is left
    /// running.
    pub fn of_operation(
        config: &Config,
        plugins: &[PathBuf],
        op: &Operation,
    ) -> Result<Self, AgentError> {
        let limit = Duration::from_secs(config.limits.agent_s);
        StartedAgent::of_operation(config, plugins, op, false)?.ready(limit)
    }

    /// Returns the agent's process.
    pub fn pid(&self) -> Option<i32> {
        i32::try_from(self.child.id()).ok()
    }

    /// Ends the agent, and does not wait for it.
    pub fn leave(mut self) {
        self.is_left = true;
    }

    /// Ends the agent, which first puts back what was not committed, and returns its report. `None`: it had nothing to put
    /// back, or was killed.
    pub fn end(self, op: &Operation) -> Option<AgentReport> {
        drop(self);
        serde_json::from_slice(&std::fs::read(op.file(REPORT)).ok()?).ok()
    }
}

impl Drop for RunningAgent {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        if self.is_left {
            return;
        }
        let has_ended = || !matches!(self.child.try_wait(), Ok(None));
        if wait_until(GOODBYE, Duration::from_millis(5), has_ended) {
            return;
        }
        // Not killed: when a driver call that hangs returns, the agent undoes it and ends by itself.
        tracing::error!(
            "the driver agent (process {}) still waits for the driver after {GOODBYE:?}; a process of the container may stay locked until the driver answers",
            self.child.id()
        );
    }
}

impl From<AgentError> for Error {
    fn from(error: AgentError) -> Self {
        Self::Failed(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_of_another_version_is_refused() {
        let of = |text: &str| of_another_version(&serde_json::from_str(text).unwrap());
        let same = format!(r#"{{"ready": true, "cryopod": "{VERSION}"}}"#);
        assert!(of(&same).is_none());
        for other in [r#"{"ready": true}"#, r#"{"ready": true, "cryopod": "9"}"#] {
            let e = of(other).unwrap().to_string();
            assert!(e.contains("install all of one version"), "{e}");
        }
    }
}
