//! Writes the plugin's files into VRAM files while the plugin extends them.
//!
//! The plugin writes each file once, from its start to its end, and begins with the length of the rest (`open_img_file`
//! and `sdma_copy_bo` of CRIU 4.1.1 and 4.2.1). So what lies below a file's end changes no more. The plugin takes one
//! process after the other, and all its GPUs at once, one buffer after the other.

use std::collections::HashSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use crate::image::is_pages;
use cryopod_archive::vram::{Ahead, VramError, Writer};
use cryopod_cuda::vram::VramConfig;
use cryopod_cuda::vram::memory::Mapped;
use nix::sys::statvfs::statvfs;

use super::Expected;

/// How many files are read while they grow. Others are read when they are complete.
const MAX_FILES: usize = 256;
/// The plugin's files begin with the length of the rest.
const HEAD: u64 = 8;
const POLL: Duration = Duration::from_millis(10);
/// Room that the writer leaves to the plugin beside what is known to come, in bytes.
const SPARE: u64 = 64 << 20;
/// By how much the writer's priority is lower than that of CRIU, which it must not slow down.
const NICE: libc::c_int = 5;

/// Mappings of the files, made while others are read.
pub struct Maps(Vec<OnceLock<Mapped>>);

impl Maps {
    pub fn new() -> Self {
        Self((0..MAX_FILES).map(|_| OnceLock::new()).collect())
    }
}

pub struct Growing<'a> {
    images: &'a Path,
    config: &'a VramConfig,
    expected: Expected,
    maps: &'a Maps,
    /// Each one's number is that of its mapping.
    files: Vec<GrowingPages>,
    /// Files that are read when all is complete.
    later: Vec<GrowingPages>,
    /// Names that are not looked at again.
    seen: HashSet<String>,
    /// Files that are not read yet, as all together are less than `min_bytes`.
    waiting: Vec<GrowingPages>,
}

/// What the writer sees of the files.
struct PluginMemory<'a> {
    bytes: Vec<OnceLock<Ahead<'a>>>,
    filled: Vec<AtomicUsize>,
}

/// A file of the plugin's.
struct GrowingPages {
    name: String,
    file: File,
    /// The length that it will have.
    bytes: u64,
}

impl GrowingPages {
    /// `None`: its length is not there yet.
    fn open(images: &Path, name: &str) -> io::Result<Option<Self>> {
        let file = File::open(images.join(name))?;
        let mut head = [0; HEAD as usize];
        if file.read_at(&mut head, 0)? < head.len() {
            return Ok(None);
        }
        Ok(Some(Self {
            name: name.to_owned(),
            file,
            bytes: u64::from_ne_bytes(head).saturating_add(HEAD),
        }))
    }

    fn filled(&self) -> u64 {
        self.file.metadata().map_or(0, |m| m.len())
    }

    /// Bytes that the plugin has yet to write.
    fn missing(&self) -> u64 {
        self.bytes.saturating_sub(self.filled())
    }
}

impl<'a> Growing<'a> {
    /// `old`: files that were there before. The plugin overwrites those, and does not truncate them first.
    pub fn new(
        images: &'a Path,
        old: Vec<String>,
        config: &'a VramConfig,
        expected: Expected,
        maps: &'a Maps,
    ) -> Self {
        Self {
            images,
            config,
            expected,
            maps,
            files: Vec::new(),
            later: Vec::new(),
            seen: old.into_iter().collect(),
            waiting: Vec::new(),
        }
    }

    /// Writes what the plugin has written, until all is `complete`.
    pub fn write(&mut self, writer: &mut Writer<'_>, complete: &AtomicBool) -> Result<(), String> {
        let each = || self.maps.0.iter();
        let memory = PluginMemory {
            bytes: each().map(|_| OnceLock::new()).collect(),
            filled: each().map(|_| AtomicUsize::new(0)).collect(),
        };
        while self.files.is_empty() {
            if complete.load(Relaxed) {
                return Ok(());
            }
            std::thread::sleep(POLL);
            self.look(&memory);
        }
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let ahead = scope.spawn(|| {
                // SAFETY: a number; changes the priority of this thread and of those that it starts.
                unsafe { libc::nice(NICE) };
                writer.ahead(&memory.bytes, &memory.filled, &ended)
            });
            let mut short = false;
            while !complete.load(Relaxed) && !ahead.is_finished() && !short {
                self.look(&memory);
                short = !self.config.required && self.is_short();
                std::thread::sleep(POLL);
            }
            ended.store(true, Relaxed);
            let died = |_| Err(VramError::Invalid("a thread died".into()));
            let written = ahead.join().unwrap_or_else(died);
            written.map_err(|e| e.to_string())?;
            match short {
                true => Err("the disk has no room for it beside the plugin's files".into()),
                false => Ok(()),
            }
        })
    }

    /// Whether the room is needed for what the plugin has yet to write. Its files come first.
    fn is_short(&self) -> bool {
        room(self.images) < self.missing().saturating_add(SPARE)
    }

    /// Bytes that the plugin has yet to write into the files that there are.
    fn missing(&self) -> u64 {
        let files = self.files.iter().chain(&self.later);
        files
            .map(GrowingPages::missing)
            .fold(0, u64::saturating_add)
    }

    /// The number of a file that was read as it grew, if it has the length that it announced.
    pub fn number(&self, name: &str, bytes: u64) -> Option<usize> {
        let is_it = |file: &GrowingPages| file.name == name && file.bytes == bytes;
        self.files.iter().position(is_it)
    }

    fn look(&mut self, memory: &PluginMemory<'a>) {
        for name in names(self.images).unwrap_or_default() {
            if !self.seen.contains(&name)
                && let Ok(Some(pages)) = GrowingPages::open(self.images, &name)
            {
                self.waiting.push(pages);
                self.seen.insert(name);
            }
        }
        let waiting = self.waiting.iter().map(|f| f.bytes);
        let enough = waiting.fold(0, u64::saturating_add) >= self.config.min_bytes;
        if enough || !self.files.is_empty() {
            for pages in std::mem::take(&mut self.waiting) {
                self.take(pages, memory);
            }
        }
        for (pages, filled) in self.files.iter().zip(&memory.filled) {
            filled.store(usize::try_from(pages.filled()).unwrap_or(0), Relaxed);
        }
    }

    /// Has the writer read a file from now on. Where the disk may not hold the file's copy beside all that is still to be
    /// written, the file is read when all is complete: the plugin's own files come first.
    fn take(&mut self, pages: GrowingPages, memory: &PluginMemory<'a>) {
        let number = self.files.len();
        let (Some(place), Some(slot)) = (self.maps.0.get(number), memory.bytes.get(number)) else {
            return self.later.push(pages);
        };
        let begun = self.files.iter().map(|f| f.bytes);
        let begun = begun.fold(0, u64::saturating_add);
        // Those of other processes come later. How large they are is not known.
        let others = (self.expected.files).saturating_sub(number + self.later.len() + 1);
        let others = pages.bytes.saturating_mul(others as u64);
        let needed = [self.missing(), pages.missing(), pages.bytes, begun, others];
        let needed = needed
            .into_iter()
            .fold(self.expected.host_bytes, u64::saturating_add);
        if needed > room(self.images) {
            return self.later.push(pages);
        }
        let Ok(map) = Mapped::growing(&pages.file, pages.bytes) else {
            return self.later.push(pages);
        };
        let bytes = place.get_or_init(|| map).bytes();
        let ahead = Ahead {
            bytes,
            complete: true,
            digests: None,
        };
        if slot.set(ahead).is_ok() {
            self.files.push(pages);
        }
    }
}

fn room(dir: &Path) -> u64 {
    statvfs(dir).map_or(0, |s| {
        s.blocks_available().saturating_mul(s.fragment_size())
    })
}

/// The names of the plugin's files in this directory.
pub fn names(images: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(images)? {
        let name = entry?.file_name();
        names.extend(name.into_string().ok().filter(|n| is_pages(n)));
    }
    names.sort();
    Ok(names)
}
