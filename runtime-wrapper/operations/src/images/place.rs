//! Keeps checkpoints of containers in a directory that hosts may share, or in object storage ([`remote`]).
//!
//! A container's checkpoints are `PLACE/NAME/NUMBER`; the highest number is the newest. One that is being written is
//! `.partial-NUMBER`, and gets its name when it is complete; one that is found damaged is `.damaged-NUMBER`,
//! or has a file `.damaged` as long as others need it. NAME is the container's own choice ([`name`]), as the next
//! host makes a container with another id.

pub mod copies;
pub mod integrity;
pub mod lease;
mod objects;
pub mod prune;
pub mod remote;
pub mod renewal;
pub mod storage;

use std::cell::Cell;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use cryopod_archive::format::names;
use cryopod_host::files::if_there;
use cryopod_host::spec::Spec;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::config::restore::{Asker, OBJECTS, RestoreOptions, Rule, bucket_and_prefix};
use crate::images::owners;
use objects::UNSENT;
use remote::{RemotePlace, SendStage};

/// Stands before a place where a container names its checkpoint, for the newest of the container's name.
pub const NEWEST: &str = "latest:";
/// The container's name in its place, where its id will not do.
const NAME: &str = "dev.cryopod.name";
/// What containerd's CRI and CRI-O say of a pod's container: namespaces may have pods of one name.
const POD: [[&str; 3]; 2] = [
    [
        "io.kubernetes.cri.sandbox-namespace",
        "io.kubernetes.cri.sandbox-name",
        "io.kubernetes.cri.container-name",
    ],
    [
        "io.kubernetes.pod.namespace",
        "io.kubernetes.pod.name",
        "io.kubernetes.container.name",
    ],
];
const MAX_NAME: usize = 200;
const PARTIAL: &str = ".partial-";
const DAMAGED: &str = ".damaged-";
/// The file in a damaged checkpoint that keeps its name.
const DAMAGED_HERE: &str = ".damaged";
/// A file that has not got its name yet.
const NEW: &str = ".new-";
const CLOCK: &str = ".clock-";
/// The file in it that its writer has locked. NFS locks files for all hosts, and directories only for one.
const WRITER: &str = ".writer";
/// A complete checkpoint without its name after this time has lost its writer, and so has one without its lock.
const RENAME_LIMIT: Duration = Duration::from_secs(60);
/// What another host has begun is left alone for so long, also where it seems to have no lock.
const OF_ANOTHER_HOST: Duration = Duration::from_secs(24 * 3600);
/// How many others may take the next number first.
const TRIES: u64 = 100;

/// A container's wish, by an annotation, or by a variable of its process where the engine passes no annotations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting<'a> {
    pub value: &'a str,
    /// An image can bring the variable.
    pub by_variable: bool,
}

/// Returns the value of an annotation `dev.cryopod.a-b.c`, or of the variable `CRYOPOD_A_B_C`.
pub fn setting<'a>(spec: &'a Spec, annotation: &str) -> Option<Setting<'a>> {
    let set = |value, by_variable| Setting { value, by_variable };
    let by_annotation = spec.annotation(annotation).map(|value| set(value, false));
    by_annotation.or_else(|| {
        let name = annotation.strip_prefix("dev.").unwrap_or(annotation);
        let name = name.replace(['.', '-'], "_").to_uppercase();
        spec.variable(&name).map(|value| set(value, true))
    })
}

/// Returns true if a variable sets one of these, or what every place's container may set. A name that an image brings
/// would be another container's, and without the lease that one would run twice.
pub fn by_variable(spec: &Spec, annotations: &[&str]) -> bool {
    let all = annotations.iter().chain(&[NAME]).chain(&lease::SETTINGS);
    let mut set = all.filter_map(|annotation| setting(spec, annotation));
    set.any(|set| set.by_variable)
}

/// Returns a whole number of seconds that the container sets.
pub fn seconds(spec: &Spec, annotation: &str, default: u64) -> Result<Duration, String> {
    let Some(set) = setting(spec, annotation) else {
        return Ok(Duration::from_secs(default));
    };
    let seconds = set.value.parse().ok().filter(|s| (1..=604_800).contains(s));
    seconds.map(Duration::from_secs).ok_or_else(|| {
        format!(
            "{annotation}: {:?} is not within 1 second and 7 days",
            set.value
        )
    })
}

/// Returns the container's name in a place: its own choice, `NAMESPACE.POD.CONTAINER`, or its id.
pub fn name(spec: &Spec, id: &str) -> Result<String, String> {
    let chosen = setting(spec, NAME).map(|set| set.value.to_owned());
    let of_pod = |keys: [&str; 3]| {
        let parts = keys.into_iter().map(|key| spec.annotation(key));
        Some(parts.collect::<Option<Vec<_>>>()?.join("."))
    };
    let name = chosen.or_else(|| POD.into_iter().find_map(of_pod));
    let name = name.unwrap_or_else(|| id.to_owned());
    match is_name(&name) {
        true => Ok(name),
        false => Err(format!(
            "{NAME}: {name:?} is not a name of letters, digits, `.`, `_` and `-`"
        )),
    }
}

/// Returns true if containers can have this name in a place: one component of a path.
fn is_name(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    let first = name.bytes().next();
    first.is_some_and(|b| b.is_ascii_alphanumeric())
        && name.len() <= MAX_NAME
        && name.bytes().all(plain)
}

/// Returns how many letters two names begin with, if that is more than half of the first: `web-1` is a replica of `web-2`,
/// and not of `worker`.
pub fn common_beginning(name: &str, other: &str) -> Option<usize> {
    let pairs = name.bytes().zip(other.bytes());
    let common = pairs.take_while(|(a, b)| a == b).count();
    (common * 2 > name.len()).then_some(common)
}

/// Returns the path without symbolic links, if it is below one of the directories.
pub fn allowed(
    path: &Path,
    allow: &[&Path],
    not_allowed: impl Fn() -> String,
) -> Result<PathBuf, String> {
    may_be_allowed(path, allow, not_allowed)?;
    let real = path.canonicalize();
    let real = real.map_err(|e| format!("it cannot be opened: {e}"))?;
    let mut directories = allow.iter().filter_map(|d| d.canonicalize().ok());
    if !directories.any(|d| real.starts_with(d)) {
        return Err("a link there leads out of the directories of `restore.allow`".into());
    }
    Ok(real)
}

/// The same as far as the path alone tells.
fn may_be_allowed(
    path: &Path,
    allow: &[&Path],
    not_allowed: impl Fn() -> String,
) -> Result<(), String> {
    if !path.is_absolute() || path.components().any(|c| c == Component::ParentDir) {
        return Err("that is no absolute path".into());
    }
    match allow.iter().any(|directory| path.starts_with(directory)) {
        true => Ok(()),
        false => Err(not_allowed()),
    }
}

/// Returns the place and the name of a checkpoint that is being written to one.
pub fn name_of_partial(images: &Path) -> Option<(&Path, &str)> {
    let number = images.file_name()?.to_str()?;
    let directory = images.parent().filter(|_| number.starts_with(PARTIAL))?;
    Some((directory.parent()?, directory.file_name()?.to_str()?))
}

/// A place that a container names.
#[derive(Debug, Clone, Copy)]
pub struct PlaceRequest<'a> {
    pub place: &'a str,
    pub asker: Asker<'a>,
    pub options: &'a RestoreOptions,
    /// The configuration's key of these options.
    pub key: &'static str,
}

impl PlaceRequest<'_> {
    /// Checks what can be checked without touching the place, which may hang.
    pub fn check(&self) -> Result<(), String> {
        if self.is_remote() {
            return self.check_remote();
        }
        let refused = || self.asker.not_allowed("directory", self.key);
        may_be_allowed(Path::new(self.place), &self.directories(), refused)
            .map_err(|why| format!("{}: {why}", self.place))
    }

    /// Opens a container's part of the place.
    pub fn open(&self, name: &str) -> Result<Place, String> {
        if self.is_remote() {
            return self.open_remote(name);
        }
        let refused = || self.asker.not_allowed("directory", self.key);
        let root = allowed(Path::new(self.place), &self.directories(), refused)
            .and_then(|root| owners::check_place(&root).map(|()| root))
            .map_err(|why| format!("{}: {why}", self.place))?;
        Ok(Place {
            directory: root.join(name),
            remote: None,
        })
    }

    fn is_remote(&self) -> bool {
        self.place.starts_with(OBJECTS)
    }

    fn check_remote(&self) -> Result<(), String> {
        bucket_and_prefix(self.place)?;
        let mut rules = self.asker.rules(self.options);
        match rules.any(|rule| rule.has_object(self.place)) {
            true => Ok(()),
            false => {
                let why = self.asker.not_allowed("bucket", self.key);
                Err(format!("{}: {why}", self.place))
            }
        }
    }

    fn open_remote(&self, name: &str) -> Result<Place, String> {
        self.check_remote()?;
        let remote = RemotePlace::new(self.place);
        let root = remote
            .directory()
            .map_err(|e| format!("{}: {e}", self.place))?;
        owners::check_place(&root)?;
        Ok(Place {
            directory: root.join(name),
            remote: Some(remote),
        })
    }

    fn directories(&self) -> Vec<&Path> {
        let rules = self.asker.rules(self.options);
        rules.filter_map(Rule::directory).collect()
    }
}

/// A container's checkpoints in a place.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Place {
    /// Where the files are, also of a place in object storage.
    directory: PathBuf,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    remote: Option<RemotePlace>,
}

impl Place {
    /// Returns true if the place is in object storage.
    pub fn is_remote(&self) -> bool {
        self.remote.is_some()
    }

    /// Makes the directory if it is missing.
    fn make(&self) -> io::Result<()> {
        let made = DirBuilder::new().mode(0o700).create(&self.directory);
        match made {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made,
        }
    }

    /// Returns the time by the place's own clock: those of its hosts may differ.
    fn now(&self) -> io::Result<SystemTime> {
        let probe = self
            .directory
            .join(format!("{CLOCK}{}", std::process::id()));
        let now = File::create(&probe).and_then(|file| file.metadata()?.modified());
        let _ = fs::remove_file(probe);
        now
    }

    /// How long ago a file there was written; none if that lies in the future.
    fn age(&self, file: &Path) -> io::Result<Duration> {
        let written = fs::symlink_metadata(file)?.modified()?;
        Ok(self.now()?.duration_since(written).unwrap_or_default())
    }

    /// Returns the numbers of the entries with this prefix, in ascending order.
    fn numbers(&self, prefix: &str) -> io::Result<Vec<u64>> {
        let entries = if_there(fs::read_dir(&self.directory))?;
        let mut found = Vec::new();
        for entry in entries.into_iter().flatten() {
            let name = entry?.file_name();
            let digits = name.to_str().and_then(|name| name.strip_prefix(prefix));
            let digits = digits.filter(|d| d.bytes().all(|b| b.is_ascii_digit()));
            found.extend(digits.and_then(|d| d.parse::<u64>().ok()));
        }
        found.sort_unstable();
        Ok(found)
    }

    fn complete(&self, number: u64) -> PathBuf {
        self.directory.join(format!("{number:06}"))
    }

    fn partial(&self, number: u64) -> PathBuf {
        self.directory.join(format!("{PARTIAL}{number:06}"))
    }

    /// Returns the complete checkpoints, the newest first.
    pub fn newest_first(&self) -> Result<Vec<PathBuf>, String> {
        let found = self.numbers(PARTIAL).and_then(|partial| {
            for number in partial {
                self.adopt(number);
            }
            self.complete_numbers()
        });
        let numbers = found.map_err(|e| format!("{}: {e}", self.shown()))?;
        let newest_first = numbers.iter().rev().map(|number| self.complete(*number));
        Ok(newest_first.collect())
    }

    /// Takes its name from a damaged checkpoint. One that is in use, or upon whose GPU memory another builds, keeps it, and is
    /// restored and built upon no more. Returns where it is now.
    pub fn set_aside(&self, checkpoint: &Path) -> PathBuf {
        let name = checkpoint.file_name().unwrap_or_default();
        let aside = self
            .directory
            .join(format!("{DAMAGED}{}", name.to_string_lossy()));
        let in_use = matches!(lock_file(&checkpoint.join(names::METADATA)), Ok(None));
        let stays = in_use || self.is_needed(checkpoint).unwrap_or(true);
        let is_aside = !stays && fs::rename(checkpoint, &aside).is_ok();
        let number = name.to_str().and_then(|name| name.parse().ok());
        if let (Some(number), true) = (number, self.is_remote()) {
            if let Err(e) = self.set_aside_there(number) {
                tracing::warn!("{}: {e}", self.shown());
            }
            return Path::new(&self.shown()).join(name);
        }
        if is_aside {
            return aside;
        }
        if let Err(e) = File::create(checkpoint.join(DAMAGED_HERE)) {
            tracing::warn!("{}: {e}", checkpoint.display());
        }
        checkpoint.to_owned()
    }

    /// Gives a complete checkpoint its name whose writer was killed before it could.
    fn adopt(&self, number: u64) {
        let partial = self.partial(number);
        let age = self.age(&partial.join(names::METADATA));
        let writer = partial.join(WRITER);
        let is_unsent = partial.join(UNSENT).exists();
        let is_dead = || {
            let is_own = fs::read_to_string(&writer).is_ok_and(|host| host == lease::this_host());
            (is_own || is_unsent) && matches!(lock_file(&writer), Ok(Some(_)))
        };
        // To object storage it is sent first, which may take long.
        let is_late = |age| age > RENAME_LIMIT && !is_unsent;
        if age.is_ok_and(|age| is_late(age) || is_dead()) {
            let _ = fs::remove_file(writer);
            let _ = fs::rename(partial, self.complete(number));
        }
    }

    /// Makes the directory of a new checkpoint. Removes what killed writers left.
    pub fn begin(&self) -> Result<PartialCheckpoint, String> {
        let made = self.make().and_then(|()| self.begin_next());
        made.map_err(|e| format!("{}: {e}", self.shown()))
    }

    fn begin_next(&self) -> io::Result<PartialCheckpoint> {
        self.sweep_files()?;
        let partial = self.numbers(PARTIAL)?;
        for number in &partial {
            self.adopt(*number);
            self.sweep(*number);
        }
        let last = self.last()?.max(self.last_there()?);
        let last = partial.last().map_or(last, |partial| last.max(*partial));
        for number in (last..).skip(1).take(TRIES as usize) {
            let path = self.partial(number);
            match DirBuilder::new().mode(0o700).create(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made?,
            }
            let lock = make_locked(&path.join(WRITER), lease::this_host().as_bytes())?;
            // Another host may have completed this number since it was looked for.
            if self.last()? >= number || !self.claim(number, &path)? {
                // NFS keeps a file that is open, and with it the directory.
                drop(lock);
                remove_all(&path)?;
                continue;
            }
            self.choose_parent(number, &path);
            return Ok(PartialCheckpoint {
                to: self.complete(number),
                path,
                lock,
                is_complete: false,
                number,
                place: self.clone(),
                stage: Cell::new(SendStage::Unsent),
            });
        }
        Err(io::Error::other("others take each next number"))
    }

    /// Returns the highest number that a complete checkpoint has or had here.
    fn last(&self) -> io::Result<u64> {
        let mut last = 0;
        for kind in ["", DAMAGED, prune::KEPT] {
            last = self.numbers(kind)?.pop().unwrap_or(0).max(last);
        }
        Ok(last)
    }

    /// Removes small files of killed processes.
    fn sweep_files(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let name = entry.file_name();
            let left = [NEW, CLOCK]
                .iter()
                .any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes()));
            if left && self.age(&entry.path()).is_ok_and(|age| age > RENAME_LIMIT) {
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(())
    }

    /// Removes an incomplete checkpoint that nobody writes any more.
    fn sweep(&self, number: u64) {
        let path = self.partial(number);
        let writer = path.join(WRITER);
        let text = fs::read_to_string(&writer).unwrap_or_default();
        let older = |limit| self.age(&path).is_ok_and(|age| age > limit);
        let abandoned = match lock_file(&writer) {
            // Another host's lock may be known there alone.
            Ok(lock) => lock.is_some() && (text == lease::this_host() || older(OF_ANOTHER_HOST)),
            Err(_) => older(RENAME_LIMIT),
        };
        if abandoned && !path.join(names::METADATA).exists() {
            let _ = remove_all(&path);
        }
    }
}

/// Returns true if a checkpoint was found damaged.
pub fn is_damaged(checkpoint: &Path) -> bool {
    let name = checkpoint.file_name().unwrap_or_default();
    name.as_encoded_bytes().starts_with(DAMAGED.as_bytes())
        || checkpoint.join(DAMAGED_HERE).exists()
}

/// Locks a file that exists against all others; `None`: another process has it locked. NFS wants it open for writing.
fn lock_file(path: &Path) -> io::Result<Option<Flock<File>>> {
    let file = File::options().read(true).write(true).open(path)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, e)) => Err(e.into()),
    }
}

/// Makes a file that is whole, durable and locked as soon as it has its name; `None`: there is one of this name.
fn make_locked(path: &Path, text: &[u8]) -> io::Result<Option<File>> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let mut file = tempfile::Builder::new()
        .prefix(NEW)
        .tempfile_in(directory)?;
    file.write_all(text)?;
    file.as_file().sync_all()?;
    // Not every server locks.
    let _ = rustix::fs::flock(file.as_file(), FlockOperation::NonBlockingLockExclusive);
    match file.persist_noclobber(path) {
        Ok(file) => Ok(Some(file)),
        Err(e) if e.error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(e) => Err(e.error),
    }
}

/// Removes a directory. NFS lets go of a file a moment after it is closed.
fn remove_all(directory: &Path) -> io::Result<()> {
    let until = Instant::now() + Duration::from_secs(5);
    loop {
        match fs::remove_dir_all(directory) {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(50));
            }
            removed => return removed,
        }
    }
}

/// A checkpoint that is being written. It is removed unless it is complete.
#[derive(Debug)]
pub struct PartialCheckpoint {
    path: PathBuf,
    to: PathBuf,
    /// Open as long as it is written: NFS keeps a file that is open, and with it the directory.
    lock: Option<File>,
    is_complete: bool,
    number: u64,
    place: Place,
    stage: Cell<SendStage>,
}

impl PartialCheckpoint {
    /// Has it removed: its container goes on.
    pub fn discard(&self) {
        if let Err(e) = fs::remove_file(self.path.join(names::METADATA)) {
            tracing::warn!("{}: {e}", self.path.display());
        }
    }

    /// Returns the image directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns where the checkpoint is when it is complete, for messages.
    pub fn shown(&self) -> String {
        format!("{}/{:06}", self.place.shown(), self.number)
    }

    /// Gives the checkpoint its name.
    ///
    /// # Errors
    /// It has none. Its metadata are there, so it is complete, and the next host to look does this.
    pub fn complete(mut self) -> io::Result<PathBuf> {
        self.is_complete = true;
        self.name()
    }

    fn name(&mut self) -> io::Result<PathBuf> {
        // In this order: nobody takes this process for dead.
        let _ = fs::remove_file(self.path.join(WRITER));
        drop(self.lock.take());
        let renamed = match fs::rename(&self.path, &self.to) {
            // Another host has done it.
            Err(e) if e.kind() == io::ErrorKind::NotFound && self.to.exists() => Ok(()),
            renamed => renamed,
        };
        let directory = self.to.parent().unwrap_or(Path::new("/"));
        if let Err(e) = File::open(directory).and_then(|directory| directory.sync_all()) {
            tracing::warn!("{}: {e}", directory.display());
        }
        renamed.map(|()| self.to.clone()).inspect_err(|e| {
            tracing::warn!(
                "{}: not yet {}: {e}",
                self.path.display(),
                self.to.display()
            )
        })
    }
}

impl Drop for PartialCheckpoint {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        // The container was lost after its checkpoint: nothing else is left of it.
        if self.path.join(names::METADATA).exists() {
            tracing::warn!("{}: kept, as it is complete", self.path.display());
            let _ = self.name();
            return;
        }
        self.place.unclaim(self);
        drop(self.lock.take());
        // Under that name the next checkpoint removes what is left when it is complete, and not before.
        let number = format!("{}{:06}", prune::REMOVED, self.number);
        let removed = self.place.directory.join(number);
        let path = match fs::rename(&self.path, &removed) {
            Ok(()) => &removed,
            Err(_) => &self.path,
        };
        if let Err(e) = remove_all(path) {
            tracing::warn!("{}: cannot be removed: {e}", path.display());
        }
    }
}

#[cfg(test)]
mod tests;
