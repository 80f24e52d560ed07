//! Keeps a place in object storage, and what this host wrote or read of it in a directory of the host.
//!
//! CRIU writes and reads files. So a checkpoint for `s3://BUCKET/PREFIX` is written into the host's directory and sent
//! before its container ends, and it is fetched before its restore. The objects, each below `PREFIX/NAME/`:
//!
//! | object | |
//! |---|---|
//! | `NUMBER/FILE` | a file of a checkpoint |
//! | `complete-NUMBER` | lists its files ([`ObjectListing`]). It is made last: without it there is no checkpoint |
//! | `writing-NUMBER` | a host's claim to the number |
//! | `needed-NUMBER-by-NAME-NUMBER` | another checkpoint has the GPU memory that this one lacks |
//! | `removing-NUMBER` | nobody may begin to build upon it |
//! | `damaged-NUMBER` | the listing of one that was found damaged |
//! | `lease-NUMBER`, `kept-NUMBER` | as in a directory |
//!
//! Whoever builds upon a checkpoint writes `needed` and then looks for `removing`; whoever removes it writes `removing` and
//! then looks for `needed`. Storage that shows each write at once lets one of the two see the other.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::names;
use cryopod_archive::vram::parent::WantedParent;
use cryopod_host::files::{if_there, read_bounded};
use nix::fcntl::Flock;
use serde::{Deserialize, Serialize};

use super::objects::{
    COMPLETE, DAMAGED_THERE, MAX_LISTING, NamedObjects, ObjectFile, ObjectListing, REMOVING,
    WRITING, name_and_number, numbers_of,
};
use super::prune::KEPT;
use super::storage::{ObjectStorage, Stops, Transfer};
use super::{DAMAGED, PartialCheckpoint, Place, lock_file, remove_all};

/// The host's directories of places in object storage.
const COPIES: &str = "/var/lib/cryopod/places";
/// So long a checkpoint stays there that nobody uses.
const UNUSED: Duration = Duration::from_secs(24 * 3600);
/// The file in a checkpoint of the host's directory that is nowhere else yet.
pub const UNSENT: &str = ".unsent";
/// The file in one of which only the tables were fetched: another builds upon it.
const TABLES_ONLY: &str = ".tables-only";
/// The file that has the `NAME/NUMBER` upon which one builds.
const UPON: &str = ".upon";
const FETCHED: &str = ".fetched-";
/// The file that is locked while a checkpoint of the name is fetched.
const FETCHING: &str = ".fetching";
/// What another checkpoint builds upon: the tables, and not the shards.
const TABLES: [&str; 2] = [names::METADATA, names::VRAM_INDEX];
const MAX_UPON: u64 = 512;
/// So many other names are asked for a checkpoint to build upon.
const MAX_OTHERS: usize = 16;
/// The longest chain of checkpoints that build upon each other.
const MAX_ANCESTORS: usize = 1024;

/// Returns true if an image directory is one of a place in object storage.
pub fn is_copy(images: &Path) -> bool {
    images.starts_with(COPIES)
}

/// A place in object storage.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RemotePlace {
    url: String,
    #[serde(skip)]
    opened: Arc<OnceLock<ObjectStorage>>,
}

impl RemotePlace {
    pub fn new(url: &str) -> Self {
        Self {
            url: url.trim_end_matches('/').to_owned(),
            opened: Arc::default(),
        }
    }

    /// Makes the host's directory of the place.
    pub fn directory(&self) -> io::Result<PathBuf> {
        let directory = Path::new(COPIES).join(&Digest::of(self.url.as_bytes()).hex()[..16]);
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)?;
        Ok(directory)
    }

    fn storage(&self) -> io::Result<&ObjectStorage> {
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        let opened = ObjectStorage::open(&self.url)?;
        Ok(self.opened.get_or_init(|| opened))
    }
}

/// The parts of a place in object storage. Without it each does nothing.
impl Place {
    /// Returns the name's objects; `None`: the place is a directory.
    pub(super) fn objects(&self) -> io::Result<Option<NamedObjects<'_>>> {
        let Some(remote) = &self.remote else {
            return Ok(None);
        };
        let name = self.directory.file_name().and_then(|name| name.to_str());
        let name = name.unwrap_or_default();
        Ok(Some(NamedObjects {
            storage: remote.storage()?,
            name,
        }))
    }

    /// Returns where the name is, for messages.
    pub(super) fn shown(&self) -> String {
        match (&self.remote, self.directory.file_name()) {
            (Some(remote), Some(name)) => format!("{}/{}", remote.url, name.display()),
            _ => self.directory.display().to_string(),
        }
    }

    /// Returns the numbers of the complete checkpoints: those of the storage, and the host's own that were not sent as the
    /// container was killed before.
    pub(super) fn complete_numbers(&self) -> io::Result<Vec<u64>> {
        let own = self.numbers("")?;
        let Some(objects) = self.objects()? else {
            return Ok(own);
        };
        let mut all = objects.numbers(COMPLETE)?;
        let unsent = |number: &u64| self.complete(*number).join(UNSENT).exists();
        all.extend(own.into_iter().filter(unsent));
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// Returns the highest number that a checkpoint has or had there.
    pub(super) fn last_there(&self) -> io::Result<u64> {
        let Some(objects) = self.objects()? else {
            return Ok(0);
        };
        let all = objects.storage.names(objects.name)?;
        let kinds = [COMPLETE, WRITING, REMOVING, DAMAGED_THERE, KEPT];
        let last = kinds
            .into_iter()
            .filter_map(|kind| numbers_of(&all, kind).pop());
        Ok(last.max().unwrap_or(0))
    }

    /// Claims the number of a new checkpoint; false: another host has it.
    pub(super) fn claim(&self, number: u64, partial: &Path) -> io::Result<bool> {
        let Some(objects) = self.objects()? else {
            return Ok(true);
        };
        File::create(partial.join(UNSENT))?;
        let host = super::lease::this_host();
        let claim = objects.numbered(WRITING, number);
        objects.storage.create(&claim, host.as_bytes())
    }

    /// Gives a number up. If files were sent, the claim stays for a day: what is under way must not reach the next one.
    pub(super) fn unclaim(&self, number: u64, is_begun: bool) {
        let given_up = self.objects().and_then(|objects| match objects {
            None => Ok(()),
            Some(objects) if is_begun => objects.remove_files(number),
            Some(objects) => objects.storage.remove(&objects.numbered(WRITING, number)),
        });
        if let Err(e) = given_up {
            tracing::warn!("{}: {number:06} is not removed: {e}", self.shown());
        }
    }

    /// Brings the tables of the checkpoint that the next one can build upon: the newest of the name, else of the name that
    /// has most in common with it.
    pub(super) fn fetch_tables(&self) {
        let fetched = self.objects().and_then(|objects| match objects {
            None => Ok(()),
            Some(objects) => self.fetch_tables_of(&objects),
        });
        if let Err(e) = fetched {
            tracing::warn!("{}: this checkpoint builds upon none: {e}", self.shown());
        }
    }

    fn fetch_tables_of(&self, objects: &NamedObjects<'_>) -> io::Result<()> {
        let never: Stops<'_> = &|| false;
        if let Some(newest) = objects.numbers(COMPLETE)?.pop() {
            return self.bring(newest, false, never).map(drop);
        }
        let common = |other: &String| super::common_beginning(objects.name, other);
        let mut others = objects.storage.directories("")?;
        others.retain(|o| super::is_name(o) && o != objects.name && common(o).is_some());
        others.sort_by_key(|other| std::cmp::Reverse(common(other)));
        for other in others.iter().take(MAX_OTHERS) {
            let other = self.of_name(other);
            let Some(objects) = other.objects()? else {
                return Ok(());
            };
            for number in objects.numbers(COMPLETE)?.into_iter().rev() {
                // As in a directory: only upon one that needs no other.
                if objects.listing(number)?.upon.is_none() {
                    return other.bring(number, false, never).map(drop);
                }
            }
        }
        Ok(())
    }

    fn of_name(&self, name: &str) -> Self {
        Self {
            directory: self.directory.with_file_name(name),
            remote: self.remote.clone(),
        }
    }

    /// Brings a checkpoint to this host, with all that it builds upon. Returns true if it was not here; `None`: it is not
    /// there any more.
    pub fn fetch(&self, checkpoint: &Path, stops: Stops<'_>) -> Result<Option<bool>, String> {
        if self.remote.is_none() || checkpoint.join(UNSENT).exists() {
            return Ok(Some(false));
        }
        let number = checkpoint
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok());
        let number = number.ok_or_else(|| format!("{}: no number", checkpoint.display()))?;
        sweep_copies(self.directory.parent().unwrap_or(&self.directory));
        match self.bring(number, true, stops) {
            Ok(fetched) => Ok(Some(fetched)),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
            Err(e) if e.kind() == ErrorKind::Interrupted => Err(format!(
                "{}/{number:06}: not fetched in time; raise limits.restore_s",
                self.shown()
            )),
            Err(e) => Err(format!("{}/{number:06}: {e}", self.shown())),
        }
    }

    /// Removes the host's copy of a checkpoint; false: there is no other.
    pub fn discard_copy(&self, checkpoint: &Path) -> bool {
        let is_copy = self.remote.is_some() && !checkpoint.join(UNSENT).exists();
        is_copy && remove_all(checkpoint).is_ok()
    }

    fn bring(&self, number: u64, whole: bool, stops: Stops<'_>) -> io::Result<bool> {
        let (mut place, mut number) = (self.clone(), number);
        let mut fetched = false;
        for _ in 0..MAX_ANCESTORS {
            fetched |= place.bring_one(number, whole, stops)?;
            let upon = read_bounded(&place.complete(number).join(UPON), MAX_UPON);
            let Some(upon) = if_there(upon)? else {
                return Ok(fetched);
            };
            let upon = String::from_utf8(upon).map_err(io::Error::other)?;
            let upon = name_and_number(&upon)
                .ok_or_else(|| io::Error::other(format!("{upon:?} is no NAME/NUMBER")))?;
            (place, number) = (self.of_name(upon.0), upon.1);
        }
        Err(io::Error::other("a chain of checkpoints without end"))
    }

    fn bring_one(&self, number: u64, whole: bool, stops: Stops<'_>) -> io::Result<bool> {
        self.make()?;
        let fetching = self.directory.join(FETCHING);
        let _one_at_a_time = wait_for_lock(&fetching, stops)?;
        let copy = self.complete(number);
        let is_here = copy.join(names::METADATA).exists();
        if is_here && !(whole && copy.join(TABLES_ONLY).exists()) {
            return Ok(false);
        }
        let Some(objects) = self.objects()? else {
            return Ok(false);
        };
        let listing = objects.listing(number)?;
        let made = self.directory.join(format!("{FETCHED}{number:06}"));
        if_there(fs::remove_dir_all(&made))?;
        DirBuilder::new().mode(0o700).create(&made)?;
        let transfer = |file: &ObjectFile| Transfer {
            key: objects.key(&format!("{number:06}/{}", file.name)),
            file: made.join(&file.name),
            bytes: file.bytes,
        };
        let (now, later): (Vec<_>, Vec<_>) = listing
            .files
            .iter()
            .partition(|file| whole || TABLES.contains(&file.name.as_str()));
        let now: Vec<_> = now.into_iter().map(transfer).collect();
        objects.storage.fetch(&now, stops)?;
        for file in later {
            // Of the right size, and takes no space.
            File::create_new(made.join(&file.name))?.set_len(file.bytes)?;
        }
        if !whole {
            File::create(made.join(TABLES_ONLY))?;
        }
        // Written after the checkpoint, or not at all.
        let digests = objects.key(&format!("{number:06}/{}", names::LISTING));
        if let Some(text) = if_there(objects.storage.read(&digests, MAX_LISTING))? {
            fs::write(made.join(names::LISTING), text)?;
        }
        if let Some(upon) = &listing.upon {
            objects.need(number, upon)?;
            fs::write(made.join(UPON), upon)?;
        }
        if is_here {
            let tables = self.directory.join(format!("{FETCHED}tables-{number:06}"));
            fs::rename(&copy, &tables)?;
            fs::rename(&made, &copy)?;
            remove_all(&tables)?;
        } else {
            if_there(fs::remove_dir_all(&copy))?;
            fs::rename(&made, &copy)?;
        }
        Ok(true)
    }

    /// Sends a checkpoint whose files are all there. [`Self::publish`] makes it one.
    ///
    /// # Errors
    /// What could not be sent.
    pub fn send(
        &self,
        partial: &PartialCheckpoint,
        stops: Stops<'_>,
    ) -> io::Result<Option<ObjectListing>> {
        let Some(objects) = self.objects()? else {
            return Ok(None);
        };
        let (path, number) = (partial.path(), partial.number);
        let listing = ObjectListing::of(path, self.upon(path)?)?;
        if let Some(upon) = &listing.upon {
            fs::write(path.join(UPON), upon)?;
            let need = objects.need(number, upon)?;
            objects.storage.write(&need, b"")?;
            let (name, parent) = name_and_number(upon).unwrap_or_default();
            let parent_of = NamedObjects {
                storage: objects.storage,
                name,
            };
            if parent_of.is_there(REMOVING, parent)? || !parent_of.is_there(COMPLETE, parent)? {
                objects.storage.remove(&need)?;
                return Err(io::Error::other(format!(
                    "{upon}, which it builds upon, is being removed"
                )));
            }
        }
        let files = listing.files.iter().map(|file| Transfer {
            key: objects.key(&format!("{number:06}/{}", file.name)),
            file: path.join(&file.name),
            bytes: file.bytes,
        });
        let files: Vec<_> = files.collect();
        partial.is_begun.store(true, Ordering::Relaxed);
        let (bytes, since) = (
            files.iter().map(|file| file.bytes).sum::<u64>(),
            Instant::now(),
        );
        objects.storage.send(&files, stops)?;
        tracing::info!(
            "{}/{number:06}: {} MiB sent in {} ms",
            self.shown(),
            bytes >> 20,
            since.elapsed().as_millis()
        );
        Ok(Some(listing))
    }

    /// Returns the checkpoint of the place that this one builds upon, by the table of its GPU memory.
    fn upon(&self, checkpoint: &Path) -> io::Result<Option<String>> {
        let table = checkpoint.join(names::VRAM_INDEX);
        let Some(table) = if_there(fs::read(table))? else {
            return Ok(None);
        };
        let parent = WantedParent::of(&table, Some(checkpoint)).map_err(io::Error::other)?;
        let Some(parent) = parent else {
            return Ok(None);
        };
        let root = self.directory.parent().unwrap_or(&self.directory);
        let found = parent.find(&[]).and_then(|at| at.canonicalize().ok());
        let upon = found.and_then(|at| Some(at.strip_prefix(root).ok()?.to_str()?.to_owned()));
        let upon = upon.filter(|upon| name_and_number(upon).is_some());
        upon.map(Some)
            .ok_or_else(|| io::Error::other("what it builds upon is not in the place"))
    }

    /// Makes what was sent a checkpoint.
    pub fn publish(
        &self,
        partial: &PartialCheckpoint,
        sent: Option<ObjectListing>,
    ) -> io::Result<()> {
        let (Some(objects), Some(listing)) = (self.objects()?, sent) else {
            return Ok(());
        };
        let (path, number) = (partial.path(), partial.number);
        let text = serde_json::to_vec(&listing)?;
        let complete = objects.numbered(COMPLETE, number);
        if !objects.storage.create(&complete, &text)? {
            return Err(io::Error::other(format!(
                "{complete}: another host has made it"
            )));
        }
        let _ = fs::remove_file(path.join(UNSENT));
        if let Err(e) = objects.storage.remove(&objects.numbered(WRITING, number)) {
            tracing::warn!("{complete}: {e}");
        }
        Ok(())
    }

    /// Sends the digests of a checkpoint's files, and removes what newer checkpoints supersede.
    pub fn completed_there(&self, checkpoint: &Path, keep: Option<usize>) -> io::Result<()> {
        let Some(objects) = self.objects()? else {
            return Ok(());
        };
        if let Some(text) = if_there(fs::read(checkpoint.join(names::LISTING)))? {
            let number = checkpoint.file_name().unwrap_or_default().display();
            objects
                .storage
                .write(&objects.key(&format!("{number}/{}", names::LISTING)), &text)?;
        }
        let Some(keep) = keep else { return Ok(()) };
        objects.sweep()?;
        let kept = objects.numbers(KEPT)?.pop().unwrap_or(0);
        let mut old = objects.numbers(COMPLETE)?;
        old.retain(|number| *number > kept);
        old.truncate(old.len().saturating_sub(keep));
        // A checkpoint builds upon older ones.
        old.into_iter()
            .rev()
            .try_for_each(|number| objects.remove(number))
    }

    /// Has this checkpoint and all before it stay.
    pub(super) fn keep_there(&self, number: &str) -> io::Result<()> {
        match self.objects()? {
            None => Ok(()),
            Some(objects) => objects
                .storage
                .write(&objects.key(&format!("{KEPT}{number}")), b""),
        }
    }

    /// Takes a damaged checkpoint from those that are restored, unless another builds upon it.
    pub(super) fn set_aside_there(&self, number: u64) -> io::Result<()> {
        let Some(objects) = self.objects()? else {
            return Ok(());
        };
        if objects.is_needed(number)? {
            return Ok(());
        }
        let key = objects.numbered(COMPLETE, number);
        let Some(text) = if_there(objects.storage.read(&key, MAX_LISTING))? else {
            return Ok(());
        };
        objects
            .storage
            .write(&objects.numbered(DAMAGED_THERE, number), &text)?;
        objects.storage.remove(&key)
    }
}

/// Locks a file, as soon as no other process has it locked.
fn wait_for_lock(path: &Path, stops: Stops<'_>) -> io::Result<Flock<File>> {
    File::options().create(true).append(true).open(path)?;
    loop {
        match lock_file(path)? {
            Some(lock) => return Ok(lock),
            None if stops() => return Err(ErrorKind::Interrupted.into()),
            None => std::thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Removes the host's copies that nobody has used for [`UNUSED`].
fn sweep_copies(root: &Path) {
    let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
    for checkpoint in entries(root).flat_map(|name| entries(&name.path())) {
        let path = checkpoint.path();
        let record = path.join(names::METADATA);
        let name = checkpoint.file_name();
        let is_left = name.as_encoded_bytes().starts_with(DAMAGED.as_bytes());
        let written = fs::symlink_metadata(&record).and_then(|meta| meta.modified());
        let age = written
            .ok()
            .and_then(|at| SystemTime::now().duration_since(at).ok());
        let unused = age.is_some_and(|age| age > UNUSED) && !is_left && !path.join(UNSENT).exists();
        if unused && matches!(lock_file(&record), Ok(Some(_))) {
            tracing::info!("{}: removed, it is in object storage", path.display());
            let _ = remove_all(&path);
        }
    }
}

#[cfg(test)]
mod tests;
