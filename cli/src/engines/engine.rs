//! Runs an engine's own program, with a time limit.

pub mod which;

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_host::limited::{self, ProgramLimit};
use serde::{Deserialize, Serialize};

/// Time for a program to exit after SIGTERM.
const GRACE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
pub enum Engine {
    /// podman.
    Podman,
    /// docker.
    Docker,
    /// containerd, by `ctr`.
    Containerd,
}

/// The engine's program was ended. A daemon behind it may go on with what it was asked for.
#[derive(Debug)]
pub struct Interrupted(String);

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Interrupted {}

pub struct EngineCall {
    program: &'static str,
    args: Vec<OsString>,
    limit: Duration,
    shown: Option<String>,
    input: Stdio,
}

impl EngineCall {
    /// `program ARGS...`, stopped after `limit`.
    pub fn new(program: &'static str, limit: Duration) -> Self {
        Self {
            program,
            args: Vec::new(),
            limit,
            shown: None,
            input: Stdio::null(),
        }
    }

    /// What messages show instead of the command line.
    #[must_use]
    pub fn shown(mut self, as_text: String) -> Self {
        self.shown = Some(as_text);
        self
    }

    /// Gives it standard input; by default it has none.
    #[must_use]
    pub fn input(mut self, input: impl Into<Stdio>) -> Self {
        self.input = input.into();
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args
            .extend(args.into_iter().map(|a| a.as_ref().to_owned()));
        self
    }

    /// Adds an argument on a condition.
    #[must_use]
    pub fn flag(mut self, when: bool, arg: &str) -> Self {
        if when {
            self.args.push(arg.into());
        }
        self
    }

    /// Runs it and returns its standard output. Fails if the program is missing, fails (with its own message), or takes
    /// too long.
    pub fn run(self) -> anyhow::Result<String> {
        let line = self.line();
        let mut command = Command::new(self.program);
        let command = command
            .args(&self.args)
            .stdin(self.input)
            .stderr(Stdio::piped());
        // SIGTERM first: an engine then cleans up its container.
        let limit = ProgramLimit {
            time: self.limit,
            grace: GRACE,
        };
        let said = match limited::run(command, None, limit) {
            Err(e) if e.kind() == io::ErrorKind::TimedOut => return Err(Interrupted(format!(
                "{line}: was ended after {} s; see with the engine what state the container is in; a longer limit: --timeout",
                self.limit.as_secs()
            ))
            .into()),
            said => said
                .with_context(|| format!("{}: cannot be started; is it installed?", self.program))?,
        };
        let err = String::from_utf8_lossy(&said.stderr);
        match said.status {
            status if status.success() => Ok(String::from_utf8_lossy(&said.stdout).into_owned()),
            status if status.code().is_some() => bail!("{line}: {status}: {}", words(&err)),
            status => Err(Interrupted(format!("{line}: {status}: {}", words(&err))).into()),
        }
    }

    fn line(&self) -> String {
        if let Some(text) = &self.shown {
            return text.clone();
        }
        let args = self.args.iter().map(|a| a.to_string_lossy());
        let words: Vec<_> = std::iter::once(self.program.into()).chain(args).collect();
        words.join(" ")
    }
}

/// Returns the last lines of a program's error output, each once: engines repeat what their runtime said.
fn words(text: &str) -> String {
    let mut lines: Vec<&str> = Vec::new();
    for line in text.lines().map(str::trim).filter(|l| !l.is_empty()) {
        if !lines.iter().any(|before| before.contains(line)) {
            lines.retain(|before| !line.contains(before));
            lines.push(line);
        }
    }
    if lines.is_empty() {
        return "it gives no reason".into();
    }
    lines[lines.len().saturating_sub(6)..].join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, limit: Duration) -> anyhow::Result<String> {
        EngineCall::new("sh", limit).args(["-c", script]).run()
    }

    #[test]
    fn a_line_is_said_once() {
        let said = "no space left\nError: `runc` failed: no space left\nno space left\n\nlast\n";
        assert_eq!(words(said), "Error: `runc` failed: no space left; last");
        assert_eq!(words("\n"), "it gives no reason");
    }

    #[test]
    fn output_failure_and_limit() {
        let long = Duration::from_secs(20);
        assert_eq!(sh("echo out; echo err >&2", long).unwrap(), "out\n");
        let error = sh("echo why >&2; exit 3", long).unwrap_err().to_string();
        assert!(error.contains("exit status: 3: why"), "{error}");
        let error = sh("exec sleep 100", Duration::from_millis(50))
            .unwrap_err()
            .to_string();
        assert!(error.contains("was ended after"), "{error}");
        assert!(
            EngineCall::new("no-such-program", long)
                .run()
                .unwrap_err()
                .to_string()
                .contains("is it installed")
        );
    }
}
