//! What was planned of a checkpoint, and what the metadata say of it.

use std::time::SystemTime;

use cryopod_archive::metadata::{ContainerFacts, Metadata, Timings};
use cryopod_cuda::messages::report::AgentReady;
use cryopod_gpu_plan::plan::CheckpointPlan;
use cryopod_gpu_plan::{checks::nvidia_compat, mapping::remap};

use crate::criu::{self, Criu};
use crate::preflight::surroundings::Surroundings;
use crate::request::Request;
use crate::run::log;

pub(super) struct DumpPlan {
    pub gpus: CheckpointPlan,
    pub surroundings: Surroundings,
    pub criu: Criu,
    /// The first line of the low-level runtime's `--version`.
    pub low_version: Option<String>,
    /// The processes whose CUDA calls were locked when the container was paused.
    pub locked: Vec<i32>,
    /// The checkpoint carries the container's changes of files.
    pub carries_files: bool,
    /// The store takes the large files.
    pub stored: bool,
}

/// Returns the metadata without what the dump itself adds. `agent`: the driver agent's answer, if there is one.
pub(super) fn metadata_of(
    request: &Request<'_>,
    planned: &DumpPlan,
    agent: Option<&AgentReady>,
) -> Metadata {
    let mut gpu = planned.gpus.gpu.clone();
    remap::complete(&mut gpu, &request.spec);
    if let Some(agent) = agent {
        if let Some(version) = &agent.driver_version {
            gpu.drivers
                .entry("nvidia".into())
                .or_insert_with(|| version.clone());
        }
        nvidia_compat::enrich(&mut gpu.gpus, &agent.gpus);
        nvidia_compat::note_use(&mut gpu.processes, &agent.users);
    }
    let surroundings = &planned.surroundings;
    Metadata {
        schema: Metadata::current_schema(),
        cryopod: env!("CARGO_PKG_VERSION").into(),
        created: log::rfc3339(SystemTime::now()),
        container: ContainerFacts {
            id: request.id().to_owned(),
            low_level: request.ctx.low.label(),
            low_level_version: planned.low_version.clone(),
            leave_running: request.leave_running(),
            threads: Vec::new(),
        },
        host: criu::host_facts(&request.host, Some(&planned.criu)),
        gpu,
        mounts: surroundings.mounts.clone(),
        criu: surroundings.criu.clone(),
        lsm: surroundings.lsm.clone(),
        timings: Timings::default(),
        extra: serde_json::Map::new(),
    }
}
