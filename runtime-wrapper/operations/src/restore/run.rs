//! Runs the low-level runtime for a restore.

use std::time::{Duration, Instant};

use cryopod_amd::choose::GpuMatch;
use cryopod_amd::saved;
use cryopod_amd::topology::{Node, Topology};
use cryopod_archive::format::names;
use cryopod_gpu_plan::plan::PlanError;
use cryopod_host::files::Host;
use cryopod_host::processes::thread_settings;

use super::plan::devices;
use super::prepare::RestorePreparation;
use crate::error::Error;
use crate::preflight::criu_setup;
use crate::preflight::volume_access::VolumeAccess;
use crate::request::Request;
use crate::restore::enforcement::{closed_paths, device_filter, mount_flags, own_cgroup};
use crate::restore::new_container::mounts;
use crate::restore::new_container::{self, NewContainer};
use crate::run::action_script::StageQuestion;
use crate::run::child::{self, RunOutcome, RunWatch, Signals};
use crate::run::failure::LogMarks;
use crate::run::metrics;
use crate::run::operation::Operation;
use crate::run::progress::{self, OperationProgress};
use crate::vram::agent::RunningAgent;

pub(super) struct RestoreOutcome {
    pub ended: RunOutcome,
    pub before: LogMarks,
    pub detach: bool,
    /// Why the new container cannot have what is its own.
    pub unfit: Option<Error>,
}

/// CRIU's last stage: the container runs.
const RUNNING: &str = "post-resume";
/// CRIU's stage at which the plugins have done their work, and the last at which CRIU takes no for an answer.
const RESTORED: &str = "post-restore";

/// The render minors of the AMD GPUs that the container must not see.
fn denied(host: &Host, visible: &[GpuMatch]) -> Vec<u32> {
    let topology = Topology::read(host);
    let minors = topology.gpus().map(Node::render_minor);
    let seen = |minor: &u32| visible.iter().any(|p| p.target.render_minor() == *minor);
    minors.filter(|minor| !seen(minor)).collect()
}

type StageAnswer<'a> = dyn Fn(&StageQuestion) -> Result<(), Error> + 'a;

/// What the wrapper does while CRIU waits at a stage of its restore.
struct Action<'a> {
    /// `None`: each stage.
    stage: Option<&'static str>,
    /// An error ends the restore: its text says why the container cannot have what is its own.
    run: Box<StageAnswer<'a>>,
}

impl<'a> Action<'a> {
    fn at(stage: &'static str, run: impl Fn(&StageQuestion) -> Result<(), Error> + 'a) -> Self {
        Self {
            stage: Some(stage),
            run: Box::new(run),
        }
    }

    fn is_due(&self, stage: &str) -> bool {
        self.stage.is_none_or(|own| own == stage)
    }
}

/// Returns the actions of a restore, in the order in which those of one stage run.
fn actions<'a>(
    request: &'a Request<'_>,
    prepared: &'a RestorePreparation,
    new: Option<&'a NewContainer>,
    amd: bool,
    before: &'a LogMarks,
) -> Vec<Action<'a>> {
    let host = &request.host;
    let mut actions = vec![Action::at(own_cgroup::STAGE, |question| {
        own_cgroup::check(host, &request.spec, request.id(), question.init)
    })];
    if let Some(new) = new {
        actions.push(Action::at(new_container::STAGE, |question| {
            if let Err(e) = new.stop(host, &request.spec, question.init) {
                tracing::error!("{e}");
            }
            Ok(())
        }));
        actions.push(Action {
            stage: None,
            run: Box::new(|q| new.hooks().at(&q.stage, q.init, new.waits())),
        });
    }
    if let Some(mounts) = &prepared.new_mounts {
        actions.push(Action::at(new_container::STAGE, |question| {
            mounts.put_environ(host, question.init);
            Ok(())
        }));
        actions.push(Action::at(mounts::STAGE, |question| {
            mounts.attach(question.init)
        }));
    }
    actions.push(Action::at(RESTORED, |question| {
        let pids = mount_flags::processes(host, question.init);
        for failed in thread_settings::set(host, question.init, &pids, &prepared.threads) {
            tracing::warn!("{failed}");
        }
        Ok(())
    }));
    if prepared.decoded.encoded.is_some() {
        actions.push(Action::at(RESTORED, |question| {
            let pids = mount_flags::processes(host, question.init);
            let mut access = VolumeAccess::of(request);
            access.ask_opened(question.init, &pids, &devices(request, &prepared.chosen));
            match access.refusals() {
                refused if refused.is_empty() => Ok(()),
                refused => Err(PlanError::RestoreRefused(refused).into()),
            }
        }));
    }
    let left_open = &prepared.decoded.left_open;
    actions.push(Action::at(closed_paths::STAGE, |question| {
        closed_paths::close(question.init, left_open)?;
        let mounts = prepared.decoded.mounts().unwrap_or_default();
        mount_flags::set(host, &request.spec, question.init, mounts)
    }));
    if let Some(pairs) = &prepared.amd_pairs {
        actions.push(Action::at(device_filter::STAGE, |question| {
            if let Err(e) = device_filter::deny(host, question.init, &denied(host, pairs)) {
                tracing::warn!("other AMD GPUs are not denied yet: {e}");
            }
            Ok(())
        }));
    }
    if amd {
        let pairs = prepared.amd_pairs.iter().flatten();
        let pairs: Vec<_> = pairs.map(|p| (p.source.gpu_id, p.target.gpu_id)).collect();
        actions.push(Action::at(RESTORED, move |_| {
            let wrong = |log| saved::restored_wrongly(log, &pairs);
            let found = before.criu_log().and_then(wrong);
            found.map_or(Ok(()), |what| Err(Error::Failed(what)))
        }));
    }
    actions
}

/// Runs the low-level runtime's restore and answers CRIU's stages. `new`: the container that is being created. `amd`:
/// CRIU's amdgpu plugin takes part. `unlock` is called when a container in the foreground runs.
pub(super) fn run(
    request: &Request<'_>,
    prepared: &RestorePreparation,
    op: &Operation,
    signals: &Signals,
    new: Option<&NewContainer>,
    amd: bool,
    unlock: &mut dyn FnMut(),
) -> Result<RestoreOutcome, Error> {
    let (low, ready) = (&request.ctx.low, &prepared.ready);
    let detach = request.flag("detach");
    let watch = RunWatch {
        stderr: None,
        kind: child::RunKind::Restore { detach },
        action_script: &ready.action_script,
        limit: ready.limit,
        abort_limit: Duration::from_secs(request.config().limits.abort_s),
        abort_file: op.file(criu_setup::ABORT_FILE),
        images: None,
        criu_log: request.log(names::RESTORE_LOG),
        agent: ready.agent.as_ref().and_then(RunningAgent::pid),
        hidden: None,
    };
    let mut progress = OperationProgress::of_operation(
        op,
        progress::ProgressState {
            operation: "restore".into(),
            name: request.id().to_owned(),
            step: "start".into(),
            total: prepared.bytes,
            images: Some(request.images.clone()),
            log: Some(request.log(names::RESTORE_LOG)),
            ..progress::ProgressState::default()
        },
    );
    let since = Instant::now();
    let before = LogMarks::note(request.log(names::RESTORE_LOG), &request.inv.globals);
    let arguments = &prepared.arguments;
    let actions = actions(request, prepared, new, amd, &before);
    let mut unfit = None;
    let mut decide = |question: &StageQuestion| {
        progress.step(&question.stage);
        if question.stage == RUNNING && !detach {
            // Until its end it could be neither paused nor checkpointed.
            unlock();
        }
        let mut due = actions.iter().filter(|a| a.is_due(&question.stage));
        let found = || due.find_map(|action| (action.run)(question).err());
        unfit = unfit.take().or_else(found);
        unfit.is_none()
    };
    let ended = child::run(low, arguments, &ready.env, &watch, signals, &mut decide)?;
    drop(actions);
    // In the foreground the container has run since.
    if detach {
        metrics::step("restore", cryopod_host::micros(since.elapsed()));
    }
    metrics::bytes("images", prepared.bytes);
    Ok(RestoreOutcome {
        ended,
        before,
        detach,
        unfit,
    })
}
