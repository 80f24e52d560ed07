//! Prepares a dump: makes what it needs, and checks with the driver's help what is left to check. Nothing is frozen.

use cryopod_archive::format::names;
use cryopod_archive::metadata::{Metadata, MetadataSlot};
use cryopod_cuda::messages::report::AgentReady;
use cryopod_host::nodes::Vendor;

use super::image_directory::ImageDirectory;
use super::planned::{DumpPlan, metadata_of};
use crate::error::Error;
use crate::images::handover;
use crate::preflight::criu_setup::{CriuEnvironment, CriuSetup};
use crate::request::Request;
use crate::request::state::ContainerState;
use crate::run::operation::Operation;
use crate::run::progress::{self, OperationProgress};
use crate::vram;

pub(super) struct DumpPreparation<'a> {
    pub request: &'a Request<'a>,
    pub state: &'a ContainerState,
    pub planned: &'a DumpPlan,
    /// Without what the dump itself adds.
    pub metadata: Metadata,
    pub ready: CriuEnvironment,
    /// The place of the metadata in the image directory; `None`: a pre-dump, which cannot be restored by itself, or
    /// the metadata is written.
    pub slot: Option<MetadataSlot>,
    pub images: ImageDirectory,
    pub progress: OperationProgress,
    pub op: Operation,
}

/// Makes what a dump needs. After an error nothing is left of it.
pub(super) fn prepare<'a>(
    request: &'a Request<'a>,
    state: &'a ContainerState,
    planned: &'a DumpPlan,
) -> Result<DumpPreparation<'a>, Error> {
    let mut op = Operation::new()?;
    op.lock_of_agent = request.lock.share();
    let mut progress = OperationProgress::of_operation(
        &op,
        progress::ProgressState {
            operation: "checkpoint".into(),
            name: request.id().to_owned(),
            step: "prepare".into(),
            images: Some(request.images.clone()),
            log: Some(request.log(names::DUMP_LOG)),
            ..progress::ProgressState::default()
        },
    );
    let images = ImageDirectory::ready(&request.images)?;
    work_directory(request);
    let mut slot = None;
    if !request.pre_dump() {
        handover::before_checkpoint(&images.path).map_err(|e| Error::Failed(e.to_string()))?;
        slot = Some(MetadataSlot::reserve(&images.path)?);
    }
    let setup = CriuSetup {
        request,
        criu: &planned.criu,
        low_version: planned.low_version.as_deref(),
        locked: &planned.locked,
        goes_on: request.leave_running() && !state.paused,
    };
    let ready = setup.checkpoint(&op, &planned.gpus, &planned.surroundings.extra)?;
    let said = ready.agent.as_ref().map(|a| &a.ready);
    let metadata = metadata_of(request, planned, said);
    if let Err(error) = check(request, state, planned, &metadata, said) {
        // Ends the agent; nothing was touched.
        ready.finish(&op);
        return Err(error);
    }
    progress.total(ready.bytes);
    progress.step("reserve");
    reserve_memory(request, planned, &ready, &op);
    Ok(DumpPreparation {
        request,
        state,
        planned,
        metadata,
        ready,
        slot,
        images,
        progress,
        op,
    })
}

/// Makes the directory of CRIU's logs, as runc does. crun needs it to be there, and the shim of containerd 1.7 makes none.
/// The runtime reports one that cannot be made.
pub(super) fn work_directory(request: &Request<'_>) {
    let directory = request.inv.work_path();
    if let Err(e) = std::fs::create_dir_all(&directory) {
        tracing::debug!("{}: cannot be made: {e}", directory.display());
    }
}

/// Checks what only the driver can answer: whether there is host memory for the GPU memory, and whether this host
/// would restore the checkpoint.
fn check(
    request: &Request<'_>,
    state: &ContainerState,
    planned: &DumpPlan,
    metadata: &Metadata,
    said: Option<&AgentReady>,
) -> Result<(), Error> {
    if let Some(said) = said {
        let users = planned.gpus.users_of(Vendor::Nvidia);
        vram::room(request, state.init, &users, &said.users)?;
    }
    match request.pre_dump() {
        true => Ok(()),
        false => planned.prospect(request).settled(metadata, said),
    }
}

/// Has the agent allocate host memory for the GPU memory while the container still runs.
fn reserve_memory(
    request: &Request<'_>,
    planned: &DumpPlan,
    ready: &CriuEnvironment,
    op: &Operation,
) {
    if let (Some(agent), false) = (&ready.agent, request.pre_dump()) {
        let users = planned.gpus.users_of(Vendor::Nvidia);
        vram::reserve(request, op, &users, &agent.ready.users, ready.limit);
    }
}
