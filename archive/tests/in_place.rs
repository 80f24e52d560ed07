//! Shards are read where they lie in an archive: everything is there, damage is found, and nothing else is read.
#![allow(clippy::unwrap_used)]

mod common;

use cryopod_test_files::TestFiles;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use cryopod_archive::format::limits::Limits;
use cryopod_archive::pack::{Destination, PackOptions, pack};
use cryopod_archive::source::Source;
use cryopod_archive::unpack::{UnpackOptions, unpack};
use cryopod_archive::vram::{self, ReadOptions, Vram, VramError, places};

static NEVER: AtomicBool = AtomicBool::new(false);

/// An unpacked checkpoint with 70 MiB of GPU memory: two shards, each large enough for a layer of its own.
fn checkpoint(dir: &Path) -> (PathBuf, Vec<u8>) {
    let root = dir.join("in");
    let images = root.join("checkpoint");
    root.put("config.dump", common::PODMAN_CONFIG);
    images.put("inventory.img", b"\x19CVT\x16\x311X");
    images.put("pages-1.img", common::noise(7, 3 << 20));
    let memory = common::noise(1, 70 << 20);
    let region = vram::MemorySource {
        id: "gpu",
        bytes: &memory,
    };
    let options = vram::WriteOptions {
        threads: 1,
        shard_bytes: 35 << 20,
        ..Default::default()
    };
    vram::write(&images, &[region], &options, None, &NEVER).unwrap();
    (root, memory)
}

fn read(images: &Path, search: &[PathBuf], check: bool) -> Result<Vec<u8>, VramError> {
    let vram = Vram::open_with(images, None, search)?.unwrap();
    let mut memory = vec![0; 70 << 20];
    let options = ReadOptions {
        check,
        ..Default::default()
    };
    vram.read(0, &mut memory, &options, &NEVER)?;
    Ok(memory)
}

#[test]
fn in_every_form_that_is_not_compressed() {
    let dir = tempfile::tempdir().unwrap();
    let (root, memory) = checkpoint(dir.path());
    let source = Source::open(&root).unwrap();
    for (form, in_place) in [
        ("oci:layout", true),
        ("oci-archive:image.tar", true),
        ("a.tar", true),
        ("a.tar.zst", false),
    ] {
        let (kind, name) = form.rsplit_once(':').unwrap_or(("", form));
        let path = dir.path().join(name);
        let to = format!("{kind}:{}", path.display());
        let to = Destination::parse(to.trim_start_matches(':'));
        pack(&source, &to, &PackOptions::default()).unwrap();
        let packed = Source::open(&path).unwrap();
        let shards = packed.shards_in_place(&Limits::default()).unwrap();
        let names: Vec<_> = shards.iter().map(|shard| shard.name.as_str()).collect();
        if !in_place {
            assert!(names.is_empty(), "{form}: {names:?}");
            continue;
        }
        let both = ["checkpoint/vram-0000.img", "checkpoint/vram-0001.img"];
        assert_eq!(names, both, "{form}");
        let options = UnpackOptions {
            leave: shards.iter().map(|s| (s.name.clone(), s.bytes)).collect(),
            ..Default::default()
        };
        let whole = dir.path().join(format!("{name}.whole"));
        let unpacked = unpack(&packed, &whole, &options).unwrap();
        assert!(unpacked.bytes < 8 << 20, "{form}: {unpacked:?}");
        let images = whole.join("checkpoint");
        assert!(images.join("pages-1.img").exists());
        read(&images, &[], true).unwrap_err();

        let away = dir.path().join(format!("{name}.away"));
        fs::create_dir(&away).unwrap();
        fs::set_permissions(&away, PermissionsExt::from_mode(0o700)).unwrap();
        places::write(&images, &shards, &away).unwrap();
        let search = [away.clone()];
        assert!(read(&images, &search, true).unwrap() == memory, "{form}");

        // Nobody else has checked it, so it is checked always.
        let shard = &shards[1];
        let file = fs::OpenOptions::new()
            .write(true)
            .open(&shard.path)
            .unwrap();
        file.write_all_at(&[1; 4096], shard.at + (9 << 20)).unwrap();
        let error = read(&images, &search, false).unwrap_err().to_string();
        assert!(error.contains("does not fit its digest"), "{error}");
        assert!(error.contains(shard.path.to_str().unwrap()), "{error}");

        // A file of places that others could have written says nothing.
        fs::set_permissions(&away, PermissionsExt::from_mode(0o777)).unwrap();
        let error = read(&images, &search, true).unwrap_err().to_string();
        assert!(error.contains("vram-0000.img: missing"), "{error}");
        fs::set_permissions(&away, PermissionsExt::from_mode(0o700)).unwrap();

        // Nor does one in the image directory, which may come from an archive.
        let planted = images.join("vram-places.json");
        fs::copy(away.join("vram-places.json"), &planted).unwrap();
        read(&images, &[], true).unwrap_err();
        fs::remove_file(planted).unwrap();

        // Another file has the archive's name.
        fs::rename(&shard.path, dir.path().join("moved")).unwrap();
        fs::copy(dir.path().join("moved"), &shard.path).unwrap();
        let error = read(&images, &search, true).unwrap_err().to_string();
        assert!(error.contains("changed while it was imported"), "{error}");
    }
}

#[test]
fn places_are_for_one_table() {
    let dir = tempfile::tempdir().unwrap();
    let (root, _) = checkpoint(dir.path());
    let tar = Destination::parse(dir.path().join("a.tar").to_str().unwrap());
    pack(&Source::open(&root).unwrap(), &tar, &PackOptions::default()).unwrap();
    let source = Source::open(tar.path()).unwrap();
    let shards = source.shards_in_place(&Limits::default()).unwrap();
    let away = dir.path().join("away");
    fs::create_dir(&away).unwrap();
    let images = root.join("checkpoint");
    places::write(&images, &shards, &away).unwrap();
    let places = away.join("vram-places.json");
    let text = fs::read_to_string(&places).unwrap();
    for shard in &shards {
        fs::remove_file(root.join(&shard.name)).unwrap();
    }
    read(&images, std::slice::from_ref(&away), true).unwrap();
    let other = "0".repeat(64);
    let start = text.find("table\":\"").unwrap() + 8;
    fs::write(&places, text.replace(&text[start..start + 64], &other)).unwrap();
    read(&images, std::slice::from_ref(&away), true).unwrap_err();
    fs::write(&places, "no list").unwrap();
    let error = read(&images, &[away], true).unwrap_err().to_string();
    assert!(error.contains("not a list of places"), "{error}");
}
