//! Lists every reason why no mapping exists.

use super::checks::{Switch, Switches, compare, explain, matches, names};
use super::choose::{Refused, refuse};
use super::graph::{Graph, matching};
use super::matcher::{self, NoMapping, Problem, Without};
use super::topology::{Node, Topology};
use crate::compat::{Check, Verdict};

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

pub(super) fn no_mapping(
    problem: &Problem<'_>,
    why: &NoMapping,
    mut checks: Vec<Check>,
) -> Box<Refused> {
    let before = checks.len();
    checks.extend(unmatched(problem.source, problem.target, problem.switches));
    checks.extend(wish_mismatches(problem));
    if checks.len() == before {
        checks.extend(too_few(problem));
    }
    if checks.len() == before && *why != NoMapping::TooMany {
        checks.extend(structure(problem));
    }
    if checks.len() == before {
        checks.push(link_check(
            "mapping",
            problem,
            why.to_string(),
            None,
            "name the pairs, or allow other GPUs",
        ));
    }
    refuse(
        "the checkpoint's GPUs cannot be mapped onto this host's",
        checks,
    )
}

fn wish_mismatches(problem: &Problem<'_>) -> Vec<Check> {
    let by_id = |t: &'_ Topology, id: u32| t.gpus().find(|g| g.gpu_id == id).cloned();
    let pairs = problem
        .wishes
        .iter()
        .filter_map(|w| Some((by_id(problem.source, w.0)?, by_id(problem.target, w.1)?)));
    pairs
        .flat_map(|(s, t)| compare(&s, &t, problem.switches))
        .filter(|c| c.verdict == Verdict::Refused)
        .collect()
}

/// GPUs that match exist for each, but not enough for all.
fn too_few(problem: &Problem<'_>) -> Option<Check> {
    let targets: Vec<&Node> = problem.target.gpus().collect();
    let sources: Vec<&Node> = problem.source.gpus().collect();
    let choices: Vec<u64> = sources
        .iter()
        .map(|s| {
            let fit = |j: &usize| matches(s, targets[*j], problem.switches);
            (0..targets.len().min(matcher::MAX_GPUS))
                .filter(fit)
                .fold(0, |set, j| set | 1 << j)
        })
        .collect();
    if sources.len() > matcher::MAX_GPUS || matching(&choices).is_some() {
        return None;
    }
    // The GPUs whose targets are too few for them together.
    let short: Vec<usize> = (0..choices.len())
        .filter(|i| {
            let within: Vec<u64> = choices
                .iter()
                .copied()
                .filter(|c| c & !choices[*i] == 0)
                .collect();
            within.len() > choices[*i].count_ones() as usize
        })
        .collect();
    let short = if short.is_empty() {
        (0..choices.len()).collect()
    } else {
        short
    };
    let set = short.iter().fold(0, |set, i| set | choices[*i]);
    let fit: Vec<&Node> = targets
        .iter()
        .enumerate()
        .filter(|(j, _)| *j < 64 && set >> j & 1 == 1)
        .map(|(_, t)| *t)
        .collect();
    let need: Vec<&Node> = short.iter().map(|i| sources[*i]).collect();
    Some(Check {
        name: "GPUs that match".into(),
        subject: String::new(),
        recorded: format!("{} ({})", need.len(), names(&need)),
        found: format!("{} that match them ({})", fit.len(), names(&fit)),
        verdict: Verdict::Refused,
        switch: None,
        remedy: "restore where enough GPUs of each model are there and may be used".into(),
    })
}

/// Returns the rules of links that prevent a mapping: those without which one exists, or all of them.
fn structure(problem: &Problem<'_>) -> Vec<Check> {
    let without = |without: Without| {
        matcher::find(&Problem {
            without,
            ..problem.clone()
        })
        .is_ok()
    };
    let no_numa = problem.switches.clone().with(Switch::Numa, false);
    let numa = problem.switches.is_on(Switch::Numa)
        && matcher::find(&Problem {
            switches: &no_numa,
            ..problem.clone()
        })
        .is_ok();
    let none = Without::default();
    let hives = without(Without {
        hives: true,
        ..none
    });
    let links = without(Without {
        links: true,
        ..none
    });
    let cpus = without(Without { cpus: true, ..none });
    let all = !(numa || hives || links || cpus);
    let (s, t) = (Graph::new(problem.source), Graph::new(problem.target));
    let mut checks = Vec::new();
    if numa {
        checks.push(link_check(
            "KFD_NUMA_CHECK",
            problem,
            "GPUs of one CPU would not stay on one CPU of their own".into(),
            Some("KFD_NUMA_CHECK=0"),
            "restore where as many GPUs share a CPU (see the BIOS's NUMA settings, NPS)",
        ));
    }
    if hives || all && s.hives > 0 {
        let sizes = |g: &Graph<'_>| {
            let mut sizes: Vec<usize> = (0..g.hives)
                .map(|h| g.hive.iter().filter(|x| **x == Some(h)).count())
                .collect();
            sizes.sort_unstable();
            if sizes.is_empty() {
                "no hive".into()
            } else {
                format!("hives of {sizes:?} GPUs")
            }
        };
        let mut check = link_check(
            "XGMI hives",
            problem,
            sizes(&t),
            None,
            "restore where the GPUs are joined by XGMI in the same way",
        );
        check.recorded = sizes(&s);
        checks.push(check);
    }
    if links || all {
        let counts = |g: &Graph<'_>| {
            format!(
                "{:?} valid links a GPU",
                (0..g.gpus.len())
                    .map(|i| g.valid_links(i))
                    .collect::<Vec<_>>()
            )
        };
        let mut check = link_check(
            "valid links",
            problem,
            counts(&t),
            None,
            "restore where the GPUs have as many links to CPUs and to each other (PCIe peer to peer, XGMI)",
        );
        check.recorded = counts(&s);
        checks.push(check);
    }
    if cpus && !numa || all {
        checks.push(link_check(
            "links to CPUs",
            problem,
            "none as good for some GPU (XGMI may stand in for PCIe, two-way for one-way)".into(),
            None,
            "restore where the GPUs' whole memory is visible to the CPU (large BAR, above 4G decoding)",
        ));
    }
    checks
}

fn link_check(
    name: &str,
    problem: &Problem<'_>,
    found: String,
    switch: Option<&str>,
    remedy: &str,
) -> Check {
    let gpus: Vec<&Node> = problem.source.gpus().collect();
    Check {
        name: name.into(),
        subject: String::new(),
        recorded: format!("{} GPUs ({}) with their links", gpus.len(), names(&gpus)),
        found,
        verdict: Verdict::Refused,
        switch: switch.map(Into::into),
        remedy: remedy.into(),
    }
}
