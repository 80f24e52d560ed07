//! The objects of one name in a place: the checkpoints' listings, and the marks beside them.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use cryopod_archive::format::digest::Digest;
use cryopod_host::files::if_there;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::storage::ObjectStorage;
use super::{CLOCK, OF_ANOTHER_HOST, is_name, lease};

/// Of the listings that this version writes, and the newest that it reads.
const VERSION: u64 = 1;
pub(super) const COMPLETE: &str = "complete-";
pub(super) const WRITING: &str = "writing-";
pub(super) const REMOVING: &str = "removing-";
pub(super) const DAMAGED_THERE: &str = "damaged-";
const NEEDED: &str = "needed-";
const BY: &str = "-by-";
const PROBE: &str = ".probe-";
pub(super) const MAX_LISTING: u64 = 32 << 20;
const MAX_FILES: usize = 200_000;
/// The file in a checkpoint of the host's directory that is nowhere else yet.
pub(super) const UNSENT: &str = ".unsent";
/// No counter comes so far.
const MAX_NUMBER: u64 = 1 << 40;

/// The files of a checkpoint in object storage.
#[derive(Debug, Serialize, Deserialize)]
pub struct ObjectListing {
    version: u64,
    pub(super) files: Vec<ObjectFile>,
    /// The `NAME/NUMBER` that it builds upon.
    pub(super) upon: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ObjectFile {
    pub(super) name: String,
    pub(super) bytes: u64,
}

impl ObjectListing {
    /// Returns the listing of a checkpoint in the host's directory.
    pub(super) fn of(checkpoint: &Path, upon: Option<String>) -> io::Result<Self> {
        let mut files = Vec::new();
        for entry in fs::read_dir(checkpoint)? {
            let (entry, name) = entry.map(|entry| (entry.metadata(), entry.file_name()))?;
            let name = name.into_string().map_err(|_| ErrorKind::InvalidData)?;
            let (is_ours, meta) = (is_file_name(&name), entry?);
            if is_ours && meta.is_file() {
                let bytes = meta.len();
                files.push(ObjectFile { name, bytes });
            } else if is_ours && meta.is_dir() {
                let why = format!(
                    "{}: a directory, which is not sent",
                    checkpoint.join(name).display()
                );
                return Err(io::Error::other(why));
            }
        }
        if files.len() > MAX_FILES {
            return Err(io::Error::other(format!("more than {MAX_FILES} files")));
        }
        Ok(Self {
            version: VERSION,
            files,
            upon,
        })
    }

    /// Returns the size of all files.
    pub(super) fn bytes(&self) -> u64 {
        let sizes = self.files.iter().map(|file| file.bytes);
        sizes.fold(0, u64::saturating_add)
    }

    pub(super) fn parse(key: &str, text: &[u8]) -> io::Result<Self> {
        let invalid = |why: String| io::Error::new(ErrorKind::InvalidData, format!("{key}: {why}"));
        let read: Value = serde_json::from_slice(text).map_err(|e| invalid(e.to_string()))?;
        let version = read.get("version").and_then(Value::as_u64).unwrap_or(0);
        if version > VERSION {
            let why = format!("{key}: version {version}: update cryopod");
            return Err(io::Error::new(ErrorKind::Unsupported, why));
        }
        let read: Self = serde_json::from_value(read).map_err(|e| invalid(e.to_string()))?;
        let is_bad = |file: &&ObjectFile| !is_file_name(&file.name);
        match read.files.iter().find(is_bad) {
            _ if read.files.len() > MAX_FILES => Err(invalid("too many files".into())),
            Some(bad) => Err(invalid(format!("{:?} is no name of a file", bad.name))),
            None => Ok(read),
        }
    }
}

fn is_file_name(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains('/')
}

/// Splits `NAME/NUMBER`.
pub(super) fn name_and_number(text: &str) -> Option<(&str, u64)> {
    let (name, number) = text.split_once('/')?;
    let is_name = is_name(name);
    let is_number = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    (is_name && is_number).then(|| Some((name, number.parse().ok()?)))?
}

/// A name's objects.
pub(super) struct NamedObjects<'a> {
    pub(super) storage: &'a ObjectStorage,
    pub(super) name: &'a str,
}

impl NamedObjects<'_> {
    pub(super) fn key(&self, object: &str) -> String {
        format!("{}/{object}", self.name)
    }

    pub(super) fn numbered(&self, prefix: &str, number: u64) -> String {
        self.key(&format!("{prefix}{number:06}"))
    }

    /// Returns the numbers after this prefix, in ascending order.
    pub(super) fn numbers(&self, prefix: &str) -> io::Result<Vec<u64>> {
        let names = self.storage.names(self.name)?;
        Ok(numbers_of(&names, prefix))
    }

    /// Returns the highest number after one of these prefixes, or 0.
    pub(super) fn last(&self, prefixes: &[&str]) -> io::Result<u64> {
        let names = self.storage.names(self.name)?;
        let last = prefixes
            .iter()
            .filter_map(|prefix| numbers_of(&names, prefix).pop());
        Ok(last.max().unwrap_or(0))
    }

    /// Returns the numbers of the complete checkpoints that were not found damaged.
    pub(super) fn sound(&self) -> io::Result<Vec<u64>> {
        Ok(sound_numbers(&self.storage.names(self.name)?))
    }

    pub(super) fn listing(&self, number: u64) -> io::Result<ObjectListing> {
        let key = self.numbered(COMPLETE, number);
        ObjectListing::parse(&key, &self.storage.read(&key, MAX_LISTING)?)
    }

    pub(super) fn is_there(&self, prefix: &str, number: u64) -> io::Result<bool> {
        let written = self.storage.written(&self.numbered(prefix, number));
        Ok(if_there(written)?.is_some())
    }

    /// Returns the key of an object of this process.
    fn own_key(&self, prefix: &str) -> String {
        let host = Digest::of(lease::this_host().as_bytes());
        self.key(&format!(
            "{prefix}{}-{}",
            &host.hex()[..16],
            std::process::id()
        ))
    }

    /// Checks that the storage makes an object once: leases rely on it.
    pub(super) fn check_conditional_writes(&self) -> io::Result<()> {
        let probe = self.own_key(PROBE);
        self.storage.create(&probe, b"")?;
        let again = self.storage.create(&probe, b"");
        self.storage.remove(&probe)?;
        match again? {
            false => Ok(()),
            true => Err(io::Error::other(
                "this storage ignores `If-None-Match`, so it holds no leases and no new checkpoints; use another",
            )),
        }
    }

    /// How long ago an object was written, by the storage's clock.
    fn age(&self, object: &str) -> io::Result<Duration> {
        let written = self.storage.written(&self.key(object))?;
        let clock = self.own_key(CLOCK);
        self.storage.write(&clock, b"")?;
        let now = self.storage.written(&clock);
        let _ = self.storage.remove(&clock);
        Ok(now?.duration_since(written).unwrap_or_default())
    }

    pub(super) fn remove_files(&self, number: u64) -> io::Result<()> {
        let directory = self.key(&format!("{number:06}"));
        for file in self.storage.names(&directory)? {
            self.storage.remove(&format!("{directory}/{file}"))?;
        }
        Ok(())
    }

    /// Removes a checkpoint, unless another builds upon it.
    pub(super) fn remove(&self, number: u64) -> io::Result<()> {
        let removing = self.numbered(REMOVING, number);
        self.storage.write(&removing, b"")?;
        if self.is_needed(number)? {
            return self.storage.remove(&removing);
        }
        let upon = if_there(self.listing(number))?.and_then(|listing| listing.upon);
        self.storage.remove(&self.numbered(COMPLETE, number))?;
        self.remove_files(number)?;
        if let Some(upon) = upon {
            let _ = self.storage.remove(&self.need(number, &upon)?);
        }
        self.storage.remove(&removing)
    }

    /// Returns true if another checkpoint builds upon this one, or is being written.
    pub(super) fn is_needed(&self, number: u64) -> io::Result<bool> {
        let prefix = format!("{NEEDED}{number:06}{BY}");
        for object in self.storage.names(self.name)? {
            let Some(by) = object.strip_prefix(&prefix) else {
                continue;
            };
            let by = by
                .rsplit_once('-')
                .and_then(|(name, n)| Some((name, n.parse().ok()?)));
            let Some((name, number)) = by else { continue };
            let other = NamedObjects {
                storage: self.storage,
                name,
            };
            // In this order: it is made complete before its claim is removed.
            if other.is_there(WRITING, number)? || other.is_there(COMPLETE, number)? {
                return Ok(true);
            }
            self.storage.remove(&self.key(&object))?;
        }
        Ok(false)
    }

    /// Returns the key by which a checkpoint says upon which one it builds.
    pub(super) fn need(&self, number: u64, upon: &str) -> io::Result<String> {
        let Some((name, parent)) = name_and_number(upon) else {
            return Err(io::Error::other(format!("{upon:?} is no NAME/NUMBER")));
        };
        Ok(format!(
            "{name}/{NEEDED}{parent:06}{BY}{}-{number:06}",
            self.name
        ))
    }

    /// Finishes what killed processes began.
    pub(super) fn sweep(&self) -> io::Result<()> {
        let objects = self.storage.names(self.name)?;
        let complete = numbers_of(&objects, COMPLETE);
        for number in numbers_of(&objects, REMOVING) {
            if !complete.contains(&number) {
                self.remove(number)?;
            }
        }
        for number in numbers_of(&objects, WRITING) {
            let claim = format!("{WRITING}{number:06}");
            if complete.contains(&number) {
                self.storage.remove(&self.key(&claim))?;
            } else if if_there(self.age(&claim))?.is_some_and(|age| age > OF_ANOTHER_HOST) {
                self.remove_files(number)?;
                self.storage.remove(&self.key(&claim))?;
            }
        }
        Ok(())
    }
}

/// Returns the numbers of the complete checkpoints that were not found damaged.
pub(super) fn sound_numbers(names: &[String]) -> Vec<u64> {
    let damaged = numbers_of(names, DAMAGED_THERE);
    let mut complete = numbers_of(names, COMPLETE);
    complete.retain(|number| !damaged.contains(number));
    complete
}

pub(super) fn numbers_of(names: &[String], prefix: &str) -> Vec<u64> {
    let digits = names.iter().filter_map(|name| name.strip_prefix(prefix));
    let digits = digits.filter(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit()));
    let numbers = digits.filter_map(|d| d.parse().ok());
    let mut found: Vec<_> = numbers.filter(|n| *n < MAX_NUMBER).collect();
    found.sort_unstable();
    found
}

/// What `lease.rs` does with the leases of a place in object storage. The file of the same name in the host's directory
/// is the lock between processes of this host.
impl NamedObjects<'_> {
    pub(super) fn read_lease(&self, lease: &str, most: u64) -> io::Result<Vec<u8>> {
        self.storage.read(&self.key(lease), most)
    }

    pub(super) fn age_of_lease(&self, lease: &str) -> io::Result<Duration> {
        self.age(lease)
    }

    pub(super) fn make_lease(&self, lease: &str, text: &[u8]) -> io::Result<bool> {
        self.storage.create(&self.key(lease), text)
    }

    pub(super) fn remove_lease(&self, lease: &str) {
        if let Err(e) = self.storage.remove(&self.key(lease)) {
            tracing::warn!("{lease}: {e}");
        }
    }
}
