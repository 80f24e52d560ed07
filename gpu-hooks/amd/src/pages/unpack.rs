//! Writes the plugin's files of a checkpoint again, from its VRAM files.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use crate::image::is_pages;
use cryopod_archive::metadata::Metadata;
use cryopod_archive::vram::{ChunkDigest, Vram};
use cryopod_cuda::vram::VramConfig;
use cryopod_cuda::vram::memory::Mapped;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, Flock, FlockArg, fallocate};

const PREFIX: &str = ".cryopod-amd-";

/// The plugin's files of a checkpoint, written again. Dropped, they are removed.
#[derive(Debug)]
pub struct UnpackedPages {
    pub directory: PathBuf,
    /// Held as long as somebody works with the directory.
    _lock: Flock<File>,
}

impl UnpackedPages {
    fn make(beside: &Path) -> io::Result<Self> {
        // A name that none in another PID namespace has.
        let since = std::time::UNIX_EPOCH.elapsed().unwrap_or_default();
        let name = format!("{PREFIX}{}-{}", std::process::id(), since.as_nanos());
        let directory = beside.join(name);
        DirBuilder::new().mode(0o700).create(&directory)?;
        let lock = lock(&directory)?;
        fs::metadata(&directory)?;
        Ok(Self {
            directory,
            _lock: lock,
        })
    }
}

fn lock(directory: &Path) -> io::Result<Flock<File>> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW)
        .open(directory)?;
    Flock::lock(opened, FlockArg::LockExclusiveNonblock).map_err(|(_, e)| e.into())
}

/// Removes what restores that were killed have left.
fn remove_left(beside: &Path) {
    for entry in fs::read_dir(beside).into_iter().flatten().flatten() {
        let is_one = entry.file_name().as_bytes().starts_with(PREFIX.as_bytes());
        if is_one && let Ok(_lock) = lock(&entry.path()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for UnpackedPages {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_dir_all(&self.directory) {
            tracing::warn!("{}: cannot be removed: {e}", self.directory.display());
        }
    }
}

/// Writes the plugin's files of this checkpoint again, beside the image directory: GPU memory need not fit into the
/// host's. `None`: they are where CRIU looks for them.
pub fn unpack(
    images: &Path,
    metadata: &Metadata,
    config: &VramConfig,
) -> Result<Option<UnpackedPages>, String> {
    let Some(facts) = &metadata.gpu.vram else {
        return Ok(None);
    };
    let digest: ChunkDigest = facts.digest.parse()?;
    let vram = Vram::open_with(images, Some(digest), &config.search).map_err(|e| e.to_string())?;
    let Some(vram) = vram.filter(|v| v.index.regions.iter().any(|r| is_pages(&r.id))) else {
        return Ok(None);
    };
    let beside = images.parent().unwrap_or(images);
    remove_left(beside);
    // Another restore may have taken it for one that was left.
    let made = UnpackedPages::make(beside).or_else(|_| UnpackedPages::make(beside));
    let unpacked = made.map_err(|e| {
        format!(
            "{}: a directory cannot be made in it: {e}",
            beside.display()
        )
    })?;
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
