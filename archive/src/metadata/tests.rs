use super::slot::RESERVE_BYTES;
use super::*;
use std::fs::{self, File};
use std::os::unix::fs::symlink;

fn sample() -> Metadata {
    Metadata {
        schema: Metadata::current_schema(),
        cryopod: "0.1.0".into(),
        created: "2026-01-01T00:00:00Z".into(),
        container: ContainerFacts {
            id: "c1".into(),
            low_level: "crun".into(),
            ..Default::default()
        },
        host: HostFacts::default(),
        gpu: GpuFacts {
            vendors: vec![Vendor::Nvidia],
            ..Default::default()
        },
        mounts: MountFacts::default(),
        criu: CriuFacts::default(),
        lsm: LsmFacts::default(),
        timings: Timings::default(),
        extra: Map::new(),
    }
}

fn parse(text: &str) -> Result<Metadata, MetadataError> {
    Metadata::parse(text.as_bytes(), Path::new("x/cryopod.json"))
}

#[test]
fn written_and_read_back() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(Metadata::open(dir.path()).unwrap(), None);
    let slot = MetadataSlot::reserve(dir.path()).unwrap();
    assert!(slot.partial().metadata().unwrap().len() >= RESERVE_BYTES);
    assert_eq!(
        Metadata::open(dir.path()).unwrap(),
        None,
        "a reserved metadata is no metadata"
    );
    slot.commit(&sample()).unwrap();
    assert_eq!(Metadata::open(dir.path()).unwrap(), Some(sample()));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn an_abandoned_slot_leaves_nothing_and_drops_the_older_metadata() {
    let dir = tempfile::tempdir().unwrap();
    MetadataSlot::reserve(dir.path())
        .unwrap()
        .commit(&sample())
        .unwrap();
    drop(MetadataSlot::reserve(dir.path()).unwrap());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn unknown_fields_survive() {
    let mut v = serde_json::to_value(sample()).unwrap();
    v["schema"] = "1.7".into();
    v["vram"] = serde_json::json!({"chunks": 3});
    let metadata = parse(&v.to_string()).unwrap();
    assert_eq!(serde_json::to_value(metadata).unwrap(), v);
    // `cryopod flatten` keeps also those within others.
    v["gpu"]["later"] = serde_json::json!([1]);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(names::METADATA), v.to_string()).unwrap();
    let facts = VramFacts::default();
    let whole = Metadata::with_vram(dir.path(), &facts).unwrap();
    v["gpu"]["vram"] = serde_json::to_value(facts).unwrap();
    assert_eq!(whole, v);
}

#[test]
fn a_value_of_a_newer_minor_is_no_damage() {
    for (schema, is_newer) in [("1.7", true), ("1.0", false)] {
        let mut v = serde_json::to_value(sample()).unwrap();
        v["schema"] = schema.into();
        v["gpu"]["vendors"] = serde_json::json!(["another"]);
        let e = parse(&v.to_string()).unwrap_err();
        assert_eq!(matches!(e, MetadataError::TooNew { .. }), is_newer, "{e}");
    }
}

#[test]
fn newer_major_is_refused_even_when_nothing_else_fits() {
    let e = parse(r#"{"schema":"2.0","whatever":[]}"#)
        .unwrap_err()
        .to_string();
    assert!(
        e.contains("x/cryopod.json") && e.contains("2.0") && e.contains("update cryopod"),
        "{e}"
    );
}

#[test]
fn bad_metadatas_name_the_file_and_the_field() {
    for (text, needle) in [
        ("", "EOF"),
        ("[]", "no `schema`"),
        (r#"{"schema":1}"#, "no `schema`"),
        (r#"{"schema":"one"}"#, "MAJOR.MINOR"),
        (r#"{"schema":"0.9"}"#, "never released"),
        (r#"{"schema":"1.0"}"#, "missing field"),
    ] {
        let e = parse(text).unwrap_err().to_string();
        assert!(
            e.contains("x/cryopod.json") && e.contains(needle),
            "{text}: {e}"
        );
    }
}

#[test]
fn links_directories_and_giants_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(names::METADATA);
    symlink("/etc/passwd", &path).unwrap();
    assert!(matches!(
        Metadata::open(dir.path()),
        Err(MetadataError::Read { .. })
    ));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(matches!(
        Metadata::open(dir.path()),
        Err(MetadataError::Invalid { .. })
    ));
    fs::remove_dir(&path).unwrap();
    File::create(&path)
        .unwrap()
        .set_len(MAX_METADATA_BYTES + 1)
        .unwrap();
    assert!(matches!(
        Metadata::open(dir.path()),
        Err(MetadataError::TooLarge { .. })
    ));
}

#[test]
fn a_directory_that_cannot_be_written_is_named() {
    let e = MetadataSlot::reserve(Path::new("/proc/self"))
        .unwrap_err()
        .to_string();
    assert!(e.contains("/proc/self/cryopod.json"), "{e}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let e = MetadataSlot::reserve(file.path()).unwrap_err().to_string();
    assert!(e.contains("the image path is not a directory"), "{e}");
    assert!(!e.contains("space"), "{e}");
}
