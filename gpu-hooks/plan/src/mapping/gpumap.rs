//! Chooses which GPU of this host replaces which GPU of the checkpoint, for both vendors. In this order:
//!
//! 1. the user's map;
//! 2. the GPUs that the engine gave the new container, where they differ from the checkpoint's;
//! 3. the same GPU, if it is here and has room;
//! 4. another that matches, the closest first.
//!
//! Where a host describes no GPUs (no driver is loaded, or a container merely carries nodes) the nodes themselves stand
//! for GPUs: [`of_nodes`].
//!
//! NVIDIA's driver wants a map that names every GPU a process had, or none at all if nothing changes.
//! [`crate::checks::nvidia_compat`] checks whether the chosen GPUs can hold the checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use cryopod_archive::metadata::{Gpu, GpuFacts};
use cryopod_host::nodes::{DeviceNode, NodeRole, NodeSource, Vendor};

use crate::ceiling::Ceiling;
use crate::checks::switches::Switches;
use crate::gpus::inventory::{has_place, of_nodes, same, same_place};
pub use crate::mapping::wish::{ANNOTATION, Wish};
use crate::refusal::Refusal;
use cryopod_cuda::gpus::gpu::{GpuPair, GpuUuid};

impl Wish {
    /// Returns the pairs of other GPUs than these. A name `0x...` is a `gpu_id`, which only AMD's GPUs have and no record.
    #[must_use]
    pub fn without(self, gpus: &[&Gpu]) -> Self {
        let Self::Pairs(pairs) = self else {
            return self;
        };
        let gpus: Vec<Gpu> = gpus.iter().map(|g| (*g).clone()).collect();
        let others = pairs
            .into_iter()
            .filter(|(old, _)| !old.starts_with("0x") && find(&gpus, old, None).is_empty());
        Self::Pairs(others.collect())
    }
}

/// The facts for the choice. GPUs of both vendors stand side by side in the lists.
#[derive(Debug, Clone, Default)]
pub struct Situation {
    /// What the user's map is given with, for refusals.
    pub wished_by: &'static str,
    pub recorded: Vec<Gpu>,
    pub here: Vec<Gpu>,
    /// The GPUs to choose from, by [`Gpu::id`]: [`offered`]. `None`: any.
    pub offered: Option<BTreeSet<String>>,
    /// Why an annotation's map may not name a GPU, by [`Gpu::id`]: from [`Ceiling::admit`].
    pub refused: BTreeMap<String, Refusal>,
    /// Free memory of this host's GPUs in bytes, by [`Gpu::id`], where it is known.
    pub free: BTreeMap<String, u64>,
    /// Memory that the checkpoint needs on each of its GPUs, in bytes, by [`Gpu::id`], where it is known.
    pub need: BTreeMap<String, u64>,
    /// Another model may replace a GPU where none of its own model is left.
    pub any_model: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    pub old: Gpu,
    /// This host's; the same one if nothing changes.
    pub new: Gpu,
    /// Why this one, for the log; empty if it is the same.
    pub why: String,
}

impl Choice {
    pub fn moved(&self) -> bool {
        !same(&self.old, &self.new)
    }
}

/// Returns the GPUs to choose from: those that the engine's spec names or, where it names none, lets the container
/// open. One that only the device rules let it open counts if it was so at the checkpoint, too. Where the
/// ceiling allows others (podman repeats the archive's own spec), a spec that names the old container's
/// GPUs, or none, sets no limit.
pub fn offered(ceiling: &Ceiling<'_>, gpu: &GpuFacts, here: &[Gpu]) -> Option<BTreeSet<String>> {
    let now = ceiling.spec.gpu_nodes(ceiling.host);
    let nodes = of_nodes(&now);
    let named: BTreeSet<String> = here
        .iter()
        .filter(|g| !has_place(g) || nodes.iter().any(|n| same_place(g, n)))
        .map(|g| g.id.clone())
        .collect();
    match ceiling.gpus(here) {
        Some(given) if !nodes.is_empty() => {
            let unnamed = given.into_iter().filter(|id| had_unnamed(gpu, id));
            Some(named.into_iter().chain(unnamed).collect())
        }
        Some(given) => Some(given),
        None => (!repeats(&now, gpu)).then_some(named),
    }
}

/// Returns true if the checkpoint has this GPU, and its engine's spec did not name it.
fn had_unnamed(gpu: &GpuFacts, id: &str) -> bool {
    let leads_there = |n: &&DeviceNode| n.gpu.as_deref() == Some(id);
    gpu.gpus.iter().any(|g| g.id == id)
        && (gpu.nodes.iter().filter(leads_there)).all(|n| n.source == NodeSource::Live)
}

/// Returns true if a spec names nothing but what the checkpoint has.
fn repeats(now: &[DeviceNode], gpu: &GpuFacts) -> bool {
    let leads_to_gpu = |n: &&DeviceNode| {
        matches!(
            (n.vendor, n.role),
            (Vendor::Nvidia, NodeRole::Gpu) | (Vendor::Amd, NodeRole::Render)
        )
    };
    let key = |n: &DeviceNode| (n.path.clone(), n.major, n.minor);
    let named: BTreeSet<_> = now.iter().filter(leads_to_gpu).map(key).collect();
    let before: BTreeSet<_> = gpu
        .nodes
        .iter()
        .filter(leads_to_gpu)
        .map(|n| match gpu.moved.iter().find(|m| m.path == n.path) {
            Some(m) => (m.engine.path.clone(), m.engine.major, m.engine.minor),
            None => key(n),
        })
        .collect();
    named.is_subset(&before)
}

/// Decides where every GPU of the checkpoint goes. The error has every reason why it cannot be restored here.
pub fn decide(situation: &Situation, wish: &Wish) -> Result<Vec<Choice>, Vec<Refusal>> {
    let mut refusals = Vec::new();
    let chosen = match wish {
        Wish::Auto => auto(situation, &mut refusals),
        Wish::Pairs(pairs) => explicit(situation, pairs, &mut refusals),
    };
    if refusals.is_empty() {
        Ok(chosen)
    } else {
        Err(refusals)
    }
}

/// Returns the map for NVIDIA's driver: all GPUs, or none if all stay.
pub fn driver_map(chosen: &[Choice]) -> Result<Vec<GpuPair>, Vec<Refusal>> {
    let ours = || chosen.iter().filter(|c| c.old.vendor == Vendor::Nvidia);
    if !ours().any(Choice::moved) {
        return Ok(Vec::new());
    }
    let uuid = |gpu: &Gpu| {
        gpu.id.parse::<GpuUuid>().map_err(|e| {
            vec![Refusal::new(
                e.to_string(),
                "the checkpoint's record or this host's driver gives no usable UUID",
            )]
        })
    };
    ours()
        .map(|c| {
            Ok(GpuPair {
                old: uuid(&c.old)?,
                new: uuid(&c.new)?,
            })
        })
        .collect()
}

impl Situation {
    /// Returns `false` if the memory used on `old` is known not to fit on `new`.
    fn room(&self, old: &Gpu, new: &Gpu) -> bool {
        match (self.need.get(&old.id), self.free.get(&new.id)) {
            (Some(need), Some(free)) => need <= free,
            _ => true,
        }
    }

    fn engine_allows(&self, gpu: &Gpu) -> bool {
        self.offered.as_ref().is_none_or(|o| o.contains(&gpu.id))
    }

    fn model_fits(&self, old: &Gpu, new: &Gpu) -> bool {
        let known = !old.model.is_empty() && !new.model.is_empty() && !self.any_model;
        old.vendor == new.vendor && (!known || old.model == new.model)
    }
}

fn auto(situation: &Situation, refusals: &mut Vec<Refusal>) -> Vec<Choice> {
    let mut taken: BTreeSet<&str> = BTreeSet::new();
    let mut chosen: Vec<Option<Choice>> = Vec::new();
    let mut crowded: BTreeSet<&str> = BTreeSet::new();
    for old in &situation.recorded {
        let found = situation
            .here
            .iter()
            .find(|g| same(g, old) && situation.engine_allows(g));
        let kept = found.filter(|g| situation.room(old, g));
        if found.is_some() && kept.is_none() {
            crowded.insert(&old.id);
        }
        if let Some(same) = kept {
            taken.insert(&same.id);
        }
        chosen.push(kept.map(|new| choice(old, new, "")));
    }
    for (old, slot) in situation.recorded.iter().zip(&mut chosen) {
        if slot.is_some() {
            continue;
        }
        let mut matching: Vec<&Gpu> = situation
            .here
            .iter()
            .filter(|g| situation.model_fits(old, g) && !taken.contains(g.id.as_str()))
            .filter(|g| situation.engine_allows(g))
            .collect();
        // The same model before others, those with room before those without (which the checks then report); closest
        // first: the same node, the same slot, then in order.
        matching.sort_by_key(|g| {
            let far = (!same_place(g, old), g.pci != old.pci, g.index);
            let other_model = g.model != old.model;
            (other_model, !situation.room(old, g), !same(g, old), far)
        });
        let why = match (&situation.offered, crowded.contains(old.id.as_str())) {
            (_, true) if matching.first().is_some_and(|g| same(g, old)) => "",
            (_, true) => "it has not enough free memory",
            (Some(_), _) => "the engine gave others",
            _ => "it is not on this host",
        };
        match matching.first() {
            Some(new) => {
                taken.insert(&new.id);
                *slot = Some(choice(old, new, why));
            }
            None => refusals.push(homeless(situation, old, &taken)),
        }
    }
    chosen.into_iter().flatten().collect()
}

fn choice(old: &Gpu, new: &Gpu, why: &str) -> Choice {
    Choice {
        old: old.clone(),
        new: new.clone(),
        why: why.to_owned(),
    }
}

fn homeless(situation: &Situation, old: &Gpu, taken: &BTreeSet<&str>) -> Refusal {
    let free: Vec<String> = situation
        .here
        .iter()
        .filter(|g| g.vendor == old.vendor && !taken.contains(g.id.as_str()))
        .filter(|g| situation.engine_allows(g))
        .map(describe)
        .collect();
    let offer = match free.is_empty() {
        true => "none is left".into(),
        false => format!("there is {}", free.join(", ")),
    };
    let remedy = match &situation.offered {
        Some(_) => "give the new container as many GPUs of that model",
        None => "restore on a host with as many GPUs of that model",
    };
    let switch = match (old.vendor, free.is_empty()) {
        (Vendor::Nvidia, false) => format!(" (relaxed by {})", Switches::how("nvidia-model")),
        _ => String::new(),
    };
    Refusal::new(
        format!(
            "no GPU of this host can take the place of {}: {offer}",
            describe(old)
        ),
        format!("{remedy}{switch}"),
    )
}

fn explicit(
    situation: &Situation,
    pairs: &[(String, String)],
    refusals: &mut Vec<Refusal>,
) -> Vec<Choice> {
    let by = situation.wished_by;
    let mut chosen: Vec<Choice> = Vec::new();
    for (old, new) in pairs {
        let from = find(&situation.recorded, old, None);
        let to = find(&situation.here, new, from.first().map(|g| g.vendor));
        if from.is_empty() {
            refusals.push(Refusal::new(
                format!("{by}: the checkpoint has no GPU {old}"),
                format!("it has {}", names(&situation.recorded)),
            ));
        }
        if to.is_empty() {
            refusals.push(Refusal::new(
                format!("{by}: this host has no GPU {new}"),
                format!("it has {}", names(&situation.here)),
            ));
        }
        if from.len() > 1 || to.len() > 1 {
            refusals.push(Refusal::new(
                format!("{by}: {old}={new} can mean several GPUs"),
                "name them by their nodes, such as /dev/nvidia1 or /dev/dri/renderD130",
            ));
            continue;
        }
        let (Some(from), Some(to)) = (from.first(), to.first()) else {
            continue;
        };
        if let Some(refused) = situation.refused.get(&to.id) {
            refusals.push(Refusal::new(
                format!("{by}: {old}={new}: {}", refused.what),
                refused.remedy.clone(),
            ));
            continue;
        }
        if chosen
            .iter()
            .any(|c| same(&c.old, from) || same(&c.new, to))
        {
            refusals.push(Refusal::new(
                format!("{by}: {old}={new} names a GPU a second time"),
                "name each GPU once on each side",
            ));
        } else {
            chosen.push(choice(from, to, "the map says so"));
        }
    }
    for old in &situation.recorded {
        if chosen.iter().any(|c| same(&c.old, old)) {
            continue;
        }
        match situation.here.iter().find(|g| same(g, old) && !situation.refused.contains_key(&g.id) && !chosen.iter().any(|c| same(&c.new, g))) {
            Some(same) => chosen.push(choice(old, same, "")),
            None => refusals.push(Refusal::new(format!("{by}: {} is not mapped, and its own place on this host is taken, absent or not given by the engine", old.id), "name a target for every GPU of the checkpoint")),
        }
    }
    chosen
}

/// Finds the GPUs with this id, PCI address, node, render minor or index.
fn find<'a>(gpus: &'a [Gpu], name: &str, vendor: Option<Vendor>) -> Vec<&'a Gpu> {
    let number = |prefix: &str| {
        name.strip_prefix(prefix)
            .and_then(|n| n.parse::<u64>().ok())
    };
    let minor = number("/dev/nvidia");
    let render = number("/dev/dri/renderD").or_else(|| number("renderD"));
    let of_vendor = || gpus.iter().filter(|g| vendor.is_none_or(|v| g.vendor == v));
    let exact: Vec<&Gpu> = of_vendor()
        .filter(|g| {
            g.id.eq_ignore_ascii_case(name)
                || !g.pci.is_empty() && g.pci.eq_ignore_ascii_case(name)
                || minor.is_some() && g.minor == minor
                || render.is_some() && g.render_minor == render
        })
        .collect();
    if !exact.is_empty() {
        return exact;
    }
    let index: Option<u32> = name.parse().ok();
    let by_index: Vec<&Gpu> = of_vendor().filter(|g| Some(g.index) == index).collect();
    if by_index.is_empty() {
        // A number that is no index may be a render minor.
        let render: Option<u64> = name.parse().ok();
        return of_vendor()
            .filter(|g| render.is_some() && g.render_minor == render)
            .collect();
    }
    by_index
}

fn describe(gpu: &Gpu) -> String {
    if gpu.model.is_empty() {
        gpu.id.clone()
    } else {
        format!("{} ({})", gpu.id, gpu.model)
    }
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
#[path = "gpumap_tests.rs"]
mod tests;
