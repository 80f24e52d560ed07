//! Reads `/etc/cryopod/config.toml`. Every key has a default that works; docs/configuration.md lists them.

pub mod cache;
pub mod criu_values;
pub mod encrypt;
pub mod restore;
pub mod rootfs;
pub mod store;
pub mod tenant;
pub mod vram;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_cuda::messages::config::{MAX_TIMEOUT_MS, NCCL_QUIESCE_MS};
use cryopod_cuda::sharing;
use cryopod_gpu_plan::ceiling::{Ceiling, Lifts, OtherGpus};
use cryopod_gpu_plan::checks::switches;
use cryopod_host::files::Host;
use cryopod_host::spec::Spec;
use serde::Deserialize;

/// The key under `[checks]` for the comparison of the images' privileges with the spec's.
pub const PRIVILEGES_CHECK: &str = "privileges";
/// The check of what CRIU's images have CRIU do.
pub const IMAGES_CHECK: &str = "images";

/// The configuration, unless `CRYOPOD_CONFIG` names another file.
pub const PATH: &str = "/etc/cryopod/config.toml";

/// Why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{path}: cannot read cryopod's configuration: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: {reason}; see docs/configuration.md")]
    Invalid {
        path: PathBuf,
        /// What is wrong, with line and key.
        reason: String,
    },
}

/// The whole of `config.toml`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    pub runtime: Runtime,
    pub criu: CriuSettings,
    pub gpu: GpuChoice,
    pub nvidia: Nvidia,
    pub nccl: Nccl,
    pub amd: Amd,
    /// `[checks]`: `false` disables a restore's check.
    pub checks: BTreeMap<String, bool>,
    pub mounts: Mounts,
    pub checkpoint: restore::RestoreOptions,
    pub restore: restore::RestoreOptions,
    pub hooks: HookSettings,
    pub vram: vram::VramOptions,
    pub rootfs: rootfs::RootfsOptions,
    pub store: store::StoreOptions,
    pub cache: cache::CacheOptions,
    pub encrypt: encrypt::EncryptOptions,
    pub suspend: SuspendOptions,
    pub limits: TimeLimits,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Runtime {
    /// The low-level runtime: a name that is searched on PATH, or a path.
    pub low_level: Option<String>,
}

/// `[criu]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CriuSettings {
    /// CRIU, as an absolute path whose last name is `criu`, or `criu` for the host's on PATH.
    pub program: Option<PathBuf>,
    /// Options for CRIU's configuration, for GPU containers: `ghost-limit = "300M"`, `link-remap = true`.
    pub options: BTreeMap<String, CriuValue>,
    /// Directories in which the annotation `org.criu.config` may name a file.
    pub config_directories: Vec<PathBuf>,
    /// At a restore CRIU sees of the host only what the container needs.
    pub private_root: bool,
}

impl Default for CriuSettings {
    fn default() -> Self {
        Self {
            program: None,
            options: BTreeMap::new(),
            config_directories: vec!["/etc/criu".into()],
            private_root: true,
        }
    }
}

/// The value of a CRIU option.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum CriuValue {
    /// `true`: the option alone; `false`: not given.
    Flag(bool),
    Number(i64),
    Text(String),
    /// The option is given several times.
    List(Vec<String>),
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Mounts {
    /// Directories and files of the host that a restore may mount into a container whose spec does not name them,
    /// beside the places of GPU drivers.
    pub allow: Vec<PathBuf>,
}

/// `[hooks]`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct HookSettings {
    /// OCI hooks to remove from a bundle before a restore: paths, or names of programs.
    pub drop: Vec<String>,
}

impl Default for HookSettings {
    fn default() -> Self {
        let names = [
            "nvidia-container-runtime-hook",
            "nvidia-container-toolkit",
            "nvidia-ctk",
            "nvidia-cdi-hook",
            "oci-nvidia-hook",
        ];
        Self {
            drop: names.map(str::to_owned).to_vec(),
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GpuChoice {
    /// Where the GPUs of a checkpoint go: `auto`, or `OLD=NEW,...`. The annotation `dev.cryopod.gpu.map` takes
    /// precedence.
    pub map: Option<String>,
    /// Whether a restore may use GPUs that the engine did not give: `auto` (under podman), `always`, `never`.
    pub allow_others: OtherGpus,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nvidia {
    /// cryopod's CRIU plugin, `cryopod_nvidia.so`.
    pub plugin: Option<PathBuf>,
    /// The program that talks to the driver, `cryopod-cuda-agent`.
    pub agent: Option<PathBuf>,
    /// `libcuda.so.1` of the host, tried before the usual places.
    pub libcuda: Vec<PathBuf>,
    /// How long a process's running GPU work may take to finish before the checkpoint gives up, in milliseconds.
    pub lock_timeout_ms: Option<u64>,
    /// Whether GPU memory goes into VRAM files: `auto`, `on`, `off`. The annotation `dev.cryopod.vram` takes
    /// precedence.
    pub vram: vram::VramMode,
    /// Whether a container whose processes share GPU memory is refused: `refuse`, `allow`. The annotation
    /// `dev.cryopod.gpu.sharing` takes precedence.
    pub sharing: sharing::Policy,
}

/// NCCL's communicators in containers with the preload library.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Nccl {
    /// How long the ranks may take to come level before the checkpoint gives up, in seconds.
    pub quiesce_s: NonZeroU32,
}

impl Nccl {
    /// Returns how long the ranks may take to come level, in milliseconds.
    pub fn quiesce_ms(&self) -> u64 {
        u64::from(self.quiesce_s.get()) * 1000
    }
}

impl Default for Nccl {
    fn default() -> Self {
        let seconds = u32::try_from(NCCL_QUIESCE_MS / 1000).ok();
        Self {
            quiesce_s: seconds.and_then(NonZeroU32::new).unwrap_or(NonZeroU32::MIN),
        }
    }
}

/// `[suspend]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SuspendOptions {
    /// Host memory for the copies that stay with resumed containers, in GiB.
    pub keep: u32,
}

/// `[amd]`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Amd {
    /// CRIU's `amdgpu_plugin.so`.
    pub plugin: Option<PathBuf>,
}

/// `[limits]`: how long each step may take, in seconds.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TimeLimits {
    pub checkpoint_s: u64,
    /// A whole restore, until the container runs.
    pub restore_s: u64,
    /// One call of another program (`crun state`, `criu --version`).
    pub tool_s: u64,
    /// The driver agent's start: loading the driver's library.
    pub agent_s: u64,
    /// How long an interrupted checkpoint may take to give up by itself.
    pub abort_s: u64,
    /// The slowest expected disk, in MiB a second. A checkpoint or restore of much data may exceed `checkpoint_s` or
    /// `restore_s`, up to the time that the data needs at this rate.
    pub slowest_mib_s: u64,
}

impl Default for TimeLimits {
    fn default() -> Self {
        Self {
            checkpoint_s: 900,
            restore_s: 900,
            tool_s: 30,
            agent_s: 60,
            abort_s: 120,
            slowest_mib_s: 50,
        }
    }
}

impl TimeLimits {
    /// Returns how long another program may take to report something.
    pub fn tool(&self) -> Duration {
        Duration::from_secs(self.tool_s)
    }

    /// Returns how long a checkpoint of so many bytes may take.
    pub fn checkpoint(&self, bytes: u64) -> Duration {
        self.at_least(self.checkpoint_s, bytes)
    }

    /// Returns how long a restore of so many bytes may take.
    pub fn restore(&self, bytes: u64) -> Duration {
        self.at_least(self.restore_s, bytes)
    }

    fn at_least(&self, seconds: u64, bytes: u64) -> Duration {
        Duration::from_secs(seconds.max((bytes >> 20) / self.slowest_mib_s.max(1)))
    }
}

impl Config {
    /// Loads the configuration of this host; the defaults if there is no file.
    pub fn load() -> Result<Self, ConfigError> {
        Self::load_from(std::env::var_os("CRYOPOD_CONFIG").as_deref())
    }

    fn load_from(named: Option<&OsStr>) -> Result<Self, ConfigError> {
        match named.filter(|path| !path.is_empty()) {
            Some(path) => Self::read(Path::new(path), true),
            None => Self::read(Path::new(PATH), false),
        }
    }

    /// Reads the low-level runtime alone of a file that is not valid, or not even TOML, with defaults for the rest. `None`:
    /// it cannot be known, and another one would say that there is no such container.
    pub fn of_invalid(path: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(path).ok()?;
        let (table, _) = toml::de::DeTable::parse_recoverable(&text);
        let runtime = table.get_ref().get("runtime");
        let runtime = runtime.and_then(|value| value.get_ref().as_table());
        let name = runtime.and_then(|table| table.get("low_level"));
        let name = name.and_then(|value| value.get_ref().as_str());
        if name.is_none() && text.contains("low_level") {
            return None;
        }
        let mut config = Self::default();
        config.runtime.low_level = name.map(str::to_owned);
        Some(config)
    }

    /// Returns true if a restore holds the archive's privileges to the spec's.
    pub fn compares_privileges(&self) -> bool {
        self.checks.get(PRIVILEGES_CHECK).copied().unwrap_or(true)
    }

    /// Directories to search for checkpoints that others build upon, and for large files of checkpoints.
    pub fn search(&self) -> Vec<PathBuf> {
        let parents = self.vram.parents.iter().cloned();
        parents.chain(self.store.directories()).collect()
    }

    /// Returns how far archives and annotations may reach.
    pub fn ceiling<'a>(&'a self, host: &'a Host, spec: &'a Spec) -> Ceiling<'a> {
        Ceiling {
            host,
            spec,
            lifts: Lifts {
                other_gpus: self.gpu.allow_others,
                mounts: &self.mounts.allow,
                criu_directories: &self.criu.config_directories,
            },
        }
    }

    fn read(path: &Path, required: bool) -> Result<Self, ConfigError> {
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(e) if !required && e.kind() == io::ErrorKind::NotFound => {
                return Ok(Self::default());
            }
            Err(source) => {
                return Err(ConfigError::Read {
                    path: path.to_owned(),
                    source,
                });
            }
        };
        Self::parse(&text, path)
    }

    /// Reads and checks a configuration's text. `path`: where it comes from, for messages.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let invalid = |reason: String| ConfigError::Invalid {
            path: path.to_owned(),
            reason: match line_of(text, &reason) {
                Some(line) => format!("line {line}: {reason}"),
                None => reason,
            },
        };
        let mut config: Self =
            toml::from_str(text).map_err(|e| invalid(e.to_string().trim().to_owned()))?;
        config
            .vram
            .config()
            .map_err(|e| invalid(format!("vram: {e}")))?;
        if let Some(program) = &config.criu.program {
            let named = program.file_name() == Some("criu".as_ref());
            if !named || !(program.is_absolute() || program.as_os_str() == "criu") {
                return Err(invalid(format!(
                    "criu.program = {program:?}: name an absolute path that ends with /criu, as runc and crun search that name, or \"criu\" for the one on PATH"
                )));
            }
        }
        let l = &config.limits;
        for (key, value) in [
            ("checkpoint_s", l.checkpoint_s),
            ("restore_s", l.restore_s),
            ("tool_s", l.tool_s),
            ("agent_s", l.agent_s),
            ("abort_s", l.abort_s),
        ] {
            if !(1..=7 * 24 * 3600).contains(&value) {
                return Err(invalid(format!(
                    "limits.{key} = {value} is not within 1 second and 7 days"
                )));
            }
        }
        for (key, value, unit) in [
            (
                "nvidia.lock_timeout_ms",
                config.nvidia.lock_timeout_ms.unwrap_or(1),
                1,
            ),
            ("nccl.quiesce_s", config.nccl.quiesce_s.get().into(), 1000),
        ] {
            let longest = MAX_TIMEOUT_MS / unit;
            if !(1..=longest).contains(&value) {
                return Err(invalid(format!(
                    "{key} = {value} is not within 1 and {longest}"
                )));
            }
        }
        if let Some(parent) = config.vram.parent.as_deref() {
            vram::check_parent(parent).map_err(|e| invalid(format!("vram.parent: {e}")))?;
        }
        if let Some(registry) = config
            .cache
            .insecure_registries
            .iter()
            .find(|r| r.contains('/'))
        {
            return Err(invalid(format!(
                "cache.insecure_registries: {registry:?} is not HOST[:PORT]"
            )));
        }
        if !(1..=1 << 20).contains(&l.slowest_mib_s) {
            return Err(invalid(format!(
                "limits.slowest_mib_s = {} is not within 1 and {}",
                l.slowest_mib_s,
                1 << 20
            )));
        }
        for (key, paths) in [
            ("mounts.allow", &config.mounts.allow),
            ("criu.config_directories", &config.criu.config_directories),
            ("vram.parents", &config.vram.parents),
            ("store", &config.store.directories()),
            ("store.used_in", &config.store.used_in),
            ("cache.path", &vec![config.cache.path.clone()]),
        ] {
            if let Some(path) = paths.iter().find(|p| !p.is_absolute()) {
                return Err(invalid(format!(
                    "{key}: {} is no absolute path",
                    path.display()
                )));
            }
        }
        let restore = config.restore.check();
        restore.map_err(|e| invalid(format!("restore.allow: {e}")))?;
        if config.checkpoint.require.is_some() || !config.checkpoint.keys.is_empty() {
            return Err(invalid(
                "checkpoint: `require` and `keys` are [restore]'s".into(),
            ));
        }
        let places = config.checkpoint.check_places();
        places.map_err(|e| invalid(format!("checkpoint.allow: {e}")))?;
        if let Some(map) = &config.gpu.map {
            map.parse::<cryopod_gpu_plan::mapping::gpumap::Wish>()
                .map_err(|e| invalid(format!("gpu.map: {e}")))?;
        }
        // Only this file decides on privileges, never an annotation.
        let known = |key: &&String| {
            switches::known(key) || [PRIVILEGES_CHECK, IMAGES_CHECK].contains(&key.as_str())
        };
        if let Some(key) = config.checks.keys().find(|key| !known(key)) {
            return Err(invalid(format!(
                "checks.{key}: no such check; there are {}, {}",
                PRIVILEGES_CHECK,
                switches::names()
            )));
        }
        for (key, value) in &mut config.criu.options {
            if key.is_empty()
                || !key
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
            {
                return Err(invalid(format!(
                    "criu.options.{key:?} is not the name of a CRIU option"
                )));
            }
            if matches!(key.as_str(), "libdir" | "action-script") {
                return Err(invalid(format!(
                    "criu.options.{key} is set by cryopod for each operation"
                )));
            }
            *value = criu_values::checked(key, value)
                .map_err(|reason| invalid(format!("criu.options.{key}: {reason}")))?;
        }
        Ok(config)
    }
}

/// Finds the line of the key with which a reason begins, unless it is in an inline table.
fn line_of(text: &str, reason: &str) -> Option<usize> {
    let key = reason.split([' ', ':']).next()?;
    let mut table = "";
    for (number, line) in (1..).zip(text.lines().map(str::trim)) {
        let header = line.strip_prefix('[').and_then(|rest| rest.split_once(']'));
        table = header.map_or(table, |(name, _)| name.trim());
        let name = line.split_once('=').map(|(name, _)| name.trim());
        let is_of_table = |name| {
            key.strip_prefix(table)?
                .strip_prefix('.')?
                .strip_prefix(name)
        };
        let is_it = |name| (name == key && table.is_empty()) || is_of_table(name) == Some("");
        if name.is_some_and(is_it) {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("c.toml")).map_err(|e| e.to_string())
    }

    #[test]
    fn defaults_and_values() {
        assert_eq!(parse("").unwrap(), Config::default());
        let c = parse("[runtime]\nlow_level = \"runc\"\n[criu.options]\nghost-limit = \"300M\"\nlink-remap = true\n[limits]\ntool_s = 5\n").unwrap();
        assert_eq!(c.runtime.low_level.as_deref(), Some("runc"));
        assert_eq!(c.criu.options["link-remap"], CriuValue::Flag(true));
        assert_eq!((c.limits.tool_s, c.limits.checkpoint_s), (5, 900));
        let c = parse("[criu.options]\nlink-remap = \"off\"").unwrap();
        assert_eq!(c.criu.options["link-remap"], CriuValue::Flag(false));
    }

    #[test]
    fn the_example_in_the_documents_is_valid() {
        let examples = |page: &'static str| page.split("```toml\n").skip(1);
        let configuration: Vec<_> =
            examples(include_str!("../../../docs/configuration.md")).collect();
        assert!(configuration.len() > 1, "the whole file, and rules");
        let copies = examples(include_str!("../../../docs/copies.md"));
        let store = examples(include_str!("../../../docs/containerd.md"));
        for example in configuration.into_iter().chain(copies).chain(store) {
            let example = example.split("```").next().unwrap();
            let config = parse(example).unwrap_or_else(|e| panic!("{example}: {e}"));
            assert_ne!(config, Config::default(), "{example}");
        }
    }

    #[test]
    fn limits_grow_with_the_data() {
        let limits = parse("[limits]\ncheckpoint_s = 60\nslowest_mib_s = 100\n")
            .unwrap()
            .limits;
        for (bytes, seconds) in [
            (0, 60),
            (6000 << 20, 60),
            (6100 << 20, 61),
            (1 << 40, 10485),
        ] {
            assert_eq!(limits.checkpoint(bytes), Duration::from_secs(seconds));
        }
        assert_eq!(limits.restore(1 << 30), Duration::from_secs(900));
    }

    #[test]
    fn of_an_invalid_file_the_low_level_runtime_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.toml");
        for (text, want) in [
            (
                "renamed = 1\n[runtime]\nlow_level = \"runc\"\nnew = 2",
                Some(Some("runc")),
            ),
            ("[criu]\nrenamed = 1", Some(None)),
            ("[runtime]\nlow_level = 1", None),
            ("runtime = 1", Some(None)),
            ("[runtime", Some(None)),
            ("[runtime\nlow_level = \"runc\"", None),
            ("[criu\n[runtime]\nlow_level = \"runc\"", Some(Some("runc"))),
            (
                "[runtime]\nlow_level = \"runc\"\n[limits]\ntool_s =",
                Some(Some("runc")),
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            assert!(Config::read(&path, true).is_err(), "{text}");
            let read = Config::of_invalid(&path);
            let low_level = read.as_ref().map(|c| c.runtime.low_level.as_deref());
            assert_eq!(low_level, want, "{text}");
        }
    }

    #[test]
    fn mistakes_name_file_and_key() {
        for (text, needle) in [
            ("[runtime]\nlow_levle = \"runc\"", "low_levle"),
            ("[limits]\ntool_s = 0", "limits.tool_s = 0"),
            ("[limits]\nslowest_mib_s = 0", "limits.slowest_mib_s = 0"),
            ("[criu.options]\nlibdir = \"/x\"", "criu.options.libdir"),
            ("[criu.options]\n\"a b\" = true", "a b"),
            ("[criu.options]\ntimeout = true", "criu.options.timeout"),
            (
                "[criu.options]\ntcp-close = \"no\"",
                "criu.options.tcp-close",
            ),
            (
                "[criu.options]\nghost-limit = \"8g\"",
                "criu.options.ghost-limit",
            ),
            (
                "[criu.options]\nexternal = [\"a b\"]",
                "criu.options.external",
            ),
            ("[gpu]\nmap = \"0\"", "gpu.map"),
            ("[nvidia]\nvram = \"yes\"", "vram"),
            ("[nvidia]\nsharing = \"yes\"", "sharing = \"yes\""),
            ("[vram]\nchunk_kib = 100", "chunk_kib"),
            ("[vram]\nparent = \"of\"", "line 2: vram.parent: \"of\""),
            ("[vram]\nparents = [\"opt\"]", "line 2: vram.parents: opt"),
            (
                "[nvidia]\nlock_timeout_ms = 0",
                "line 2: nvidia.lock_timeout_ms = 0",
            ),
            (
                "nvidia.lock_timeout_ms = 86400001",
                "line 1: nvidia.lock_timeout_ms",
            ),
            (
                "[amd]\n[nccl]\n\n quiesce_s=86401",
                "line 4: nccl.quiesce_s = 86401",
            ),
            (
                "[cache]\ninsecure_registries = [\"http://r:5000\"]",
                "\"http://r:5000\"",
            ),
            (
                "[cache]\ninsecure_registries = [\"r/\"]",
                "\"r/\" is not HOST",
            ),
            (
                "[checkpoint]\nallow = [\"docker://r\"]",
                "checkpoint.allow: docker://r",
            ),
            (
                "[restore]\nallow = [\"docker://\"]",
                "restore.allow: docker://",
            ),
            ("[checks]\nnvidia-memry = false", "checks.nvidia-memry"),
            ("[checks]\nnvidia-memory = 1", "nvidia-memory"),
            ("[mounts]\nallow = [\"opt\"]", "mounts.allow: opt"),
            ("[restore]\nallow = [\"opt\"]", "restore.allow: opt"),
            (
                "[criu]\nconfig_directories = [\"etc\"]",
                "criu.config_directories: etc",
            ),
            ("[criu]\nprogram = \"/opt/criu-4.2\"", "criu.program"),
            ("[criu]\nprogram = \"bin/criu\"", "criu.program"),
            ("[gpu]\nallow_others = \"yes\"", "allow_others"),
            ("[store]\npath = \"opt\"", "store: opt"),
            ("[store]\nsearch = [\"/a\", \"b\"]", "store: b"),
            ("[store]\nuse = \"yes\"", "use"),
            ("runtime = 1", "runtime"),
            ("[", "c.toml"),
        ] {
            let e = parse(text).unwrap_err();
            assert!(
                e.starts_with("c.toml: ") && e.contains(needle),
                "{text}: {e}"
            );
        }
        assert_eq!(
            Config::read(Path::new("/no/such"), false).unwrap(),
            Config::default()
        );
        assert!(Config::read(Path::new("/no/such"), true).is_err());
        let empty = Config::load_from(Some("".as_ref())).map_err(|e| e.to_string());
        assert_eq!(empty, Config::load_from(None).map_err(|e| e.to_string()));
    }
}
