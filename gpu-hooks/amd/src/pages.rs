//! Moves the GPU memory that CRIU's amdgpu plugin saves into VRAM files, and back for a restore.
//!
//! The plugin writes `amdgpu-pages-<id>-<gpu_id>.img`, one a process and GPU, as large as the buffers. In VRAM files this memory
//! is hashed, compressed, and not stored again where the parent checkpoint has it, as NVIDIA's is. Each file is a
//! region, under its name. A restore writes the files again, into a directory of its own, and gives CRIU links to them.
//!
//! * [`pack`](fn@pack): writes the VRAM files once the plugin has written its own
//! * [`unpack`](mod@unpack): writes the plugin's files again

mod unpack;

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use cryopod_archive::vram::{self, ChunkDigest, MemorySource, Vram, VramFacts};
use cryopod_cuda::vram::VramConfig;
use cryopod_cuda::vram::memory::Mapped;
use cryopod_host::limited::wait_until;

pub use self::unpack::unpack;
use crate::image::is_pages;

const POLL: Duration = Duration::from_millis(5);
/// How long a thread that is called off may take to end.
const CALLED_OFF: Duration = Duration::from_secs(30);

/// Writes the VRAM files of what the plugin has written, and removes its files. `Ok(None)`: it is too little, and stays
/// where it is. `None`: not within `limit`, or `interrupted`; there are no VRAM files then.
///
/// # Errors
/// Why it stays where it is.
pub fn pack(
    images: &Path,
    config: VramConfig,
    limit: Duration,
    interrupted: impl Fn() -> bool,
) -> Option<Result<Option<VramFacts>, String>> {
    let cancel = Arc::new(AtomicBool::new(false));
    let (dir, told) = (images.to_owned(), Arc::clone(&cancel));
    let thread = std::thread::spawn(move || write(&dir, &config, &told));
    let finished = |limit, interrupted: &dyn Fn() -> bool| {
        wait_until(limit, POLL, || thread.is_finished() || interrupted());
        thread.is_finished()
    };
    if !finished(limit, &interrupted) {
        cancel.store(true, Relaxed);
        // One that waits for a disk that hangs is left behind.
        if !finished(CALLED_OFF, &|| false) {
            return None;
        }
    }
    let joined = thread.join();
    let joined = joined.unwrap_or_else(|_| Err("the thread that writes it died".into()));
    // It may have been done before it saw that it was called off.
    let called_off = cancel.load(Relaxed) && !matches!(joined, Ok(Some(_)));
    (!called_off).then_some(joined)
}

fn write(
    images: &Path,
    config: &VramConfig,
    cancel: &AtomicBool,
) -> Result<Option<VramFacts>, String> {
    let parent = parent(config)?;
    let files = complete(images)?;
    let sources = files.iter().map(|(name, map)| MemorySource {
        id: name,
        bytes: map.bytes(),
    });
    let sources: Vec<MemorySource<'_>> = sources.collect();
    let bytes: u64 = sources.iter().map(|s| s.bytes.len() as u64).sum();
    if bytes < config.min_bytes.max(1) {
        return Ok(None);
    }
    let options = config.write_options(files.len());
    let written = vram::write(images, &sources, &options, parent.as_ref(), cancel);
    let written = written.map_err(|e| e.to_string())?;
    for (name, _) in &files {
        let path = images.join(name);
        // A file that stays is the one that a restore takes: the same bytes.
        if let Err(e) = fs::remove_file(&path) {
            tracing::warn!("{}: cannot be removed: {e}", path.display());
        }
    }
    Ok(Some(written.facts))
}

fn parent(config: &VramConfig) -> Result<Option<Vram>, String> {
    let Some(parent) = &config.parent else {
        return Ok(None);
    };
    let digest: ChunkDigest = parent.digest.parse()?;
    Vram::open_with(&parent.directory, Some(digest), &config.search).map_err(|e| e.to_string())
}

/// The plugin's files in this directory, by name.
fn complete(images: &Path) -> Result<Vec<(String, Mapped)>, String> {
    let unread = |e: io::Error| format!("{}: cannot be read: {e}", images.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(images).map_err(unread)? {
        let name = entry.map_err(unread)?.file_name().into_string();
        let Some(name) = name.ok().filter(|name| is_pages(name)) else {
            continue;
        };
        let mapped = File::open(images.join(&name)).and_then(|file| {
            let bytes = file.metadata()?.len();
            Mapped::new(&file, bytes, false)
        });
        let map = mapped.map_err(|e| format!("{name}: cannot be mapped: {e}"))?;
        files.push((name, map));
    }
    files.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(files)
}

#[cfg(test)]
mod tests;
