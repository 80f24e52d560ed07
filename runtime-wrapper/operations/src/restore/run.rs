//! Runs the low-level runtime for a restore.

use std::time::{Duration, Instant};

use cryopod_amd::saved;
use cryopod_amd::topology::{Node, Topology};
use cryopod_archive::names;
use cryopod_host::files::Host;

use super::prepare::Prepared;
use crate::error::Error;
use crate::preflight::setup;
use crate::request::Request;
use crate::restore::device_filter;
use crate::restore::new_container::mounts;
use crate::restore::new_container::{self, NewContainer};
use crate::run::action_script::Question;
use crate::run::child::{self, Ended, Signals, Watch};
use crate::run::metrics;
use crate::run::operation::Operation;
use crate::run::progress::{self, Progress};
use crate::run::reasons::Before;
use crate::vram::agent::Agent;

pub(super) struct Ran {
    pub ended: Ended,
    pub before: Before,
    pub detach: bool,
    /// Why the new container cannot have what is its own.
    pub unfit: Option<String>,
}

/// CRIU's stage at which the plugins have done their work, and the last at which CRIU takes no for an answer.
const RESTORED: &str = "post-restore";

/// The render minors of the AMD GPUs that the container must not see.
fn denied(host: &Host, visible: &[u32]) -> Vec<u32> {
    let topology = Topology::read(host);
    let minors = topology.gpus().map(Node::render_minor);
    minors.filter(|minor| !visible.contains(minor)).collect()
}

/// Runs it until it ends. `new`: the container that is being created. `amd`: CRIU's amdgpu plugin takes part. An error means that it could not be started.
pub(super) fn run(
    request: &Request<'_>,
    prepared: &Prepared,
    op: &Operation,
    signals: &Signals,
    new: Option<&NewContainer>,
    amd: bool,
) -> Result<Ran, Error> {
    let (low, ready) = (&request.ctx.low, &prepared.ready);
    let detach = request.flag("detach");
    let watch = Watch {
        stderr: None,
        kind: child::Kind::Restore { detach },
        action_script: &ready.action_script,
        limit: ready.limit,
        abort_limit: Duration::from_secs(request.config().limits.abort_s),
        abort_file: op.file(setup::ABORT_FILE),
        images: None,
        criu_log: request.log(names::RESTORE_LOG),
        agent: ready.agent.as_ref().and_then(Agent::pid),
        hidden: None,
    };
    let mut progress = Progress::of_operation(
        op,
        progress::State {
            operation: "restore".into(),
            name: request.id().to_owned(),
            step: "start".into(),
            total: prepared.bytes,
            images: Some(request.images.clone()),
            log: Some(request.log(names::RESTORE_LOG)),
            ..progress::State::default()
        },
    );
    let since = Instant::now();
    let before = Before::note(request.log(names::RESTORE_LOG), &request.inv.globals);
    let arguments = &prepared.arguments;
    let mut unfit = None;
    let mut decide = |question: &Question| {
        progress.step(&question.stage);
        if let Some(new) = new.filter(|_| question.stage == new_container::STAGE)
            && let Err(e) = new.stop(&request.host, question.init)
        {
            tracing::error!("{e}");
        }
        if let Some(new) = new
            && let Err(e) = new.hooks().at(&question.stage, question.init, new.waits())
        {
            unfit = Some(e);
        }
        if let Some(mounts) = prepared.new_mounts.as_ref()
            && question.stage == new_container::STAGE
        {
            mounts.put_environ(&request.host, question.init);
        }
        if let Some(mounts) = prepared.new_mounts.as_ref()
            && question.stage == mounts::STAGE
            && let Err(e) = mounts.attach(question.init)
        {
            unfit = Some(e);
        }
        if question.stage == device_filter::STAGE
            && let Some(visible) = &prepared.amd_visible
            && let Err(e) = device_filter::deny(
                &request.host,
                question.init,
                &denied(&request.host, visible),
            )
        {
            tracing::warn!("other AMD GPUs are not denied yet: {e}");
        }
        if amd
            && question.stage == RESTORED
            && let Some(line) = before.criu_log().and_then(saved::failed_copy)
        {
            unfit = Some(format!(
                "a copy of GPU memory to an AMD GPU has failed, and CRIU's amdgpu plugin has gone on without it: {line}"
            ));
        }
        unfit.is_none()
    };
    let ended = child::run(low, arguments, &ready.env, &watch, signals, &mut decide)?;
    // In the foreground the container has run since.
    if detach {
        metrics::step("restore", micros(since.elapsed()));
    }
    metrics::bytes("images", prepared.bytes);
    Ok(Ran {
        ended,
        before,
        detach,
        unfit,
    })
}

fn micros(d: Duration) -> u64 {
    u64::try_from(d.as_micros()).unwrap_or(u64::MAX)
}
