//! Concludes a restore: keeps what was made, or removes it and explains the failure.

use std::process::ExitCode;
use std::time::Duration;

use cryopod_gpu_plan::checks::switches::{HOW_TO_MAP, Switches};
use cryopod_host::cgroups::Cgroups;
use cryopod_host::files::write_private;

use super::bundle::BundleChanges;
use super::prepare::RestorePreparation;
use super::run::RestoreOutcome;
use crate::criu::plugins;
use crate::error::Error;
use crate::preflight::criu_setup::OperationReports;
use crate::preflight::surroundings;
use crate::request::Request;
use crate::request::lowlevel::RuntimeKind;
use crate::request::state;
use crate::rootfs::frozen;
use crate::run::abandoned::RestoreNote;
use crate::run::child::exit_code;
use crate::run::failure;
use crate::run::metrics;
use crate::run::operation::Operation;
use crate::run::runtime_log::RuntimeLog;
use crate::security::image_check::seccomp;
use crate::security::lsm;

/// In crun's directory of a container: the program that its processes of `exec` get.
const CRUN_SECCOMP: &str = "seccomp.bpf";

/// How long the processes of a failed restore may take to exit.
const EXIT_LIMIT: Duration = Duration::from_secs(10);

/// A runtime that a signal ended has an exit code above, and CRIU goes on without it.
const SIGNALED: i32 = 128;

/// `amd`: CRIU's amdgpu plugin took part. `is_ours`: no other operation has the bundle, whose container would be ended and
/// whose files put back in place of this one's.
///
/// # Errors
/// Nothing was restored. What is left of the container is removed, and the checkpoint is untouched.
pub(super) fn conclude(
    request: &Request<'_>,
    prepared: RestorePreparation,
    changed: BundleChanges,
    ran: RestoreOutcome,
    op: &Operation,
    amd: bool,
    is_ours: bool,
) -> Result<ExitCode, Error> {
    let ended = &ran.ended;
    let failed = ended.code != 0;
    let log = prepared.runtime_log.as_ref();
    let runtime_error = log.filter(|_| failed).and_then(RuntimeLog::own_error);
    let finished = prepared.ready.finish(op);
    // The GPU restore comes after CRIU's last stage, and kills processes whose memory cannot be restored.
    let lost = failed && finished.error.is_some();
    // A container in the foreground ends with its own exit code, and leaves no process behind.
    let lives = !failed || !ran.detach && ended.passed && !lost;
    if is_ours && ended.code > SIGNALED {
        changed.restoring.end_criu();
    }
    let left = is_ours && failed && changed.cgroups.kill();
    if left {
        // CRIU may have died after the container was frozen for its start.
        changed.cgroups.paths().for_each(frozen::thaw);
    }
    if !lives || left {
        metrics::failed_run(&ran.ended, finished.error.is_some(), false);
        if is_ours {
            if ended.killed || ended.lost_processes || left {
                state::remove(request.ctx, request.inv, &request.tools);
            }
            changed.restoring.unmount();
            remove(&changed.cgroups);
        } else {
            changed.keep();
        }
        let why = explain(request, &ran, finished, runtime_error, amd);
        return Err(Error::Failed(why));
    }
    if let Some(error) = &finished.error {
        crate::run::log::error(&format!(
            "the container {} is restored and runs, but {error}",
            request.id()
        ));
    }
    RestoreNote::done(op.dir());
    changed.keep();
    keep_seccomp(request);
    if let Some(log) = log.filter(|_| !failed) {
        log.hand_on();
    }
    Ok(exit_code(ended.code))
}

/// Writes the spec's seccomp profile where crun looks for it at an `exec`. crun does so itself for new containers only.
fn keep_seccomp(request: &Request<'_>) {
    if request.ctx.low.kind != RuntimeKind::Crun {
        return;
    }
    let file = state::directory(request.ctx, request.inv).join(CRUN_SECCOMP);
    let written = seccomp::joined(&request.spec).and_then(|program| match program {
        Some(program) if !file.exists() => {
            write_private(&file, &program).map_err(|e| e.to_string())
        }
        _ => Ok(()),
    });
    if let Err(e) = written {
        let file = file.display();
        tracing::warn!("{file}: {e}: processes of `exec` will have no seccomp profile");
    }
}

/// Removes the cgroups of a failed restore.
fn remove(cgroups: &Cgroups) {
    for (cgroup, error) in cgroups.remove(EXIT_LIMIT) {
        tracing::warn!("the cgroup {}: left behind: {error}", cgroup.display());
    }
}

fn explain(
    request: &Request<'_>,
    ran: &RestoreOutcome,
    finished: OperationReports,
    runtime_error: Option<String>,
    amd: bool,
) -> String {
    let labels = surroundings::labels(&request.spec);
    let criu_log = ran.before.criu_log();
    let denied = criu_log.and_then(|log| lsm::denial(&request.host, log, &labels));
    let reasons = ran.unfit.iter().map(ToString::to_string);
    let reasons = reasons.chain(finished.reasons());
    let reasons = reasons.chain(denied).chain(runtime_error);
    let low = &request.ctx.low;
    let why = failure::describe(low, &ran.ended, reasons.collect(), &ran.before, "");
    let stuck = match amd && ran.ended.killed {
        true => format!(
            ", and CRIU had to be killed. Its {} was at work, whose search for GPUs does not end on some hosts: restore with fewer of its comparisons ({}; or another KFD_*_CHECK), on other GPUs ({HOW_TO_MAP}), or, if it was copying GPU memory, with a higher limits.restore_s in {}",
            plugins::AMD_PLUGIN,
            Switches::how("KFD_NUMA_CHECK"),
            crate::config::PATH
        ),
        false => String::new(),
    };
    let remedy = failure::remedy(&why).map_or_else(String::new, |r| format!("; {r}"));
    let id = request.id();
    format!("restore of {id} failed and the checkpoint is untouched: {why}{stuck}{remedy}")
}
