use std::fs;
use std::io::Write;

use super::*;

const PODMAN: &str = r#"{"id":"c1","lockID":3,"staticDir":"/x"}"#;
const CRI: &str = r#"{"id":"c1","checkpointedTime":"2026-01-01T00:00:00Z"}"#;

fn tar(entries: &[(&str, &str)]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, content) in entries {
        let mut header = tar::Header::new_gnu();
        let directory = name.ends_with('/');
        header.set_entry_type(if directory {
            tar::EntryType::Directory
        } else {
            tar::EntryType::Regular
        });
        header.set_mode(0o4755);
        header.set_size(content.len() as u64);
        builder
            .append_data(&mut header, name, content.as_bytes())
            .unwrap();
    }
    builder.into_inner().unwrap()
}

fn open(bytes: &[u8]) -> (tempfile::TempDir, Result<Source, Error>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.tar");
    fs::write(&path, bytes).unwrap();
    let source = Source::open(&path);
    (dir, source)
}

fn names_of(source: &Source) -> Vec<String> {
    let mut names = Vec::new();
    source
        .visit(&Limits::default(), &mut |entry, _| {
            assert_eq!(entry.mode & !0o777, 0);
            names.push(entry.name.clone());
            Ok(())
        })
        .unwrap();
    names
}

#[test]
fn tars_of_each_engine_in_each_compression() {
    let podman = [
        ("config.dump", PODMAN),
        ("./checkpoint/", ""),
        ("checkpoint/inventory.img", "i"),
    ];
    let crio = [
        ("checkpoint/", ""),
        ("checkpoint/inventory.img", "i"),
        ("config.dump", CRI),
        ("bind.mounts", ""),
    ];
    let containerd = [
        ("config.dump", CRI),
        ("checkpoint/inventory.img", "i"),
        ("status.dump", "{}"),
    ];
    let (_dir, source) = open(&tar(&podman));
    assert_eq!(source.unwrap().kind(), Kind::PodmanTar(Compression::None));
    let (_dir, source) = open(&tar(&crio));
    assert_eq!(source.unwrap().kind(), Kind::CrioTar(Compression::None));
    let (_dir, source) = open(&tar(&containerd));
    assert_eq!(
        source.unwrap().kind(),
        Kind::CriContainerdTar(Compression::None)
    );

    let (_dir, source) = open(&zstd::encode_all(&tar(&podman)[..], 1).unwrap());
    let source = source.unwrap();
    assert_eq!(source.kind(), Kind::PodmanTar(Compression::Zstd));
    assert_eq!(
        names_of(&source),
        ["config.dump", "checkpoint", "checkpoint/inventory.img"]
    );
    let files = source
        .small_files(&|n| n.ends_with(".img"), &Limits::default())
        .unwrap();
    assert_eq!(files["checkpoint/inventory.img"], b"i");

    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&tar(&podman)).unwrap();
    let (_dir, source) = open(&gzip.finish().unwrap());
    assert_eq!(source.unwrap().kind(), Kind::PodmanTar(Compression::Gzip));
}

#[test]
fn a_directory_of_images_looks_like_an_export() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("vram")).unwrap();
    for name in ["inventory.img", "pages-1.img", "vram/0"] {
        fs::write(dir.path().join(name), name).unwrap();
    }
    let source = Source::open(dir.path()).unwrap();
    assert_eq!(source.kind(), Kind::CriuDirectory);
    let names = ["", "/inventory.img", "/pages-1.img", "/vram", "/vram/0"]
        .map(|n| format!("checkpoint{n}"));
    assert_eq!(names_of(&source), names);
    let files = source
        .small_files(&|n| n == "checkpoint/vram/0", &Limits::default())
        .unwrap();
    assert_eq!(files["checkpoint/vram/0"], b"vram/0");
}

#[test]
fn what_is_no_checkpoint_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = Source::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("no inventory.img"), "{error}");
    let error = open(b"hello").1.unwrap_err().to_string();
    assert!(error.contains("neither a tar nor zstd nor gzip"), "{error}");
    let error = open(&tar(&[("etc/passwd", "x")]))
        .1
        .unwrap_err()
        .to_string();
    assert!(error.contains("a tar without checkpoint/"), "{error}");
}
