//! The timeline of a checkpoint, by step and process.
//!
//! A checkpoint records when the plan, the dump and the writing of GPU memory began and ended, and how long CRIU and the
//! driver took for each of their steps. It does not record when these began. Here the driver's steps follow each other:
//! the plugin takes each step in all processes at once, and goes on when the last of them is done. CRIU freezes at the
//! start of the frozen time, and writes memory at its end. A plan that took much longer than the dump is drawn shortened.

use maud::{Markup, html};

use super::super::report::{GpuProcessReport, Report};
use super::{more, shown, span};
use crate::terminal::ui::micros;

/// Most processes that are drawn.
const MAX_ROWS: usize = 64;

/// A step on a row, in microseconds since the start of the wrapper.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Bar {
    step: String,
    start: u64,
    length: u64,
}

impl Bar {
    fn new(step: &str, start: u64, length: u64) -> Self {
        let step = step.to_owned();
        Self {
            step,
            start,
            length,
        }
    }

    fn end(&self) -> u64 {
        self.start.saturating_add(self.length)
    }
}

struct Row {
    name: String,
    bars: Vec<Bar>,
}

pub fn section(report: &Report) -> Markup {
    let rows = rows(report);
    let end = rows.iter().flat_map(|r| &r.bars).map(Bar::end).max();
    let Some(end) = end.filter(|end| *end > 0) else {
        return html! {
            section #timeline { h2 { "Timeline" } p { "The checkpoint records no times." } }
        };
    };
    let mut steps: Vec<&str> = Vec::new();
    for bar in rows.iter().flat_map(|r| &r.bars) {
        if !steps.contains(&bar.step.as_str()) && class(&bar.step) != "other" {
            steps.push(&bar.step);
        }
    }
    let origin = origin(report, end);
    let all = end - origin;
    html! {
        section #timeline {
            h2 { "Timeline" }
            ul.legend { @for step in steps { li { i class=(class(step)) {} (words(step)) } } }
            @for row in rows.iter().take(MAX_ROWS) {
                div.lane {
                    span.label { (row.name) }
                    div.track {
                        @for bar in &row.bars {
                            div.bar.(class(&bar.step)) style=(place(bar, origin, all))
                                title=(format!("{}: {}", words(&bar.step), micros(bar.length))) {}
                        }
                    }
                    span.total { (told(&row.bars)) }
                }
            }
            div.lane.axis {
                span.label {}
                div.track { @for quarter in 0..=4u64 { span { (micros(origin.saturating_add(all / 4 * quarter))) } } }
                span.total {}
            }
            (more(rows.len(), MAX_ROWS))
            p.note { "Lengths are as recorded. Inside the dump the checkpoint records no starting times: a step of the driver is drawn after the one before it ended in all processes." @if origin > 0 { " The plan is drawn shortened." } }
        }
    }
}

/// Where the drawing begins: a quarter of the rest's length ahead of the dump, or at the start of the plan.
fn origin(report: &Report, end: u64) -> u64 {
    let plan = report.metadata.as_ref().map_or(0, |m| m.plan_us);
    plan.saturating_sub(end.saturating_sub(plan) / 4)
}

fn place(bar: &Bar, origin: u64, all: u64) -> String {
    let start = bar.start.max(origin);
    span(start - origin, bar.end().saturating_sub(start), all)
}

fn rows(report: &Report) -> Vec<Row> {
    let mut rows = Vec::new();
    let (mut start, mut end) = (0, None);
    if let Some(metadata) = &report.metadata {
        let (plan, dump) = (metadata.plan_us, metadata.dump_us);
        start = plan;
        end = Some(plan.saturating_add(dump));
        let mut bars = vec![Bar::new("plan", 0, plan), Bar::new("dump", plan, dump)];
        // What of the writing outlasts the dump.
        let late = metadata.durable_us.unwrap_or(0).saturating_sub(dump);
        if late > 0 {
            bars.push(Bar::new("durable", plan.saturating_add(dump), late));
        }
        rows.push(Row {
            name: "cryopod".into(),
            bars,
        });
    }
    if let Some(dump) = &report.criu.dump {
        let (freezing, frozen) = (dump.freezing_us, dump.frozen_us);
        let (taking, writing) = (dump.memdump_us, dump.memwrite_us);
        let end = end.unwrap_or(freezing + frozen);
        let frozen_at = end.saturating_sub(frozen).max(start);
        let freeze_at = frozen_at.saturating_sub(freezing).max(start);
        start = freeze_at;
        let write_at = end.saturating_sub(writing).max(start);
        rows.push(Row {
            name: "CRIU".into(),
            bars: vec![
                Bar::new("freeze", freeze_at, freezing),
                Bar::new("frozen", frozen_at, frozen),
                Bar::new("memory", write_at.saturating_sub(taking).max(start), taking),
                Bar::new("write", write_at, writing),
            ],
        });
    }
    let processes = &report.gpu.processes;
    let laid = lay(processes, start);
    for (process, bars) in processes.iter().zip(laid) {
        if !bars.is_empty() {
            rows.push(Row {
                name: format!("{} {}", process.pid, shown(&process.comm)),
                bars,
            });
        }
    }
    rows
}

/// Lays the steps of all processes one after the other: the n-th step begins when the one before it has ended everywhere.
fn lay(processes: &[GpuProcessReport], mut start: u64) -> Vec<Vec<Bar>> {
    let mut bars: Vec<Vec<Bar>> = vec![Vec::new(); processes.len()];
    let most = processes.iter().map(|p| p.steps.len()).max().unwrap_or(0);
    for n in 0..most.min(MAX_ROWS) {
        let mut end = start;
        for (process, bars) in processes.iter().zip(&mut bars) {
            if let Some((step, length)) = process.steps.get(n) {
                let bar = Bar::new(step, start, *length);
                end = end.max(bar.end());
                bars.push(bar);
            }
        }
        start = end;
    }
    bars
}

fn told(bars: &[Bar]) -> String {
    let longest = bars.iter().filter(|b| b.step != "plan");
    match longest.max_by_key(|b| b.length) {
        Some(bar) => format!("{} {}", words(&bar.step), micros(bar.length)),
        None => String::new(),
    }
}

/// The style of a step. A step that an archive made up has none of its own.
fn class(step: &str) -> &'static str {
    const KNOWN: &str = "plan dump durable freeze frozen memory write query lock checkpoint vram preload restore unlock";
    let mut known = KNOWN.split(' ');
    known.find(|known| *known == step).unwrap_or("other")
}

fn words(step: &str) -> String {
    match step {
        "plan" => "plan (the container runs)".into(),
        "durable" => "GPU memory to the disk".into(),
        "memory" => "taking memory".into(),
        "write" => "writing memory".into(),
        "checkpoint" => "driver's checkpoint".into(),
        "vram" => "VRAM files".into(),
        other => shown(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(steps: &[(&str, u64)]) -> GpuProcessReport {
        let steps = steps.iter().map(|(name, n)| ((*name).to_owned(), *n));
        GpuProcessReport {
            steps: steps.collect(),
            ..GpuProcessReport::default()
        }
    }

    #[test]
    fn a_step_begins_when_the_one_before_it_has_ended_everywhere() {
        let processes = [
            process(&[("lock", 10), ("checkpoint", 5)]),
            process(&[("lock", 30), ("checkpoint", 7), ("vram", 1)]),
        ];
        let starts: Vec<Vec<u64>> = lay(&processes, 100)
            .iter()
            .map(|bars| bars.iter().map(|b| b.start).collect())
            .collect();
        assert_eq!(starts, [vec![100, 130], vec![100, 130, 137]]);
        // An archive may claim any number.
        let huge = [process(&[("lock", u64::MAX), ("checkpoint", u64::MAX)])];
        assert_eq!(lay(&huge, 1)[0][1].end(), u64::MAX);
    }
}
