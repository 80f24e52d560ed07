//! Brings checkpoints of object storage to this host, and chooses what a new one builds upon.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use cryopod_archive::format::names;
use cryopod_host::files::{if_there, read_bounded};
use nix::fcntl::Flock;

use super::objects::{
    COMPLETE, MAX_LISTING, NamedObjects, ObjectFile, ObjectListing, REMOVING, UNSENT,
    name_and_number,
};
use super::storage::{Stops, Transfer};
use super::{Place, common_beginning, is_name, lock_file, remove_all};

/// So long a copy stays that nobody uses.
const UNUSED: Duration = Duration::from_secs(24 * 3600);
/// The file in a copy of which only the tables were fetched: another checkpoint builds upon it.
const TABLES_ONLY: &str = ".tables-only";
/// The file that has the `NAME/NUMBER` upon which one builds, or may build.
const UPON: &str = ".upon";
/// The file that says of what it is a copy, and since which boot: what was written before may be lost.
const IDENTITY: &str = ".copy-of";
const FETCHED: &str = ".fetched-";
/// The file that is locked while a checkpoint of the name is fetched.
const FETCHING: &str = ".fetching";
/// What another checkpoint builds upon: the tables, and not the shards.
const TABLES: [&str; 2] = [names::METADATA, names::VRAM_INDEX];
const MAX_DIGESTS: u64 = 64 << 20;
const MAX_UPON: u64 = 512;
/// So many other names are asked for a checkpoint to build upon.
const MAX_OTHERS: usize = 16;
/// And so many checkpoints of each.
const MAX_NUMBERS: usize = 4;
/// A stop has little time: without a parent it sends all.
const CHOICE_LIMIT: Duration = Duration::from_secs(3);
/// The longest chain of checkpoints that build upon each other.
const MAX_ANCESTORS: usize = 1024;

/// What became of a checkpoint that this host wants.
#[derive(Debug, PartialEq, Eq)]
pub enum FetchOutcome {
    /// It was here already, or the place is a directory.
    Here,
    Fetched,
    /// It is not there any more.
    Gone,
    Damaged(String),
}

/// Returns the host's directory of the place that an image directory is in.
pub(super) fn root(images: &Path) -> &Path {
    images.ancestors().nth(2).unwrap_or(images)
}

/// Returns what was chosen for a checkpoint to build upon, or what it builds upon.
pub(super) fn upon(images: &Path) -> io::Result<Option<String>> {
    let Some(text) = if_there(read_bounded(&images.join(UPON), MAX_UPON))? else {
        return Ok(None);
    };
    let text = String::from_utf8(text).map_err(io::Error::other)?;
    match name_and_number(&text) {
        Some(_) => Ok(Some(text)),
        None => Err(io::Error::other(format!("{text:?} is no NAME/NUMBER"))),
    }
}

/// Returns the directory upon which a checkpoint for object storage may build; `None`: it is for a directory.
pub fn parent_of_partial(images: &Path) -> Option<Option<PathBuf>> {
    images.join(UNSENT).exists().then(|| {
        let upon = upon(images).ok().flatten();
        upon.map(|upon| root(images).join(upon))
    })
}

/// Returns the host's copies of what a checkpoint of object storage builds upon.
pub fn ancestors(checkpoint: &Path) -> impl Iterator<Item = PathBuf> {
    let above = |copy: &PathBuf| Some(root(copy).join(upon(copy).ok()??));
    std::iter::successors(above(&checkpoint.to_owned()), above).take(MAX_ANCESTORS)
}

/// Removes a copy; false: somebody uses it.
fn remove_unused(copy: &Path) -> bool {
    let lock = match lock_file(&copy.join(names::METADATA)) {
        Ok(None) => return false,
        lock => lock,
    };
    // Under its name it is whole.
    let name = copy.file_name().unwrap_or_default().display();
    let old = copy.with_file_name(format!("{FETCHED}unused-{name}"));
    let removed = fs::rename(copy, &old).and_then(|()| remove_all(&old));
    drop(lock);
    if_there(removed).is_ok()
}

/// Gives up what a checkpoint was to build upon.
pub(super) fn release(objects: &NamedObjects<'_>, number: u64, partial: &Path) -> io::Result<()> {
    let Some(upon) = upon(partial)? else {
        return Ok(());
    };
    objects.storage.remove(&objects.need(number, &upon)?)?;
    fs::remove_file(partial.join(UPON))
}

/// Notes of which checkpoint a directory is a copy.
pub(super) fn note_identity(copy: &Path, listing: &[u8]) -> io::Result<()> {
    fs::write(copy.join(IDENTITY), identity(listing))
}

fn identity(listing: &[u8]) -> Vec<u8> {
    let mut identity = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    identity.extend(listing);
    identity
}

impl Place {
    /// Chooses what a new checkpoint may build upon, has that stay, and brings its tables: the newest of the name, else of the
    /// name that has most in common with it.
    pub(super) fn choose_parent(&self, number: u64, partial: &Path) {
        let chosen = self.objects().and_then(|objects| match objects {
            None => Ok(()),
            Some(objects) => {
                self.sweep_copies();
                let parent = self.reserved_parent(&objects, number)?;
                parent.map_or(Ok(()), |upon| fs::write(partial.join(UPON), upon))
            }
        });
        if let Err(e) = chosen {
            tracing::warn!("{}: this checkpoint builds upon none: {e}", self.shown());
        }
    }

    fn reserved_parent(
        &self,
        objects: &NamedObjects<'_>,
        number: u64,
    ) -> io::Result<Option<String>> {
        let until = Instant::now() + CHOICE_LIMIT;
        for (name, parent) in self.parents(objects, until)? {
            let other = self.of_name(&name);
            let Some(others) = other.objects()? else {
                break;
            };
            let upon = format!("{name}/{parent:06}");
            let need = objects.need(number, &upon)?;
            objects.storage.write(&need, b"")?;
            let stays = others
                .is_there(REMOVING, parent)
                .and_then(|removing| Ok(!removing && others.is_there(COMPLETE, parent)?));
            let brought = match stays {
                Ok(true) => other.bring(parent, false, &|| Instant::now() > until),
                Ok(false) => Ok(FetchOutcome::Gone),
                Err(e) => Err(e),
            };
            if matches!(brought, Ok(FetchOutcome::Here | FetchOutcome::Fetched)) {
                return Ok(Some(upon));
            }
            objects.storage.remove(&need)?;
            tracing::info!("{upon}: no checkpoint builds upon it now: {brought:?}");
        }
        Ok(None)
    }

    fn parents(
        &self,
        objects: &NamedObjects<'_>,
        until: Instant,
    ) -> io::Result<Vec<(String, u64)>> {
        if let Some(newest) = objects.sound()?.pop() {
            return Ok(vec![(objects.name.to_owned(), newest)]);
        }
        let common = |other: &String| common_beginning(objects.name, other);
        let mut names = objects.storage.directories("")?;
        names.retain(|other| is_name(other) && other != objects.name && common(other).is_some());
        names.sort_by_key(|other| std::cmp::Reverse(common(other)));
        let mut found = Vec::new();
        for name in names.into_iter().take(MAX_OTHERS) {
            let other = self.of_name(&name);
            let Some(others) = other.objects()? else {
                break;
            };
            let numbers = others.sound()?.into_iter().rev();
            for number in numbers.take(MAX_NUMBERS) {
                if Instant::now() > until {
                    return Ok(found);
                }
                // As in a directory: only upon one that needs no other.
                if others
                    .listing(number)
                    .is_ok_and(|listing| listing.upon.is_none())
                {
                    found.push((name, number));
                    return Ok(found);
                }
            }
        }
        Ok(found)
    }

    /// Brings a checkpoint to this host, with all that it builds upon.
    ///
    /// # Errors
    /// The storage does not answer in time, or there is no space.
    pub fn fetch(&self, checkpoint: &Path, stops: Stops<'_>) -> Result<FetchOutcome, String> {
        if self.remote.is_none() {
            return Ok(FetchOutcome::Here);
        }
        let number = checkpoint.file_name();
        let number = number.and_then(|name| name.to_str()?.parse().ok());
        let number = number.ok_or_else(|| format!("{}: no number", checkpoint.display()))?;
        self.sweep_copies();
        let failed = |e: io::Error| match e.kind() {
            ErrorKind::Interrupted => format!(
                "{}/{number:06}: not fetched in time; raise limits.restore_s",
                self.shown()
            ),
            _ => format!("{}/{number:06}: {e}", self.shown()),
        };
        if !checkpoint.join(UNSENT).exists() {
            return self.bring(number, true, stops).map_err(failed);
        }
        // What it builds upon may have come as tables alone.
        let upon = upon(checkpoint).map_err(failed)?;
        let Some((name, parent)) = upon.as_deref().and_then(name_and_number) else {
            return Ok(FetchOutcome::Here);
        };
        let brought = self.of_name(name).bring(parent, true, stops);
        Ok(match brought.map_err(failed)? {
            FetchOutcome::Gone => FetchOutcome::Damaged(format!("{name}/{parent:06} is gone")),
            other => other,
        })
    }

    /// Removes the host's copies of a checkpoint and of all that it builds upon, unless others use them; false: there is
    /// nothing to fetch anew.
    pub fn discard_copy(&self, checkpoint: &Path) -> bool {
        if self.remote.is_none() {
            return false;
        }
        let all = std::iter::once(checkpoint.to_owned()).chain(ancestors(checkpoint));
        let all: Vec<_> = all.filter(|copy| !copy.join(UNSENT).exists()).collect();
        !all.is_empty() && all.iter().all(|copy| remove_unused(copy))
    }

    fn bring(&self, number: u64, whole: bool, stops: Stops<'_>) -> io::Result<FetchOutcome> {
        let (mut place, mut at) = (self.clone(), number);
        let mut outcome = FetchOutcome::Here;
        for _ in 0..MAX_ANCESTORS {
            if !whole && place.is_damaged_there(at)? {
                let damaged = format!("{}/{at:06}", place.shown());
                return Ok(FetchOutcome::Damaged(damaged));
            }
            match place.bring_one(at, whole, stops) {
                Ok(true) => outcome = FetchOutcome::Fetched,
                Ok(false) => {}
                Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::InvalidData) => {
                    let objects = self.objects()?;
                    let is_there = |objects: NamedObjects<'_>| objects.is_there(COMPLETE, number);
                    return Ok(match objects.map(is_there).transpose()? {
                        Some(true) => {
                            FetchOutcome::Damaged(format!("{}/{at:06}: {e}", place.shown()))
                        }
                        _ => FetchOutcome::Gone,
                    });
                }
                Err(e) => return Err(e),
            }
            let Some(upon) = upon(&place.complete(at))? else {
                return Ok(outcome);
            };
            let (name, parent) = name_and_number(&upon).unwrap_or_default();
            (place, at) = (self.of_name(name), parent);
        }
        Ok(FetchOutcome::Damaged(
            "a chain of checkpoints without end".into(),
        ))
    }

    /// Brings one checkpoint; false: it was here.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::InvalidData`]: it is not, or not whole, in the storage.
    fn bring_one(&self, number: u64, whole: bool, stops: Stops<'_>) -> io::Result<bool> {
        self.make()?;
        let fetching = self.directory.join(FETCHING);
        // A checkpoint does not wait for what it may build upon.
        let _one_at_a_time = wait_for_lock(&fetching, &|| !whole || stops())?;
        let Some(objects) = self.objects()? else {
            return Ok(false);
        };
        let key = objects.numbered(COMPLETE, number);
        let text = objects.storage.read(&key, MAX_LISTING)?;
        let copy = self.complete(number);
        let noted = if_there(read_bounded(&copy.join(IDENTITY), MAX_LISTING + 64))?;
        let is_here = noted.is_some_and(|noted| noted == identity(&text));
        if is_here && !(whole && copy.join(TABLES_ONLY).exists()) {
            let used = File::options().append(true).open(copy.join(IDENTITY));
            let _ = used.and_then(|file| file.set_modified(SystemTime::now()));
            return Ok(false);
        }
        let listing = ObjectListing::parse(&key, &text)?;
        let made = self.directory.join(format!("{FETCHED}{number:06}"));
        if_there(fs::remove_dir_all(&made))?;
        DirBuilder::new().mode(0o700).create(&made)?;
        let filled = fill(&objects, number, &listing, &made, whole, stops)
            .and_then(|()| note_identity(&made, &text));
        if let Err(e) = filled {
            let _ = remove_all(&made);
            return Err(e);
        }
        if copy.exists() {
            let old = self.directory.join(format!("{FETCHED}old-{number:06}"));
            fs::rename(&copy, &old)?;
            fs::rename(&made, &copy)?;
            remove_all(&old)?;
        } else {
            fs::rename(&made, &copy)?;
        }
        Ok(true)
    }

    fn of_name(&self, name: &str) -> Self {
        Self {
            directory: self.directory.with_file_name(name),
            remote: self.remote.clone(),
        }
    }

    /// Removes the host's copies that nobody has used for [`UNUSED`].
    fn sweep_copies(&self) {
        let root = self.directory.parent().unwrap_or(&self.directory);
        let entries = |path: &Path| fs::read_dir(path).into_iter().flatten().flatten();
        let age = |path: &Path| {
            let written = fs::symlink_metadata(path).and_then(|meta| meta.modified());
            let age = SystemTime::now().duration_since(written.ok()?);
            age.ok()
        };
        for entry in entries(root).flat_map(|name| entries(&name.path())) {
            let (path, name) = (entry.path(), entry.file_name());
            let is_part = name.as_encoded_bytes().starts_with(FETCHED.as_bytes());
            let record = match is_part {
                true => path.clone(),
                false => path.join(IDENTITY),
            };
            if age(&record).is_none_or(|age| age < UNUSED) {
                continue;
            }
            let removed = match is_part {
                true => remove_all(&path).is_ok(),
                false => remove_unused(&path),
            };
            if removed {
                tracing::info!("{}: removed, it is in object storage", path.display());
            }
        }
    }
}

/// Fetches the files of a checkpoint into a new directory.
fn fill(
    objects: &NamedObjects<'_>,
    number: u64,
    listing: &ObjectListing,
    made: &Path,
    whole: bool,
    stops: Stops<'_>,
) -> io::Result<()> {
    let transfer = |file: &ObjectFile| Transfer {
        key: objects.key(&format!("{number:06}/{}", file.name)),
        file: made.join(&file.name),
        bytes: file.bytes,
    };
    let is_wanted = |file: &&ObjectFile| whole || TABLES.contains(&file.name.as_str());
    let (now, later): (Vec<_>, Vec<_>) = listing.files.iter().partition(is_wanted);
    let now: Vec<_> = now.into_iter().map(transfer).collect();
    let bytes = now
        .iter()
        .map(|file| file.bytes)
        .fold(0, u64::saturating_add);
    let disk = rustix::fs::statvfs(made)?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < bytes {
        return Err(io::Error::new(
            ErrorKind::StorageFull,
            format!(
                "{}: {} MiB are free, it needs {}",
                root(made).display(),
                free >> 20,
                bytes >> 20
            ),
        ));
    }
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
    if let Some(text) = if_there(objects.storage.read(&digests, MAX_DIGESTS))? {
        fs::write(made.join(names::LISTING), text)?;
    }
    let Some(upon) = &listing.upon else {
        return Ok(());
    };
    match name_and_number(upon) {
        Some(_) => fs::write(made.join(UPON), upon),
        None => Err(io::Error::new(
            ErrorKind::InvalidData,
            format!("{upon:?} is no NAME/NUMBER"),
        )),
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
