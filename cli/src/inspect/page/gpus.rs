//! The GPUs of a checkpoint, and where they would go on this host.

use anyhow::bail;
use cryopod_archive::metadata::Gpu;
use cryopod_gpu_plan::gpus::inventory;
use cryopod_gpu_plan::mapping::gpumap::{self, Situation, Wish};
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use maud::{Markup, html};

use super::super::report::Report;
use super::{more, shown};
use crate::terminal::ui::bytes;

/// Most GPUs that are drawn.
const MAX_GPUS: usize = 256;

/// Where a GPU of the checkpoint would go.
pub struct GpuPlace {
    /// [`Gpu::id`] at the checkpoint.
    pub old: String,
    pub new: Gpu,
}

/// The GPUs of this host.
pub fn here() -> Vec<Gpu> {
    let host = Host::system();
    let vendors = [Vendor::Nvidia, Vendor::Amd].into_iter();
    vendors.flat_map(|v| inventory::here(&host, v)).collect()
}

/// Decides where the GPUs would go among those `here`, as a restore does. Fails with every reason why they cannot.
pub fn places(recorded: &[Gpu], here: &[Gpu], wish: &Wish) -> anyhow::Result<Vec<GpuPlace>> {
    let of_kind = |gpu: &&Gpu| recorded.iter().any(|r| r.vendor == gpu.vendor);
    let situation = Situation {
        recorded: recorded.to_vec(),
        here: here.iter().filter(of_kind).cloned().collect(),
        wished_by: "--map",
        ..Situation::default()
    };
    let chosen = match gpumap::decide(&situation, wish) {
        Ok(chosen) => chosen,
        Err(refusals) => {
            let reasons: Vec<String> = refusals.iter().map(ToString::to_string).collect();
            bail!("{}", reasons.join(" | "));
        }
    };
    let places = chosen.into_iter().map(|choice| GpuPlace {
        old: choice.old.id,
        new: choice.new,
    });
    Ok(places.collect())
}

pub fn section(report: &Report, places: &[GpuPlace]) -> Markup {
    let gpu = &report.gpu;
    html! {
        section #gpus {
            h2 { "GPUs" }
            @if gpu.gpus.is_empty() {
                p { "The checkpoint records no GPUs." }
            }
            @for (n, one) in gpu.gpus.iter().take(MAX_GPUS).enumerate() {
                div.gpu-row {
                    div.card {
                        span.note { "GPU " (n) " at the checkpoint" }
                        (card(one))
                        @let users = users(report, one);
                        @if !users.is_empty() { p { "Used by " (users) } }
                    }
                    @if let Some(place) = places.iter().find(|p| p.old == one.id) {
                        span.arrow aria-label="goes to" { "→" }
                        div.card {
                            span.note { "on this host" @if place.new.id == one.id { ": the same" } }
                            (card(&place.new))
                        }
                    }
                }
            }
            (more(gpu.gpus.len(), MAX_GPUS))
            @if !gpu.moved.is_empty() {
                h3 { "Moved by an earlier restore" }
                ul {
                    @for node in gpu.moved.iter().take(MAX_GPUS) {
                        li { code { (shown(&node.path)) } " takes the place of the engine's " code { (shown(&node.engine.path)) } }
                    }
                }
            }
            @if !gpu.nodes.is_empty() {
                p.note { "Nodes in the container: " (shown(&gpu.nodes.join(" "))) }
            }
        }
    }
}

fn card(gpu: &Gpu) -> Markup {
    html! {
        b { (shown(&gpu.model)) }
        p { @if let Some(n) = gpu.memory_bytes { (bytes(n)) ", " } (shown(&gpu.pci)) }
        p { code { (shown(&gpu.id)) } }
    }
}

fn users(report: &Report, gpu: &Gpu) -> String {
    let users = report.gpu.processes.iter();
    let users = users.filter(|p| p.gpus.contains(&gpu.id));
    let names: Vec<String> = users
        .take(16)
        .map(|p| format!("{} {}", p.pid, shown(&p.comm)))
        .collect();
    names.join(", ")
}
