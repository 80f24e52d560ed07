//! Tests the choice as a whole.

use super::super::choose::{ChoiceRequest, KfdChoice, KfdRefused, choose};
use super::*;
use cryopod_gpu_plan::checks::compat::{Verdict, refusals};
use cryopod_gpu_plan::checks::switches::Switches;
use cryopod_gpu_plan::mapping::wish::Wish;

fn decide(
    sources: &[Topology],
    target: &Topology,
    permitted: Option<&[u32]>,
    wish: &str,
    switches: &Switches,
) -> Result<KfdChoice, Box<KfdRefused>> {
    choose(&ChoiceRequest {
        sources,
        target,
        permitted,
        wish: &wish.parse::<Wish>().unwrap(),
        wished_by: "gpu.map",
        switches,
    })
}

fn auto(source: &Topology, target: &Topology) -> Result<KfdChoice, Box<KfdRefused>> {
    decide(
        std::slice::from_ref(source),
        target,
        None,
        "auto",
        &Switches::default(),
    )
}

fn minors(choice: &KfdChoice) -> Vec<(u32, u32)> {
    choice
        .pairs
        .iter()
        .map(|p| (p.source.render_minor(), p.target.render_minor()))
        .collect()
}

fn all(refused: &KfdRefused) -> String {
    assert!(refused.checks.iter().any(|c| c.verdict == Verdict::Refused));
    refusals(&refused.checks)
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join("\n")
}

#[test]
fn the_same_machine_keeps_its_places() {
    let t = machine(2, 8, 0xa000);
    let choice = auto(&t, &t).unwrap();
    assert!(!choice.moves());
    assert_eq!(choice.visible, (128..136).collect::<Vec<_>>());
    assert!(choice.checks.iter().all(|c| c.verdict == Verdict::Ok));
    assert!(
        choice.sentence.starts_with(
            "AMD GPUs, each in its own place: GPU 0xa000 (renderD128) on GPU 0xa000 (renderD128);"
        ),
        "{}",
        choice.sentence
    );
}

#[test]
fn another_host_and_only_what_may_be_used() {
    let source = machine(1, 8, 0xa000).visible(&[128]);
    let here = machine(1, 8, 0xb000);
    let choice = auto(&source, &here).unwrap();
    assert_eq!(
        (minors(&choice), choice.visible.as_slice()),
        (vec![(128, 128)], &[128][..])
    );
    let choice = decide(
        std::slice::from_ref(&source),
        &here,
        Some(&[131, 133]),
        "auto",
        &Switches::default(),
    )
    .unwrap();
    assert_eq!(
        (minors(&choice), choice.visible.as_slice()),
        (vec![(128, 131)], &[131][..])
    );
    assert!(
        choice.sentence.contains("the closest that match")
            && choice
                .sentence
                .contains("GPU 0xa000 (renderD128) on GPU 0xb003 (renderD131)"),
        "{}",
        choice.sentence
    );
    let e = all(&decide(&[source], &here, Some(&[]), "auto", &Switches::default()).unwrap_err());
    assert!(
        e.contains("GPU count: the checkpoint has 1, this host has 0 that may be used (none)"),
        "{e}"
    );
}

#[test]
fn wishes_by_every_kind_of_name() {
    let mut source = machine(1, 2, 0xa000).visible(&[129]);
    source.nodes[1].pci = Some("0000:43:00.0".into());
    source.nodes[1].unique_id = Some("00000001eae4a6b3".into());
    let mut here = machine(1, 4, 0xb000);
    here.nodes[4].pci = Some("0000:c3:00.0".into());
    for old in [
        "0xa001",
        "40961",
        "renderD129",
        "/dev/dri/renderD129",
        "129",
        "0",
        "0000:43:00.0",
        "00000001EAE4A6B3",
    ] {
        for new in [
            "0xb003",
            "45059",
            "renderD131",
            "/dev/dri/renderD131",
            "131",
            "3",
            "0000:C3:00.0",
        ] {
            let wish = format!("{old}={new}");
            let choice = decide(
                std::slice::from_ref(&source),
                &here,
                None,
                &wish,
                &Switches::default(),
            )
            .unwrap();
            assert_eq!(minors(&choice), [(129, 131)], "{wish}");
            assert!(choice.sentence.starts_with("AMD GPUs, as asked: "));
        }
    }
    let e = all(&decide(
        std::slice::from_ref(&source),
        &here,
        None,
        "7=0,0=renderD140,0=1,0=2",
        &Switches::default(),
    )
    .unwrap_err());
    for want in [
        "gpu.map of 7: the checkpoint has no such GPU",
        "of renderD140:",
        "named a second time",
    ] {
        assert!(e.contains(want), "{want}: {e}");
    }
    here.nodes[4].properties.fw_version -= 1;
    let e = all(&decide(&[source], &here, None, "0=3", &Switches::default()).unwrap_err());
    assert!(
        e.contains("KFD_FW_VER_CHECK (fw_version)")
            && e.contains("the checkpoint has 80, this host has 79"),
        "{e}"
    );
}

#[test]
fn all_mismatches_at_once() {
    let source = machine(1, 2, 0xa000);
    let mut here = machine(1, 2, 0xb000);
    for node in here.nodes.iter_mut().filter(|n| n.is_gpu()) {
        node.properties.device_id = 0x740f;
        node.properties.vram_size -= 1;
        node.properties.fw_version -= 1;
    }
    let e = all(&auto(&source, &here).unwrap_err());
    for gpu in ["0xa000", "0xa001"] {
        for want in [
            format!(
                "device_id of GPU {gpu} (renderD{}): the checkpoint has 0x740c, this host has 0x740f on renderD128, renderD129",
                128 + u32::from(gpu.ends_with('1'))
            ),
            format!("KFD_VRAM_SIZE_CHECK (vram_size) of GPU {gpu}"),
            format!("KFD_FW_VER_CHECK (fw_version) of GPU {gpu}"),
        ] {
            assert!(e.contains(&want), "{want}: {e}");
        }
    }
    assert!(e.contains("relaxed by KFD_VRAM_SIZE_CHECK=0"), "{e}");
    // Too few GPUs and the wrong ones: both.
    here.nodes.pop();
    let e = all(&auto(&source, &here).unwrap_err());
    assert!(
        e.contains("GPU count: the checkpoint has 2") && e.contains("device_id of GPU 0xa001"),
        "{e}"
    );
}

#[test]
fn relaxed_checks_are_shown_as_such() {
    let source = machine(1, 1, 0xa000);
    let mut here = machine(1, 1, 0xb000);
    here.nodes[1].properties.fw_version -= 1;
    let off = Switches::default().without(&["KFD_FW_VER_CHECK".to_owned()]);
    let choice = decide(&[source], &here, None, "auto", &off).unwrap();
    let relaxed: Vec<&str> = choice
        .checks
        .iter()
        .filter(|c| c.verdict == Verdict::Relaxed)
        .map(|c| c.name.as_str())
        .collect();
    assert_eq!(relaxed, ["KFD_FW_VER_CHECK (fw_version)"]);
}

#[test]
fn too_few_of_a_model_and_too_many_for_the_plugin_are_refused() {
    let (source, mut here) = (machine(1, 3, 0xa000), machine(1, 4, 0xb000));
    for node in here.nodes.iter_mut().skip(3) {
        node.properties.device_id += 1;
    }
    let few = all(&auto(&source, &here).unwrap_err());
    assert!(few.contains("GPUs that match: the checkpoint has 3 (renderD128, renderD129, renderD130), this host has 2 that match them (renderD128, renderD129)"), "{few}");
    let most = machine(1, 26, 0xa000);
    auto(&most, &most).unwrap();
    let more = machine(1, 27, 0xa000);
    let e = all(&auto(&more, &more).unwrap_err());
    assert!(e.contains("might crash (it writes 27 GPUs"), "{e}");
    // An id is longer, in an image from a stranger.
    let mut long = most.clone();
    long.nodes[1].gpu_id = 0xffff_0000;
    assert!(auto(&long, &most).is_err());
}

#[test]
fn gpus_that_are_still_there_are_kept() {
    let (mut source, mut here) = (machine(1, 3, 0xa000), machine(1, 6, 0xb000));
    for node in source.nodes.iter_mut().chain(&mut here.nodes) {
        node.unique_id = node.is_gpu().then(|| format!("u{}", node.id));
    }
    // The last is another one now; of the others those of the first places stay.
    source.nodes[3].unique_id = Some("u6".into());
    let choice = auto(&source, &here).unwrap();
    assert_eq!(choice.visible, [128, 129, 133]);
    assert_eq!(minors(&choice), [(128, 128), (129, 129), (130, 133)]);
}

#[test]
fn processes_that_saw_other_gpus() {
    let t = machine(1, 2, 0xa000);
    let e = all(&decide(
        &[t.clone(), t.visible(&[128])],
        &t,
        None,
        "auto",
        &Switches::default(),
    )
    .unwrap_err());
    assert!(e.contains("GPUs of each process: the checkpoint has one process with 0xa000, 0xa001, one with 0xa000"), "{e}");
    assert!(decide(&[], &t, None, "auto", &Switches::default()).is_err());
    // The same GPUs in another order map in another way.
    let mut reversed = t.clone();
    reversed.nodes.reverse();
    let e = decide(
        &[t.clone(), reversed],
        &t,
        None,
        "auto",
        &Switches::default(),
    )
    .unwrap_err();
    assert!(
        e.reason
            .contains("would map the processes of the container differently"),
        "{e}"
    );
}

#[test]
fn a_wish_that_the_plugin_would_not_keep_is_refused() {
    let (source, here) = (machine(1, 2, 0xa000), machine(1, 2, 0xb000));
    let e = decide(&[source], &here, None, "0=1,1=0", &Switches::default()).unwrap_err();
    assert!(
        e.reason.contains(
            "CRIU's amdgpu plugin would map GPU 0xa000 (renderD128) to GPU 0xb000 (renderD128)"
        ),
        "{e}"
    );
    assert!(
        all(&e).contains("the wish 0xa000=0xb001 is not kept"),
        "{}",
        all(&e)
    );
}

#[test]
fn a_wish_moves_the_others_and_is_taken_at_its_word_in_a_hive() {
    let (mut source, here) = (
        machine(1, 8, 0xa000).visible(&[128, 129]),
        machine(1, 8, 0xa000),
    );
    let decide = |source: &Topology, wish: &str| {
        let sources = std::slice::from_ref(source);
        decide(sources, &here, None, wish, &Switches::default()).map(|c| minors(&c))
    };
    assert_eq!(decide(&source, "0=4").unwrap(), [(128, 132), (129, 133)]);
    assert!(decide(&source, "0=5,1=4").is_err());
    source.nodes[1].properties.hive_id = 7;
    assert_eq!(
        decide(&source, "0=5,1=4").unwrap(),
        [(128, 133), (129, 132)]
    );
}
