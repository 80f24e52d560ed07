//! Formats the facts as one HTML page.
//!
//! The page has no scripts, loads nothing, and forbids both by a content security policy. Everything that comes from the
//! archive passes [`ui::plain`](crate::terminal::ui::plain) and maud's escaping: an archive comes from strangers.

pub mod gpus;
mod memory;
mod timeline;

use cryopod_archive::criu::ProcessFacts;
use maud::{DOCTYPE, Markup, PreEscaped, html};

use super::report::Report;
use super::table;
use crate::terminal::ui::{bytes, micros, plain};
use gpus::GpuPlace;

const STYLE: &str = include_str!("page/style.css");
/// Longest text of an archive that is shown at one place, in characters.
const MAX_TEXT: usize = 200;
/// Most processes that are drawn. Real containers have fewer; an archive may claim any number.
const MAX_PROCESSES: usize = 1000;

/// Returns the page. `places`: where the GPUs would go at a restore, if that is known.
pub fn html(report: &Report, places: &[GpuPlace]) -> String {
    let title = format!("Checkpoint of {}", name(report));
    html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy"
                    content="default-src 'none'; style-src 'unsafe-inline'";
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                header {
                    h1 { (title) }
                    p { (subtitle(report)) }
                }
                (tiles(report))
                main {
                    (timeline::section(report))
                    (memory::section(report))
                    (processes(report))
                    (gpus::section(report, places))
                    (facts(report))
                }
                footer { "Made by cryopod " (env!("CARGO_PKG_VERSION")) " inspect --html. The page loads nothing and runs no scripts." }
            }
        }
    }
    .into_string()
}

/// Makes a text of the archive fit to show.
fn shown(text: &str) -> String {
    table::shortened(&plain(text), MAX_TEXT)
}

fn name(report: &Report) -> String {
    let container = &report.container;
    let id = report.metadata.as_ref().map(|m| m.id.as_str());
    let name = container.name.as_deref().or(container.id.as_deref());
    shown(name.or(id).unwrap_or("a container"))
}

fn subtitle(report: &Report) -> String {
    let container = &report.container;
    let made = report.metadata.as_ref().map(|m| m.created.as_str());
    let made = made.or(container.checkpointed.as_deref());
    let parts = [container.image.as_deref(), container.engine, made];
    let parts = parts.into_iter().flatten().map(shown);
    parts.collect::<Vec<_>>().join(" · ")
}

/// The most wanted numbers.
fn tiles(report: &Report) -> Markup {
    let criu = &report.criu;
    let gpu = &report.gpu;
    let mut all: Vec<(String, String, &str)> = Vec::new();
    if let Some(pause) = report.metadata.as_ref().and_then(|m| m.pause_us) {
        all.push((micros(pause), "pause of the application".into(), "pause"));
    }
    if let Some(dump) = &criu.dump {
        let frozen = dump.frozen_us + dump.freezing_us;
        all.push((micros(frozen), "frozen".into(), "frozen"));
    }
    if gpu.vram_bytes > 0 {
        let what = format!("GPU memory on {} GPUs", gpu.gpus.len());
        all.push((bytes(gpu.vram_bytes), what, "gpu"));
    }
    let host = memory::Split::of(report).host;
    all.push((bytes(host), "host memory".into(), "host"));
    let n = criu.processes.len();
    all.push((n.to_string(), "processes".into(), "processes"));
    let stored = format!("stored, of {}", bytes(report.content_bytes));
    all.push((bytes(report.stored_bytes), stored, "stored"));
    html! {
        ul.tiles {
            @for (number, what, id) in &all {
                li id=(format!("tile-{id}")) { b { (number) } span { (what) } }
            }
        }
    }
}

fn processes(report: &Report) -> Markup {
    let list = &report.criu.processes;
    let tree: Vec<(usize, &ProcessFacts)> = table::tree(list);
    html! {
        section #processes {
            h2 { "Processes" }
            @if list.is_empty() {
                p { "The images name no processes. They are those of a pre-dump, or incomplete." }
            } @else {
                div.wide {
                    table {
                        thead { tr {
                            th { "Process" } th.n { "PID" } th.n { "Threads" } th { "State" }
                            th.n { "Host memory" } th.n { "GPU memory" } th.n { "Driver" }
                        } }
                        tbody {
                            @for (depth, process) in tree.iter().take(MAX_PROCESSES) {
                                (row(report, *depth, process))
                            }
                        }
                    }
                }
                (more(list.len(), MAX_PROCESSES))
            }
        }
    }
}

fn row(report: &Report, depth: usize, process: &ProcessFacts) -> Markup {
    let gpu = report.gpu.processes.iter().find(|p| p.pid == process.pid);
    let driver = gpu.map(|g| g.steps.iter().fold(0u64, |sum, s| sum.saturating_add(s.1)));
    let of = memory::of(report, process);
    let dash = || "–".to_owned();
    html! {
        tr {
            td.tree style=(format!("--depth:{depth}")) { @if depth > 0 { span.branch { "└ " } } (shown(&process.comm)) }
            td.n { (process.pid) }
            td.n { (process.threads) }
            td { (process.state) }
            td.n { (bytes(of.host)) }
            td.n { @if of.gpu > 0 { (bytes(of.gpu)) } @else { (dash()) } }
            td.n { (driver.map_or_else(dash, micros)) }
        }
    }
}

fn facts(report: &Report) -> Markup {
    html! {
        section #facts {
            h2 { "Facts" }
            dl {
                @for (name, value) in table::facts(report) {
                    @if !name.is_empty() { dt { (name) } }
                    dd { (value) }
                }
            }
        }
    }
}

/// Says how many rows are not drawn.
fn more(all: usize, max: usize) -> Markup {
    html! { @if all > max { p.note { (all - max) " more are not drawn." } } }
}

/// A bar's place in its track, in percent. Never beyond the track.
fn span(start: u64, length: u64, all: u64) -> String {
    let share = |n: u64| (n as f64 * 100.0 / all.max(1) as f64).min(100.0);
    let left = share(start).min(99.5);
    let width = share(length).clamp(0.5, 100.0 - left);
    format!("left:{left:.2}%;width:{width:.2}%")
}

#[cfg(test)]
mod tests;
