//! Implements the OCI runtime wrapper.
//!
//! `cryopod-runtime` stands where an engine expects runc or crun and takes the same command line. It finds the
//! low-level runtime ([`request::lowlevel`]) and decodes just enough of the command line to know the verb ([`request::argv`]). For most
//! verbs it becomes the low-level runtime by exec: same arguments, descriptors, environment and exit code, and no
//! cryopod process afterwards.
//!
//! `create` of a container that names a checkpoint is a restore, too ([`create_from`]); the container then waits for its
//! `start` ([`waiting`]).
//!
//! For `checkpoint` and `restore` of a container with GPU device nodes ([`checkpoint`], [`restore`]) it makes a plan, a
//! private directory for the operation with only the CRIU plugins it needs ([`run::operation`]), and a CRIU configuration
//! that keeps the user's ([`criu::conf`]). It runs the low-level runtime as a child ([`run::child`]) and watches it until it
//! ends. CRIU asks back before a checkpoint becomes final ([`run::action_script`]): the container may end only once the
//! metadata is safely on disk.

mod bundle;
mod checkpoint;
pub mod config;
mod create_from;
pub mod criu;
pub mod error;
pub mod images;
pub mod pause;
pub mod preflight;
pub mod request;
mod restore;
pub mod rootfs;
pub mod run;
mod security;
pub mod vram;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use checkpoint::on_stop::{self, every};
use config::{Config, ConfigError};
use create_from::{newest, waiting};
use criu::program;
use cryopod_host::processes::signals::keep_children;
use error::Error;
use images::place::renewal;
use request::argv::{self, Invocation, Verb};
use request::context::Context;
use request::lowlevel::{LowLevel, RuntimeKind};
use request::{passthrough, state};
use restore::{GuardedBundle, hook, private_root};
use run::{action_script, log, metrics, operation};

/// Runs the whole program. Returns only if it did not become the low-level runtime.
pub fn main(argv: Vec<OsString>) -> ExitCode {
    keep_children();
    let called_as = argv.first().map(Path::new).and_then(Path::file_name);
    if called_as == Some(action_script::HOOK_NAME.as_ref()) {
        return hook::run(Path::new(&argv[0]));
    }
    if called_as == Some(private_root::NAME.as_ref()) {
        return private_root::launch(&argv);
    }
    if called_as == Some(renewal::NAME.as_ref()) {
        return renewal::main(&argv);
    }
    let attendants = [
        (on_stop::NAME, on_stop::main as fn(&Context) -> ExitCode),
        (every::NAME, every::main),
        (GuardedBundle::GUARD, GuardedBundle::guard),
    ];
    let attendant = attendants
        .into_iter()
        .find(|(name, _)| called_as == Some(name.as_ref()));
    let attends = called_as == Some(every::NAME.as_ref());
    let args: Vec<OsString> = argv.into_iter().skip(1).collect();
    let found = loop {
        let found = context(args.clone());
        match &found {
            // After an upgrade it cannot be started again by anybody.
            Err((_, e)) if attends && every::try_again(e, &args) => {}
            _ => break found,
        }
    };
    let (mut ctx, invalid) = match found {
        Ok(found) => found,
        Err((args, e)) => {
            // The log that the engine reads, if the command line names one.
            let globals = argv::decode(RuntimeKind::Runc, &args).map(|i| i.globals);
            log::init(globals.as_ref());
            return fail(&e);
        }
    };
    let decoded = argv::decode(ctx.low.kind, &ctx.args);
    if let Some(e) = &invalid {
        warn_of_defaults(e, decoded.as_ref());
    } else if let Some((_, main)) = attendant {
        return main(&ctx);
    }
    match decoded {
        Some(inv) if waiting::is_waiting_for_start(&ctx, &inv) => run(&ctx, &inv, waiting::run),
        Some(inv) if inv.verb == Verb::Checkpoint => {
            program::prefer_over_host(&ctx.config);
            run(&ctx, &inv, |ctx, inv| {
                counted("checkpoint", || checkpoint::run(ctx, inv))
            })
        }
        Some(inv) if inv.verb == Verb::Restore => {
            program::prefer_over_host(&ctx.config);
            run(&ctx, &inv, |ctx, inv| {
                counted("restore", || restore::run(ctx, inv))
            })
        }
        Some(inv) if inv.verb == Verb::Pause => run(&ctx, &inv, |ctx, inv| {
            // It would resume the container at its end.
            every::give_way(&state::directory(ctx, inv));
            pause::pause(ctx, inv)
        }),
        Some(inv) if inv.verb == Verb::Resume => run(&ctx, &inv, pause::resume),
        Some(inv) if matches!(inv.verb, Verb::Create | Verb::Run) => {
            run(&ctx, &inv, create_from::run)
        }
        Some(inv) if on_stop::is_stop(&ctx, &inv) => match invalid {
            None => run(&ctx, &inv, on_stop::run),
            Some(_) => run(&ctx, &inv, on_stop::pass),
        },
        Some(inv) if on_stop::is_kill_meanwhile(&ctx, &inv) => run(&ctx, &inv, waiting::run),
        other => {
            let is_delete = |i: &Invocation| ctx.args.get(i.verb_at).is_some_and(|v| v == "delete");
            if let Some(inv) = other.as_ref().filter(|inv| is_delete(inv)) {
                // What a killed wrapper left of this container is in no state of the low-level runtime.
                log::init(Some(&inv.globals));
                operation::sweep_dead();
                if let Some(args) = waiting::forced_delete(&ctx, inv) {
                    ctx.args = args;
                }
                match newest::delete(&ctx) {
                    Ok(None) => {}
                    Ok(Some(code)) => return code,
                    Err(e) => return fail(&e),
                }
                if let Some(gone) = deleted_already(&ctx, inv) {
                    return fail(&gone);
                }
            }
            let e = passthrough::exec(&ctx.low, &ctx.args);
            log::init(other.map(|i| i.globals).as_ref());
            fail(&e)
        }
    }
}

/// Answers a `delete` of a container that crun does not know any more, as after a checkpoint that ended it.
///
/// containerd's shim asks for it then, and takes the runtime's refusal for success if it has runc's words
/// (`does not exist`). With crun's (`cannot open directory`) the task stays, and neither can it be started again from the
/// checkpoint nor the container be removed.
fn deleted_already(ctx: &Context, inv: &Invocation) -> Option<Error> {
    let [id] = ctx.args.get(inv.verb_at + 1..)? else {
        return None;
    };
    let id = id.to_str().filter(|id| !id.starts_with('-'))?;
    let mut of = inv.clone();
    id.clone_into(&mut of.id);
    let gone = ctx.low.kind == RuntimeKind::Crun && !state::directory(ctx, &of).exists();
    gone.then(|| Error::Failed(format!("the container {id} does not exist")))
}

/// Finds what every verb needs. With it comes why the configuration is not valid, for a verb that works without it: after
/// an upgrade with a renamed key, containers that run must end as before.
fn context(args: Vec<OsString>) -> Result<(Context, Option<ConfigError>), (Vec<OsString>, Error)> {
    let low_level_of = |e: &ConfigError| match e {
        ConfigError::Invalid { path, .. } => Config::of_invalid(path),
        ConfigError::Read { .. } => None,
    };
    let loaded = Config::load().map(|config| (config, None));
    let loaded = loaded.or_else(|e| match low_level_of(&e) {
        Some(config) => Ok((config, Some(e))),
        None => Err(Error::from(e)),
    });
    let found =
        loaded.and_then(|(config, invalid)| Ok((LowLevel::find(&config)?, config, invalid)));
    let (low, config, invalid) = match found {
        Ok(found) => found,
        Err(e) => return Err((args, e)),
    };
    let needs_all = |i: Invocation| {
        use Verb::{Checkpoint, Create, Pause, Restore, Run};
        matches!(i.verb, Checkpoint | Create | Pause | Restore | Run)
    };
    match invalid {
        Some(e) if argv::decode(low.kind, &args).is_some_and(needs_all) => Err((args, e.into())),
        invalid => Ok((Context { config, low, args }, invalid)),
    }
}

/// Warns that the configuration is not valid, unless an engine may read standard error with the verb's answer.
fn warn_of_defaults(invalid: &ConfigError, inv: Option<&Invocation>) {
    let answers = |i: &Invocation| matches!(i.verb, Verb::State | Verb::Other);
    if let Some(inv) = inv.filter(|i| i.globals.log.is_some() || !answers(i)) {
        log::init(Some(&inv.globals));
        tracing::warn!("{invalid}; only runtime.low_level of it has an effect");
    }
}

fn run(
    ctx: &Context,
    inv: &Invocation,
    verb: fn(&Context, &Invocation) -> Result<ExitCode, Error>,
) -> ExitCode {
    log::init(Some(&inv.globals));
    verb(ctx, inv).unwrap_or_else(|e| fail(&e))
}

/// Runs an operation and counts it for `cryopod metrics`.
fn counted(
    operation: &str,
    work: impl FnOnce() -> Result<ExitCode, Error>,
) -> Result<ExitCode, Error> {
    metrics::measured(operation, work, |code| *code == ExitCode::SUCCESS)
}

fn fail(e: &Error) -> ExitCode {
    log::error(&e.to_string());
    ExitCode::FAILURE
}
