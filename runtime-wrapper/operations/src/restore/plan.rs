//! Plans a restore: which GPU takes which place, what must be provided, and every reason why it cannot work.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use cryopod_amd::choose::GpuMatch;
use cryopod_amd::image::Images;
use cryopod_cuda::messages::image;
use cryopod_gpu_plan::checks::switches::Switches;
use cryopod_gpu_plan::plan::PlanError;
use cryopod_host::files::{bytes_below, read_bounded};
use cryopod_host::nodes::Vendor;

use super::open::OpenedCheckpoint;
use crate::criu;
use crate::criu::Criu;
use crate::criu::compressed;
use crate::criu::no_criu;
use crate::criu::plugins;
use crate::error::Error;
use crate::preflight::capacity;
use crate::preflight::gpus::GpuPlacement;
use crate::preflight::surroundings::{self, Provision};
use crate::preflight::volume_access;
use crate::preflight::{self, RestoreQuestion, RestoreTools};
use crate::request::Request;
use crate::restore::new_container::mounts::NewMounts;
use crate::restore::new_container::network::NewNetwork;
use crate::restore::volume_files;
use crate::run::operation::Operation;
use crate::security::decoder::{self, DecodedImages, Question};
use crate::security::host_facts::HostFacts;
use crate::security::lsm;
use crate::security::privileges;
use crate::vram::agent::RunningAgent;

pub(super) struct RestorePlan {
    pub chosen: GpuPlacement,
    /// The only render minors of AMD's GPUs that the container may see.
    pub amd_pairs: Option<Vec<GpuMatch>>,
    pub provision: Provision,
    pub plugins: Vec<PathBuf>,
    /// The driver agent, if the images hold the state of NVIDIA GPUs.
    pub agent: Option<RunningAgent>,
    /// Environment for CRIU's amdgpu plugin.
    pub env: Vec<(&'static str, OsString)>,
    pub criu: Criu,
    /// The first line of the low-level runtime's `--version`.
    pub low_version: Option<String>,
    /// Of a container that is created from the checkpoint.
    pub new_mounts: Option<NewMounts>,
    pub new_network: Option<NewNetwork>,
    pub decoded: DecodedImages,
    /// The size of the checkpoint, and how long its restore may take.
    pub bytes: u64,
    pub limit: Duration,
}

/// Plans the restore. Starts the driver agent if the checkpoint needs it. `new`: into a container that is being created.
pub(super) fn plan(
    request: &Request<'_>,
    checkpoint: &OpenedCheckpoint,
    op: &Operation,
    new: bool,
) -> Result<RestorePlan, Error> {
    let bytes = bytes(request, checkpoint);
    let (config, metadata) = (request.config(), &checkpoint.metadata);
    let criu = criu::find(&request.tools, request.tool_limit());
    let (means, answer, chosen) = gpus(request, checkpoint, criu.as_ref(), op)?;
    let low = &request.ctx.low.path;
    let low_version = criu::version_line(&request.tools, low, request.tool_limit());
    let labels = surroundings::labels(&request.spec);
    for warning in lsm::warnings(&request.host, &metadata.lsm, &labels) {
        tracing::warn!("{warning}");
    }
    let mut provision = surroundings::restore(request, metadata, &chosen, op)?;
    let limit = request.config().limits.restore(bytes);
    let mut decoded = decoder::decode(Question {
        config,
        directory: &request.images,
        devices: &devices(request, &chosen),
        given: privileges::Given {
            facts: &HostFacts::of(&request.host, &request.spec),
            spec: &request.spec,
            read_only: &provision.read_only,
            relabelled: provision.relabels(request),
            limited: new,
        },
        limit,
    })?;
    let mut beyond = std::mem::take(&mut decoded.refusals);
    let criu = criu.ok_or_else(no_criu)?;
    beyond.extend(compressed::refusal(decoded.is_compressed, &criu));
    if let Some(needs) = &decoded.needs {
        beyond.extend(capacity::lacking(needs, &request.host, &request.spec));
    }
    if let Some(encoded) = &mut decoded.encoded {
        let volumes = volume_files::compare(&encoded.reached.opened, request, metadata);
        encoded.set_sizes(&volumes.sizes, limit)?;
        beyond.extend(volumes.refused);
    }
    let (mut new_mounts, mut new_network) = (None, None);
    if new {
        let (mounts, refusals) = NewMounts::of(request, decoded.mounts()?, &provision.named, op)?;
        provision.extra.lines.extend(mounts.lines());
        provision
            .extra
            .lines
            .extend(surroundings::own_cgroup(request));
        beyond.extend(refusals);
        new_mounts = Some(mounts);
        let low = request.low();
        match NewNetwork::of(decoded.network()?, &request.host, &request.spec, low) {
            Ok(network) => {
                let line = network.line.map(str::to_owned);
                provision.extra.lines.extend(line);
                new_network = Some(network);
            }
            Err(refusal) => beyond.push(refusal),
        }
    }
    if !beyond.is_empty() {
        return Err(PlanError::RestoreRefused(beyond).into());
    }
    Ok(RestorePlan {
        chosen,
        amd_pairs: answer.amd_pairs,
        provision,
        plugins: means.plugins,
        agent: means.agent,
        env: answer.env,
        criu,
        low_version,
        new_mounts,
        new_network,
        decoded,
        limit,
        bytes,
    })
}

/// The device nodes that the container may have: those that every container has, the spec's and the GPUs'.
pub(super) fn devices(request: &Request<'_>, chosen: &GpuPlacement) -> Vec<(u32, u32)> {
    let gpus = chosen.remap.targets.iter().filter_map(|t| {
        let number = |n: u64| u32::try_from(n).ok();
        Some((number(t.major)?, number(t.minor)?))
    });
    volume_access::devices(request).chain(gpus).collect()
}

/// Chooses the GPUs, and checks what this host has for them.
fn gpus(
    request: &Request<'_>,
    checkpoint: &OpenedCheckpoint,
    criu: Option<&Criu>,
    op: &Operation,
) -> Result<(RestoreTools, preflight::RestoreAnswer, GpuPlacement), Error> {
    let (config, host, metadata) = (request.config(), &request.host, &checkpoint.metadata);
    let switches = Switches::gather(&request.spec, &config.checks, &|name| {
        std::env::var(name).ok()
    })
    .map_err(Error::Failed)?;
    let amd = match plugins::uses(metadata, Vendor::Amd) {
        true => Images::collect(&request.images).map_err(|e| Error::Failed(e.to_string()))?,
        false => Images::default(),
    };
    let nvidia = read_bounded(&request.images.join(image::FILE_NAME), image::MAX_BYTES).ok();
    let means = RestoreTools::gather(config, host, &request.tools, criu, metadata, Some(op));
    let mut answer = preflight::answer(&RestoreQuestion {
        host,
        config,
        metadata,
        spec: &request.spec,
        switches: &switches,
        low: request.low(),
        faults: &means.faults,
        agent: means.agent.as_ref().map(|a| &a.ready),
        amd: Some(&amd),
        nvidia: nvidia.as_deref(),
        freed: 0,
    })?;
    let chosen = answer.settled()?;
    Ok((means, answer, chosen))
}

/// Returns the size of the checkpoint, wherever its files are.
fn bytes(request: &Request<'_>, checkpoint: &OpenedCheckpoint) -> u64 {
    let stored = checkpoint.stored.as_ref();
    let stored = stored.map_or(0, |found| found.reference.bytes());
    let vram = checkpoint.metadata.gpu.vram.as_ref();
    let in_archive = vram.filter(|_| checkpoint.handed.places.is_some());
    bytes_below(&request.images)
        .saturating_add(stored)
        .saturating_add(in_archive.map_or(0, |facts| facts.stored_bytes))
}
