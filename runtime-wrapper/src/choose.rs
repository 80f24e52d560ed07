//! Which GPUs a restore uses: everything that is known, put together for [`gpumap::decide`], and where every device node
//! then leads.

use std::collections::BTreeMap;

use cryopod_archive::seal::{Gpu, Seal, Vendor};
use cryopod_gpu_hooks::cuda::gpu::GpuPair;
use cryopod_gpu_hooks::cuda::protocol::AgentGpu;
use cryopod_gpu_hooks::cuda::report::AgentReady;
use cryopod_gpu_hooks::gpumap::{self, Choice, Situation, Wish};
use cryopod_gpu_hooks::host::Host;
use cryopod_gpu_hooks::nvidia;
use cryopod_gpu_hooks::plan::PlanError;
use cryopod_gpu_hooks::remap::{self, Remap};
use cryopod_gpu_hooks::spec::Spec;
use serde_json::Value;

use crate::Error;
use crate::config::Config;

/// The GPUs of a restore.
#[derive(Debug)]
pub struct Chosen {
    /// Every recorded GPU and the one that takes its place.
    pub gpus: Vec<Choice>,
    /// Every device node and where it leads.
    pub remap: Remap,
}

impl Chosen {
    /// What NVIDIA's driver is told.
    ///
    /// # Errors
    /// A GPU that moves has no UUID.
    pub fn driver_map(&self) -> Result<Vec<GpuPair>, Error> {
        Ok(gpumap::driver_map(&self.gpus).map_err(PlanError::RestoreRefused)?)
    }
}

/// Chooses. `agent` is the driver agent's answer, if the images hold the state of NVIDIA GPUs.
///
/// # Errors
/// Every reason why the checkpoint cannot be restored here.
pub fn choose(
    host: &Host,
    config: &Config,
    seal: &Seal,
    spec: &Spec,
    agent: Option<&AgentReady>,
) -> Result<Chosen, Error> {
    let wish = wish(config, spec)?;
    let situation = situation(host, seal, spec, agent);
    let gpus = gpumap::decide(&situation, &wish).map_err(PlanError::RestoreRefused)?;
    for choice in gpus.iter().filter(|c| c.moved()) {
        let (old, new, why) = (&choice.old.id, &choice.new.id, &choice.why);
        tracing::info!("GPU {old} is restored on {new}: {why}");
    }
    let remap = remap::remap(host, &seal.gpu, &gpus).map_err(PlanError::RestoreRefused)?;
    Ok(Chosen { gpus, remap })
}

/// What the annotation says, else the configuration, else `auto`.
fn wish(config: &Config, spec: &Spec) -> Result<Wish, Error> {
    let said = spec.annotation(gpumap::ANNOTATION);
    said.or(config.gpu.map.as_deref())
        .unwrap_or_default()
        .parse()
        .map_err(|e| Error::Failed(format!("{}: {e}", gpumap::ANNOTATION)))
}

fn situation(host: &Host, seal: &Seal, spec: &Spec, agent: Option<&AgentReady>) -> Situation {
    let mut here: Vec<Gpu> = Vec::new();
    for vendor in &seal.gpu.vendors {
        let mut found = match vendor {
            Vendor::Nvidia => nvidia::gpus(host),
            Vendor::Amd => Vec::new(),
        };
        if found.is_empty()
            && *vendor == Vendor::Nvidia
            && let Some(agent) = agent
        {
            found = (0..).zip(&agent.gpus).map(from_agent).collect();
        }
        if found.is_empty() {
            found = gpumap::here(host, *vendor);
        }
        here.extend(found);
    }
    let free = agent.map(|a| {
        let known = |g: &AgentGpu| Some((g.uuid.to_string(), g.free_memory?));
        a.gpus.iter().filter_map(known).collect()
    });
    Situation {
        recorded: gpumap::recorded(&seal.gpu),
        offered: gpumap::offered(host, spec, &seal.gpu, &here),
        here,
        free: free.unwrap_or_default(),
        need: need(&seal.gpu.plugin_report),
        recorded_driver: seal.gpu.drivers.get("nvidia").cloned(),
        driver: nvidia::driver_version(host)
            .or_else(|| agent.and_then(|a| a.driver_version.clone())),
    }
}

/// Memory that the processes had on each GPU. What a process had on several GPUs cannot be told apart, and is left out.
fn need(report: &Value) -> BTreeMap<String, u64> {
    let mut need = BTreeMap::new();
    let processes = report.get("processes").and_then(Value::as_array);
    for process in processes.into_iter().flatten() {
        let gpus = process.get("gpus").and_then(Value::as_array);
        let [Value::String(gpu)] = gpus.map_or(&[][..], Vec::as_slice) else {
            continue;
        };
        let bytes = process.get("vram_bytes").and_then(Value::as_u64);
        let sum = need.entry(gpu.clone()).or_insert(0u64);
        *sum = sum.saturating_add(bytes.unwrap_or(0));
    }
    need
}

/// A GPU as far as the driver's library describes it, where `/proc/driver/nvidia` cannot be read.
fn from_agent((index, gpu): (u32, &AgentGpu)) -> Gpu {
    Gpu {
        id: gpu.uuid.to_string(),
        vendor: Vendor::Nvidia,
        index,
        model: gpu.name.clone(),
        pci: String::new(),
        minor: None,
        render_minor: None,
        memory_bytes: Some(gpu.total_memory),
        properties: serde_json::Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn memory_by_gpu() {
        let report = json!({"processes": [
            {"gpus": ["GPU-a"], "vram_bytes": 10}, {"gpus": ["GPU-a"], "vram_bytes": 5}, {"gpus": ["GPU-b"]},
            {"gpus": ["GPU-a", "GPU-b"], "vram_bytes": 100}, {"gpus": []}, 7
        ]});
        let want = [("GPU-a".to_owned(), 15), ("GPU-b".to_owned(), 0)];
        assert_eq!(need(&report), BTreeMap::from(want));
        assert!(need(&Value::Null).is_empty());
    }
}
