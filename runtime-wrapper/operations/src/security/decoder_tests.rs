use cryopod_host::files::Host;
use cryopod_host::spec::Spec;
use serde_json::{Value, json};

use super::*;
use crate::config::PRIVILEGES_CHECK;
use crate::security::host_facts::HostFacts;

fn decoded(config: &Config, directory: &Path) -> Result<DecodedImages, PrivilegesError> {
    let annotations = json!({"dev.cryopod.check.privileges": "off"});
    let spec = Spec::from_json(json!({"annotations": annotations}));
    decode(Question {
        config,
        directory,
        devices: &[],
        given: Given {
            facts: &HostFacts::of(&Host::at("/nowhere"), &spec),
            spec: &spec,
            read_only: &[],
            relabelled: false,
            limited: false,
        },
        limit: Duration::from_secs(60),
    })
}

#[test]
fn the_configuration_alone_switches_the_comparison_off() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    let e = decoded(&config, dir.path()).unwrap_err().to_string();
    assert!(e.contains("inventory.img"), "{e}");
    config.checks.insert(PRIVILEGES_CHECK.into(), false);
    let without = decoded(&config, dir.path()).unwrap();
    assert_eq!(without.refusals, []);
    assert!(without.encoded.is_some() && without.network().is_err());
    config.checks.insert(IMAGES_CHECK.into(), false);
    assert!(decoded(&config, dir.path()).unwrap().encoded.is_none());
}

#[test]
fn images_that_cannot_be_decoded_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("core-1.img"), "nonsense").unwrap();
    std::fs::write(dir.path().join("strange.img"), "").unwrap();
    let decoded = decoded(&Config::default(), dir.path()).unwrap();
    let told: Vec<&str> = decoded.refusals.iter().map(|r| r.what.as_str()).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    for name in ["core-1.img", "strange.img"] {
        assert!(told.iter().any(|what| what.contains(name)), "{told:?}");
    }
    assert_eq!(decoded.network().unwrap(), None);
}

/// An answer with these sizes of images, this network, and three bytes of images.
fn answer(sizes: &Value, network: &Value) -> Result<DecodedImages, PrivilegesError> {
    let values = json!({
        "refusals": [], "warnings": [], "left_open": [], "mounts": {"Ok": []}, "network": {"Ok": network}, "links": {"Ok": []},
        "is_compressed": false,
        "checked": {"sizes": sizes, "as_they_are": ["pages-1.img"], "reached": {"opened": [], "made": [], "in_flight": [], "watched": [], "handles": [], "bound": []}}
    });
    let values = values.to_string();
    let mut answer = values.len().to_le_bytes().to_vec();
    answer.extend(values.bytes());
    answer.extend(b"abc");
    DecodedImages::received(&answer)
}

#[test]
fn a_decoder_that_is_taken_over_names_no_other_file() {
    let none = json!(null);
    let whole = answer(&json!([["core-1.img", 1], ["mm-1.img", 2]]), &none).unwrap();
    let encoded = whole.encoded.unwrap();
    assert_eq!(encoded.written["mm-1.img"], b"bc");
    assert!(encoded.shows("pages-1.img") && !encoded.shows("mm-1.img"));
    for name in [
        "../core-1.img",
        "/etc/passwd",
        "pages-1.img",
        "cryopod.json",
        "core-1/x.img",
    ] {
        assert!(answer(&json!([[name, 1]]), &none).is_err(), "{name}");
    }
    for name in ["netns-1.img/../../x", "../netns-1.img", "core-1.img"] {
        let network = json!({"file": name, "from": "Images"});
        assert!(answer(&json!([]), &network).is_err(), "{name}");
    }
    assert!(
        answer(&json!([["core-1.img", 4]]), &none).is_err(),
        "cut off"
    );
    assert!(answer(&json!([["core-1.img", u64::MAX]]), &none).is_err());
    for short in [&b""[..], &[0; 8], &[0xff; 8], &[9; 20]] {
        assert!(DecodedImages::received(short).is_err());
    }
}
