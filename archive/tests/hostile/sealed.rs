//! The same archives, encrypted for the reader.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::sync::LazyLock;

use age::secrecy::ExposeSecret;
use age::x25519::Identity;
use cryopod_archive::Identities;
use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::limits::Limits;
use cryopod_archive::source::Source;
use cryopod_archive::verify::{VerifyOptions, verify};
use serde_json::Value;

use crate::make::*;
use crate::{LAYER, the_same_when_sealed, tree};

static KEY: LazyLock<Identity> = LazyLock::new(Identity::generate);

pub fn identities(dir: &Path) -> Identities {
    let file = dir.join("key");
    fs::write(&file, KEY.to_string().expose_secret()).unwrap();
    Identities::read(&[file])
}

/// Makes a tar the layer of an image.
pub fn make_image(path: &Path) {
    if path.is_dir() {
        return;
    }
    let tar = fs::read(path).unwrap();
    fs::remove_file(path).unwrap();
    let (media, content) = match tar[..] {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => ("+zstd", zstd::decode_all(&tar[..]).ok()),
        [0x1f, 0x8b, ..] => {
            let mut content = Vec::new();
            let read = flate2::read::GzDecoder::new(&tar[..]).read_to_end(&mut content);
            ("+gzip", read.ok().map(|_| content))
        }
        _ => ("", None),
    };
    let mut image = Layout::new(vec![tar]);
    image.media[0] += media;
    if let Some(content) = content {
        image.config["rootfs"]["diff_ids"][0] = Digest::of(&content).to_string().into();
    }
    image.write(path, |_| {}, |_| {}, |_| {});
}

/// Encrypts the layers of an image. `None` if it has no manifest that can be read.
pub fn seal(path: &Path) -> Option<()> {
    let blob = |digest: &str| {
        path.join("blobs/sha256")
            .join(digest.trim_start_matches("sha256:"))
    };
    // A blob that is what its descriptor says.
    let content = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str()?;
        let file = blob(digest);
        let regular = file.symlink_metadata().is_ok_and(|m| m.is_file());
        let content = regular.then(|| fs::read(&file).unwrap())?;
        let sound =
            Digest::of(&content).to_string() == digest && descriptor["size"] == content.len();
        sound.then_some(content)
    };
    let put = |descriptor: &mut Value, content: &[u8]| {
        let digest = Digest::of(content).to_string();
        fs::write(blob(&digest), content).unwrap();
        descriptor["digest"] = digest.into();
        descriptor["size"] = content.len().into();
    };
    let read = |content: Vec<u8>| serde_json::from_slice::<Value>(&content).ok();
    let mut index = read(fs::read(path.join("index.json")).ok()?)?;
    let mut manifest = read(content(&index["manifests"][0])?)?;
    let mut config = read(content(&manifest["config"])?)?;
    for (n, layer) in manifest["layers"].as_array_mut()?.iter_mut().enumerate() {
        let media = layer["mediaType"].as_str().unwrap().to_owned();
        let Some(plain) = content(layer) else {
            continue;
        };
        let before = layer["digest"].clone();
        put(layer, &age::encrypt(&KEY.to_public(), &plain).unwrap());
        if media.starts_with(LAYER) {
            layer["mediaType"] = format!("{media}+age").into();
        }
        if let Some(id) = config.pointer_mut(&format!("/rootfs/diff_ids/{n}"))
            && (media != LAYER || *id == before)
        {
            *id = layer["digest"].clone();
        }
    }
    put(&mut manifest["config"], config.to_string().as_bytes());
    put(&mut index["manifests"][0], manifest.to_string().as_bytes());
    fs::write(path.join("index.json"), index.to_string()).unwrap();
    Some(())
}

#[test]
fn a_good_one_is_taken() {
    for image in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("archive");
        match image {
            true => Layout::good().write(&path, |_| {}, |_| {}, |_| {}),
            false => write(zstd(&Tar::good().end()))(&path),
        }
        make_image(&path);
        seal(&path).unwrap();
        let mut source = Source::open(&path).unwrap();
        source.unlock(&identities(dir.path()));
        assert!(source.is_encrypted());
        verify(&source, &VerifyOptions::default()).unwrap();
    }
}

#[test]
fn seeds_of_the_fuzzers() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    let mut seeds = 0;
    for seed in tree(&corpus).iter().filter(|path| path.is_file()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("in/archive");
        fs::create_dir(dir.path().join("in")).unwrap();
        fs::copy(seed, &path).unwrap();
        assert!(the_same_when_sealed(
            &path,
            &identities(dir.path()),
            &Limits::default(),
            false
        ));
        seeds += 1;
    }
    assert!(seeds >= 15, "{seeds}");
}
