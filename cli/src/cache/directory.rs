//! The directory of the cache.
//!
//! ```text
//! DIGEST/                   a checkpoint, complete
//!   checkpoint/             CRIU's images
//!   cryopod-cache.json      where it came from; its modification time is that of the last use
//! .pull-DIGEST/             one that a process is making: it holds the lock. The next one takes over what a killed one left
//! .removed-DIGEST/          one that a process is removing
//! ```
//!
//! DIGEST is that of an image's manifest. For other archives it is computed from the file's identity. Whoever reads a
//! checkpoint holds a shared lock on its directory, and whoever removes it an exclusive one.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use cryopod_archive::names;
use cryopod_host::files::own_directory;
use cryopod_operations::config::cache::Options;
use cryopod_registry::Error as RegistryError;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::ui;

const RECORD: &str = "cryopod-cache.json";
const PULL: &str = ".pull-";
const REMOVED: &str = ".removed-";
/// What a killed process left is kept for so long: a pull goes on with it.
const LEFTOVER: Duration = Duration::from_secs(3600);
const PAUSE: Duration = Duration::from_millis(50);

pub struct Cache {
    path: PathBuf,
    max: u64,
}

/// A checkpoint in the cache.
pub struct Entry {
    pub digest: String,
    pub record: Record,
    pub last_use: SystemTime,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// As the user named it. Shown to users only.
    pub source: String,
    /// Bytes of its files.
    pub bytes: u64,
}

impl Cache {
    /// Opens the cache; makes its directory.
    pub fn open(options: &Options) -> anyhow::Result<Self> {
        let path = &options.path;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.with_context(|| format!("{}: the cache cannot be made (cache.path)", path.display()))?;
        if !own_directory(path) {
            bail!(
                "{}: the cache must belong to root, and nobody else may write in it: chown root, chmod 0700",
                path.display()
            );
        }
        Ok(Self {
            path: path.clone(),
            max: options.max_bytes(),
        })
    }

    pub fn path_of(&self, digest: &str) -> PathBuf {
        self.path.join(digest)
    }

    /// Returns the image directory of a checkpoint in the cache, and notes the use.
    pub fn find(&self, digest: &str) -> Option<PathBuf> {
        let path = self.path_of(digest);
        let _in_use = lock(&path, FlockArg::LockSharedNonblock)?;
        read(&path)?;
        let record = File::options().append(true).open(path.join(RECORD)).ok()?;
        record.set_modified(SystemTime::now()).ok()?;
        Some(path.join(names::CHECKPOINT_DIR))
    }

    /// Makes a checkpoint, unless another process does so within the time limit. `make` gets a directory that may hold
    /// what a killed process left there, and returns the directory below it with the finished checkpoint.
    pub fn make(
        &self,
        digest: &str,
        source: &str,
        limit: Duration,
        make: impl FnOnce(&Path) -> anyhow::Result<PathBuf>,
    ) -> anyhow::Result<PathBuf> {
        let work = self.path.join(format!("{PULL}{digest}"));
        let end = Instant::now() + limit;
        let _lock = loop {
            match DirBuilder::new().mode(0o700).create(&work) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                    return Err(e).with_context(|| format!("{}: cannot be made", work.display()));
                }
                _ => {}
            }
            if let Some(lock) = lock(&work, FlockArg::LockExclusiveNonblock) {
                break lock;
            }
            if Instant::now() > end {
                bail!(
                    "{source}: another process has been pulling it for {} s (limits.restore_s)",
                    limit.as_secs()
                );
            }
            std::thread::sleep(PAUSE);
        };
        // Another process may have been first.
        if let Some(images) = self.find(digest) {
            let _ = fs::remove_dir_all(&work);
            return Ok(images);
        }
        let made = make(&work).inspect_err(|e| {
            // The next pull goes on with an interrupted transfer.
            let error = e.downcast_ref();
            if !matches!(error, Some(RegistryError::Step { .. })) {
                let _ = fs::remove_dir_all(&work);
            }
        })?;
        let bytes = bytes(&made);
        if let Err(e) = self.make_room(bytes, source) {
            let _ = fs::remove_dir_all(&work);
            return Err(e);
        }
        let record = Record {
            source: source.to_owned(),
            bytes,
        };
        let path = self.path_of(digest);
        let written = || -> anyhow::Result<()> {
            fs::write(made.join(RECORD), serde_json::to_vec(&record)?)?;
            // One that could not be read is replaced.
            self.remove(digest);
            Ok(fs::rename(&made, &path)?)
        };
        written().with_context(|| format!("{}: cannot be written", path.display()))?;
        let _ = fs::remove_dir_all(&work);
        Ok(path.join(names::CHECKPOINT_DIR))
    }

    /// Lists the checkpoints, the least recently used first.
    pub fn entries(&self) -> anyhow::Result<Vec<Entry>> {
        let list = fs::read_dir(&self.path);
        let list = list.with_context(|| format!("{}: cannot be read", self.path.display()))?;
        let digests = list
            .flatten()
            .filter_map(|f| f.file_name().into_string().ok());
        let entry = |digest: String| {
            let path = self.path_of(&digest);
            let record = read(&path)?;
            let last_use = path.join(RECORD).metadata().ok()?.modified().ok()?;
            Some(Entry {
                digest,
                record,
                last_use,
            })
        };
        let mut entries: Vec<_> = digests
            .filter(|d| !d.starts_with('.'))
            .filter_map(entry)
            .collect();
        entries.sort_by_key(|e| e.last_use);
        Ok(entries)
    }

    /// Removes what was not used for the longest time, until `bytes` more have room.
    fn make_room(&self, bytes: u64, source: &str) -> anyhow::Result<()> {
        self.sweep(LEFTOVER);
        let max = ui::bytes(self.max);
        if bytes > self.max {
            bail!(
                "{source}: it has {}, and the cache may hold {max}: raise cache.max_gib",
                ui::bytes(bytes)
            );
        }
        let entries = self.entries()?;
        let mut held: u64 = entries.iter().map(|e| e.record.bytes).sum();
        for entry in entries {
            if held + bytes <= self.max {
                break;
            }
            if self.remove(&entry.digest) {
                held -= entry.record.bytes;
            }
        }
        if held + bytes > self.max {
            bail!(
                "{source}: the cache is full: it may hold {max}, and {} are in use: try again, or raise cache.max_gib",
                ui::bytes(held)
            );
        }
        Ok(())
    }

    /// Removes a checkpoint. False: it is in use, or not there.
    pub fn remove(&self, digest: &str) -> bool {
        let path = self.path_of(digest);
        let Some(_lock) = lock(&path, FlockArg::LockExclusiveNonblock) else {
            return false;
        };
        let removed = self.path.join(format!("{REMOVED}{digest}"));
        let _ = fs::remove_dir_all(&removed);
        fs::rename(&path, &removed).is_ok() && fs::remove_dir_all(&removed).is_ok()
    }

    /// Removes what killed processes left, if it is older than `age`.
    pub fn sweep(&self, age: Duration) {
        for item in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = item.file_name().to_string_lossy().into_owned();
            let path = item.path();
            let old = path.metadata().and_then(|m| m.modified());
            let old = old.is_ok_and(|t| t.elapsed().is_ok_and(|e| e >= age));
            let leftover = name.starts_with(PULL) && old || name.starts_with(REMOVED);
            if leftover && let Some(_lock) = lock(&path, FlockArg::LockExclusiveNonblock) {
                let _ = fs::remove_dir_all(&path);
            }
        }
    }
}

/// Locks a directory that still has this name.
fn lock(path: &Path, how: FlockArg) -> Option<Flock<File>> {
    let lock = Flock::lock(File::open(path).ok()?, how).ok()?;
    let (held, named) = (lock.metadata().ok()?, path.symlink_metadata().ok()?);
    ((held.dev(), held.ino()) == (named.dev(), named.ino())).then_some(lock)
}

fn read(entry: &Path) -> Option<Record> {
    let text = fs::read(entry.join(RECORD)).ok()?;
    serde_json::from_slice(&text).ok()
}

/// Bytes of all files below a directory.
fn bytes(directory: &Path) -> u64 {
    let items = fs::read_dir(directory).into_iter().flatten().flatten();
    items
        .map(|item| match item.metadata() {
            Ok(m) if m.is_dir() => bytes(&item.path()),
            Ok(m) => m.len(),
            Err(_) => 0,
        })
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(dir: &Path, max: u64) -> Cache {
        let mut cache = Cache::open(&Options {
            path: dir.join("cache"),
            ..Options::default()
        })
        .unwrap();
        cache.max = max;
        cache
    }

    fn make(cache: &Cache, digest: &str, bytes: usize) -> anyhow::Result<PathBuf> {
        cache.make(digest, digest, Duration::from_secs(1), |work| {
            let made = work.join("new");
            fs::create_dir_all(made.join("checkpoint"))?;
            fs::write(made.join("checkpoint/pages-1.img"), vec![0; bytes])?;
            Ok(made)
        })
    }

    fn digests(cache: &Cache) -> Vec<String> {
        let mut all: Vec<_> = cache
            .entries()
            .unwrap()
            .into_iter()
            .map(|e| e.digest)
            .collect();
        all.sort();
        all
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let dir = tempfile::tempdir().unwrap();
        let cache = cache(dir.path(), 100);
        for digest in ["a", "b", "c"] {
            make(&cache, digest, 30).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(cache.find("a").unwrap().ends_with("a/checkpoint"));
        assert_eq!(digests(&cache), ["a", "b", "c"]);
        make(&cache, "d", 30).unwrap();
        assert_eq!(digests(&cache), ["a", "c", "d"]);
        let in_use = lock(&cache.path_of("c"), FlockArg::LockSharedNonblock);
        make(&cache, "e", 30).unwrap();
        assert_eq!(digests(&cache), ["c", "d", "e"]);
        let full = make(&cache, "f", 80).unwrap_err().to_string();
        assert!(full.contains("the cache is full"), "{full}");
        drop(in_use);
        let large = make(&cache, "f", 101).unwrap_err().to_string();
        assert!(large.contains("raise cache.max_gib"), "{large}");
        // Only the checkpoints are left.
        assert_eq!(
            fs::read_dir(&cache.path).unwrap().count(),
            digests(&cache).len()
        );
    }

    #[test]
    fn what_a_killed_process_left_is_taken_over_or_removed() {
        let dir = tempfile::tempdir().unwrap();
        let cache = cache(dir.path(), 100);
        let left = cache.path.join(".pull-a");
        fs::create_dir(&left).unwrap();
        fs::write(left.join("half"), "").unwrap();
        cache.sweep(LEFTOVER);
        assert!(left.join("half").exists());
        make(&cache, "a", 1).unwrap();
        assert!(!left.exists());
        fs::create_dir(&left).unwrap();
        let held = lock(&left, FlockArg::LockExclusiveNonblock);
        cache.sweep(Duration::ZERO);
        assert!(left.exists());
        drop(held);
        cache.sweep(Duration::ZERO);
        assert!(!left.exists());
        // A crash of the host in the middle of writing.
        fs::write(cache.path_of("a").join(RECORD), "").unwrap();
        assert_eq!(cache.find("a"), None);
        make(&cache, "a", 1).unwrap();
        assert!(cache.find("a").is_some());
    }

    #[test]
    fn of_many_at_once_one_makes_it() {
        let dir = tempfile::tempdir().unwrap();
        let cache = cache(dir.path(), 100);
        let made = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| {
                    let images = cache.make("a", "a", Duration::from_secs(60), |work| {
                        made.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        fs::create_dir_all(work.join("new/checkpoint"))?;
                        Ok(work.join("new"))
                    });
                    assert!(images.unwrap().is_dir());
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }
}
