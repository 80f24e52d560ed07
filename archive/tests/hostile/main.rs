//! Archives from strangers: each is refused with its own error, and nothing is written anywhere.
#![allow(clippy::unwrap_used, clippy::expect_used)]

/// `EXPECT => MAKE;` for each archive that everything refuses: [`Count::refused`].
macro_rules! refused {
    ($count:ident: $($expect:literal => $make:expr;)*) => { $($count.refused($expect, $make);)* };
}

#[path = "../common/mod.rs"]
mod common;
mod containerd;
mod directories;
mod images;
mod make;
mod sealed;
mod streams;
mod tars;

use std::fs;
use std::path::{Path, PathBuf};

use common::listing;
use cryopod_archive::format::limits::Limits;
use cryopod_archive::pack::{Destination, PackOptions, pack};
use cryopod_archive::source::Source;
use cryopod_archive::unpack::{UnpackOptions, unpack};
use cryopod_archive::verify::{VerifyOptions, verify};
use cryopod_archive::{Error, Identities};

const INVENTORY: &[u8] = b"\x19CVT\x16\x311X\0\0\0\0";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Hostile things that were refused, and how many of them encrypted, too.
#[derive(Default)]
struct Count(usize, usize);

impl Count {
    /// The archive that `make` puts at a path is refused by everything that reads it.
    fn refused(&mut self, expect: &str, make: impl FnOnce(&Path)) {
        self.run(expect, &Limits::default(), false, make);
    }

    /// As `refused`, for what only a verification can see.
    fn seen_by_verify(&mut self, expect: &str, make: impl FnOnce(&Path)) {
        self.run(expect, &Limits::default(), true, make);
    }

    fn run(&mut self, expect: &str, limits: &Limits, verify_only: bool, make: impl FnOnce(&Path)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("in/archive");
        fs::create_dir(dir.path().join("in")).unwrap();
        make(&path);
        let keys = sealed::identities(dir.path());
        for (n, error) in ways_to_read(&path, &keys, limits, verify_only)
            .into_iter()
            .enumerate()
        {
            let error = error.expect_err(&format!("way {n} took: {expect}"));
            assert!(
                error.contains(expect),
                "way {n}: {error:?} has no {expect:?}"
            );
            assert!(error.contains("in/archive"), "{error}");
            assert!(error.len() < 900 && !error.contains('\n'), "{error}");
        }
        self.1 += usize::from(the_same_when_sealed(&path, &keys, limits, verify_only));
        self.0 += 1;
    }
}

/// An image, or a tar as an image's layer, is treated alike when its layers are encrypted. False if it is neither.
fn the_same_when_sealed(
    path: &Path,
    keys: &Identities,
    limits: &Limits,
    verify_only: bool,
) -> bool {
    sealed::make_image(path);
    let plain = ways_to_read(path, keys, limits, verify_only);
    let sealed = sealed::seal(path).is_some();
    if sealed {
        assert_eq!(ways_to_read(path, keys, limits, verify_only), plain);
    }
    sealed
}

/// What all that reads archives says of one. It changes nothing, and what is refused leaves nothing.
fn ways_to_read(
    path: &Path,
    keys: &Identities,
    limits: &Limits,
    verify_only: bool,
) -> Vec<Result<(), String>> {
    let (threads, limits) = (2, limits.clone());
    let input = path.parent().unwrap();
    let out = input.with_file_name("out");
    fs::create_dir(&out).unwrap();
    let before = tree(input);
    let at = |name: &str| out.join(name);
    let open = || {
        let mut source = Source::open_image(path, None, &limits)?;
        source.unlock(keys);
        Ok(source)
    };
    let mut said = Vec::new();
    let options = VerifyOptions {
        threads,
        limits: limits.clone(),
        ..VerifyOptions::default()
    };
    said.push(open().and_then(|s| verify(&s, &options)).map(drop));
    if !verify_only {
        let options = UnpackOptions {
            threads,
            limits: limits.clone(),
            ..UnpackOptions::default()
        };
        let unpacked = open().and_then(|s| unpack(&s, &at("unpacked"), &options));
        said.push(unpacked.map(drop));
        let options = PackOptions {
            threads,
            limits: limits.clone(),
            ..PackOptions::default()
        };
        for to in [
            Destination::Layout(at("layout")),
            Destination::parse(at("out.tar.zst").to_str().unwrap()),
        ] {
            said.push(open().and_then(|s| pack(&s, &to, &options)).map(drop));
        }
    }
    assert_eq!(tree(input), before);
    if said.iter().all(Result::is_err) {
        assert_eq!(listing(&out), [""; 0]);
    }
    fs::remove_dir_all(&out).unwrap();
    let mask = |e: Error| {
        let said = e.to_string();
        let said = said.split(" bytes are needed and ").next().unwrap(); // and what is free
        let mut parts = said.split("sha256:");
        let first = parts.next().unwrap().to_owned();
        let no_digest = |part: &str| {
            part.trim_start_matches(|c| char::is_ascii_hexdigit(&c))
                .to_owned()
        };
        parts
            .map(no_digest)
            .fold(first, |all, part| all + "sha256:" + &part)
    };
    said.into_iter().map(|said| said.map_err(mask)).collect()
}

/// Everything below a directory.
fn tree(dir: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for name in listing(dir) {
        let path = dir.join(name);
        if path.is_dir() && !path.is_symlink() {
            all.extend(tree(&path));
        }
        all.push(path);
    }
    all
}
