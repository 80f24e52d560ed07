//! pack and unpack killed at twenty random points each: nothing under the final name, and the next run works.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use common::{checkpoint, content, listing};
use cryopod_archive::Compression;
use cryopod_archive::pack::{Destination, PackOptions, pack};
use cryopod_archive::source::Source;
use cryopod_archive::unpack::{UnpackOptions, unpack};
use cryopod_archive::verify::{VerifyOptions, verify};

const KILLS: u32 = 20;

/// What a child does; it is this test program again.
fn work(job: &str, from: &Path, to: &Path) {
    let source = Source::open(from).unwrap();
    match job {
        "unpack" => drop(unpack(&source, to, &UnpackOptions::default()).unwrap()),
        _ => {
            let to = match job {
                "layout" => Destination::Layout(to.into()),
                "archive" => Destination::Archive(to.into()),
                _ => Destination::Tar(to.into(), Compression::Zstd),
            };
            drop(pack(&source, &to, &PackOptions::default()).unwrap());
        }
    }
}

#[test]
fn child() {
    let get = |key| std::env::var_os(key);
    if let (Some(job), Some(from), Some(to)) =
        (get("KILLED_JOB"), get("KILLED_FROM"), get("KILLED_TO"))
    {
        work(job.to_str().unwrap(), from.as_ref(), to.as_ref());
    }
}

fn start(job: &str, from: &Path, to: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env("KILLED_JOB", job)
        .env("KILLED_FROM", from)
        .env("KILLED_TO", to)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap()
}

/// Kills `job` at points spread over the time that it takes, then lets it run once.
fn killed(job: &str, from: &Path, to: &Path, whole: &dyn Fn(&Path)) {
    let once = |_| {
        let began = Instant::now();
        assert!(start(job, from, to).wait().unwrap().success());
        let takes = began.elapsed();
        whole(to);
        remove(to);
        takes
    };
    // The first finds nothing in the caches.
    let mut takes = (0..3).map(once).min().unwrap();
    let before = listing(to.parent().unwrap());
    let (mut early, mut seed) = (0, 0x2545_f491_4f6c_dd1d_u64);
    for _ in 0..KILLS {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        let mut child = start(job, from, to);
        thread::sleep(takes.mul_f64((seed % 1000) as f64 / 1000.0));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        // The rename and the exit lie close together: what has the name is whole. Then it takes less time by now.
        if to.exists() {
            whole(to);
            remove(to);
            takes = takes.mul_f64(0.9);
        } else {
            assert!(!status.success());
            early += 1;
        }
    }
    assert!(
        early >= KILLS / 4,
        "{early} of {KILLS} were killed before the end"
    );
    // All that is left of the killed ones goes away with the next run.
    assert!(start(job, from, to).wait().unwrap().success());
    whole(to);
    let name = to.file_name().unwrap().to_str().unwrap();
    let mut after = listing(to.parent().unwrap());
    after.retain(|n| n != name);
    assert_eq!(after, before);
    remove(to);
}

fn remove(path: &Path) {
    match path.is_dir() {
        true => fs::remove_dir_all(path).unwrap(),
        false => fs::remove_file(path).unwrap(),
    }
    // Give a killed writer's lock time to go.
    thread::sleep(Duration::from_millis(1));
}

#[test]
fn nothing_half_done_has_the_name() {
    let dir = tempfile::tempdir().unwrap();
    let from = checkpoint(dir.path());
    let expected = content(&Source::open(&from).unwrap());
    let bytes: u64 = expected.values().flatten().map(|c| c.len() as u64).sum();
    let whole = |path: &Path| {
        let verified = verify(&Source::open(path).unwrap(), &VerifyOptions::default()).unwrap();
        assert_eq!(verified.bytes, bytes);
    };
    for job in ["layout", "tar"] {
        killed(job, &from, &dir.path().join("out"), &whole);
    }
    let image = dir.path().join("image.tar");
    work("archive", &from, &image);
    killed("unpack", &image, &dir.path().join("out"), &whole);
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
