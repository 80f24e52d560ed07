//! What goes in comes out, whatever the form, and the same input gives the same output.
#![allow(clippy::unwrap_used)]

mod common;

use cryopod_test_files::TestFiles;
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use common::{checkpoint, content, listing};
use cryopod_archive::Compression;
use cryopod_archive::pack::{Destination, PackOptions, copy_image, pack};
use cryopod_archive::source::{Kind, Source};
use cryopod_archive::unpack::{UnpackOptions, unpack};
use cryopod_archive::verify::{VerifyOptions, verify};

fn options(threads: usize) -> PackOptions {
    PackOptions {
        threads,
        ..PackOptions::default()
    }
}

#[test]
fn every_form_holds_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let source = Source::open(&checkpoint(dir.path())).unwrap();
    let expected = content(&source);
    assert!(expected.contains_key("checkpoint/pages-1.img"));

    let forms = [
        (Destination::Layout(at("layout")), Kind::OciLayout),
        (Destination::Archive(at("image.tar")), Kind::OciArchive),
        (
            Destination::Tar(at("a.tar.zst"), Compression::Zstd),
            Kind::PodmanTar(Compression::Zstd),
        ),
        (
            Destination::Tar(at("a.tar.gz"), Compression::Gzip),
            Kind::PodmanTar(Compression::Gzip),
        ),
        (
            Destination::Tar(at("a.tar"), Compression::None),
            Kind::PodmanTar(Compression::None),
        ),
    ];
    for (n, (to, kind)) in forms.iter().enumerate() {
        let packed = pack(&source, to, &options(2)).unwrap();
        assert_eq!(
            packed.content_bytes,
            expected
                .values()
                .flatten()
                .map(|c| c.len() as u64)
                .sum::<u64>()
        );
        let written = Source::open(to.path()).unwrap();
        assert_eq!(written.kind(), *kind);
        assert!(content(&written) == expected, "{kind}");
        let verified = verify(&written, &VerifyOptions::default()).unwrap();
        assert_eq!(verified.bytes, packed.content_bytes);
        let out = at("unpacked");
        let unpacked = unpack(&written, &out, &UnpackOptions::default()).unwrap();
        assert_eq!(
            (unpacked.bytes, unpacked.files),
            (packed.content_bytes, verified.files)
        );
        assert!(content(&Source::open(&out).unwrap()) == expected, "{kind}");
        fs::remove_dir_all(&out).unwrap();
        // And from each form to the next.
        let (again, kind) = &forms[(n + 1) % forms.len()];
        let path = at("again");
        let again = match again {
            Destination::Layout(_) => Destination::Layout(path.clone()),
            Destination::Archive(_) => Destination::Archive(path.clone()),
            Destination::Tar(_, c) => Destination::Tar(path.clone(), *c),
        };
        pack(&written, &again, &options(2)).unwrap();
        let converted = Source::open(&path).unwrap();
        assert_eq!(converted.kind(), *kind);
        assert!(content(&converted) == expected, "{kind}");
        fs::remove_file(&path)
            .or_else(|_| fs::remove_dir_all(&path))
            .unwrap();
        assert!(
            listing(dir.path()).iter().all(|n| !n.starts_with('.')),
            "{:?}",
            listing(dir.path())
        );
    }
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let root = checkpoint(dir.path());
    let source = Source::open(&root).unwrap();
    let mut digests = Vec::new();
    for threads in [1, 2, 7] {
        let to = Destination::Layout(dir.path().join(format!("layout-{threads}")));
        digests.push(
            pack(&source, &to, &options(threads))
                .unwrap()
                .digest
                .unwrap(),
        );
        let to = Destination::Tar(
            dir.path().join(format!("{threads}.tar.zst")),
            Compression::Zstd,
        );
        pack(&source, &to, &options(threads)).unwrap();
        // Times and owners of the input are not part of it.
        root.put("config.dump", common::PODMAN_CONFIG);
    }
    assert!(digests.windows(2).all(|d| d[0] == d[1]), "{digests:?}");
    let tar = |n: usize| fs::read(dir.path().join(format!("{n}.tar.zst"))).unwrap();
    assert!(tar(1) == tar(2) && tar(2) == tar(7));
}

#[test]
fn an_image_says_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let source = Source::open(&checkpoint(dir.path())).unwrap();
    let to = Destination::Layout(dir.path().join("layout"));
    let packed = pack(
        &source,
        &to,
        &PackOptions {
            name: Some("latest".into()),
            ..options(0)
        },
    )
    .unwrap();
    let written = Source::open(to.path()).unwrap();
    let image = written.image().unwrap();
    assert_eq!(Some(&image.digest), packed.digest.as_ref());
    assert_eq!(image.name.as_deref(), Some("latest"));
    let get = |key: &str| image.manifest.annotations.get(key).map(String::as_str);
    assert_eq!(
        get("io.podman.annotations.checkpoint.runtime.name"),
        Some("cryopod-runtime")
    );
    assert_eq!(
        get("io.kubernetes.cri-o.annotations.checkpoint.name"),
        Some("web")
    );
    assert_eq!(get("org.criu.checkpoint.container.name"), Some("web"));
    assert_eq!(get("org.criu.checkpoint.engine.name"), Some("podman"));
    assert_eq!(get("org.criu.checkpoint.pod.name"), Some("pod1"));
    assert_eq!(
        get("org.opencontainers.image.created"),
        Some("2026-01-02T03:04:05Z")
    );
    let kinds: Vec<_> = image
        .manifest
        .layers
        .iter()
        .map(|l| l.media_type.rsplit('.').next().unwrap())
        .collect();
    // The small files, the page file that shrinks, the one that does not.
    assert_eq!(kinds, ["tar+zstd", "tar+zstd", "tar"]);

    let one = Destination::Layout(dir.path().join("one"));
    let single = PackOptions {
        single_layer: true,
        compression: Compression::Gzip,
        ..options(0)
    };
    let packed = pack(&source, &one, &single).unwrap();
    assert_eq!(packed.layers.len(), 1);
    assert!(content(&Source::open(one.path()).unwrap()) == content(&source));
}

#[test]
fn a_copy_is_the_same_image() {
    let dir = tempfile::tempdir().unwrap();
    let source = Source::open(&checkpoint(dir.path())).unwrap();
    let layout = Destination::Layout(dir.path().join("layout"));
    let packed = pack(&source, &layout, &options(0)).unwrap();
    let copy = dir.path().join("copy.tar");
    let written = Source::open(layout.path()).unwrap();
    copy_image(&written, &copy, &Arc::default()).unwrap();
    let copied = Source::open(&copy).unwrap();
    assert_eq!(copied.kind(), Kind::OciArchive);
    assert_eq!(
        Some(&copied.image().unwrap().digest),
        packed.digest.as_ref()
    );
    assert!(content(&copied) == content(&source));
    assert!(copy_image(&source, &dir.path().join("no.tar"), &Arc::default()).is_err());
}

#[test]
fn what_only_refers_to_its_large_files_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let root = checkpoint(dir.path());
    let tar = Destination::Tar(dir.path().join("a.tar.zst"), Compression::Zstd);
    let layout = |name: &str| Destination::Layout(dir.path().join(name));
    let source = Source::open(&root).unwrap();
    assert!(!pack(&source, &layout("whole"), &options(0)).unwrap().refers);
    root.put("checkpoint/cryopod-store.json", "{}");
    assert!(pack(&source, &tar, &options(0)).unwrap().refers);
    let source = Source::open(tar.path()).unwrap();
    assert!(pack(&source, &layout("image"), &options(0)).unwrap().refers);
}

#[test]
fn small_files_are_found_without_the_large_layers() {
    let dir = tempfile::tempdir().unwrap();
    let source = Source::open(&checkpoint(dir.path())).unwrap();
    let to = Destination::Layout(dir.path().join("layout"));
    let packed = pack(&source, &to, &options(0)).unwrap();
    for layer in &packed.layers[1..] {
        fs::remove_file(to.path().join("blobs/sha256").join(layer.digest.hex())).unwrap();
    }
    let written = Source::open(to.path()).unwrap();
    let files = written
        .small_files(&|n| n == "config.dump", &Default::default())
        .unwrap();
    assert_eq!(files["config.dump"], common::PODMAN_CONFIG.as_bytes());
    let error = written
        .small_files(&|n| n == "checkpoint/pages-1.img", &Default::default())
        .unwrap_err();
    assert!(error.to_string().contains("is missing"), "{error}");
}

#[test]
fn nothing_is_left_of_a_failure() {
    let dir = tempfile::tempdir().unwrap();
    let root = checkpoint(dir.path());
    let source = Source::open(&root).unwrap();
    let to = Destination::Tar(dir.path().join("out.tar.zst"), Compression::Zstd);
    fs::remove_file(root.join("checkpoint/inventory.img")).unwrap();
    let error = pack(&source, &to, &options(2)).unwrap_err().to_string();
    assert!(error.contains("no checkpoint/inventory.img"), "{error}");
    assert_eq!(listing(dir.path()), ["checkpoint-in"]);
    fs::write(to.path(), "precious").unwrap();
    let error = pack(&source, &to, &options(2)).unwrap_err().to_string();
    assert!(error.contains("exists already"), "{error}");
    assert_eq!(fs::read(to.path()).unwrap(), b"precious");
}

#[test]
fn every_chunk_of_the_vram_is_checked_in_every_form() {
    use cryopod_archive::vram;
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("in");
    let images = root.join("checkpoint");
    root.put("config.dump", common::PODMAN_CONFIG);
    images.put("inventory.img", b"\x19CVT\x16\x311X");
    let memory = [
        common::half(1, 3 << 20),
        common::noise(2, 1 << 20),
        vec![0; 1 << 20],
    ]
    .concat();
    let region = vram::MemorySource {
        id: "gpu",
        bytes: &memory,
    };
    let options = vram::WriteOptions {
        chunk_bytes: 256 << 10,
        ..Default::default()
    };
    let never = std::sync::atomic::AtomicBool::new(false);
    let written = vram::write(&images, &[region], &options, None, &never).unwrap();
    let metadata = |vram: &vram::VramFacts| {
        let metadata = serde_json::json!({"schema": "1.0", "cryopod": "0.1.0", "created": "2026-01-01T00:00:00Z",
            "container": {"id": "a", "low_level": "crun", "leave_running": false},
            "host": {"kernel": "6", "arch": "x86_64", "cgroup": "v2"},
            "gpu": {"vendors": ["nvidia"], "nodes": [], "gpus": [], "processes": [], "plugins": [], "vram": vram},
            "timings": {"plan_us": 0, "dump_us": 0}});
        images.put("cryopod.json", metadata.to_string());
    };
    metadata(&written.facts);

    let forms = ["oci:layout", "oci-archive:image.tar", "a.tar", "a.tar.zst"];
    let to = |form: &str| match form.split_once(':') {
        Some((kind, name)) => {
            Destination::parse(&format!("{kind}:{}", dir.path().join(name).display()))
        }
        None => Destination::parse(dir.path().join(form).to_str().unwrap()),
    };
    let check =
        |from: &std::path::Path| verify(&Source::open(from).unwrap(), &VerifyOptions::default());
    assert!(check(&root).unwrap().chunks >= 12);
    for form in forms {
        pack(
            &Source::open(&root).unwrap(),
            &to(form),
            &PackOptions::default(),
        )
        .unwrap();
        assert!(check(to(form).path()).unwrap().chunks >= 12, "{form}");
    }
    let other = vram::VramFacts {
        digest: "0".repeat(64),
        ..written.facts.clone()
    };
    metadata(&other);
    let error = check(&root).unwrap_err().to_string();
    assert!(
        error.contains("checkpoint/vram-index.img: the table of another checkpoint"),
        "{error}"
    );
    metadata(&written.facts);
    let table = images.join("vram-index.img");
    let text = fs::read(&table).unwrap();
    fs::remove_file(&table).unwrap();
    let error = check(&root).unwrap_err().to_string();
    assert!(error.contains("no checkpoint/vram-index.img"), "{error}");
    fs::write(&table, text).unwrap();

    let shard = images.join("vram-0000.img");
    let mut bytes = fs::read(&shard).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&shard, &bytes).unwrap();
    for form in forms {
        let options = PackOptions {
            replace: true,
            ..PackOptions::default()
        };
        pack(&Source::open(&root).unwrap(), &to(form), &options).unwrap();
        let error = check(to(form).path()).unwrap_err().to_string();
        assert!(
            error.contains("checkpoint/vram-0000.img: the chunk at"),
            "{error}"
        );
    }
    fs::remove_file(&shard).unwrap();
    let error = check(&root).unwrap_err().to_string();
    assert!(error.contains("no checkpoint/vram-0000.img"), "{error}");
}

#[test]
fn images_alone_are_carried_and_no_export_file_is_made_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().join("images");
    fs::create_dir(&images).unwrap();
    images.put("inventory.img", b"\x19CVT\x16\x311X\0\0\0\0");
    images.put("pages-1.img", common::noise(1, 1 << 20));
    let at = |name: &str| dir.path().join(name);
    let options = PackOptions::default();
    let tar = |name: &str| Destination::parse(at(name).to_str().unwrap());
    let source = Source::open(&images).unwrap();
    verify(&source, &VerifyOptions::default()).unwrap();
    let layout = Destination::Layout(at("layout"));
    pack(&source, &layout, &options).unwrap();
    let image = Source::open(layout.path()).unwrap();
    verify(&image, &VerifyOptions::default()).unwrap();
    // Whether it is known from the start, or only at the end.
    for (source, name) in [(&source, "a.tar"), (&image, "b.tar.zst")] {
        let error = pack(source, &tar(name), &options).unwrap_err().to_string();
        assert!(error.contains("has no config.dump"), "{error}");
        assert!(error.contains("unpack --images-only"), "{error}");
        assert!(!at(name).exists());
    }
    // With what an engine says of the container there is one.
    let known = PackOptions {
        extra_files: BTreeMap::from([("config.dump".into(), b"{\"lockID\":1}".to_vec())]),
        ..PackOptions::default()
    };
    pack(&source, &tar("c.tar"), &known).unwrap();
    let whole = Source::open(&at("c.tar")).unwrap();
    verify(&whole, &VerifyOptions::default()).unwrap();
    let unpacked = UnpackOptions {
        images_only: true,
        ..UnpackOptions::default()
    };
    unpack(&image, &at("back"), &unpacked).unwrap();
    assert_eq!(common::listing(&at("back")), common::listing(&images));
}

#[test]
fn only_archives_are_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let root = common::checkpoint(dir.path());
    let source = Source::open(&root).unwrap();
    let home = dir.path().join("home");
    fs::create_dir(&home).unwrap();
    home.put("thesis", "years");
    let replace = PackOptions {
        replace: true,
        ..PackOptions::default()
    };
    for to in [
        Destination::Layout(home.clone()),
        Destination::Layout(home.join("thesis")),
        Destination::parse(home.to_str().unwrap()),
    ] {
        let error = pack(&source, &to, &replace).unwrap_err().to_string();
        assert!(error.contains("is not replaced"), "{error}");
    }
    assert_eq!(fs::read(home.join("thesis")).unwrap(), b"years");
    assert_eq!(common::listing(dir.path()).len(), 2);
    let to = Destination::Layout(dir.path().join("layout"));
    pack(&source, &to, &PackOptions::default()).unwrap();
    pack(&source, &to, &replace).unwrap();
    verify(&Source::open(to.path()).unwrap(), &VerifyOptions::default()).unwrap();
}

#[test]
fn images_of_a_gpu_without_metadata_are_not_complete() {
    let dir = tempfile::tempdir().unwrap();
    let root = checkpoint(dir.path());
    let complete = || verify(&Source::open(&root).unwrap(), &VerifyOptions::default());
    let metadata = root.join("checkpoint/cryopod.json");
    let _ = fs::remove_file(&metadata);
    complete().unwrap();
    fs::write(root.join("checkpoint/cryopod-nvidia.img"), "{}").unwrap();
    let said = complete().unwrap_err().to_string();
    assert!(said.contains("cryopod.json"), "{said}");
}
