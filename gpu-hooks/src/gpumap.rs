//! Which GPU of this host takes the place of which GPU of the checkpoint.
//!
//! NVIDIA's driver wants a map that names every GPU a process had, or none at all if nothing changes; a map needs
//! driver 580 or newer, and the target's device node inside the container, because it is the restored process that opens
//! it (facts of docs/compatibility.md).

use std::collections::BTreeSet;

use cryopod_archive::seal::{DeviceNode, Gpu};

use crate::cuda::gpu::{GpuPair, GpuUuid};
use crate::nodes;
use crate::nvidia;
use crate::plan::Refusal;

/// The annotation of a container that says how its GPUs are mapped.
pub const ANNOTATION: &str = "dev.cryopod.gpu.map";
/// The first NVIDIA driver branch that restores on other GPUs.
const FIRST_MAPPING_DRIVER: u32 = 580;

/// What the user asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Wish {
    /// The same GPUs where they are there, else others that match.
    #[default]
    Auto,
    /// These: each side a UUID, an index, a PCI address or the minor of a node (`/dev/nvidia3`). Recorded GPUs that
    /// are not named keep their place.
    Pairs(Vec<(String, String)>),
}

impl std::str::FromStr for Wish {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.is_empty() || text == "auto" {
            return Ok(Self::Auto);
        }
        let pairs = text.split(',').map(|pair| {
            let sides = pair.split_once('=').map(|(old, new)| (old.trim(), new.trim()));
            match sides {
                Some((old, new)) if !old.is_empty() && !new.is_empty() => Ok((old.to_owned(), new.to_owned())),
                _ => Err(format!("{pair:?} is not OLD=NEW; write `auto` or OLD=NEW[,OLD=NEW...] with GPU UUIDs, indices, PCI addresses or /dev/nvidiaN")),
            }
        });
        pairs.collect::<Result<_, _>>().map(Self::Pairs)
    }
}

/// What is known for the decision.
#[derive(Debug, Clone, Copy)]
pub struct Situation<'a> {
    /// The checkpoint's NVIDIA GPUs.
    pub recorded: &'a [Gpu],
    /// The checkpoint's device nodes.
    pub nodes: &'a [DeviceNode],
    /// The driver that the checkpoint was made with.
    pub recorded_driver: Option<&'a str>,
    /// This host's NVIDIA GPUs.
    pub here: &'a [Gpu],
    /// This host's driver.
    pub driver: Option<&'a str>,
}

/// Decides the map; empty if every GPU keeps its place.
///
/// # Errors
/// Every reason why the checkpoint cannot be restored here.
pub fn decide(situation: &Situation<'_>, wish: &Wish) -> Result<Vec<GpuPair>, Vec<Refusal>> {
    let mut refusals = Vec::new();
    driver(situation, &mut refusals);
    let chosen = match wish {
        Wish::Auto => auto(situation, &mut refusals),
        Wish::Pairs(pairs) => explicit(situation, pairs, &mut refusals),
    };
    let moved = chosen.iter().any(|(old, new)| old.id != new.id);
    if moved {
        mapping(situation, &chosen, &mut refusals);
    }
    if !refusals.is_empty() {
        return Err(refusals);
    }
    if !moved {
        return Ok(Vec::new());
    }
    let uuid = |gpu: &Gpu| {
        gpu.id.parse::<GpuUuid>().map_err(|e| {
            vec![refusal(
                e.to_string(),
                "the checkpoint's record or this host's driver gives no usable UUID",
            )]
        })
    };
    chosen
        .iter()
        .map(|(old, new)| {
            Ok(GpuPair {
                old: uuid(old)?,
                new: uuid(new)?,
            })
        })
        .collect()
}

fn refusal(what: impl Into<String>, remedy: impl Into<String>) -> Refusal {
    Refusal {
        process: None,
        what: what.into(),
        remedy: remedy.into(),
    }
}

/// The driver must not be older than the one that made the checkpoint. That there is one at all is the driver agent's to
/// find out.
fn driver(situation: &Situation<'_>, refusals: &mut Vec<Refusal>) {
    if let (Some(recorded), Some(here)) = (situation.recorded_driver, situation.driver)
        && numbers(here) < numbers(recorded)
    {
        refusals.push(refusal(
            format!(
                "the checkpoint was made with NVIDIA driver {recorded} and this host has {here}"
            ),
            format!("update this host's driver to {recorded} or newer"),
        ));
    }
}

fn numbers(version: &str) -> Vec<u32> {
    version.split('.').map_while(|n| n.parse().ok()).collect()
}

type Chosen<'a> = Vec<(&'a Gpu, &'a Gpu)>;

fn auto<'a>(situation: &Situation<'a>, refusals: &mut Vec<Refusal>) -> Chosen<'a> {
    let mut taken: BTreeSet<&str> = BTreeSet::new();
    let mut chosen = Vec::new();
    let mut homeless = Vec::new();
    for old in situation.recorded {
        match situation.here.iter().find(|g| g.id == old.id) {
            Some(same) => {
                taken.insert(&same.id);
                chosen.push((old, same));
            }
            None => homeless.push(old),
        }
    }
    for old in homeless {
        let mut matching: Vec<&Gpu> = situation
            .here
            .iter()
            .filter(|g| g.model == old.model && !taken.contains(g.id.as_str()))
            .collect();
        // Closest first: the same node, the same slot, then in order.
        matching.sort_by_key(|g| (g.minor != old.minor, g.pci != old.pci, g.index));
        match matching.first() {
            Some(new) => {
                taken.insert(&new.id);
                chosen.push((old, *new));
            }
            None => refusals.push(refusal(
                format!(
                    "no GPU of this host can take the place of {} ({}): {}",
                    old.id,
                    old.model,
                    offer(situation, &taken)
                ),
                "restore on a host with as many GPUs of that model",
            )),
        }
    }
    chosen
}

fn offer(situation: &Situation<'_>, taken: &BTreeSet<&str>) -> String {
    let free: Vec<String> = situation
        .here
        .iter()
        .filter(|g| !taken.contains(g.id.as_str()))
        .map(|g| format!("{} ({})", g.id, g.model))
        .collect();
    if free.is_empty() {
        "none is left".into()
    } else {
        format!("there is {}", free.join(", "))
    }
}

fn explicit<'a>(
    situation: &Situation<'a>,
    pairs: &[(String, String)],
    refusals: &mut Vec<Refusal>,
) -> Chosen<'a> {
    let mut chosen: Chosen<'a> = Vec::new();
    for (old, new) in pairs {
        let (from, to) = (find(situation.recorded, old), find(situation.here, new));
        if from.is_none() {
            refusals.push(refusal(
                format!("{ANNOTATION}: the checkpoint has no GPU {old}"),
                format!("it has {}", names(situation.recorded)),
            ));
        }
        if to.is_none() {
            refusals.push(refusal(
                format!("{ANNOTATION}: this host has no GPU {new}"),
                format!("it has {}", names(situation.here)),
            ));
        }
        if let (Some(from), Some(to)) = (from, to) {
            if chosen.iter().any(|(o, n)| o.id == from.id || n.id == to.id) {
                refusals.push(refusal(
                    format!("{ANNOTATION}: {old}={new} names a GPU a second time"),
                    "name each GPU once on each side",
                ));
            } else {
                chosen.push((from, to));
            }
            if from.model != to.model {
                refusals.push(refusal(
                    format!(
                        "{ANNOTATION}: {} is a {} and {} is a {}",
                        from.id, from.model, to.id, to.model
                    ),
                    "map onto GPUs of the same model",
                ));
            }
        }
    }
    for old in situation.recorded {
        if chosen.iter().any(|(o, _)| o.id == old.id) {
            continue;
        }
        match situation.here.iter().find(|g| g.id == old.id && !chosen.iter().any(|(_, n)| n.id == g.id)) {
            Some(same) => chosen.push((old, same)),
            None => refusals.push(refusal(format!("{ANNOTATION}: {} is not mapped, and its own place on this host is taken or absent", old.id), "name a target for every GPU of the checkpoint")),
        }
    }
    chosen
}

/// What a change of GPUs needs besides.
fn mapping(situation: &Situation<'_>, chosen: &Chosen<'_>, refusals: &mut Vec<Refusal>) {
    if let Some(driver) = situation.driver
        && nvidia::branch(driver).is_some_and(|b| b < FIRST_MAPPING_DRIVER)
    {
        refusals.push(refusal(
            format!("a restore on other GPUs needs NVIDIA driver {FIRST_MAPPING_DRIVER} or newer and this host has {driver}"),
            "update the driver, or restore where the checkpoint's own GPUs are",
        ));
    }
    for (_, new) in chosen {
        let there = situation
            .nodes
            .iter()
            .any(|n| new.minor.is_some() && nodes::nvidia_minor(n) == new.minor);
        if !there {
            let node = new
                .minor
                .map_or_else(|| "its device node".into(), |m| format!("/dev/nvidia{m}"));
            refusals.push(refusal(
                format!("the container has no {node}, which the processes would open for {}", new.id),
                "device nodes are not remapped yet: give the container the nodes of all GPUs that it may be restored on when it is made",
            ));
        }
    }
}

/// A GPU by UUID, index, PCI address or node.
fn find<'a>(gpus: &'a [Gpu], name: &str) -> Option<&'a Gpu> {
    let minor = name
        .strip_prefix("/dev/nvidia")
        .and_then(|n| n.parse::<u64>().ok());
    gpus.iter().find(|g| {
        g.id.eq_ignore_ascii_case(name)
            || g.pci.eq_ignore_ascii_case(name)
            || minor.is_some() && g.minor == minor
            || name.parse() == Ok(g.index)
    })
}

fn names(gpus: &[Gpu]) -> String {
    if gpus.is_empty() {
        return "none".into();
    }
    gpus.iter()
        .map(|g| format!("{} (index {})", g.id, g.index))
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_archive::seal::{NodeRole, NodeSource, Vendor};
    use serde_json::Map;

    fn gpu(n: u32, model: &str) -> Gpu {
        Gpu {
            id: format!("GPU-00000000-0000-0000-0000-00000000000{n}"),
            vendor: Vendor::Nvidia,
            index: n,
            model: model.into(),
            pci: format!("0000:0{n}:00.0"),
            minor: Some(n.into()),
            render_minor: None,
            memory_bytes: None,
            properties: Map::new(),
        }
    }

    fn node(minor: u64) -> DeviceNode {
        DeviceNode {
            path: format!("/dev/nvidia{minor}"),
            vendor: Vendor::Nvidia,
            role: NodeRole::Gpu,
            source: NodeSource::Device,
            major: 195,
            minor,
            host_path: None,
            file_mode: None,
            uid: None,
            gid: None,
            allowed: true,
            gpu: None,
        }
    }

    fn try_it(
        recorded: &[Gpu],
        here: &[Gpu],
        driver: &str,
        wish: &str,
    ) -> Result<Vec<(u8, u8)>, String> {
        let nodes: Vec<DeviceNode> = (0..4).map(node).collect();
        let situation = Situation {
            recorded,
            nodes: &nodes,
            recorded_driver: Some("580.10.1"),
            here,
            driver: Some(driver),
        };
        decide(&situation, &wish.parse().unwrap())
            .map(|pairs| pairs.iter().map(|p| (p.old.0[15], p.new.0[15])).collect())
            .map_err(|r| {
                r.iter()
                    .map(ToString::to_string)
                    .collect::<Vec<_>>()
                    .join("\n")
            })
    }

    #[test]
    fn the_same_gpus_need_no_map() {
        let two = [gpu(0, "X"), gpu(1, "X")];
        assert_eq!(try_it(&two, &two, "580.10.1", "auto").unwrap(), []);
        assert_eq!(try_it(&two, &two, "580.10.1", "0=0,1=1").unwrap(), []);
        assert_eq!(try_it(&[], &[], "580.10.1", "").unwrap(), []);
    }

    #[test]
    fn absent_gpus_get_another_of_their_model() {
        let here = [gpu(2, "Y"), gpu(1, "X"), gpu(3, "X")];
        assert_eq!(
            try_it(&[gpu(0, "X"), gpu(1, "X")], &here, "580.10.1", "auto").unwrap(),
            [(1, 1), (0, 3)]
        );
        let e = try_it(
            &[gpu(0, "X"), gpu(1, "X"), gpu(4, "X")],
            &here,
            "580.10.1",
            "auto",
        )
        .unwrap_err();
        assert!(
            e.contains("can take the place of GPU-00000000-0000-0000-0000-000000000004 (X)")
                && e.contains("(Y)"),
            "{e}"
        );
    }

    #[test]
    fn an_explicit_map_by_every_kind_of_name() {
        let two = [gpu(0, "X"), gpu(1, "X")];
        for wish in [
            "0=1,1=0",
            "/dev/nvidia0=/dev/nvidia1, 1=0",
            "0000:00:00.0=0000:01:00.0,GPU-00000000-0000-0000-0000-000000000001=0",
        ] {
            assert_eq!(
                try_it(&two, &two, "580.10.1", wish).unwrap(),
                [(0, 1), (1, 0)],
                "{wish}"
            );
        }
        assert_eq!(
            try_it(&two[..1], &two, "580.10.1", "0=1").unwrap(),
            [(0, 1)]
        );
    }

    #[test]
    fn every_reason_is_told() {
        let two = [gpu(0, "X"), gpu(1, "Y")];
        let e = try_it(&two, &two, "575.1.1", "0=1,7=0,1=9").unwrap_err();
        for want in [
            "driver 580.10.1 and this host has 575.1.1",
            "no GPU 7",
            "no GPU 9",
            "is a X and",
            "needs NVIDIA driver 580",
            "is not mapped",
        ] {
            assert!(e.contains(want), "{want}: {e}");
        }
        assert!(
            try_it(&two, &two, "580.10.1", "0=0,0=0")
                .unwrap_err()
                .contains("a second time")
        );
        assert!(
            try_it(&[gpu(0, "X")], &[gpu(7, "X")], "580.10.1", "auto")
                .unwrap_err()
                .contains("the container has no /dev/nvidia7")
        );
        assert!("0".parse::<Wish>().unwrap_err().contains("OLD=NEW"));
        assert!("0=".parse::<Wish>().is_err());
    }
}
