//! Chooses the GPUs of this host that CRIU and the container see after a restore. CRIU's amdgpu plugin maps the
//! checkpoint's GPUs onto those that it sees by a search of its own, which [`super::plugin_choice`] predicts.

use crate::checks::{KfdSwitches, Switch, compare, matches, names};
use crate::plugin_choice;
use crate::reasons::{too_few, unmatched, wish_mismatches};
use crate::topology::{Node, RENDER_FIRST, RENDER_LAST, Topology};
use cryopod_gpu_plan::checks::compat::{Check, Verdict};
use cryopod_gpu_plan::mapping::wish::{self, Wish};

/// How many sets of GPUs are tried.
const SETS: usize = 20_000;

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
    pub switches: &'a KfdSwitches,
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
    settle(request, source, &candidates, &wishes, checks)
}

/// Shows the plugin's search one set of GPUs after the other, the closest first, until it makes a map that keeps the
/// wishes.
fn settle(
    request: &ChoiceRequest<'_>,
    source: &Topology,
    candidates: &Topology,
    wishes: &[(u32, u32)],
    mut checks: Vec<Check>,
) -> Result<KfdChoice, Box<KfdRefused>> {
    let (trouble, minors) = match first_agreed(request, source, candidates, wishes) {
        Ok(pairs) => return Ok(chosen(request, pairs, checks)),
        Err(refused) => refused,
    };
    let before = checks.len();
    checks.extend(unmatched(source, candidates, request.switches));
    checks.extend(wish_mismatches(
        source,
        candidates,
        wishes,
        request.switches,
    ));
    if checks.len() == before {
        checks.extend(too_few(source, candidates, request.switches));
    }
    if checks.len() > before {
        return Err(refuse(
            "the checkpoint's GPUs cannot be mapped onto this host's",
            checks,
        ));
    }
    let relaxed = ChoiceRequest {
        switches: &request.switches.clone().with(Switch::Numa, false),
        ..*request
    };
    let numa = request.switches.is_on(Switch::Numa)
        && first_agreed(&relaxed, source, candidates, wishes).is_ok();
    checks.push(Check {
        name: match numa {
            true => Switch::Numa.name().into(),
            false => "choice of CRIU's amdgpu plugin".into(),
        },
        subject: String::new(),
        recorded: "GPUs with their links to CPUs and to each other".into(),
        found: format!(
            "GPUs ({}) with which the plugin {trouble}",
            names(&minors)
        ),
        verdict: Verdict::Refused,
        switch: numa.then(|| format!("{}=0", Switch::Numa.name())),
        remedy: "restore where the GPUs are joined in the same way, by XGMI and PCIe, to each other and to CPUs (in the BIOS: NPS, large BAR), or with fewer comparisons (KFD_*_CHECK=0); the plugin of CRIU up to 4.2 chooses by itself".into(),
    });
    Err(refuse(format!("CRIU's amdgpu plugin {trouble}"), checks))
}

/// Returns the plugin's map for the first set of GPUs with which it makes one that is right. The error says what it does
/// with the closest set, and has that set.
fn first_agreed<'a>(
    request: &ChoiceRequest<'_>,
    source: &Topology,
    candidates: &'a Topology,
    wishes: &[(u32, u32)],
) -> Result<Vec<GpuMatch>, (String, Vec<&'a Node>)> {
    let mut first = None;
    for set in sets(source, candidates, wishes, request.switches).take(SETS) {
        let minors: Vec<u32> = set.iter().map(|node| node.render_minor()).collect();
        match plugin_agrees(request, source, &minors, wishes) {
            Ok(pairs) => return Ok(pairs),
            Err(trouble) => first.get_or_insert((trouble, set)),
        };
    }
    Err(first.unwrap_or_else(|| ("finds too few GPUs".into(), Vec::new())))
}

/// The sets of as many GPUs as the checkpoint has: first the closest, then those that lie together, then all others. The
/// targets of the wishes are in each.
fn sets<'a>(
    source: &Topology,
    candidates: &'a Topology,
    wishes: &[(u32, u32)],
    switches: &KfdSwitches,
) -> impl Iterator<Item = Vec<&'a Node>> + use<'a> {
    let (wished, others): (Vec<&Node>, Vec<&Node>) = candidates
        .gpus()
        .partition(|t| wishes.iter().any(|w| w.1 == t.gpu_id));
    let mut free: Vec<(u32, &Node)> = Vec::new();
    for target in others {
        let fits = source.gpus().filter(|s| matches(s, target, switches));
        free.extend(
            fits.map(|s| distance(s, target))
                .min()
                .map(|near| (near, target)),
        );
    }
    free.sort_by_key(|(near, target)| (*near, target.render_minor()));
    let free: Vec<&Node> = free.into_iter().map(|(_, target)| target).collect();
    let count = source.gpus().count().saturating_sub(wished.len());
    let mut together: Vec<&Node> = free.clone();
    together.sort_by_key(|target| target.render_minor());
    let together: Vec<Vec<&Node>> = match count {
        0 => Vec::new(),
        _ => together.windows(count).map(<[_]>::to_vec).collect(),
    };
    let closest = free.get(..count).map(<[_]>::to_vec);
    let rest = combinations(free, count);
    closest
        .into_iter()
        .chain(together)
        .chain(rest)
        .map(move |set| wished.iter().copied().chain(set).collect())
}

/// All choices of `count` of these, those with the first ones first.
fn combinations<'a>(
    of: Vec<&'a Node>,
    count: usize,
) -> impl Iterator<Item = Vec<&'a Node>> + use<'a> {
    let mut next = (count <= of.len()).then(|| (0..count).collect::<Vec<usize>>());
    std::iter::from_fn(move || {
        let now = next.take()?;
        let grows = (0..count).rev().find(|i| now[*i] < of.len() - count + i);
        next = grows.map(|i| {
            let mut after = now.clone();
            for (at, place) in after.iter_mut().enumerate().skip(i) {
                *place = now[i] + 1 + at - i;
            }
            after
        });
        Some(now.into_iter().map(|i| of[i]).collect())
    })
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

/// Returns the plugin's map if it sees only these GPUs, if that keeps the wishes. The error says what is wrong with it.
fn plugin_agrees(
    request: &ChoiceRequest<'_>,
    source: &Topology,
    minors: &[u32],
    wishes: &[(u32, u32)],
) -> Result<Vec<GpuMatch>, String> {
    let view = request.target.visible(minors);
    let mut agreed: Option<Vec<(u32, u32)>> = None;
    for source in request.sources {
        let mut picks = plugin_choice::choose(source, &view, request.switches)?;
        picks.sort_unstable();
        match &agreed {
            Some(other) if *other != picks => {
                return Err("would map the processes of the container differently".into());
            }
            _ => agreed = Some(picks),
        }
    }
    let picks = agreed.unwrap_or_default();
    let pair = |gpu: &Node| {
        let id = picks.iter().find(|p| p.0 == gpu.gpu_id)?.1;
        let target = view.gpus().find(|t| t.gpu_id == id)?.clone();
        let source = gpu.clone();
        Some(GpuMatch { source, target })
    };
    let pairs: Option<Vec<GpuMatch>> = source.gpus().map(pair).collect();
    let pairs = pairs.ok_or("would choose a GPU that is not there")?;
    let broken = wishes.iter().find(|wish| !picks.contains(wish));
    match broken {
        None => Ok(pairs),
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
    wanted: &Wish,
    source: &Topology,
    candidates: &Topology,
) -> Result<Vec<(u32, u32)>, Vec<Check>> {
    let Wish::Pairs(pairs) = wanted else {
        return Ok(Vec::new());
    };
    let (mut found, mut wrong) = (Vec::<(u32, u32)>::new(), Vec::new());
    let mut complain = |subject: &str, recorded: String, found: String| {
        wrong.push(Check {
            name: wish::ANNOTATION.into(),
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
