//! Compares GPU properties as CRIU's amdgpu plugin does between a GPU of the checkpoint and one of this host. Handles
//! the environment variables that disable some comparisons (facts of CRIU 4.1.1 and 4.2; the plugin reads them at
//! restore only).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::topology::{KfdProperties, Node, Topology};
use cryopod_gpu_plan::checks::compat::{Check, Verdict};

const NAMED: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Switch {
    /// `KFD_FW_VER_CHECK`: firmware, at least as new.
    FwVersion,
    /// `KFD_SDMA_FW_VER_CHECK`: SDMA firmware, at least as new.
    SdmaFwVersion,
    /// `KFD_CACHES_COUNT_CHECK`: caches, at least as many.
    CachesCount,
    /// `KFD_NUM_GWS_CHECK`: global wave sync units, at least as many.
    NumGws,
    /// `KFD_VRAM_SIZE_CHECK`: VRAM, at least as much.
    VramSize,
    /// `KFD_NUMA_CHECK`: GPUs of one CPU stay on one CPU.
    Numa,
    /// `KFD_CAPABILITY_CHECK`: the same capabilities.
    Capability,
}

impl Switch {
    pub const ALL: [Self; 7] = [
        Self::FwVersion,
        Self::SdmaFwVersion,
        Self::CachesCount,
        Self::NumGws,
        Self::VramSize,
        Self::Numa,
        Self::Capability,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::FwVersion => "KFD_FW_VER_CHECK",
            Self::SdmaFwVersion => "KFD_SDMA_FW_VER_CHECK",
            Self::CachesCount => "KFD_CACHES_COUNT_CHECK",
            Self::NumGws => "KFD_NUM_GWS_CHECK",
            Self::VramSize => "KFD_VRAM_SIZE_CHECK",
            Self::Numa => "KFD_NUMA_CHECK",
            Self::Capability => "KFD_CAPABILITY_CHECK",
        }
    }
}

/// The plugin's variable for the size of its copy buffer; it concerns no check.
pub const MAX_BUFFER_SIZE: &str = "KFD_MAX_BUFFER_SIZE";

/// A name or value that the plugin does not know (it would ignore it).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SwitchError {
    #[error("{0} is no variable of CRIU's amdgpu plugin; it knows {names} and {MAX_BUFFER_SIZE}", names = Switch::ALL.map(Switch::name).join(", "))]
    Unknown(String),
    #[error("{key}: {value:?} is none of 0, NO, 1 and YES")]
    Bool { key: String, value: String },
    #[error("{key}: {value:?} is not a size in bytes, or with K, M or G")]
    Size { key: String, value: String },
}

/// The enabled comparisons. By default all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KfdSwitches {
    set: BTreeMap<Switch, bool>,
    max_buffer_size: Option<String>,
}

impl KfdSwitches {
    /// Parses pairs of variable and value as the plugin would; a later pair wins. An error names the pair that it does
    /// not know.
    pub fn parse<K: AsRef<str>, V: AsRef<str>>(
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, SwitchError> {
        let mut switches = Self::default();
        for (key, value) in pairs {
            let (key, value) = (key.as_ref(), value.as_ref());
            if key == MAX_BUFFER_SIZE {
                if !is_size(value) {
                    return Err(SwitchError::Size {
                        key: key.to_owned(),
                        value: value.to_owned(),
                    });
                }
                switches.max_buffer_size = Some(value.to_owned());
                continue;
            }
            let Some(switch) = Switch::ALL.into_iter().find(|s| s.name() == key) else {
                return Err(SwitchError::Unknown(key.to_owned()));
            };
            let on = match value {
                "0" => false,
                "1" => true,
                v if v.eq_ignore_ascii_case("no") => false,
                v if v.eq_ignore_ascii_case("yes") => true,
                _ => {
                    return Err(SwitchError::Bool {
                        key: key.to_owned(),
                        value: value.to_owned(),
                    });
                }
            };
            switches.set.insert(switch, on);
        }
        Ok(switches)
    }

    pub fn is_on(&self, switch: Switch) -> bool {
        self.set.get(&switch).copied().unwrap_or(true)
    }

    #[must_use]
    pub fn with(mut self, switch: Switch, on: bool) -> Self {
        self.set.insert(switch, on);
        self
    }

    /// Returns the environment for CRIU that makes the plugin do the same: every switch explicitly.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        let mut env: Vec<_> = Switch::ALL
            .into_iter()
            .map(|s| (s.name(), if self.is_on(s) { "1" } else { "0" }.to_owned()))
            .collect();
        env.extend(
            self.max_buffer_size
                .clone()
                .map(|size| (MAX_BUFFER_SIZE, size)),
        );
        env
    }
}

/// A decimal number of bytes, or one with a suffix.
fn is_size(value: &str) -> bool {
    let (number, shift) = match value.as_bytes().last() {
        Some(b'k' | b'K') => (&value[..value.len() - 1], 10),
        Some(b'M') => (&value[..value.len() - 1], 20),
        Some(b'G') => (&value[..value.len() - 1], 30),
        _ => (value, 0),
    };
    number.bytes().all(|b| b.is_ascii_digit())
        && number
            .parse::<u64>()
            .is_ok_and(|n| n.leading_zeros() >= shift || n == 0)
}

pub(super) struct KfdRule {
    pub(super) name: &'static str,
    get: fn(&KfdProperties) -> u64,
    /// The target may have more.
    at_most: bool,
    switch: Option<Switch>,
    show: Show,
}

enum Show {
    Decimal,
    Hex,
    Bytes,
    VramKind,
}

macro_rules! rule {
    ($field:ident) => {
        rule!($field, false, None, Show::Decimal)
    };
    ($field:ident, $show:expr) => {
        rule!($field, false, None, $show)
    };
    ($field:ident, $at_most:expr, $switch:expr, $show:expr) => {
        KfdRule {
            name: stringify!($field),
            get: |p| u64::from(p.$field),
            at_most: $at_most,
            switch: $switch,
            show: $show,
        }
    };
}

/// Everything that the plugin compares of a GPU.
pub(super) const RULES: &[KfdRule] = &[
    rule!(vendor_id, Show::Hex),
    rule!(device_id, Show::Hex),
    rule!(simd_count),
    rule!(mem_banks_count),
    rule!(io_links_count),
    rule!(max_waves_per_simd),
    rule!(lds_size_in_kb),
    rule!(wave_front_size),
    rule!(array_count),
    rule!(simd_arrays_per_engine),
    rule!(cu_per_simd_array),
    rule!(simd_per_cu),
    rule!(max_slots_scratch_cu),
    rule!(num_sdma_engines),
    rule!(num_sdma_xgmi_engines),
    rule!(num_sdma_queues_per_engine),
    rule!(num_cp_queues),
    rule!(vram_public, Show::VramKind),
    rule!(capability, false, Some(Switch::Capability), Show::Hex),
    rule!(vram_size, true, Some(Switch::VramSize), Show::Bytes),
    rule!(num_gws, true, Some(Switch::NumGws), Show::Decimal),
    rule!(caches_count, true, Some(Switch::CachesCount), Show::Decimal),
    rule!(fw_version, true, Some(Switch::FwVersion), Show::Decimal),
    rule!(
        sdma_fw_version,
        true,
        Some(Switch::SdmaFwVersion),
        Show::Decimal
    ),
];

impl KfdRule {
    fn holds(&self, source: &Node, target: &Node) -> bool {
        let (a, b) = (
            (self.get)(&source.properties),
            (self.get)(&target.properties),
        );
        if self.at_most { a <= b } else { a == b }
    }

    fn verdict(&self, source: &Node, target: &Node, switches: &KfdSwitches) -> Verdict {
        if self.holds(source, target) {
            Verdict::Ok
        } else if self.switch.is_some_and(|s| !switches.is_on(s)) {
            Verdict::Relaxed
        } else {
            Verdict::Refused
        }
    }

    fn show(&self, node: &Node) -> String {
        let value = (self.get)(&node.properties);
        match self.show {
            Show::Decimal => value.to_string(),
            Show::Hex => format!("{value:#x}"),
            Show::Bytes => format!("{value} bytes"),
            Show::VramKind => if value == 0 {
                "private VRAM"
            } else {
                "public VRAM"
            }
            .to_owned(),
        }
    }

    /// The environment variable where there is one, else the property.
    fn title(&self) -> String {
        match self.switch {
            Some(switch) => format!("{} ({})", switch.name(), self.name),
            None => self.name.to_owned(),
        }
    }

    fn remedy(&self) -> String {
        match self.name {
            "vendor_id" | "device_id" => "restore on a GPU of the same model".into(),
            "fw_version" | "sdma_fw_version" => {
                "update this host's GPU firmware, or restore on a GPU whose firmware is as new".into()
            }
            "vram_size" => "restore on a GPU with at least as much VRAM".into(),
            "io_links_count" => {
                "restore on a host whose GPUs are linked to as many CPUs and GPUs as those of the checkpoint".into()
            }
            "mem_banks_count" | "vram_public" => {
                "restore on a GPU that shows its VRAM in the same way (large BAR)".into()
            }
            _ => "restore on a GPU of the same model, partitioned in the same way, under the same driver".into(),
        }
    }

    fn check(&self, subject: String, recorded: String, found: String, verdict: Verdict) -> Check {
        Check {
            name: self.title(),
            subject,
            recorded,
            found,
            verdict,
            switch: self.switch.map(|s| format!("{}=0", s.name())),
            remedy: self.remedy(),
        }
    }
}

/// Compares a GPU of the checkpoint with one of this host in every property.
pub fn compare(source: &Node, target: &Node, switches: &KfdSwitches) -> Vec<Check> {
    RULES
        .iter()
        .map(|rule| {
            rule.check(
                format!("{source} on {target}"),
                rule.show(source),
                rule.show(target),
                rule.verdict(source, target, switches),
            )
        })
        .collect()
}

/// Returns true if the GPU of this host can replace the other, considering only these two.
pub fn matches(source: &Node, target: &Node, switches: &KfdSwitches) -> bool {
    RULES
        .iter()
        .all(|rule| rule.verdict(source, target, switches) != Verdict::Refused)
}

/// Explains why no GPU of this host can replace this one: for each comparison the targets that it rules out.
pub fn explain(source: &Node, targets: &Topology, switches: &KfdSwitches) -> Vec<Check> {
    RULES
        .iter()
        .filter_map(|rule| {
            let failing: Vec<&Node> = targets
                .gpus()
                .filter(|t| rule.verdict(source, t, switches) == Verdict::Refused)
                .collect();
            let mut by_value: BTreeMap<u64, Vec<&Node>> = BTreeMap::new();
            for node in &failing {
                by_value
                    .entry((rule.get)(&node.properties))
                    .or_default()
                    .push(node);
            }
            let found: Vec<String> = by_value
                .values()
                .take(NAMED)
                .map(|nodes| format!("{} on {}", rule.show(nodes[0]), names(nodes)))
                .collect();
            let more = by_value.len().saturating_sub(NAMED);
            let mut found = found.join("; ");
            if more > 0 {
                let _ = write!(found, "; {more} more values");
            }
            (!failing.is_empty()).then(|| {
                rule.check(
                    source.to_string(),
                    rule.show(source),
                    found,
                    Verdict::Refused,
                )
            })
        })
        .collect()
}

/// Names GPUs by their render nodes, as many as fit into a message.
pub(super) fn names<'a>(nodes: impl IntoIterator<Item = &'a &'a Node>) -> String {
    let all: Vec<String> = nodes
        .into_iter()
        .map(|n| format!("renderD{}", n.render_minor()))
        .collect();
    if all.is_empty() {
        return "none".into();
    }
    let shown = all
        .iter()
        .take(2 * NAMED)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    match all.len().saturating_sub(2 * NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}
