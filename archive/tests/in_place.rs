//! Shards are read where they lie in an archive: everything is there, damage is found, and nothing else is read.
#![allow(clippy::unwrap_used)]

mod common;

use cryopod_test_files::TestFiles;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use age::secrecy::ExposeSecret;
use age::x25519::Identity;
use cryopod_archive::format::limits::Limits;
use cryopod_archive::pack::{Destination, PackOptions, pack};
use cryopod_archive::source::{InPlace, Source};
use cryopod_archive::unpack::{UnpackOptions, unpack};
use cryopod_archive::vram::{self, ReadOptions, Vram, VramError, places};
use cryopod_archive::{Error, Identities, Recipients};

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
    read_with(images, search, check, &[])
}

fn read_with(
    images: &Path,
    search: &[PathBuf],
    check: bool,
    keys: &[PathBuf],
) -> Result<Vec<u8>, VramError> {
    let mut vram = Vram::open_with(images, None, search)?.unwrap();
    vram.unlock(keys);
    let mut memory = vec![0; 70 << 20];
    let options = ReadOptions {
        check,
        ..Default::default()
    };
    vram.read(0, &mut memory, &options, &NEVER)?;
    Ok(memory)
}

fn shards_of(source: &Source) -> Result<Vec<InPlace>, Error> {
    let found = source.find_shards(&Limits::default())?;
    source.shards_in_place(found)
}

fn key(path: PathBuf) -> (PathBuf, String) {
    let identity = Identity::generate();
    fs::write(&path, identity.to_string().expose_secret()).unwrap();
    (path, identity.to_public().to_string())
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
        let shards = shards_of(&packed).unwrap();
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
    let shards = shards_of(&source).unwrap();
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

#[test]
fn encrypted() {
    let dir = tempfile::tempdir().unwrap();
    let (root, memory) = checkpoint(dir.path());
    let source = Source::open(&root).unwrap();
    let (ours, recipient) = key(dir.path().join("ours"));
    let (theirs, _) = key(dir.path().join("theirs"));
    let recipients = Recipients::parse(&[recipient]).unwrap();
    for form in ["oci:layout", "oci-archive:image.tar"] {
        let (kind, name) = form.split_once(':').unwrap();
        let path = dir.path().join(name);
        let to = Destination::parse(&format!("{kind}:{}", path.display()));
        let options = PackOptions {
            recipients: recipients.clone(),
            ..Default::default()
        };
        pack(&source, &to, &options).unwrap();
        let mut packed = Source::open(&path).unwrap();
        assert!(matches!(shards_of(&packed), Err(Error::NoKey { .. })));
        packed.unlock(&Identities::read(std::slice::from_ref(&ours)));
        let shards = shards_of(&packed).unwrap();
        assert_eq!(shards.len(), 2, "{form}");
        let options = UnpackOptions {
            leave: shards.iter().map(|s| (s.name.clone(), s.bytes)).collect(),
            ..Default::default()
        };
        let whole = dir.path().join(format!("{name}.whole"));
        unpack(&packed, &whole, &options).unwrap();
        let images = whole.join("checkpoint");
        let away = dir.path().join(format!("{name}.away"));
        fs::create_dir(&away).unwrap();
        places::write(&images, &shards, &away).unwrap();
        let search = [away];
        let read = |keys: &[&PathBuf]| {
            let keys: Vec<_> = keys.iter().map(|key| (*key).clone()).collect();
            read_with(&images, &search, false, &keys)
        };
        assert!(read(&[&theirs, &ours]).unwrap() == memory, "{form}");
        let refused = |keys: &[&PathBuf], why: &str| {
            let error = read(keys).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
            assert!(error.contains(shards[1].path.to_str().unwrap()), "{error}");
        };
        if kind == "oci-archive" {
            refused(&[], "there is no identity");
            refused(&[&theirs], "none of 1 identities");
        }

        // One bit of the header, the first piece, one in the middle, the last.
        let at = shards[1].age.unwrap();
        let file = fs::File::options()
            .read(true)
            .write(true)
            .open(&shards[1].path)
            .unwrap();
        for at in [30, 1000, 9 << 20, at.bytes - 1].map(|n| at.at + n) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 1], at).unwrap();
            let error = read(&[&ours]).unwrap_err().to_string();
            assert!(error.contains(shards[1].path.to_str().unwrap()), "{error}");
            file.write_all_at(&byte, at).unwrap();
        }
        assert!(read(&[&ours]).unwrap() == memory, "{form}");
        file.set_len(at.at + at.bytes - 1).unwrap();
        refused(&[&ours], "changed while it was imported");

        // Less of it is no stream, wherever that ends.
        let text = fs::read_to_string(search[0].join("vram-places.json")).unwrap();
        for less in [1, 16, 65552, at.bytes - 100] {
            let was = format!("{{\"at\":{},\"bytes\":{}}}", at.at, at.bytes);
            let is = format!("{{\"at\":{},\"bytes\":{}}}", at.at, at.bytes - less);
            assert!(text.contains(&was), "{text}");
            let places = search[0].join("vram-places.json");
            fs::write(places, text.replace(&was, &is)).unwrap();
            refused(&[&ours], shards[1].path.to_str().unwrap());
        }
    }
}
