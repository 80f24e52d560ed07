//! Concludes a checkpoint: keeps what was made, or removes it and explains the failure.

use std::path::Path;
use std::process::ExitCode;

use cryopod_archive::format::names;
use cryopod_archive::metadata::Metadata;
use cryopod_cuda::messages::image::NvidiaImage;
use cryopod_host::files::bytes_below;
use cryopod_host::nodes::Vendor;

use super::dump::{DumpOutcome, amd_users, unpause_amd};
use super::prepare::DumpPreparation;
use super::{alive, ask, failed};
use crate::error::Error;
use crate::images::handover;
use crate::images::store;
use crate::pause;
use crate::preflight::criu_setup::OperationReports;
use crate::request::Request;
use crate::request::state::ContainerState;
use crate::run::child::exit_code;
use crate::run::failure;
use crate::run::log;
use crate::run::metrics;
use crate::run::runtime_log::RuntimeLog;
use crate::security::lsm;

/// Concludes a dump. `again`: if it failed, another one follows.
pub(super) fn conclude(
    prepared: DumpPreparation<'_>,
    dumped: DumpOutcome,
    again: bool,
) -> Result<ExitCode, Error> {
    let DumpPreparation {
        request,
        state,
        planned,
        metadata,
        op,
        images,
        slot,
        ready,
        progress: _progress,
    } = prepared;
    let limit = ready.limit;
    // The agent puts back what was not committed before anything is reported about the container.
    let mut finished = ready.finish(&op);
    unpause_amd(request, planned);
    if dumped.ended.killed {
        // CRIU was killed in the middle of a dump: nothing else can be done from outside.
        ask(request, "resume");
    }
    if finished.agent_was_killed && alive(&request.host, state) {
        let mut users = planned.gpus.users_of(Vendor::Nvidia);
        // `resume` unlocks these.
        users.retain(|pid| !planned.locked.contains(pid));
        if let Err(e) = pause::bring_back(&request.ctx.config, &request.host, &op, &users) {
            let left = format!(
                "the driver agent was killed, and another one cannot bring its processes back: {e}"
            );
            finished.not_put_back.push(left);
        }
    }
    if dumped.succeeded() {
        if !request.ends {
            count(&metadata, &images.path);
        }
        match handover::asked(&images.path) {
            _ if request.pre_dump() => {}
            Some(export) => store::hand_over(&images.path, &export),
            None if planned.stored => store::put(request, &images.path, &metadata, limit),
            None => {}
        }
        images.keep();
        if let Some(log) = &dumped.runtime_log {
            log.hand_on();
        }
        dumped.held.hand_on();
        return Ok(succeeded(request, state, &finished));
    }
    drop(slot);
    if !dumped.ended.passed || alive(&request.host, state) {
        // A failed checkpoint leaves no metadata. Without its inventory nobody takes what is left for one of a container
        // without GPUs: a CRIU that is killed at the end has written all images.
        for name in [
            names::METADATA,
            names::PRELOAD_LIBRARY,
            names::CRIU_INVENTORY,
        ] {
            let _ = std::fs::remove_file(images.path.join(name));
        }
        if !amd_users(planned).is_empty() {
            cryopod_archive::vram::remove(&images.path);
        }
    }
    let criu_log = dumped.before.criu_log();
    let denied =
        criu_log.and_then(|log| lsm::denial(&request.host, log, &planned.surroundings.lsm));
    let storage = dumped.full.is_some() || dumped.metadata_error.is_some();
    let left = finished.not_put_back;
    metrics::failed_run(&dumped.ended, finished.error.is_some(), storage);
    let runtime_log = dumped.runtime_log.as_ref();
    let runtime_error = runtime_log
        .filter(|_| dumped.ended.code != 0)
        .and_then(RuntimeLog::own_error);
    let reasons = dumped.metadata_error.iter().cloned();
    let reasons = reasons.chain(finished.error).chain(dumped.full.clone());
    let reasons = reasons.chain(denied).chain(runtime_error).collect();
    match again {
        true => tracing::warn!("{}: not frozen; another try", request.id()),
        false => {
            log::error(&explain(request, state, &dumped, reasons, &left));
            dumped.held.hand_on();
        }
    }
    Ok(exit_code(dumped.ended.code.max(1)))
}

/// Notes steps and bytes for `cryopod metrics`.
pub(super) fn count(metadata: &Metadata, images: &Path) {
    let timings = &metadata.timings;
    metrics::step("plan", timings.plan_us);
    metrics::step("dump", timings.dump_us);
    if let Some(durable) = timings.durable_us {
        metrics::step("durable", durable);
    }
    let report: Option<NvidiaImage> =
        serde_json::from_value(metadata.gpu.plugin_report.clone()).ok();
    if let Some(report) = report {
        for (step, micros) in report.slowest() {
            metrics::step(&format!("driver_{step}"), micros);
        }
        let gpu = report.processes.iter().filter_map(|p| p.vram_bytes).sum();
        metrics::bytes("gpu", gpu);
    }
    if let Some(vram) = &metadata.gpu.vram {
        metrics::bytes("gpu_stored", vram.stored_bytes);
    }
    metrics::bytes("images", bytes_below(images));
}

/// Returns the exit code for complete images. A container that goes on running may still lack its GPU.
fn succeeded(
    request: &Request<'_>,
    state: &ContainerState,
    finished: &OperationReports,
) -> ExitCode {
    if let Some(error) = &finished.error {
        tracing::warn!("the checkpoint is complete; on the way: {error}");
    }
    // The agent has retried what the plugin could not put back: its report counts.
    if finished.not_put_back.is_empty() || !alive(&request.host, state) {
        return ExitCode::SUCCESS;
    }
    log::error(&format!(
        "the checkpoint of {} is complete, but the container that was to go on running could not be brought back: {}; restore it from the checkpoint",
        request.id(),
        finished.not_put_back.join("; ")
    ));
    ExitCode::FAILURE
}

fn explain(
    request: &Request<'_>,
    state: &ContainerState,
    dumped: &DumpOutcome,
    reasons: Vec<String>,
    left: &[String],
) -> String {
    let (low, held) = (&request.ctx.low, dumped.held.text());
    let why = failure::describe(low, &dumped.ended, reasons, &dumped.before, &held);
    match dumped.ended.killed {
        true => format!(
            "checkpoint of {} failed and CRIU had to be killed: see whether the container still answers, and restart it if not: {}",
            request.id(),
            [&[why], left].concat().join("; ")
        ),
        false => failed(request, state, &why, left),
    }
}
