//! Reads a checkpoint in a directory.

use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::Visitor;
use crate::bytes::stream::{Section, open_regular};
use crate::error::{Bad, Error};
use crate::format::entry::{Entry, EntryKind, check_link, clean_name};
use crate::format::limits::Limits;
use crate::format::names;
use crate::store::{Found, Stored};

/// A directory: CRIU's images alone, or with the engine's files beside them.
#[derive(Debug, Clone)]
pub(crate) struct Directory {
    root: PathBuf,
    /// `true`: the directory itself is what `checkpoint/` is elsewhere.
    bare: bool,
    /// The store's entry with the files that the directory lacks.
    stored: Option<Found>,
}

impl Directory {
    pub(crate) fn new(root: &Path, bare: bool) -> Self {
        Self {
            root: root.into(),
            bare,
            stored: None,
        }
    }

    /// Adds the files of a store's entry as if they were here, and hides the reference to them.
    pub(crate) fn join(&mut self, stored: Found) {
        self.stored = Some(stored);
    }

    /// Returns the store's file for an entry.
    fn stored(&self, name: &str) -> Option<(&Found, &Stored)> {
        let found = self.stored.as_ref()?;
        let name = name
            .strip_prefix(names::CHECKPOINT_DIR)?
            .strip_prefix('/')?;
        let file = found.reference.files.iter().find(|f| f.name == name)?;
        Some((found, file))
    }

    pub(crate) fn place(&self, name: &str) -> PathBuf {
        let inner = match self.bare {
            true => name
                .strip_prefix(names::CHECKPOINT_DIR)
                .map_or(name, |n| n.trim_start_matches('/')),
            false => name,
        };
        self.root.join(inner)
    }

    /// Lists all entries, sorted by name, directories before their content.
    pub(crate) fn list(&self, limits: &Limits) -> Result<Vec<Entry>, Error> {
        let mut entries = Vec::new();
        if self.bare {
            let meta = fs::metadata(&self.root).map_err(Error::io(&self.root, "read it"))?;
            let mode = meta.mode() & 0o777;
            entries.push(Entry {
                mode,
                ..Entry::directory(names::CHECKPOINT_DIR)
            });
        }
        let mut pending = vec![(
            self.root.clone(),
            if self.bare {
                format!("{}/", names::CHECKPOINT_DIR)
            } else {
                String::new()
            },
        )];
        while let Some((dir, prefix)) = pending.pop() {
            for item in fs::read_dir(&dir).map_err(Error::io(&dir, "list it"))? {
                let item = item.map_err(Error::io(&dir, "list it"))?;
                let path = item.path();
                let raw = [prefix.as_bytes(), item.file_name().as_bytes()].concat();
                let bad = |bad| Error::bad(&self.root, bad);
                let name = clean_name(&raw, limits).map_err(bad)?;
                let meta =
                    fs::symlink_metadata(&path).map_err(Error::io(&path, "read its type"))?;
                let file_type = meta.file_type();
                let kind = if file_type.is_dir() {
                    pending.push((path, format!("{name}/")));
                    EntryKind::Directory
                } else if file_type.is_file() {
                    EntryKind::File
                } else if file_type.is_symlink() {
                    let target = fs::read_link(&path).map_err(Error::io(&path, "read the link"))?;
                    check_link(&name, target.as_os_str().as_bytes(), limits).map_err(bad)?
                } else if file_type.is_fifo() {
                    return Err(bad(Bad::Fifo(name)));
                } else if file_type.is_socket() {
                    return Err(bad(Bad::Socket(name)));
                } else {
                    return Err(bad(Bad::Device(name)));
                };
                if entries.len() as u64 >= limits.entries {
                    return Err(bad(Bad::TooManyEntries(limits.entries)));
                }
                let size = if kind == EntryKind::File {
                    meta.len()
                } else {
                    0
                };
                entries.push(Entry {
                    name,
                    kind,
                    size,
                    mode: meta.mode() & 0o777,
                    layer: None,
                });
            }
        }
        if let Some(stored) = &self.stored {
            let reference = format!("{}/{}", names::CHECKPOINT_DIR, names::STORE_REFERENCE);
            entries.retain(|entry| entry.name != reference);
            for file in &stored.reference.files {
                let name = format!("{}/{}", names::CHECKPOINT_DIR, file.name);
                if self.place(&name).symlink_metadata().is_err() {
                    entries.push(Entry::file(name, file.bytes));
                }
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    pub(crate) fn content(&self, entry: &Entry) -> Result<Section, Error> {
        let path = self.place(&entry.name);
        let file = match self.stored(&entry.name) {
            Some((found, file)) if path.symlink_metadata().is_err() => {
                found.open(file).map_err(|e| Error::Unsupported {
                    path: self.root.clone(),
                    reason: e.to_string(),
                })?
            }
            _ => open_regular(&path)?,
        };
        let section = Section::whole(file).map_err(Error::io(&path, "read its size"))?;
        if section.left() != entry.size {
            let reason = format!(
                "changed its size from {} to {} bytes while it was read",
                entry.size,
                section.left()
            );
            return Err(Error::bad(
                &self.root,
                Bad::Content {
                    name: entry.name.clone(),
                    reason,
                },
            ));
        }
        Ok(section)
    }

    pub(crate) fn visit(&self, limits: &Limits, visitor: &mut Visitor<'_>) -> Result<(), Error> {
        for entry in self.list(limits)? {
            if entry.is_file() {
                visitor(&entry, &mut self.content(&entry)?)?;
            } else {
                visitor(&entry, &mut std::io::empty() as &mut dyn Read)?;
            }
        }
        Ok(())
    }
}
