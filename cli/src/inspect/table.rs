//! Formats the facts as a table.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use cryopod_archive::criu::ProcessFacts;
use cryopod_archive::vram::VramFacts;

use super::report::{GpuProcessReport, Report};
use crate::terminal::ui::{bytes, columns, micros, plain};

/// Deepest process tree that is drawn as one.
const MAX_DEPTH: usize = 32;

/// Returns the whole output: the table of facts, then the processes.
pub fn text(report: &Report) -> String {
    let mut out = String::new();
    for (name, value) in facts(report) {
        let _ = writeln!(out, "{name:<12}{value}");
    }
    processes(report, &mut out);
    out
}

/// The rows of the table: a name and its value.
pub fn facts(report: &Report) -> Vec<(&'static str, String)> {
    let mut rows = vec![(
        "Checkpoint",
        format!(
            "{}, {}",
            plain(&report.path.display().to_string()),
            report.kind
        ),
    )];
    if let Some(image) = &report.image {
        rows.push(("Digest", plain(&image.digest)));
    }
    let container = &report.container;
    let id = container
        .id
        .as_ref()
        .or(report.metadata.as_ref().map(|s| &s.id))
        .map(|id| short(id));
    let name = match (&container.name, id) {
        (Some(name), Some(id)) if *name != id => Some(format!("{} ({id})", plain(name))),
        (Some(name), _) => Some(plain(name)),
        (None, id) => id,
    };
    if let Some(name) = name {
        rows.push(("Container", name));
    }
    if let Some(pod) = &container.pod {
        rows.push(("Pod", plain(pod)));
    }
    let mut engine: Vec<String> = container.engine.map(str::to_owned).into_iter().collect();
    engine.extend(container.runtime.as_deref().map(plain));
    if let Some(metadata) = &report.metadata {
        engine.push(format!("over {}", plain(&metadata.low_level)));
    }
    if !engine.is_empty() {
        rows.push(("Engine", engine.join(", ")));
    }
    if let Some(image) = &container.image {
        let id = container
            .image_id
            .as_deref()
            .map(|id| format!(" ({})", short(id)));
        rows.push((
            "Image",
            format!("{}{}", plain(image), id.unwrap_or_default()),
        ));
    }
    if !container.command.is_empty() {
        let command = plain(&container.command.join(" "));
        rows.push(("Command", shortened(&command, 100)));
    }
    rows.push(("Made", made(report)));
    rows.push(("Size", size(report)));
    if let Some(store) = &report.store {
        let (id, was) = (plain(&store.id), plain(&store.store));
        let what = format!("{store} are not in it but in entry {id} of the store {was}");
        rows.push(("Store", what));
    }
    gpus(report, &mut rows);
    criu(report, &mut rows);
    rows
}

fn made(report: &Report) -> String {
    let criu = &report.criu;
    let mut parts = Vec::new();
    match &report.metadata {
        Some(metadata) => {
            parts.push(format!(
                "{} by cryopod {}",
                plain(&metadata.created),
                plain(&metadata.cryopod)
            ));
            if let Some(version) = &metadata.criu {
                parts.push(format!("CRIU {}", plain(version)));
            }
            parts.push(format!("kernel {}", plain(&metadata.kernel)));
            parts.push(plain(&metadata.arch));
            parts.push(
                if metadata.leave_running {
                    "it went on running"
                } else {
                    "it was stopped"
                }
                .into(),
            );
        }
        None => {
            let when = report.container.checkpointed.as_deref().map(plain);
            parts.extend(when);
            parts.push("without cryopod".into());
            parts.extend(criu.arch.map(str::to_owned));
        }
    }
    parts.join(", ")
}

fn size(report: &Report) -> String {
    let (content, stored) = (report.content_bytes, report.stored_bytes);
    let mut text = bytes(content);
    if let Some(files) = report.files {
        let _ = write!(text, " in {files} files");
    }
    if stored != content {
        let ratio = content as f64 / stored.max(1) as f64;
        let _ = write!(text, ", stored as {} (ratio {ratio:.2})", bytes(stored));
    }
    if let Some(image) = &report.image {
        let _ = write!(text, " in {} layers", image.layers);
    }
    text
}

fn vram_row(vram: &VramFacts) -> String {
    let share = |chunks: usize| chunks as f64 * 100.0 / vram.chunks.max(1) as f64;
    let ratio = vram.bytes as f64 / vram.stored_bytes.max(1) as f64;
    let mut text = format!(
        "{} of GPU memory in {} shards of {} (ratio {ratio:.2}), {:.0} % zero",
        bytes(vram.bytes),
        vram.shards,
        bytes(vram.stored_bytes),
        share(vram.zero),
    );
    if vram.same > 0 {
        let _ = write!(text, ", {:.0} % repeated", share(vram.same));
    }
    if vram.parent > 0 {
        let digest = vram.parent_digest.as_deref().unwrap_or("?");
        let digest = shortened(&plain(digest), 16);
        let _ = write!(
            text,
            ", {:.0} % in the checkpoint before it ({digest})",
            share(vram.parent)
        );
    }
    text
}

fn gpus(report: &Report, rows: &mut Vec<(&'static str, String)>) {
    let gpu = &report.gpu;
    if report.metadata.is_none() {
        return;
    }
    let mut parts: Vec<String> = gpu
        .drivers
        .iter()
        .map(|(vendor, version)| format!("{} driver {}", plain(vendor), plain(version)))
        .collect();
    if let Some(v) = gpu.cuda_version {
        parts.push(format!("CUDA {}.{}", v / 1000, v % 1000 / 10));
    }
    if gpu.vram_bytes > 0 {
        parts.push(format!("{} in use", bytes(gpu.vram_bytes)));
    }
    if !gpu.nodes.is_empty() {
        parts.push(shortened(&plain(&gpu.nodes.join(" ")), 80));
    }
    if parts.is_empty() {
        parts.push("none".into());
    }
    rows.push(("GPUs", parts.join(", ")));
    if let Some(vram) = &gpu.vram {
        rows.push(("Vram", vram_row(vram)));
    }
    let by = [
        (gpu.copied.preload, "through the preload library"),
        (gpu.copied.driver, "by the driver"),
    ];
    let by = by.iter().filter(|(copied, _)| *copied > 0);
    let by: Vec<String> = by
        .map(|(copied, who)| format!("{} {who}", bytes(*copied)))
        .collect();
    if !by.is_empty() {
        rows.push(("", format!("copied {}", by.join(", "))));
    }
    for gpu in &gpu.gpus {
        let memory = gpu.memory_bytes.map(|n| format!(", {}", bytes(n)));
        let text = format!(
            "{}: {}, {}{}",
            plain(&gpu.id),
            plain(&gpu.model),
            plain(&gpu.pci),
            memory.unwrap_or_default()
        );
        rows.push(("", text));
    }
}

fn criu(report: &Report, rows: &mut Vec<(&'static str, String)>) {
    let criu = &report.criu;
    let mut memory = bytes(criu.memory_bytes);
    if criu.parent_bytes > 0 {
        let _ = write!(memory, ", {} more in the parent", bytes(criu.parent_bytes));
    }
    let _ = write!(
        memory,
        " in {} processes; {} mounts, {} of them from outside",
        criu.processes.len(),
        criu.mounts,
        criu.external_mounts
    );
    rows.push(("Memory", memory));
    if !criu.files.is_empty() {
        let files: Vec<String> = criu
            .files
            .iter()
            .map(|(kind, n)| format!("{n} {kind}"))
            .collect();
        rows.push(("Open files", files.join(", ")));
    }
    if !criu.plugins.is_empty() {
        rows.push(("Plugins", plain(&criu.plugins.join(", "))));
    }
    if let Some(pause) = report.metadata.as_ref().and_then(|m| m.pause_us) {
        rows.push((
            "Pause",
            format!("the CUDA processes could not work for {}", micros(pause)),
        ));
    }
    if let Some(dump) = &criu.dump {
        rows.push((
            "CRIU dump",
            format!(
                "frozen {}: freezing {}, taking memory {}, writing it {}; {} of {} pages written",
                micros(dump.frozen_us),
                micros(dump.freezing_us),
                micros(dump.memdump_us),
                micros(dump.memwrite_us),
                dump.pages_written,
                dump.pages_scanned
            ),
        ));
    }
    if let Some(restore) = &criu.restore {
        rows.push((
            "CRIU restore",
            format!(
                " {}, processes made in {}; {} pages",
                micros(restore.restore_us),
                micros(restore.forking_us),
                restore.pages_restored
            ),
        ));
    }
}

fn processes(report: &Report, out: &mut String) {
    let list = &report.criu.processes;
    if list.is_empty() {
        return;
    }
    let gpu: BTreeMap<u32, &GpuProcessReport> =
        report.gpu.processes.iter().map(|p| (p.pid, p)).collect();
    let mut rows = vec![
        [
            "PID", "THREADS", "STATE", "MEMORY", "VRAM", "DRIVER", "PROCESS",
        ]
        .map(str::to_owned),
    ];
    for (depth, process) in tree(list) {
        let gpu = gpu.get(&process.pid);
        let vram = gpu.and_then(|g| g.vram_bytes).map_or("-".into(), bytes);
        let driver: Option<u64> =
            gpu.map(|g| g.steps.iter().fold(0u64, |sum, s| sum.saturating_add(s.1)));
        let branch = match depth {
            0 => String::new(),
            n => format!("{}└ ", "  ".repeat(n - 1)),
        };
        rows.push([
            process.pid.to_string(),
            process.threads.to_string(),
            process.state.to_owned(),
            bytes(process.memory_bytes),
            vram,
            driver.map_or("-".into(), micros),
            format!("{branch}{}", plain(&process.comm)),
        ]);
    }
    out.push('\n');
    out.push_str(&columns(&rows, &[0, 1, 3, 4, 5]));
}

/// Returns each process with its depth, children after their parents. The images are untrusted: a process whose parent
/// is missing, or that is its own ancestor, becomes a root.
pub fn tree(list: &[ProcessFacts]) -> Vec<(usize, &ProcessFacts)> {
    let known: BTreeSet<u32> = list.iter().map(|p| p.pid).collect();
    let mut children: BTreeMap<u32, Vec<&ProcessFacts>> = BTreeMap::new();
    let mut pending = Vec::new();
    for process in list.iter().rev() {
        if known.contains(&process.parent) && process.parent != process.pid {
            children.entry(process.parent).or_default().push(process);
        } else {
            pending.push((0, process));
        }
    }
    let mut seen = BTreeSet::new();
    let mut drawn = Vec::new();
    let mut rest = list.iter();
    loop {
        while let Some((depth, process)) = pending.pop() {
            if seen.insert(process.pid) {
                drawn.push((depth, process));
                for child in children.get(&process.pid).into_iter().flatten() {
                    pending.push(((depth + 1).min(MAX_DEPTH), child));
                }
            }
        }
        match rest.find(|p| !seen.contains(&p.pid)) {
            Some(process) => pending.push((0, process)),
            None => return drawn,
        }
    }
}

/// Returns the first twelve digits of an id; other text unchanged.
fn short(id: &str) -> String {
    let digits = id.strip_prefix("sha256:").unwrap_or(id);
    if digits.len() == 64 && digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        digits[..12].to_owned()
    } else {
        shortened(&plain(id), 100)
    }
}

/// Returns at most `max` characters, with dots where some are left out.
pub fn shortened(text: &str, max: usize) -> String {
    if text.chars().count() <= max {
        return text.to_owned();
    }
    let start: String = text.chars().take(max).collect();
    format!("{start}...")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32, parent: u32) -> ProcessFacts {
        ProcessFacts {
            pid,
            parent,
            ..ProcessFacts::default()
        }
    }

    #[test]
    fn trees_also_hostile_ones() {
        let drawn = |pairs: &[(u32, u32)]| -> Vec<(usize, u32)> {
            let list: Vec<ProcessFacts> = pairs.iter().map(|(p, q)| process(*p, *q)).collect();
            tree(&list).iter().map(|(d, p)| (*d, p.pid)).collect()
        };
        assert_eq!(
            drawn(&[(1, 0), (2, 1), (3, 1), (4, 2)]),
            [(0, 1), (1, 2), (2, 4), (1, 3)]
        );
        assert_eq!(drawn(&[(5, 9)]), [(0, 5)]);
        assert_eq!(drawn(&[(1, 1)]), [(0, 1)]);
        assert_eq!(drawn(&[(1, 2), (2, 1)]), [(0, 1), (1, 2)]);
        assert_eq!(drawn(&[]), []);
    }

    #[test]
    fn ids() {
        assert_eq!(short(&"a".repeat(64)), "a".repeat(12));
        assert_eq!(short("job"), "job");
    }
}
