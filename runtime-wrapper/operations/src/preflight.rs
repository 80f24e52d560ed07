//! Checks whether a checkpoint would restore on this host, before anything is started. A restore refuses with
//! everything that does not hold at once; `cryopod check ARCHIVE` prints it.

pub mod capacity;
pub mod criu_setup;
pub mod gpus;
pub mod mount_sources;
pub mod restore_here;
pub mod surroundings;
pub mod volume_access;

use std::ffi::OsString;
use std::path::PathBuf;

use cryopod_amd::choose::{self as amd_choose, ChoiceRequest, GpuMatch};
use cryopod_amd::image::Images;
use cryopod_amd::topology::Topology;
use cryopod_archive::metadata::{Gpu, Metadata};
use cryopod_cuda::messages::image::{ImageError, NvidiaImage};
use cryopod_cuda::messages::report::AgentReady;
use cryopod_gpu_plan::checks::compat::{self, Check};
use cryopod_gpu_plan::checks::cpu;
use cryopod_gpu_plan::checks::nvidia_compat::{self, FoundHost, Pair};
use cryopod_gpu_plan::checks::switches::{AMD, Switches};
use cryopod_gpu_plan::gpus::amd_gpus;
use cryopod_gpu_plan::mapping::gpumap::Choice;
use cryopod_gpu_plan::plan::PlanError;
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::nodes::Vendor;
use cryopod_host::programs::Tools;
use cryopod_host::spec::Spec;

use self::gpus::GpuPlacement;
use crate::config::Config;
use crate::criu;
use crate::criu::Criu;
use crate::criu::helpers;
use crate::criu::plugins;
use crate::error::Error;
use crate::request::lowlevel::RuntimeKind;
use crate::run::operation::Operation;
use crate::vram::agent::{AgentError, RunningAgent};

/// This host's programs for a restore.
#[derive(Debug, Default)]
pub struct RestoreTools {
    pub plugins: Vec<PathBuf>,
    /// The driver agent, if the images hold the state of NVIDIA GPUs.
    pub agent: Option<RunningAgent>,
    pub faults: Vec<Refusal>,
}

impl RestoreTools {
    /// Finds them. Without an operation's directory the driver agent is not started.
    pub fn gather(
        config: &Config,
        host: &Host,
        tools: &dyn Tools,
        criu: Option<&Criu>,
        metadata: &Metadata,
        op: Option<&Operation>,
    ) -> Self {
        let mut means = Self::default();
        let here = match criu {
            Some(criu) => {
                let amd = plugins::uses(metadata, Vendor::Amd);
                plugins::checked(config, host, tools, criu, amd)
            }
            None => {
                means
                    .faults
                    .push(Refusal::new(criu::no_criu().to_string(), ""));
                plugins::find(config, host)
            }
        };
        match plugins::needed(&here, metadata) {
            Ok(plugins) => means.plugins = plugins,
            Err(faults) => means.faults.extend(faults),
        }
        if let (true, Some(op)) = (plugins::uses(metadata, Vendor::Nvidia), op) {
            match RunningAgent::of_operation(config, &means.plugins, op) {
                Ok(agent) => means.agent = Some(agent),
                // The agent lies beside the plugin. Where the plugin is missing, that is already reported.
                Err(AgentError::Missing) if !means.faults.is_empty() => {}
                Err(AgentError::Driver { error, remedy }) => means.faults.push(Refusal::new(
                    format!("the NVIDIA driver of this host cannot be used: {error}"),
                    remedy,
                )),
                Err(e) => means
                    .faults
                    .push(Refusal::new(e.to_string(), "see `cryopod check`")),
            }
        }
        means
            .faults
            .extend(helpers::restore(config, tools, &metadata.criu.helpers));
        means
    }
}

/// A checkpoint, and the host and spec that it would be restored with.
pub struct RestoreQuestion<'a> {
    pub host: &'a Host,
    pub config: &'a Config,
    pub metadata: &'a Metadata,
    pub spec: &'a Spec,
    pub switches: &'a Switches,
    pub low: RuntimeKind,
    pub faults: &'a [Refusal],
    /// The driver agent's answer, if the images hold the state of NVIDIA GPUs.
    pub agent: Option<&'a AgentReady>,
    /// The images of CRIU's amdgpu plugin; `None`: they are not written yet, and the plugin restores on this very host.
    pub amd: Option<&'a Images>,
    /// The image of cryopod's NVIDIA plugin; `None`: it is not written yet.
    pub nvidia: Option<&'a [u8]>,
    /// Host memory that will be free by then, in bytes.
    pub freed: u64,
}

/// Whether a checkpoint would restore, and with which GPUs.
#[derive(Debug, Default)]
pub struct RestoreAnswer {
    /// Every check, whether it holds or not.
    pub checks: Vec<Check>,
    /// Reasons to refuse that are no comparison.
    pub other: Vec<Refusal>,
    pub chosen: Option<GpuPlacement>,
    /// The only render minors that the container may see, so that the AMD plugin can choose no others.
    pub amd_pairs: Option<Vec<GpuMatch>>,
    pub env: Vec<(&'static str, OsString)>,
}

impl RestoreAnswer {
    /// Returns every reason against the restore.
    pub fn refusals(&self) -> Vec<Refusal> {
        let mut all = self.other.clone();
        all.extend(compat::refusals(&self.checks));
        all
    }

    /// Returns the GPUs that take the places of the recorded ones.
    pub fn choices(&self) -> impl Iterator<Item = &Choice> {
        self.chosen.iter().flat_map(|c| &c.gpus)
    }

    /// Returns the choice if nothing prevents the restore, else every reason at once.
    pub fn settled(&mut self) -> Result<GpuPlacement, Error> {
        let refusals = self.refusals();
        match self.chosen.take() {
            Some(chosen) if refusals.is_empty() => Ok(chosen),
            _ => Err(PlanError::RestoreRefused(refusals).into()),
        }
    }
}

/// Runs every check.
///
/// # Errors
/// Only what makes the checks meaningless, as a map that cannot be read. Reasons against a restore are in the answer.
pub fn answer(question: &RestoreQuestion<'_>) -> Result<RestoreAnswer, Error> {
    let metadata = question.metadata;
    let mut answer = RestoreAnswer {
        other: question.faults.to_vec(),
        ..RestoreAnswer::default()
    };
    let cpu = cpu::check(&metadata.host, question.host, question.switches);
    answer.checks.extend(cpu);
    let images = question
        .amd
        .filter(|_| plugins::uses(metadata, Vendor::Amd));
    let decided = match images {
        Some(images) => amd(question, images, &mut answer)?,
        None => None,
    };
    let agent = question.agent;
    // A disabled check must not steer the choice either. Where checks are on, they refuse a GPU of another model,
    // together with everything else that does not fit.
    let given = gpus::GpuConstraints {
        by_memory: question.switches.on("nvidia-free-memory"),
        any_model: plugins::uses(metadata, Vendor::Nvidia) || !question.switches.on("nvidia-model"),
        amd: decided,
    };
    if images.is_some() && given.amd.is_none() {
    } else {
        let (host, config, spec) = (question.host, question.config, question.spec);
        match gpus::choose(host, config, metadata, spec, agent, given) {
            Ok(chosen) => answer.chosen = Some(chosen),
            Err(Error::Plan(PlanError::RestoreRefused(reasons))) => answer.other.extend(reasons),
            Err(e) => return Err(e),
        }
    }
    if plugins::uses(metadata, Vendor::Nvidia) {
        nvidia(question, agent, &mut answer);
        answer
            .other
            .extend(question.nvidia.and_then(of_another_version));
    }
    Ok(answer)
}

fn nvidia(question: &RestoreQuestion<'_>, agent: Option<&AgentReady>, answer: &mut RestoreAnswer) {
    let mut gpus = gpus::nvidia_here(question.host, agent);
    let said = agent.map_or(&[][..], |a| &a.gpus);
    nvidia_compat::enrich(&mut gpus, said);
    let found = FoundHost {
        driver: gpus::nvidia_driver(question.host, agent),
        free: FoundHost::free_of(said),
        available: nvidia_compat::available_memory(question.host)
            .map(|bytes| bytes.saturating_add(question.freed)),
        container_limit: nvidia_compat::memory_limit(question.spec),
        gpus,
    };
    let known = |gpu: &Gpu| found.gpus.iter().find(|g| g.id == gpu.id).cloned();
    let pairs: Option<Vec<(Gpu, Gpu)>> = answer.chosen.as_ref().map(|chosen| {
        chosen
            .gpus
            .iter()
            .filter(|c| c.old.vendor == Vendor::Nvidia)
            .map(|c| {
                (
                    c.old.clone(),
                    known(&c.new).unwrap_or_else(|| c.new.clone()),
                )
            })
            .collect()
    });
    let pairs: Option<Vec<Pair<'_>>> = pairs
        .as_ref()
        .map(|all| all.iter().map(|(old, new)| (old, new)).collect());
    answer.checks.extend(nvidia_compat::checks(
        &question.metadata.gpu,
        &found,
        pairs.as_deref(),
        question.switches,
    ));
}

/// Refuses an image that the NVIDIA plugin would refuse when the container's processes are there.
fn of_another_version(image: &[u8]) -> Option<Refusal> {
    let e = NvidiaImage::parse(image).err()?;
    matches!(e, ImageError::Version(_)).then(|| Refusal::new(e.to_string(), ""))
}

/// Returns the GPUs that CRIU's amdgpu plugin must restore on; `None` if the images do not say what they need.
fn amd(
    question: &RestoreQuestion<'_>,
    images: &Images,
    answer: &mut RestoreAnswer,
) -> Result<Option<Vec<Choice>>, Error> {
    let state = |name: &str| if question.switches.on(name) { "1" } else { "0" };
    answer.env = AMD.map(|name| (name, state(name).into())).into();
    let recorded = &question.metadata.gpu.gpus;
    let kfd = images.kfd.iter();
    let mut sources: Vec<Topology> = kfd.map(|i| i.topology.clone()).collect();
    for source in &mut sources {
        source.label(recorded);
    }
    let target = Topology::read(question.host);
    let (host, config, spec) = (question.host, question.config, question.spec);
    let permitted = gpus::amd_offered(host, config, spec, &question.metadata.gpu);
    let request = ChoiceRequest {
        sources: &sources,
        target: &target,
        permitted: permitted.as_deref(),
        wish: &gpus::wish(question.config, question.spec)?,
        wished_by: gpus::wished_by(question.spec),
        switches: question.switches,
    };
    let choice = match amd_choose::choose(&request) {
        Ok(choice) => choice,
        Err(refused) => {
            answer.other.push(Refusal::new(
                refused.reason.clone(),
                "the checks that follow say what differs",
            ));
            answer.checks.extend(refused.checks);
            // Continues with a choice by nodes, so that all other faults are reported too.
            return Ok(None);
        }
    };
    tracing::info!("{}", choice.sentence);
    answer.checks.extend(choice.checks.clone());
    answer.amd_pairs = Some(choice.pairs.clone());
    let here = amd_gpus::gpus(question.host);
    let by_minor = |gpus: &[Gpu], minor: u32| {
        gpus.iter()
            .find(|g| g.vendor == Vendor::Amd && g.render_minor == Some(minor.into()))
            .cloned()
    };
    let pairs = choice.pairs.iter().filter_map(|pair| {
        Some(Choice {
            old: by_minor(recorded, pair.source.render_minor())?,
            new: by_minor(&here, pair.target.render_minor())?,
            why: "CRIU's amdgpu plugin restores there".into(),
        })
    });
    Ok(Some(pairs.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_of_a_later_version_is_refused_ahead() {
        let image = |version: u32| format!(r#"{{"version": {version}, "processes": []}}"#);
        assert!(of_another_version(image(4).as_bytes()).is_none());
        let refused = of_another_version(image(6).as_bytes()).unwrap();
        assert!(refused.what.contains("update cryopod"), "{refused}");
        assert!(of_another_version(b"{").is_none(), "the plugin reports it");
    }
}
