//! Plans a checkpoint: what has to be saved, and every reason why that cannot work. Makes and changes nothing.

use std::ffi::OsStr;
use std::path::Path;

use cryopod_amd::open_nodes;
use cryopod_gpu_plan::checks::switches::{EXEC, Switches};
use cryopod_gpu_plan::exec_processes;
use cryopod_gpu_plan::hazards;
use cryopod_gpu_plan::live;
use cryopod_gpu_plan::plan::{self, CheckpointPlan, PlanError};
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::nodes::{DeviceNode, Vendor};
use cryopod_host::processes::Scan;
use cryopod_host::programs::Tools;

use super::planned::{DumpPlan, metadata_of};
use crate::criu;
use crate::criu::Criu;
use crate::criu::no_criu;
use crate::criu::plugins;
use crate::error::Error;
use crate::images::store;
use crate::pause::suspended::SuspendedRecord;
use crate::preflight::restore_here::Prospect;
use crate::preflight::surroundings::{self};
use crate::request::Request;
use crate::request::state::ContainerState;
use crate::rootfs;

/// Plans the checkpoint of a container with these GPU nodes.
///
/// # Errors
/// Every reason why it cannot work, at once.
pub(super) fn plan(
    request: &Request<'_>,
    state: &ContainerState,
    nodes: Vec<DeviceNode>,
) -> Result<DumpPlan, Error> {
    refuse_created(request, state)?;
    let locked = locked_at_pause(request, state)?;
    let (criu, low_version, scan) = examine(request, state.init);
    let criu = criu.ok_or_else(no_criu)?;
    let (surroundings, hazards) = surroundings::checkpoint(request, state.init, &scan, &criu)?;
    let (gpus, mut refusals) = gpus(request, state.init, nodes, &scan, &criu)?;
    refusals.extend(hazards);
    refusals.extend(untracked_memory(request, &criu));
    if !state.paused {
        refusals.extend(exec_processes(request, state, false)?);
    }
    let planned = DumpPlan {
        gpus,
        surroundings,
        criu,
        low_version,
        // One that its engine has paused and that stays locked does not run before the engine has its files.
        carries_files: super::carries_files(
            request,
            state,
            request.ends || request.leave_running() && locked.is_empty(),
        )?,
        locked,
        // Another host has not this one's store.
        stored: !request.into_place
            && store::wanted(&request.config().store, &request.spec, &request.images)?,
    };
    if request.leave_running() {
        refusals.extend(hazards::linked_elsewhere(&scan, &request.host, |path| {
            !is_carried(request, path, planned.carries_files)
        }));
    }
    planned.refuse(request, refusals)?;
    store::parent_is_here(request)?;
    Ok(planned)
}

/// Returns true for a file that the checkpoint has as of the dump: in a tmpfs of the container's own or, if it carries
/// those, in the root file system and podman's `/dev/shm`.
fn is_carried(request: &Request<'_>, path: &Path, carries_files: bool) -> bool {
    match request.mounts.covering(path) {
        None => carries_files,
        Some((mount, _)) if !mount.bind => true,
        Some((mount, _)) => {
            let shm = rootfs::own_shm(&request.mounts, &request.bundle);
            carries_files && mount.path == Path::new(rootfs::SHM) && shm.is_some()
        }
    }
}

impl DumpPlan {
    /// Refuses if there is a reason to. Adds those against a restore on this host, as far as they need no driver: the
    /// driver is not asked from here on.
    fn refuse(&self, request: &Request<'_>, mut refusals: Vec<Refusal>) -> Result<(), Error> {
        if refusals.is_empty() {
            return Ok(());
        }
        if !request.pre_dump() {
            let metadata = metadata_of(request, self, None);
            refusals.extend(self.prospect(request).refusals(&metadata, None)?);
        }
        Err(PlanError::Refused(refusals).into())
    }

    /// The restore of this checkpoint on this host.
    pub fn prospect<'a>(&'a self, request: &'a Request<'a>) -> Prospect<'a> {
        Prospect {
            request,
            plan: &self.gpus,
        }
    }
}

/// Refuses a pre-dump where the kernel does not tell which pages a process has written since.
fn untracked_memory(request: &Request<'_>, criu: &Criu) -> Option<Refusal> {
    if !request.pre_dump() {
        return None;
    }
    let arguments = ["check", "--feature", "mem_dirty_track"].map(OsStr::new);
    let answer = request
        .tools
        .output(&criu.path, &arguments, request.tool_limit());
    // A CRIU that does not answer has its own words later.
    let lacks = answer.is_ok_and(|out| out.code != 0);
    lacks.then(|| Refusal::new(
        "a pre-dump needs a kernel that tracks written pages (soft-dirty, CONFIG_MEM_SOFT_DIRTY), and this host's does not (criu check --feature mem_dirty_track)",
        "checkpoint without a pre-dump (podman: without --pre-checkpoint); GPU memory builds upon an earlier checkpoint without it (dev.cryopod.parent)",
    ))
}

/// Refuses a container with processes that would be lost.
pub(super) fn no_exec_processes(
    request: &Request<'_>,
    state: &ContainerState,
    frozen: bool,
) -> Result<(), Error> {
    match exec_processes(request, state, frozen)? {
        none if none.is_empty() => Ok(()),
        refusals => Err(PlanError::Refused(refusals).into()),
    }
}

fn exec_processes(
    request: &Request<'_>,
    state: &ContainerState,
    frozen: bool,
) -> Result<Vec<Refusal>, Error> {
    if request.pre_dump() {
        return Ok(Vec::new());
    }
    let (host, spec) = (&request.host, &request.spec);
    let switches = Switches::gather(spec, &request.config().checks, &|_| None)
        .map_err(|e| Error::untouched(e.to_string()))?;
    let refusals = exec_processes::refusals(host, spec, state.init, frozen);
    if switches.on(EXEC) {
        return Ok(refusals);
    }
    for refusal in refusals {
        tracing::warn!("{refusal}");
    }
    Ok(Vec::new())
}

/// Refuses a created container: it runs the runtime's own code, with files of the host. crun would have CRIU dump it
/// anyway.
fn refuse_created(request: &Request<'_>, state: &ContainerState) -> Result<(), Error> {
    match state.created {
        false => Ok(()),
        true => Err(Error::untouched(format!(
            "checkpoint of {} refused: a container cannot be checkpointed in created state; start it first",
            request.id()
        ))),
    }
}

/// Returns the processes whose CUDA calls were locked when the container was paused.
pub(super) fn locked_at_pause(
    request: &Request<'_>,
    state: &ContainerState,
) -> Result<Vec<i32>, Error> {
    let record = SuspendedRecord::of(&request.host, state.init)
        .map_err(|e| Error::untouched(format!("checkpoint of {} refused: {e}", request.id())))?;
    let Some(record) = record else {
        return Ok(Vec::new());
    };
    if record.locked_at_pause && state.paused {
        return Ok(record.processes.iter().map(|p| p.pid).collect());
    }
    let (id, since) = (request.id(), &record.since);
    Err(Error::untouched(match record.locked_at_pause {
        true => format!(
            "checkpoint of {id} refused: its CUDA calls are locked since it was paused at {since}, and it runs: unlock it first: cryopod resume pid:{}",
            state.init
        ),
        false => format!(
            "checkpoint of {id} refused: it is suspended since {since}, its GPU memory is {}; resume it first: cryopod resume {id}",
            record.place()
        ),
    }))
}

/// Asks CRIU and the low-level runtime for their versions, and scans the container's processes meanwhile.
fn examine(request: &Request<'_>, init: i32) -> (Option<Criu>, Option<String>, Scan) {
    let (tools, limit) = (&request.tools, request.tool_limit());
    std::thread::scope(|scope| {
        let criu = scope.spawn(|| criu::find(tools, limit));
        let low = scope.spawn(|| criu::version_line(tools, &request.ctx.low.path, limit));
        let scan = Scan::of(&request.host, &live::tree(&request.host, init));
        (
            criu.join().unwrap_or_default(),
            low.join().unwrap_or_default(),
            scan,
        )
    })
}

/// Plans for the container's GPUs.
fn gpus(
    request: &Request<'_>,
    init: i32,
    nodes: Vec<DeviceNode>,
    scan: &Scan,
    criu: &Criu,
) -> Result<(CheckpointPlan, Vec<Refusal>), Error> {
    let (config, host) = (request.config(), &request.host);
    let sharing = request
        .sharing()
        .map_err(|e| Error::untouched(e.to_string()))?;
    let amd = nodes.iter().any(|n| n.vendor == Vendor::Amd);
    let plugins = plugins::checked(config, host, &request.tools, criu, amd);
    let mut refusals = open_nodes::refusals(scan, &nodes);
    let (plan, others) = plan::checkpoint(host, nodes, init, scan, &plugins, sharing)?;
    refusals.extend(others);
    Ok((plan, refusals))
}
