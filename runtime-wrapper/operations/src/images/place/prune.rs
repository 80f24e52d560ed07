//! Removes the checkpoints that newer ones of the name supersede: [`KEEP`].

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use cryopod_archive::format::names;
use cryopod_archive::metadata::{Metadata, MetadataError};
use cryopod_host::files::if_there;
use cryopod_host::spec::Spec;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::{PARTIAL, Place, lock_file, remove_all, setting};

/// How many checkpoints of a name stay, the new one with them; or `all`.
pub const KEEP: &str = "dev.cryopod.checkpoint.keep";
const DEFAULT: usize = 2;
const MAX: usize = 1000;
/// Stands before the number of a checkpoint that is being removed.
pub(super) const REMOVED: &str = ".removed-";
/// Stands before the number up to which all checkpoints stay.
pub(super) const KEPT: &str = "kept-";

/// Returns how many checkpoints of the container's name stay; `None`: all.
pub fn keep(spec: &Spec) -> Result<Option<usize>, String> {
    match setting(spec, KEEP).map(|set| set.value) {
        None => Ok(Some(DEFAULT)),
        Some("all") => Ok(None),
        Some(text) => {
            let number = text.parse().ok().filter(|n| (1..=MAX).contains(n));
            let wrong =
                || format!("{KEEP}: {text:?} is neither a number from 1 to {MAX} nor \"all\"");
            number.map(Some).ok_or_else(wrong)
        }
    }
}

/// Locks a checkpoint against its removal while it is restored, or another one that builds upon it is written.
///
/// # Errors
/// It is being removed.
pub fn hold(checkpoint: &Path) -> Result<Option<Flock<File>>, String> {
    let path = checkpoint.join(names::METADATA);
    let Ok(file) = File::open(&path) else {
        return Ok(None);
    };
    let gone = || {
        format!(
            "{}: a newer one supersedes it, and it is removed",
            path.display()
        )
    };
    match Flock::lock(file, FlockArg::LockSharedNonblock) {
        Ok(lock) => path.exists().then_some(Some(lock)).ok_or_else(gone),
        Err((_, Errno::EWOULDBLOCK)) => Err(gone()),
        // The file system has no locks.
        Err(_) => Ok(None),
    }
}

impl Place {
    /// Removes all but the newest checkpoints of the name. One that is being restored stays, one that another in the place
    /// builds upon, and all that [`Self::keep_up_to`] names.
    ///
    /// # Errors
    /// What cannot be read or removed. Each checkpoint that is left is whole.
    pub fn prune(&self, keep: usize) -> io::Result<()> {
        if let Err(e) = self.sweep_removed() {
            tracing::warn!("{}: {e}", self.directory.display());
        }
        let kept = self.numbers(KEPT)?.pop().unwrap_or(0);
        let mut old = self.numbers("")?;
        let sound = self.complete_numbers()?;
        let stay = &sound[sound.len().saturating_sub(keep)..];
        old.retain(|number| *number > kept && !stay.contains(number));
        // A checkpoint builds upon older ones.
        old.iter()
            .rev()
            .try_for_each(|number| self.remove(&self.complete(*number)))
    }

    /// Returns true if another checkpoint of the place builds upon this one.
    pub(super) fn is_needed(&self, path: &Path) -> io::Result<bool> {
        let digest = metadata(path)?.and_then(|metadata| Some(metadata.gpu.vram?.digest));
        for other in self.all_in_place()?.iter().filter(|other| *other != path) {
            let vram = metadata(other)?.and_then(|metadata| metadata.gpu.vram);
            let upon = vram.and_then(|vram| vram.parent_digest);
            let link = other.join(names::PARENT_LINK).canonicalize();
            if (digest.is_some() && digest == upon) || link.is_ok_and(|link| link == path) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the complete checkpoints of all names, and those that have no more than their name to get.
    fn all_in_place(&self) -> io::Result<Vec<PathBuf>> {
        let mut all = Vec::new();
        for name in fs::read_dir(self.directory.parent().unwrap_or(&self.directory))? {
            let directory = name?.path();
            if directory.is_dir() {
                let named = Self {
                    directory,
                    remote: None,
                };
                // In this order: one that gets its name meanwhile is found twice.
                let partial = named.numbers(PARTIAL)?.into_iter();
                all.extend(partial.map(|n| named.partial(n)));
                all.extend(named.numbers("")?.into_iter().map(|n| named.complete(n)));
            }
        }
        Ok(all)
    }

    /// Leaves one that is being restored, that another builds upon, or that is not this program's.
    fn remove(&self, path: &Path) -> io::Result<()> {
        let locked = if_there(lock_file(&path.join(names::METADATA)))?;
        let Some(lock) = locked.flatten() else {
            return Ok(());
        };
        // Whoever is about to build upon it has locked it.
        if self.is_needed(path)? {
            return Ok(());
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let removed = self.directory.join(format!("{REMOVED}{name}"));
        // Under its name it is whole.
        fs::rename(path, &removed)?;
        // NFS keeps a file that is open, and with it the directory.
        drop(lock);
        remove_all(&removed)?;
        tracing::info!("{}: newer ones supersede it: removed", path.display());
        Ok(())
    }

    /// Has this checkpoint and all before it stay, whatever containers write later.
    pub fn keep_up_to(&self, checkpoint: &Path) -> io::Result<()> {
        let number = checkpoint.file_name().unwrap_or_default();
        let file = format!("{KEPT}{}", number.to_string_lossy());
        File::create(self.directory.join(file))?;
        self.keep_there(&number.to_string_lossy())
    }

    /// Removes what is left of those that a killed process was removing.
    fn sweep_removed(&self) -> io::Result<()> {
        for number in self.numbers(REMOVED)? {
            let left = self.directory.join(format!("{REMOVED}{number:06}"));
            if_there(fs::remove_dir_all(left))?;
        }
        Ok(())
    }
}

/// Reads what a checkpoint builds upon; `None` for a damaged one, which no version restores.
fn metadata(path: &Path) -> io::Result<Option<Metadata>> {
    match Metadata::open(path) {
        Err(e @ (MetadataError::Invalid { .. } | MetadataError::TooLarge { .. })) => {
            tracing::warn!("{e}");
            Ok(None)
        }
        read => read.map_err(io::Error::other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_archive::metadata::MetadataSlot;
    use serde_json::json;

    /// A place with a name's checkpoints: each number with its parent.
    fn place(checkpoints: &[(u64, Option<u64>)]) -> (tempfile::TempDir, Place) {
        let dir = tempfile::tempdir().unwrap();
        let directory = dir.path().canonicalize().unwrap().join("c1");
        let place = Place {
            directory,
            remote: None,
        };
        for (number, parent) in checkpoints {
            make(&place, *number, *parent);
        }
        (dir, place)
    }

    fn make(place: &Place, number: u64, parent: Option<u64>) {
        let path = place.complete(number);
        fs::create_dir_all(&path).unwrap();
        let facts = json!({
            "digest": number.to_string(), "parent_digest": parent.map(|p| p.to_string()),
            "bytes": 0, "stored_bytes": 0, "chunk_bytes": 0, "shards": 0, "chunks": 0, "zero": 0,
            "raw": 0, "lz4": 0, "zstd": 0, "same": 0, "parent": 0,
        });
        let mut metadata = Metadata {
            schema: Metadata::current_schema(),
            ..Metadata::default()
        };
        metadata.gpu.vram = Some(serde_json::from_value(facts).unwrap());
        let slot = MetadataSlot::reserve(&path).unwrap();
        slot.commit(&metadata).unwrap();
    }

    #[test]
    fn the_newest_stay() {
        let (_dir, place) = place(&[(1, None), (2, None), (3, None), (10, None)]);
        fs::create_dir(place.directory.join(".removed-000000")).unwrap();
        place.begin().unwrap().complete().unwrap();
        place.prune(3).unwrap();
        assert_eq!(place.numbers("").unwrap(), [3, 10, 11]);
        assert_eq!(fs::read_dir(&place.directory).unwrap().count(), 3);
        place.keep_up_to(&place.complete(10)).unwrap();
        place.prune(1).unwrap();
        assert_eq!(place.numbers("").unwrap(), [3, 10, 11], "not restored");
    }

    #[test]
    fn what_others_build_upon_stays() {
        let (dir, place) = place(&[(1, None), (2, Some(1)), (3, None), (4, Some(2)), (5, None)]);
        let directory = dir.path().canonicalize().unwrap().join("c2");
        make(
            &Place {
                directory,
                remote: None,
            },
            9,
            Some(3),
        );
        place.prune(2).unwrap();
        assert_eq!(place.numbers("").unwrap(), [1, 2, 3, 4, 5]);
        let third = place.complete(3);
        assert_eq!(place.set_aside(&third), third, "damaged or not");
        let sound = place.newest_first().unwrap();
        assert!(!sound.contains(&third), "nothing restores it");
        place.prune(4).unwrap();
        assert_eq!(place.numbers("").unwrap(), [1, 2, 3, 4, 5]);
        fs::remove_dir_all(dir.path().join("c2")).unwrap();
        place.prune(4).unwrap();
        assert_eq!(place.numbers("").unwrap(), [1, 2, 4, 5]);
        place.prune(1).unwrap();
        assert_eq!(place.numbers("").unwrap(), [5]);
        fs::remove_file(place.complete(5).join(names::METADATA)).unwrap();
        make(&place, 6, None);
        place.prune(1).unwrap();
        assert_eq!(place.numbers("").unwrap(), [5, 6], "not cryopod's");
        let damaged = place.complete(7);
        fs::create_dir(&damaged).unwrap();
        fs::write(damaged.join(names::METADATA), "{").unwrap();
        make(&place, 8, None);
        place.prune(1).unwrap();
        assert_eq!(place.numbers("").unwrap(), [5, 8]);
    }

    #[test]
    fn nothing_is_removed_beside_a_record_of_another_version() {
        let (_dir, place) = place(&[(1, None), (2, None), (3, None)]);
        let file = place.complete(3).join(names::METADATA);
        let known = fs::read_to_string(&file).unwrap();
        fs::write(
            &file,
            known.replace("\"1.0\"", "\"1.9\"").replace("[]", "7"),
        )
        .unwrap();
        assert!(place.prune(1).is_err());
        assert_eq!(place.numbers("").unwrap(), [1, 2, 3]);
    }

    #[test]
    fn what_is_being_written_keeps_its_parent() {
        let (dir, place) = place(&[(1, None), (2, None), (3, None)]);
        let directory = dir.path().canonicalize().unwrap().join("c2");
        let other = Place {
            directory,
            remote: None,
        };
        let partial = other.begin().unwrap();
        place.prune(2).unwrap();
        assert_eq!(place.numbers("").unwrap(), [2, 3]);
        make(&other, 9, Some(2));
        let record = other.complete(9).join(names::METADATA);
        fs::rename(record, partial.path().join(names::METADATA)).unwrap();
        place.prune(1).unwrap();
        assert_eq!(place.numbers("").unwrap(), [2, 3]);
    }

    #[test]
    fn what_is_restored_stays() {
        let (_dir, place) = place(&[(1, None), (2, None), (3, None)]);
        let held = hold(&place.complete(2)).unwrap();
        assert!(held.is_some());
        place.prune(1).unwrap();
        assert_eq!(place.numbers("").unwrap(), [2, 3]);
        drop(held);
        let removing = lock_file(&place.complete(2).join(names::METADATA)).unwrap();
        assert!(removing.is_some() && hold(&place.complete(2)).is_err());
    }

    #[test]
    fn how_many() {
        let of = |n: &str| keep(&Spec::from_json(json!({"annotations": {KEEP: n}})));
        assert_eq!(of("1").unwrap(), Some(1));
        assert_eq!(of("all").unwrap(), None);
        for bad in ["0", "-1", "", "none", "1001"] {
            assert!(of(bad).unwrap_err().contains("nor \"all\""), "{bad}");
        }
        assert_eq!(keep(&Spec::from_json(json!({}))).unwrap(), Some(DEFAULT));
    }
}
