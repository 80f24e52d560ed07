//! Compares GPU properties as CRIU's amdgpu plugin does between a GPU of the checkpoint and one of this host. Handles
//! the environment variables that disable some comparisons (facts of CRIU 4.1.1 and 4.2; the plugin reads them at
//! restore only).

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::topology::{KfdProperties, Node, Topology};
use cryopod_gpu_plan::checks::compat::{Check, Verdict};
use cryopod_gpu_plan::checks::switches::Switches;

const NAMED: usize = 4;

pub(super) struct KfdRule {
    pub(super) name: &'static str,
    get: fn(&KfdProperties) -> u64,
    /// The target may have more.
    at_most: bool,
    /// The name of the check that disables the comparison.
    switch: Option<&'static str>,
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
    rule!(capability, false, Some("KFD_CAPABILITY_CHECK"), Show::Hex),
    rule!(vram_size, true, Some("KFD_VRAM_SIZE_CHECK"), Show::Bytes),
    rule!(num_gws, true, Some("KFD_NUM_GWS_CHECK"), Show::Decimal),
    rule!(
        caches_count,
        true,
        Some("KFD_CACHES_COUNT_CHECK"),
        Show::Decimal
    ),
    rule!(fw_version, true, Some("KFD_FW_VER_CHECK"), Show::Decimal),
    rule!(
        sdma_fw_version,
        true,
        Some("KFD_SDMA_FW_VER_CHECK"),
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

    fn verdict(&self, source: &Node, target: &Node, switches: &Switches) -> Verdict {
        if self.holds(source, target) {
            Verdict::Ok
        } else if self.switch.is_some_and(|s| !switches.on(s)) {
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
            Some(switch) => format!("{} ({})", switch, self.name),
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
            switch: self.switch.map(|s| format!("{}=0", s)),
            remedy: self.remedy(),
        }
    }
}

/// Compares a GPU of the checkpoint with one of this host in every property.
pub fn compare(source: &Node, target: &Node, switches: &Switches) -> Vec<Check> {
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
pub fn matches(source: &Node, target: &Node, switches: &Switches) -> bool {
    RULES
        .iter()
        .all(|rule| rule.verdict(source, target, switches) != Verdict::Refused)
}

/// Explains why no GPU of this host can replace this one: for each comparison the targets that it rules out.
pub fn explain(source: &Node, targets: &Topology, switches: &Switches) -> Vec<Check> {
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
