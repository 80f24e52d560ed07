//! Runs the OCI hooks of a container that is created from a checkpoint.
//!
//! | hook | when |
//! |---|---|
//! | prestart, createRuntime | at [`NAMESPACES_MADE`] |
//! | createContainer | at [`MOUNTS_MADE`]: see [`NewHooks::create_container`] |
//! | startContainer | never: its program is one of the container's own, and runs before the container's process does. Refused |
//! | poststart | as soon as the container runs |
//! | poststop | at `delete`, by the low-level runtime |
//!
//! At a restore crun runs none of these but the last. runc would run prestart and createRuntime hooks, and tell them that
//! the container has stopped: [`HooksRemoval`] keeps them from it.

use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use cryopod_archive::format::text::printable;
use cryopod_host::files::Host;
use cryopod_host::limited;
use cryopod_host::spec::Spec;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::unistd::Pid;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::bundle::{DroppedHooks, Edit};
use crate::error::Error;
use crate::request::context::Context;

/// CRIU's stage at which the container has its namespaces, and no mounts yet.
const NAMESPACES_MADE: &str = "setup-namespaces";
/// CRIU's stage at which it has its mounts, and one process.
const MOUNTS_MADE: &str = "post-setup-namespaces";
/// CRIU's stage at which a container that need not wait for its start runs.
const RUNNING: &str = "post-resume";

/// Characters of a hook's standard error that its failure is told with.
const MAX_SAID: usize = 500;
/// The namespaces of a createContainer hook besides its mount namespace, as `/proc/PID/ns` names them.
const NAMESPACES: [(&str, CloneFlags); 3] = [
    ("net", CloneFlags::CLONE_NEWNET),
    ("ipc", CloneFlags::CLONE_NEWIPC),
    ("uts", CloneFlags::CLONE_NEWUTS),
];

/// A hook of the spec: <https://github.com/opencontainers/runtime-spec/blob/main/config.md#posix-platform-hooks>.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Hook {
    path: PathBuf,
    #[serde(default)]
    args: Vec<String>,
    /// Without it a hook has the runtime's.
    env: Option<Vec<String>>,
    /// In seconds.
    timeout: Option<u64>,
}

/// Takes the hooks that runc would run out of the spec.
pub struct HooksRemoval;

impl Edit for HooksRemoval {
    fn name(&self) -> &'static str {
        "hooks of a container that is created from a checkpoint are run by cryopod-runtime"
    }

    fn apply(&self, _: &Host, spec: &mut Value) -> Result<(), Error> {
        if let Some(hooks) = spec.get_mut("hooks").and_then(Value::as_object_mut) {
            hooks.remove("prestart");
            hooks.remove("createRuntime");
        }
        Ok(())
    }
}

/// The OCI hooks of a new container, by the stage at which they run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewHooks {
    create_runtime: Vec<Hook>,
    create_container: Vec<Hook>,
    poststart: Vec<Hook>,
    /// What the hooks read, but for the status and the process.
    state: Value,
    bundle: PathBuf,
    /// How long one without a `timeout` may take.
    limit: Duration,
}

impl NewHooks {
    /// Reads the hooks of a container; without those of `hooks.drop`.
    pub fn of(ctx: &Context, id: &str, bundle: PathBuf, spec: &Spec) -> Result<Self, Error> {
        let drop = DroppedHooks {
            drop: &ctx.config.hooks.drop,
        };
        let list = |stage: &str| -> Result<Vec<Hook>, Error> {
            let hooks = spec.json().pointer(&format!("/hooks/{stage}"));
            let hooks = hooks.filter(|hooks| !hooks.is_null());
            let hooks = hooks.map(Vec::<Hook>::deserialize).transpose();
            let mut hooks = hooks
                .map_err(|e| Error::Failed(format!("hooks.{stage} of the container: {e}")))?
                .unwrap_or_default();
            hooks.retain(|hook| !drop.drops(&hook.path.to_string_lossy()));
            match hooks.iter().find(|hook| !hook.path.is_absolute()) {
                Some(hook) => Err(Error::Failed(format!(
                    "hooks.{stage} of the container: {} is not absolute",
                    hook.path.display()
                ))),
                None => Ok(hooks),
            }
        };
        if let Some(hook) = list("startContainer")?.first() {
            return Err(Error::Failed(format!(
                "the container has the startContainer hook {}, which would have to run before its process does; remove it, or add it to hooks.drop in {}",
                hook.path.display(),
                crate::config::PATH
            )));
        }
        let mut create_runtime = list("prestart")?;
        create_runtime.append(&mut list("createRuntime")?);
        let bundle = std::path::absolute(bundle).map_err(Error::io("the bundle's path"))?;
        let of_spec = |key: &str| spec.json().get(key).cloned().unwrap_or_default();
        Ok(Self {
            create_runtime,
            create_container: list("createContainer")?,
            poststart: list("poststart")?,
            state: json!({
                "ociVersion": of_spec("ociVersion"), "id": id, "bundle": bundle, "annotations": of_spec("annotations"),
            }),
            bundle,
            limit: ctx.config.limits.restore(0),
        })
    }

    /// Runs those of one of CRIU's stages, for the container with this init process. `waits`: it waits for its start.
    pub fn at(&self, stage: &str, init: i32, waits: bool) -> Result<(), Error> {
        match stage {
            NAMESPACES_MADE => self.create_runtime(init),
            MOUNTS_MADE => self.create_container(init),
            RUNNING if !waits => {
                if let Err(e) = self.poststart(init) {
                    tracing::error!("{e}");
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn create_runtime(&self, init: i32) -> Result<(), Error> {
        for hook in &self.create_runtime {
            let ran = self.run(hook, "creating", init, &mut hook.command());
            ran.map_err(failed("createRuntime", hook))?;
        }
        Ok(())
    }

    /// A createContainer hook has the container's network, IPC and UTS namespaces, and a copy of the runtime's mount
    /// namespace. There it finds the container's root file system without the container's mounts. CRIU made those in
    /// the container's mount namespace, where the hook's program is not.
    fn create_container(&self, init: i32) -> Result<(), Error> {
        for hook in &self.create_container {
            let command = within_container(hook, init);
            let ran =
                command.and_then(|mut command| self.run(hook, "creating", init, &mut command));
            ran.map_err(failed("createContainer", hook))?;
        }
        Ok(())
    }

    /// Runs those that follow the start.
    ///
    /// # Errors
    /// One has failed, and the container is killed, as runc and crun 1.28 do.
    pub fn poststart(&self, init: i32) -> Result<(), Error> {
        for hook in &self.poststart {
            let ran = self.run(hook, "running", init, &mut hook.command());
            ran.map_err(failed("poststart", hook)).inspect_err(|_| {
                let _ = kill(Pid::from_raw(init), Signal::SIGKILL);
            })?;
        }
        Ok(())
    }

    fn run(&self, hook: &Hook, status: &str, init: i32, command: &mut Command) -> io::Result<()> {
        let mut state = self.state.clone();
        if let Some(state) = state.as_object_mut() {
            state.insert("status".into(), json!(status));
            state.insert("pid".into(), json!(init));
        }
        command.current_dir(&self.bundle).stderr(Stdio::piped());
        let limit = hook.timeout.map_or(self.limit, Duration::from_secs);
        let said = limited::run(command, Some(state.to_string().as_bytes()), limit)?;
        match said.status.success() {
            true => Ok(()),
            false => {
                let why = String::from_utf8_lossy(&said.stderr);
                let why: String = printable(why.trim()).chars().take(MAX_SAID).collect();
                Err(io::Error::other(format!("{}: {why}", said.status)))
            }
        }
    }
}

impl Hook {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.path);
        if let Some((name, args)) = self.args.split_first() {
            command.arg0(name).args(args);
        }
        if let Some(env) = &self.env {
            let env = env.iter().filter_map(|v| v.split_once('='));
            command.env_clear().envs(env);
        }
        // The wrapper blocks the signals that it watches.
        let with_signals = || Ok(SigSet::empty().thread_set_mask()?);
        // SAFETY: between fork and exec there is one system call.
        unsafe { command.pre_exec(with_signals) };
        command
    }
}

fn failed(stage: &str, hook: &Hook) -> impl FnOnce(io::Error) -> Error + use<> {
    Error::io(format!("the {stage} hook {} failed", hook.path.display()))
}

fn within_container(hook: &Hook, init: i32) -> io::Result<Command> {
    let mut namespaces = Vec::new();
    for (name, flag) in NAMESPACES {
        namespaces.push((File::open(format!("/proc/{init}/ns/{name}"))?, flag));
    }
    let mut command = hook.command();
    let enter = move || {
        for (file, flag) in &namespaces {
            setns(file, *flag)?;
        }
        unshare(CloneFlags::CLONE_NEWNS)?;
        let (none, flags) = (None::<&str>, MsFlags::MS_SLAVE | MsFlags::MS_REC);
        Ok(mount(none, "/", none, flags, none)?)
    };
    // SAFETY: between fork and exec there are system calls only, and nothing allocates.
    unsafe { command.pre_exec(enter) };
    Ok(command)
}
