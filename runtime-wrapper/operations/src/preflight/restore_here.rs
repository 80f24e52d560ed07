//! Plans a checkpoint's own restore, on this host and with this container's spec, before anything is frozen.
//!
//! A container whose restore would be refused is not checkpointed: its processes would be lost. The checks are those of
//! the restore ([`preflight::answer`], [`surroundings::provided`]), applied to the metadata that would be written. Two
//! things will differ by then, and are accounted for: the GPU and host memory that the container itself uses is free,
//! and CRIU's amdgpu plugin has written its images, which are foreseen. docs/failures.md lists what a restore refuses and what of it this
//! check sees.

use cryopod_amd::image::Images;
use cryopod_amd::topology::{Node, Topology};
use cryopod_archive::format::limits::OpenFilesRaised;
use cryopod_archive::metadata::Metadata;
use cryopod_cuda::messages::report::AgentReady;
use cryopod_gpu_plan::checks::switches::{RESTORE_HERE, Switches};
use cryopod_gpu_plan::live;
use cryopod_gpu_plan::plan::{CheckpointPlan, PlanError};
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::nodes::{DRM_MAJOR, Vendor};
use cryopod_host::spec::Spec;

use crate::criu::plugins;
use crate::error::Error;
use crate::preflight::surroundings;
use crate::preflight::volume_access::{VolumeAccess, devices};
use crate::preflight::{self, RestoreQuestion};
use crate::request::Request;
use crate::security::privileges;

/// A checkpoint that is not written yet, for its own restore's checks.
#[derive(Clone, Copy)]
pub struct Prospect<'a> {
    pub request: &'a Request<'a>,
    pub plan: &'a CheckpointPlan,
}

impl Prospect<'_> {
    /// Returns an error unless the checkpoint would restore here. `agent`: the driver agent's answer, if there is one.
    pub fn settled(&self, metadata: &Metadata, agent: Option<&AgentReady>) -> Result<(), Error> {
        let refusals = self.refusals(metadata, agent)?;
        match refusals.is_empty() {
            true => Ok(()),
            false => Err(PlanError::Refused(refusals).into()),
        }
    }

    /// Returns every reason why the checkpoint could not be restored here. CRIU and the plugins are left out: the
    /// checkpoint itself needs them.
    pub fn refusals(
        &self,
        metadata: &Metadata,
        agent: Option<&AgentReady>,
    ) -> Result<Vec<Refusal>, Error> {
        let request = self.request;
        let (host, spec) = (&request.host, &request.spec);
        let checks = &request.config().checks;
        let switches = Switches::gather(spec, checks, &|name| std::env::var(name).ok())
            .map_err(Error::Failed)?;
        let agent = agent.map(|ready| as_if_gone(ready, &self.plan.pids));
        // The configuration's map is for another restore, before which it may change; the container's own map stays.
        let mut config = request.config().clone();
        config.gpu.map = None;
        let amd = plugins::uses(metadata, Vendor::Amd).then(|| amd_images(host, spec));
        let answer = preflight::answer(&RestoreQuestion {
            host,
            config: &config,
            metadata,
            spec,
            switches: &switches,
            low: request.low(),
            faults: &[],
            agent: agent.as_ref(),
            amd: amd.as_ref(),
            nvidia: None,
            freed: self.plan.memory_bytes,
        })?;
        let mut refusals = answer.refusals();
        // Each mount and each file is a descriptor.
        let _raised = OpenFilesRaised::new();
        let provided = surroundings::provided(request, metadata, answer.chosen.as_ref());
        refusals.extend(provided.err().into_iter().flatten());
        let mut pids = self.plan.pids.clone();
        live::retain_living(host, &mut pids);
        refusals.extend(privileges::running(request.config(), host, spec, &pids));
        refusals.extend(not_openable(request, &pids));
        if let (Some(_), Some(chosen)) = (&agent, &answer.chosen)
            && let Err(Error::Plan(PlanError::RestoreRefused(more))) = chosen.driver_map()
        {
            refusals.extend(more);
        }
        if !switches.on(RESTORE_HERE) {
            for refusal in &refusals {
                tracing::warn!("the checkpoint could not be restored on this host: {refusal}");
            }
            return Ok(Vec::new());
        }
        Ok(refusals.into_iter().map(of_checkpoint).collect())
    }
}

/// Returns what processes have in volumes and the spec's user could not have: a restore would be refused.
pub fn not_openable(request: &Request<'_>, pids: &[i32]) -> Vec<Refusal> {
    let volumes = request.mounts.0.iter().any(|mount| mount.bind);
    let Some(first) = pids.first().filter(|_| volumes) else {
        return Vec::new();
    };
    let mut access = VolumeAccess::of(request);
    access.ask_opened(*first, pids, &devices(request).collect::<Vec<_>>());
    access.ask_made(pids);
    access.refusals()
}

/// What CRIU's amdgpu plugin will write of this container's GPUs: on some machines it cannot even restore on the same ones.
fn amd_images(host: &Host, spec: &Spec) -> Images {
    let topology = Topology::read(host);
    let minors = topology.gpus().map(Node::render_minor);
    let allowed: Vec<u32> = minors
        .filter(|minor| spec.allows(DRM_MAJOR, (*minor).into()))
        .collect();
    Images::foreseen(&topology, &allowed)
}

/// Words a refusal of the restore as one of the checkpoint.
fn of_checkpoint(refusal: Refusal) -> Refusal {
    Refusal {
        process: refusal.process,
        what: format!("could not be restored on this host: {}", refusal.what),
        remedy: format!(
            "{} (or, if it is to be restored elsewhere only, {})",
            refusal.remedy,
            Switches::how(RESTORE_HERE)
        ),
    }
}

/// The driver's answer as it will be when these processes are gone: the memory that they use is free.
fn as_if_gone(ready: &AgentReady, pids: &[i32]) -> AgentReady {
    let mut ready = ready.clone();
    let (own, others) = ready.users.into_iter().partition(|u| pids.contains(&u.pid));
    ready.users = others;
    let own: Vec<_> = own;
    for gpu in &mut ready.gpus {
        let used = own.iter().filter(|u| u.gpu == gpu.uuid);
        let used: u64 = used.map(|u| u.bytes).sum();
        gpu.free_memory = gpu.free_memory.map(|free| free.saturating_add(used));
    }
    ready
}
