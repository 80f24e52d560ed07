//! Defines the entries of an archive, and checks their names.

use std::collections::BTreeMap;
use std::io::{self, Read};

use crate::error::Bad;
use crate::format::limits::Limits;
use crate::format::names;

/// The kind of an entry. A checkpoint archive has no others: devices, sockets and links of the container are inside
/// `rootfs-diff.tar`, which is a file here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryKind {
    File,
    Directory,
    /// CRIU's link `parent` to the images of a pre-dump, inside the archive.
    ParentLink {
        /// The target as the archive states it, relative.
        target: String,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Normalised name: relative, `/` between directories, no `.` and `..`.
    pub name: String,
    pub kind: EntryKind,
    pub size: u64,
    /// Permission bits, at most 0o777.
    pub mode: u32,
    /// The layer that it came from, in an image.
    pub layer: Option<usize>,
}

impl Entry {
    /// A directory that only its owner may use.
    pub(crate) fn directory(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            kind: EntryKind::Directory,
            size: 0,
            mode: 0o700,
            layer: None,
        }
    }

    /// A file that only its owner may use.
    pub(crate) fn file(name: impl Into<String>, size: u64) -> Self {
        Self {
            name: name.into(),
            kind: EntryKind::File,
            size,
            mode: 0o600,
            layer: None,
        }
    }

    pub fn is_file(&self) -> bool {
        self.kind == EntryKind::File
    }

    /// Reads its content into memory, within the limit of a small file.
    pub(crate) fn read_small(&self, reader: &mut dyn Read, limits: &Limits) -> io::Result<Vec<u8>> {
        let max = limits.small_file_bytes;
        if self.size > max {
            let bad = Bad::SmallFileTooLarge {
                name: self.name.clone(),
                bytes: self.size,
                max,
            };
            return Err(bad.into());
        }
        let mut text = Vec::new();
        reader.read_to_end(&mut text)?;
        Ok(text)
    }
}

/// Normalises a raw name; empty for the root of the archive (`.`, `./`).
pub(crate) fn clean_name(raw: &[u8], limits: &Limits) -> Result<String, Bad> {
    if raw.len() > limits.name_bytes {
        let start = String::from_utf8_lossy(&raw[..raw.len().min(60)]).into_owned();
        return Err(Bad::LongName {
            name: start,
            bytes: raw.len() as u64,
            max: limits.name_bytes,
        });
    }
    let name = std::str::from_utf8(raw)
        .map_err(|_| Bad::NotUtf8(String::from_utf8_lossy(raw).into_owned()))?;
    if name.is_empty() {
        return Err(Bad::EmptyName);
    }
    if name.chars().any(char::is_control) {
        return Err(Bad::ControlName(name.into()));
    }
    if name.starts_with('/') {
        return Err(Bad::AbsoluteName(name.into()));
    }
    let mut parts = Vec::new();
    for part in name.split('/') {
        match part {
            "" | "." => {}
            ".." => return Err(Bad::ParentName(name.into())),
            part if part.len() > 255 => {
                return Err(Bad::LongName {
                    name: part.chars().take(60).collect(),
                    bytes: part.len() as u64,
                    max: 255,
                });
            }
            part => parts.push(part),
        }
    }
    if parts.len() > limits.depth {
        return Err(Bad::TooDeep {
            name: name.into(),
            max: limits.depth,
        });
    }
    Ok(parts.join("/"))
}

/// Checks a symbolic link. Only CRIU's `parent` beside the images may exist, and it must lead to another top-level
/// directory of the archive.
pub(crate) fn check_link(name: &str, target: &[u8], limits: &Limits) -> Result<EntryKind, Bad> {
    let refused = || Bad::Symlink {
        name: name.into(),
        target: String::from_utf8_lossy(target).into_owned(),
    };
    let text = std::str::from_utf8(target).map_err(|_| refused())?;
    let (Some((directory, names::PARENT_LINK)), Some(rest)) =
        (name.rsplit_once('/'), text.strip_prefix("../"))
    else {
        return Err(refused());
    };
    let plain = clean_name(rest.as_bytes(), limits).map_err(|_| refused())?;
    if directory.contains('/') || plain.is_empty() || plain.contains('/') || plain == directory {
        return Err(refused());
    }
    Ok(EntryKind::ParentLink {
        target: text.into(),
    })
}

/// Records what an archive has held so far. Refuses duplicates, entries below a file, and anything over the limits.
#[derive(Debug)]
pub(crate) struct Ledger {
    limits: Limits,
    seen: BTreeMap<String, bool>,
    bytes: u64,
}

impl Ledger {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self {
            limits: limits.clone(),
            seen: BTreeMap::new(),
            bytes: 0,
        }
    }

    /// Adds an entry. Returns `false` for a directory that came before: each layer names its directories.
    pub(crate) fn take(&mut self, entry: &Entry) -> Result<bool, Bad> {
        let directory = entry.kind == EntryKind::Directory;
        match self.seen.get(&entry.name) {
            Some(true) if directory => return Ok(false),
            Some(_) => return Err(Bad::Duplicate(entry.name.clone())),
            None => {}
        }
        for (at, _) in entry.name.match_indices('/') {
            let parent = &entry.name[..at];
            match self.seen.get(parent) {
                Some(true) => {}
                Some(false) => {
                    return Err(Bad::BelowFile {
                        name: entry.name.clone(),
                        parent: parent.into(),
                    });
                }
                None => self.insert(parent.to_owned(), true)?,
            }
        }
        self.bytes = self.bytes.saturating_add(entry.size);
        if self.bytes > self.limits.total_bytes {
            return Err(Bad::TooLarge(self.limits.total_bytes));
        }
        self.insert(entry.name.clone(), directory)?;
        Ok(true)
    }

    fn insert(&mut self, name: String, directory: bool) -> Result<(), Bad> {
        if self.seen.len() as u64 >= self.limits.entries {
            return Err(Bad::TooManyEntries(self.limits.entries));
        }
        self.seen.insert(name, directory);
        Ok(())
    }
}
