//! `cryopod top`: shows what the running checkpoints, restores and transfers of this host are doing.
//!
//! On a terminal a table that is drawn anew each second, else lines.

use std::collections::BTreeMap;
use std::fs;
use std::io::{IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

use console::Term;
use cryopod_archive::format::names;
use cryopod_cuda::preload::Library;
use cryopod_cuda::procfs;
use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use cryopod_operations::run::progress::{self, Running};

use crate::terminal::ui::{bytes, columns, plain};

/// How much of the end of CRIU's log is searched for the driver's steps.
const LOG_TAIL: u64 = 256 << 10;
const HEAD: [&str; 8] = [
    "PID",
    "OPERATION",
    "NAME",
    "STEP",
    "TIME",
    "DONE",
    "RATE",
    "LEFT",
];

#[derive(clap::Args)]
pub struct Args {
    /// Show it once and exit. Exit code 0, also if nothing runs.
    #[arg(long)]
    once: bool,
    /// Seconds between two looks.
    #[arg(short, long, default_value_t = 1.0, value_name = "SECONDS", value_parser = interval)]
    interval: f64,
    /// Print JSON: a list of operations, once.
    #[arg(long)]
    json: bool,
}

fn interval(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(n) if (0.1..=3600.0).contains(&n) => Ok(n),
        _ => Err("0.1 to 3600".into()),
    }
}

/// An operation at one moment.
#[derive(Debug, Clone, PartialEq)]
struct SeenBytes {
    pid: i32,
    operation: String,
    name: String,
    step: String,
    /// Since the operation began, in seconds.
    seconds: f64,
    done: u64,
    /// 0: not known.
    total: u64,
    /// Bytes a second; `None` until it has been looked at twice.
    rate: Option<f64>,
}

impl SeenBytes {
    fn left(&self) -> Option<f64> {
        let rate = self.rate.filter(|r| *r > 0.0)?;
        let left = self
            .total
            .checked_sub(self.done)
            .filter(|_| self.total > 0)?;
        Some(left as f64 / rate)
    }
}

/// Computes rates from one look to the next.
#[derive(Default)]
struct Looks {
    before: BTreeMap<i32, (Instant, u64)>,
}

impl Looks {
    fn look(&mut self, host: &Host) -> Vec<SeenBytes> {
        let running = progress::running(host);
        let now = Instant::now();
        let seen: Vec<SeenBytes> = running
            .into_iter()
            .map(|running| {
                let done = done(host, &running);
                let rate = self.before.get(&running.pid).and_then(|(at, before)| {
                    let passed = (now - *at).as_secs_f64();
                    (passed > 0.0).then(|| done.saturating_sub(*before) as f64 / passed)
                });
                SeenBytes {
                    pid: running.pid,
                    step: step(&running),
                    operation: running.state.operation,
                    name: running.state.name,
                    seconds: since(running.state.began),
                    done,
                    total: running.state.total,
                    rate,
                }
            })
            .chain(kept())
            .collect();
        self.before = seen.iter().map(|s| (s.pid, (now, s.done))).collect();
        seen
    }
}

/// The copies of GPU memory that stay with resumed containers.
fn kept() -> impl Iterator<Item = SeenBytes> {
    let of = |pid| {
        let bytes = Library::spare_bytes(pid);
        (bytes > 0).then(|| SeenBytes {
            pid,
            operation: "suspend".into(),
            name: procfs::comm(pid),
            step: "copy kept".into(),
            seconds: 0.0,
            done: bytes,
            total: 0,
            rate: None,
        })
    };
    procfs::pids().into_iter().filter_map(of)
}

/// Seconds since a time in milliseconds since 1970.
fn since(began: u64) -> f64 {
    let began = SystemTime::UNIX_EPOCH + Duration::from_millis(began);
    began.elapsed().unwrap_or_default().as_secs_f64()
}

/// Bytes that an operation has done: what it says itself, what a checkpoint has written, what a restore has read.
fn done(host: &Host, running: &Running) -> u64 {
    let state = &running.state;
    if let Some(done) = state.done {
        return done;
    }
    match (state.operation.as_str(), &state.images) {
        ("checkpoint", Some(images)) => written(images, state.began),
        _ => {
            let tree = live::tree(host, running.pid);
            let read = tree.iter().filter_map(|pid| read_by(host, *pid));
            read.fold(0, u64::saturating_add).min(state.total)
        }
    }
}

/// Bytes of the files that were written since a time in milliseconds since 1970: a checkpoint may replace an older one.
fn written(images: &Path, began: u64) -> u64 {
    let began = SystemTime::UNIX_EPOCH + Duration::from_millis(began);
    // A place may have another clock than this host: the operation's own file was made before CRIU's.
    let own = fs::metadata(images.join(names::METADATA_PARTIAL)).and_then(|m| m.modified());
    let began = own.unwrap_or(began);
    let files = fs::read_dir(images).into_iter().flatten().flatten();
    let new = files.filter_map(|file| {
        let meta = file.metadata().ok().filter(fs::Metadata::is_file)?;
        (meta.modified().ok()? >= began).then_some(meta.len())
    });
    new.fold(0, u64::saturating_add)
}

/// Bytes that a process has read from files.
fn read_by(host: &Host, pid: i32) -> Option<u64> {
    let io = host.text(format!("/proc/{pid}/io")).ok()?;
    let line = io.lines().find_map(|l| l.strip_prefix("rchar: "))?;
    line.trim().parse().ok()
}

/// The step in words: the driver's, if CRIU's log tells of one, else CRIU's stage.
fn step(running: &Running) -> String {
    let stage = match running.state.step.as_str() {
        "prepare" => "plan",
        "reserve" => "host memory for GPU memory",
        "start" => "CRIU starts",
        "pre-dump" => "freeze, GPU memory",
        "network-lock" => "GPU memory, dump",
        "post-dump" => "writing to the disk",
        "pre-restore" | "setup-namespaces" | "post-setup-namespaces" => "processes are made",
        "post-restore" => "GPU memory",
        "pre-resume" | "post-resume" => "resume",
        other => other,
    };
    let driver = running.state.log.as_deref().and_then(driver_step);
    match driver {
        Some(driver) if running.state.step != "post-dump" => format!("{stage}: {driver} done"),
        _ => stage.to_owned(),
    }
}

/// The last step of the driver in CRIU's log. The plugin writes `process 7: lock in 12 ms`.
fn driver_step(log: &Path) -> Option<String> {
    let mut file = fs::File::open(log).ok()?;
    let length = file.metadata().ok().filter(fs::Metadata::is_file)?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_TAIL)))
        .ok()?;
    let mut text = Vec::new();
    file.take(LOG_TAIL).read_to_end(&mut text).ok()?;
    last_step(&String::from_utf8_lossy(&text))
}

fn last_step(log: &str) -> Option<String> {
    log.lines().rev().find_map(|line| {
        let (_, rest) = line.split_once("process ")?;
        let (pid, rest) = rest.split_once(": ")?;
        let (step, took) = rest.split_once(" in ")?;
        let known = "query lock checkpoint restore unlock vram preload";
        let known = known.split(' ').any(|known| known == step);
        (known && pid.parse::<i32>().is_ok() && took.ends_with(" ms")).then(|| step.to_owned())
    })
}

/// Runs `cryopod top`, and returns its exit code.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let host = Host::system();
    let mut looks = Looks::default();
    let interval = Duration::from_secs_f64(args.interval);
    if args.once || args.json {
        looks.look(&host);
        // A rate needs two looks.
        std::thread::sleep(interval.min(Duration::from_millis(300)));
        let seen = looks.look(&host);
        let text = match args.json {
            true => format!("{:#}\n", json(&seen)),
            false => table(&seen),
        };
        std::io::stdout().lock().write_all(text.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let term = Term::stdout();
    if !std::io::stdout().is_terminal() {
        loop {
            for seen in looks.look(&host) {
                writeln!(std::io::stdout().lock(), "{}", line(&seen))?;
            }
            std::thread::sleep(interval);
        }
    }
    let mut drawn = 0;
    loop {
        let table = table(&looks.look(&host));
        let width = usize::from(term.size().1).max(20);
        term.clear_last_lines(drawn)?;
        let lines: Vec<String> = table
            .lines()
            .map(|l| l.chars().take(width).collect())
            .collect();
        term.write_str(&format!("{}\n", lines.join("\n")))?;
        drawn = lines.len();
        std::thread::sleep(interval);
    }
}

fn cells(seen: &SeenBytes) -> [String; 8] {
    let dash = || "-".to_owned();
    let done = match seen.total {
        0 => bytes(seen.done),
        total => {
            let share = seen.done as f64 * 100.0 / total as f64;
            format!(
                "{} of {} ({:.0} %)",
                bytes(seen.done),
                bytes(total),
                share.min(100.0)
            )
        }
    };
    [
        seen.pid.to_string(),
        plain(&seen.operation),
        shortened(&seen.name, 24),
        shortened(&seen.step, 40),
        format!("{:.1} s", seen.seconds),
        done,
        seen.rate
            .map_or_else(dash, |r| format!("{:.2} GB/s", r / 1e9)),
        seen.left().map_or_else(dash, |s| format!("{s:.0} s")),
    ]
}

fn shortened(text: &str, max: usize) -> String {
    plain(text).chars().take(max).collect()
}

fn table(seen: &[SeenBytes]) -> String {
    if seen.is_empty() {
        return "No checkpoint, restore or transfer of cryopod is running.\n".into();
    }
    let rows: Vec<[String; 8]> = std::iter::once(HEAD.map(str::to_owned))
        .chain(seen.iter().map(cells))
        .collect();
    columns(&rows, &[])
}

/// One line of a log.
fn line(seen: &SeenBytes) -> String {
    let [pid, operation, name, step, time, done, rate, left] = cells(seen);
    let mut text = format!("{operation} of {name} ({pid}): {step}, {time}: {done}");
    if rate != "-" {
        text += &format!(", {rate}");
    }
    if left != "-" {
        text += &format!(", {left} left");
    }
    text
}

fn json(seen: &[SeenBytes]) -> serde_json::Value {
    let list = seen.iter().map(|s| {
        serde_json::json!({
            "pid": s.pid, "operation": s.operation, "name": s.name, "step": s.step, "seconds": s.seconds,
            "done_bytes": s.done, "total_bytes": s.total, "bytes_per_second": s.rate, "seconds_left": s.left(),
        })
    });
    list.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen() -> SeenBytes {
        SeenBytes {
            pid: 7,
            operation: "checkpoint".into(),
            name: "jo\u{1b}[2Jb".into(),
            step: "dump".into(),
            seconds: 2.04,
            done: 1 << 30,
            total: 4 << 30,
            rate: Some(2e9),
        }
    }

    #[test]
    fn a_table_and_lines() {
        let table = table(&[seen()]);
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[0].starts_with("PID  OPERATION   NAME"), "{table}");
        assert!(lines[1].contains("jo?[2Jb"), "{table}");
        assert!(
            lines[1].ends_with("2.0 s  1.0 GiB of 4.0 GiB (25 %)  2.00 GB/s  2 s"),
            "{table}"
        );
        assert_eq!(
            line(&seen()),
            "checkpoint of jo?[2Jb (7): dump, 2.0 s: 1.0 GiB of 4.0 GiB (25 %), 2.00 GB/s, 2 s left"
        );
        let unknown = SeenBytes {
            total: 0,
            rate: None,
            ..seen()
        };
        assert_eq!(unknown.left(), None);
        assert_eq!(
            line(&unknown),
            "checkpoint of jo?[2Jb (7): dump, 2.0 s: 1.0 GiB"
        );
        assert_eq!(json(&[unknown])[0]["seconds_left"], serde_json::Value::Null);
    }

    #[test]
    fn an_older_checkpoint_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("pages-1.img"), [0; 100]).unwrap();
        let old = fs::File::options()
            .append(true)
            .open(dir.path().join("pages-1.img"))
            .unwrap();
        old.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1))
            .unwrap();
        fs::write(dir.path().join("vram-0000.img"), [0; 30]).unwrap();
        assert_eq!(written(dir.path(), 2_000), 30);
        assert_eq!(written(dir.path(), 500), 130);
        assert_eq!(written(Path::new("/nowhere"), 0), 0);
    }

    #[test]
    fn the_drivers_step_in_criu_log() {
        let log = "(00.1) cryopod: process 7: lock in 12 ms\n(00.2) cryopod: process 8: checkpoint in 3 ms\n(00.3) Dumping\n";
        assert_eq!(last_step(log).as_deref(), Some("checkpoint"));
        assert_eq!(
            last_step("process x: lock in 1 ms\nprocess 7: evil in 1 ms\n"),
            None
        );
    }
}
