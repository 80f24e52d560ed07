//! Prepares what CRIU needs for a restore, all in the operation's directory.

use std::ffi::OsString;

use cryopod_amd::choose::GpuMatch;
use cryopod_amd::pages;
use cryopod_archive::temporary::Temporary;
use cryopod_gpu_plan::plan::PlanError;
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::processes::thread_settings::ThreadGroup;

use super::arguments;
use super::open::OpenedCheckpoint;
use super::plan::{self, RestorePlan};
use crate::error::Error;
use crate::images;
use crate::images::store;
use crate::images::{ImageLinks, RewrittenImages};
use crate::preflight::criu_setup::{CriuEnvironment, CriuSetup};
use crate::preflight::gpus::GpuPlacement;
use crate::preflight::surroundings::Provision;
use crate::preflight::volume_access::VolumeAccess;
use crate::request::Request;
use crate::request::lowlevel::RuntimeKind;
use crate::restore::network_settings::NetworkSettings;
use crate::restore::new_container::mounts::NewMounts;
use crate::restore::private_root;
use crate::restore::searchable::{self, Searchable};
use crate::run::operation::{Operation, open_to_container};
use crate::run::runtime_log::RuntimeLog;
use crate::security::container_links;
use crate::security::decoder::{self, DecodedImages};
use crate::vram;

pub(super) struct RestorePreparation {
    pub ready: CriuEnvironment,
    pub arguments: Vec<OsString>,
    pub runtime_log: Option<RuntimeLog>,
    pub chosen: GpuPlacement,
    pub amd_pairs: Option<Vec<GpuMatch>>,
    pub provision: Provision,
    pub new_mounts: Option<NewMounts>,
    pub decoded: DecodedImages,
    pub threads: Vec<ThreadGroup>,
    /// The size of the checkpoint.
    pub bytes: u64,
    /// The image directory, passable for a container in a user namespace.
    _searchable: Option<Searchable>,
    /// The memory of AMD's GPUs, until CRIU has read it.
    _unpacked: Option<Temporary>,
}

pub(super) fn prepare(
    request: &Request<'_>,
    checkpoint: &OpenedCheckpoint,
    planned: RestorePlan,
    op: &Operation,
) -> Result<RestorePreparation, Error> {
    let RestorePlan {
        chosen,
        amd_pairs,
        mut provision,
        plugins,
        agent,
        mut env,
        criu,
        low_version,
        new_mounts,
        new_network,
        decoded,
        bytes,
        limit,
    } = planned;
    provision.extra.limit_s = limit.as_secs();
    // runc leaves it down.
    let loopback = new_network.as_ref().map(|n| n.loopback);
    let loopback = loopback.unwrap_or(request.low() == RuntimeKind::Runc);
    NetworkSettings::of(&request.host, &request.spec, loopback).ask(op)?;
    if let Some(stored) = &checkpoint.stored {
        store::verify(request, stored, limit)?;
    }
    // The archived /dev is rewritten for this host.
    let stored = checkpoint.stored.as_ref();
    let written = new_network.and_then(|n| n.image);
    let vram = vram::restore(request, &checkpoint.metadata)?;
    let unpacked = pages::unpack(&request.images, &checkpoint.metadata, &vram);
    let unpacked = unpacked.map_err(|e| {
        Error::Failed(format!(
            "restore refused, nothing was started: the GPU memory: {e}"
        ))
    })?;
    let links = ImageLinks {
        stored,
        unpacked: unpacked.as_ref().map(|u| u.path()),
    };
    let overlay = images::overlay(
        op,
        &request.images,
        &chosen.remap,
        links,
        &RewrittenImages {
            decoded: &decoded,
            network: written,
        },
    )?;
    if let Some(directory) = &overlay {
        let opened = open_to_container(directory, &request.spec);
        opened.map_err(Error::at(directory, "cannot be opened to the container"))?;
    }
    let args = arguments::with_overlay(request, overlay.as_deref())?;
    let nvidia = match agent {
        Some(agent) => Some((agent, chosen.driver_map()?)),
        None => None,
    };
    let setup = CriuSetup {
        request,
        criu: &criu,
        low_version: low_version.as_deref(),
        locked: &[],
        goes_on: false,
    };
    let mut ready = setup.restore(op, &plugins, nvidia, vram, &provision.extra)?;
    ready.env.append(&mut env);
    if request.config().criu.private_root {
        ready.env.append(&mut private_root::prepare(op)?);
    }
    let mut arguments = provision.arguments(request, low_version.as_deref(), &args);
    let runtime_log = RuntimeLog::apart(op, &request.ctx.low, request.inv, &mut arguments);
    Ok(RestorePreparation {
        ready,
        arguments,
        runtime_log,
        chosen,
        amd_pairs,
        provision,
        new_mounts,
        decoded,
        threads: checkpoint.metadata.container.threads.clone(),
        bytes,
        _searchable: searchable(request)?,
        _unpacked: unpacked,
    })
}

impl RestorePreparation {
    /// Checks the container's files, as CRIU will find them: for links that lead CRIU out of the container, and for what
    /// CRIU would make, and the spec's user could not.
    pub fn ensure_no_links(&self, request: &Request<'_>) -> Result<(), Error> {
        let Some(encoded) = &self.decoded.encoded else {
            return Ok(());
        };
        let (spec, mounts) = (&request.spec, self.decoded.mounts()?);
        let found = container_links::links(
            mounts,
            &encoded.reached.made,
            spec,
            &request.mounts,
            &request.bundle,
        );
        let mut found: Vec<Refusal> = found.into_iter().map(decoder::refusal).collect();
        let mut access = VolumeAccess::of(request);
        access.ask_paths(&encoded.reached, &plan::devices(request, &self.chosen));
        access.ask_handles(&encoded.reached.handles, mounts);
        found.extend(access.refusals());
        match found.is_empty() {
            true => Ok(()),
            false => Err(PlanError::RestoreRefused(found).into()),
        }
    }
}

/// Lets the processes of a container in a user namespace pass the directories that CRIU opens as them.
fn searchable(request: &Request<'_>) -> Result<Option<Searchable>, Error> {
    let (host, spec) = (&request.host, &request.spec);
    let searchable = Searchable::for_restore(host, spec, &request.images)?;
    if request.low() == RuntimeKind::Crun {
        searchable::state_directory(host, spec, request.state_root())?;
    }
    Ok(searchable)
}
