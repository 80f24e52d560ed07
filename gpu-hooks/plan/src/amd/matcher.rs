//! Maps the checkpoint's GPUs onto this host's, under the rules of CRIU's amdgpu plugin, whenever a mapping exists.
//!
//! Each GPU goes to one of its own. The two match ([`super::checks::matches`]). The target has at least as many valid
//! links. GPUs of one hive stay in one hive, and those of two hives in two. Each link to a CPU finds one as good.
//! Unless disabled, GPUs of one CPU stay on one CPU, and those of two CPUs on two. The plugin wants as many visible
//! GPUs as the checkpoint has, so links and hives count among the chosen GPUs only.

use std::collections::HashSet;

use super::checks::{Switch, Switches, matches};
use super::graph::{Graph, matching};
use super::search::Search;
use super::topology::{Node, Topology};

/// Most GPUs, CPUs or hives of either side.
pub const MAX_GPUS: usize = 64;
pub const BUDGET: u64 = 20_000;

/// Rules to leave out, to find out which of them prevents a mapping.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Without {
    pub links: bool,
    pub hives: bool,
    /// Links to CPUs, and which GPUs share one.
    pub cpus: bool,
}

#[derive(Debug, Clone)]
pub struct Problem<'a> {
    pub source: &'a Topology,
    /// This host's, reduced to the GPUs that may be used ([`Topology::visible`]).
    pub target: &'a Topology,
    pub switches: &'a Switches,
    /// `gpu_id` of a source and of the target that it must have.
    pub wishes: &'a [(u32, u32)],
    pub without: Without,
}

/// A mapping: for each GPU of the source, in its order, the position of its target among the target's GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    pub targets: Vec<usize>,
    pub steps: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoMapping {
    #[error("no mapping exists")]
    None { steps: u64 },
    #[error(
        "no mapping was found in {steps} steps, and whether one exists is not known; name the pairs"
    )]
    Budget { steps: u64 },
    /// More than [`MAX_GPUS`] of something.
    #[error("more than {MAX_GPUS} GPUs, CPUs or hives")]
    TooMany,
}

/// Finds a mapping: one that keeps the GPUs in place where possible, else one that moves them little.
pub fn find(problem: &Problem<'_>) -> Result<Mapping, NoMapping> {
    find_but(problem, &HashSet::new())
}

/// [`find`], skipping sets of targets (bits by position).
pub(super) fn find_but(problem: &Problem<'_>, passed: &HashSet<u64>) -> Result<Mapping, NoMapping> {
    let mut search = Search::new(problem, passed)?;
    let start = search.start();
    let identical = search.identical(&start);
    if let Some(state) = identical
        && let Ok(Some(targets)) = search.run(state)
    {
        return Ok(search.mapping(targets));
    }
    search.failed.clear();
    search.steps = 0;
    match search.run(start)? {
        Some(targets) => Ok(search.mapping(targets)),
        None => Err(NoMapping::None {
            steps: search.steps,
        }),
    }
}

/// Checks that a mapping keeps all rules. The error describes the first broken one for people.
pub fn valid(problem: &Problem<'_>, targets: &[usize]) -> Result<(), String> {
    let all: Vec<&Node> = problem.target.gpus().collect();
    let mut chosen = Vec::new();
    for t in targets {
        let node = all.get(*t).ok_or("a target that is not there")?;
        if chosen.contains(&node.render_minor()) {
            return Err(format!("{node} is chosen twice"));
        }
        chosen.push(node.render_minor());
    }
    let view = problem.target.visible(&chosen);
    let (s, v) = (Graph::new(problem.source), Graph::new(&view));
    if s.gpus.len() != targets.len() {
        return Err("not every GPU has a target".into());
    }
    let place: Vec<usize> = targets
        .iter()
        .filter_map(|t| v.gpus.iter().position(|g| g.id == all[*t].id))
        .collect();
    if place.len() != targets.len() {
        return Err("two GPUs with one id".into());
    }
    for (i, &t) in place.iter().enumerate() {
        let pair = || format!("{} on {}", s.gpus[i], v.gpus[t]);
        if !matches(s.gpus[i], v.gpus[t], problem.switches) {
            return Err(format!("{}: they do not match", pair()));
        }
        if !problem.without.links && s.valid_links(i) > v.valid_links(t) {
            return Err(format!(
                "{}: {} valid links on {}",
                pair(),
                s.valid_links(i),
                v.valid_links(t)
            ));
        }
        if !problem.without.cpus && !s.cpu_links_fit(i, &v, t) {
            return Err(format!("{}: a link to a CPU finds none as good", pair()));
        }
        for (j, &u) in place.iter().enumerate().filter(|_| !problem.without.hives) {
            let (Some(a), Some(b)) = (s.hive[i], s.hive[j]) else {
                continue;
            };
            if v.hive[t].is_none() || (a == b) != (v.hive[t] == v.hive[u]) {
                return Err(format!("{}: the hive is not kept", pair()));
            }
        }
    }
    for wish in problem.wishes {
        let kept = place
            .iter()
            .enumerate()
            .any(|(i, &t)| (s.gpus[i].gpu_id, v.gpus[t].gpu_id) == *wish);
        if !kept {
            return Err(format!(
                "the wish {:#06x}={:#06x} is not kept",
                wish.0, wish.1
            ));
        }
    }
    if problem.without.cpus || !problem.switches.is_on(Switch::Numa) {
        return Ok(());
    }
    let cpus: Vec<u64> = (0..s.cpus.len())
        .map(|c| {
            (0..v.cpus.len())
                .filter(|d| {
                    place
                        .iter()
                        .enumerate()
                        .all(|(i, &t)| s.cpu_fits(i, c, &v, t, *d))
                })
                .fold(0, |set, d| set | 1 << d)
        })
        .collect();
    let used: Vec<u64> = (0..s.cpus.len())
        .filter(|c| (0..place.len()).any(|i| s.cpu_links[i].iter().any(|l| l.cpu == *c)))
        .map(|c| cpus[c])
        .collect();
    match matching(&used) {
        Some(_) => Ok(()),
        None => Err("GPUs of one CPU would not stay on one CPU of their own".into()),
    }
}
