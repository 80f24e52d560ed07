//! Moves the GPU memory that CRIU's amdgpu plugin has saved into VRAM files, and back for a restore.
//!
//! The plugin writes `amdgpu-pages-<id>-<gpu_id>.img`, one a process and GPU, as large as the buffers. In VRAM files this memory
//! is hashed, compressed, and not stored again where the parent checkpoint has it, as NVIDIA's is. Each file is a
//! region, under its name. A restore writes the files again, into a directory of its own, and gives CRIU links to them.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use cryopod_archive::metadata::Metadata;
use cryopod_archive::vram::{self, Digest, Source, Vram, VramFacts};
use cryopod_cuda::vram::VramConfig;
use cryopod_cuda::vram::memory::Mapped;
use cryopod_gpu_plan::amd::image::is_pages;
use nix::fcntl::{FallocateFlags, fallocate};

/// Moves the memory in this image directory into VRAM files. `None`: it is too little, and stays where it is.
///
/// # Errors
/// Why it stays where it is.
pub fn pack(images: &Path, config: &VramConfig) -> Result<Option<VramFacts>, String> {
    let unread = |e: io::Error| format!("{}: cannot be read: {e}", images.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(images).map_err(unread)? {
        let name = entry.map_err(unread)?.file_name();
        names.extend(name.into_string().ok().filter(|n| is_pages(n)));
    }
    names.sort();
    let mut mapped = Vec::new();
    for name in &names {
        let path = images.join(name);
        let map = File::open(&path).and_then(|file| {
            let bytes = file.metadata()?.len();
            Mapped::new(&file, bytes, false)
        });
        mapped.push(map.map_err(|e| format!("{}: cannot be mapped: {e}", path.display()))?);
    }
    let total: u64 = mapped.iter().map(|m| m.bytes().len() as u64).sum();
    if total < config.min_bytes.max(1) {
        return Ok(None);
    }
    let sources: Vec<Source<'_>> = names
        .iter()
        .zip(&mapped)
        .map(|(id, map)| Source {
            id,
            bytes: map.bytes(),
        })
        .collect();
    let parent = parent(config)?;
    let options = config.write_options(sources.len());
    let never = AtomicBool::new(false);
    let written = vram::write(images, &sources, &options, parent.as_ref(), &never)
        .map_err(|e| e.to_string())?;
    for name in &names {
        let path = images.join(name);
        fs::remove_file(&path)
            .map_err(|e| format!("{}: cannot be removed: {e}", path.display()))?;
    }
    Ok(Some(written.facts))
}

fn parent(config: &VramConfig) -> Result<Option<Vram>, String> {
    let Some(parent) = &config.parent else {
        return Ok(None);
    };
    let digest: Digest = parent.digest.parse()?;
    Vram::open_with(&parent.directory, Some(digest), &config.search).map_err(|e| e.to_string())
}

/// The plugin's files of a checkpoint, written again. Dropped, they are removed.
#[derive(Debug)]
pub struct Unpacked {
    pub directory: PathBuf,
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_dir_all(&self.directory) {
            tracing::warn!("{}: cannot be removed: {e}", self.directory.display());
        }
    }
}

/// Writes the plugin's files of this checkpoint again, beside the image directory: GPU memory need not fit into the
/// host's. `None`: they are where CRIU looks for them.
///
/// # Errors
/// The memory is damaged, or there is no room for it.
pub fn unpack(
    images: &Path,
    metadata: &Metadata,
    config: &VramConfig,
) -> Result<Option<Unpacked>, String> {
    let Some(facts) = &metadata.gpu.vram else {
        return Ok(None);
    };
    let digest: Digest = facts.digest.parse()?;
    let vram = Vram::open_with(images, Some(digest), &config.search).map_err(|e| e.to_string())?;
    let Some(vram) = vram.filter(|v| v.index.regions.iter().any(|r| is_pages(&r.id))) else {
        return Ok(None);
    };
    let beside = images.parent().unwrap_or(images);
    // A name that no killed restore has left, and none in another PID namespace has.
    let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
    let name = format!(".cryopod-amd-{}-{}", std::process::id(), since.as_nanos());
    let directory = beside.join(name);
    DirBuilder::new()
        .mode(0o700)
        .create(&directory)
        .map_err(|e| format!("{}: cannot be made: {e}", directory.display()))?;
    let unpacked = Unpacked { directory };
    for (number, region) in vram.index.regions.iter().enumerate() {
        if is_pages(&region.id) {
            let path = unpacked.directory.join(&region.id);
            region_to(&vram, number, region.bytes, &path, config)
                .map_err(|e| format!("{}: {e}", path.display()))?;
        }
    }
    Ok(Some(unpacked))
}

fn region_to(
    vram: &Vram,
    number: usize,
    bytes: u64,
    path: &Path,
    config: &VramConfig,
) -> Result<(), String> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(|e| e.to_string())?;
    // A full disk is an error here, and would be a signal below.
    let length = i64::try_from(bytes).map_err(|e| e.to_string())?;
    fallocate(&file, FallocateFlags::empty(), 0, length).map_err(|e| e.to_string())?;
    let mut map = Mapped::new(&file, bytes, true).map_err(|e| e.to_string())?;
    let to = map.bytes_mut().map_err(|e| e.to_string())?;
    let never = AtomicBool::new(false);
    vram.read(number, to, &config.read_options(1), &never)
        .map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_archive::metadata::GpuFacts;

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
        let first = pack(&images[0], &config()).unwrap().unwrap();
        assert!(!images[0].join(NAMES[0]).exists());
        assert!(first.stored_bytes < 7 << 20, "{first:?}");
        let second = VramConfig {
            parent: Some(cryopod_cuda::vram::VramParent {
                directory: images[0].clone(),
                digest: first.digest.clone(),
            }),
            ..config()
        };
        let second = pack(&images[1], &second).unwrap().unwrap();
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
            let facts = pack(&images, &config).unwrap().unwrap();
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
        assert_eq!(pack(dir.path(), &config()).unwrap(), None);
        assert!(dir.path().join(NAMES[0]).exists());
        let none = unpack(dir.path(), &Metadata::default(), &config()).unwrap();
        assert!(none.is_none());
    }
}
