//! Writes the plugin's files of a checkpoint again, from its VRAM files.

use std::io::{self, Read};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use crate::image::is_pages;
use cryopod_archive::metadata::Metadata;
use cryopod_archive::temporary::{self, Temporary};
use cryopod_archive::vram::{ChunkDigest, Vram};
use cryopod_cuda::vram::VramConfig;
use cryopod_cuda::vram::memory::Mapped;
use cryopod_host::files::create_private;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

const PREFIX: &str = ".cryopod-amd-";

/// Writes the plugin's files of this checkpoint again, beside the image directory: GPU memory need not fit into the
/// host's. Dropped, they are removed. `None`: they are where CRIU looks for them.
pub fn unpack(
    images: &Path,
    metadata: &Metadata,
    config: &VramConfig,
) -> Result<Option<Temporary>, String> {
    let Some(facts) = &metadata.gpu.vram else {
        return Ok(None);
    };
    let digest: ChunkDigest = facts.digest.parse()?;
    let vram = Vram::open_with(images, Some(digest), &config.search).map_err(|e| e.to_string())?;
    let Some(mut vram) = vram.filter(|v| v.index.regions.iter().any(|r| is_pages(&r.id))) else {
        return Ok(None);
    };
    vram.unlock(&config.identities);
    let beside = images.parent().unwrap_or(images);
    // What restores that were killed have left.
    for (path, _lock) in temporary::leftovers(beside, PREFIX).unwrap_or_default() {
        temporary::remove(&path);
    }
    let made = Temporary::directory(beside, PREFIX);
    let unpacked = made.map_err(|e| {
        format!(
            "{}: a directory cannot be made in it: {e}",
            beside.display()
        )
    })?;
    for (number, region) in vram.index.regions.iter().enumerate() {
        if is_pages(&region.id) {
            let path = unpacked.path().join(&region.id);
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
    let file = create_private(path).map_err(|e| e.to_string())?;
    // A full disk is an error here, and would be a signal below.
    let length = i64::try_from(bytes).map_err(|e| e.to_string())?;
    match fallocate(&file, FallocateFlags::empty(), 0, length) {
        // NFS before 4.2, say.
        Err(Errno::EOPNOTSUPP) => io::copy(&mut io::repeat(0).take(bytes), &mut &file).map(drop),
        allocated => allocated.map_err(io::Error::from),
    }
    .map_err(|e| e.to_string())?;
    let mut map = Mapped::new(&file, bytes, true).map_err(|e| e.to_string())?;
    let to = map.bytes_mut().map_err(|e| e.to_string())?;
    let never = AtomicBool::new(false);
    vram.read(number, to, &config.read_options(1), &never)
        .map_err(|e| e.to_string())
}
