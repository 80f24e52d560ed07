//! Chooses the GPUs of this host that CRIU and the container see after a restore. CRIU's amdgpu plugin maps the
//! checkpoint's GPUs onto those that it sees by a search of its own: it takes no instructions, and where it compares
//! links this cannot tell. So a restore compares the plugin's map with this one before the container runs.

use std::collections::BTreeSet;

use crate::checks::{compare, matches, names};
use crate::reasons::{too_few, unmatched, wish_mismatches};
use crate::topology::{Node, RENDER_FIRST, RENDER_LAST, Topology};
use cryopod_gpu_plan::checks::compat::{Check, Verdict};
use cryopod_gpu_plan::checks::switches::Switches;
use cryopod_gpu_plan::mapping::wish::Wish;

/// The plugin prints each list of GPUs, `0xABCD ` a GPU, into a buffer of this size, and does not check it.
const PRINTED: usize = 200;
/// Before a hive's list stand `type:XGMI:` and one CPU.
const PRINTED_HEAD: usize = 17;

#[derive(Debug, Clone, Copy)]
pub struct ChoiceRequest<'a> {
    /// The topologies of the checkpoint's images ([`super::image::KfdImage`]), one a process, best with
    /// [`Topology::label`] applied.
    pub sources: &'a [Topology],
    pub target: &'a Topology,
    /// The render minors that may be used; `None` for all.
    pub permitted: Option<&'a [u32]>,
    /// The user's map: OLD by `gpu_id`, render minor, index, PCI address or unique id, and NEW likewise.
    pub wish: &'a Wish,
    /// What the map is given with, for refusals.
    pub wished_by: &'static str,
    pub switches: &'a Switches,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuMatch {
    pub source: Node,
    pub target: Node,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KfdChoice {
    /// All GPUs of the checkpoint, in the image's order.
    pub pairs: Vec<GpuMatch>,
    /// The only render minors that CRIU and the container may see; ascending.
    pub visible: Vec<u32>,
    pub checks: Vec<Check>,
    pub sentence: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct KfdRefused {
    pub reason: String,
    /// All checks; at least one is [`Verdict::Refused`].
    pub checks: Vec<Check>,
}

impl KfdChoice {
    pub fn moves(&self) -> bool {
        self.pairs
            .iter()
            .any(|p| p.source.render_minor() != p.target.render_minor())
    }
}

/// Chooses; the error has every reason.
pub fn choose(request: &ChoiceRequest<'_>) -> Result<KfdChoice, Box<KfdRefused>> {
    let Some(source) = request.sources.first() else {
        return Err(refuse(
            "the checkpoint has no image of CRIU's amdgpu plugin",
            vec![],
        ));
    };
    let candidates = candidates(request);
    let switches = request.switches;
    let mut checks = vec![gpu_count(source, &candidates)];
    checks.extend(same_gpus(request.sources));
    let wishes = match wishes(request, source, &candidates) {
        Ok(wishes) => wishes,
        Err(wrong) => {
            checks.extend(wrong);
            Vec::new()
        }
    };
    checks.extend(unmatched(source, &candidates, switches));
    checks.extend(wish_mismatches(source, &candidates, &wishes, switches));
    if !is_refused(&checks) {
        checks.extend(too_few(source, &candidates, switches));
    }
    if is_refused(&checks) {
        return Err(refuse(
            "the checkpoint's GPUs cannot be mapped onto this host's",
            checks,
        ));
    }
    let closest = closest(source, &candidates, &wishes, switches);
    let minors: Vec<u32> = closest.iter().map(|p| p.target.render_minor()).collect();
    let trouble = match plugin_pairs(request, source, closest, &wishes) {
        Ok(pairs) => return Ok(chosen(request, pairs, checks)),
        Err(trouble) => trouble,
    };
    checks.push(Check {
        name: "choice of CRIU's amdgpu plugin".into(),
        subject: String::new(),
        recorded: "GPUs in their order".into(),
        found: format!("render nodes {minors:?}, with which the plugin {trouble}"),
        verdict: Verdict::Refused,
        switch: None,
        remedy: format!(
            "name other GPUs by {}; the plugin of CRIU up to 4.2 chooses by itself",
            request.wished_by
        ),
    });
    Err(refuse(format!("CRIU's amdgpu plugin {trouble}"), checks))
}

fn is_refused(checks: &[Check]) -> bool {
    checks.iter().any(|c| c.verdict == Verdict::Refused)
}

/// Gives each GPU the target of its wish, or the closest free one. A wish moves the others by as many places.
fn closest(
    source: &Topology,
    candidates: &Topology,
    wishes: &[(u32, u32)],
    switches: &Switches,
) -> Vec<GpuMatch> {
    let (mut free, mut others): (Vec<&Node>, Vec<&Node>) =
        (candidates.gpus().collect(), source.gpus().collect());
    let mut pairs = Vec::new();
    let mut shift = None;
    for (old, new) in wishes {
        let old = others.iter().position(|s| s.gpu_id == *old);
        let new = free.iter().position(|t| t.gpu_id == *new);
        if let (Some(old), Some(new)) = (old, new) {
            let (source, target) = (others.remove(old).clone(), free.remove(new).clone());
            let by = i64::from(target.render_minor()) - i64::from(source.render_minor());
            shift.get_or_insert(by);
            pairs.push(GpuMatch { source, target });
        }
    }
    let far = |s: &Node, t: &Node| match shift {
        None => distance(s, t).into(),
        Some(by) => (i64::from(s.render_minor()) + by).abs_diff(t.render_minor().into()),
    };
    // Who is still there keeps its place before others choose.
    others.sort_by_key(|s| free.iter().map(|t| far(s, t)).min());
    for gpu in others {
        let fitting = free.iter().enumerate();
        let fitting = fitting.filter(|(_, t)| matches(gpu, t, switches));
        let near = fitting.min_by_key(|(_, t)| (far(gpu, t), t.render_minor()));
        if let Some(at) = near.map(|(at, _)| at) {
            let (source, target) = (gpu.clone(), free.remove(at).clone());
            pairs.push(GpuMatch { source, target });
        }
    }
    pairs
}

/// How far a GPU is from its place: 0 if it is the same GPU.
fn distance(source: &Node, target: &Node) -> u32 {
    let same = |a: &Option<String>, b: &Option<String>| a.is_some() && a == b;
    let known = source.unique_id.is_some() && target.unique_id.is_some();
    let minor = source.render_minor().abs_diff(target.render_minor());
    if known && same(&source.unique_id, &target.unique_id) {
        return 0;
    }
    if !known && source.gpu_id == target.gpu_id && minor == 0 {
        return 0;
    }
    let place = if same(&source.pci, &target.pci) { 0 } else { 4 };
    1 + place + minor.min(1000)
}

/// Returns the plugin's map if it sees only these GPUs and goes straight through them. The error says what is wrong. How
/// it goes through XGMI hives is not foreseen: with one, wishes are taken at their word.
fn plugin_pairs(
    request: &ChoiceRequest<'_>,
    source: &Topology,
    closest: Vec<GpuMatch>,
    wishes: &[(u32, u32)],
) -> Result<Vec<GpuMatch>, String> {
    let minors: Vec<u32> = closest.iter().map(|p| p.target.render_minor()).collect();
    let view = request.target.visible(&minors);
    if let Some(trouble) = view.unreadable.iter().find(|u| u.stops_plugin) {
        let (node, what) = (trouble.node, &trouble.what);
        return Err(format!("would refuse (node {node} cannot be read: {what})"));
    }
    let pairs = in_plugin_order(source, &view, request.switches)?;
    let ids = |pairs: &[GpuMatch]| {
        let ids = pairs.iter().map(|p| (p.source.gpu_id, p.target.gpu_id));
        ids.collect::<BTreeSet<_>>()
    };
    let picks = ids(&pairs);
    for other in request.sources {
        if ids(&in_plugin_order(other, &view, request.switches)?) != picks {
            return Err("would map the processes of the container differently".into());
        }
    }
    match wishes.iter().find(|wish| !picks.contains(wish)) {
        None => Ok(pairs),
        Some(_) if source.gpus().any(|g| g.properties.hive_id != 0) => Ok(closest),
        Some((old, new)) => {
            let picks = pairs
                .iter()
                .map(|p| format!("{} to {}", p.source, p.target));
            let picks = picks.collect::<Vec<_>>().join(", ");
            Err(format!(
                "would map {picks} (the wish {old:#06x}={new:#06x} is not kept)"
            ))
        }
    }
}

/// Gives each GPU, from the last on, the last free one that fits, as the plugin does without XGMI.
/// [`super::saved::restored_wrongly`] finds where it did otherwise.
fn in_plugin_order(
    source: &Topology,
    view: &Topology,
    switches: &Switches,
) -> Result<Vec<GpuMatch>, String> {
    for list in [source, view] {
        let gpus = list.gpus();
        let text: usize = gpus.map(|n| format!("{:#06x} ", n.gpu_id).len()).sum();
        if PRINTED_HEAD + text >= PRINTED {
            return Err(format!(
                "might crash (it writes {} GPUs of one list into a buffer for 26)",
                list.gpus().count()
            ));
        }
    }
    let mut free: Vec<&Node> = view.gpus().collect();
    let sources: Vec<&Node> = source.gpus().collect();
    let mut pairs = Vec::new();
    for gpu in sources.into_iter().rev() {
        let at = free.iter().rposition(|t| matches(gpu, t, switches));
        let at = at.ok_or("finds no GPU for a GPU of the checkpoint")?;
        let (source, target) = (gpu.clone(), free.remove(at).clone());
        pairs.push(GpuMatch { source, target });
    }
    pairs.reverse();
    Ok(pairs)
}

fn chosen(request: &ChoiceRequest<'_>, pairs: Vec<GpuMatch>, mut checks: Vec<Check>) -> KfdChoice {
    for pair in &pairs {
        checks.extend(compare(&pair.source, &pair.target, request.switches));
    }
    let mut visible: Vec<u32> = pairs.iter().map(|p| p.target.render_minor()).collect();
    visible.sort_unstable();
    let choice = KfdChoice {
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
    KfdChoice {
        sentence: format!("AMD GPUs, {what}: {}", list.join("; ")),
        ..choice
    }
}

fn refuse(reason: impl Into<String>, checks: Vec<Check>) -> Box<KfdRefused> {
    Box::new(KfdRefused {
        reason: reason.into(),
        checks,
    })
}

/// Returns this host's topology with only the GPUs that may be used. GPUs without a render node of their own may not.
fn candidates(request: &ChoiceRequest<'_>) -> Topology {
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
    request: &ChoiceRequest<'_>,
    source: &Topology,
    candidates: &Topology,
) -> Result<Vec<(u32, u32)>, Vec<Check>> {
    let Wish::Pairs(pairs) = request.wish else {
        return Ok(Vec::new());
    };
    let (mut found, mut wrong) = (Vec::<(u32, u32)>::new(), Vec::new());
    let mut complain = |subject: &str, recorded: String, found: String| {
        wrong.push(Check {
            name: request.wished_by.into(),
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
