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
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use cryopod_archive::format::digest::Digest;
use cryopod_archive::format::names;
use cryopod_archive::vram::parent::WantedParent;
use cryopod_host::files::if_there;
use serde::{Deserialize, Serialize};

use super::objects::{
    COMPLETE, DAMAGED_THERE, MAX_LISTING, NamedObjects, ObjectListing, REMOVING, UNSENT, WRITING,
    numbers_of, sound_numbers,
};
use super::prune::KEPT;
use super::storage::{ObjectStorage, Stops, Transfer};
use super::{PartialCheckpoint, Place, copies, is_damaged};

/// The host's directories of places in object storage.
const COPIES: &str = "/var/lib/cryopod/places";

/// How far a checkpoint has come into object storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendStage {
    Unsent,
    Begun,
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
        directory.canonicalize()
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

    /// Returns the numbers of the complete checkpoints that were not found damaged: those of the storage, and the host's own
    /// that were not sent as the container was killed before.
    pub(super) fn complete_numbers(&self) -> io::Result<Vec<u64>> {
        let mut own = self.numbers("")?;
        let Some(objects) = self.objects()? else {
            own.retain(|number| !is_damaged(&self.complete(*number)));
            return Ok(own);
        };
        let names = objects.storage.names(objects.name)?;
        let (mut all, claimed) = (sound_numbers(&names), numbers_of(&names, WRITING));
        // Without its claim it is of a place that was emptied since.
        let unsent = |n: &u64| claimed.contains(n) && self.complete(*n).join(UNSENT).exists();
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
        objects.last(&[COMPLETE, WRITING, REMOVING, DAMAGED_THERE, KEPT])
    }

    /// Claims the number of a new checkpoint; false: another host has it.
    pub(super) fn claim(&self, number: u64, partial: &Path) -> io::Result<bool> {
        let Some(objects) = self.objects()? else {
            return Ok(true);
        };
        File::create(partial.join(UNSENT))?;
        let host = super::lease::this_host();
        let claim = objects.numbered(WRITING, number);
        if !objects.storage.create(&claim, host.as_bytes())? {
            return Ok(false);
        }
        let again = objects.storage.create(&claim, host.as_bytes());
        let is_own = match again {
            // The storage ignores the condition.
            Ok(true) => Err(io::Error::other(
                "this storage ignores `If-None-Match`: two containers could write one checkpoint; use another",
            )),
            // The request may have reached the storage when another host's checkpoint of this number was complete.
            Ok(false) => objects
                .last(&[COMPLETE, REMOVING, DAMAGED_THERE, KEPT])
                .map(|last| last < number),
            Err(e) => Err(e),
        };
        if !matches!(is_own, Ok(true))
            && let Err(e) = objects.storage.remove(&claim)
        {
            tracing::warn!("{claim}: {e}");
        }
        is_own
    }

    /// Gives a number up of which nothing was sent. Else the claim stays for a day, as what is under way must not reach the next
    /// one, and with it the files.
    pub(super) fn unclaim(&self, partial: &PartialCheckpoint) {
        let given_up = self.objects().and_then(|objects| match objects {
            Some(objects) if partial.stage.get() == SendStage::Unsent => {
                copies::release(&objects, partial.number, &partial.path)?;
                let claim = objects.numbered(WRITING, partial.number);
                objects.storage.remove(&claim)
            }
            _ => Ok(()),
        });
        if let Err(e) = given_up {
            tracing::warn!("{}: not removed: {e}", partial.shown());
        }
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
        if listing.upon.is_none() {
            copies::release(&objects, number, path)?;
        }
        let files = listing.files.iter().map(|file| Transfer {
            key: objects.key(&format!("{number:06}/{}", file.name)),
            file: path.join(&file.name),
            bytes: file.bytes,
        });
        let files: Vec<_> = files.collect();
        partial.stage.set(SendStage::Begun);
        let since = Instant::now();
        objects.storage.send(&files, stops)?;
        tracing::info!(
            "{}/{number:06}: {} MiB sent in {} ms",
            self.shown(),
            listing.bytes() >> 20,
            since.elapsed().as_millis()
        );
        Ok(Some(listing))
    }

    /// Returns the checkpoint of the place that this one builds upon: the one that was chosen, if its table says so.
    fn upon(&self, checkpoint: &Path) -> io::Result<Option<String>> {
        let Some(table) = if_there(fs::read(checkpoint.join(names::VRAM_INDEX)))? else {
            return Ok(None);
        };
        let wanted = WantedParent::of(&table, Some(checkpoint)).map_err(io::Error::other)?;
        let Some(wanted) = wanted else {
            return Ok(None);
        };
        let elsewhere = || io::Error::other("what it builds upon is not in the place");
        let upon = copies::upon(checkpoint)?.ok_or_else(elsewhere)?;
        let chosen = copies::root(checkpoint).join(&upon).canonicalize()?;
        let found = wanted.find(&[]).and_then(|at| at.canonicalize().ok());
        match found == Some(chosen) {
            true => Ok(Some(upon)),
            false => Err(elsewhere()),
        }
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
        let made = objects.storage.create(&complete, &text);
        // A request that is repeated finds what the first one made.
        if !matches!(made, Ok(true))
            && objects.storage.read(&complete, MAX_LISTING).ok().as_ref() != Some(&text)
        {
            let other = || io::Error::other(format!("{complete}: another host has made it"));
            return Err(made.err().unwrap_or_else(other));
        }
        copies::note_identity(path, &text)?;
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
        objects.sweep()?;
        let Some(keep) = keep else { return Ok(()) };
        let kept = objects.numbers(KEPT)?.pop().unwrap_or(0);
        let sound = objects.sound()?;
        let stay = &sound[sound.len().saturating_sub(keep)..];
        let mut old = objects.numbers(COMPLETE)?;
        old.retain(|number| *number > kept && !stay.contains(number));
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

    pub(super) fn is_damaged_there(&self, number: u64) -> io::Result<bool> {
        let objects = self.objects()?;
        objects.map_or(Ok(false), |objects| objects.is_there(DAMAGED_THERE, number))
    }

    /// Takes a damaged checkpoint from those that are restored and built upon. It stays for those that build upon it already.
    pub(super) fn set_aside_there(&self, number: u64) -> io::Result<()> {
        let Some(objects) = self.objects()? else {
            return Ok(());
        };
        let key = objects.numbered(COMPLETE, number);
        let Some(text) = if_there(objects.storage.read(&key, MAX_LISTING))? else {
            return Ok(());
        };
        objects
            .storage
            .write(&objects.numbered(DAMAGED_THERE, number), &text)?;
        if objects.is_needed(number)? {
            return Ok(());
        }
        objects.storage.remove(&key)
    }
}

#[cfg(test)]
mod tests;
