//! Writes the shards and the table.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use cryopod_host::files::{create_private, sync_directory};

use super::VramError;
use super::index::{MAX_SHARDS, VramIndex};
use crate::format::names;
use crate::temporary::remove_files;

/// The shards being written; each thread appends to its own.
pub(super) struct Shards<'a> {
    dir: &'a Path,
    shard_bytes: u64,
    sync: bool,
    sizes: Mutex<Vec<u64>>,
}

/// A thread's shards; it appends to the last.
#[derive(Default)]
pub(super) struct Own(Vec<Shard>);

struct Shard {
    file: File,
    path: PathBuf,
    number: u16,
    end: u64,
}

impl<'a> Shards<'a> {
    pub(super) fn new(dir: &'a Path, shard_bytes: u64, sync: bool) -> Self {
        Self {
            dir,
            shard_bytes,
            sync,
            sizes: Mutex::default(),
        }
    }

    fn sizes(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn take_sizes(&self) -> Vec<u64> {
        std::mem::take(&mut *self.sizes())
    }

    /// Appends to the thread's shard. Returns the shard's number and the offset in it.
    pub(super) fn append(&self, own: &mut Own, stored: &[u8]) -> Result<(u16, u64), VramError> {
        if own.0.last().is_none_or(|s| s.end >= self.shard_bytes) {
            own.0.push(self.open()?);
        }
        let Some(shard) = own.0.last_mut() else {
            return Err(VramError::Cancelled);
        };
        shard
            .file
            .write_all_at(stored, shard.end)
            .map_err(VramError::io(&shard.path, "cannot be written"))?;
        let place = shard.end;
        shard.end += stored.len() as u64;
        self.sizes()[usize::from(shard.number)] = shard.end;
        Ok((shard.number, place))
    }

    fn open(&self) -> Result<Shard, VramError> {
        let mut sizes = self.sizes();
        if sizes.len() >= MAX_SHARDS {
            return Err(VramError::Invalid(
                "too many shards: make them larger".into(),
            ));
        }
        let number = sizes.len();
        let path = self.dir.join(names::vram_shard(number));
        let file = create(&path)?;
        sizes.push(0);
        Ok(Shard {
            file,
            path,
            number: number as u16,
            end: 0,
        })
    }

    /// Waits until all threads' shards are on disk.
    pub(super) fn sync(&self, all: &[Own]) -> Result<(), VramError> {
        if !self.sync {
            return Ok(());
        }
        let sync = |shard: &Shard| {
            shard
                .file
                .sync_data()
                .map_err(VramError::io(&shard.path, "cannot be written"))
        };
        std::thread::scope(|scope| {
            let shards = all.iter().flat_map(|own| &own.0);
            let each: Vec<_> = shards.map(|s| scope.spawn(move || sync(s))).collect();
            each.into_iter().try_for_each(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(VramError::Invalid("a thread died".into())))
            })
        })
    }

    /// Writes the table atomically.
    pub(super) fn put(&self, index: &mut VramIndex) -> Result<(), VramError> {
        let partial = self.dir.join(names::VRAM_INDEX_PARTIAL);
        let path = self.dir.join(names::VRAM_INDEX);
        let bytes = index.encode()?;
        let mut file = create(&partial)?;
        let failed = VramError::io(&partial, "cannot be written");
        file.write_all(&bytes).map_err(failed)?;
        if self.sync {
            file.sync_all()
                .map_err(VramError::io(&partial, "cannot be written"))?;
        }
        fs::rename(&partial, &path).map_err(VramError::io(&path, "cannot be written"))?;
        if self.sync {
            sync_directory(self.dir).map_err(VramError::io(self.dir, "cannot be written"))?;
        }
        Ok(())
    }
}

/// Removes all VRAM files from a directory, the table first.
pub fn remove(dir: &Path) {
    let _ = fs::remove_file(dir.join(names::VRAM_INDEX));
    let _ = fs::remove_file(dir.join(names::VRAM_INDEX_PARTIAL));
    // Of a killed writer any may be there: its threads make them in no order.
    let all = fs::read_dir(dir).into_iter().flatten().flatten();
    let all = all.map(|entry| entry.path());
    let is_shard = |path: &PathBuf| path.to_str().is_some_and(names::is_vram_shard);
    let there: Vec<PathBuf> = all.filter(is_shard).collect();
    remove_files(&there);
}

fn create(path: &Path) -> Result<File, VramError> {
    create_private(path).map_err(VramError::io(path, "cannot be made"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_writer_left_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "vram-0001.img",
            "vram-0007.img",
            "vram-index.img",
            "pages-1.img",
        ] {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        remove(dir.path());
        let left = fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name());
        assert_eq!(left.collect::<Vec<_>>(), ["pages-1.img"]);
    }
}
