//! Lists the reasons why no map of GPUs exists.

use crate::checks::{compare, explain, matches, names};
use crate::topology::{Node, Topology};
use cryopod_gpu_plan::checks::compat::{Check, Verdict};
use cryopod_gpu_plan::checks::switches::Switches;

/// For each GPU of the checkpoint that no GPU of this host can replace, lists why.
pub(super) fn unmatched(
    source: &Topology,
    candidates: &Topology,
    switches: &Switches,
) -> Vec<Check> {
    source
        .gpus()
        .filter(|s| !candidates.gpus().any(|t| matches(s, t, switches)))
        .flat_map(|s| explain(s, candidates, switches))
        .collect()
}

pub(super) fn wish_mismatches(
    source: &Topology,
    candidates: &Topology,
    wishes: &[(u32, u32)],
    switches: &Switches,
) -> Vec<Check> {
    let by_id = |t: &Topology, id: u32| t.gpus().find(|g| g.gpu_id == id).cloned();
    let pairs = wishes
        .iter()
        .filter_map(|w| Some((by_id(source, w.0)?, by_id(candidates, w.1)?)));
    pairs
        .flat_map(|(s, t)| compare(&s, &t, switches))
        .filter(|c| c.verdict == Verdict::Refused)
        .collect()
}

/// GPUs that match exist for each, but not enough for those that match the same ones.
pub(super) fn too_few(
    source: &Topology,
    candidates: &Topology,
    switches: &Switches,
) -> Option<Check> {
    let fit = |s: &Node| -> Vec<&Node> {
        let targets = candidates.gpus();
        targets.filter(|t| matches(s, t, switches)).collect()
    };
    source.gpus().find_map(|s| {
        let here = fit(s);
        let alike = |other: &&Node| fit(other) == here;
        let need: Vec<&Node> = source.gpus().filter(alike).collect();
        (need.len() > here.len()).then(|| Check {
            name: "GPUs that match".into(),
            subject: String::new(),
            recorded: format!("{} ({})", need.len(), names(&need)),
            found: format!("{} that match them ({})", here.len(), names(&here)),
            verdict: Verdict::Refused,
            switch: None,
            remedy: "restore where enough GPUs of each model are there and may be used".into(),
        })
    })
}
