//! Archives from strangers: each is refused with its own error, and nothing is written anywhere.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;
mod containerd;
mod directories;
mod images;
mod make;
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

const INVENTORY: &[u8] = b"\x19CVT\x16\x311X\0\0\0\0";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// Hostile things that were refused.
#[derive(Default)]
struct Count(usize);

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
        let before = tree(dir.path());
        let at = |name: &str| dir.path().join(name);
        let open = || Source::open_image(&path, None, limits);
        let mut errors = Vec::new();
        let options = VerifyOptions {
            threads: 2,
            limits: limits.clone(),
            ..VerifyOptions::default()
        };
        errors.push(open().and_then(|s| verify(&s, &options)).map(drop));
        if !verify_only {
            let options = UnpackOptions {
                threads: 2,
                limits: limits.clone(),
                ..UnpackOptions::default()
            };
            errors.push(
                open()
                    .and_then(|s| unpack(&s, &at("unpacked"), &options))
                    .map(drop),
            );
            let options = PackOptions {
                threads: 2,
                limits: limits.clone(),
                ..PackOptions::default()
            };
            for to in [
                Destination::Layout(at("layout")),
                Destination::parse(at("out.tar.zst").to_str().unwrap()),
            ] {
                errors.push(open().and_then(|s| pack(&s, &to, &options)).map(drop));
            }
        }
        for (n, error) in errors.into_iter().enumerate() {
            let error = error
                .expect_err(&format!("way {n} took: {expect}"))
                .to_string();
            assert!(
                error.contains(expect),
                "way {n}: {error:?} has no {expect:?}"
            );
            assert!(error.contains("in/archive"), "{error}");
            assert!(error.len() < 900 && !error.contains('\n'), "{error}");
        }
        assert_eq!(tree(dir.path()), before, "{expect}");
        self.0 += 1;
    }
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
