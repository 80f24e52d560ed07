use std::io::Write;
use std::time::{Duration, Instant};

use cryopod_archive::format::names;
use cryopod_archive::metadata::{GpuFacts, Metadata};

use super::*;

const NAMES: [&str; 2] = ["amdgpu-pages-7-a000.img", "amdgpu-pages-7-a001.img"];

fn pages(seed: u8) -> Vec<u8> {
    let mut state = u64::from(seed) + 1;
    let noise = (0..3u32 << 20).map(move |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    });
    noise.chain(std::iter::repeat_n(0, 5 << 20)).collect()
}

fn config() -> VramConfig {
    VramConfig {
        min_bytes: 1 << 20,
        ..VramConfig::default()
    }
}

const LONG: Duration = Duration::from_secs(60);

fn files(files: usize) -> Expected {
    Expected {
        files,
        ..Expected::default()
    }
}

fn packed(images: &Path, config: VramConfig) -> Option<VramFacts> {
    let packing = Packing::start(images, config, files(1));
    packing
        .finish(LONG, || false)
        .unwrap()
        .unwrap()
        .map(|packed| packed.facts)
}

fn of(facts: VramFacts) -> Metadata {
    Metadata {
        gpu: GpuFacts {
            vram: Some(facts),
            ..GpuFacts::default()
        },
        ..Metadata::default()
    }
}

#[test]
fn what_is_packed_is_unpacked_and_a_second_checkpoint_stores_what_changed() {
    let dir = tempfile::tempdir().unwrap();
    let images = [dir.path().join("1"), dir.path().join("2")];
    let mut contents = [pages(1), pages(2)];
    for (at, images) in images.iter().enumerate() {
        fs::create_dir(images).unwrap();
        contents[1][4 << 20] = at as u8 + 1;
        for (name, bytes) in NAMES.iter().zip(&contents) {
            fs::write(images.join(name), bytes).unwrap();
        }
    }
    let first = packed(&images[0], config()).unwrap();
    assert!(!images[0].join(NAMES[0]).exists());
    assert!(first.stored_bytes < 7 << 20, "{first:?}");
    let second = VramConfig {
        parent: Some(cryopod_cuda::vram::VramParent {
            directory: images[0].clone(),
            digest: first.digest.clone(),
        }),
        ..config()
    };
    let second = packed(&images[1], second).unwrap();
    assert!(second.stored_bytes < 2 << 20, "{second:?}");
    let search = VramConfig {
        search: vec![dir.path().to_owned()],
        ..config()
    };
    let unpacked = unpack(&images[1], &of(second), &search).unwrap().unwrap();
    for (name, bytes) in NAMES.iter().zip(&contents) {
        assert!(fs::read(unpacked.directory.join(name)).unwrap() == *bytes);
    }
    let directory = unpacked.directory.clone();
    drop(unpacked);
    assert!(!directory.exists());
}

/// What docs/amd.md says of 2 GiB: `cargo test --release -p cryopod-operations -- --ignored --nocapture two_gib`.
#[test]
#[ignore = "measures"]
fn two_gib_of_buffers() {
    let dir = tempfile::tempdir_in(std::env::var("BENCH_DIR").unwrap_or("/var/tmp".into()));
    let dir = dir.unwrap();
    let name = |n: usize| format!("amdgpu-pages-7-a00{n}.img");
    let mut parent = None;
    for round in 0..2u8 {
        let images = dir.path().join(round.to_string());
        fs::create_dir(&images).unwrap();
        let mut plain = 0;
        for n in 0..8usize {
            // Half noise, half zero, and a word that changes, as in the tests' client.
            let mut bytes = pages(n as u8).repeat(32);
            for (i, chunk) in bytes.chunks_mut(1 << 20).enumerate() {
                // No chunk of noise is like another.
                if chunk[0] != 0 || chunk[1] != 0 {
                    chunk[..8].copy_from_slice(&((n << 32 | i) as u64).to_ne_bytes());
                }
            }
            bytes[100 << 20] = round;
            let start = std::time::Instant::now();
            fs::write(images.join(name(n)), &bytes).unwrap();
            File::open(images.join(name(n)))
                .unwrap()
                .sync_all()
                .unwrap();
            plain += start.elapsed().as_millis();
        }
        let config = VramConfig {
            parent: parent.take(),
            search: vec![dir.path().to_owned()],
            ..VramConfig::default()
        };
        let start = std::time::Instant::now();
        let facts = packed(&images, config.clone()).unwrap();
        let packed = start.elapsed().as_millis();
        let start = std::time::Instant::now();
        drop(
            unpack(&images, &of(facts.clone()), &config)
                .unwrap()
                .unwrap(),
        );
        println!(
            "checkpoint {round}: {} MiB; the plugin's files written and synced {plain} ms; into VRAM files {packed} ms, {} MiB stored; back {} ms",
            facts.bytes >> 20,
            facts.stored_bytes >> 20,
            start.elapsed().as_millis()
        );
        parent = Some(cryopod_cuda::vram::VramParent {
            directory: images,
            digest: facts.digest,
        });
    }
}

#[test]
fn little_memory_stays_and_nothing_is_unpacked() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join(NAMES[0]), [0; 4096]).unwrap();
    assert_eq!(packed(dir.path(), config()), None);
    assert!(dir.path().join(NAMES[0]).exists());
    let none = unpack(dir.path(), &Metadata::default(), &config()).unwrap();
    assert!(none.is_none());
}

/// The plugin's side of a file: it begins with its length, and comes piece by piece.
fn begin(path: &Path, bytes: &[u8], first: usize) -> File {
    let mut file = File::create(path).unwrap();
    file.write_all(&(bytes.len() as u64).to_ne_bytes()).unwrap();
    file.write_all(&bytes[..first]).unwrap();
    file
}

fn wait_for(what: &str, mut come: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !come() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn memory_is_written_while_the_plugin_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().join("images");
    fs::create_dir(&images).unwrap();
    let contents = [pages(1).repeat(2), pages(2).repeat(2)];
    let paths = NAMES.map(|name| images.join(name));
    let packing = Packing::start(&images, config(), files(2));
    let shard = images.join(names::vram_shard(0));
    // Only the runs of chunks that are there: of the first file all but its end.
    let first = contents[0].len() - 10;
    let mut a = begin(&paths[0], &contents[0], first);
    wait_for("the first file is not written", || shard.exists());
    let mut b = begin(&paths[1], &contents[1], 5000);
    a.write_all(&contents[0][first..]).unwrap();
    for piece in contents[1][5000..].chunks(100_003) {
        b.write_all(piece).unwrap();
    }
    drop((a, b));
    let packed = packing.finish(LONG, || false).unwrap().unwrap().unwrap();
    assert!(packed.ahead >= 8, "{packed:?}");
    assert!(paths.iter().all(|path| !path.exists()));
    let unpacked = unpack(&images, &of(packed.facts), &config());
    let unpacked = unpacked.unwrap().unwrap();
    for (name, bytes) in NAMES.iter().zip(&contents) {
        let file = fs::read(unpacked.directory.join(name)).unwrap();
        assert!(file[..8] == (bytes.len() as u64).to_ne_bytes());
        assert!(file[8..] == *bytes);
    }
}

/// The plugin fails in the middle of a file; or it announces more than it writes.
#[test]
fn a_checkpoint_that_is_called_off_leaves_the_plugins_files_alone() {
    let dir = tempfile::tempdir().unwrap();
    let shard = dir.path().join(names::vram_shard(0));
    let (path, bytes) = (dir.path().join(NAMES[0]), pages(1).repeat(2));
    let written = |packing: Packing| {
        let file = begin(&path, &bytes, bytes.len() - 10);
        wait_for("nothing is written", || shard.exists());
        assert_eq!(file.metadata().unwrap().len(), bytes.len() as u64 - 2);
        packing
    };
    drop(written(Packing::start(dir.path(), config(), files(1))));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    fs::remove_file(&path).unwrap();

    let packing = written(Packing::start(dir.path(), config(), files(1)));
    let packed = packing.finish(LONG, || false).unwrap().unwrap().unwrap();
    let unpacked = unpack(dir.path(), &of(packed.facts), &config());
    let unpacked = unpacked.unwrap().unwrap();
    let file = fs::read(unpacked.directory.join(NAMES[0])).unwrap();
    assert!(file[8..] == bytes[..bytes.len() - 10]);
}

/// The plugin does not truncate a file of an older checkpoint that it writes again.
#[test]
fn files_that_were_there_before_are_not_read_until_all_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let (path, bytes) = (dir.path().join(NAMES[0]), pages(1).repeat(2));
    drop(begin(&path, &pages(2).repeat(2), bytes.len()));
    let packing = Packing::start(dir.path(), config(), files(1));
    // Another one, so that there is something to see.
    let other = dir.path().join(NAMES[1]);
    let file = begin(&other, &bytes, bytes.len());
    let shard = dir.path().join(names::vram_shard(0));
    wait_for("nothing is written", || shard.exists());
    drop((begin(&path, &bytes, bytes.len()), file));
    let packed = packing.finish(LONG, || false).unwrap().unwrap().unwrap();
    let unpacked = unpack(dir.path(), &of(packed.facts), &config());
    let unpacked = unpacked.unwrap().unwrap();
    for name in NAMES {
        assert!(fs::read(unpacked.directory.join(name)).unwrap()[8..] == bytes);
    }
}

#[test]
fn what_is_not_written_in_time_leaves_the_plugins_files_alone() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pages(1).repeat(2);
    for interrupted in [false, true] {
        drop(begin(&dir.path().join(NAMES[0]), &bytes, bytes.len()));
        let packing = Packing::start(dir.path(), config(), files(1));
        let limit = if interrupted { LONG } else { Duration::ZERO };
        assert!(packing.finish(limit, || interrupted).is_none());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

#[test]
fn without_room_for_what_is_yet_to_come_nothing_is_read_before_all_is_complete() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = pages(1).repeat(2);
    let expected = Expected {
        files: 1,
        host_bytes: u64::MAX,
    };
    let packing = Packing::start(dir.path(), config(), expected);
    drop(begin(&dir.path().join(NAMES[0]), &bytes, bytes.len()));
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    let packed = packing.finish(LONG, || false).unwrap().unwrap().unwrap();
    assert_eq!(packed.ahead, 0);
}

#[test]
fn a_restore_removes_what_a_killed_one_has_left() {
    let dir = tempfile::tempdir().unwrap();
    let images = dir.path().join("images");
    fs::create_dir(&images).unwrap();
    fs::write(images.join(NAMES[0]), pages(1)).unwrap();
    let facts = packed(&images, config()).unwrap();
    let left = dir.path().join(".cryopod-amd-1-2");
    fs::create_dir(&left).unwrap();
    fs::write(left.join(NAMES[0]), "a part").unwrap();
    let first = unpack(&images, &of(facts.clone()), &config());
    let first = first.unwrap().unwrap();
    assert!(!left.exists());
    // Not what another one works with.
    let second = unpack(&images, &of(facts), &config()).unwrap().unwrap();
    assert!(first.directory.join(NAMES[0]).exists());
    assert_ne!(first.directory, second.directory);
    drop((first, second));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}
