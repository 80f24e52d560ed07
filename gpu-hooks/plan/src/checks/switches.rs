//! Reads the switches of the checks. A disabled check still runs and is reported; it no longer blocks the restore.
//!
//! Both vendors use one scheme. Each check has a name: NVIDIA's begin with `nvidia-`; AMD's are the environment
//! variables of CRIU's amdgpu plugin, such as `KFD_FW_VER_CHECK`; [`RESTORE_HERE`], [`EXEC`], [`VOLUMES`] and [`CPU`]
//! belong to neither. In order of rank: the container's annotation `dev.cryopod.check.NAME` (`off` or `on`), the configuration's table `[checks]`
//! (`NAME = false` or `true`), and for AMD's the environment variable of that name.

use std::collections::BTreeMap;

use cryopod_host::spec::{Spec, switch};

pub const ANNOTATION: &str = "dev.cryopod.check.";
pub const NVIDIA: [&str; 9] = [
    "nvidia-model",
    "nvidia-compute-capability",
    "nvidia-memory",
    "nvidia-driver",
    "nvidia-driver-minimum",
    "nvidia-gpu-count",
    "nvidia-mig",
    "nvidia-free-memory",
    "nvidia-host-memory",
];
/// AMD's checks that can be disabled, under the names of the plugin's environment variables.
pub const AMD: [&str; 7] = [
    "KFD_FW_VER_CHECK",
    "KFD_SDMA_FW_VER_CHECK",
    "KFD_CACHES_COUNT_CHECK",
    "KFD_NUM_GWS_CHECK",
    "KFD_VRAM_SIZE_CHECK",
    "KFD_NUMA_CHECK",
    "KFD_CAPABILITY_CHECK",
];

/// The plan of the checkpoint's own restore on this host. Off: it is reported but does not refuse, for containers that
/// will go on elsewhere.
pub const RESTORE_HERE: &str = "restore-here";

/// A checkpoint of a container with processes that `exec` started, which no checkpoint has.
pub const EXEC: &str = "exec";

/// Open files of volumes are as they were at the checkpoint.
pub const VOLUMES: &str = "volumes";

/// This host's CPU has the instruction sets of the checkpoint's.
pub const CPU: &str = "cpu";

const OF_NEITHER: [&str; 4] = [RESTORE_HERE, EXEC, VOLUMES, CPU];

/// How a user maps a container's GPUs at a restore. Engines take no new annotation for a container that exists.
pub const HOW_TO_MAP: &str = "`gpu.map` in /etc/cryopod/config.toml";

/// The enabled checks; all by default.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Switches {
    named: BTreeMap<String, bool>,
}

pub fn known(name: &str) -> bool {
    NVIDIA.contains(&name) || AMD.contains(&name) || OF_NEITHER.contains(&name)
}

pub fn names() -> String {
    let all: Vec<&str> = NVIDIA.into_iter().chain(AMD).chain(OF_NEITHER).collect();
    all.join(", ")
}

/// Parses on (`true`) and off (`false`), in the words that annotations and the plugin's environment take.
pub fn state(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "yes" => Some(true),
        "0" | "no" => Some(false),
        word => switch(word),
    }
}

impl Switches {
    /// Reads all three sources.
    pub fn gather(
        spec: &Spec,
        config: &BTreeMap<String, bool>,
        environment: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, String> {
        let mut named = BTreeMap::new();
        for name in AMD {
            // The plugin ignores other values, too.
            if let Some(on) = environment(name).as_deref().and_then(state) {
                named.insert(name.to_owned(), on);
            }
        }
        named.extend(config.iter().map(|(name, on)| (name.clone(), *on)));
        for (name, value) in spec.annotations(ANNOTATION) {
            if !known(name) {
                return Err(format!(
                    "the annotation {ANNOTATION}{name} names no check; the checks are {}",
                    names()
                ));
            }
            let on = state(value).ok_or_else(|| {
                format!("the annotation {ANNOTATION}{name} is {value:?}; write `on` or `off`")
            })?;
            named.insert(name.to_owned(), on);
        }
        Ok(Self { named })
    }

    #[must_use]
    pub fn without(mut self, names: &[String]) -> Self {
        self.named
            .extend(names.iter().map(|name| (name.clone(), false)));
        self
    }

    pub fn on(&self, name: &str) -> bool {
        self.named.get(name).copied().unwrap_or(true)
    }

    pub fn how(name: &str) -> String {
        format!(
            "`{name} = false` under [checks] in the configuration, or the annotation {ANNOTATION}{name}=off"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn annotation_before_configuration_before_environment() {
        let spec = |value: &str| {
            Spec::from_json(
                json!({"annotations": {"dev.cryopod.check.KFD_FW_VER_CHECK": value, "other": "x"}}),
            )
        };
        let config: BTreeMap<String, bool> =
            [("KFD_FW_VER_CHECK", false), ("nvidia-memory", false)]
                .map(|(k, v)| (k.to_owned(), v))
                .into();
        let env = |name: &str| match name {
            "KFD_FW_VER_CHECK" | "KFD_NUMA_CHECK" => Some("NO".to_owned()),
            "KFD_VRAM_SIZE_CHECK" => Some("maybe".to_owned()),
            _ => None,
        };
        let all = Switches::gather(&spec("on"), &config, &env).unwrap();
        assert!(
            all.on("KFD_FW_VER_CHECK") && !all.on("KFD_NUMA_CHECK") && !all.on("nvidia-memory")
        );
        assert!(all.on("KFD_VRAM_SIZE_CHECK"));
        let none = Spec::from_json(json!({}));
        assert!(
            !Switches::gather(&none, &config, &env)
                .unwrap()
                .on("KFD_FW_VER_CHECK")
        );
        let e = Switches::gather(&spec("perhaps"), &config, &env).unwrap_err();
        assert!(e.contains("\"perhaps\"; write `on` or `off`"), "{e}");
        let wrong = Spec::from_json(json!({"annotations": {"dev.cryopod.check.memory": "off"}}));
        let e = Switches::gather(&wrong, &config, &env).unwrap_err();
        assert!(
            e.contains("check.memory names no check; the checks are nvidia-model"),
            "{e}"
        );
    }
}
