//! Collects the CRIU options of one operation: cryopod's defaults, the configuration's `[criu.options]`, the
//! container's annotations `dev.cryopod.criu.NAME`, each overriding the one before.
//!
//! A runtime sends some of them to CRIU itself, switched off unless its command line sets them, and these override any
//! configuration file. So cryopod passes those as the runtime's flags, too.

use crate::error::Error;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cryopod_gpu_plan::ceiling::{AskedNode, Ceiling};
use cryopod_gpu_plan::hazards::Connection;
use cryopod_gpu_plan::refusal::Refusal;

use cryopod_host::spec::Spec;
use serde_json::Value;

use crate::config::CriuValue;
use crate::config::criu_values::{self, Lock};
use crate::criu::file;
use crate::criu::numbers;
use crate::request::argv::Flags;
use crate::request::lowlevel::RuntimeKind;

/// Prefix of annotations that set a CRIU option.
pub const ANNOTATION: &str = "dev.cryopod.criu.";

/// Defaults for GPU workloads. Limits in CRIU's units.
const DEFAULTS: [(&str, Option<&str>); 5] = [
    // Deleted files that are still open: CRIU's own limit is 1 MiB, PyTorch's shared tensors are larger.
    ("ghost-limit", Some("2G")),
    // Files that were opened under a name they no longer have (POSIX semaphores).
    ("link-remap", None),
    ("file-locks", None),
    ("ext-unix-sk", None),
    // Connections that are being made: the other side tries again.
    ("skip-in-flight", None),
];

const NETWORK_LOCK: &str = "network-lock";

/// Options that a restore needs as their checkpoint had them.
const FOR_THE_RESTORE: [&str; 5] = [
    "tcp-established",
    "tcp-close",
    "file-locks",
    "ext-unix-sk",
    "mntns-compat-mode",
];

/// Options that CRIU refuses at a checkpoint ("is only valid on restore", config.c).
const ONLY_AT_RESTORES: [&str; 1] = ["mntns-compat-mode"];

/// Why the CRIU options of a container cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum OptionError {
    /// A container may not set this option.
    #[error("annotation {ANNOTATION}{name}: {refused}")]
    Unknown {
        name: String,
        /// Why, and what can be done.
        refused: String,
    },
    #[error("annotation {ANNOTATION}{name}: {reason}")]
    Value { name: String, reason: String },
}

/// CRIU's options by their names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CriuOptions(BTreeMap<String, CriuValue>);

impl CriuOptions {
    /// Collects the options. `user_texts`: CRIU configurations that come before cryopod's; a default does not override
    /// them.
    pub fn of(
        config: &BTreeMap<String, CriuValue>,
        ceiling: &Ceiling<'_>,
        user_texts: &[String],
    ) -> Result<Self, OptionError> {
        let mut all = BTreeMap::new();
        for (name, value) in DEFAULTS {
            // A configuration can only switch a default option on, which it is, or off. Left out, the runtime would send it
            // to CRIU switched off.
            let overridden = match value {
                Some(_) => name.to_owned(),
                None => format!("no-{name}"),
            };
            if !user_texts.iter().any(|t| mentions(t, &overridden)) {
                let value = value.map_or(CriuValue::Flag(true), |v| CriuValue::Text(v.to_owned()));
                all.insert(name.to_owned(), value);
            }
        }
        all.extend(config.iter().map(|(k, v)| (k.clone(), v.clone())));
        let annotations = ceiling
            .spec
            .json()
            .get("annotations")
            .and_then(|a| a.as_object());
        for (key, value) in annotations.into_iter().flatten() {
            let Some(name) = key.strip_prefix(ANNOTATION) else {
                continue;
            };
            if let Err(refused) = ceiling.admit(AskedNode::CriuOption(name)) {
                return Err(OptionError::Unknown {
                    name: name.to_owned(),
                    refused: refused.to_string(),
                });
            }
            all.insert(name.to_owned(), annotated(name, value)?);
        }
        Ok(Self(all))
    }

    /// Checks the values of a container's annotations, which count at its checkpoints, perhaps days later.
    pub fn check_annotations(spec: &Spec) -> Result<(), OptionError> {
        let annotations = spec.json().get("annotations").and_then(|a| a.as_object());
        for (key, value) in annotations.into_iter().flatten() {
            if let Some(name) = key.strip_prefix(ANNOTATION) {
                annotated(name, value)?;
            }
        }
        Ok(())
    }

    /// Returns true if the option is set, and not to `false`.
    pub fn on(&self, name: &str) -> bool {
        self.0
            .get(name)
            .is_some_and(|v| *v != CriuValue::Flag(false))
    }

    /// Returns the words of an option that takes text, one or several.
    pub fn texts(&self, name: &str) -> Vec<String> {
        match self.0.get(name) {
            Some(CriuValue::Text(word)) => vec![word.clone()],
            Some(CriuValue::List(words)) => words.clone(),
            _ => Vec::new(),
        }
    }

    /// The largest deleted file that CRIU dumps, in bytes. No limit is known where the user's CRIU configuration sets
    /// it.
    pub fn ghost_limit(&self) -> u64 {
        let text = match self.0.get("ghost-limit") {
            Some(CriuValue::Number(n)) => return u64::try_from(*n).unwrap_or(u64::MAX),
            Some(CriuValue::Text(text)) => text,
            _ => return u64::MAX,
        };
        criu_values::size(text).unwrap_or(u64::MAX)
    }

    fn set(&mut self, name: &str) {
        self.0.insert(name.to_owned(), CriuValue::Flag(true));
    }

    /// Decides about established TCP connections at a checkpoint. Those within the container's own loopback can be
    /// restored anywhere; about others the user must decide.
    pub fn settle_tcp(&mut self, flags: &Flags, connections: &[Connection]) -> Vec<Refusal> {
        let keep = self.on("tcp-established") || flags.has("tcp-established");
        let close = self.on("tcp-close") || flags.has("tcp-close");
        if connections.is_empty() || keep || close {
            return Vec::new();
        }
        let outside: Vec<&Connection> = connections.iter().filter(|c| !c.loopback).collect();
        let Some(first) = outside.first() else {
            self.set("tcp-established");
            return Vec::new();
        };
        let more = match outside.len() {
            1 => String::new(),
            n => format!(" and {} more", n - 1),
        };
        vec![Refusal {
            process: Some(first.process.clone()),
            what: format!("has an established TCP connection ({}){more}", first.ends),
            remedy: format!(
                "set the annotation {ANNOTATION}tcp-established=true to keep it (the restored container must have the same address) or {ANNOTATION}tcp-close=true to close it, or the same under [criu.options] in /etc/cryopod/config.toml; podman has --tcp-established"
            ),
        }]
    }

    /// The network lock for CRIU: from the command line, from these options, or else from the last of the user's
    /// configurations `texts` that names one.
    pub fn network_lock(&self, flags: &Flags, texts: &[String]) -> Option<Lock> {
        let flag = flags.value(NETWORK_LOCK).and_then(|v| v.to_str());
        flag.and_then(Lock::of)
            .or_else(|| Self::in_texts(texts, &self.0))
    }

    /// The same without a container. `options`: the configuration's.
    pub fn in_files(files: &[PathBuf], options: &BTreeMap<String, CriuValue>) -> Option<Lock> {
        let texts = files.iter().filter_map(|p| file::read(p).ok());
        Self::in_texts(&texts.collect::<Vec<_>>(), options)
    }

    fn in_texts(texts: &[String], options: &BTreeMap<String, CriuValue>) -> Option<Lock> {
        if let Some(CriuValue::Text(word)) = options.get(NETWORK_LOCK) {
            return Lock::of(word);
        }
        let of = |text: &str| {
            let lines = text.lines().filter_map(|l| value_of(l, NETWORK_LOCK));
            lines.filter_map(Lock::of).next_back()
        };
        texts.iter().filter_map(|text| of(text)).next_back()
    }

    /// Sets the network lock, if one is given.
    pub fn use_lock(&mut self, lock: Option<Lock>) {
        if let Some(lock) = lock {
            let value = CriuValue::Text(lock.word().to_owned());
            self.0.insert(NETWORK_LOCK.to_owned(), value);
        }
    }

    /// The options that a restore of the images needs again, for the metadata.
    pub fn for_the_restore(&self, flags: &Flags) -> Vec<String> {
        FOR_THE_RESTORE
            .iter()
            .filter(|name| self.on(name) || flags.has(name))
            .map(|name| (*name).to_owned())
            .collect()
    }

    /// Takes over what the checkpoint had on. Unknown names are ignored, as anybody may have written the metadata.
    pub fn as_at_the_checkpoint(&mut self, recorded: &[String], flags: &Flags) {
        let close = flags.has("tcp-close") || self.on("tcp-close");
        for name in recorded {
            let known = FOR_THE_RESTORE.contains(&name.as_str());
            if known && !(close && name.starts_with("tcp-")) {
                self.set(name);
            }
        }
    }

    /// Returns the missing flags for the low-level runtime's command line: of all that it sends to CRIU, switched off
    /// unless it has the flag. `version`: the first line of its `--version`.
    ///
    /// | sent by | checkpoint | restore |
    /// |---|---|---|
    /// | runc, crun | tcp-established, file-locks, ext-unix-sk, shell-job | the same |
    /// | runc from 1.3 | tcp-skip-in-flight, link-remap | |
    /// | crun from 1.23 | | tcp-close |
    ///
    /// `leave-running` and what tracks memory are the engine's. Cgroups are managed, and orphaned terminals adopted,
    /// whatever a configuration says.
    pub fn flags(
        &self,
        kind: RuntimeKind,
        version: Option<&str>,
        checkpoint: bool,
        given: &Flags,
    ) -> Vec<&'static str> {
        let version = version.and_then(numbers).unwrap_or_default();
        let from = |first: [u32; 2]| version.as_slice() >= first.as_slice();
        let mut wanted = vec![
            ("tcp-established", "--tcp-established"),
            ("file-locks", "--file-locks"),
            ("ext-unix-sk", "--ext-unix-sk"),
            ("shell-job", "--shell-job"),
        ];
        if kind == RuntimeKind::Runc && checkpoint && from([1, 3]) {
            wanted.push(("skip-in-flight", "--tcp-skip-in-flight"));
            wanted.push(("link-remap", "--link-remap"));
        }
        if kind == RuntimeKind::Crun && !checkpoint && from([1, 23]) {
            wanted.push(("tcp-close", "--tcp-close"));
        }
        wanted
            .into_iter()
            .filter(|(name, flag)| self.on(name) && !given.has(flag.trim_start_matches('-')))
            .map(|(_, flag)| flag)
            .collect()
    }

    /// Returns the lines of CRIU's configuration for a restore or a checkpoint.
    pub fn lines(&self, restore: bool) -> Vec<String> {
        let mut lines = Vec::new();
        let told = |name: &str| restore || !ONLY_AT_RESTORES.contains(&name);
        for (name, value) in self.0.iter().filter(|(name, _)| told(name)) {
            match value {
                CriuValue::Flag(true) => lines.push(name.clone()),
                CriuValue::Flag(false) => {}
                CriuValue::Number(n) => lines.push(format!("{name} {n}")),
                CriuValue::Text(word) => lines.push(format!("{name} {word}")),
                CriuValue::List(words) => {
                    lines.extend(words.iter().map(|word| format!("{name} {word}")));
                }
            }
        }
        lines
    }
}

/// The value of an annotation.
fn annotated(name: &str, value: &Value) -> Result<CriuValue, OptionError> {
    let text = value.as_str().unwrap_or_default().trim();
    let value = criu_values::checked(name, &CriuValue::Text(text.to_owned()));
    value.map_err(|reason| OptionError::Value {
        name: name.to_owned(),
        reason,
    })
}

fn mentions(text: &str, name: &str) -> bool {
    text.lines().any(|line| value_of(line, name).is_some())
}

/// Returns the value that a configuration line gives this option, `""` for one without a value; `None` for other lines.
fn value_of<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let words = line.split(|c: char| c.is_whitespace() || c == '=');
    let mut words = words.filter(|w| !w.is_empty());
    (words.next()?.trim_start_matches('-') == name)
        .then(|| words.next().unwrap_or_default().trim_matches('"'))
}

/// The files that CRIU reads before cryopod's, and the one that cryopod's contains a copy of.
pub fn earlier_files() -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/criu/default.conf")];
    if let Some(home) = std::env::var_os("HOME").filter(|h| !h.is_empty()) {
        files.push(Path::new(&home).join(".criu/default.conf"));
    }
    if let Some(file) = std::env::var_os("CRIU_CONFIG_FILE").filter(|f| !f.is_empty()) {
        files.push(file.into());
    }
    files
}

impl From<OptionError> for Error {
    fn from(error: OptionError) -> Self {
        Self::Failed(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::argv::decode;
    use cryopod_gpu_plan::ceiling::Lifts;
    use cryopod_host::files::Host;

    use serde_json::json;
    use std::ffi::OsString;

    fn options(config: &[(&str, CriuValue)], annotations: serde_json::Value) -> CriuOptions {
        let config = config
            .iter()
            .map(|(k, v)| ((*k).to_owned(), v.clone()))
            .collect();
        of(&config, json!({"annotations": annotations}), &[]).unwrap()
    }

    fn of(
        config: &BTreeMap<String, CriuValue>,
        spec: serde_json::Value,
        texts: &[String],
    ) -> Result<CriuOptions, OptionError> {
        let ceiling = Ceiling {
            host: &Host::at("/nowhere"),
            spec: &Spec::from_json(spec),
            lifts: Lifts::default(),
        };
        CriuOptions::of(config, &ceiling, texts)
    }

    fn given(line: &str) -> Flags {
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        decode(RuntimeKind::Crun, &args).unwrap().flags
    }

    fn connection(loopback: bool) -> Connection {
        Connection {
            process: (7, "redis".into()),
            ends: "a - b".into(),
            loopback,
        }
    }

    #[test]
    fn each_overrides_the_one_before() {
        let o = options(&[], json!({}));
        assert_eq!(
            o.lines(false),
            [
                "ext-unix-sk",
                "file-locks",
                "ghost-limit 2G",
                "link-remap",
                "skip-in-flight"
            ]
        );
        let off =
            json!({"dev.cryopod.criu.link-remap": "off", "dev.cryopod.criu.file-locks": "on"});
        let o = options(&[], off);
        assert!(!o.on("link-remap") && o.lines(false).contains(&"file-locks".to_owned()));
        let config = [
            ("ghost-limit", CriuValue::Number(5)),
            ("file-locks", CriuValue::Flag(false)),
            ("skip-mnt", CriuValue::List(vec!["/a".into(), "/b".into()])),
        ];
        let o = options(
            &config,
            json!({"dev.cryopod.criu.ghost-limit": "9M", "dev.cryopod.criu.link-remap": "false", "other": "x"}),
        );
        assert_eq!(
            o.lines(false),
            [
                "ext-unix-sk",
                "ghost-limit 9M",
                "skip-in-flight",
                "skip-mnt /a",
                "skip-mnt /b"
            ]
        );
    }

    #[test]
    fn limits_that_criu_has() {
        let limit = |value: CriuValue| options(&[("ghost-limit", value)], json!({})).ghost_limit();
        assert_eq!(limit(CriuValue::Number(5)), 5);
        assert_eq!(limit(CriuValue::Text("9M".into())), 9 << 20);
        assert_eq!(limit(CriuValue::Text("64K".into())), 64 << 10);
        assert_eq!(limit(CriuValue::Text("much".into())), u64::MAX);
        assert_eq!(options(&[], json!({})).ghost_limit(), 2 << 30);
        let o = options(
            &[(
                "irmap-scan-path",
                CriuValue::List(vec!["/a".into(), "/b".into()]),
            )],
            json!({}),
        );
        assert_eq!(o.texts("irmap-scan-path"), ["/a", "/b"]);
        assert!(o.texts("file-locks").is_empty());
    }

    #[test]
    fn a_default_does_not_override_the_users_file() {
        let text =
            "# x\n ghost-limit=5M\n--file-locks\nno-link-remap\nno-ext-unix-sks\n".to_owned();
        let o = of(&BTreeMap::new(), json!({}), &[text]).unwrap();
        assert_eq!(
            o.lines(false),
            ["ext-unix-sk", "file-locks", "skip-in-flight"]
        );
    }

    #[test]
    fn how_the_network_is_locked() {
        let mut files = Vec::new();
        let none = given("checkpoint c1");
        let mut o = options(&[], json!({}));
        assert_eq!(o.network_lock(&none, &files), None);
        files.push("network-lock skip\n# network-lock nftables\n".to_owned());
        assert_eq!(o.network_lock(&none, &files), Some(Lock::Skip));
        files.push("--network-lock=\"nftables\"\n".to_owned());
        assert_eq!(o.network_lock(&none, &files), Some(Lock::Nftables));
        let asked = options(&[], json!({"dev.cryopod.criu.network-lock": "iptables"}));
        assert_eq!(asked.network_lock(&none, &files), Some(Lock::Iptables));
        let flag = given("checkpoint --network-lock skip c1");
        assert_eq!(asked.network_lock(&flag, &files), Some(Lock::Skip));
        o.use_lock(Some(Lock::Nftables));
        assert!(o.lines(false).contains(&"network-lock nftables".to_owned()));
    }

    #[test]
    fn annotations_set_no_files_and_programs() {
        for (name, value) in [
            ("action-script", "/x"),
            ("libdir", "/x"),
            ("external", "mnt[/a]:/etc"),
            ("ghost-limit", "1 G"),
            ("ghost-limit", ""),
            ("timeout", "5\nlibdir /x"),
            ("timeout", "true"),
            ("link-remap", "no"),
        ] {
            let key = format!("{ANNOTATION}{name}");
            let spec = json!({"annotations": {key.clone(): value}});
            let e = of(&BTreeMap::new(), spec, &[]).unwrap_err();
            assert!(e.to_string().contains(&key), "{e}");
        }
    }

    #[test]
    fn connections() {
        let none = given("checkpoint c1");
        let mut o = options(&[], json!({}));
        assert!(o.settle_tcp(&none, &[]).is_empty() && !o.on("tcp-established"));
        assert!(o.settle_tcp(&none, &[connection(true)]).is_empty());
        assert!(o.on("tcp-established"), "loopback goes anywhere");
        let mut o = options(&[], json!({}));
        let both = [connection(true), connection(false)];
        let told = o.settle_tcp(&none, &both)[0].to_string();
        assert!(
            told.contains("process 7 (redis)") && told.contains("dev.cryopod.criu.tcp-close=true"),
            "{told}"
        );
        assert!(
            o.settle_tcp(&given("checkpoint --tcp-established c1"), &both)
                .is_empty()
        );
        let mut o = options(&[], json!({"dev.cryopod.criu.tcp-close": "true"}));
        assert!(o.settle_tcp(&none, &both).is_empty() && !o.on("tcp-established"));
    }

    #[test]
    fn the_restore_does_as_the_checkpoint_did() {
        let mut o = options(&[], json!({}));
        o.settle_tcp(&given("checkpoint c1"), &[connection(true)]);
        let recorded = o.for_the_restore(&given("checkpoint c1"));
        assert_eq!(recorded, ["tcp-established", "file-locks", "ext-unix-sk"]);
        let mut r = options(&[("file-locks", CriuValue::Flag(false))], json!({}));
        let strange = [recorded, vec!["action-script".into()]].concat();
        r.as_at_the_checkpoint(&strange, &given("restore c1"));
        assert!(r.on("tcp-established") && r.on("file-locks") && !r.on("action-script"));
        let o = options(&[], json!({"dev.cryopod.criu.mntns-compat-mode": "true"}));
        let compat = "mntns-compat-mode".to_owned();
        assert!(o.for_the_restore(&given("checkpoint c1")).contains(&compat));
        assert!(!o.lines(false).contains(&compat) && o.lines(true).contains(&compat));
        let mut r = options(&[], json!({}));
        r.as_at_the_checkpoint(&strange, &given("restore --tcp-close c1"));
        assert!(!r.on("tcp-established"));
    }

    #[test]
    fn as_flags_of_the_runtime() {
        let closing = options(&[("tcp-close", CriuValue::Flag(true))], json!({}));
        for (kind, version, line, want) in [
            (
                RuntimeKind::Crun,
                "crun version 1.21",
                "checkpoint --file-locks c1",
                &["--ext-unix-sk"][..],
            ),
            (
                RuntimeKind::Runc,
                "runc version 1.3.6+ds1",
                "checkpoint c1",
                &[
                    "--file-locks",
                    "--ext-unix-sk",
                    "--tcp-skip-in-flight",
                    "--link-remap",
                ],
            ),
            (
                RuntimeKind::Runc,
                "runc version 1.1.15",
                "checkpoint c1",
                &["--file-locks", "--ext-unix-sk"],
            ),
            (
                RuntimeKind::Runc,
                "runc version 1.3.6",
                "restore c1",
                &["--file-locks", "--ext-unix-sk"],
            ),
            (
                RuntimeKind::Crun,
                "crun version 1.22",
                "restore c1",
                &["--file-locks", "--ext-unix-sk"],
            ),
            (
                RuntimeKind::Crun,
                "crun version 1.28",
                "restore c1",
                &["--file-locks", "--ext-unix-sk", "--tcp-close"],
            ),
            (
                RuntimeKind::Crun,
                "crun version 1.28",
                "restore --tcp-close c1",
                &["--file-locks", "--ext-unix-sk"],
            ),
        ] {
            let checkpoint = line.starts_with("checkpoint");
            let got = closing.flags(kind, Some(version), checkpoint, &given(line));
            assert_eq!(got, want, "{version}: {line}");
        }
    }
}
