//! `cryopod setup ENGINE`: makes cryopod known to an engine. Shows the change to the engine's configuration, makes it with a
//! backup, and checkpoints a small container to test it. `--undo` takes the change back.

mod change;
pub mod containerd;
mod crio;
mod docker;
mod low_level;
pub mod node;
mod own_files;
mod podman;
mod rancher;
mod record;
mod running;
mod runtime_trial;
mod toml_file;
mod trial;

use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_host::files::Host;
use cryopod_host::programs::{SystemTools, Tools};
use cryopod_operations::config::Config;
use cryopod_operations::config::store::DEFAULT;
use cryopod_operations::images::store;

use change::Change;
use node::{Brought, NodeRuntime};
use record::SetupRecord;

/// The example's RuntimeClass, without the example's pod.
const RUNTIME_CLASS: &str = include_str!("../../examples/kubernetes/runtimeclass.yaml");
const UNLINKED: &str = "WARNING: containerd starts NO container until it is restarted, for it looks for a link that is gone: systemctl restart containerd (docker, where docker starts containerd)";
const RESTART: Duration = Duration::from_secs(180);

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Target {
    /// podman, in containers.conf.
    Podman,
    /// docker, in daemon.json, and by a link in place of containerd's shim.
    Docker,
    /// containerd's CRI, in its config.toml. `ctr` and nerdctl need no configuration.
    Containerd,
    /// The runtime of a node: containerd, that of k3s and rke2, or CRI-O. Also prints the RuntimeClass.
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
    /// For Kubernetes, from a container: the directory with the node's root. cryopod's files are copied to the node's
    /// /opt/cryopod.
    #[arg(long, value_name = "DIRECTORY")]
    node_root: Option<PathBuf>,
    /// The text for the node's /etc/cryopod/config.toml, unless the node has one that the installer has not made.
    #[arg(long, value_name = "FILE", requires = "node_root")]
    settings: Option<PathBuf>,
}

impl Target {
    /// The name of the record. Kubernetes' is containerd's, whichever runtime the node has.
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
pub struct WantedSetup<'a> {
    host: &'a Host,
    tools: &'a dyn Tools,
    /// The engine's configuration file, if the user names one.
    config: Option<&'a Path>,
    /// cryopod becomes the default runtime.
    default: bool,
    /// The text of cryopod's own configuration.
    settings: Option<&'a str>,
    /// The absolute paths of cryopod's programs.
    runtime: PathBuf,
    shim: PathBuf,
    /// The runtime of a Kubernetes node, if that is set up.
    node: Option<NodeRuntime>,
}

impl WantedSetup<'_> {
    fn changes(&self, target: Target) -> anyhow::Result<Vec<Change>> {
        let mut all = match (target, self.node) {
            (Target::Podman, _) => podman::changes(self),
            (Target::Docker, _) => docker::changes(self),
            (Target::Kubernetes, Some(runtime)) => runtime.changes(self),
            (Target::Containerd | Target::Kubernetes, _) => containerd::changes(self),
        }?;
        all.extend(self.own_configuration(target)?);
        Ok(all)
    }

    /// The change of cryopod's own configuration. A file that somebody else made gets no settings.
    fn own_configuration(&self, target: Target) -> anyhow::Result<Option<Change>> {
        let path = Path::new(low_level::FILE);
        let before = change::read(self.host, path)?;
        if let Some(settings) = self.settings {
            Config::parse(settings, path).context("--settings")?;
        }
        let made = |text: &str| {
            let record = SetupRecord::read(self.host, record::SHARED)?;
            anyhow::Ok(record.made_file(path, text))
        };
        let text = match (&before, self.settings) {
            (None, Some(settings)) => settings,
            (Some(text), Some(settings)) if made(text)? => settings,
            (before, _) => before.as_deref().unwrap_or_default(),
        };
        // containerd's shim names a low-level runtime itself: runc, or that of the runtime's options, NVIDIA's, say.
        let shims = match self.node {
            Some(runtime) => runtime != NodeRuntime::Crio,
            None => target == Target::Containerd,
        };
        let after = match shims {
            true => text.to_owned(),
            false => low_level::wanted_text(self, text)?,
        };
        if before.is_none() && after.is_empty() {
            return Ok(None);
        }
        Ok(Change::of(path.into(), before, after))
    }

    /// The shim's path, if containerd does not find it by its name.
    fn shim_path(&self) -> Option<&Path> {
        Some(&*self.shim).filter(|path| path.starts_with(own_files::DIRECTORY))
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
        _ if path == Path::new(crio::FILE) => Ok(crio::without(text)),
        _ if path.extension() == Some(rancher::TEMPLATE.as_ref()) => {
            Ok(rancher::without(text, before))
        }
        Target::Podman => podman::without(text, before),
        Target::Docker => docker::without(text, before),
        Target::Containerd | Target::Kubernetes => containerd::without(text, before),
    }
}

/// Returns true if the engine on this host is set up. For `cryopod check`.
pub fn is_done(target: Target, host: &Host, tools: &dyn Tools) -> bool {
    let changes = wanted(target, host, tools, None, false).and_then(|w| w.changes(target));
    changes.is_ok_and(|changes| changes.is_empty())
}

fn wanted<'a>(
    target: Target,
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
        settings: None,
        runtime: own(tools, "cryopod-runtime")?,
        shim: own(tools, "containerd-shim-cryopod-v2")?,
        node: NodeRuntime::of(host, tools).filter(|_| target == Target::Kubernetes),
    })
}

/// Finds a program of cryopod: beside this one, else on PATH.
pub fn own(tools: &dyn Tools, name: &str) -> anyhow::Result<PathBuf> {
    let exe = std::env::current_exe().ok();
    let beside = exe.map(|exe| exe.with_file_name(name));
    beside
        .and_then(|path| tools.find(path.to_str()?))
        .or_else(|| tools.find(name))
        .with_context(|| {
            format!("{name} is neither beside cryopod nor on PATH: install all of cryopod")
        })
}

/// Runs `cryopod setup`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let target = args.engine;
    if !args.dry_run && !nix::unistd::geteuid().is_root() {
        bail!(
            "it changes the engine's configuration: run it as root, or only look at the change with --dry-run"
        );
    }
    let brought = match &args.node_root {
        Some(_) if target != Target::Kubernetes => bail!("--node-root is for kubernetes"),
        Some(root) => Some(node::enter(root, args.settings.as_deref())?),
        None => None,
    };
    let host = Host::system();
    let tools = match target {
        Target::Kubernetes => node::tools(),
        _ => SystemTools::from_env(),
    };
    let node = NodeRuntime::of(&host, &tools).filter(|_| target == Target::Kubernetes);
    if let Some(runtime) = node {
        node::address(runtime);
    }
    if args.undo {
        return undo(args, node, &host, &tools);
    }
    let there = match target {
        Target::Kubernetes => node.is_some(),
        _ => tools.find(target.program()).is_some(),
    };
    if !there && args.config.is_none() {
        bail!(
            "{} is not installed here ({} is not on PATH)",
            target.key(),
            target.program()
        );
    }
    let wanted = match &brought {
        Some(brought) => {
            let program = |name: &str| Path::new(own_files::DIRECTORY).join("bin").join(name);
            WantedSetup {
                host: &host,
                tools: &tools,
                config: args.config.as_deref(),
                default: args.default,
                settings: brought.settings.as_deref(),
                runtime: program("cryopod-runtime"),
                shim: program("containerd-shim-cryopod-v2"),
                node,
            }
        }
        None => wanted(target, &host, &tools, args.config.as_deref(), args.default)?,
    };
    set_up(args, &wanted, brought.as_ref())
}

fn set_up(
    args: &Args,
    wanted: &WantedSetup<'_>,
    brought: Option<&Brought>,
) -> anyhow::Result<ExitCode> {
    let (target, host, tools) = (args.engine, wanted.host, wanted.tools);
    let name = wanted.node.map_or(target.key(), NodeRuntime::name);
    let undo = format!("cryopod setup {} --undo", target.name());
    if !args.dry_run {
        SetupRecord::close(host)?;
    }
    let changes = wanted.changes(target)?;
    let files = brought.map(|brought| &brought.files);
    let in_place = files.map_or(Ok(true), |files| files.are_in_place(host));
    let in_place = in_place.context(own_files::DIRECTORY)?;
    if changes.is_empty() && in_place {
        println!("{name} is set up for cryopod.");
    } else {
        show(&changes)?;
        if !in_place {
            println!("+{} with cryopod's files", own_files::DIRECTORY);
        }
        if args.dry_run {
            return Ok(ExitCode::SUCCESS);
        }
        low_level::ensure_kept(host, tools, &changes)?;
        if files.is_some() {
            SetupRecord::ensure_place(host, target.key())?;
        }
        if target == Target::Docker {
            docker::ensure_valid(wanted, &changes)?;
        }
        if !agreed(args)? {
            return Ok(ExitCode::FAILURE);
        }
        let (shared, own): (Vec<_>, Vec<_>) = changes.iter().cloned().partition(low_level::is_own);
        if files.is_some() {
            // First: older programs may not know the configuration that comes with these.
            SetupRecord::make(host, target.key(), &[], files)?;
        }
        if !shared.is_empty() {
            SetupRecord::make(host, record::SHARED, &shared, None)?;
        }
        let backup = SetupRecord::make(host, target.key(), &own, None)?;
        println!("{name} is set up. Backup: {}", backup.display());
    }
    if target != Target::Podman && !args.dry_run {
        let store = host.path(DEFAULT);
        store::make(&store).with_context(|| format!("{}: cannot be made", store.display()))?;
    }
    let containerds = match wanted.node {
        Some(runtime) => runtime == NodeRuntime::Containerd,
        None => target == Target::Containerd,
    };
    if containerds && !args.dry_run {
        containerd::ensure_known(wanted)?;
    }
    if target == Target::Kubernetes && brought.is_none() {
        let class = RUNTIME_CLASS.split("---").next().unwrap_or_default();
        println!("\nFor the cluster (kubectl apply -f -):\n{class}");
    }
    if args.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    let read = match wanted.node {
        Some(runtime) => {
            let mut written = SetupRecord::read(host, target.key())?.paths();
            if runtime == NodeRuntime::Containerd {
                written.push(containerd::file(wanted));
            }
            runtime.has_read(host, &written)?
        }
        None => !args.restart && changes.is_empty(),
    };
    if !read {
        started_again(args, wanted.node, tools).with_context(|| {
            let backup = record::directory(target.key());
            format!(
                "the setup stays: `{undo} --restart` takes it back; {} has the files as they were",
                backup.display()
            )
        })?;
    }
    if args.no_test {
        return Ok(ExitCode::SUCCESS);
    }
    let waits = args.restart && !read;
    let tested = match wanted.node {
        Some(NodeRuntime::Crio) => runtime_trial::run(wanted),
        _ => trial::run(target, wanted, waits),
    };
    match tested {
        Ok(trial::TrialOutcome::Works(what))
            if target == Target::Kubernetes
                && wanted.node != Some(NodeRuntime::Crio)
                && !read
                && !args.restart =>
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
            "the test failed, and the setup stays (`{undo}` takes it back; `cryopod check` says what this host lacks): {error:#}"
        ),
    }
    Ok(ExitCode::SUCCESS)
}

fn undo(
    args: &Args,
    node: Option<NodeRuntime>,
    host: &Host,
    tools: &dyn Tools,
) -> anyhow::Result<ExitCode> {
    let target = args.engine;
    let name = node.map_or(target.key(), NodeRuntime::name);
    let mut records = vec![SetupRecord::read(host, target.key())?];
    let shared = SetupRecord::read(host, record::SHARED)?;
    let others = SetupRecord::others(host, target.key());
    if others.is_empty() {
        records.push(shared);
    } else if !shared.is_empty() {
        println!("{} stays: {} needs it.", low_level::FILE, others.join(", "));
    }
    let mut changes = Vec::new();
    for record in &records {
        changes.extend(record.undone(host, |path, text, before| {
            without(target, path, text, before)
        })?);
    }
    if records.iter().all(SetupRecord::is_empty) {
        println!("{name}: there is nothing to undo.");
        if !args.dry_run {
            for record in &records {
                record.remove(host)?;
            }
        }
        return Ok(ExitCode::SUCCESS);
    }
    if !args.dry_run {
        let own_files = records.iter().any(SetupRecord::has_own_files);
        if own_files {
            trial::remove_leftovers(tools).context("what a killed test left")?;
        }
        running::ensure_none(host, target, node, own_files)?;
    }
    show(&changes)?;
    if args.dry_run {
        return Ok(ExitCode::SUCCESS);
    }
    low_level::ensure_kept(host, tools, &changes)?;
    if !agreed(args)? {
        return Ok(ExitCode::FAILURE);
    }
    for change in &changes {
        change.make(host)?;
    }
    if target != Target::Podman && others.iter().all(|name| name == Target::Podman.key()) {
        // With checkpoints in it, it stays.
        let _ = std::fs::remove_dir(host.path(DEFAULT));
    }
    if !args.restart && changes.iter().any(Change::is_link) {
        unlinked(tools)?;
    } else {
        started_again(args, node, tools)?;
    }
    for record in &records {
        record.remove(host)?;
    }
    println!("{name} is as it was.");
    Ok(ExitCode::SUCCESS)
}

/// Restarts containerd after the end of docker's link. containerd remembers the link, and without it starts no container of
/// runc's any more. The containers that it has run on.
fn unlinked(tools: &dyn Tools) -> anyhow::Result<()> {
    let call = |words: &[&str]| {
        let systemctl = tools.find("systemctl").context("no systemctl")?;
        trial::run_one(tools, &systemctl, words, RESTART)
    };
    match call(&["is-active", "--quiet", "containerd"]) {
        Ok(_) => {
            call(&["restart", "containerd"]).context(UNLINKED)?;
            println!("containerd was restarted.");
        }
        // dockerd has a containerd of its own, or none runs.
        Err(_) => println!("{UNLINKED}"),
    }
    println!("docker reads the change after: systemctl restart docker");
    Ok(())
}

/// Restarts the services that have to read a change, or says how to.
fn started_again(args: &Args, node: Option<NodeRuntime>, tools: &dyn Tools) -> anyhow::Result<()> {
    let services: &[&str] = match (args.engine, node) {
        (Target::Podman, _) => return Ok(()),
        // containerd looks for a shim on PATH once.
        (Target::Docker, _) => &["containerd", "docker"],
        (Target::Kubernetes, Some(runtime)) => runtime.services(),
        (Target::Containerd | Target::Kubernetes, _) => &["containerd"],
    };
    if !args.restart {
        println!(
            "It has an effect after: systemctl restart {}",
            services.join(if node.is_some() { " or " } else { " " })
        );
        return Ok(());
    }
    let systemctl = tools.find("systemctl").with_context(|| {
        format!(
            "there is no systemctl here: restart {} yourself",
            services.join(" and ")
        )
    })?;
    let active = node.map(|runtime| runtime.active(tools, &systemctl));
    let active = active.transpose()?.map(|service| vec![service]);
    let services = active.unwrap_or_else(|| services.to_vec());
    for service in &services {
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

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use cryopod_host::programs::{Output, ToolError};

    use super::*;
    use cryopod_test_files::TestFiles;

    /// runc, and a crun without CRIU.
    pub struct Debian12;

    impl Tools for Debian12 {
        fn find(&self, name: &str) -> Option<PathBuf> {
            let path = Path::new("/usr/bin").join(name);
            ["crun", "runc"].contains(&name).then_some(path)
        }
        fn output(&self, _: &Path, _: &[&OsStr], _: Duration) -> Result<Output, ToolError> {
            Ok(Output::default())
        }
    }

    /// A setup with the programs of the packages, and no options.
    pub fn packaged<'a>(host: &'a Host, tools: &'a dyn Tools) -> WantedSetup<'a> {
        WantedSetup {
            host,
            tools,
            config: None,
            default: false,
            settings: None,
            runtime: "/usr/bin/cryopod-runtime".into(),
            shim: "/usr/bin/containerd-shim-cryopod-v2".into(),
            node: None,
        }
    }

    fn args(engine: Target, undo: bool) -> Args {
        Args {
            engine,
            undo,
            dry_run: false,
            yes: true,
            default: false,
            config: None,
            restart: false,
            no_test: true,
            node_root: None,
            settings: None,
        }
    }

    fn done(host: &Host, engine: Target) {
        set_up(&args(engine, false), &packaged(host, &Debian12), None).unwrap();
    }

    fn undone(host: &Host, engine: Target) -> anyhow::Result<ExitCode> {
        undo(&args(engine, true), None, host, &Debian12)
    }

    #[test]
    fn the_last_engines_undoing_takes_what_all_share() {
        use Target::{Docker, Podman};
        for (first, last) in [(Podman, Docker), (Docker, Podman)] {
            let dir = tempfile::tempdir().unwrap();
            let host = Host::at(dir.path());
            dir.dir("var/lib");
            let config = || change::read(&host, Path::new(low_level::FILE)).unwrap();
            done(&host, Podman);
            done(&host, Docker);
            undone(&host, first).unwrap();
            assert!(config().unwrap().contains("runc"), "{last:?} needs it");
            let store = host.path(DEFAULT).exists();
            assert_eq!(store, last == Docker, "{last:?}");
            undone(&host, last).unwrap();
            assert_eq!(config(), None);
            assert!(!host.path("/etc/cryopod").exists());
            assert!(!host.path("/var/lib/cryopod").exists());
        }
    }

    #[test]
    fn settings_that_the_programs_do_not_know_are_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        for (text, is_valid) in [("[limits]\ntool_s = 5", true), ("renamed = 1", false)] {
            let mut wanted = packaged(&host, &Debian12);
            wanted.settings = Some(text);
            let done = set_up(&args(Target::Podman, false), &wanted, None);
            assert_eq!(done.is_ok(), is_valid, "{text}");
            let config = change::read(&host, Path::new(low_level::FILE)).unwrap();
            assert!(config.unwrap().contains("tool_s = 5"));
        }
    }

    #[test]
    fn what_containers_need_stays() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let monitor = "conmon\0-r\0/usr/bin/cryopod-runtime\0";
        done(&host, Target::Podman);
        dir.put("proc/3/cmdline", monitor);
        let refusal = undone(&host, Target::Podman).unwrap_err().to_string();
        assert!(refusal.contains("process 3 is of one"), "{refusal}");
        // Also where nothing but the engine's configuration would change.
        done(&host, Target::Docker);
        let refusal = undone(&host, Target::Podman).unwrap_err().to_string();
        assert!(refusal.contains("process 3 is of one"), "{refusal}");
        undone(&host, Target::Docker).unwrap();
        let config = change::read(&host, Path::new(low_level::FILE)).unwrap();
        assert!(config.is_some() && host.path("/etc/containers").exists());
        std::fs::remove_dir_all(dir.path().join("proc/3")).unwrap();
        undone(&host, Target::Podman).unwrap();
        assert!(!host.path("/etc/cryopod").exists());
    }
}
