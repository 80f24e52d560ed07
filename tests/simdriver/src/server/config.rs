//! What the simulated machine has: GPUs, driver version, sizes. Read from TOML.

use serde::{Deserialize, Serialize};

use crate::uuid::GpuUuid;

/// One GPU as the file gives it; everything has a default.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GpuEntry {
    uuid: Option<GpuUuid>,
    name: Option<String>,
    memory_mib: Option<u64>,
    minor: Option<u32>,
    pci: Option<String>,
    mig: bool,
    compute: Option<(u32, u32)>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Gpu {
    pub uuid: GpuUuid,
    pub name: String,
    pub bytes: u64,
    pub minor: u32,
    /// Bus location, `0000:18:00.0`.
    pub pci: String,
    pub mig: bool,
    pub compute: (u32, u32),
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConfigFile {
    driver: Option<String>,
    context_mib: Option<u64>,
    gpu: Vec<GpuEntry>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Config {
    /// Driver version, `580.159.04`.
    pub driver: String,
    /// Device memory that a context takes on each GPU that has one.
    pub context_bytes: u64,
    /// The GPUs, in the order of the driver's ordinals.
    pub gpus: Vec<Gpu>,
}

impl Default for Config {
    fn default() -> Self {
        Self::build(ConfigFile::default(), 1)
    }
}

impl Config {
    /// Reads a file's text; `count` GPUs are made up if it names none.
    pub fn parse(text: &str, count: u8) -> Result<Self, toml::de::Error> {
        Ok(Self::build(toml::from_str(text)?, count))
    }

    fn build(file: ConfigFile, count: u8) -> Self {
        let mut entries = file.gpu;
        if entries.is_empty() {
            entries.resize_with(usize::from(count), GpuEntry::default);
        }
        let gpus = entries
            .into_iter()
            .zip(0u8..)
            .map(|(e, i)| Gpu {
                uuid: e.uuid.unwrap_or_else(|| GpuUuid::numbered(i)),
                name: e.name.unwrap_or_else(|| "NVIDIA H200".into()),
                bytes: e.memory_mib.unwrap_or(8 * 1024) << 20,
                minor: e.minor.unwrap_or_else(|| u32::from(i)),
                pci: e
                    .pci
                    .unwrap_or_else(|| format!("0000:{:02x}:00.0", 0x18 + 0x10 * u16::from(i))),
                mig: e.mig,
                compute: e.compute.unwrap_or((9, 0)),
            })
            .collect();
        Self {
            driver: file.driver.unwrap_or_else(|| "580.159.04".into()),
            context_bytes: file.context_mib.unwrap_or(8) << 20,
            gpus,
        }
    }

    pub fn driver_major(&self) -> u64 {
        self.driver
            .split('.')
            .next()
            .and_then(|s| s.parse().ok())
            .unwrap_or(0)
    }

    pub fn cuda_version(&self) -> u64 {
        match self.driver_major() {
            0..550 => 12_020,
            550..555 => 12_040,
            555..560 => 12_050,
            560..570 => 12_060,
            570..575 => 12_080,
            575..580 => 12_090,
            580..590 => 13_000,
            590..600 => 13_010,
            600..615 => 13_030,
            _ => 13_040,
        }
    }
}
