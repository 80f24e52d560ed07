//! Shows progress, and formats numbers with units.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use cryopod_archive::format::text::hostile;
use cryopod_archive::progress::Progress as Counters;
use cryopod_operations::run::metrics;
use cryopod_operations::run::progress::{OperationProgress, ProgressState};
use indicatif::{ProgressBar, ProgressStyle};

/// Interval between two notes for `cryopod top`.
const TELL: Duration = Duration::from_millis(500);
const DRAW: Duration = Duration::from_millis(100);
/// Interval between lines without a terminal.
const LINE: Duration = Duration::from_secs(10);

/// Runs `work` and shows its progress on standard error: a bar on a terminal, else a line at intervals.
pub fn with_progress<T>(
    what: &str,
    quiet: bool,
    progress: &Arc<Counters>,
    work: impl FnOnce() -> T,
) -> T {
    let (done, waiting) = channel::<()>();
    let watched = Arc::clone(progress);
    let what = what.to_owned();
    let watcher = thread::spawn(move || {
        let mut told = OperationProgress::of_transfer(ProgressState {
            operation: what.clone(),
            name: named(),
            step: "data".into(),
            ..ProgressState::default()
        });
        let mut since_line = Instant::now();
        let bar = match std::io::stderr().is_terminal() && !quiet {
            true => bar(&what),
            false => ProgressBar::hidden(),
        };
        // The bar is also hidden on a terminal that cannot move its cursor: TERM is unset, or `dumb`.
        let terminal = !bar.is_hidden();
        let wait = if terminal { DRAW } else { TELL };
        let start = Instant::now();
        while waiting.recv_timeout(wait) == Err(RecvTimeoutError::Timeout) {
            let (now, total) = (watched.done(), watched.total());
            if let Some(told) = &mut told {
                told.done(now, total);
            }
            if terminal {
                bar.set_length(total.max(now));
                bar.set_position(now);
            } else if !quiet && since_line.elapsed() >= LINE {
                since_line = Instant::now();
                eprintln!("{}", line(&what, now, total, start.elapsed()));
            }
        }
        bar.finish_and_clear();
    });
    let result = work();
    drop(done);
    let _ = watcher.join();
    metrics::bytes("data", progress.done());
    result
}

/// What the command line names: the archive or the container.
fn named() -> String {
    let mut words = std::env::args().skip(2);
    let word = words.find(|w| !w.starts_with('-') || w == "-");
    word.unwrap_or_default()
}

/// The consecutive steps of an operation, and how long each took.
pub struct Steps {
    start: Instant,
    last: Instant,
    done: Vec<(&'static str, Duration)>,
}

impl Steps {
    /// Starts the first step now.
    pub fn new() -> Self {
        let now = Instant::now();
        Self {
            start: now,
            last: now,
            done: Vec::new(),
        }
    }

    /// Ends a step and starts the next.
    pub fn done(&mut self, what: &'static str) {
        let now = Instant::now();
        self.done.push((what, now - self.last));
        self.last = now;
    }

    /// `{"steps":[{"step":...,"seconds":...},...],"seconds":...}`, up to now.
    pub fn json(&self) -> serde_json::Value {
        let seconds = |d: Duration| (d.as_secs_f64() * 1000.0).round() / 1000.0;
        let steps = self.done.iter();
        let steps: Vec<_> = steps
            .map(|(what, took)| serde_json::json!({"step": what, "seconds": seconds(*took)}))
            .collect();
        serde_json::json!({"steps": steps, "seconds": seconds(self.start.elapsed())})
    }
}

fn bar(what: &str) -> ProgressBar {
    let bar = ProgressBar::new(0);
    let style = "{prefix} {wide_bar} {bytes}/{total_bytes}  {bytes_per_sec}  {eta} left";
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar.set_prefix(what.to_owned());
    bar
}

fn line(what: &str, now: u64, total: u64, elapsed: Duration) -> String {
    let rate = (now as f64 / elapsed.as_secs_f64().max(0.001)) as u64;
    let mut text = format!("{what}: {}", bytes(now));
    if total > 0 {
        text.push_str(&format!(" of {}", bytes(total)));
    }
    text.push_str(&format!(", {}/s", bytes(rate)));
    if total > now && rate > 0 {
        text.push_str(&format!(", {} s left", (total - now) / rate));
    }
    text
}

/// Aligns rows in columns, the `right` ones to the right.
pub fn columns<const N: usize>(rows: &[[String; N]], right: &[usize]) -> String {
    let width = |i: usize| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths).enumerate();
        let cells: Vec<String> = cells
            .map(|(i, (cell, width))| match right.contains(&i) {
                true => format!("{cell:>width$}"),
                false => format!("{cell:<width$}"),
            })
            .collect();
        format!("{}\n", cells.join("  ").trim_end())
    };
    rows.iter().map(line).collect()
}

/// `1.5 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let mut value = n as f64 / 1024.0;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// A time in microseconds: `8 ms`, `0.63 s`, `75 s`.
pub fn micros(n: u64) -> String {
    match n {
        0..1_000 => format!("{n} us"),
        1_000..100_000 => format!("{} ms", n / 1_000),
        100_000..10_000_000 => format!("{:.2} s", n as f64 / 1e6),
        _ => format!("{} s", n / 1_000_000),
    }
}

/// How long ago a time was: `8 s`, `75 min`, `3 days`.
pub fn age(time: SystemTime) -> String {
    match time.elapsed().unwrap_or_default().as_secs() {
        s @ 0..120 => format!("{s} s"),
        s @ 120..7_200 => format!("{} min", s / 60),
        s @ 7_200..172_800 => format!("{} h", s / 3_600),
        s => format!("{} days", s / 86_400),
    }
}

/// Makes untrusted text one line that is safe for a terminal.
pub fn plain(text: &str) -> String {
    text.chars()
        .map(|c| if hostile(c) { '?' } else { c })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes((1 << 20) - 1), "1.0 MiB");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(micros(999), "999 us");
        assert_eq!(micros(8_036), "8 ms");
        assert_eq!(micros(628_263), "0.63 s");
        assert_eq!(micros(75_000_000), "75 s");
    }

    #[test]
    fn lines() {
        let second = Duration::from_secs(1);
        assert_eq!(
            line("pack", 1024, 4096, second),
            "pack: 1.0 KiB of 4.0 KiB, 1.0 KiB/s, 3 s left"
        );
        assert_eq!(line("pack", 0, 0, second), "pack: 0 B, 0 B/s");
    }

    #[test]
    fn a_strangers_text_does_nothing() {
        assert_eq!(plain("a\u{1b}[2Jb\u{202e}c\n"), "a?[2Jb?c?");
    }
}
