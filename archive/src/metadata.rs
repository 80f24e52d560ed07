//! Reads and writes the metadata, `cryopod.json`: what was checkpointed, with which tools, on which GPUs.
//!
//! The schema is versioned as `MAJOR.MINOR`. A reader takes every minor of the majors it knows: within a major, fields
//! are only added. Fields that this version does not know survive a read and a write (`extra`). A newer major is
//! refused with [`MetadataError::TooNew`], because its meaning is unknown. docs/formats.md describes every field.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use cryopod_host::files::{open_regular, read_bounded_from};
use cryopod_host::nodes::{DeviceNode, Vendor};
use cryopod_host::processes::thread_settings::ThreadGroup;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::container::surroundings::{CriuFacts, LsmFacts, MountFacts};
use crate::format::names;
use crate::vram::VramFacts;

mod slot;
pub use slot::MetadataSlot;

/// The schema major that this version writes, and the newest that it reads.
pub const SCHEMA_MAJOR: u32 = 1;
pub const SCHEMA_MINOR: u32 = 0;
/// Largest metadata that is read, in bytes. Archives come from strangers; normal metadata has a few KiB.
pub const MAX_METADATA_BYTES: u64 = 16 << 20;

/// Advice for a record that cannot be written.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotADirectory => "the image path is not a directory: name another one",
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            "choose an image directory that can be written"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some space or choose another image directory"
        }
        _ => "choose another image directory",
    }
}

#[derive(Debug, thiserror::Error)]
pub enum MetadataError {
    #[error("{path}: cannot read the checkpoint's record: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: cannot write the checkpoint's record: {source}; {}", remedy(.source))]
    Write { path: PathBuf, source: io::Error },
    #[error(
        "{path}: larger than {MAX_METADATA_BYTES} bytes, which no metadata is; the archive is damaged or not a checkpoint of cryopod"
    )]
    TooLarge { path: PathBuf },
    #[error(
        "{path}: not a valid cryopod.json ({reason}); the archive is damaged or was written by another tool"
    )]
    Invalid { path: PathBuf, reason: String },
    /// A newer cryopod wrote the metadata, with a schema that this one does not know.
    #[error(
        "{path}: schema {found} is newer than {SCHEMA_MAJOR}.{SCHEMA_MINOR}, the newest that this cryopod knows; update cryopod on this host"
    )]
    TooNew { path: PathBuf, found: String },
}

/// A node that an earlier restore has put into the container, or moved to another device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MovedNode {
    /// Path inside the container.
    pub path: String,
    /// The node's other name, if this one is kept only for processes that know it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias_of: Option<String>,
    /// The node of the engine's spec that it replaces.
    pub engine: EngineNode,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineNode {
    pub path: String,
    pub major: u64,
    pub minor: u64,
}

/// A GPU as the host describes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Stable identity: NVIDIA's UUID (`GPU-…`), AMD's unique id in hex or, failing that, its PCI address.
    pub id: String,
    pub vendor: Vendor,
    /// Position in the host's list, in PCI order (NVIDIA) or node order (AMD).
    pub index: u32,
    pub model: String,
    /// PCI address, `0000:65:00.0`.
    pub pci: String,
    /// Minor of `/dev/nvidiaN`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub minor: Option<u64>,
    /// Minor of `/dev/dri/renderD*`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub render_minor: Option<u64>,
    /// Size of VRAM in bytes, where it can be read without the driver's library.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    /// Facts of one vendor only (AMD: the KFD node's properties).
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub properties: Map<String, Value>,
}

impl Gpu {
    /// A GPU of which nothing else is known.
    pub fn new(vendor: Vendor, id: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            vendor,
            index: 0,
            model: String::new(),
            pci: String::new(),
            minor: None,
            render_minor: None,
            memory_bytes: None,
            properties: Map::new(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Process id on the host, at the checkpoint.
    pub pid: i32,
    /// Process id inside the container's PID namespace.
    pub ns_pid: i32,
    pub comm: String,
    /// Vendors whose driver it has open or mapped.
    pub vendors: Vec<Vendor>,
    /// The GPU memory it used shortly before the checkpoint, where the driver reports it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpu_memory: Vec<GpuUse>,
}

/// A process's use of one GPU's memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuUse {
    /// [`Gpu::id`].
    pub gpu: String,
    /// Bytes, including what the driver needs for the process.
    pub bytes: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ContainerFacts {
    /// Container id, as the engine named it.
    pub id: String,
    /// Name of the low-level runtime (`crun`, `runc`).
    pub low_level: String,
    /// What the low-level runtime reports as its version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_level_version: Option<String>,
    /// `true` if the container continued to run after the checkpoint.
    pub leave_running: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub threads: Vec<ThreadGroup>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// Kernel release (`uname -r`).
    pub kernel: String,
    /// Machine (`uname -m`).
    pub arch: String,
    /// Cgroup set-up: `v1`, `v2` or `hybrid`.
    pub cgroup: String,
    /// CRIU's version, `4.1.1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub criu: Option<String>,
    /// The CPU's instruction sets for which programs ask, in the kernel's words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cpu: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuFacts {
    /// Vendors of the container's GPU nodes, sorted.
    pub vendors: Vec<Vendor>,
    pub nodes: Vec<DeviceNode>,
    /// Nodes among them that an earlier restore moved.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<MovedNode>,
    /// The GPUs behind these nodes, as the host described them.
    pub gpus: Vec<Gpu>,
    /// Driver versions: key `nvidia` or `amd`.
    #[serde(default)]
    pub drivers: std::collections::BTreeMap<String, String>,
    /// Processes that had the driver open or mapped. Empty: the images hold no GPU state, and a restore needs no
    /// plugin.
    pub processes: Vec<GpuProcess>,
    /// File names of the CRIU plugins at the checkpoint.
    pub plugins: Vec<String>,
    /// What the plugin reported for each process: steps and their times.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub plugin_report: Value,
    /// The VRAM files, if there are any; the digest covers all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vram: Option<VramFacts>,
}

/// Duration of each phase, in microseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    /// From the start of the wrapper until the start of the low-level runtime; the container runs.
    pub plan_us: u64,
    /// From the start of the low-level runtime until CRIU was done; the container is frozen most of that time.
    pub dump_us: u64,
    /// From the start of the low-level runtime until the VRAM files were on disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub durable_us: Option<u64>,
    /// How long the CUDA processes of a container that went on could not work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_us: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Metadata {
    /// `MAJOR.MINOR`.
    pub schema: String,
    /// Version of the cryopod that wrote it.
    pub cryopod: String,
    /// When it was written, in RFC 3339, UTC.
    pub created: String,
    pub container: ContainerFacts,
    pub host: HostFacts,
    pub gpu: GpuFacts,
    /// Mounts that the container's spec does not name.
    #[serde(default)]
    pub mounts: MountFacts,
    #[serde(default)]
    pub criu: CriuFacts,
    #[serde(default)]
    pub lsm: LsmFacts,
    #[serde(default)]
    pub timings: Timings,
    /// Fields of newer minors, kept unchanged.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

impl Metadata {
    /// Returns the schema that this cryopod writes, as MAJOR.MINOR.
    pub fn current_schema() -> String {
        format!("{SCHEMA_MAJOR}.{SCHEMA_MINOR}")
    }

    /// Reads the metadata of an image directory; `None` if the directory has none (a checkpoint of another tool). Fails
    /// with [`MetadataError`] if it exists but is unusable.
    pub fn open(image_dir: &Path) -> Result<Option<Self>, MetadataError> {
        let path = image_dir.join(names::METADATA);
        let read = |source| MetadataError::Read {
            path: path.clone(),
            source,
        };
        let file = match open_regular(&path) {
            Ok(f) => f,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                let reason = e.to_string();
                return Err(MetadataError::Invalid { path, reason });
            }
            Err(e) => return Err(read(e)),
        };
        let mut text = Vec::new();
        file.take(MAX_METADATA_BYTES + 1)
            .read_to_end(&mut text)
            .map_err(read)?;
        if text.len() as u64 > MAX_METADATA_BYTES {
            return Err(MetadataError::TooLarge { path });
        }
        Self::parse(&text, &path).map(Some)
    }

    /// Returns the metadata of an image directory for other VRAM files. All else stays, also what this version does not know.
    pub fn with_vram(image_dir: &Path, facts: &VramFacts) -> io::Result<Value> {
        let file = open_regular(&image_dir.join(names::METADATA))?;
        let mut value: Value =
            serde_json::from_slice(&read_bounded_from(file, MAX_METADATA_BYTES)?)?;
        value["gpu"]["vram"] = serde_json::to_value(facts)?;
        Ok(value)
    }

    /// Parses metadata; `path` only appears in errors.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self, MetadataError> {
        let invalid = |reason: String| MetadataError::Invalid {
            path: path.to_owned(),
            reason,
        };
        // The version comes first: a newer major may have changed any other field.
        let value: Value = serde_json::from_slice(text).map_err(|e| invalid(e.to_string()))?;
        let schema = value
            .get("schema")
            .and_then(Value::as_str)
            .ok_or_else(|| invalid("no `schema`".into()))?;
        let numbers = schema
            .split_once('.')
            .and_then(|(a, b)| Some((a.parse::<u32>().ok()?, b.parse::<u32>().ok()?)));
        let too_new = || MetadataError::TooNew {
            path: path.to_owned(),
            found: schema.chars().take(40).collect(),
        };
        match numbers {
            None => return Err(invalid(format!("`schema` is {schema:?}, not MAJOR.MINOR"))),
            Some((major, _)) if major > SCHEMA_MAJOR => return Err(too_new()),
            Some((0, _)) => return Err(invalid("`schema` 0 was never released".into())),
            Some(_) => {}
        }
        Self::deserialize(&value).map_err(|e| match numbers {
            // A field may have a value that this version does not know.
            Some(schema) if schema > (SCHEMA_MAJOR, SCHEMA_MINOR) => too_new(),
            _ => invalid(e.to_string()),
        })
    }
}

#[cfg(test)]
mod tests;
