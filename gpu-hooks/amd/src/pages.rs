//! Moves the GPU memory that CRIU's amdgpu plugin saves into VRAM files, and back for a restore.
//!
//! The plugin writes `amdgpu-pages-<id>-<gpu_id>.img`, one a process and GPU, as large as the buffers. In VRAM files this memory
//! is hashed, compressed, and not stored again where the parent checkpoint has it, as NVIDIA's is. Each file is a
//! region, under its name. A restore writes the files again, into a directory of its own, and gives CRIU links to them.
//!
//! * [`Packing`]: writes the VRAM files while the plugin still writes its own
//! * [`growing`]: the plugin's files until they are complete
//! * [`unpack`](mod@unpack): writes them again

mod growing;
mod unpack;

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cryopod_archive::vram::{ChunkDigest, MemorySource, Vram, VramFacts, Writer};
use cryopod_cuda::vram::VramConfig;
use cryopod_cuda::vram::memory::Mapped;

use self::growing::{Growing, Maps};
pub use self::unpack::{UnpackedPages, unpack};

const POLL: Duration = Duration::from_millis(5);
/// How long a thread that is called off may take to end.
const CALLED_OFF: Duration = Duration::from_secs(30);

/// Moves GPU memory into VRAM files, in a thread of its own, while the plugin goes on. Dropped before it has finished,
/// it leaves no VRAM files.
#[derive(Debug)]
pub struct Packing {
    /// Without VRAM files there is no checkpoint.
    pub required: bool,
    stop: Arc<PagesStop>,
    thread: Option<JoinHandle<Result<Option<PackedPages>, String>>>,
}

#[derive(Debug, Default)]
struct PagesStop {
    /// The plugin's files are complete.
    complete: AtomicBool,
    cancel: AtomicBool,
}

/// What a checkpoint probably writes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Expected {
    /// The plugin's files.
    pub files: usize,
    /// CRIU's images of host memory, in bytes.
    pub host_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackedPages {
    pub facts: VramFacts,
    /// Chunks that were written while the plugin went on.
    pub ahead: u64,
}

impl Packing {
    /// Begins with what the plugin is going to write into this image directory.
    pub fn start(images: &Path, config: VramConfig, expected: Expected) -> Self {
        let stop = Arc::new(PagesStop::default());
        let required = config.required;
        let (dir, told) = (images.to_owned(), Arc::clone(&stop));
        let old = growing::names(images).unwrap_or_default();
        let thread = std::thread::spawn(move || pack(&dir, &config, expected, old, &told));
        Self {
            required,
            stop,
            thread: Some(thread),
        }
    }

    /// Writes the rest, when the plugin has written all, and removes the plugin's files. `Ok(None)`: it is too little, and
    /// stays where it is. `None`: not within `limit`, or `interrupted`; there is no checkpoint then.
    ///
    /// # Errors
    /// Why it stays where it is.
    pub fn finish(
        mut self,
        limit: Duration,
        interrupted: impl Fn() -> bool,
    ) -> Option<Result<Option<PackedPages>, String>> {
        self.stop.complete.store(true, Relaxed);
        let deadline = Instant::now() + limit;
        let thread = self.thread.take()?;
        while !thread.is_finished() {
            if Instant::now() >= deadline || interrupted() {
                self.thread = Some(thread);
                return None;
            }
            std::thread::sleep(POLL);
        }
        let joined = thread.join();
        Some(joined.unwrap_or_else(|_| Err("the thread that writes it died".into())))
    }
}

impl Drop for Packing {
    fn drop(&mut self) {
        self.stop.cancel.store(true, Relaxed);
        self.stop.complete.store(true, Relaxed);
        let Some(thread) = self.thread.take() else {
            return;
        };
        let deadline = Instant::now() + CALLED_OFF;
        while !thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        // One that waits for a disk that hangs is left behind.
        if thread.is_finished() {
            let _ = thread.join();
        }
    }
}

fn pack(
    images: &Path,
    config: &VramConfig,
    expected: Expected,
    old: Vec<String>,
    stop: &PagesStop,
) -> Result<Option<PackedPages>, String> {
    let parent = parent(config)?;
    let options = config.write_options(expected.files);
    let mut writer = Writer::new(images, &options, parent.as_ref(), &stop.cancel);
    let maps = Maps::new();
    let mut growing = Growing::new(images, old, config, expected, &maps);
    growing.write(&mut writer, &stop.complete)?;
    if stop.cancel.load(Relaxed) {
        return Err("called off".into());
    }
    let files = complete(images, &growing)?;
    let bytes: u64 = files.iter().map(|f| f.map.bytes().len() as u64).sum();
    if bytes < config.min_bytes.max(1) {
        return Ok(None);
    }
    let sources = files.iter().map(|file| MemorySource {
        id: &file.name,
        bytes: file.map.bytes(),
    });
    let sources: Vec<MemorySource<'_>> = sources.collect();
    let before: Vec<Option<usize>> = files.iter().map(|f| f.before).collect();
    let written = writer.finish(&sources, &before);
    let written = written.map_err(|e| e.to_string())?;
    if stop.cancel.load(Relaxed) {
        return Err("called off".into());
    }
    for file in &files {
        let path = images.join(&file.name);
        // A file that stays is the one that a restore takes: the same bytes.
        if let Err(e) = fs::remove_file(&path) {
            tracing::warn!("{}: cannot be removed: {e}", path.display());
        }
    }
    tracing::debug!(
        "{} of {} chunks of GPU memory were written while the plugin went on",
        written.ahead,
        written.facts.chunks
    );
    Ok(Some(PackedPages {
        facts: written.facts,
        ahead: written.ahead,
    }))
}

fn parent(config: &VramConfig) -> Result<Option<Vram>, String> {
    let Some(parent) = &config.parent else {
        return Ok(None);
    };
    let digest: ChunkDigest = parent.digest.parse()?;
    Vram::open_with(&parent.directory, Some(digest), &config.search).map_err(|e| e.to_string())
}

/// One of the plugin's files when it has written all.
struct PagesFile {
    name: String,
    map: Mapped,
    /// Its number among those that were read as they grew.
    before: Option<usize>,
}

fn complete(images: &Path, growing: &Growing<'_>) -> Result<Vec<PagesFile>, String> {
    let unread = |e| format!("{}: cannot be read: {e}", images.display());
    let names = growing::names(images).map_err(unread)?;
    let pages = names.into_iter().map(|name| {
        let path = images.join(&name);
        let mapped = File::open(&path).and_then(|file| {
            let bytes = file.metadata()?.len();
            Ok((
                Mapped::new(&file, bytes, false)?,
                growing.number(&name, bytes),
            ))
        });
        let (map, before) =
            mapped.map_err(|e| format!("{}: cannot be mapped: {e}", path.display()))?;
        Ok(PagesFile { name, map, before })
    });
    pages.collect()
}

#[cfg(test)]
mod tests;
