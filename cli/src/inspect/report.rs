//! Collects the facts of a checkpoint from all of its records.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use cryopod_archive::Error;
use cryopod_archive::error::Bad;
use cryopod_archive::format::limits::Limits;
use cryopod_archive::format::oci::annotation;
use cryopod_archive::metadata::{Gpu, Metadata, MovedNode};
use cryopod_archive::source::Source;
use cryopod_archive::store::Reference;
use cryopod_archive::vram::VramFacts;
use cryopod_archive::{container::engine, criu, format::names};
use cryopod_cuda::gpus::gpu::GpuUuid;
use cryopod_cuda::messages::image::NvidiaImage;
use cryopod_host::nodes::Vendor;
use serde::{Deserialize, Serialize};

/// containerd's record of a container, as [`Source`] names it.
const CONTAINERD_RECORD: &str = "containerd/checkpoint.config.v1+proto";

/// The output of `inspect`.
#[derive(Debug, Serialize)]
pub struct Report {
    pub path: PathBuf,
    pub kind: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageFacts>,
    pub content_bytes: u64,
    pub stored_bytes: u64,
    /// Number of files, if all were read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub files: Option<u64>,
    pub container: engine::Facts,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<MetadataFacts>,
    /// The large files in a store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<Reference>,
    pub gpu: GpuReport,
    pub criu: criu::ImageFacts,
}

#[derive(Debug, Serialize)]
pub struct ImageFacts {
    /// Digest of the manifest.
    pub digest: String,
    /// Its name in the layout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub layers: usize,
    pub annotations: BTreeMap<String, String>,
}

/// The metadata without its GPU part.
#[derive(Debug, Serialize)]
pub struct MetadataFacts {
    pub schema: String,
    pub cryopod: String,
    /// RFC 3339, UTC.
    pub created: String,
    pub id: String,
    /// `crun` or `runc`.
    pub low_level: String,
    pub leave_running: bool,
    pub kernel: String,
    pub arch: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub criu: Option<String>,
    /// From the start of the wrapper to that of the low-level runtime, in microseconds.
    pub plan_us: u64,
    /// From there until the images were complete, in microseconds.
    pub dump_us: u64,
    /// From there until the VRAM files were on the disk, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub durable_us: Option<u64>,
    /// How long the CUDA processes of a container that went on could not work, in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
}

#[derive(Debug, Default, Serialize)]
pub struct GpuReport {
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub drivers: BTreeMap<String, String>,
    /// NVIDIA's CUDA driver version: 13000 is 13.0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cuda_version: Option<u64>,
    /// The GPUs behind the container's nodes.
    pub gpus: Vec<Gpu>,
    pub nodes: Vec<String>,
    /// Nodes that an earlier restore moved to another GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<MovedNode>,
    pub processes: Vec<GpuProcessReport>,
    /// GPU memory of all processes, in bytes.
    pub vram_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vram: Option<VramFacts>,
    /// How the GPU memory in VRAM files came there.
    pub copied: Copied,
}

/// Bytes of GPU memory by who copied them at the checkpoint.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Copied {
    /// The driver agent, through the preload library.
    pub preload: u64,
    /// The driver.
    pub driver: u64,
}

/// A process that uses a GPU driver.
#[derive(Debug, Default, Serialize)]
pub struct GpuProcessReport {
    pub pid: u32,
    pub comm: String,
    /// GPU memory in bytes, if the plugin could tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vram_bytes: Option<u64>,
    /// GPU memory in VRAM files, in bytes. The rest is in CRIU's images, as memory of the process.
    #[serde(skip_serializing_if = "is_zero")]
    pub vram_file_bytes: u64,
    /// Its GPUs, if the plugin could tell.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<String>,
    /// The driver's steps, in microseconds.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<(String, u64)>,
}

fn is_zero(n: &u64) -> bool {
    *n == 0
}

/// Collects the facts of a checkpoint. Fails if one of its records cannot be read.
pub fn of(source: &Source) -> anyhow::Result<Report> {
    let gathered = gather(source)?;
    let path = source.path();
    let named = || path.display().to_string();
    let mut container = engine::read(&gathered.small).with_context(named)?;
    if let Some(record) = gathered.small.get(CONTAINERD_RECORD) {
        let annotations = source
            .containerd()
            .map(|parts| parts.index.annotations.clone());
        container =
            engine::read_containerd(CONTAINERD_RECORD, record, &annotations.unwrap_or_default())
                .with_context(named)?;
    }
    let store = match gathered.small.get(names::STORE_REFERENCE) {
        Some(text) => Some(Reference::parse(text, &path.join(names::STORE_REFERENCE))?),
        None => None,
    };
    let away = store.as_ref().map_or(0, Reference::pages_bytes);
    let pages_bytes = gathered.pages_bytes.saturating_add(away);
    let criu = criu::read(&gathered.criu, pages_bytes).with_context(named)?;
    let metadata = match gathered.small.get(names::METADATA) {
        Some(text) => Some(Metadata::parse(text, Path::new(names::METADATA)).with_context(named)?),
        None => None,
    };
    Ok(Report {
        path: path.into(),
        kind: source.kind().to_string(),
        image: source.image().map(|image| ImageFacts {
            digest: image.digest.to_string(),
            name: image.name.clone(),
            layers: image.manifest.layers.len(),
            annotations: image.manifest.annotations.clone(),
        }),
        content_bytes: gathered.content_bytes,
        stored_bytes: source.stored_bytes()?,
        files: gathered.files,
        container,
        store,
        gpu: metadata.as_ref().map(gpu_facts).unwrap_or_default(),
        metadata: metadata.map(metadata_facts),
        criu,
    })
}

/// The small files, sorted by use.
#[derive(Default)]
struct Gathered {
    /// The engine's records and cryopod's, by name.
    small: BTreeMap<String, Vec<u8>>,
    /// CRIU's images, by name without directory.
    criu: BTreeMap<String, Vec<u8>>,
    pages_bytes: u64,
    content_bytes: u64,
    files: Option<u64>,
}

enum MemoryPlace<'a> {
    Small(&'a str),
    Criu(&'a str),
}

/// Returns the use of a file; `None` if it is not read.
fn place(name: &str) -> Option<MemoryPlace<'_>> {
    if engine::FILES.contains(&name) || name == CONTAINERD_RECORD {
        return Some(MemoryPlace::Small(name));
    }
    let inner = name
        .strip_prefix(names::CHECKPOINT_DIR)
        .and_then(|rest| rest.strip_prefix('/'));
    match inner {
        Some(names::METADATA) => Some(MemoryPlace::Small(names::METADATA)),
        Some(names::STORE_REFERENCE) => Some(MemoryPlace::Small(names::STORE_REFERENCE)),
        Some(image) if criu::is_wanted(image) => Some(MemoryPlace::Criu(image)),
        None if name == names::STATS_DUMP => Some(MemoryPlace::Criu(name)),
        _ => None,
    }
}

impl Gathered {
    fn take(&mut self, name: &str, content: Vec<u8>) {
        match place(name) {
            Some(MemoryPlace::Small(name)) => self.small.insert(name.into(), content),
            Some(MemoryPlace::Criu(name)) => self.criu.insert(name.into(), content),
            None => None,
        };
    }
}

fn gather(source: &Source) -> Result<Gathered, Error> {
    let limits = Limits::default();
    let mut gathered = Gathered::default();
    // The image states its size: only the layers with small files need reading.
    let stated = source.image().and_then(|image| {
        let text = image.manifest.annotations.get(annotation::CONTENT_BYTES)?;
        text.parse().ok()
    });
    if let Some(content_bytes) = stated {
        gathered.content_bytes = content_bytes;
        for (name, content) in source.small_files(&|name| place(name).is_some(), &limits)? {
            gathered.take(&name, content);
        }
        return Ok(gathered);
    }
    let (mut files, mut held) = (0, 0);
    source.visit(&limits, &mut |entry, reader| {
        if !entry.is_file() {
            return Ok(());
        }
        files += 1;
        gathered.content_bytes = gathered.content_bytes.saturating_add(entry.size);
        if is_pages(&entry.name) {
            gathered.pages_bytes = gathered.pages_bytes.saturating_add(entry.size);
        }
        if place(&entry.name).is_none() {
            return Ok(());
        }
        held += entry.size;
        let bad = if entry.size > limits.small_file_bytes {
            Some(Bad::SmallFileTooLarge {
                name: entry.name.clone(),
                bytes: entry.size,
                max: limits.small_file_bytes,
            })
        } else if held > limits.small_total_bytes {
            Some(Bad::SmallFilesTooLarge(limits.small_total_bytes))
        } else {
            None
        };
        if let Some(bad) = bad {
            return Err(Error::bad(source.path(), bad));
        }
        let mut content = Vec::new();
        reader
            .read_to_end(&mut content)
            .map_err(|e| Error::from_io(source.path(), "read it", e))?;
        gathered.take(&entry.name, content);
        Ok(())
    })?;
    gathered.files = Some(files);
    Ok(gathered)
}

fn is_pages(name: &str) -> bool {
    name.rsplit('/')
        .next()
        .is_some_and(|n| n.starts_with("pages-") && n.ends_with(".img"))
}

fn metadata_facts(metadata: Metadata) -> MetadataFacts {
    MetadataFacts {
        schema: metadata.schema,
        cryopod: metadata.cryopod,
        created: metadata.created,
        id: metadata.container.id,
        low_level: metadata.container.low_level,
        leave_running: metadata.container.leave_running,
        kernel: metadata.host.kernel,
        arch: metadata.host.arch,
        criu: metadata.host.criu,
        plan_us: metadata.timings.plan_us,
        dump_us: metadata.timings.dump_us,
        durable_us: metadata.timings.durable_us,
        pause_us: metadata.timings.pause_us,
    }
}

fn gpu_facts(metadata: &Metadata) -> GpuReport {
    let report = NvidiaImage::deserialize(&metadata.gpu.plugin_report).ok();
    let records = report.as_ref().map_or(&[][..], |r| &r.processes);
    let processes: Vec<GpuProcessReport> = metadata
        .gpu
        .processes
        .iter()
        .map(|process| {
            let own = records
                .iter()
                .find(|r| r.ns_pids.last() == Some(&process.ns_pid));
            let gpus = own.map(|r| r.gpus.iter().map(GpuUuid::to_string).collect());
            GpuProcessReport {
                pid: u32::try_from(process.ns_pid).unwrap_or(0),
                comm: process.comm.clone(),
                vram_bytes: own
                    .and_then(|r| r.vram_bytes)
                    .or_else(|| of_buffers(process)),
                vram_file_bytes: own.map_or(0, |r| sum(r.vram.iter().map(|b| b.bytes))),
                gpus: gpus
                    .filter(|g: &Vec<String>| !g.is_empty())
                    .unwrap_or_else(|| {
                        let used = process.gpu_memory.iter();
                        used.map(|part| part.gpu.clone()).collect()
                    }),
                steps: own
                    .into_iter()
                    .flat_map(|r| &r.steps)
                    .map(|s| (s.step.to_string(), s.micros))
                    .collect(),
            }
        })
        .collect();
    let copied = |preload| {
        let buffers = records.iter().flat_map(|r| &r.vram);
        sum(buffers.filter(|b| b.preload == preload).map(|b| b.bytes))
    };
    GpuReport {
        drivers: metadata.gpu.drivers.clone(),
        cuda_version: report
            .as_ref()
            .and_then(|r| u64::try_from(r.cuda_version).ok()),
        gpus: metadata.gpu.gpus.clone(),
        nodes: metadata.gpu.nodes.iter().map(|n| n.path.clone()).collect(),
        moved: metadata.gpu.moved.clone(),
        vram: metadata.gpu.vram.clone(),
        copied: Copied {
            preload: copied(true),
            driver: copied(false),
        },
        vram_bytes: sum(processes.iter().filter_map(|p| p.vram_bytes)),
        processes,
    }
}

/// An archive may come from anyone: its numbers may overflow.
fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

/// What an AMD process's buffers hold, which is what CRIU's plugin has saved.
fn of_buffers(process: &cryopod_archive::metadata::GpuProcess) -> Option<u64> {
    let used = process.vendors.contains(&Vendor::Amd) && !process.gpu_memory.is_empty();
    used.then(|| sum(process.gpu_memory.iter().map(|u| u.bytes)))
}
