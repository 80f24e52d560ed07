//! Reads and writes `cryopod-nvidia.img`, which the plugin leaves in CRIU's image directory for the restore.
//!
//! JSON, versioned. It travels with the checkpoint and may come from anyone: size, counts, pids and paths are checked,
//! and paths can only name NVIDIA device nodes.

use std::collections::BTreeMap;

use super::buffers::VramBuffer;
use crate::gpus::gpu::GpuUuid;
use crate::messages::protocol::ProcessState;
use serde::{Deserialize, Serialize};

pub const FILE_NAME: &str = cryopod_archive::format::names::NVIDIA_IMAGE;
/// The version written without VRAM files: an older plugin can restore it.
pub const VERSION: u32 = 1;
pub const VRAM_VERSION: u32 = 2;
/// The version written where a process has inherited mappings of device nodes.
pub const MAPS_VERSION: u32 = 3;
/// The version written where GPU memory was taken out by the preload library, and the newest read. The next one is 6: images
/// of a version 5 were written for a while, and are read by nobody.
pub const PRELOAD_VERSION: u32 = 4;
pub const MAX_BYTES: u64 = 16 << 20;

const MAX_PROCESSES: usize = 1 << 16;
const MAX_FILES: usize = 1 << 16;
const MAX_PATH: usize = 256;
const MAX_VRAM: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NvidiaImage {
    pub version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_version: Option<String>,
    /// `cuDriverGetVersion` at checkpoint; 0 when no driver was asked.
    #[serde(default)]
    pub cuda_version: i32,
    pub processes: Vec<ProcessRecord>,
    /// Open device files that the driver did not close.
    #[serde(default)]
    pub files: Vec<FileRecord>,
    /// Number of mappings of device nodes in processes that do not use CUDA: a child has them from the CUDA process
    /// that forked it. They are not kept.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub inherited_maps: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    /// Its pid in the PID namespace of the dump's root process, then in each namespace nested below that one.
    pub ns_pids: Vec<i32>,
    pub host_pid: i32,
    pub comm: String,
    /// The state it was found in, and is brought back to: running, locked or checkpointed.
    pub initial_state: ProcessState,
    /// The GPUs whose device nodes it had open, where known.
    #[serde(default)]
    pub gpus: Vec<GpuUuid>,
    /// Bytes by which the process's memory grew in the driver's checkpoint: closely its GPU memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vram_bytes: Option<u64>,
    /// Its GPU memory in VRAM files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub vram: Vec<VramBuffer>,
    #[serde(default)]
    pub steps: Vec<StepTiming>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepTiming {
    pub step: Step,
    pub micros: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Step {
    Query,
    Lock,
    Checkpoint,
    Restore,
    Unlock,
    /// Memory for the VRAM files, and its removal from the process.
    Vram,
    /// The preload library: GPU memory copied out of the process, or back.
    Preload,
}

impl Step {
    pub fn name(self) -> &'static str {
        match self {
            Self::Query => "query",
            Self::Lock => "lock",
            Self::Checkpoint => "checkpoint",
            Self::Restore => "restore",
            Self::Unlock => "unlock",
            Self::Vram => "vram",
            Self::Preload => "preload",
        }
    }
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    pub id: i32,
    pub path: String,
    pub flags: i32,
    #[serde(default)]
    pub pos: i64,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // serde's signature
fn is_zero(n: &u64) -> bool {
    *n == 0
}

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("{FILE_NAME} is damaged: {0}")]
    Json(#[from] serde_json::Error),
    #[error(
        "{FILE_NAME} has version {0}, and this cryopod reads versions up to {PRELOAD_VERSION}: update cryopod here"
    )]
    Version(u32),
    #[error("{FILE_NAME} is invalid: {0}")]
    Invalid(String),
}

impl Default for NvidiaImage {
    fn default() -> Self {
        Self {
            version: VERSION,
            driver_version: None,
            cuda_version: 0,
            processes: Vec::new(),
            files: Vec::new(),
            inherited_maps: 0,
        }
    }
}

impl NvidiaImage {
    /// Returns how long each step took, in microseconds, in the process that was slowest at it.
    pub fn slowest(&self) -> BTreeMap<&'static str, u64> {
        let mut all = BTreeMap::new();
        for process in &self.processes {
            let mut own: BTreeMap<&str, u64> = BTreeMap::new();
            for timing in &process.steps {
                let sum = own.entry(timing.step.name()).or_default();
                *sum = sum.saturating_add(timing.micros);
            }
            for (step, micros) in own {
                let most = all.entry(step).or_insert(0);
                *most = micros.max(*most);
            }
        }
        all
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, ImageError> {
        #[derive(Deserialize)]
        struct Versioned {
            version: u32,
        }
        if bytes.len() as u64 > MAX_BYTES {
            return Err(ImageError::Invalid("too large".into()));
        }
        let versioned: Versioned = serde_json::from_slice(bytes)?;
        if !(VERSION..=PRELOAD_VERSION).contains(&versioned.version) {
            return Err(ImageError::Version(versioned.version));
        }
        let image: Self = serde_json::from_slice(bytes)?;
        image.validate()?;
        Ok(image)
    }

    pub fn validate(&self) -> Result<(), ImageError> {
        let invalid = |what: String| Err(ImageError::Invalid(what));
        if self.processes.len() > MAX_PROCESSES || self.files.len() > MAX_FILES {
            return invalid("too many entries".into());
        }
        let mut seen = std::collections::HashSet::new();
        let mut regions = std::collections::HashSet::new();
        for process in &self.processes {
            let pids = &process.ns_pids;
            if pids.is_empty() || pids.len() > 32 || pids.iter().any(|pid| *pid <= 0) {
                return invalid(format!("pids {pids:?}"));
            }
            if !seen.insert(pids) {
                return invalid(format!("process {pids:?} named twice"));
            }
            use ProcessState::{Checkpointed, Locked, Running};
            if !matches!(process.initial_state, Running | Locked | Checkpointed) {
                return invalid(format!(
                    "process {pids:?} in state {}",
                    process.initial_state
                ));
            }
            validate_vram(&process.vram)
                .map_err(|what| ImageError::Invalid(format!("process {pids:?}: {what}")))?;
            if process
                .vram
                .iter()
                .any(|buffer| !regions.insert(&buffer.region))
            {
                return invalid(format!("process {pids:?}: a region used twice"));
            }
            if process.comm.len() > MAX_PATH {
                return invalid(format!("process {pids:?}: name too long"));
            }
        }
        let mut ids = std::collections::HashSet::new();
        for file in &self.files {
            if !is_device_path(&file.path) {
                return invalid(format!("`{}` is no NVIDIA device node", file.path));
            }
            if !ids.insert(file.id) {
                return invalid(format!("file {:#x} named twice", file.id));
            }
        }
        Ok(())
    }
}

/// Memory in VRAM files must consist of whole pages, within a process's address space, without overlaps.
fn validate_vram(buffers: &[VramBuffer]) -> Result<(), String> {
    const PAGE: u64 = 4096;
    const END: u64 = 1 << 56;
    if buffers.len() > MAX_VRAM {
        return Err("too many buffers".into());
    }
    let mut ends: Vec<(u64, u64)> = Vec::new();
    for buffer in buffers {
        let (start, bytes) = (buffer.address, buffer.bytes);
        let end = start.checked_add(bytes).filter(|end| *end <= END);
        let placed = (start == 0) == buffer.preload;
        let whole = start % PAGE == 0 && bytes % PAGE == 0 && bytes > 0 && placed;
        let Some(end) = end.filter(|_| whole && buffer.region.len() <= MAX_PATH) else {
            return Err(format!("GPU memory of {bytes} bytes at {start:#x}"));
        };
        if buffer.preload {
            continue;
        }
        if ends.iter().any(|(from, to)| start < *to && *from < end) {
            return Err(format!("two buffers at {start:#x}"));
        }
        ends.push((start, end));
    }
    Ok(())
}

/// Returns true if a path can only name one of NVIDIA's device nodes.
pub fn is_device_path(path: &str) -> bool {
    let Some(rest) = path.strip_prefix("/dev/nvidia") else {
        return false;
    };
    path.len() <= MAX_PATH
        && rest
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'/' | b'.'))
        && !rest.split('/').any(|part| part == ".." || part == ".")
}

#[cfg(test)]
mod tests {
    use super::*;
    fn sample() -> NvidiaImage {
        NvidiaImage {
            driver_version: Some("580.159.04".into()),
            cuda_version: 13000,
            processes: vec![ProcessRecord {
                ns_pids: vec![7],
                host_pid: 4711,
                comm: "python3".into(),
                initial_state: ProcessState::Running,
                gpus: vec![GpuUuid([3; 16])],
                vram_bytes: Some(1 << 30),
                vram: vec![VramBuffer {
                    address: 0x7f00_0000_0000,
                    bytes: 1 << 30,
                    region: "7.0".into(),
                    preload: false,
                }],
                steps: vec![StepTiming {
                    step: Step::Checkpoint,
                    micros: 770_000,
                }],
            }],
            files: vec![FileRecord {
                id: 5,
                path: "/dev/nvidiactl".into(),
                flags: 2,
                pos: 0,
            }],
            ..NvidiaImage::default()
        }
    }

    #[test]
    fn written_is_read_back() {
        let bytes = serde_json::to_vec(&sample()).unwrap();
        assert_eq!(NvidiaImage::parse(&bytes).unwrap(), sample());
    }

    #[test]
    fn bad_values_are_refused() {
        let cases: [fn(&mut NvidiaImage); 14] = [
            |i| i.version = PRELOAD_VERSION + 1,
            |i| i.processes[0].vram[0].address = 0,
            |i| i.processes[0].vram[0].preload = true,
            |i| i.processes[0].vram[0].address += 1,
            |i| i.processes[0].vram[0].bytes = 0,
            |i| i.processes[0].vram[0].address = u64::MAX - 4095,
            |i| {
                let twice = i.processes[0].vram[0].clone();
                i.processes[0].vram.push(twice);
            },
            |i| {
                let mut other = i.processes[0].clone();
                other.ns_pids = vec![8];
                i.processes.push(other);
            },
            |i| i.processes[0].ns_pids.clear(),
            |i| i.processes[0].ns_pids = vec![0],
            |i| i.processes[0].initial_state = ProcessState::Failed,
            |i| i.processes.push(i.processes[0].clone()),
            |i| i.files[0].path = "/dev/nvidia/../../etc/shadow".into(),
            |i| i.files.push(i.files[0].clone()),
        ];
        for spoil in cases {
            let mut image = sample();
            spoil(&mut image);
            let bytes = serde_json::to_vec(&image).unwrap();
            assert!(NvidiaImage::parse(&bytes).is_err(), "{image:?}");
        }
    }

    #[test]
    fn device_paths() {
        for good in [
            "/dev/nvidia0",
            "/dev/nvidiactl",
            "/dev/nvidia-uvm-tools",
            "/dev/nvidia-caps/nvidia-cap1",
        ] {
            assert!(is_device_path(good), "{good}");
        }
        for bad in [
            "/dev/null",
            "/dev/nvidia0/../sda",
            "dev/nvidia0",
            "/dev/nvidia\0",
            "",
        ] {
            assert!(!is_device_path(bad), "{bad}");
        }
    }
}
