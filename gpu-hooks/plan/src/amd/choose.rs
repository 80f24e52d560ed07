//! Chooses which GPUs of this host replace the checkpoint's: a mapping that keeps all rules. Also chooses the GPUs to
//! make visible, so that CRIU's amdgpu plugin, which chooses by itself, finds a valid mapping too.

use std::collections::HashSet;

use super::checks::{Switches, compare, names};
use super::matcher::{self, Problem, Without};
use super::plugin_choice::{self, PluginChoice};
use super::reasons::{no_mapping, unmatched};
use super::topology::{Node, RENDER_FIRST, RENDER_LAST, Topology};
use crate::compat::{Check, Verdict};
use crate::wish::Wish;

const SETS: usize = 24;

#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    /// The topologies of the checkpoint's images ([`super::image::KfdImage`]), one a process, best with
    /// [`Topology::label`] applied.
    pub sources: &'a [Topology],
    pub target: &'a Topology,
    /// The render minors that may be used; `None` for all.
    pub permitted: Option<&'a [u32]>,
    /// The user's map: OLD by `gpu_id`, render minor, index, PCI address or unique id, and NEW likewise.
    pub wish: &'a Wish,
    pub switches: &'a Switches,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    pub source: Node,
    pub target: Node,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// All GPUs of the checkpoint, in the image's order.
    pub pairs: Vec<Pair>,
    /// The only render minors that CRIU and the container may see; ascending.
    pub visible: Vec<u32>,
    pub checks: Vec<Check>,
    pub sentence: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refused {
    pub reason: String,
    /// All checks; at least one is [`Verdict::Refused`].
    pub checks: Vec<Check>,
}

impl Choice {
    pub fn moves(&self) -> bool {
        self.pairs
            .iter()
            .any(|p| p.source.render_minor() != p.target.render_minor())
    }
}

/// Chooses; the error has every reason.
pub fn choose(request: &Request<'_>) -> Result<Choice, Box<Refused>> {
    let Some(source) = request.sources.first() else {
        return Err(refuse(
            "the checkpoint has no image of CRIU's amdgpu plugin",
            vec![],
        ));
    };
    let candidates = candidates(request);
    let mut checks = vec![gpu_count(source, &candidates)];
    checks.extend(same_gpus(request.sources));
    let wishes = match wishes(request.wish, source, &candidates) {
        Ok(wishes) => wishes,
        Err(wrong) => {
            checks.extend(wrong);
            Vec::new()
        }
    };
    if checks.iter().any(|c| c.verdict == Verdict::Refused) {
        checks.extend(unmatched(source, &candidates, request.switches));
        return Err(refuse(
            "the checkpoint's GPUs cannot be mapped onto this host's",
            checks,
        ));
    }
    let problem = Problem {
        source,
        target: &candidates,
        switches: request.switches,
        wishes: &wishes,
        without: Without::default(),
    };
    settle(request, &problem, checks)
}

/// Finds a mapping that the plugin makes too.
fn settle(
    request: &Request<'_>,
    problem: &Problem<'_>,
    mut checks: Vec<Check>,
) -> Result<Choice, Box<Refused>> {
    let mut passed = HashSet::new();
    let mut first_trouble = None;
    let mut steps = 0;
    while passed.len() < SETS && steps < matcher::BUDGET {
        let mapping = match matcher::find_but(problem, &passed) {
            Ok(mapping) => mapping,
            Err(_) if !passed.is_empty() => break,
            Err(e) => return Err(no_mapping(problem, &e, checks)),
        };
        steps += mapping.steps;
        let all: Vec<&Node> = problem.target.gpus().collect();
        let minors: Vec<u32> = mapping
            .targets
            .iter()
            .map(|t| all[*t].render_minor())
            .collect();
        match plugin_agrees(request, problem, &minors) {
            Ok(pairs) => return Ok(chosen(request, pairs, checks)),
            Err(trouble) => {
                first_trouble.get_or_insert((minors, trouble));
                passed.insert(mapping.targets.iter().fold(0, |set, t| set | 1 << t));
            }
        }
    }
    let (minors, trouble) = first_trouble.unwrap_or_default();
    let minors = minors
        .iter()
        .map(|m| format!("renderD{m}"))
        .collect::<Vec<_>>()
        .join(", ");
    let sets = passed.len();
    checks.push(Check {
        name: "choice of CRIU's amdgpu plugin".into(),
        subject: String::new(),
        recorded: "a mapping that exists".into(),
        found: format!("{trouble} with {minors} visible; {sets} set(s) of GPUs were tried"),
        verdict: Verdict::Refused,
        switch: None,
        remedy: "the plugin of CRIU up to 4.2 chooses by itself and cannot be told: restore on other GPUs, or with fewer comparisons (KFD_*_CHECK=0)".into(),
    });
    Err(refuse(
        format!(
            "the checkpoint's GPUs can be mapped onto this host's, but CRIU's amdgpu plugin {trouble}"
        ),
        checks,
    ))
}

/// Returns the plugin's choice if it sees only these, if that is a mapping that keeps all rules and wishes.
fn plugin_agrees(
    request: &Request<'_>,
    problem: &Problem<'_>,
    minors: &[u32],
) -> Result<Vec<Pair>, String> {
    let view = request.target.visible(minors);
    let mut agreed: Option<Vec<(u32, u32)>> = None;
    for source in request.sources {
        let mut picks = match plugin_choice::choose(source, &view, request.switches) {
            PluginChoice::Picks(picks) => picks,
            PluginChoice::Refuses(why) => return Err(format!("would refuse ({why})")),
            PluginChoice::Crashes(why) => return Err(format!("would crash ({why})")),
            PluginChoice::Loops(why) => return Err(format!("would never end ({why})")),
        };
        picks.sort_unstable();
        match &agreed {
            Some(other) if *other != picks => {
                return Err("would map the processes of the container differently".into());
            }
            _ => agreed = Some(picks),
        }
    }
    let picks = agreed.unwrap_or_default();
    let mut pairs = Vec::new();
    let mut targets = Vec::new();
    for gpu in problem.source.gpus() {
        let id = picks.iter().find(|p| p.0 == gpu.gpu_id).map(|p| p.1);
        let found = problem
            .target
            .gpus()
            .enumerate()
            .find(|(_, t)| Some(t.gpu_id) == id);
        let (at, target) = found.ok_or("would choose a GPU that is not there")?;
        targets.push(at);
        pairs.push(Pair {
            source: gpu.clone(),
            target: target.clone(),
        });
    }
    matcher::valid(problem, &targets).map_err(|why| {
        let picks: Vec<String> = pairs
            .iter()
            .map(|p| format!("{} to {}", p.source, p.target))
            .collect();
        format!("would map {} ({why})", picks.join(", "))
    })?;
    Ok(pairs)
}

fn chosen(request: &Request<'_>, pairs: Vec<Pair>, mut checks: Vec<Check>) -> Choice {
    for pair in &pairs {
        checks.extend(compare(&pair.source, &pair.target, request.switches));
    }
    let mut visible: Vec<u32> = pairs.iter().map(|p| p.target.render_minor()).collect();
    visible.sort_unstable();
    let choice = Choice {
        pairs,
        visible,
        checks,
        sentence: String::new(),
    };
    let list: Vec<String> = choice
        .pairs
        .iter()
        .map(|p| format!("{} on {}", p.source, p.target))
        .collect();
    let what = match (choice.moves(), request.wish) {
        (_, Wish::Pairs(_)) => "as asked",
        (false, Wish::Auto) => "each in its own place",
        (true, Wish::Auto) => "the closest that match and that CRIU's plugin chooses too",
    };
    Choice {
        sentence: format!("AMD GPUs, {what}: {}", list.join("; ")),
        ..choice
    }
}

pub(super) fn refuse(reason: impl Into<String>, checks: Vec<Check>) -> Box<Refused> {
    Box::new(Refused {
        reason: reason.into(),
        checks,
    })
}

/// Returns this host's topology with only the GPUs that may be used. GPUs without a render node of their own may not.
fn candidates(request: &Request<'_>) -> Topology {
    let mut minors: Vec<u32> = Vec::new();
    let mut twice: Vec<u32> = Vec::new();
    for gpu in request.target.gpus() {
        let minor = gpu.render_minor();
        if minors.contains(&minor) {
            twice.push(minor);
        }
        let permitted = request.permitted.is_none_or(|p| p.contains(&minor));
        if permitted && (RENDER_FIRST..=RENDER_LAST).contains(&minor) {
            minors.push(minor);
        }
    }
    minors.retain(|m| !twice.contains(m));
    request.target.visible(&minors)
}

fn gpu_count(source: &Topology, candidates: &Topology) -> Check {
    let (recorded, here) = (source.gpus().count(), candidates.gpus().count());
    let unreadable = candidates.unreadable.len();
    let hidden = match unreadable {
        0 => String::new(),
        n => format!("; {n} node(s) of the topology cannot be read"),
    };
    let gpus: Vec<&Node> = candidates.gpus().collect();
    Check {
        name: "GPU count".into(),
        subject: String::new(),
        recorded: recorded.to_string(),
        found: format!("{here} that may be used ({}){hidden}", names(&gpus)),
        verdict: if recorded <= here {
            Verdict::Ok
        } else {
            Verdict::Refused
        },
        switch: None,
        remedy: "restore where at least as many AMD GPUs are there and may be used".into(),
    }
}

/// Checks that all processes have seen the same GPUs.
fn same_gpus(sources: &[Topology]) -> Option<Check> {
    let ids = |t: &Topology| {
        let mut ids: Vec<u32> = t.gpus().map(|g| g.gpu_id).collect();
        ids.sort_unstable();
        ids
    };
    let first = ids(sources.first()?);
    let other = sources.iter().map(ids).find(|other| *other != first)?;
    let show = |ids: &[u32]| {
        ids.iter()
            .map(|id| format!("{id:#06x}"))
            .collect::<Vec<_>>()
            .join(", ")
    };
    Some(Check {
        name: "GPUs of each process".into(),
        subject: String::new(),
        recorded: format!(
            "one process with {}, one with {}",
            show(&first),
            show(&other)
        ),
        found: "one set of GPUs for the whole restore".into(),
        verdict: Verdict::Refused,
        switch: None,
        remedy: "checkpoint the container with all its processes seeing the same GPUs".into(),
    })
}

/// Finds a GPU by `gpu_id` (`0x...`), render node or minor, index, PCI address or unique id.
fn named<'a>(topology: &'a Topology, name: &str) -> Option<&'a Node> {
    let hex = name
        .strip_prefix("0x")
        .and_then(|n| u32::from_str_radix(n, 16).ok());
    let node = name
        .strip_prefix("/dev/dri/")
        .unwrap_or(name)
        .strip_prefix("renderD")
        .and_then(|n| n.parse::<u32>().ok());
    let number = name.parse::<u32>().ok();
    let same = |held: &Option<String>| {
        held.as_deref()
            .is_some_and(|h| h.eq_ignore_ascii_case(name))
    };
    let by = |is: &dyn Fn(&Node) -> bool| topology.gpus().find(|g| is(g));
    by(&|g| same(&g.pci) || same(&g.unique_id))
        .or_else(|| by(&|g| hex == Some(g.gpu_id)))
        .or_else(|| by(&|g| node == Some(g.render_minor())))
        .or_else(|| match number? {
            n @ RENDER_FIRST..=RENDER_LAST => by(&|g| g.render_minor() == n),
            n if n < RENDER_FIRST => topology.gpus().nth(n as usize),
            n => by(&|g| g.gpu_id == n),
        })
}

fn wishes(
    wish: &Wish,
    source: &Topology,
    candidates: &Topology,
) -> Result<Vec<(u32, u32)>, Vec<Check>> {
    let Wish::Pairs(pairs) = wish else {
        return Ok(Vec::new());
    };
    let (mut found, mut wrong) = (Vec::<(u32, u32)>::new(), Vec::new());
    let mut complain = |subject: &str, recorded: String, found: String| {
        wrong.push(Check {
            name: crate::wish::ANNOTATION.into(),
            subject: subject.to_owned(),
            recorded,
            found,
            verdict: Verdict::Refused,
            switch: None,
            remedy: "write `auto`, or OLD=NEW with gpu_id (0x...), render minor, index, PCI address or unique id".into(),
        });
    };
    for (old, new) in pairs {
        let all = |t: &Topology| {
            t.gpus()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        };
        match (named(source, old), named(candidates, new)) {
            (None, _) => complain(old, format!("no such GPU, but {}", all(source)), "-".into()),
            (_, None) => complain(
                new,
                "-".into(),
                format!("no such GPU that may be used, but {}", all(candidates)),
            ),
            (Some(a), Some(b)) if found.iter().any(|f| f.0 == a.gpu_id || f.1 == b.gpu_id) => {
                complain(
                    &format!("{old}={new}"),
                    a.to_string(),
                    format!("{b}; one of the two is named a second time"),
                );
            }
            (Some(a), Some(b)) => found.push((a.gpu_id, b.gpu_id)),
        }
    }
    if wrong.is_empty() {
        Ok(found)
    } else {
        Err(wrong)
    }
}
