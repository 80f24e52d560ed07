//! Memory by kind and by process.
//!
//! Without VRAM files CRIU's images hold GPU memory as memory of its process, because the driver has copied it there.

use cryopod_archive::criu::ProcessFacts;
use cryopod_archive::vram::VramFacts;
use maud::{Markup, html};

use super::super::report::Report;
use super::{more, shown, span};
use crate::terminal::ui::bytes;

/// Most processes that are drawn.
const MAX_ROWS: usize = 64;

/// Host and GPU memory, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Split {
    pub host: u64,
    pub gpu: u64,
}

impl Split {
    /// Of the whole checkpoint.
    pub fn of(report: &Report) -> Self {
        let gpu = &report.gpu;
        let in_files = gpu.processes.iter().map(|p| p.vram_file_bytes);
        let in_files = in_files.fold(0, u64::saturating_add);
        let in_pages = gpu.vram_bytes.saturating_sub(in_files);
        Self {
            host: report.criu.memory_bytes.saturating_sub(in_pages),
            gpu: gpu.vram_bytes.max(in_files),
        }
    }
}

/// Of one process.
pub fn of(report: &Report, process: &ProcessFacts) -> Split {
    let gpu = report.gpu.processes.iter().find(|p| p.pid == process.pid);
    let Some(gpu) = gpu else {
        return Split {
            host: process.memory_bytes,
            gpu: 0,
        };
    };
    let used = gpu.vram_bytes.unwrap_or(0).max(gpu.vram_file_bytes);
    let in_pages = used.saturating_sub(gpu.vram_file_bytes);
    Split {
        host: process.memory_bytes.saturating_sub(in_pages),
        gpu: used,
    }
}

/// A kind of memory: its class, its name, its bytes.
type Part = (&'static str, String, u64);

pub fn section(report: &Report) -> Markup {
    let parts = parts(report);
    let all = parts.iter().fold(0, |sum: u64, p| sum.saturating_add(p.2));
    let mut rows: Vec<(&ProcessFacts, Split)> = report
        .criu
        .processes
        .iter()
        .map(|p| (p, of(report, p)))
        .collect();
    rows.sort_by_key(|(_, split)| std::cmp::Reverse(split.host.saturating_add(split.gpu)));
    let largest = rows
        .first()
        .map_or(0, |(_, s)| s.host.saturating_add(s.gpu));
    html! {
        section #memory {
            h2 { "Memory" }
            div.track.kinds {
                @for (at, (class, name, n)) in stacked(&parts).zip(&parts) {
                    @if *n > 0 { div.bar.(class) style=(span(at, *n, all)) title=(format!("{name}: {}", bytes(*n))) {} }
                }
            }
            dl.kinds {
                @for (class, name, n) in &parts {
                    div { dt { i.(class) {} (name) } dd { (bytes(*n)) } }
                }
            }
            @if let Some(vram) = &report.gpu.vram { p.note { (stored(vram)) } }
            h3 { "By process" }
            @for (process, split) in rows.iter().take(MAX_ROWS) {
                div.lane {
                    span.label { (process.pid) " " (shown(&process.comm)) }
                    div.track {
                        div.bar.host style=(span(0, split.host, largest)) title=(format!("host memory: {}", bytes(split.host))) {}
                        @if split.gpu > 0 {
                            div.bar.gpu style=(span(split.host, split.gpu, largest)) title=(format!("GPU memory: {}", bytes(split.gpu))) {}
                        }
                    }
                    span.total { (bytes(split.host.saturating_add(split.gpu))) }
                }
            }
            (more(rows.len(), MAX_ROWS))
        }
    }
}

/// The start of each part, if they follow each other.
fn stacked(parts: &[Part]) -> impl Iterator<Item = u64> {
    parts.iter().scan(0u64, |sum, part| {
        let at = *sum;
        *sum = sum.saturating_add(part.2);
        Some(at)
    })
}

fn parts(report: &Report) -> Vec<Part> {
    let split = Split::of(report);
    let mut parts: Vec<Part> = vec![("host", "Host memory".into(), split.host)];
    match &report.gpu.vram {
        Some(vram) => {
            let of = |chunks: usize| {
                u64::from(vram.chunk_bytes)
                    .saturating_mul(chunks as u64)
                    .min(vram.bytes)
            };
            let (zero, same, parent) = (of(vram.zero), of(vram.same), of(vram.parent));
            let rest = vram
                .bytes
                .saturating_sub(zero)
                .saturating_sub(same)
                .saturating_sub(parent);
            let other = split.gpu.saturating_sub(vram.bytes);
            parts.push(("gpu", "GPU memory".into(), rest.saturating_add(other)));
            parts.push(("zero", "GPU memory that is zero".into(), zero));
            parts.push(("same", "GPU memory that repeats".into(), same));
            parts.push(("parent", "GPU memory shared with the parent".into(), parent));
        }
        None => parts.push(("gpu", "GPU memory".into(), split.gpu)),
    }
    if report.criu.parent_bytes > 0 {
        let name = "Host memory in the parent".into();
        parts.push(("parent", name, report.criu.parent_bytes));
    }
    parts.retain(|(class, _, n)| *n > 0 || *class == "host");
    parts
}

fn stored(vram: &VramFacts) -> String {
    format!(
        "{} of GPU memory are stored as {} in {} files, in chunks of {}.",
        bytes(vram.bytes),
        bytes(vram.stored_bytes),
        vram.shards,
        bytes(vram.chunk_bytes.into())
    )
}
