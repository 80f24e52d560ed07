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

fn packed(images: &Path, config: VramConfig) -> Option<VramFacts> {
    pack(images, config, LONG, || false).unwrap().unwrap()
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
        assert!(fs::read(unpacked.path().join(name)).unwrap() == *bytes);
    }
    let directory = unpacked.path().to_owned();
    drop(unpacked);
    assert!(!directory.exists());
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

#[test]
fn what_is_not_written_in_time_leaves_the_plugins_files_alone() {
    let mut times = 0;
    for interrupted in [false, true].repeat(20) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(NAMES[0]), pages(1).repeat(2)).unwrap();
        let limit = if interrupted { LONG } else { Duration::ZERO };
        let packed = pack(dir.path(), config(), limit, || interrupted);
        // On a busy machine it can be done before it is called off.
        assert_eq!(dir.path().join(NAMES[0]).exists(), packed.is_none());
        if packed.is_none() {
            assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
            times += 1;
        }
    }
    assert!(times > 0);
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
    assert!(first.path().join(NAMES[0]).exists());
    assert_ne!(first.path(), second.path());
    drop((first, second));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}
