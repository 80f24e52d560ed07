//! `cryopod setup ENGINE`: makes cryopod known to an engine. Shows the change to the engine's configuration, makes it with a
//! backup, and checkpoints a small container to test it. `--undo` takes the change back.

mod change;
mod containerd;
mod docker;
mod low_level;
mod podman;
mod record;
mod toml_file;
mod trial;

use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_host::files::Host;
use cryopod_host::programs::{SystemTools, Tools};
use cryopod_operations::config::store::DEFAULT;
use cryopod_operations::images::store;

use change::Change;
use record::SetupRecord;

/// The example's RuntimeClass, without the example's pod.
const RUNTIME_CLASS: &str = include_str!("../../examples/kubernetes/runtimeclass.yaml");
const RESTART: Duration = Duration::from_secs(180);

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Target {
    /// podman, in containers.conf.
    Podman,
    /// docker, in daemon.json, and by a link in place of containerd's shim.
    Docker,
    /// containerd's CRI, in its config.toml. `ctr` and nerdctl need no configuration.
    Containerd,
    /// containerd as for `containerd`; also prints the RuntimeClass.
    Kubernetes,
}

#[derive(clap::Args)]
pub struct Args {
    /// The engine to set up.
    #[arg(value_enum)]
    engine: Target,
    /// Take the change back.
    #[arg(long)]
    undo: bool,
    /// Show the change, and make none.
    #[arg(long)]
    dry_run: bool,
    /// Make the change without a question.
    #[arg(short, long)]
    yes: bool,
    /// Also make cryopod the engine's default runtime, for all new containers.
    #[arg(long, visible_alias = "set-as-default", conflicts_with = "undo")]
    default: bool,
    /// The engine's configuration file, if it is not in the usual place.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Restart the services that have to read the change: containerd, and docker, whose containers stop unless
    /// its live-restore is on.
    #[arg(long)]
    restart: bool,
    /// Do not test it with a container.
    #[arg(long)]
    no_test: bool,
}

impl Target {
    /// The name of the record. Kubernetes is containerd's configuration.
    fn key(self) -> &'static str {
        match self {
            Self::Podman => "podman",
            Self::Docker => "docker",
            Self::Containerd | Self::Kubernetes => "containerd",
        }
    }

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kubernetes => "kubernetes",
            other => other.key(),
        }
    }

    /// The program without which the engine is not on this host.
    fn program(self) -> &'static str {
        match self {
            Self::Docker => "dockerd",
            other => other.key(),
        }
    }
}

/// What a change is computed from.
struct WantedSetup<'a> {
    host: &'a Host,
    tools: &'a dyn Tools,
    /// The engine's configuration file, if the user names one.
    config: Option<&'a Path>,
    /// cryopod becomes the default runtime.
    default: bool,
    /// The absolute paths of cryopod's programs.
    runtime: PathBuf,
    shim: PathBuf,
}

impl WantedSetup<'_> {
    fn changes(&self, target: Target) -> anyhow::Result<Vec<Change>> {
        let mut all = match target {
            Target::Podman => podman::changes(self),
            Target::Docker => docker::changes(self),
            Target::Containerd | Target::Kubernetes => containerd::changes(self),
        }?;
        all.extend(low_level::change(self)?);
        Ok(all)
    }
}

/// The content of a file, without what this program would add to it. `before` is what it was before the setup.
fn without(
    target: Target,
    path: &Path,
    text: &str,
    before: Option<&str>,
) -> anyhow::Result<Option<String>> {
    match target {
        _ if path == Path::new(low_level::FILE) => low_level::without(text, before),
        Target::Podman => podman::without(text, before),
        Target::Docker => docker::without(text, before),
        Target::Containerd | Target::Kubernetes => containerd::without(text, before),
    }
}

/// Returns true if the engine on this host is set up, or nothing can be said. For `cryopod check`.
pub fn is_done(target: Target, host: &Host, tools: &dyn Tools) -> bool {
    let Ok(wanted) = wanted(host, tools, None, false) else {
        return true;
    };
    wanted.changes(target).is_ok_and(|c| c.is_empty())
}

fn wanted<'a>(
    host: &'a Host,
    tools: &'a dyn Tools,
    config: Option<&'a Path>,
    default: bool,
) -> anyhow::Result<WantedSetup<'a>> {
    Ok(WantedSetup {
        host,
        tools,
        config,
        default,
        runtime: own(tools, "cryopod-runtime")?,
        shim: own(tools, "containerd-shim-cryopod-v2")?,
    })
}

/// Finds a program of cryopod: beside this one, else on PATH.
fn own(tools: &dyn Tools, name: &str) -> anyhow::Result<PathBuf> {
    let exe = std::env::current_exe().ok();
    let beside = exe.map(|exe| exe.with_file_name(name));
    beside
        .and_then(|path| tools.find(path.to_str()?))
        .or_else(|| tools.find(name))
        .with_context(|| {
            format!("{name} is neither beside cryopod nor on PATH: install all of cryopod")
        })
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (host, tools) = (Host::system(), SystemTools::from_env());
    if !args.dry_run && !nix::unistd::geteuid().is_root() {
        bail!(
            "it changes the engine's configuration: run it as root, or only look at the change with --dry-run"
        );
    }
    let target = args.engine;
    match args.undo {
        true => undo(args, &host, &tools),
        false => {
            if tools.find(target.program()).is_none() && args.config.is_none() {
                bail!(
                    "{} is not installed here ({} is not on PATH)",
                    target.key(),
                    target.program()
                );
            }
            set_up(args, &host, &tools)
        }
    }
}

fn set_up(args: &Args, host: &Host, tools: &dyn Tools) -> anyhow::Result<ExitCode> {
    let target = args.engine;
    let wanted = wanted(host, tools, args.config.as_deref(), args.default)?;
    let changes = wanted.changes(target)?;
    if changes.is_empty() {
        println!("{} is set up for cryopod.", target.key());
    } else {
        show(&changes)?;
        if args.dry_run {
            return Ok(ExitCode::SUCCESS);
        }
        if !agreed(args)? {
            return Ok(ExitCode::FAILURE);
        }
        let backup = SetupRecord::make(host, target.key(), &changes)?;
        println!("{} is set up. Backup: {}", target.key(), backup.display());
    }
    if target != Target::Podman && !args.dry_run {
        let store = host.path(DEFAULT);
        store::make(&store).with_context(|| format!("{}: cannot be made", store.display()))?;
    }
    if target == Target::Kubernetes {
        let class = RUNTIME_CLASS.split("---").next().unwrap_or_default();
        println!("\nFor the cluster (kubectl apply -f -):\n{class}");
    }
    if args.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    if args.restart || !changes.is_empty() {
        started_again(args, tools)?;
    }
    if args.no_test {
        return Ok(ExitCode::SUCCESS);
    }
    match trial::run(target, host, tools) {
        Ok(trial::TrialOutcome::Works(what))
            if target == Target::Kubernetes && !containerd::is_read(&wanted)? =>
        {
            println!(
                "Tested with ctr alone: {what}. Pods can name the runtime class once containerd has read its configuration: systemctl restart containerd"
            );
        }
        Ok(trial::TrialOutcome::Works(what)) => println!("Tested: {what}."),
        Ok(trial::TrialOutcome::NotNow(why)) => {
            println!(
                "Not tested: {why}. Then run `cryopod setup {}` again.",
                target.name()
            );
        }
        Err(error) => bail!(
            "the test failed, and the setup stays (`cryopod setup {} --undo` takes it back; `cryopod check` says what this host lacks): {error:#}",
            target.name()
        ),
    }
    Ok(ExitCode::SUCCESS)
}

fn undo(args: &Args, host: &Host, tools: &dyn Tools) -> anyhow::Result<ExitCode> {
    let target = args.engine;
    let record = SetupRecord::read(host, target.key())?;
    let changes = record.undone(host, |path, text, before| {
        without(target, path, text, before)
    })?;
    if changes.is_empty() {
        println!("{}: there is nothing to undo.", target.key());
        if !args.dry_run {
            record.remove(host)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    show(&changes)?;
    if args.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    if !agreed(args)? {
        return Ok(ExitCode::FAILURE);
    }
    for change in &changes {
        change.make(host)?;
    }
    if target != Target::Podman {
        // With checkpoints in it, it stays.
        let _ = std::fs::remove_dir(host.path(DEFAULT));
    }
    record.remove(host)?;
    println!("{} is as it was.", target.key());
    started_again(args, tools)?;
    Ok(ExitCode::SUCCESS)
}

/// Restarts the services that have to read a change, or says how to.
fn started_again(args: &Args, tools: &dyn Tools) -> anyhow::Result<()> {
    let services: &[&str] = match args.engine {
        Target::Podman => return Ok(()),
        // containerd looks for a shim on PATH once.
        Target::Docker => &["containerd", "docker"],
        Target::Containerd | Target::Kubernetes => &["containerd"],
    };
    if !args.restart {
        println!(
            "It has an effect after: systemctl restart {}",
            services.join(" ")
        );
        return Ok(());
    }
    let systemctl = tools.find("systemctl").with_context(|| {
        format!(
            "there is no systemctl here: restart {} yourself",
            services.join(" and ")
        )
    })?;
    for service in services {
        // docker may start a containerd of its own.
        let known = trial::run_one(tools, &systemctl, &["cat", service], RESTART);
        if known.is_ok() || services.len() == 1 || *service == args.engine.name() {
            trial::run_one(tools, &systemctl, &["restart", service], RESTART)?;
            println!("{service} was restarted.");
        }
    }
    Ok(())
}

fn show(changes: &[Change]) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    for change in changes {
        out.write_all(change.shown().as_bytes())?;
    }
    writeln!(out)
}

fn agreed(args: &Args) -> anyhow::Result<bool> {
    if args.yes {
        return Ok(true);
    }
    let input = std::io::stdin();
    if !input.is_terminal() {
        bail!("nobody can answer here whether to make this change: give --yes");
    }
    print!("Make this change? [y/N] ");
    std::io::stdout().flush()?;
    let mut answer = String::new();
    input.lock().read_line(&mut answer)?;
    let yes = matches!(answer.trim().to_lowercase().as_str(), "y" | "yes");
    if !yes {
        println!("Nothing was changed.");
    }
    Ok(yes)
}
