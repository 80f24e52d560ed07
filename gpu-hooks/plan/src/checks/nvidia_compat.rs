//! Checks whether a checkpoint of NVIDIA GPUs would restore on the GPUs chosen for it. Every check has the recorded and
//! found values and a remedy, whether it holds or not.
//!
//! According to NVIDIA the driver restores on GPUs of the same type, by a driver of the same version or a later one.
//! Memory is checked beforehand because the driver does not give back a process that it could not restore.

use std::collections::{BTreeMap, BTreeSet};

use cryopod_archive::metadata::{Gpu, GpuFacts, GpuProcess, GpuUse};
use cryopod_host::nodes::Vendor;
use serde_json::Value;

use crate::checks::compat::{Check, Verdict};
use crate::checks::switches::{HOW_TO_MAP, Switches};
use cryopod_cuda::gpus::nvidia;
use cryopod_cuda::messages::protocol::AgentGpu;
use cryopod_cuda::messages::report::GpuUser;
use cryopod_host::files::Host;
use cryopod_host::spec::Spec;

/// The first driver branch that restores at all, and the first that restores on other GPUs.
const FIRST_DRIVER: u32 = 570;
const FIRST_MAPPING_DRIVER: u32 = 580;
/// Key of [`Gpu::properties`]: `9.0`.
pub const COMPUTE_CAPABILITY: &str = "compute_capability";
/// Key of [`Gpu::properties`]: whether the GPU is divided into MIG instances.
pub const MIG: &str = "mig";
/// Host memory in bytes that a restore needs beside the content of GPU memory: buffers of CRIU, the agent and the
/// driver.
const HOST_MARGIN: u64 = 256 << 20;

/// Adds the facts of the driver's libraries to the host's GPUs.
pub fn enrich(gpus: &mut [Gpu], said: &[AgentGpu]) {
    for known in said {
        let id = known.uuid.to_string();
        let Some(gpu) = gpus
            .iter_mut()
            .find(|g| g.vendor == Vendor::Nvidia && g.id == id)
        else {
            continue;
        };
        gpu.memory_bytes = Some(known.total_memory);
        if let Some((major, minor)) = known.compute_capability {
            let text = Value::String(format!("{major}.{minor}"));
            gpu.properties.insert(COMPUTE_CAPABILITY.into(), text);
        }
        if let Some(mig) = known.mig {
            gpu.properties.insert(MIG.into(), Value::Bool(mig));
        }
    }
}

/// Records how much of which GPU's memory each process uses.
pub fn note_use(processes: &mut [GpuProcess], users: &[GpuUser]) {
    for process in processes {
        let own = users.iter().filter(|u| u.pid == process.pid);
        process.gpu_memory = own
            .map(|u| GpuUse {
                gpu: u.gpu.to_string(),
                bytes: u.bytes,
            })
            .collect();
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Need {
    /// Of each recorded GPU's memory, by [`Gpu::id`], in bytes. Unknown GPUs are left out.
    pub gpus: BTreeMap<String, u64>,
    /// Of the host's memory while the driver restores, in bytes: the content of GPU memory.
    pub host: Option<u64>,
}

/// Computes the need from each process's record: the driver's own number for its GPU memory, and how much the process
/// grew when that was moved into it. If only the latter is known, it counts for a process with one GPU.
pub fn need(facts: &GpuFacts) -> Need {
    let mut need = Need::default();
    for process in facts
        .processes
        .iter()
        .filter(|p| p.vendors.contains(&Vendor::Nvidia))
    {
        let grown = grown(facts, process);
        let accounted: u64 = process.gpu_memory.iter().map(|u| u.bytes).sum();
        if let Some(host) = grown.or((accounted > 0).then_some(accounted)) {
            *need.host.get_or_insert(0) += host;
        }
        if accounted > 0 {
            for part in &process.gpu_memory {
                *need.gpus.entry(part.gpu.clone()).or_default() += part.bytes;
            }
        } else if let (Some(bytes), Some([only])) = (grown, gpus_of(facts, process).as_deref()) {
            *need.gpus.entry(only.clone()).or_default() += bytes;
        }
    }
    need
}

fn record<'a>(facts: &'a GpuFacts, process: &GpuProcess) -> Option<&'a Value> {
    let all = facts.plugin_report.get("processes")?.as_array()?;
    all.iter()
        .find(|r| r.get("host_pid").and_then(Value::as_i64) == Some(process.pid.into()))
}

fn grown(facts: &GpuFacts, process: &GpuProcess) -> Option<u64> {
    record(facts, process)?.get("vram_bytes")?.as_u64()
}

fn gpus_of(facts: &GpuFacts, process: &GpuProcess) -> Option<Vec<String>> {
    let own = record(facts, process)?.get("gpus")?.as_array()?;
    own.iter().map(|g| g.as_str().map(str::to_owned)).collect()
}

#[derive(Debug, Clone, Default)]
pub struct FoundHost {
    pub gpus: Vec<Gpu>,
    pub driver: Option<String>,
    /// Free memory of each GPU, by [`Gpu::id`], in bytes, where it is known.
    pub free: BTreeMap<String, u64>,
    /// Available host memory, in bytes.
    pub available: Option<u64>,
    /// The container's memory limit, in bytes.
    pub container_limit: Option<u64>,
}

impl FoundHost {
    pub fn free_of(said: &[AgentGpu]) -> BTreeMap<String, u64> {
        said.iter()
            .filter_map(|g| Some((g.uuid.to_string(), g.free_memory?)))
            .collect()
    }
}

/// `MemAvailable`, in bytes.
pub fn available_memory(host: &Host) -> Option<u64> {
    meminfo(host, "MemAvailable:")
}

/// Returns a line of `/proc/meminfo`, in bytes.
pub fn meminfo(host: &Host, name: &str) -> Option<u64> {
    let text = host.text("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The memory limit that the spec sets, in bytes.
pub fn memory_limit(spec: &Spec) -> Option<u64> {
    let limit = spec.json().pointer("/linux/resources/memory/limit")?;
    limit
        .as_i64()
        .and_then(|n| u64::try_from(n).ok())
        .filter(|n| *n > 0)
}

pub type Pair<'a> = (&'a Gpu, &'a Gpu);

/// Makes all checks. `pairs` are the GPUs chosen, `None` if no choice could be made.
pub fn checks(
    recorded: &GpuFacts,
    found: &FoundHost,
    pairs: Option<&[Pair<'_>]>,
    switches: &Switches,
) -> Vec<Check> {
    let mut all = Maker {
        switches,
        checks: Vec::new(),
    };
    let gpus: Vec<&Gpu> = recorded
        .gpus
        .iter()
        .filter(|g| g.vendor == Vendor::Nvidia)
        .collect();
    let moved = pairs.is_some_and(|p| p.iter().any(|(old, new)| old.id != new.id));
    all.drivers(recorded.drivers.get("nvidia"), found.driver.as_ref(), moved);
    all.count(&gpus, &found.gpus);
    for (old, new) in pairs.unwrap_or_default() {
        all.pair(old, new);
    }
    let need = need(recorded);
    all.free(&need, found, pairs.unwrap_or_default());
    all.host(&need, found);
    all.checks
}

struct Maker<'a> {
    switches: &'a Switches,
    checks: Vec<Check>,
}

struct CheckLine<'a> {
    name: &'static str,
    subject: String,
    recorded: String,
    found: String,
    remedy: &'a str,
}

impl Maker<'_> {
    fn add(&mut self, line: CheckLine<'_>, holds: Option<bool>) {
        let verdict = match holds {
            None => Verdict::Unknown,
            Some(true) => Verdict::Ok,
            Some(false) if self.switches.on(line.name) => Verdict::Refused,
            Some(false) => Verdict::Relaxed,
        };
        self.checks.push(Check {
            name: line.name.into(),
            subject: line.subject,
            recorded: line.recorded,
            found: line.found,
            verdict,
            switch: Some(Switches::how(line.name)),
            remedy: line.remedy.into(),
        });
    }

    fn drivers(&mut self, recorded: Option<&String>, here: Option<&String>, moved: bool) {
        let text = |v: Option<&String>| v.map_or_else(|| "an unknown one".into(), String::clone);
        let both = recorded.zip(here);
        self.add(
            CheckLine {
                name: "nvidia-driver",
                subject: String::new(),
                recorded: text(recorded),
                found: text(here),
                remedy: "update this host's NVIDIA driver to the recorded version or a newer one",
            },
            both.map(|(recorded, here)| numbers(here) >= numbers(recorded)),
        );
        let (least, what, remedy) = match moved {
            true => (
                FIRST_MAPPING_DRIVER,
                "GPUs that are to move, which needs driver 580 or newer",
                "update the driver, or restore where the checkpoint's own GPUs are",
            ),
            false => (
                FIRST_DRIVER,
                "GPU state, which needs driver 570 or newer",
                "update this host's NVIDIA driver",
            ),
        };
        self.add(
            CheckLine {
                name: "nvidia-driver-minimum",
                subject: String::new(),
                recorded: what.into(),
                found: text(here),
                remedy,
            },
            here.and_then(|v| nvidia::branch(v)).map(|b| b >= least),
        );
    }

    fn count(&mut self, recorded: &[&Gpu], here: &[Gpu]) {
        let (want, have) = (recorded.len(), here.len());
        self.add(
            CheckLine {
                name: "nvidia-gpu-count",
                subject: String::new(),
                recorded: format!("{want}"),
                found: format!("{have}"),
                remedy: "restore on a host with at least as many NVIDIA GPUs",
            },
            Some(have >= want),
        );
    }

    fn pair(&mut self, old: &Gpu, new: &Gpu) {
        let subject = match old.id == new.id {
            true => old.id.clone(),
            false => format!("{} (restored on {})", old.id, new.id),
        };
        let remedy = &format!("restore on a GPU of the same model, or name one with {HOW_TO_MAP}");
        let known = |text: &str| match text.is_empty() {
            true => "unknown".to_owned(),
            false => text.to_owned(),
        };
        self.add(
            CheckLine {
                name: "nvidia-model",
                subject: subject.clone(),
                recorded: known(&old.model),
                found: known(&new.model),
                remedy,
            },
            (!old.model.is_empty() && !new.model.is_empty()).then(|| old.model == new.model),
        );
        let capability = |g: &Gpu| {
            g.properties
                .get(COMPUTE_CAPABILITY)
                .and_then(Value::as_str)
                .map(str::to_owned)
        };
        let (a, b) = (capability(old), capability(new));
        self.add(
            CheckLine {
                name: "nvidia-compute-capability",
                subject: subject.clone(),
                recorded: known(a.as_deref().unwrap_or_default()),
                found: known(b.as_deref().unwrap_or_default()),
                remedy,
            },
            a.zip(b).map(|(a, b)| a == b),
        );
        self.add(
            CheckLine {
                name: "nvidia-memory",
                subject: subject.clone(),
                recorded: size(old.memory_bytes),
                found: size(new.memory_bytes),
                remedy: "restore on a GPU with at least as much memory",
            },
            old.memory_bytes.zip(new.memory_bytes).map(|(a, b)| b >= a),
        );
        let mig = |g: &Gpu| g.properties.get(MIG).and_then(Value::as_bool);
        let mode = |on: Option<bool>| match on {
            Some(true) => "MIG mode on".to_owned(),
            Some(false) => "MIG mode off".to_owned(),
            None => "unknown".to_owned(),
        };
        self.add(
            CheckLine {
                name: "nvidia-mig",
                subject,
                recorded: mode(mig(old)),
                found: mode(mig(new)),
                remedy: "the driver restores no process on a GPU that is divided: switch MIG off (nvidia-smi -mig 0), or restore on a whole GPU",
            },
            mig(new).map(|on| !on),
        );
    }

    fn free(&mut self, need: &Need, found: &FoundHost, pairs: &[Pair<'_>]) {
        let remedy = &format!(
            "end what uses that GPU (nvidia-smi shows it), or choose another with {HOW_TO_MAP}"
        );
        let mut targets: BTreeSet<&str> = BTreeSet::new();
        for (old, new) in pairs {
            let (want, have) = (need.gpus.get(&old.id), found.free.get(&new.id));
            if want.is_none() || !targets.insert(&new.id) {
                continue;
            }
            self.add(
                CheckLine {
                    name: "nvidia-free-memory",
                    subject: new.id.clone(),
                    recorded: format!("{} in use", size(want.copied())),
                    found: match have {
                        Some(bytes) => format!("{} free", size(Some(*bytes))),
                        None => "unknown".into(),
                    },
                    remedy,
                },
                want.zip(have).map(|(want, have)| have >= want),
            );
        }
    }

    fn host(&mut self, need: &Need, found: &FoundHost) {
        let Some(want) = need.host else { return };
        let want = want.saturating_add(HOST_MARGIN);
        for (have, what, remedy) in [
            (
                found.available,
                "available on the host",
                "free memory on this host: while the driver restores, what was in GPU memory is in the host's",
            ),
            (
                found.container_limit,
                "the container's limit",
                "raise the container's memory limit: while the driver restores, what was in GPU memory is in the container's",
            ),
        ] {
            let Some(bytes) = have else { continue };
            self.add(
                CheckLine {
                    name: "nvidia-host-memory",
                    subject: String::new(),
                    recorded: format!("{} to be held while it is restored", size(Some(want))),
                    found: format!("{} {what}", size(have)),
                    remedy,
                },
                Some(bytes >= want),
            );
        }
    }
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|n| n.parse().ok()).collect()
}

fn size(bytes: Option<u64>) -> String {
    match bytes {
        None => "unknown".into(),
        Some(b) => format!("{} MiB", b.div_ceil(1 << 20)),
    }
}

#[cfg(test)]
#[path = "nvidia_compat_tests.rs"]
mod tests;
