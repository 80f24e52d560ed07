//! Searches for a mapping.
//!
//! The search assigns the GPU with the fewest targets left and narrows the others. Hives and CPUs are variables of
//! their own, and matchings tell early that too few targets are left. GPUs that are alike are tried once. When a group
//! of GPUs that share no hive or CPU with the others is done, a failure of the rest is remembered. A budget of steps
//! ends a search that takes too long.

use std::collections::HashSet;

use super::checks::{Switch, matches};
use super::graph::{Graph, bits, matching};
use super::matcher::{BUDGET, MAX_GPUS, Mapping, NoMapping, Problem, valid};
use super::topology::Node;

#[derive(Debug, Clone)]
pub(super) struct State {
    /// Targets left of each source.
    targets: Vec<u64>,
    /// CPUs left of each CPU of the source.
    cpus: Vec<u64>,
    /// Hives left of each hive of the source.
    hives: Vec<u64>,
    /// Sources that have their target.
    done: u64,
}

pub(super) type Remembered = (u64, u64, Vec<u64>);

pub(super) struct Search<'a> {
    problem: &'a Problem<'a>,
    passed: &'a HashSet<u64>,
    s: Graph<'a>,
    t: Graph<'a>,
    numa: bool,
    /// By source and target: each CPU of the source with the CPUs that can replace it.
    cpus: Vec<Vec<Vec<(usize, u64)>>>,
    /// Sources of each hive, and targets of each hive.
    hive_sources: Vec<u64>,
    hive_targets: Vec<u64>,
    cpu_sources: Vec<u64>,
    /// Two hives of the source cannot share one of the target as the search sees them.
    hives_differ: bool,
    /// Sources (targets) that can be swapped with one.
    like_source: Vec<u64>,
    like_target: Vec<u64>,
    /// Sources joined with each source by hives and CPUs.
    group: Vec<u64>,
    cost: Vec<Vec<u32>>,
    pub(super) steps: u64,
    pub(super) failed: HashSet<Remembered>,
}

fn mask(n: usize) -> u64 {
    if n >= 64 { u64::MAX } else { (1 << n) - 1 }
}

impl<'a> Search<'a> {
    pub(super) fn new(
        problem: &'a Problem<'a>,
        passed: &'a HashSet<u64>,
    ) -> Result<Self, NoMapping> {
        let (s, t) = (Graph::new(problem.source), Graph::new(problem.target));
        let sizes = [
            s.gpus.len(),
            s.cpus.len(),
            s.hives,
            t.gpus.len(),
            t.cpus.len(),
            t.hives,
        ];
        if sizes.iter().any(|n| *n > MAX_GPUS) {
            return Err(NoMapping::TooMany);
        }
        let numa = !problem.without.cpus && problem.switches.is_on(Switch::Numa);
        let hives = !problem.without.hives;
        let set = |n: usize, is: &dyn Fn(usize) -> bool| {
            (0..n).filter(|i| is(*i)).fold(0_u64, |set, i| set | 1 << i)
        };
        let (n, m) = (s.gpus.len(), t.gpus.len());
        let by_hive = |g: &Graph<'_>| -> Vec<u64> {
            (0..if hives { g.hives } else { 0 })
                .map(|h| set(g.gpus.len(), &|i| g.hive[i] == Some(h)))
                .collect()
        };
        let cpus = (0..n)
            .map(|i| {
                (0..m)
                    .map(|j| {
                        s.cpus_of(i)
                            .into_iter()
                            .filter(|_| numa)
                            .map(|c| (c, set(t.cpus.len(), &|d| s.cpu_fits(i, c, &t, j, d))))
                            .collect()
                    })
                    .collect()
            })
            .collect();
        let cost = (0..n)
            .map(|i| (0..m).map(|j| distance(s.gpus[i], t.gpus[j])).collect())
            .collect();
        let mut search = Self {
            hive_sources: by_hive(&s),
            hive_targets: by_hive(&t),
            cpu_sources: (0..s.cpus.len())
                .map(|c| set(n, &|i| numa && s.cpu_links[i].iter().any(|l| l.cpu == c)))
                .collect(),
            hives_differ: t.cliques || n == m,
            problem,
            passed,
            s,
            t,
            numa,
            cpus,
            like_source: Vec::new(),
            like_target: Vec::new(),
            group: Vec::new(),
            cost,
            failed: HashSet::new(),
            steps: 0,
        };
        search.group_sources();
        Ok(search)
    }

    fn group_sources(&mut self) {
        let n = self.s.gpus.len();
        let mut group: Vec<u64> = (0..n).map(|i| 1 << i).collect();
        for together in self.hive_sources.iter().chain(&self.cpu_sources) {
            let joined = bits(*together).fold(0, |set, i| set | group[i]);
            for i in bits(joined) {
                group[i] = joined;
            }
        }
        self.group = group;
    }

    pub(super) fn start(&mut self) -> State {
        let (n, m) = (self.s.gpus.len(), self.t.gpus.len());
        let mut targets = vec![0; n];
        for (i, set) in targets.iter_mut().enumerate() {
            for j in 0..m {
                let (source, target) = (self.s.gpus[i], self.t.gpus[j]);
                let wished = self
                    .problem
                    .wishes
                    .iter()
                    .all(|w| (w.0 == source.gpu_id) == (w.1 == target.gpu_id));
                if wished
                    && matches(source, target, self.problem.switches)
                    && (self.problem.without.cpus || self.s.cpu_links_fit(i, &self.t, j))
                {
                    *set |= 1 << j;
                }
            }
        }
        self.find_alike(&targets);
        State {
            targets,
            cpus: vec![mask(self.t.cpus.len()); self.s.cpus.len()],
            hives: vec![mask(self.hive_targets.len()); self.hive_sources.len()],
            done: 0,
        }
    }

    /// Finds the sources, and the targets, that can be swapped without breaking a rule.
    fn find_alike(&mut self, targets: &[u64]) {
        let (s, t) = (&self.s, &self.t);
        let (n, m) = (s.gpus.len(), t.gpus.len());
        let sources = |a: usize, b: usize| {
            targets[a] == targets[b]
                && s.hive[a] == s.hive[b]
                && s.valid_links(a) == s.valid_links(b)
                && self.cpus[a] == self.cpus[b]
        };
        let mut links: Vec<Vec<_>> = t.cpu_links.clone();
        links.iter_mut().for_each(|l| l.sort_unstable());
        let swap = |x: usize, a: usize, b: usize| match x {
            x if x == a => b,
            x if x == b => a,
            x => x,
        };
        let alike = |a: usize, b: usize| {
            t.hive[a] == t.hive[b]
                && links[a] == links[b]
                && targets.iter().all(|set| (set >> a ^ set >> b) & 1 == 0)
                && (0..m).all(|x| {
                    (0..m).all(|y| t.between[x][y] == t.between[swap(x, a, b)][swap(y, a, b)])
                })
        };
        let set = |n: usize, a: usize, is: &dyn Fn(usize, usize) -> bool| {
            (0..n)
                .filter(|b| *b == a || is(a, *b))
                .fold(0_u64, |set, b| set | 1 << b)
        };
        let like_source = (0..n).map(|a| set(n, a, &sources)).collect();
        // Skipped sets make alike targets differ; so do hives that are no cliques.
        let like_target = (0..m)
            .map(|a| {
                if self.passed.is_empty() && t.cliques {
                    set(m, a, &alike)
                } else {
                    1 << a
                }
            })
            .collect();
        self.like_source = like_source;
        self.like_target = like_target;
    }

    /// Returns the start with every GPU that still exists kept in its place; `None` if there is none.
    pub(super) fn identical(&self, start: &State) -> Option<State> {
        let mut state = start.clone();
        let mut any = false;
        for (i, set) in state.targets.iter_mut().enumerate() {
            if let Some(j) = bits(*set).find(|j| self.cost[i][*j] == 0) {
                *set = 1 << j;
                any = true;
            }
        }
        any.then_some(state)
    }

    pub(super) fn run(&mut self, mut state: State) -> Result<Option<Vec<usize>>, NoMapping> {
        if !self.narrow(&mut state) {
            return Ok(None);
        }
        self.assign(&state)
    }

    fn assign(&mut self, state: &State) -> Result<Option<Vec<usize>>, NoMapping> {
        self.steps += 1;
        if self.steps > BUDGET {
            return Err(NoMapping::Budget { steps: self.steps });
        }
        let n = self.s.gpus.len();
        if state.done == mask(n) {
            let targets: Vec<usize> = state
                .targets
                .iter()
                .map(|b| b.trailing_zeros() as usize)
                .collect();
            let set = targets.iter().fold(0, |set, t| set | 1 << t);
            let good = !self.passed.contains(&set) && valid(self.problem, &targets).is_ok();
            return Ok(good.then_some(targets));
        }
        let begun = |i: usize| self.group[i] & state.done != 0;
        let open: Vec<usize> = bits(mask(n) & !state.done).collect();
        let fresh = !open.iter().any(|i| begun(*i));
        let key = fresh.then(|| self.remember(state));
        if key.as_ref().is_some_and(|k| self.failed.contains(k)) {
            return Ok(None);
        }
        let Some(&source) = open
            .iter()
            .min_by_key(|i| (!fresh && !begun(**i), state.targets[**i].count_ones(), **i))
        else {
            return Ok(None);
        };
        let mut state = state.clone();
        while let Some(target) = bits(state.targets[source]).min_by_key(|t| self.cost[source][*t]) {
            let mut next = state.clone();
            next.targets[source] = 1 << target;
            next.done |= 1 << source;
            if self.narrow(&mut next)
                && let Some(found) = self.assign(&next)?
            {
                return Ok(Some(found));
            }
            // What fails for these two fails for those like them.
            for i in bits(self.like_source[source] & !state.done) {
                state.targets[i] &= !self.like_target[target];
            }
            if !self.narrow(&mut state) {
                break;
            }
        }
        if let Some(key) = key {
            self.failed.insert(key);
        }
        Ok(None)
    }

    /// Everything that the rest of the search depends on when no group is half done.
    fn remember(&self, state: &State) -> Remembered {
        let used = self.used(state);
        let mut more = Vec::new();
        for (c, sources) in self.cpu_sources.iter().enumerate() {
            if sources & state.done != 0 {
                more.push(state.cpus[c]);
            }
        }
        if !self.problem.without.links && self.s.gpus.len() < self.t.gpus.len() {
            for i in bits(state.done) {
                let t = state.targets[i].trailing_zeros() as usize;
                more.push((t as u64) << 32 | u64::from(self.s.valid_links(i)));
            }
        }
        more.sort_unstable();
        (state.done, used, more)
    }

    fn used(&self, state: &State) -> u64 {
        bits(state.done).fold(0, |set, i| set | state.targets[i])
    }

    /// Removes impossible values; `false` if nothing is left somewhere.
    fn narrow(&self, state: &mut State) -> bool {
        loop {
            let before = (
                state.targets.clone(),
                state.cpus.clone(),
                state.hives.clone(),
            );
            let used = self.used(state);
            for i in bits(mask(state.targets.len()) & !state.done) {
                state.targets[i] &= !used;
            }
            if !self.narrow_hives(state) || !self.narrow_cpus(state) || !self.narrow_links(state) {
                return false;
            }
            if state.targets.contains(&0) {
                return false;
            }
            if before
                == (
                    state.targets.clone(),
                    state.cpus.clone(),
                    state.hives.clone(),
                )
            {
                break;
            }
        }
        matching(&state.targets).is_some()
            && (!self.hives_differ || matching(&state.hives).is_some())
            && (!self.numa || matching(&self.linked_cpus(state)).is_some())
    }

    fn linked_cpus(&self, state: &State) -> Vec<u64> {
        (0..state.cpus.len())
            .filter(|c| self.cpu_sources[*c] != 0)
            .map(|c| state.cpus[c])
            .collect()
    }

    fn narrow_hives(&self, state: &mut State) -> bool {
        for h in 0..state.hives.len() {
            let fits = |other: &usize| {
                let choices: Vec<u64> = bits(self.hive_sources[h])
                    .map(|i| state.targets[i] & self.hive_targets[*other])
                    .collect();
                matching(&choices).is_some()
            };
            let left = bits(state.hives[h])
                .filter(fits)
                .fold(0, |set, o| set | 1 << o);
            state.hives[h] = left;
            if left == 0 {
                return false;
            }
            let targets = bits(left).fold(0, |set, o| set | self.hive_targets[o]);
            for i in bits(self.hive_sources[h]) {
                state.targets[i] &= targets;
            }
            if self.hives_differ && left.count_ones() == 1 {
                for other in (0..state.hives.len()).filter(|o| *o != h) {
                    state.hives[other] &= !left;
                }
            }
        }
        true
    }

    fn narrow_cpus(&self, state: &mut State) -> bool {
        if !self.numa {
            return true;
        }
        for i in 0..state.targets.len() {
            let left = bits(state.targets[i])
                .filter(|t| {
                    self.cpus[i][*t]
                        .iter()
                        .all(|(c, set)| set & state.cpus[*c] != 0)
                })
                .fold(0, |set, t| set | 1 << t);
            state.targets[i] = left;
            if left == 0 {
                return false;
            }
        }
        for c in 0..state.cpus.len() {
            let sources = self.cpu_sources[c];
            if sources == 0 {
                continue;
            }
            let fits = |cpu: &usize| {
                let choices: Vec<u64> = bits(sources)
                    .map(|i| {
                        bits(state.targets[i])
                            .filter(|t| {
                                self.cpus[i][*t]
                                    .iter()
                                    .any(|(x, set)| *x == c && set >> cpu & 1 == 1)
                            })
                            .fold(0, |set, t| set | 1 << t)
                    })
                    .collect();
                !choices.contains(&0) && matching(&choices).is_some()
            };
            let left = bits(state.cpus[c])
                .filter(fits)
                .fold(0, |set, d| set | 1 << d);
            state.cpus[c] = left;
            if left == 0 {
                return false;
            }
            if left.count_ones() == 1 {
                for other in (0..state.cpus.len()).filter(|o| *o != c && self.cpu_sources[*o] != 0)
                {
                    state.cpus[other] &= !left;
                }
            }
        }
        true
    }

    /// Links to the chosen GPUs and to as many of the others as can still be chosen must be enough.
    fn narrow_links(&self, state: &mut State) -> bool {
        if self.problem.without.links {
            return true;
        }
        let used = self.used(state);
        let open =
            bits(mask(state.targets.len()) & !state.done).fold(0, |set, i| set | state.targets[i]);
        let n = state.targets.len();
        for i in 0..n {
            let need = self.s.valid_links(i);
            let done = state.done >> i & 1 == 1;
            let others = n - state.done.count_ones() as usize - usize::from(!done);
            let enough = |t: &usize| {
                let between = &self.t.between[*t];
                let sure: u32 = bits(used | 1 << t).map(|u| between[u]).sum();
                let mut more: Vec<u32> =
                    bits(open & !used & !(1 << t)).map(|u| between[u]).collect();
                more.sort_unstable_by(|a, b| b.cmp(a));
                self.t.cpu_valid(*t) + sure + more.iter().take(others).sum::<u32>() >= need
            };
            let left = bits(state.targets[i])
                .filter(enough)
                .fold(0, |set, t| set | 1 << t);
            state.targets[i] = left;
            if left == 0 {
                return false;
            }
        }
        true
    }

    /// Swaps alike sources where that moves them less.
    pub(super) fn mapping(&self, mut targets: Vec<usize>) -> Mapping {
        let mut better = true;
        while better {
            better = false;
            for a in 0..targets.len() {
                for b in bits(self.like_source[a]).filter(|b| *b > a) {
                    let (cost, t) = (&self.cost, &targets);
                    if cost[a][t[b]] + cost[b][t[a]] < cost[a][t[a]] + cost[b][t[b]] {
                        targets.swap(a, b);
                        better = true;
                    }
                }
            }
        }
        Mapping {
            targets,
            steps: self.steps,
        }
    }
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
