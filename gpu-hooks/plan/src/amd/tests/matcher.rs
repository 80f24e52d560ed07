//! Tests the search against brute force, and its worst cases.

use std::time::Duration;

use proptest::prelude::*;

use super::super::checks::{Switch, Switches};
use super::super::matcher::{Mapping, NoMapping, Problem, Without, find, valid};
use super::super::topology::{LINK_PCIE, LINK_XGMI, Topology};
use super::*;

/// CPU time of this thread: other programs on the machine do not count.
fn used() -> Duration {
    let mut t = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes a timespec to the address it is given.
    let told = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut t) };
    assert_eq!(told, 0);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fn problem<'a>(source: &'a Topology, target: &'a Topology, switches: &'a Switches) -> Problem<'a> {
    Problem {
        source,
        target,
        switches,
        wishes: &[],
        without: Without::default(),
    }
}

fn agree(
    source: &Topology,
    target: &Topology,
    switches: &Switches,
) -> Result<(bool, u64), TestCaseError> {
    let problem = problem(source, target, switches);
    let gpus: Vec<u32> = target.gpus().map(|g| g.id).collect();
    let (found, steps) = match find(&problem) {
        Ok(Mapping { targets, steps }) => {
            prop_assert_eq!(valid(&problem, &targets), Ok(()));
            let ids: Vec<u32> = targets.iter().map(|t| gpus[*t]).collect();
            prop_assert!(brute::valid(source, target, switches, &ids));
            (true, steps)
        }
        Err(NoMapping::None { steps }) => (false, steps),
        Err(e) => return Err(TestCaseError::fail(e.to_string())),
    };
    prop_assert!(steps <= 400, "{} steps", steps);
    if !found {
        prop_assert!(
            !brute::feasible(source, target, switches),
            "a mapping exists"
        );
    }
    Ok((found, steps))
}

fn case(seed: u64, gpus: u32, more: u32, changes: usize) -> (Topology, Topology, Switches) {
    let mut dice = Dice(seed);
    let source = random(&mut dice, gpus);
    let target = other(&mut dice, &source, more, changes);
    (
        source,
        target,
        Switches::default().with(Switch::Numa, !dice.one_in(4)),
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// A mapping found is valid, and where none is found none exists.
    #[test]
    fn as_trying_everything(seed: u64, gpus in 1_u32..=5, more in 0_u32..=2, changes in 0_usize..4) {
        let (source, target, switches) = case(seed, gpus, more, changes);
        agree(&source, &target, &switches)?;
    }

    #[test]
    fn a_shuffled_machine_is_found(seed: u64, gpus in 1_u32..=16) {
        let (source, target, switches) = case(seed, gpus, 0, 0);
        let mapping = find(&problem(&source, &target, &switches)).map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert!(mapping.steps <= 400, "{} steps", mapping.steps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn as_trying_everything_with_eight(seed: u64, gpus in 6_u32..=8, changes in 0_usize..4) {
        let (source, target, switches) = case(seed, gpus, 8 - gpus, changes);
        agree(&source, &target, &switches)?;
    }
}

/// How long the search takes for up to eight GPUs; run in release with `--ignored --nocapture`.
#[test]
#[ignore = "measures, and tries more cases against everything"]
fn timing_of_random_topologies() {
    let (mut worst, mut most, mut feasible) = (Duration::ZERO, 0, 0);
    for seed in 0..20_000_u64 {
        let gpus = 1 + (seed % 8) as u32;
        let (source, target, switches) = case(
            seed,
            gpus,
            (seed / 8 % u64::from(9 - gpus)) as u32,
            (seed / 64 % 4) as usize,
        );
        let start = used();
        let result = find(&problem(&source, &target, &switches));
        worst = worst.max(used() - start);
        most = most.max(match &result {
            Ok(m) => m.steps,
            Err(NoMapping::None { steps } | NoMapping::Budget { steps }) => *steps,
            Err(NoMapping::TooMany) => 0,
        });
        feasible += u32::from(result.is_ok());
        if gpus <= 6 {
            agree(&source, &target, &switches).unwrap();
        }
    }
    println!("20000 topologies up to 8 GPUs, {feasible} feasible: worst {worst:?}, {most} steps");
}

/// GPUs as cells of a table: each is in a hive and on a CPU.
fn cells(cells: &[(u32, u32)], cpus: u32, first_id: u32) -> Topology {
    let mut t = machine(cpus, cells.len() as u32, first_id);
    for (i, (_, cpu)) in cells.iter().enumerate() {
        both(&mut t, LINK_PCIE, cpus + i as u32, *cpu);
    }
    let hives: std::collections::BTreeSet<u32> = cells.iter().map(|c| c.0).collect();
    for h in hives {
        let members: Vec<u32> = (0..cells.len())
            .filter(|i| cells[*i].0 == h)
            .map(|i| cpus + i as u32)
            .collect();
        mesh(&mut t, LINK_XGMI, &members);
    }
    t
}

/// Hives of two and CPUs of two GPUs in rings of the given numbers of hives.
fn rings(sizes: &[u32]) -> Topology {
    let (mut all, mut first) = (Vec::new(), 0);
    for size in sizes {
        for i in 0..*size {
            all.push((first + i, first + i));
            all.push((first + i, first + (i + 1) % size));
        }
        first += size;
    }
    cells(&all, first, 0xa000)
}

fn peers(t: &mut Topology, cpus: u32, gpus: u32, linked: impl Fn(u32, u32) -> bool) {
    for a in 0..gpus {
        for b in 0..gpus {
            if a != b && linked(a, b) {
                one(t, LINK_PCIE, cpus + a, cpus + b);
            }
        }
    }
}

fn worst_cases() -> Vec<(&'static str, Topology, Topology, Option<bool>)> {
    let mut cases = Vec::new();
    let full = |first| {
        let mut t = server(1, 16, 0, first);
        peers(&mut t, 1, 16, |_, _| true);
        t
    };
    let mut odd = full(0xb000);
    odd.nodes[9].links.pop();
    cases.push((
        "16 alike, the target lacks one link",
        full(0xa000),
        odd.clone(),
        Some(false),
    ));
    let mut odd_source = full(0xa000);
    odd_source.nodes[3].links.pop();
    cases.push((
        "16 alike, each side lacks another link",
        odd_source,
        odd,
        Some(true),
    ));
    cases.push((
        "a ring of 8 hives on two of 4",
        rings(&[8]),
        rings(&[4, 4]),
        Some(false),
    ));
    cases.push((
        "two rings of 4 hives on one of 8",
        rings(&[4, 4]),
        rings(&[8]),
        Some(false),
    ));
    cases.push((
        "rings of 2, 3 and 3 hives on 2, 2, 2 and 2",
        rings(&[2, 3, 3]),
        rings(&[2, 2, 2, 2]),
        Some(false),
    ));
    cases.push((
        "rings of 2, 2, 2 and 2 hives on 2, 3 and 3",
        rings(&[2, 2, 2, 2]),
        rings(&[2, 3, 3]),
        Some(false),
    ));
    cases.push((
        "rings of 2, 3 and 3 hives on 3, 3 and 2",
        rings(&[2, 3, 3]),
        rings(&[3, 3, 2]),
        Some(true),
    ));
    let grid: Vec<(u32, u32)> = (0..16).map(|i| (i / 4, i % 4)).collect();
    let mut bent = grid.clone();
    (bent[9].1, bent[14].1) = (2, 1);
    cases.push((
        "4 hives over 4 CPUs, two GPUs changed",
        cells(&grid, 4, 0xa000),
        cells(&bent, 4, 0xb000),
        Some(false),
    ));
    let pairs: Vec<(u32, u32)> = (0..16).map(|i| (i / 2, i)).collect();
    let mut last = pairs.clone();
    last[15].1 = 14;
    cases.push((
        "8 hives of 2 over 16 CPUs, the last on one CPU",
        cells(&pairs, 16, 0xa000),
        cells(&last, 16, 0xb000),
        Some(false),
    ));
    let mut models = cells(&pairs, 16, 0xb000);
    for i in 0..16 {
        models.nodes[16 + i].properties.device_id += u32::from(i % 2 == 1) ^ u32::from(i == 15);
    }
    let mut wanted = cells(&pairs, 16, 0xa000);
    for i in 0..16 {
        wanted.nodes[16 + i].properties.device_id += u32::from(i % 2 == 1);
    }
    cases.push((
        "8 hives of two models, the last of one",
        wanted,
        models,
        Some(false),
    ));
    // A clique of 8 among 16 in 7 parts without links within.
    let mut eight = server(1, 8, 0, 0xa000);
    peers(&mut eight, 1, 8, |_, _| true);
    let mut parts = server(1, 16, 0, 0xb000);
    peers(&mut parts, 1, 16, |a, b| a % 7 != b % 7);
    cases.push((
        "8 peers among 16 in 7 parts",
        eight.clone(),
        parts,
        Some(false),
    ));
    for seed in 0..12 {
        let mut dice = Dice(seed);
        let joined: Vec<bool> = (0..256)
            .map(|_| !dice.one_in(3 + seed as usize % 6))
            .collect();
        let mut noisy = server(1, 16, 0, 0xb000);
        peers(&mut noisy, 1, 16, |a, b| {
            joined[(a.min(b) * 16 + a.max(b)) as usize]
        });
        cases.push((
            "8 peers among 16, links at random",
            eight.clone(),
            noisy,
            None,
        ));
        let pick = |dice: &mut Dice, hives: u32, cpus: u32| {
            let mut rows: Vec<u32> = (0..16).map(|i| i % hives).collect();
            dice.shuffle(&mut rows);
            let all: Vec<(u32, u32)> = rows
                .into_iter()
                .enumerate()
                .map(|(i, h)| (h, i as u32 % cpus))
                .collect();
            cells(&all, cpus, 0xa000)
        };
        for (hives, cpus) in [(8, 8), (4, 4), (5, 4), (4, 8), (8, 4), (5, 5)] {
            cases.push((
                "hives and CPUs at random",
                pick(&mut dice, hives, cpus),
                pick(&mut dice, hives, cpus),
                None,
            ));
        }
        let mut mixed = (random(&mut dice, 16), Topology::default());
        mixed.1 = other(&mut dice, &mixed.0, 0, 1);
        cases.push(("16 at random, one thing changed", mixed.0, mixed.1, None));
        let small = random(&mut dice, 8);
        let large = other(&mut dice, &small, 8, 6);
        cases.push(("8 at random among 16", small, large, None));
    }
    cases
}

#[test]
fn sixteen_gpus_end_soon() {
    let switches = Switches::default();
    let mut worst = (0, Duration::ZERO);
    for (name, source, target, expected) in worst_cases() {
        let start = used();
        let result = find(&problem(&source, &target, &switches));
        let time = used() - start;
        let steps = match &result {
            Ok(m) => m.steps,
            Err(NoMapping::None { steps }) => *steps,
            Err(e) => panic!("{name}: {e}"),
        };
        if let Some(expected) = expected {
            assert_eq!(result.is_ok(), expected, "{name}");
            println!("{name}: {steps} steps, {time:?}");
        }
        worst = (worst.0.max(steps), worst.1.max(time));
        assert!(steps <= 5_000, "{name}: {steps} steps");
    }
    println!("worst: {} steps, {:?}", worst.0, worst.1);
}

#[test]
fn a_gpu_that_is_still_there_keeps_its_place() {
    let t = server(2, 8, 4, 0xa000);
    let switches = Switches::default();
    let mapping = find(&problem(&t, &t, &switches)).unwrap();
    assert_eq!(mapping.targets, (0..8).collect::<Vec<_>>());
    let half = t.visible(&[132, 133, 134, 135]);
    assert_eq!(
        find(&problem(&half, &t, &switches)).unwrap().targets,
        [4, 5, 6, 7]
    );
    // Another host's: the closest.
    let elsewhere = server(2, 8, 4, 0xb000);
    assert_eq!(
        find(&problem(&half, &elsewhere, &switches))
            .unwrap()
            .targets,
        [4, 5, 6, 7]
    );
}

#[test]
fn wishes_are_kept_or_there_is_none() {
    let (a, b) = (server(2, 4, 0, 0xa000), server(2, 4, 0, 0xb000));
    let switches = Switches::default();
    let with = |wishes: &[(u32, u32)]| {
        find(&Problem {
            wishes,
            ..problem(&a, &b, &switches)
        })
    };
    assert_eq!(with(&[(0xa000, 0xb003)]).unwrap().targets[0], 3);
    // GPUs 0 and 2 share a CPU, 0 and 1 do not.
    assert!(with(&[(0xa000, 0xb000), (0xa002, 0xb001)]).is_err());
    assert_eq!(
        with(&[(0xa000, 0xb002), (0xa002, 0xb000)]).unwrap().targets,
        [2, 1, 0, 3]
    );
}

#[test]
fn more_than_can_be_searched() {
    let t = machine(1, 65, 0xa000);
    let switches = Switches::default();
    assert_eq!(find(&problem(&t, &t, &switches)), Err(NoMapping::TooMany));
}
