//! A long chain of checkpoints is checked with few open files.
#![allow(clippy::unwrap_used)]

mod common;

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use cryopod_archive::format::limits::{OpenFilesRaised, raise_open_files};
use cryopod_archive::vram::{self, Vram};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

#[test]
fn more_files_than_may_be_open() {
    let never = AtomicBool::new(false);
    let root = tempfile::tempdir().unwrap();
    let mut memory = common::noise(1, 4 << 20);
    let mut dirs: Vec<PathBuf> = Vec::new();
    for number in 0..40u8 {
        memory[usize::from(number) << 16] ^= 1;
        let dir = root.path().join(number.to_string());
        std::fs::create_dir(&dir).unwrap();
        let region = vram::MemorySource {
            id: "gpu",
            bytes: &memory,
        };
        let options = vram::WriteOptions {
            chunk_bytes: vram::MIN_CHUNK,
            threads: 1,
            ..Default::default()
        };
        let parent = dirs.last().map(|dir| Vram::open(dir, None).unwrap());
        let parent = parent.flatten();
        vram::write(&dir, &[region], &options, parent.as_ref(), &never).unwrap();
        dirs.push(dir);
    }
    let last = dirs.last().unwrap();
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 32, hard).unwrap();
    assert!(Vram::open(last, None).is_err());
    let parents = Vram::check(last, None, &[]).unwrap().unwrap();
    assert!(parents.iter().eq(dirs.iter().rev().skip(1)), "{parents:?}");
    drop(OpenFilesRaised::new());
    assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (32, hard));
    raise_open_files();
    assert!(Vram::open(last, None).is_ok());
    setrlimit(Resource::RLIMIT_NOFILE, 32, hard).unwrap();
    std::fs::remove_file(dirs[3].join("vram-0000.img")).unwrap();
    let error = Vram::check(last, None, &[]).unwrap_err().to_string();
    assert!(error.contains("/3: the parent checkpoint"), "{error}");
}
