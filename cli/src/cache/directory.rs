//! The directory of the cache.
//!
//! ```text
//! KEY/                      a checkpoint, complete
//!   checkpoint/             CRIU's images
//!   cryopod-cache.json      where it came from; its modification time is that of the last use
//! .pull-KEY/                one that a process is making: it holds the lock. The next one takes over what a killed one left
//! .removed-KEY/             one that a process is removing
//! ```
//!
//! KEY is computed from a checkpoint's [`CacheOrigin`]: the same digest of another repository is another checkpoint. So the
//! cache answers only for a repository or file that has been asked for it. Whoever reads a checkpoint holds a shared
//! lock on its directory, and whoever removes it an exclusive one.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail};
use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::names;
use cryopod_host::files::{bytes_below, own_directory};
use cryopod_operations::config::cache::CacheOptions;
use cryopod_registry::Error as RegistryError;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::terminal::ui;

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

/// Where a checkpoint comes from: what a tenant must be allowed to have it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheOrigin {
    /// `docker://REGISTRY/REPOSITORY`, or the real path of an archive.
    pub place: String,
    /// Of an image's manifest. For other archives it is computed from the file's identity.
    pub digest: Digest,
}

impl CacheOrigin {
    /// Returns the name of its directory in the cache.
    pub fn key(&self) -> String {
        // No digest has a line break.
        let text = format!("{}\n{}", self.digest, self.place);
        Digest::of(text.as_bytes()).hex().to_owned()
    }
}

/// A checkpoint in the cache.
pub struct CacheEntry {
    pub key: String,
    pub record: CacheRecord,
    pub last_use: SystemTime,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CacheRecord {
    /// As the user named it. Shown to users only.
    pub source: String,
    pub origin: CacheOrigin,
    /// Bytes of its files.
    pub bytes: u64,
}

impl Cache {
    /// Opens the cache; makes its directory.
    pub fn open(options: &CacheOptions) -> anyhow::Result<Self> {
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

    /// Returns the directory of a checkpoint in the cache.
    pub fn path_of(&self, key: &str) -> PathBuf {
        self.path.join(key)
    }

    /// Returns the image directory of a checkpoint in the cache, and notes the use.
    pub fn find(&self, origin: &CacheOrigin) -> Option<PathBuf> {
        let path = self.path_of(&origin.key());
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
        origin: &CacheOrigin,
        source: &str,
        limit: Duration,
        make: impl FnOnce(&Path) -> anyhow::Result<PathBuf>,
    ) -> anyhow::Result<PathBuf> {
        let key = origin.key();
        let work = self.path.join(format!("{PULL}{key}"));
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
        // Before it needs room.
        self.sweep(LEFTOVER);
        // Another process may have been first.
        if let Some(images) = self.find(origin) {
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
        let bytes = bytes_below(&made);
        if let Err(e) = self.make_room(bytes, source) {
            let _ = fs::remove_dir_all(&work);
            return Err(e);
        }
        let record = CacheRecord {
            source: source.to_owned(),
            origin: origin.clone(),
            bytes,
        };
        let path = self.path_of(&key);
        let written = || -> anyhow::Result<()> {
            fs::write(made.join(RECORD), serde_json::to_vec(&record)?)?;
            // One that could not be read is replaced.
            self.remove(&key);
            Ok(fs::rename(&made, &path)?)
        };
        written().with_context(|| format!("{}: cannot be written", path.display()))?;
        let _ = fs::remove_dir_all(&work);
        Ok(path.join(names::CHECKPOINT_DIR))
    }

    /// Lists the checkpoints, the least recently used first.
    pub fn entries(&self) -> anyhow::Result<Vec<CacheEntry>> {
        let list = fs::read_dir(&self.path);
        let list = list.with_context(|| format!("{}: cannot be read", self.path.display()))?;
        let keys = list
            .flatten()
            .filter_map(|f| f.file_name().into_string().ok());
        let entry = |key: String| {
            let path = self.path_of(&key);
            let record = read(&path)?;
            let last_use = path.join(RECORD).metadata().ok()?.modified().ok()?;
            Some(CacheEntry {
                key,
                record,
                last_use,
            })
        };
        let mut entries: Vec<_> = keys
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
            if self.remove(&entry.key) {
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
    pub fn remove(&self, key: &str) -> bool {
        let path = self.path_of(key);
        let Some(_lock) = lock(&path, FlockArg::LockExclusiveNonblock) else {
            return false;
        };
        let removed = self.path.join(format!("{REMOVED}{key}"));
        let _ = fs::remove_dir_all(&removed);
        fs::rename(&path, &removed).is_ok() && fs::remove_dir_all(&removed).is_ok()
    }

    /// Removes what killed processes left, if it is older than `age`, and checkpoints without a record that can be read:
    /// of an earlier version of the cache, or after a crash of the host.
    pub fn sweep(&self, age: Duration) {
        for item in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let name = item.file_name().to_string_lossy().into_owned();
            let path = item.path();
            let old = path.metadata().and_then(|m| m.modified());
            let old = old.is_ok_and(|t| t.elapsed().is_ok_and(|e| e >= age));
            let unread = Digest::parse(&format!("sha256:{name}")).is_ok() && read(&path).is_none();
            let leftover = name.starts_with(PULL) && old || name.starts_with(REMOVED) || unread;
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

fn read(entry: &Path) -> Option<CacheRecord> {
    let text = fs::read(entry.join(RECORD)).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(dir: &Path, max: u64) -> Cache {
        let mut cache = Cache::open(&CacheOptions {
            path: dir.join("cache"),
            ..CacheOptions::default()
        })
        .unwrap();
        cache.max = max;
        cache
    }

    fn origin(place: &str) -> CacheOrigin {
        CacheOrigin {
            place: place.into(),
            digest: Digest::of(b"manifest"),
        }
    }

    fn make(cache: &Cache, place: &str, bytes: usize) -> anyhow::Result<PathBuf> {
        cache.make(&origin(place), place, Duration::from_secs(1), |work| {
            let made = work.join("new");
            fs::create_dir_all(made.join("checkpoint"))?;
            fs::write(made.join("checkpoint/pages-1.img"), vec![0; bytes])?;
            Ok(made)
        })
    }

    fn places(cache: &Cache) -> Vec<String> {
        let mut all: Vec<_> = cache
            .entries()
            .unwrap()
            .into_iter()
            .map(|e| e.record.origin.place)
            .collect();
        all.sort();
        all
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let dir = tempfile::tempdir().unwrap();
        let cache = cache(dir.path(), 100);
        for place in ["a", "b", "c"] {
            make(&cache, place, 30).unwrap();
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(cache.find(&origin("a")).unwrap().ends_with("checkpoint"));
        assert_eq!(places(&cache), ["a", "b", "c"]);
        make(&cache, "d", 30).unwrap();
        assert_eq!(places(&cache), ["a", "c", "d"]);
        let in_use = lock(
            &cache.path_of(&origin("c").key()),
            FlockArg::LockSharedNonblock,
        );
        make(&cache, "e", 30).unwrap();
        assert_eq!(places(&cache), ["c", "d", "e"]);
        let full = make(&cache, "f", 80).unwrap_err().to_string();
        assert!(full.contains("the cache is full"), "{full}");
        drop(in_use);
        let large = make(&cache, "f", 101).unwrap_err().to_string();
        assert!(large.contains("raise cache.max_gib"), "{large}");
        // Only the checkpoints are left.
        assert_eq!(
            fs::read_dir(&cache.path).unwrap().count(),
            places(&cache).len()
        );
    }

    /// The cache has it from one repository, which says nothing of who may have it from another.
    #[test]
    fn the_same_digest_of_another_repository_is_not_found() {
        let dir = tempfile::tempdir().unwrap();
        let cache = cache(dir.path(), 100);
        make(&cache, "docker://r.example/b/x", 1).unwrap();
        assert!(cache.find(&origin("docker://r.example/b/x")).is_some());
        assert_eq!(cache.find(&origin("docker://r.example/a/x")), None);
        make(&cache, "docker://r.example/a/x", 1).unwrap();
        assert_eq!(cache.entries().unwrap().len(), 2);
    }

    #[test]
    fn what_a_killed_process_left_is_taken_over_or_removed() {
        let dir = tempfile::tempdir().unwrap();
        let cache = cache(dir.path(), 100);
        let left = cache.path.join(format!("{PULL}{}", origin("a").key()));
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
        fs::write(cache.path_of(&origin("a").key()).join(RECORD), "").unwrap();
        assert_eq!(cache.find(&origin("a")), None);
        make(&cache, "a", 1).unwrap();
        assert!(cache.find(&origin("a")).is_some());
        // Of an earlier version, which had no origins. What is not the cache's own stays.
        let earlier = cache.path_of(&"0".repeat(64));
        for path in [&earlier, &cache.path_of("other")] {
            fs::create_dir(path).unwrap();
            fs::write(path.join(RECORD), r#"{"source": "a", "bytes": 1}"#).unwrap();
        }
        cache.sweep(LEFTOVER);
        assert!(!earlier.exists() && cache.path_of("other").exists());
        assert!(cache.find(&origin("a")).is_some());
    }

    #[test]
    fn of_many_at_once_one_makes_it() {
        let dir = tempfile::tempdir().unwrap();
        let cache = cache(dir.path(), 100);
        let made = std::sync::atomic::AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| {
                    let images = cache.make(&origin("a"), "a", Duration::from_secs(60), |work| {
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
