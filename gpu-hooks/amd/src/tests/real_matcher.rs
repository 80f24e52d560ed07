//! Compares the prediction with the plugin's own matcher, which tests/amd/matcher.c asks: `tests/amd/predict [PAIRS]`.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::{Command, Stdio};
use std::{env, fs};

use super::super::checks::{KfdSwitches, Switch};
use super::super::plugin_choice::choose;
use super::machines::{ALL, described};
use super::*;

struct Pair {
    name: String,
    source: Topology,
    target: Topology,
    switches: KfdSwitches,
}

/// All pairs of the described machines, whole and in part, in the order of the description and in the reverse.
fn captured() -> Vec<Pair> {
    let mut machines = Vec::new();
    for name in ALL {
        let whole = described(name);
        let minors: Vec<u32> = whole.gpus().map(Node::render_minor).collect();
        for count in [1, 2, 4, 8, 16, 28, 29] {
            if count < minors.len() {
                let last = whole.visible(&minors[minors.len() - count..]);
                machines.push((format!("{name}, last {count}"), last));
                let first = whole.visible(&minors[..count]);
                machines.push((format!("{name}, first {count}"), first));
                let step = minors.len() / count;
                let spread: Vec<u32> = minors.iter().copied().step_by(step).take(count).collect();
                machines.push((format!("{name}, every {step}th"), whole.visible(&spread)));
            }
        }
        machines.push((name.to_owned(), whole));
    }
    let mut pairs = Vec::new();
    for (a, source) in &machines {
        for (b, target) in &machines {
            // The plugin refuses another number of GPUs at once.
            if source.gpus().count() != target.gpus().count() {
                continue;
            }
            let mut backwards = target.clone();
            backwards.nodes.reverse();
            for (how, target) in [("", target), (" backwards", &backwards)] {
                for numa in [true, false] {
                    pairs.push(Pair {
                        name: format!("{a} on {b}{how}, NUMA {numa}"),
                        source: source.recorded(),
                        target: target.clone(),
                        switches: KfdSwitches::default().with(Switch::Numa, numa),
                    });
                }
            }
        }
    }
    pairs
}

fn random_pair(seed: u64) -> Pair {
    let dice = &mut Dice(seed);
    let most = if dice.one_in(12) { 32 } else { 9 };
    let gpus = 1 + dice.roll(most) as u32;
    let source = random(dice, gpus);
    let mut target = if dice.one_in(4) {
        random(dice, gpus)
    } else {
        let changes = [0, 0, 1, 2, 5][dice.roll(5)];
        other(dice, &source, 0, changes)
    };
    let mut source = source.recorded();
    if dice.one_in(3) {
        dice.shuffle(&mut source.nodes);
    }
    if dice.one_in(20) {
        // What no kernel gives, and an image from a stranger may have.
        let at = dice.roll(source.nodes.len());
        let other = source.nodes[dice.roll(source.nodes.len())].clone();
        match dice.roll(4) {
            0 => source.nodes[at].gpu_id = other.gpu_id,
            1 => source.nodes[at].id = other.id,
            2 => source.nodes[at].links.push(Link {
                kind: LINK_PCIE,
                to: 99,
            }),
            _ => source.nodes[at].gpu_id = 0x000a_bcde,
        }
    }
    if dice.one_in(20) {
        let at = dice.roll(target.nodes.len());
        let last = target.nodes.len() - 1;
        target.nodes[at].gpu_id = target.nodes[last].gpu_id;
    }
    let mut switches = KfdSwitches::default();
    for switch in Switch::ALL {
        if dice.one_in(4) {
            switches = switches.with(switch, false);
        }
    }
    Pair {
        name: format!("random pair {seed}"),
        source,
        target,
        switches,
    }
}

fn numbers(topology: &Topology, out: &mut String) {
    write!(out, "{}", topology.nodes.len()).unwrap();
    for node in &topology.nodes {
        let own = [node.id, node.gpu_id, node.cpu_cores_count].map(u64::from);
        let properties = node.properties.numbers();
        let all = own
            .into_iter()
            .chain(properties.into_iter().map(|(_, n)| n));
        all.for_each(|n| write!(out, " {n}").unwrap());
        write!(out, " {}", node.links.len()).unwrap();
        for link in &node.links {
            write!(out, " {} {}", link.kind, link.to).unwrap();
        }
    }
    out.push('\n');
}

fn written(pair: &Pair) -> String {
    let on = |(i, s): (usize, Switch)| u32::from(pair.switches.is_on(s)) << i;
    let bits: u32 = Switch::ALL.into_iter().enumerate().map(on).sum();
    let mut text = format!("{bits}\n");
    numbers(&pair.source, &mut text);
    numbers(&pair.target, &mut text);
    text
}

/// The answer of the matcher that is foreseen, if one is.
fn predicted(pair: &Pair) -> Option<String> {
    let pairs = choose(&pair.source, &pair.target, &pair.switches).ok()?;
    Some(pairs.iter().fold("picks".to_owned(), |mut line, (a, b)| {
        write!(line, " {a}:{b}").unwrap();
        line
    }))
}

#[test]
#[ignore = "asks the plugin's own matcher: tests/amd/predict"]
fn the_prediction_is_what_the_plugin_does() {
    let matcher = env::var("AMDGPU_MATCHER").expect("the program that tests/amd/predict builds");
    let count: u64 = env::var("AMDGPU_PAIRS").unwrap().parse().unwrap();
    let mut pairs = captured();
    let known = pairs.len();
    pairs.extend((0..count).map(random_pair));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pairs");
    fs::write(&path, pairs.iter().map(written).collect::<String>()).unwrap();
    let output = Command::new(matcher)
        .stdin(fs::File::open(&path).unwrap())
        .stderr(Stdio::null()) // the sanitizer's reports
        .output()
        .unwrap();
    assert!(output.status.success());
    println!("the matcher has answered");
    let answers = String::from_utf8(output.stdout).unwrap();
    let answers: Vec<&str> = answers.lines().collect();
    assert_eq!(answers.len(), pairs.len());
    // How many of each kind, and the first.
    let mut kinds = BTreeMap::<&str, (u32, &str)>::new();
    let (mut lost, mut wrong) = (Vec::new(), Vec::new());
    for (pair, answer) in pairs.iter().zip(answers) {
        let kind = if answer.starts_with("picks") {
            "picks"
        } else {
            answer
        };
        kinds.entry(kind).or_insert((0, &pair.name)).0 += 1;
        match predicted(pair) {
            None if kind == "picks" => lost.push(&pair.name),
            None => {}
            Some(prediction) if prediction == answer => {}
            Some(other) => wrong.push(format!("{}: {other}; did: {answer}", pair.name)),
        }
    }
    println!("{known} pairs of described machines, {count} random ones: {kinds:?}");
    let first = lost.first();
    println!(
        "{} maps of the plugin are not predicted, and are refused: {first:?}",
        lost.len()
    );
    let first: Vec<&String> = wrong.iter().take(20).collect();
    assert!(wrong.is_empty(), "{} differ: {first:#?}", wrong.len());
    // A campaign in which nothing was mapped, or all, compares nothing.
    assert!(kinds["picks"].0 > 100 && kinds["refuses"].0 > 100);
}
