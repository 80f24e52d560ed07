//! What is encrypted is read with a recipient's key, and in no other way.
#![allow(clippy::unwrap_used)]

mod common;

use cryopod_test_files::TestFiles;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use age::secrecy::ExposeSecret;
use age::x25519::Identity;
use common::{checkpoint, content, listing, noise};
use cryopod_archive::format::digest::Digest;
use cryopod_archive::pack::{Destination, PackOptions, pack};
use cryopod_archive::source::{ArchivePlace, Source};
use cryopod_archive::unpack::{UnpackOptions, unpack};
use cryopod_archive::verify::{VerifyOptions, verify};
use cryopod_archive::{Compression, Error, Identities, Recipients};

struct Keys {
    recipient: String,
    file: PathBuf,
}

fn keys(dir: &Path, name: &str) -> Keys {
    let identity = Identity::generate();
    let file = dir.join(name);
    let text = identity.to_string();
    fs::write(&file, format!("# made: today\n{}\n", text.expose_secret())).unwrap();
    Keys {
        recipient: identity.to_public().to_string(),
        file,
    }
}

fn for_recipients(recipients: &[String]) -> PackOptions {
    PackOptions {
        recipients: Recipients::parse(recipients).unwrap(),
        ..PackOptions::default()
    }
}

fn open(path: &Path, files: &[&PathBuf]) -> Source {
    let files: Vec<_> = files.iter().map(|f| f.to_path_buf()).collect();
    let place = ArchivePlace::parse(path.to_str().unwrap());
    place.open(&Identities::read(&files)).unwrap()
}

/// A checkpoint of one layer.
fn small(dir: &Path) -> Source {
    let root = dir.join("in");
    root.put("config.dump", common::PODMAN_CONFIG);
    root.put("checkpoint/inventory.img", b"\x19CVT\x16\x311X\0\0\0\0");
    root.put("checkpoint/pages-1.img", noise(1, 150_000));
    Source::open(&root).unwrap()
}

#[test]
fn recipients_read_it_and_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (one, two, third) = (
        keys(dir.path(), "one"),
        keys(dir.path(), "two"),
        keys(dir.path(), "third"),
    );
    let large = Source::open(&checkpoint(dir.path())).unwrap();
    let source = small(dir.path());
    // One by name, one in a file.
    fs::write(at("team"), format!("# the team\n\n{}\n", two.recipient)).unwrap();
    let recipients = [one.recipient.clone(), at("team").to_str().unwrap().into()];
    let mut options = for_recipients(&recipients);
    for (source, to, compression) in [
        (&large, Destination::Layout(at("layout")), Compression::Zstd),
        (
            &source,
            Destination::Archive(at("image.tar")),
            Compression::None,
        ),
    ] {
        options.compression = compression;
        let packed = pack(source, &to, &options).unwrap();
        let written = open(to.path(), &[&third.file, &one.file]);
        assert!(written.is_encrypted());
        let verified = verify(&written, &VerifyOptions::default()).unwrap();
        assert_eq!(verified.layers, packed.layers.len());
        let written = open(to.path(), &[&two.file]);
        unpack(&written, &at("out"), &UnpackOptions::default()).unwrap();
        assert!(content(&Source::open(&at("out")).unwrap()) == content(source));
        fs::remove_dir_all(at("out")).unwrap();
        for (files, why) in [
            (&[][..], "there is no identity"),
            (&[&third.file], "none of 1 identities"),
            (&[&at("absent")], "absent: No such file"),
            (
                &[&at("team")],
                "team: identity file contains non-identity data",
            ),
        ] {
            let refused = open(to.path(), files);
            let said = unpack(&refused, &at("out"), &UnpackOptions::default()).unwrap_err();
            assert!(matches!(said, Error::NoKey { .. }), "{said}");
            assert!(said.to_string().contains(why), "{said}");
            let said = verify(&refused, &VerifyOptions::default()).unwrap_err();
            assert!(matches!(said, Error::NoKey { .. }), "{said}");
            assert!(!at("out").exists());
        }
    }
    // What anybody can read says nothing of the container, nor of what it holds.
    let manifest = open(&at("layout"), &[]).manifest().unwrap();
    let manifest = String::from_utf8(manifest).unwrap();
    assert!(!manifest.contains("web"), "{manifest}");
    // The same again has other bytes, as each has a key of its own.
    let again = Destination::Layout(at("again"));
    let (a, b) = (
        pack(&source, &again, &options).unwrap(),
        open(&at("image.tar"), &[]),
    );
    assert_ne!(
        a.layers[0].digest,
        b.image().unwrap().manifest.layers[0].digest
    );
    let said = pack(
        &source,
        &Destination::Tar(at("a.tar"), Compression::None),
        &options,
    );
    assert!(
        said.unwrap_err()
            .to_string()
            .contains("cannot be encrypted")
    );
    for (wrong, why) in [
        ("age1nonsense", "neither a recipient"),
        ("one", "neither a"),
    ] {
        let said = Recipients::parse(&[wrong.into()]).unwrap_err().to_string();
        assert!(said.contains(why), "{said}");
    }
    assert!(listing(dir.path()).iter().all(|n| !n.starts_with('.')));
}

#[test]
fn keys_of_ssh_are_recipients_and_identities() {
    let dir = tempfile::tempdir().unwrap();
    let key = dir.path().join("id");
    let make = |passphrase: &str| {
        let _ = fs::remove_file(&key);
        Command::new("ssh-keygen")
            .args([
                "-q",
                "-t",
                "ed25519",
                "-C",
                "of a test",
                "-N",
                passphrase,
                "-f",
            ])
            .arg(&key)
            .status()
    };
    if !make("").is_ok_and(|status| status.success()) {
        return;
    }
    let source = small(dir.path());
    let to = Destination::Layout(dir.path().join("layout"));
    let public = key.with_extension("pub").to_str().unwrap().to_owned();
    pack(&source, &to, &for_recipients(&[public])).unwrap();
    assert!(content(&open(to.path(), &[&key])) == content(&source));
    make("secret").unwrap();
    let said = verify(&open(to.path(), &[&key]), &VerifyOptions::default()).unwrap_err();
    assert!(said.to_string().contains("it has a passphrase"), "{said}");
}

/// Of an archive's 500 random bits none can be changed but those that say nothing: padding, and what names the image. And it
/// stays the image whose digest is signed.
#[test]
fn every_changed_bit_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let source = small(dir.path());
    let key = keys(dir.path(), "key");
    let identities = Identities::read(&[key.file]);
    for (n, recipients) in [&[][..], &[key.recipient]].into_iter().enumerate() {
        let archive = dir.path().join(format!("image-{n}.tar"));
        let to = Destination::Archive(archive.clone());
        let packed = pack(&source, &to, &for_recipients(recipients)).unwrap();
        changed_bits(
            &archive,
            &packed.digest.unwrap(),
            &identities,
            &content(&source),
        );
    }
}

fn changed_bits(
    archive: &Path,
    signed: &Digest,
    identities: &Identities,
    expected: &BTreeMap<String, Option<Vec<u8>>>,
) {
    let whole = fs::read(archive).unwrap();
    let mut blobs = Vec::new();
    for entry in tar::Archive::new(&whole[..]).entries().unwrap() {
        let entry = entry.unwrap();
        if entry.path().unwrap().starts_with("blobs/sha256") {
            let at = entry.raw_file_position();
            blobs.push(at..at + entry.size());
        }
    }
    let place = ArchivePlace::parse(archive.to_str().unwrap());
    let out = archive.with_extension("out");
    let mut refused = 0;
    let random = noise(2, 500 * 8);
    for n in random.chunks(8) {
        let n = u64::from_le_bytes(n.try_into().unwrap());
        let (at, bit) = (n / 8 % whole.len() as u64, n % 8);
        let mut changed = whole.clone();
        changed[at as usize] ^= 1 << bit;
        fs::write(archive, changed).unwrap();
        let done = place.open(identities).and_then(|source| {
            unpack(&source, &out, &UnpackOptions::default())?;
            Ok(source)
        });
        if let Ok(source) = done {
            assert!(
                !blobs.iter().any(|b| b.contains(&at)),
                "byte {at}, bit {bit}"
            );
            assert!(source.image().unwrap().digest == *signed, "byte {at}");
            let read = content(&Source::open(&out).unwrap());
            assert!(read == *expected, "byte {at}");
            fs::remove_dir_all(&out).unwrap();
        } else {
            refused += 1;
            assert!(!out.exists());
        }
    }
    assert!(refused > 450, "{refused}");
}
