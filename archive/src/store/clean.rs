//! Removes the entries that nothing refers to.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::holders::{DOCKER, Holder, Holders, remove_forgotten};
use super::list::{StoreEntry, list, remove, removed_name};
use super::origin::KnownOrigins;
use super::{Reference, StoreError};
use crate::bytes::staging;
use crate::temporary::abandoned;

/// Age at which leftovers of a killed checkpoint are removed from a shared store. Another host may still be writing, and a
/// network file system need not show its locks.
const LEFTOVER: Duration = Duration::from_secs(24 * 3600);

/// Removes the entries of a store of this host alone that are older than `grace` and that nothing refers to, and what killed
/// processes left. `others`: directories to search beside those that the entries' records name. `used_in`: those in which
/// checkpoints stay.
///
/// At any time, even if the process is killed, an entry that something refers to is whole. One whose checkpoint is about to
/// refer to it is locked.
///
/// # Errors
/// A place cannot be searched: nothing is removed. An entry cannot be removed.
pub fn clean(
    store: &Path,
    others: &[PathBuf],
    used_in: &[PathBuf],
    grace: Duration,
) -> Result<Vec<Reference>, StoreError> {
    sweep(store, Duration::ZERO);
    let entries = list(store)?;
    let settled = |e: &&StoreEntry| e.made.elapsed().is_ok_and(|age| age >= grace);
    let may_go = |e: &&StoreEntry| e.origin.as_ref().is_some_and(|o| !o.elsewhere);
    if !entries.iter().any(|e| e.origin.is_some()) {
        return Ok(Vec::new());
    }
    remove_forgotten(&entries)?;
    let first = Holders::find(&entries, others)?;
    // In another directory there may be a copy that goes before the checkpoint itself.
    let stays = |h: &&Holder| {
        let below = &h.below;
        let own = below == Path::new(DOCKER) || !others.contains(below);
        !h.passing && (own || used_in.contains(below))
    };
    for entry in &entries {
        settle(entry, first.of(entry).filter(stays))?;
    }
    let unused = |holders: &Holders, e: &StoreEntry| holders.of(e).next().is_none();
    let candidates: Vec<(&StoreEntry, File)> = entries
        .iter()
        .filter(settled)
        .filter(may_go)
        .filter(|e| unused(&first, e))
        .filter_map(|e| Some((e, locked(&e.path)?)))
        .collect();
    if candidates.is_empty() {
        return Ok(Vec::new());
    }
    // Somebody may have moved a directory from a place that came later to one that came before, or has just written the
    // reference to an entry that was locked until then.
    let second = Holders::find(&entries, others)?;
    let mut removed = Vec::new();
    for (entry, _locked) in candidates {
        let lost = entry.origin.as_ref().and_then(|o| o.lost());
        match lost {
            Some(place) => tracing::warn!(
                "{}: nothing refers to it, and it stays: {} is not there, or another directory than at its checkpoint",
                entry.path.display(),
                place.display()
            ),
            None if unused(&second, entry) => {
                remove(entry)?;
                removed.push(entry.reference.clone());
            }
            None => {}
        }
    }
    Ok(removed)
}

/// Locks an entry, so that its checkpoint has written its reference; `None`: it is about to. Not all file systems have locks.
fn locked(entry: &Path) -> Option<File> {
    let file = File::open(entry).ok()?;
    let lock = flock(&file, FlockOperation::NonBlockingLockExclusive);
    (lock != Err(Errno::WOULDBLOCK)).then_some(file)
}

/// Notes where an entry is referred to that was not known.
fn settle<'a>(
    entry: &StoreEntry,
    mut stays: impl Iterator<Item = &'a Holder>,
) -> Result<(), StoreError> {
    let Some(origin) = entry.origin.as_ref().filter(|o| o.elsewhere) else {
        return Ok(());
    };
    let Some(directory) = stays.find_map(|h| KnownOrigins::of(&h.below)) else {
        return Ok(());
    };
    let mut known = origin.clone();
    known.directory = Some(directory);
    known.elsewhere = false;
    known.write(&entry.path)
}

/// Removes leftovers of killed checkpoints of this age, and what is left of removed entries.
pub(super) fn sweep(store: &Path, age: Duration) {
    let entries = fs::read_dir(store).into_iter().flatten().flatten();
    for path in entries.map(|e| e.path()) {
        let name = path
            .file_name()
            .and_then(|n| n.to_str())
            .unwrap_or_default();
        if !name.starts_with('.') || !name.contains(staging::MARK) {
            continue;
        }
        let old = || -> Option<bool> {
            let changed = path.symlink_metadata().ok()?.modified().ok()?;
            Some(SystemTime::now().duration_since(changed).ok()? >= age)
        };
        let lock = match removed_name(name) {
            true => None,
            false if old() != Some(true) => continue,
            false => match abandoned(&path) {
                None => continue,
                lock => lock,
            },
        };
        let removed: io::Result<()> = fs::remove_dir_all(&path);
        tracing::info!("{}: left by a killed process: {removed:?}", path.display());
        drop(lock);
    }
}

/// Sweeps a store that other hosts may use.
pub(super) fn sweep_shared(store: &Path) {
    sweep(store, LEFTOVER);
}

#[cfg(test)]
#[path = "clean_tests.rs"]
mod tests;
