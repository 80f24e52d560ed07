//! Tests each comparison and each switch, on and off.

use super::super::checks::{compare, explain, matches};
use super::*;
use cryopod_gpu_plan::checks::compat::Verdict;
use cryopod_gpu_plan::checks::switches::{AMD, Switches};

type Change = fn(&mut KfdProperties, i64);

macro_rules! change {
    ($($field:ident),*) => {
        [$((stringify!($field), (|p: &mut KfdProperties, by: i64| p.$field = (p.$field as i64 + by) as _) as Change)),*]
    };
}

fn failing(source: &Node, target: &Node, switches: &Switches) -> Vec<(String, Verdict)> {
    compare(source, target, switches)
        .into_iter()
        .filter(|c| c.verdict != Verdict::Ok)
        .map(|c| (c.name, c.verdict))
        .collect()
}

#[test]
fn properties_that_must_be_equal() {
    let changes = change!(
        simd_count,
        mem_banks_count,
        io_links_count,
        max_waves_per_simd,
        lds_size_in_kb,
        wave_front_size,
        array_count,
        simd_arrays_per_engine,
        cu_per_simd_array,
        simd_per_cu,
        max_slots_scratch_cu,
        vendor_id,
        device_id,
        num_sdma_engines,
        num_sdma_xgmi_engines,
        num_sdma_queues_per_engine,
        num_cp_queues
    );
    let all_off = Switches::default().without(&AMD.map(str::to_owned));
    let source = gpu(1, 0xa000, 0);
    assert_eq!(failing(&source, &source, &Switches::default()), []);
    for (name, change) in changes {
        for by in [1, -1] {
            let mut target = source.clone();
            change(&mut target.properties, by);
            for switches in [Switches::default(), all_off.clone()] {
                assert_eq!(
                    failing(&source, &target, &switches),
                    [(name.to_owned(), Verdict::Refused)]
                );
                assert!(!matches(&source, &target, &switches));
            }
        }
    }
    let mut private = source.clone();
    private.properties.vram_public = 0;
    let e = compare(&source, &private, &all_off)
        .iter()
        .find_map(|c| c.refusal())
        .unwrap()
        .to_string();
    assert!(
        e.contains("vram_public")
            && e.contains("the checkpoint has public VRAM, this host has private VRAM"),
        "{e}"
    );
    // KfdProperties that the plugin ignores.
    for (_, change) in change!(domain, hive_id) {
        let mut target = source.clone();
        change(&mut target.properties, 1);
        assert!(matches(&source, &target, &Switches::default()));
    }
}

#[test]
fn each_switch_relaxes_its_own_comparison() {
    let switched = [
        (
            "KFD_CAPABILITY_CHECK",
            "capability",
            change!(capability)[0].1,
            true,
        ),
        (
            "KFD_VRAM_SIZE_CHECK",
            "vram_size",
            change!(vram_size)[0].1,
            false,
        ),
        ("KFD_NUM_GWS_CHECK", "num_gws", change!(num_gws)[0].1, false),
        (
            "KFD_CACHES_COUNT_CHECK",
            "caches_count",
            change!(caches_count)[0].1,
            false,
        ),
        (
            "KFD_FW_VER_CHECK",
            "fw_version",
            change!(fw_version)[0].1,
            false,
        ),
        (
            "KFD_SDMA_FW_VER_CHECK",
            "sdma_fw_version",
            change!(sdma_fw_version)[0].1,
            false,
        ),
    ];
    let source = gpu(1, 0xa000, 0);
    for (switch, property, change, equal) in switched {
        let title = format!("{} ({property})", switch);
        let (mut less, mut more) = (source.clone(), source.clone());
        change(&mut less.properties, -1);
        change(&mut more.properties, 1);
        let on = Switches::default();
        assert_eq!(
            failing(&source, &less, &on),
            [(title.clone(), Verdict::Refused)]
        );
        assert_eq!(matches(&source, &more, &on), !equal, "{title}");
        let off = on.clone().without(&[switch.to_owned()]);
        assert_eq!(
            failing(&source, &less, &off),
            [(title.clone(), Verdict::Relaxed)]
        );
        assert!(matches(&source, &less, &off) && matches(&source, &more, &off));
        // The other switches do not affect it.
        let mut others = AMD.map(str::to_owned).to_vec();
        others.retain(|other| other != switch);
        let others = on.clone().without(&others);
        assert!(!matches(&source, &less, &others));
        // The message has the recorded and found values, the remedy and the switch.
        let check = compare(&source, &less, &on)
            .into_iter()
            .find(|c| c.verdict == Verdict::Refused)
            .unwrap();
        let e = check.refusal().unwrap().to_string();
        for want in [
            title.as_str(),
            &check.recorded,
            &check.found,
            &check.remedy,
            &format!("relaxed by {}=0", switch),
        ] {
            assert!(!want.is_empty() && e.contains(want), "{want}: {e}");
        }
    }
}

#[test]
fn every_reason_at_once_and_not_too_many() {
    let source = gpu(1, 0xa000, 0);
    let mut here = machine(1, 16, 0xb000);
    for (i, node) in here.nodes.iter_mut().filter(|n| n.is_gpu()).enumerate() {
        node.properties.device_id += 1;
        node.properties.fw_version = 10 + i as u32;
    }
    let checks = explain(&source, &here, &Switches::default());
    let [model, firmware] = &checks[..] else {
        panic!("{checks:?}");
    };
    assert_eq!(
        (model.name.as_str(), model.recorded.as_str()),
        ("device_id", "0x740c")
    );
    assert_eq!(
        model.found,
        "0x740d on renderD128, renderD129, renderD130, renderD131, renderD132, renderD133, renderD134, renderD135 and 8 more"
    );
    assert_eq!(
        firmware.found,
        "10 on renderD128; 11 on renderD129; 12 on renderD130; 13 on renderD131; 12 more values"
    );
    assert_eq!(firmware.switch.as_deref(), Some("KFD_FW_VER_CHECK=0"));
}
