//! Asks a driver what it does in the corners, and prints a line for each: run it on the simulated
//! driver and on a real GPU, and compare. It starts `cusim-client` and `cusim-step`, which must be
//! next to it; `libcuda.so.1` is found as every program finds it.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use cuda_sim::cuda::Cuda;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Longest that a step may take before it counts as hanging.
const LIMIT: Duration = Duration::from_secs(20);
/// The same for steps that are expected to hang.
const SHORT: Duration = Duration::from_secs(3);

fn main() -> Result<()> {
    let cuda = Cuda::load(None)?;
    cuda.init().context("cuInit")?;
    let count = cuda.device_count()?;
    let uuids = (0..count)
        .map(|i| cuda.uuid(i))
        .collect::<Result<Vec<_>, _>>()?;
    say("driver", &cuda.version()?.to_string());
    say("devices", &count.to_string());
    let own = i32::try_from(std::process::id())?;
    say("self.state", &format!("{:?}", cuda.state(own)));
    strangers()?;
    wrong_states()?;
    looks()?;
    stopped()?;
    let identity: Vec<String> = uuids.iter().map(|u| format!("{u}={u}")).collect();
    maps(&identity)?;
    children()?;
    unsupported("managed", "--uvm")?;
    unsupported("ipc", "--ipc")?;
    out_of_memory()
}

/// One line of the report.
fn say(name: &str, value: &str) {
    println!("{name}\t{value}");
}

/// A program next to this one.
fn sibling(name: &str) -> Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name(name))
}

/// A client process that dies with its value.
struct Client {
    child: Child,
    out: PathBuf,
}

impl Client {
    fn start(flags: &[&str]) -> Result<Self> {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let n = NUMBER.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let out = std::env::temp_dir().join(format!("cusim-probe-{}-{n}", std::process::id()));
        let file = fs::File::create(&out)?;
        let child = Command::new(sibling("cusim-client")?)
            .args(flags)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()?;
        let c = Self { child, out };
        let end = Instant::now() + Duration::from_secs(120);
        while c.ticks() == 0 && !c.text().contains("rror") && Instant::now() < end {
            sleep(Duration::from_millis(20));
        }
        Ok(c)
    }

    fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap_or(0)
    }

    fn text(&self) -> String {
        fs::read_to_string(&self.out).unwrap_or_default()
    }

    fn ticks(&self) -> usize {
        self.text().lines().filter(|l| l.contains(" ok ")).count()
    }

    /// Whether it ticks on, and right.
    fn goes_on(&self) -> &'static str {
        let before = self.ticks();
        sleep(Duration::from_secs(2));
        let text = self.text();
        match (
            text.contains("CORRUPT"),
            text.contains("rror"),
            self.ticks() > before,
        ) {
            (true, ..) => "corrupt",
            (_, true, _) => "error",
            (.., true) => "goes on",
            _ => "stands still",
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.out);
    }
}

/// The outcome of a step: what it said, the name of an error, or that it hangs.
fn step(pid: i32, args: &[&str], limit: Duration) -> Result<String> {
    let mut child = Command::new(sibling("cusim-step")?)
        .arg(pid.to_string())
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()?;
    let end = Instant::now() + limit;
    while child.try_wait()?.is_none() {
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Ok("hangs".into());
        }
        sleep(Duration::from_millis(5));
    }
    let out = child.wait_with_output()?;
    let text = |b: &[u8]| String::from_utf8_lossy(b).trim().to_owned();
    if out.status.success() {
        let last = text(&out.stdout).lines().last().unwrap_or("").to_owned();
        return Ok(last
            .split(' ')
            .nth(2)
            .filter(|w| !w.is_empty())
            .unwrap_or("ok")
            .to_owned());
    }
    let error = text(&out.stderr);
    let code = error
        .split_whitespace()
        .find(|w| w.starts_with("CUDA_"))
        .map(str::to_owned);
    Ok(code.unwrap_or(error.replace('\n', " ")))
}

/// Prints the outcome of a step.
fn tell(name: &str, pid: i32, args: &[&str]) -> Result<()> {
    say(name, &step(pid, args, LIMIT)?);
    Ok(())
}

/// Processes that do not use CUDA, or are not there.
fn strangers() -> Result<()> {
    let mut sleeper = Command::new("sleep").arg("100").spawn()?;
    let pid = i32::try_from(sleeper.id())?;
    for s in ["tid", "state", "lock", "checkpoint", "restore", "unlock"] {
        tell(&format!("no-cuda.{s}"), pid, &[s])?;
        tell(&format!("absent.{s}"), i32::MAX - 1, &[s])?;
    }
    sleeper.kill()?;
    sleeper.wait()?;
    Ok(())
}

/// Every step in every state.
fn wrong_states() -> Result<()> {
    let c = Client::start(&[])?;
    for (state, wrong, next) in [
        ("running", ["checkpoint", "restore", "unlock"], "lock"),
        ("locked", ["lock", "restore", "state"], "checkpoint"),
        ("checkpointed", ["lock", "checkpoint", "unlock"], "restore"),
        ("restored", ["lock", "restore", "state"], "unlock"),
    ] {
        for s in wrong {
            tell(&format!("{state}.{s}"), c.pid(), &[s])?;
        }
        tell(&format!("{state}.then.{next}"), c.pid(), &[next])?;
    }
    say("after wrong steps", c.goes_on());
    Ok(())
}

/// Descriptors and mappings of device nodes, sockets and threads.
fn looks() -> Result<()> {
    let c = Client::start(&[])?;
    let tid = step(c.pid(), &["tid"], LIMIT)?;
    let name = |t: &str| fs::read_to_string(format!("/proc/{}/task/{t}/comm", c.pid()));
    say("restore thread", name(&tid).unwrap_or_default().trim());
    tell("state by thread id", tid.parse().unwrap_or(0), &["state"])?;
    say("running.looks", &look(c.pid()));
    step(c.pid(), &["lock"], LIMIT)?;
    say("locked.looks", &look(c.pid()));
    step(c.pid(), &["checkpoint"], LIMIT)?;
    say("checkpointed.looks", &look(c.pid()));
    step(c.pid(), &["restore", "unlock"], LIMIT)?;
    say("restored.looks", &look(c.pid()));
    Ok(())
}

/// What a process has open and mapped, counted by name.
fn look(pid: i32) -> String {
    let mut count: BTreeMap<String, usize> = BTreeMap::new();
    let kind = |target: &str| match target.split_once(':') {
        Some((k, _)) => k.to_owned(),
        None => target.rsplit('/').next().unwrap_or(target).to_owned(),
    };
    let entries = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten();
    for target in entries.filter_map(|e| fs::read_link(e.path()).ok()) {
        let target = target.to_string_lossy().into_owned();
        if target.contains("nvidia") || target.contains(':') {
            *count.entry(format!("fd {}", kind(&target))).or_default() += 1;
        }
    }
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    for node in maps.lines().filter_map(|l| l.split("/dev/").nth(1)) {
        *count.entry(format!("map {node}")).or_default() += 1;
    }
    let list: Vec<String> = count.iter().map(|(k, n)| format!("{k} {n}")).collect();
    list.join(", ")
}

/// A process that does not run.
fn stopped() -> Result<()> {
    let c = Client::start(&[])?;
    let pid = Pid::from_raw(c.pid());
    kill(pid, Signal::SIGSTOP)?;
    sleep(Duration::from_millis(100));
    let tid = step(c.pid(), &["tid"], SHORT)?;
    say(
        "stopped.tid",
        if tid.parse::<i32>().is_ok() {
            "ok"
        } else {
            &tid
        },
    );
    say(
        "stopped.lock 500 ms",
        &step(c.pid(), &["lock", "--timeout-ms", "500"], SHORT)?,
    );
    kill(pid, Signal::SIGCONT)?;
    say("stopped.after lock", c.goes_on());
    tell("stopped.state after", c.pid(), &["state"])?;
    kill(pid, Signal::SIGSTOP)?;
    sleep(Duration::from_millis(100));
    say("stopped.state", &step(c.pid(), &["state"], SHORT)?);
    kill(pid, Signal::SIGCONT)?;
    tell("stopped.state after state", c.pid(), &["state"])
}

/// GPU maps.
fn maps(identity: &[String]) -> Result<()> {
    let c = Client::start(&[])?;
    let all = identity.join(",");
    let stranger = "GPU-00000000-1111-2222-3333-444444444444";
    let first = identity
        .first()
        .and_then(|p| p.split('=').next())
        .unwrap_or("");
    step(c.pid(), &["lock", "checkpoint"], LIMIT)?;
    for (name, map) in [
        ("unknown old", format!("{stranger}={first}")),
        ("unknown new", format!("{first}={stranger}")),
        ("stranger more", format!("{all},{stranger}={stranger}")),
    ] {
        tell(&format!("map.{name}"), c.pid(), &["restore", "--map", &map])?;
        if step(c.pid(), &["state"], LIMIT)? != "checkpointed" {
            step(c.pid(), &["checkpoint"], LIMIT)?;
        }
    }
    if identity.len() > 1 {
        tell(
            "map.first only",
            c.pid(),
            &["restore", "--map", &identity[0]],
        )?;
        if step(c.pid(), &["state"], LIMIT)? != "checkpointed" {
            step(c.pid(), &["checkpoint"], LIMIT)?;
        }
        tell(
            "map.swap",
            c.pid(),
            &["restore", "checkpoint", "--map", "swap"],
        )?;
    }
    tell("map.identity", c.pid(), &["restore", "--map", &all])?;
    tell("map.unlock", c.pid(), &["unlock"])?;
    say("map.after", c.goes_on());
    Ok(())
}

/// Children forked by a CUDA process.
fn children() -> Result<()> {
    let c = Client::start(&["--fork-idle", "1"])?;
    let list = fs::read_to_string(format!("/proc/{0}/task/{0}/children", c.pid()))?;
    let child: i32 = list.split_whitespace().next().unwrap_or("0").parse()?;
    say("child.looks", &look(child));
    for s in ["tid", "state"] {
        say(&format!("child.{s}"), &step(child, &[s], SHORT)?);
    }
    tell(
        "child.parent",
        c.pid(),
        &["lock", "checkpoint", "restore", "unlock"],
    )?;
    say("child.parent after", c.goes_on());
    Ok(())
}

/// Things that a driver may not checkpoint.
fn unsupported(name: &str, flag: &str) -> Result<()> {
    let c = Client::start(&[flag])?;
    say(&format!("{name}.looks"), &look(c.pid()));
    for s in [
        "lock",
        "checkpoint",
        "state",
        "restore",
        "state",
        "unlock",
        "state",
    ] {
        tell(&format!("{name}.{s}"), c.pid(), &[s])?;
    }
    say(&format!("{name}.after"), c.goes_on());
    Ok(())
}

/// A restore for which there is no memory.
fn out_of_memory() -> Result<()> {
    let c = Client::start(&["--mib", "1024"])?;
    step(c.pid(), &["lock", "checkpoint"], LIMIT)?;
    let hog = Client::start(&["--mib", "1", "--leave-mib", "300"])?;
    for s in ["restore", "state", "restore", "unlock"] {
        tell(&format!("oom.{s}"), c.pid(), &[s])?;
    }
    drop(hog);
    sleep(Duration::from_secs(1));
    for s in ["restore", "state", "unlock"] {
        tell(&format!("oom.later.{s}"), c.pid(), &[s])?;
    }
    say("oom.after", c.goes_on());
    Ok(())
}
