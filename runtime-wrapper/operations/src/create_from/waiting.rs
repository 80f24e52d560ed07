//! Runs `start`, `state`, `kill` and `delete` for a container that was created from a checkpoint and waits for its start, and
//! refuses what would let it run before.
//!
//! For the low-level runtime such a container is paused. For the engine it is `created`, and `start` lets it run. A
//! file in the low-level runtime's own directory of the container tells them apart; it goes with the container.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use cryopod_cuda::preload::nccl::Group;
use cryopod_cuda::suspend;
use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use cryopod_host::programs::{Output, SystemTools, Tools};
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::error::Error;
use crate::request::argv::{Invocation, Verb};
use crate::request::context::Context;
use crate::request::passthrough;
use crate::request::state::{self, ContainerState, verb};
use crate::restore::new_container::hooks::NewHooks;
use crate::run::application::{self, Moment};
use crate::run::{child, log};

const FILE: &str = "cryopod-waits-for-start";

fn file(ctx: &Context, inv: &Invocation) -> PathBuf {
    state::directory(ctx, inv).join(FILE)
}

/// Returns true if the verb is one that the wait changes, and the container waits.
pub fn is_waiting_for_start(ctx: &Context, inv: &Invocation) -> bool {
    match inv.verb {
        Verb::Start | Verb::State => file(ctx, inv).exists(),
        Verb::Kill | Verb::Pause | Verb::Resume | Verb::Checkpoint => waits(ctx, inv),
        _ => false,
    }
}

/// Whether a container waits. The note alone may be left of a `start` that was killed in the middle.
fn waits(ctx: &Context, inv: &Invocation) -> bool {
    let tools = SystemTools::from_env();
    file(ctx, inv).exists()
        && ContainerState::ask(ctx, inv, &tools).is_some_and(|state| state.paused)
}

/// The command line with `--force` if it is a `delete` of a container that waits: one that is `created` can be deleted, one
/// that is paused cannot. containerd does so when its client goes away during the creation.
pub fn forced_delete(ctx: &Context, inv: &Invocation) -> Option<Vec<OsString>> {
    let [id] = ctx.args.get(inv.verb_at + 1..)? else {
        return None;
    };
    let mut of = inv.clone();
    of.id = id.to_str()?.to_owned();
    waits(ctx, &of).then(|| {
        let mut args = ctx.args.clone();
        args.insert(inv.verb_at + 1, "--force".into());
        args
    })
}

/// Notes that the restored container waits.
///
/// # Errors
/// It was not stopped, or that cannot be noted. The container is removed: it would run before its start.
pub fn begin(ctx: &Context, inv: &Invocation) -> Result<(), Error> {
    let tools = SystemTools::from_env();
    let path = file(ctx, inv);
    let paused = ContainerState::ask(ctx, inv, &tools).map(|state| state.paused);
    let failed = match std::fs::write(&path, "") {
        Ok(()) if paused == Some(true) => return Ok(()),
        Ok(()) if paused.is_none() => "the low-level runtime does not answer for it".to_owned(),
        Ok(()) => "its cgroup could not be frozen before it ran".to_owned(),
        Err(e) => format!("{}: cannot be written: {e}", path.display()),
    };
    let container = match state::remove(ctx, inv, &tools) {
        true => "it was removed",
        false => "it could not be removed: end it",
    };
    Err(Error::Failed(format!(
        "creation of {} from a checkpoint failed, {container}, and the checkpoint is untouched: {failed}",
        inv.id
    )))
}

/// Runs the verb.
pub fn run(ctx: &Context, inv: &Invocation) -> Result<ExitCode, Error> {
    let tools = SystemTools::from_env();
    match inv.verb {
        Verb::Start => start(ctx, inv, &tools),
        Verb::State => created(ctx, inv, &tools),
        Verb::Pause | Verb::Resume | Verb::Checkpoint => {
            let verb = ctx.args.get(inv.verb_at).and_then(|verb| verb.to_str());
            Err(Error::Failed(format!(
                "{} of {} refused: it was created from a checkpoint and has not been started; start it first",
                verb.unwrap_or_default(),
                inv.id
            )))
        }
        _ => kill(ctx, inv, &tools),
    }
}

fn start(ctx: &Context, inv: &Invocation, tools: &SystemTools) -> Result<ExitCode, Error> {
    let failed = match verb(ctx, inv, "resume", tools) {
        Ok(resumed) if resumed.code == 0 => None,
        Ok(resumed) => Some(resumed.stderr.trim().to_owned()),
        Err(e) => Some(e.to_string()),
    };
    let state = ContainerState::ask(ctx, inv, tools);
    // It may run all the same: thawed late, or by a `start` that was killed then.
    if let Some(why) = failed
        && state.as_ref().is_none_or(|state| state.paused)
    {
        return Err(Error::Failed(format!(
            "start of {}, created from a checkpoint, failed: {why}",
            inv.id
        )));
    }
    // Before the note goes: a `start` that is killed meanwhile can be repeated.
    if let Some(state) = &state {
        bring_communicators_up(inv, state.init);
    }
    let path = file(ctx, inv);
    if let Err(e) = std::fs::remove_file(&path)
        && e.kind() != std::io::ErrorKind::NotFound
    {
        let what = "the container runs, and its note cannot be removed";
        return Err(Error::io(format!("{}: {what}", path.display()))(e));
    }
    if let Some(state) = state {
        let spec = state.spec(ctx, inv);
        match NewHooks::of(ctx, &inv.id, state.bundle.clone(), &spec) {
            Ok(hooks) => hooks.poststart(state.init).map_err(|e| {
                Error::Failed(format!(
                    "start of {}, created from a checkpoint, failed: {e}",
                    inv.id
                ))
            })?,
            Err(e) => tracing::warn!("the poststart hooks are not run: {e}"),
        }
        application::notify(ctx, inv, &spec, Moment::AfterRestore);
    }
    Ok(ExitCode::SUCCESS)
}

/// Makes NCCL's communicators again, which its checkpoint took down: its processes could not do it before.
fn bring_communicators_up(inv: &Invocation, init: i32) {
    let pids = live::tree(&Host::system(), init);
    match Group::bring_up(&pids) {
        Ok(done) if done.communicators > 0 => tracing::info!("{}: {done}", inv.id),
        Ok(_) => {}
        Err(e) => {
            suspend::recover(&pids);
            log::error(&format!(
                "{} is restored and runs, but NCCL's communicators, if it has any, were not made again: {e}; `cryopod resume pid:{init}` tries it again",
                inv.id
            ));
        }
    }
}

/// Prints the state, with `created` for `paused`.
fn created(ctx: &Context, inv: &Invocation, tools: &SystemTools) -> Result<ExitCode, Error> {
    let out = verb(ctx, inv, "state", tools)?;
    let state: Option<Value> = serde_json::from_str(&out.stdout).ok();
    if state.is_some_and(|state| state["status"] == "running") {
        let _ = std::fs::remove_file(file(ctx, inv));
    }
    print!("{}", as_created(&out));
    eprint!("{}", out.stderr);
    Ok(child::exit_code(out.code))
}

fn as_created(out: &Output) -> String {
    let Ok(mut state) = serde_json::from_str::<Value>(&out.stdout) else {
        return out.stdout.clone();
    };
    if let Some(status) = state.get_mut("status")
        && status == "paused"
    {
        *status = "created".into();
    }
    format!("{state:#}\n")
}

/// Signals reach a frozen container when it is thawed. One that is to be killed must not wait for that.
fn kill(ctx: &Context, inv: &Invocation, tools: &SystemTools) -> Result<ExitCode, Error> {
    if inv.signal(&ctx.args) != Some(Signal::SIGKILL) {
        return Err(passthrough::exec(&ctx.low, &ctx.args));
    }
    let args: Vec<_> = ctx.args.iter().map(|a| a.as_os_str()).collect();
    let limit = ctx.config.limits.tool();
    let out = tools.output(&ctx.low.path, &args, limit)?;
    // With the signal pending, no instruction runs between this and the end. Under version 2 it has ended already.
    if out.code == 0 {
        let _ = verb(ctx, inv, "resume", tools);
    }
    print!("{}", out.stdout);
    eprint!("{}", out.stderr);
    Ok(child::exit_code(out.code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paused_reads_created() {
        let said = |stdout: &str| {
            as_created(&Output {
                code: 0,
                stdout: stdout.into(),
                stderr: String::new(),
            })
        };
        let state = said(r#"{"id": "paused", "status": "paused", "pid": 7}"#);
        let state: Value = serde_json::from_str(&state).unwrap();
        assert_eq!(
            (&state["status"], &state["id"]),
            (&"created".into(), &"paused".into())
        );
        assert!(said(r#"{"status": "stopped"}"#).contains("stopped"));
        assert_eq!(said("no JSON"), "no JSON");
    }
}
