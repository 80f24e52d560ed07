use cryopod_archive::criu::{DumpStats, ImageFacts, ProcessFacts};
use cryopod_archive::metadata::Gpu;
use cryopod_archive::vram::VramFacts;
use cryopod_host::nodes::Vendor;

use super::super::report::{GpuProcessReport, GpuReport, MetadataFacts};
use super::*;

const MIB: u64 = 1 << 20;
const EVIL: &str = "<script>alert(1)</script>\" onload='x'\u{202e}\u{1b}[2J";

fn gpu(id: &str) -> Gpu {
    Gpu {
        model: format!("model {EVIL}"),
        pci: "0000:65:00.0".into(),
        minor: Some(0),
        memory_bytes: Some(80 << 30),
        ..Gpu::new(Vendor::Nvidia, id)
    }
}

/// A checkpoint whose every text is hostile.
fn report() -> Report {
    let text = || EVIL.to_owned();
    let process = |pid: u32, parent: u32, mib: u64| ProcessFacts {
        pid,
        parent,
        comm: text(),
        state: "running",
        threads: 2,
        memory_bytes: mib * MIB,
    };
    Report {
        path: EVIL.into(),
        kind: "a directory".into(),
        image: None,
        content_bytes: 200 * MIB,
        stored_bytes: 120 * MIB,
        files: Some(3),
        container: cryopod_archive::container::engine::Facts {
            name: Some(text()),
            image: Some(text()),
            pod: Some(text()),
            command: vec![text()],
            ..Default::default()
        },
        metadata: Some(MetadataFacts {
            schema: "1.0".into(),
            cryopod: text(),
            created: text(),
            id: text(),
            low_level: text(),
            leave_running: true,
            kernel: text(),
            arch: text(),
            criu: Some(text()),
            plan_us: 100_000,
            dump_us: 400_000,
            durable_us: Some(650_000),
            pause_us: Some(123_000),
        }),
        store: None,
        gpu: GpuReport {
            drivers: [(text(), text())].into(),
            gpus: vec![gpu(EVIL)],
            nodes: vec![text()],
            processes: vec![GpuProcessReport {
                pid: 2,
                comm: text(),
                vram_bytes: Some(64 * MIB),
                vram_file_bytes: 48 * MIB,
                gpus: vec![text()],
                steps: vec![("lock".into(), 5_000), (text(), 7_000)],
            }],
            vram_bytes: 64 * MIB,
            vram: Some(VramFacts {
                bytes: 48 * MIB,
                stored_bytes: 20 * MIB,
                chunk_bytes: 1 << 20,
                chunks: 48,
                zero: 10,
                parent: 8,
                raw: 30,
                parent_digest: Some(text()),
                ..VramFacts::default()
            }),
            ..GpuReport::default()
        },
        criu: ImageFacts {
            processes: vec![process(1, 0, 30), process(2, 1, 20)],
            memory_bytes: 50 * MIB,
            plugins: vec![text()],
            dump: Some(DumpStats {
                freezing_us: 10_000,
                frozen_us: 300_000,
                memdump_us: 40_000,
                memwrite_us: 30_000,
                ..DumpStats::default()
            }),
            ..ImageFacts::default()
        },
    }
}

#[test]
fn a_hostile_archive_is_only_text() {
    let places = [GpuPlace {
        old: EVIL.into(),
        new: gpu("GPU-new"),
    }];
    let page = html(&report(), &places);
    // The markup that is ours has none of these; the text of the archive has all.
    for bad in ["<script", "</script", "\u{202e}", "\u{1b}", "javascript:"] {
        assert!(!page.contains(bad), "{bad}");
    }
    assert!(page.contains("&lt;script&gt;alert(1)&lt;/script&gt;&quot; onload="));
    // Nothing is loaded: no page, no picture, no font, no style from elsewhere.
    for bad in ["src=", "href=", "url(", "@import", "http:", "https:"] {
        assert!(!page.contains(bad), "{bad}");
    }
    assert!(page.contains("default-src 'none'"));
}

#[test]
fn the_numbers_are_there() {
    let page = html(&report(), &[]);
    for want in [
        // Frozen 310 ms; GPU memory; host memory without what of the GPUs is in CRIU's images.
        "<b>0.31 s</b>",
        "<b>64.0 MiB</b>",
        "<b>34.0 MiB</b>",
        "plan (the container runs): 0.10 s",
        "GPU memory to the disk: 0.25 s",
        "lock: 5 ms",
        "GPU memory that is zero: 10.0 MiB",
        "GPU memory shared with the parent: 8.0 MiB",
        // What is neither, and 16 MiB outside the VRAM files.
        "GPU memory: 46.0 MiB",
    ] {
        assert!(page.contains(want), "{want}:\n{page}");
    }
    assert!(!page.contains("on this host"));
}

#[test]
fn no_bar_leaves_its_track() {
    for (start, length, all) in [(0, 0, 0), (u64::MAX, u64::MAX, 1), (5, 0, 10), (9, 9, 10)] {
        let text = span(start, length, all);
        let number = |name: &str| -> f64 {
            let part = text.split(';').find_map(|p| p.strip_prefix(name));
            part.unwrap().trim_end_matches('%').parse().unwrap()
        };
        let (left, width) = (number("left:"), number("width:"));
        assert!(
            left >= 0.0 && width >= 0.5 && left + width <= 100.01,
            "{text}"
        );
    }
}

#[test]
fn an_archive_of_many_processes_makes_no_endless_page() {
    let mut report = report();
    let one = report.criu.processes[0].clone();
    report.criu.processes = (1..20_000)
        .map(|pid| ProcessFacts { pid, ..one.clone() })
        .collect();
    let page = html(&report, &[]);
    assert!(page.len() < 2 << 20, "{}", page.len());
    assert!(page.contains("18999 more are not drawn."));
}

#[test]
fn a_checkpoint_without_times_and_gpus() {
    let mut report = report();
    report.metadata = None;
    report.gpu = GpuReport::default();
    report.criu.dump = None;
    let page = html(&report, &[]);
    assert!(page.contains("The checkpoint records no times."));
    assert!(page.contains("The checkpoint records no GPUs."));
}
