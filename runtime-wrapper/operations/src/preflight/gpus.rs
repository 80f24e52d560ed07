//! Chooses the GPUs of a restore: gathers what is known for [`gpumap::decide`], and maps every device node accordingly.

use cryopod_archive::metadata::{Gpu, GpuFacts, Metadata};
use cryopod_cuda::gpus::gpu::GpuPair;
use cryopod_cuda::gpus::nvidia;
use cryopod_cuda::messages::protocol::AgentGpu;
use cryopod_cuda::messages::report::AgentReady;
use cryopod_gpu_plan::ceiling::{AskedNode, Ceiling};
use cryopod_gpu_plan::checks::nvidia_compat::{self, FoundHost};
use cryopod_gpu_plan::gpus::inventory;
use cryopod_gpu_plan::mapping::gpumap::{self, Choice, Situation, Wish};
use cryopod_gpu_plan::mapping::remap::{self, Remap};
use cryopod_gpu_plan::plan::PlanError;
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use cryopod_host::spec::Spec;

use crate::config::Config;
use crate::error::Error;

/// Which GPU takes the place of which, and where each device node leads.
#[derive(Debug)]
pub struct GpuPlacement {
    pub gpus: Vec<Choice>,
    pub remap: Remap,
}

impl GpuPlacement {
    /// Returns the map for NVIDIA's driver.
    pub fn driver_map(&self) -> Result<Vec<GpuPair>, Error> {
        Ok(gpumap::driver_map(&self.gpus).map_err(PlanError::RestoreRefused)?)
    }
}

/// What limits the choice of GPUs beside map and spec.
#[derive(Debug, Default)]
pub struct GpuConstraints {
    pub by_memory: bool,
    pub any_model: bool,
    /// The AMD GPUs, if CRIU's plugin has to restore on these.
    pub amd: Option<Vec<Choice>>,
}

/// Chooses the GPUs. `agent` is the driver agent's answer, if the images hold the state of NVIDIA GPUs.
pub fn choose(
    host: &Host,
    config: &Config,
    metadata: &Metadata,
    spec: &Spec,
    agent: Option<&AgentReady>,
    given: GpuConstraints,
) -> Result<GpuPlacement, Error> {
    let wish = wish(config, spec)?;
    let ceiling = config.ceiling(host, spec);
    let mut situation = situation(&ceiling, metadata, agent);
    if !situation.recorded.is_empty() {
        let refused = |r| PlanError::RestoreRefused(vec![r]);
        ceiling.ensure_a_gpu(&situation.here).map_err(refused)?;
    }
    // The administrator wrote the configuration's own map.
    if spec.annotation(gpumap::ANNOTATION).is_some() {
        let here = &situation.here;
        situation.refused = here
            .iter()
            .filter_map(|gpu| {
                let refused = ceiling.admit(AskedNode::Gpu { gpu, here }).err()?;
                Some((gpu.id.clone(), refused))
            })
            .collect();
    }
    situation.any_model = given.any_model;
    if !given.by_memory {
        situation.free.clear();
    }
    if given.amd.is_some() {
        situation.recorded.retain(|g| g.vendor != Vendor::Amd);
        situation.here.retain(|g| g.vendor != Vendor::Amd);
    }
    let wish = match &given.amd {
        // The map's entries for AMD's GPUs have been applied already.
        Some(amd) => wish.without(&amd.iter().map(|c| &c.old).collect::<Vec<_>>()),
        None => wish,
    };
    let mut gpus = gpumap::decide(&situation, &wish).map_err(PlanError::RestoreRefused)?;
    for choice in gpus.iter().filter(|c| c.moved()) {
        let (old, new, why) = (&choice.old.id, &choice.new.id, &choice.why);
        tracing::info!("GPU {old} is restored on {new}: {why}");
    }
    gpus.extend(given.amd.unwrap_or_default());
    let remap = remap::remap(&ceiling, &metadata.gpu, &gpus).map_err(PlanError::RestoreRefused)?;
    Ok(GpuPlacement { gpus, remap })
}

/// Returns this host's NVIDIA GPUs from `/proc`, else from the driver's library, else from their nodes.
pub fn nvidia_here(host: &Host, agent: Option<&AgentReady>) -> Vec<Gpu> {
    let found = nvidia::gpus(host);
    match agent {
        _ if !found.is_empty() => found,
        Some(agent) if !agent.gpus.is_empty() => (0..).zip(&agent.gpus).map(from_agent).collect(),
        _ => inventory::here(host, Vendor::Nvidia),
    }
}

/// Returns the version of this host's NVIDIA driver.
pub fn nvidia_driver(host: &Host, agent: Option<&AgentReady>) -> Option<String> {
    nvidia::driver_version(host).or_else(|| agent.and_then(|a| a.driver_version.clone()))
}

/// Returns the render minors to choose AMD's GPUs from; `None`: any, or the configuration's own map names them.
pub fn amd_offered(host: &Host, config: &Config, spec: &Spec, gpu: &GpuFacts) -> Option<Vec<u32>> {
    if spec.annotation(gpumap::ANNOTATION).is_none() && config.gpu.map.is_some() {
        return None;
    }
    let here = inventory::here(host, Vendor::Amd);
    let ids = gpumap::offered(&config.ceiling(host, spec), gpu, &here)?;
    let given = here.iter().filter(|g| ids.contains(&g.id));
    let minors = given.filter_map(|g| u32::try_from(g.render_minor?).ok());
    Some(minors.collect())
}

/// Returns the map of the annotation, else of the configuration, else `auto`.
pub fn wish(config: &Config, spec: &Spec) -> Result<Wish, Error> {
    let said = spec.annotation(gpumap::ANNOTATION);
    said.or(config.gpu.map.as_deref())
        .unwrap_or_default()
        .parse()
        .map_err(|e| Error::Failed(format!("{}: {e}", wished_by(spec))))
}

/// Returns what [`wish`] is given with. The command line's map comes as the configuration's.
pub fn wished_by(spec: &Spec) -> &'static str {
    match spec.annotation(gpumap::ANNOTATION) {
        Some(_) => gpumap::ANNOTATION,
        None => "--map or gpu.map",
    }
}

fn situation(ceiling: &Ceiling<'_>, metadata: &Metadata, agent: Option<&AgentReady>) -> Situation {
    let host = ceiling.host;
    let recorded = inventory::recorded(&metadata.gpu);
    // GPUs that the checkpoint knows only by their nodes are matched by nodes: the driver's library reports none.
    let by_id = |g: &Gpu| g.vendor == Vendor::Nvidia && g.id.starts_with("GPU-");
    let by_node = !recorded.iter().any(by_id);
    let mut here: Vec<Gpu> = Vec::new();
    for vendor in &metadata.gpu.vendors {
        here.extend(match vendor {
            Vendor::Nvidia if !by_node => nvidia_here(host, agent),
            _ => inventory::here(host, *vendor),
        });
    }
    let said = agent.map_or(&[][..], |a| &a.gpus);
    Situation {
        wished_by: wished_by(ceiling.spec),
        recorded,
        offered: gpumap::offered(ceiling, &metadata.gpu, &here),
        here,
        refused: std::collections::BTreeMap::new(),
        free: FoundHost::free_of(said),
        need: nvidia_compat::need(&metadata.gpu).gpus,
        any_model: false,
    }
}

/// Describes a GPU as far as the driver's library does, where `/proc/driver/nvidia` cannot be read.
fn from_agent((index, gpu): (u32, &AgentGpu)) -> Gpu {
    Gpu {
        index,
        model: gpu.name.clone(),
        memory_bytes: Some(gpu.total_memory),
        ..Gpu::new(Vendor::Nvidia, gpu.uuid.to_string())
    }
}
