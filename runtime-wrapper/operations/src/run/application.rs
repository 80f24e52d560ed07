//! Runs the commands by which a container's application takes part in its checkpoint and restore.
//!
//! The container's annotations name them ([`Moment`]): a shell command, or a JSON list of program and arguments. They run
//! inside the container, as `exec` of the low-level runtime does, within a time limit.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::time::Duration;

use cryopod_host::programs::{SystemTools, ToolError, Tools};
use cryopod_host::spec::Spec;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::config::Config;
use crate::error::Error;
use crate::request::Request;
use crate::request::argv::Invocation;
use crate::request::context::Context;
use crate::request::state::ContainerState;
use crate::run::operation::Operation;

const LIMIT: &str = "dev.cryopod.exec.limit";
const DEFAULT_LIMIT: u64 = 60;
const SHELL: [&str; 2] = ["/bin/sh", "-c"];
/// The most of a command's output that an error shows, in bytes.
const MAX_SAID: usize = 500;

/// When a command of the application runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// Before the container is frozen. A failure stops the checkpoint, and the container goes on.
    BeforeCheckpoint,
    /// After a checkpoint that leaves the container running, and after one that failed. A failure is a warning.
    AfterCheckpoint,
    /// As soon as the restored container runs. A failure is a warning.
    AfterRestore,
}

impl Moment {
    fn annotation(self) -> &'static str {
        match self {
            Self::BeforeCheckpoint => "dev.cryopod.exec.before-checkpoint",
            Self::AfterCheckpoint => "dev.cryopod.exec.after-checkpoint",
            Self::AfterRestore => "dev.cryopod.exec.after-restore",
        }
    }

    /// Returns true if the container has a command for this moment.
    pub fn is_asked(self, spec: &Spec) -> bool {
        spec.annotation(self.annotation()).is_some()
    }
}

/// Runs the container's command for this moment, if it has one.
///
/// `shortens`: the operation has less time than the configuration allows, and so has the command.
///
/// # Errors
/// It cannot be run, fails, or takes longer than its limit; then it was killed.
fn run(
    ctx: &Context,
    inv: &Invocation,
    spec: &Spec,
    moment: Moment,
    shortens: bool,
) -> Result<(), Error> {
    let annotation = moment.annotation();
    let Some(text) = spec.annotation(annotation) else {
        return Ok(());
    };
    let failed = |why: String| Error::Failed(format!("{annotation}: {why}"));
    let command = command(text).map_err(failed)?;
    let limit = limit(spec, ctx.config.limits.checkpoint_s, shortens).map_err(failed)?;
    tracing::info!("{}: {annotation}: {command:?}", inv.id);
    let op = Operation::new()?;
    let pid_file = op.file("exec.pid");
    let mut args: Vec<&OsStr> = Vec::new();
    if let Some(root) = &inv.globals.root {
        args.extend([OsStr::new("--root"), root.as_os_str()]);
    }
    args.extend([
        OsStr::new("exec"),
        "--pid-file".as_ref(),
        pid_file.as_os_str(),
    ]);
    args.push(inv.id.as_ref());
    args.extend(command.iter().map(OsStr::new));
    match SystemTools::from_env().output(&ctx.low.path, &args, limit) {
        Ok(out) if out.code == 0 => Ok(()),
        Ok(out) => Err(failed(format!(
            "it failed with exit code {}: {}",
            out.code,
            said(&out.stderr)
        ))),
        Err(ToolError::Timeout { .. }) => {
            // The low-level runtime is gone, and the command is still there.
            kill_command(pid_file);
            Err(failed(format!(
                "it did not end within {} s and was killed; {LIMIT}=SECONDS gives it more time",
                limit.as_secs()
            )))
        }
        Err(e) => Err(failed(e.to_string())),
    }
}

/// Runs the command for a moment that is no stop; a failure is a warning.
pub fn notify(ctx: &Context, inv: &Invocation, spec: &Spec, moment: Moment) {
    warn(inv, run(ctx, inv, spec, moment, false));
}

fn warn(inv: &Invocation, done: Result<(), Error>) {
    if let Err(e) = done {
        tracing::warn!("{}: {e}", inv.id);
    }
}

/// Checks the limit that a new container sets: it counts at its checkpoints, perhaps of a host with other limits.
pub fn check(config: &Config, spec: &Spec) -> Result<(), Error> {
    let limit = limit(spec, config.limits.checkpoint_s, true);
    limit.map(drop).map_err(Error::not_started)
}

/// The application knows of the checkpoint. Dropped, it learns that the container goes on, if it does.
pub struct NotifiedApplication<'a> {
    request: &'a Request<'a>,
    init: i32,
}

impl<'a> NotifiedApplication<'a> {
    /// Tells it. `None`: the container has no commands for its checkpoint.
    ///
    /// # Errors
    /// Its command failed. The container goes on.
    pub fn before_checkpoint(
        request: &'a Request<'a>,
        state: &ContainerState,
    ) -> Result<Option<Self>, Error> {
        if request.pre_dump() || !takes_part(&request.spec) {
            return Ok(None);
        }
        let told = Self {
            request,
            init: state.init,
        };
        let (ctx, inv) = (request.ctx, request.inv);
        run(
            ctx,
            inv,
            &request.spec,
            Moment::BeforeCheckpoint,
            request.ends,
        )
        .map_err(|e| {
            Error::Failed(format!(
                "checkpoint of {} failed and the container goes on running: {e}",
                request.id()
            ))
        })?;
        Ok(Some(told))
    }
}

impl Drop for NotifiedApplication<'_> {
    fn drop(&mut self) {
        let Request {
            ctx,
            inv,
            host,
            spec,
            ends,
            ..
        } = self.request;
        if cryopod_gpu_plan::live::is_alive(host, self.init) {
            warn(inv, run(ctx, inv, spec, Moment::AfterCheckpoint, *ends));
        }
    }
}

/// Returns true if the container has a command for a checkpoint.
pub fn takes_part(spec: &Spec) -> bool {
    Moment::BeforeCheckpoint.is_asked(spec) || Moment::AfterCheckpoint.is_asked(spec)
}

fn command(text: &str) -> Result<Vec<String>, String> {
    let list: Vec<String> = match text.trim_start().starts_with('[') {
        true => serde_json::from_str(text)
            .map_err(|e| format!("{text:?} is no JSON list of program and arguments: {e}"))?,
        false => SHELL.into_iter().chain([text]).map(String::from).collect(),
    };
    match list.first() {
        Some(program) if !program.is_empty() && !program.starts_with('-') => Ok(list),
        _ => Err(format!("{text:?} names no program")),
    }
}

fn limit(spec: &Spec, max: u64, shortens: bool) -> Result<Duration, String> {
    let Some(text) = spec.annotation(LIMIT) else {
        return Ok(Duration::from_secs(DEFAULT_LIMIT.min(max)));
    };
    match text.trim().parse::<u64>() {
        Ok(seconds) if seconds > 0 && (seconds <= max || shortens) => {
            Ok(Duration::from_secs(seconds.min(max)))
        }
        _ => Err(format!(
            "{LIMIT}: {text:?} is not within 1 and {max} seconds (limits.checkpoint_s)"
        )),
    }
}

fn said(text: &str) -> &str {
    let text = text.trim();
    let start = text.len().saturating_sub(MAX_SAID);
    let start = (start..text.len()).find(|at| text.is_char_boundary(*at));
    &text[start.unwrap_or(0)..]
}

fn kill_command(pid_file: PathBuf) {
    let pid = std::fs::read_to_string(pid_file);
    if let Some(pid) = pid
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .filter(|pid| *pid > 1)
    {
        let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn commands() {
        let list = |text| command(text).map_err(|e| e.to_string());
        assert_eq!(list("a b").unwrap(), ["/bin/sh", "-c", "a b"]);
        assert_eq!(list(r#"["/a", "b c"]"#).unwrap(), ["/a", "b c"]);
        for text in [
            "[]",
            r#"[""]"#,
            r#"["--user"]"#,
            "[1]",
            "[x",
            r#"{"a": 1}]"#,
        ] {
            let result = list(text);
            assert!(
                text.starts_with('{') || result.is_err(),
                "{text}: {result:?}"
            );
        }
    }

    #[test]
    fn limits() {
        let of = |text: Option<&str>, max| {
            limit(
                &Spec::from_json(json!({"annotations": text.map(|t| json!({LIMIT: t}))})),
                max,
                false,
            )
        };
        assert_eq!(of(None, 3600), Ok(Duration::from_secs(60)));
        assert_eq!(of(None, 10), Ok(Duration::from_secs(10)));
        assert_eq!(of(Some("90"), 3600), Ok(Duration::from_secs(90)));
        for text in ["0", "3601", "-1", "1s", ""] {
            assert!(of(Some(text), 3600).unwrap_err().contains(LIMIT), "{text}");
        }
        // A stop has 8 s, and is a checkpoint all the same.
        let long = Spec::from_json(json!({"annotations": {LIMIT: "90"}}));
        assert_eq!(limit(&long, 8, true), Ok(Duration::from_secs(8)));
        assert!(check(&Config::default(), &long).is_ok());
    }

    #[test]
    fn an_error_shows_the_end_of_what_a_command_said() {
        assert_eq!(said(" a\n"), "a");
        let long = "é".repeat(MAX_SAID);
        assert!(said(&long).len() <= MAX_SAID && said(&long).len() > MAX_SAID - 4);
    }
}
