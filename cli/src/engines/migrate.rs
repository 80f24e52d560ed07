//! `cryopod migrate`: moves a running container to another host over ssh. What a crash leaves, step by step:
//!
//! 1. **Ask** the other host: `cryopod check`, a free name, the image, the mounts. Here nothing has happened.
//! 2. **Stop** the container here. docker's and ctr's is paused and loses nothing; while this process lives,
//!    cryopod-runtime does not resume it. podman cannot checkpoint a paused container: it ends it, and keeps the checkpoint.
//! 3. **Send** the archive; `cryopod check ARCHIVE` there says whether it would restore.
//! 4. **Start** it there, under a lock in the archive's directory.
//! 5. **Remove** it here, when the engine there says that it runs.
//!
//! After a failure [`Move::settle`] takes that lock, so that no start is under way. If the container runs there, step 5
//! follows. Else the archive's directory goes, without which no later start can begin, and the container resumes here. If the
//! other host or its engine does not answer after step 3, nobody can know: the container stays stopped here, and the message says so.
//!
//! A child process does the steps. If it is killed, its parent settles; if the parent is killed, it goes on. If both are,
//! the container stays stopped here as from step 2 on, and the engine's own command resumes it.

mod by_engine;

use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cryopod_host::files::Host;
use cryopod_host::limited::wait_until;
use cryopod_host::processes::signals::not_ignored;
use cryopod_operations::pause::hold;
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, waitpid};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::by_engine::Needs;
use crate::engines::container::Container;
use crate::engines::engine::{Engine, EngineCall, which};
use crate::temp_dir::{Holds, LockedTempDir};
use crate::terminal::numbers;

/// Time limit of a question.
const ASK: Duration = Duration::from_secs(60);
/// Time in which a host that does not answer may come back.
const PATIENCE: Duration = Duration::from_secs(30);
/// ssh never asks, and notices a dead connection.
const SSH: [&str; 8] = [
    "-o",
    "BatchMode=yes",
    "-o",
    "ConnectTimeout=10",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
];
/// Files of the directory here.
const PLAN: &str = "plan.json";
const STARTING: &str = "starting";
const ARCHIVE: &str = "archive.tar";

#[derive(clap::Args)]
pub struct Args {
    /// The container, as its engine names it.
    container: String,
    /// The other host: ssh://[USER@]HOST[:PORT]. It has cryopod and the same engine, and lets ssh in without a password.
    host: String,
    /// Its engine, where two engines have a container of this name.
    #[arg(short, long, value_enum)]
    engine: Option<Engine>,
    /// containerd's namespace.
    #[arg(long, default_value = "default")]
    namespace: String,
    /// Time limit of each step, in seconds.
    #[arg(long, default_value_t = 3600, value_parser = numbers::seconds)]
    timeout: u64,
    /// The parent's directory: this process does the steps.
    #[arg(long, hide = true)]
    steps: Option<PathBuf>,
}

/// Runs the subcommand. Whatever fails, its last line says where the container runs.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.steps {
        Some(directory) => steps(args, directory),
        None => supervise(args),
    }
}

fn supervise(args: &Args) -> anyhow::Result<ExitCode> {
    // podman may remove a container at its checkpoint (`--rm`).
    let temp = LockedTempDir::anywhere(Holds::Checkpoint)?;
    use Signal::{SIGCHLD, SIGHUP, SIGINT, SIGTERM};
    let signals = not_ignored(&[SIGCHLD, SIGINT, SIGTERM, SIGHUP]);
    signals.thread_block()?;
    // What the killed child had started is this process's then.
    set_child_subreaper(true)?;
    let mut child = Command::new("/proc/self/exe")
        .args(std::env::args_os().skip(1))
        .arg("--steps")
        .arg(temp.path())
        .process_group(0)
        .spawn()
        .context("cryopod migrate: cannot be started")?;
    let status = ended(&mut child, &signals)?;
    let Ok(plan) = fs::read(temp.path().join(PLAN)) else {
        match status.code() {
            Some(code) => return Ok(ExitCode::from(u8::try_from(code).unwrap_or(1))),
            None => bail!("nothing was done to {}: stopped", args.container),
        }
    };
    // From here on the directory goes when the container runs.
    temp.keep();
    if status.code().is_some() {
        return Ok(ExitCode::FAILURE);
    }
    let plan: Move = serde_json::from_slice(&plan).context(PLAN)?;
    orphans_end(plan.limit());
    plan.settle(anyhow::anyhow!("the migration was stopped"))
}

/// Waits for the child, and kills it if this process is to end: the steps have no place to stop.
fn ended(child: &mut Child, signals: &SigSet) -> anyhow::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if signals.wait()? != Signal::SIGCHLD {
            child.kill()?;
        }
    }
}

/// Waits for what the child had called: an engine that still works changes the container.
fn orphans_end(limit: Duration) {
    let none_is_left = || waitpid(None, Some(WaitPidFlag::WNOHANG)).is_err();
    wait_until(limit, Duration::from_millis(50), none_is_left);
}

fn steps(args: &Args, directory: &Path) -> anyhow::Result<ExitCode> {
    if !args.host.starts_with("ssh://") {
        bail!("{}: it is ssh://[USER@]HOST[:PORT]", args.host);
    }
    let engine = match args.engine {
        Some(engine) => engine,
        None => which::knows(&args.container, &args.namespace)?,
    };
    let name = engine.full_name(&args.container)?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
    for text in [&name, &args.namespace] {
        if text.starts_with('-') || !text.chars().all(plain) {
            bail!("{text}: not a name of a container or namespace");
        }
    }
    let plan = Move {
        engine,
        name,
        namespace: args.namespace.clone(),
        host: args.host.clone(),
        seconds: args.timeout,
        directory: directory.into(),
    };
    let untouched = || format!("{} runs here, untouched", plan.name);
    let init = match plan.state()? {
        State::Running(init) => init,
        other => bail!("{}: it does not run: {other:?}", plan.name),
    };
    let mut needs = plan.needs().with_context(untouched)?;
    plan.ask(&mut needs).with_context(untouched)?;
    let written = serde_json::to_vec(&plan)?;
    fs::write(directory.join(PLAN), written).with_context(untouched)?;
    match plan.stop_send_start(init, &needs) {
        Ok(()) => plan.remove_here(),
        Err(error) => plan.settle(error),
    }
}

#[derive(Debug)]
enum State {
    /// With its init process.
    Running(i32),
    Paused,
    Stopped,
    Missing,
}

/// A migration, as parent and child know it.
#[derive(Serialize, Deserialize)]
struct Move {
    engine: Engine,
    name: String,
    namespace: String,
    host: String,
    seconds: u64,
    /// The directory here.
    directory: PathBuf,
}

impl Move {
    fn limit(&self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    /// Names what belongs to this migration, on both hosts.
    fn token(&self) -> String {
        let name = self.directory.to_string_lossy();
        let random = name.rsplit('-').next().unwrap_or_default();
        format!("cryopod-migrate-{random}")
    }

    /// The directory there.
    fn there(&self) -> String {
        format!("/var/tmp/{}", self.token())
    }

    /// Runs a shell script on the other host.
    fn far(&self, what: &str, script: &str, limit: Duration) -> EngineCall {
        // sshd gives commands a short PATH.
        let script = format!("PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/sbin\n{script}");
        EngineCall::new("ssh", limit)
            .args(SSH)
            .args(["--", &self.host, &format!("exec sh -c {}", quoted(&script))])
            .shown(format!("{}: {what}", self.host))
    }

    /// `cryopod check` there.
    fn check(&self, arguments: &str) -> anyhow::Result<()> {
        let script = format!("cryopod check --json {arguments} || [ $? = 1 ]");
        let said = self.far("cryopod check", &script, self.limit()).run()?;
        let report: Value = serde_json::from_str(&said)
            .with_context(|| format!("{}: cryopod check: not JSON", self.host))?;
        if report["ok"] == true {
            return Ok(());
        }
        let lines = report["checks"].as_array().into_iter().flatten();
        let lines = lines.filter(|line| line["status"] == "missing");
        let refusals = report["refusals"].as_array().into_iter().flatten();
        let text = |value: &Value| {
            let words = value.as_str().unwrap_or_default().split_whitespace();
            words.collect::<Vec<_>>().join(" ")
        };
        let why: Vec<String> = lines
            .map(|line| (text(&line["found"]), text(&line["remedy"])))
            .chain(refusals.map(|line| (text(&line["what"]), text(&line["remedy"]))))
            .map(|(what, remedy)| format!("{what} ({remedy})"))
            .collect();
        bail!("{}: {}", self.host, why.join("; "));
    }

    fn ask(&self, needs: &mut Needs) -> anyhow::Result<()> {
        self.check("")?;
        let mut script = format!(
            "if {} > /dev/null 2>&1; then echo a container of this name is there; fi\n",
            self.known()
        );
        for path in &needs.paths {
            let path = quoted(path);
            script += &format!("[ -e {path} ] || echo {path} is missing\n");
        }
        for volume in &needs.volumes {
            script += &format!(
                "docker volume inspect {0} > /dev/null 2>&1 || echo the volume {0} is missing, and docker carries none\n",
                quoted(volume)
            );
        }
        let what = self.engine.program();
        let lacks = self.far(what, &script, ASK).run()?;
        if !lacks.is_empty() {
            bail!("{}: {}", self.host, lacks.trim().replace('\n', "; "));
        }
        self.send_image(needs)?;
        // A second migration cannot make the directory. Until `made` is there, a container of this name is not ours.
        let make = format!("mkdir -m 700 {0} && : > {0}/ours", self.there());
        self.far("a directory", &make, ASK).run().map(drop)
    }

    /// Steps 2 to 4.
    fn stop_send_start(&self, init: i32, needs: &Needs) -> anyhow::Result<()> {
        let container = Container::find(&Host::system(), &format!("pid:{init}"))?;
        // podman resumes nothing.
        let held = match (self.engine, container.state_directory()) {
            (Engine::Podman, _) => None,
            (_, Some(directory)) => Some(hold(&directory)?),
            _ => bail!("no low-level runtime has a record of it"),
        };
        let archive = self.checkpoint(needs)?;
        if matches!(self.state()?, State::Running(_)) {
            bail!("its runtime is not cryopod-runtime, and has resumed it");
        }
        let there = self.there();
        let file = File::open(&archive).with_context(|| archive.display().to_string())?;
        let script = format!("cat > {there}/{ARCHIVE}");
        self.far("the archive", &script, self.limit())
            .input(file)
            .run()?;
        self.check(&format!("--engine {} {there}/{ARCHIVE}", self.engine))?;
        self.prepare(needs)?;
        let starting = self.directory.join(STARTING);
        File::create(&starting)
            .and_then(|file| file.sync_all())
            .with_context(|| starting.display().to_string())?;
        let is_free = match self.engine {
            // Docker has made it.
            Engine::Docker => String::new(),
            // The one of this name may be younger than our question.
            _ => format!(
                "if {} > /dev/null 2>&1; then echo a container of this name is there >&2; exit 1; fi\n: > {there}/made\n",
                self.known()
            ),
        };
        let start = format!(
            "[ -e {there}/ours ] || exit\n{is_free}: > {there}/started && {}",
            self.start()
        );
        let script = format!("flock -o {there}/lock sh -c {}", quoted(&start));
        self.far(&self.start(), &script, self.limit()).run()?;
        if !self.verdict()? {
            bail!("{}: it was started, and does not run", self.host);
        }
        drop(held);
        Ok(())
    }

    /// Returns true if the container runs there. If not, nothing of it is left there, and no start can begin. An engine
    /// that does not answer may have started it: that is an error.
    fn verdict(&self) -> anyhow::Result<bool> {
        let there = self.there();
        let script = format!(
            "case $({}) in true|RUNNING) runs=1;; esac\n\
             if [ -e {there}/started ] && [ \"$runs\" ]; then echo there; exit; fi\n\
             if [ -e {there}/made ]; then {}; else {}; fi > /dev/null 2>&1\n\
             if [ -e {there}/started ]; then left=$({}) || exit; fi\n\
             if echo \"$left\" | grep -qxF {}; then echo it cannot be removed; exit; fi\n\
             rm -rf {there}; echo gone",
            self.running(),
            self.undo(),
            self.tidy(),
            self.list(),
            self.name
        );
        let script = format!(
            "[ -d {there} ] || {{ echo gone; exit; }}\nflock -o -w {} {there}/lock sh -c {}",
            self.seconds,
            quoted(&script)
        );
        let limit = self.limit() + ASK;
        let said = self.far("does it run?", &script, limit).run()?;
        match said.trim() {
            "there" => Ok(true),
            "gone" => Ok(false),
            other => bail!("{}: {other:?}", self.host),
        }
    }

    /// Brings the container to one place after a failure, and says where.
    fn settle(&self, why: anyhow::Error) -> anyhow::Result<ExitCode> {
        let name = &self.name;
        let started = self.directory.join(STARTING).exists();
        let end = Instant::now() + PATIENCE;
        let verdict = loop {
            match self.verdict() {
                Err(_) if started && Instant::now() < end => thread::sleep(Duration::from_secs(2)),
                verdict => break verdict,
            }
        };
        match verdict {
            Ok(true) => return self.remove_here(),
            Err(unknown) if started => {
                let resume = self.resume_command();
                return Err(why.context(format!(
                    "{name} stays stopped here, as {} does not say whether it runs there ({unknown:#}); its checkpoint is in {}; if not: {resume}",
                    self.host,
                    self.directory.display()
                )));
            }
            _ => {}
        }
        match self.resume_here() {
            Ok(()) => {
                let _ = fs::remove_dir_all(&self.directory);
                Err(why.context(format!("{name} runs here")))
            }
            Err(error) => Err(why.context(format!(
                "{name} runs nowhere: {error:#}; its checkpoint is in {}; resume it with: {}",
                self.directory.display(),
                self.resume_command()
            ))),
        }
    }

    /// Step 5.
    fn remove_here(&self) -> anyhow::Result<ExitCode> {
        let (name, host) = (&self.name, &self.host);
        let tidy = format!("{}; rm -rf {}", self.tidy(), self.there());
        let left = self.far("clean up", &tidy, ASK).run();
        self.end_here().with_context(|| {
            format!("{name} runs on {host}; here it is stopped, and cannot be removed")
        })?;
        let _ = fs::remove_dir_all(&self.directory);
        if let Err(e) = left {
            tracing::warn!("{}: left there: {e:#}", self.there());
        }
        println!("{name} runs on {host}");
        Ok(ExitCode::SUCCESS)
    }
}

/// A word of a shell's command line.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_shell() {
        let text = "it's $HOME `x` \"y\" \\ \n z";
        let script = format!("printf %s {}", quoted(text));
        let said = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert_eq!(String::from_utf8(said.stdout).unwrap(), text);
    }
}
