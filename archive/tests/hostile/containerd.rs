//! containerd's own checkpoints.

use std::fs;
use std::path::Path;

use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::oci::media;
use cryopod_archive::source::{Kind, Source};
use cryopod_archive::verify::{VerifyOptions, verify};
use serde_json::{Value, json};

use crate::make::*;
use crate::{Count, INVENTORY};

/// The record of a container is protobuf; these bytes are none, and nobody has to read them.
const RECORD: &[u8] = b"record";

fn images() -> Vec<u8> {
    Tar::default().file("inventory.img", INVENTORY).end()
}

/// Writes a layout of parts, each a media type and a content, and changes its index.
fn parts(path: &Path, parts: &[(&str, &[u8])], change: impl FnOnce(&mut Value)) {
    let blobs = path.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let put = |(media, content): &(&str, &[u8])| {
        let digest = Digest::of(content);
        fs::write(blobs.join(digest.hex()), content).unwrap();
        json!({"mediaType": media, "digest": digest.to_string(), "size": content.len()})
    };
    let list: Vec<_> = parts.iter().map(put).collect();
    let mut index = json!({"schemaVersion": 2, "manifests": list});
    change(&mut index);
    fs::write(path.join("index.json"), index.to_string()).unwrap();
    let layout = r#"{"imageLayoutVersion":"1.0.0"}"#;
    fs::write(path.join("oci-layout"), layout).unwrap();
}

#[test]
fn parts_that_are_not_what_they_say() {
    let mut count = Count::default();
    let images = images();
    let good: [(&str, &[u8]); 3] = [
        (media::CONTAINERD_CRIU, &images),
        (media::CONTAINERD_OPTIONS, RECORD),
        (media::LAYER_GZIP, b"layer"),
    ];
    let dir = tempfile::tempdir().unwrap();
    parts(dir.path(), &good, |_| {});
    let source = Source::open(dir.path()).unwrap();
    assert_eq!(source.kind(), Kind::Containerd { archive: false });
    verify(&source, &VerifyOptions::default()).unwrap();

    // The media type of a record gives its file's name.
    for (name, expect) in [
        ("..", "a path with `..`"),
        ("a\u{1b}[31m", "control characters"),
    ] {
        let kind = format!("application/vnd.containerd.container.{name}");
        let odd: Vec<(&str, &[u8])> = [&good[..], &[(&kind, b"evil")]].concat();
        count.refused(expect, |p| parts(p, &odd, |_| {}));
    }
    let long = format!("application/vnd.containerd.container.{}", "n".repeat(300));
    let odd: Vec<(&str, &[u8])> = [&good[..], &[(&long, b"evil")]].concat();
    count.refused("bytes, at most 255", |p| parts(p, &odd, |_| {}));
    // What comes twice would be checked once.
    let other = Tar::default().file("inventory.img", b"other").end();
    for (kind, content) in [
        (media::CONTAINERD_CRIU, &other[..]),
        (media::CONTAINERD_OPTIONS, b"other"),
        (media::LAYER, b"other"),
        ("application/vnd.containerd.container.rw.tar", b"other"),
    ] {
        let twice: Vec<(&str, &[u8])> = [&good[..], &[(kind, content)]].concat();
        count.refused("appears twice", |p| parts(p, &twice, |_| {}));
    }
    let unknown: Vec<(&str, &[u8])> = [&good[..], &[("text/html", b"x")]].concat();
    count.refused("a part of containerd's checkpoint of media type", |p| {
        parts(p, &unknown, |_| {});
    });
    for part in 0..good.len() {
        let blob = |p: &Path| p.join("blobs/sha256").join(Digest::of(good[part].1).hex());
        count.refused("is missing", |p| {
            parts(p, &good, |_| {});
            fs::remove_file(blob(p)).unwrap();
        });
        count.refused("its content has the digest", |p| {
            parts(p, &good, |_| {});
            let mut content = fs::read(blob(p)).unwrap();
            let last = content.len() - 1;
            content[last] ^= 1;
            fs::write(blob(p), content).unwrap();
        });
        count.refused("bytes, the manifest says 3", |p| {
            parts(p, &good, |i| i["manifests"][part]["size"] = 3.into());
        });
    }
    // And the tar of images is a tar like any other.
    for (tar, expect) in [
        (Tar::default().file("../evil", b"x"), "a path with `..`"),
        (
            Tar::default().raw(b"evil", b'2', b"/etc", b""),
            "a symbolic link to",
        ),
        (
            Tar::default().file("inventory.img", INVENTORY),
            "appears twice",
        ),
    ] {
        let tar = tar.file("inventory.img", INVENTORY).end();
        let bad = [(media::CONTAINERD_CRIU, &tar[..])];
        count.refused(expect, |p| parts(p, &bad, |_| {}));
    }
    assert_eq!(count.0, 20);
}
