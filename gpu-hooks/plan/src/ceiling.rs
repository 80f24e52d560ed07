//! Limits how far an archive or an annotation may reach: to what the engine's spec gives, and what the administrator's
//! configuration adds.
//!
//! An archive comes from a registry or from another tenant, and in Kubernetes a pod's author writes its annotations.
//! Each of their values that becomes a device, a GPU, a path or an option of CRIU passes [`Ceiling::admit`] before it
//! is used.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use cryopod_archive::container::surroundings::MountKind;
use cryopod_archive::metadata::Gpu;
use cryopod_host::nodes::Vendor;
use serde::Deserialize;

use crate::gpus::driver_files;
use crate::gpus::inventory;
use crate::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::nodes;
use cryopod_host::spec::Spec;
use serde_json::Value;

/// CRIU options that an annotation may set. None of them names a file or a program.
pub const CRIU_OPTIONS: [&str; 15] = [
    "timeout",
    "ghost-limit",
    "ghost-fiemap",
    "link-remap",
    "file-locks",
    "ext-unix-sk",
    "skip-in-flight",
    "tcp-established",
    "tcp-close",
    "network-lock",
    "mntns-compat-mode",
    "enable-external-masters",
    "enable-external-sharing",
    "force-irmap",
    "weak-sysctls",
];

/// Whether a restore may use GPUs that the engine's spec does not give.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OtherGpus {
    /// Only under podman, whose restore takes the spec from the archive itself: there a map or a choice goes no further
    /// than the archive's own list of devices.
    #[default]
    Auto,
    Always,
    /// Never, except by the configuration's own `gpu.map`.
    Never,
}

#[derive(Debug, Clone, Copy, Default)]
pub struct Lifts<'a> {
    /// `gpu.allow_others`.
    pub other_gpus: OtherGpus,
    /// `mounts.allow`.
    pub mounts: &'a [PathBuf],
    /// `criu.config_directories`.
    pub criu_directories: &'a [PathBuf],
}

#[derive(Debug, Clone, Copy)]
pub struct Ceiling<'a> {
    pub host: &'a Host,
    pub spec: &'a Spec,
    pub lifts: Lifts<'a>,
}

/// A value of an archive or an annotation, and its intended use.
#[derive(Debug, Clone, Copy)]
pub enum AskedNode<'a> {
    /// A node of the container becomes the host's node at `host_path`, with that node's number.
    Node {
        /// The native name of the node that the engine gives, or that the record names.
        given: &'a str,
        host_path: &'a str,
    },
    Gpu {
        gpu: &'a Gpu,
        here: &'a [Gpu],
    },
    /// The source of a mount that the spec does not name: a path of the host without symbolic links.
    Mount {
        source: &'a Path,
        kind: MountKind,
    },
    CriuFile(&'a Path),
    CriuOption(&'a str),
}

impl Ceiling<'_> {
    pub fn admit(&self, asked: AskedNode<'_>) -> Result<(), Refusal> {
        let (what, remedy) = match asked {
            AskedNode::Node { given, host_path } => match self.node(given, host_path) {
                Ok(()) => return Ok(()),
                Err(refused) => refused,
            },
            AskedNode::Gpu { gpu, here } => {
                if self.gpus(here).is_none_or(|given| given.contains(&gpu.id)) {
                    return Ok(());
                }
                (
                    format!("the engine did not give the container the GPU {}", gpu.id),
                    "give the container that GPU, name the map as `gpu.map` in /etc/cryopod/config.toml, or set `gpu.allow_others = \"always\"` there".to_owned(),
                )
            }
            AskedNode::Mount { source, kind } => {
                let node = || {
                    source
                        .to_str()
                        .is_some_and(|p| nodes::classify(p).is_some())
                };
                let drivers = driver_files::is_driver_place(source, kind == MountKind::Directory)
                    && (kind != MountKind::Device || node());
                if drivers || self.lifts.mounts.iter().any(|p| source.starts_with(p)) {
                    return Ok(());
                }
                (
                    format!("{} is none of the driver's places", source.display()),
                    "if the checkpoint is trusted, add the path to `mounts.allow` in /etc/cryopod/config.toml".to_owned(),
                )
            }
            AskedNode::CriuFile(path) => {
                let directories = self.lifts.criu_directories;
                if path
                    .parent()
                    .is_some_and(|p| directories.iter().any(|f| p == f))
                {
                    return Ok(());
                }
                (
                    format!(
                        "{} lies in none of the directories for CRIU's configuration",
                        path.display()
                    ),
                    "move the file into /etc/criu, or add its directory to `criu.config_directories` in /etc/cryopod/config.toml".to_owned(),
                )
            }
            AskedNode::CriuOption(name) => {
                if CRIU_OPTIONS.contains(&name) {
                    return Ok(());
                }
                (
                    format!("{name} is no CRIU option that an annotation may set"),
                    format!(
                        "those are {}; all others are `criu.options` in /etc/cryopod/config.toml",
                        CRIU_OPTIONS.join(", ")
                    ),
                )
            }
        };
        Err(Refusal::new(what, remedy))
    }

    fn node(&self, given: &str, host_path: &str) -> Result<(), (String, String)> {
        const OTHER: &str = "the checkpoint cannot be used as it is: its record was changed";
        if nodes::classify(host_path).is_none() {
            return Err((
                format!("{host_path}, which the record names for {given}, is no GPU node"),
                OTHER.to_owned(),
            ));
        }
        if !nodes::same_kind(given, host_path) {
            return Err((
                format!(
                    "{host_path}, which the record names for {given}, is a node of another kind"
                ),
                OTHER.to_owned(),
            ));
        }
        let Some((major, minor)) = self.host.char_device(host_path) else {
            return Ok(()); // the code that uses it reports that it is absent
        };
        nodes::registered(self.host, host_path, major).map_err(|(what, remedy)| {
            (
                format!("{host_path} ({major}:{minor}) cannot be used: {what}"),
                remedy,
            )
        })
    }

    /// Returns the GPUs among `here` that a restore may use, by [`Gpu::id`]; `None` if any.
    ///
    /// The spec gives a GPU by naming its node, or by device rules that let the container open it. With a spec that
    /// does neither the container can open none, whatever is chosen.
    pub fn gpus(&self, here: &[Gpu]) -> Option<BTreeSet<String>> {
        let free = match self.lifts.other_gpus {
            OtherGpus::Always => true,
            OtherGpus::Auto => self.spec_is_the_archives(),
            OtherGpus::Never => false,
        };
        if free {
            return None;
        }
        let named = inventory::of_nodes(&self.spec.gpu_nodes(self.host));
        let named_by = |g: &Gpu| named.iter().any(|n| inventory::same_place(g, n));
        let given: BTreeSet<String> = here
            .iter()
            // Where only the driver's library describes the GPUs, no node can be compared.
            .filter(|g| !inventory::has_place(g) || named_by(g) || self.opens(g))
            .map(|g| g.id.clone())
            .collect();
        (!named.is_empty() || !given.is_empty()).then_some(given)
    }

    /// Refuses the state of GPUs for a container that can open none of those here, whatever is chosen. Nodes that a hook
    /// or NVIDIA's runtime adds are not in the spec.
    pub fn ensure_a_gpu(&self, here: &[Gpu]) -> Result<(), Refusal> {
        let spec = self.spec.json();
        let hooks = ["prestart", "createRuntime", "createContainer"]
            .map(|stage| spec.pointer(&format!("/hooks/{stage}"))?.as_array());
        let hooks = hooks.into_iter().flatten().any(|all| !all.is_empty());
        let environ = spec.pointer("/process/env").and_then(Value::as_array);
        let mut visible = environ
            .into_iter()
            .flatten()
            .filter_map(|v| v.as_str()?.strip_prefix("NVIDIA_VISIBLE_DEVICES="));
        let visible = visible
            .next_back()
            .is_some_and(|v| !matches!(v, "" | "void" | "none"));
        let given =
            || !self.spec.gpu_nodes(self.host).is_empty() || here.iter().any(|g| self.opens(g));
        match hooks || visible || here.is_empty() || given() {
            true => Ok(()),
            false => Err(Refusal::new(
                "the checkpoint uses GPUs, and the engine gave this container none",
                "give it GPUs as the one that was checkpointed had (`--gpus`, `--device`; in Kubernetes `nvidia.com/gpu` or `amd.com/gpu` among the container's limits)",
            )),
        }
    }

    /// Returns true if the device rules let the container open the GPU's own node.
    fn opens(&self, gpu: &Gpu) -> bool {
        match gpu.vendor {
            Vendor::Nvidia => gpu
                .minor
                .is_some_and(|n| self.spec.allows(nodes::NVIDIA_MAJOR, n)),
            Vendor::Amd => gpu
                .render_minor
                .is_some_and(|n| self.spec.allows(nodes::DRM_MAJOR, n)),
        }
    }

    /// podman's restore takes the spec from the archive, or from the container that it made itself. A Kubernetes
    /// container is never podman's, whatever annotations its pod passes.
    fn spec_is_the_archives(&self) -> bool {
        let kubernetes = self.spec.annotations("io.kubernetes.cri.").next().is_some();
        self.spec.annotation("io.container.manager") == Some("libpod") && !kubernetes
    }
}

#[cfg(test)]
#[path = "ceiling_tests.rs"]
mod tests;
