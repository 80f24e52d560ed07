//! Plans which files are written, in which order, in which layer.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, Write};
use std::path::Path;

use super::PackOptions;
use crate::bytes::stream::Section;
use crate::error::{Bad, Error};
use crate::format::entry::Entry;
use crate::format::names;
use crate::source::{Source, SourceInner};

/// Files of at least this size get a layer of their own.
pub(super) const LARGE_BYTES: u64 = 32 << 20;
/// Layers of one large file each; further files share the last. Container engines take 127 layers.
pub(super) const LARGE_LAYERS: usize = 96;
/// Files that identify the checkpoint.
const FACT_FILES: [&str; 3] = [
    names::CONFIG_DUMP,
    names::SPEC_DUMP,
    "checkpoint/cryopod.json",
];

/// An entry and the source of its content.
#[derive(Debug)]
pub(super) struct Item {
    pub(super) entry: Entry,
    pub(super) content: ItemContent,
}

#[derive(Debug)]
pub(super) enum ItemContent {
    None,
    Bytes(Vec<u8>),
    Section(Section),
    /// Opened when it is written, because a directory may have more files than a process may open.
    Lazy,
}

impl Item {
    pub(super) fn open<'i>(&'i self, source: &Source) -> Result<Box<dyn Read + Send + 'i>, Error> {
        Ok(match &self.content {
            ItemContent::None => Box::new(io::empty()),
            ItemContent::Bytes(bytes) => Box::new(&bytes[..]),
            ItemContent::Section(section) => Box::new(section.clone()),
            ItemContent::Lazy => Box::new(self.section(source)?),
        })
    }

    /// Returns the content as a section of a file.
    pub(super) fn section(&self, source: &Source) -> Result<Section, Error> {
        match (&self.content, &source.inner) {
            (ItemContent::Section(section), _) => Ok(section.clone()),
            (ItemContent::Lazy, SourceInner::Directory(directory)) => {
                directory.content(&self.entry)
            }
            _ => Err(Error::from_io(
                source.path(),
                "read it",
                io::ErrorKind::NotFound.into(),
            )),
        }
    }
}

/// Facts about a checkpoint from its small files.
#[derive(Debug, Default)]
pub(super) struct KnownContent {
    /// The files of [`FACT_FILES`] that exist.
    pub(super) files: BTreeMap<String, Vec<u8>>,
    pub(super) bytes: u64,
    /// `inventory.img` was seen.
    pub(super) inventory: bool,
    /// A reference to a store was seen.
    pub(super) reference: bool,
}

impl KnownContent {
    pub(super) fn note(&mut self, entry: &Entry) {
        self.bytes += entry.size;
        self.inventory |=
            entry.name == format!("{}/{}", names::CHECKPOINT_DIR, names::CRIU_INVENTORY);
        self.reference |=
            entry.name == format!("{}/{}", names::CHECKPOINT_DIR, names::STORE_REFERENCE);
    }

    pub(super) fn wants(&self, entry: &Entry) -> bool {
        entry.is_file() && FACT_FILES.contains(&entry.name.as_str())
    }

    pub(super) fn keep(&mut self, name: &str, content: &[u8]) {
        self.files.insert(name.into(), content.to_vec());
    }

    /// An archive without CRIU's inventory is not a checkpoint.
    pub(super) fn check(&self, path: &Path) -> Result<(), Error> {
        if self.inventory {
            return Ok(());
        }
        let missing = format!("{}/{}", names::CHECKPOINT_DIR, names::CRIU_INVENTORY);
        Err(Error::bad(path, Bad::MissingFile(missing)))
    }
}

/// Lists the entries of a source whose content can be read in any order; otherwise returns `None`.
pub(super) fn random_access(
    source: &Source,
    options: &PackOptions,
) -> Result<Option<Vec<Item>>, Error> {
    let limits = &options.limits;
    let entries: Vec<(Entry, ItemContent)> = match &source.inner {
        SourceInner::Directory(directory) => directory
            .list(limits)?
            .into_iter()
            .map(|e| {
                if e.is_file() {
                    (e, ItemContent::Lazy)
                } else {
                    (e, ItemContent::None)
                }
            })
            .collect(),
        SourceInner::Tar(tar) => match tar.index(limits)? {
            Some(index) => index
                .into_iter()
                .map(|(e, s)| {
                    if e.is_file() {
                        (e, ItemContent::Section(s))
                    } else {
                        (e, ItemContent::None)
                    }
                })
                .collect(),
            None => return Ok(None),
        },
        _ => return Ok(None),
    };
    let mut items: Vec<Item> = entries
        .into_iter()
        .filter(|(entry, _)| !options.extra_files.contains_key(&entry.name))
        .map(|(entry, content)| Item { entry, content })
        .collect();
    items.extend(extra(options));
    Ok(Some(items))
}

pub(super) fn extra(options: &PackOptions) -> impl Iterator<Item = Item> {
    options.extra_files.iter().map(|(name, content)| Item {
        entry: Entry::file(name, content.len() as u64),
        content: ItemContent::Bytes(content.clone()),
    })
}

/// Returns true for files at the start of a tar, which let a reader identify it early.
pub(super) fn early(entry: &Entry) -> bool {
    FACT_FILES.contains(&entry.name.as_str())
}

#[derive(Debug, Default)]
pub(super) struct LayerGroup {
    pub(super) items: Vec<Item>,
    /// Names of its large files; `None` for the layer of the small ones.
    pub(super) large: Option<Vec<String>>,
}

/// Sorts items by name, directories before their content.
pub(super) fn sort(items: &mut [Item]) {
    items.sort_by(|a, b| a.entry.name.cmp(&b.entry.name));
}

/// Assigns items to layers: small files to the first, each large file to its own.
pub(super) fn layers(mut items: Vec<Item>, single: bool) -> Vec<LayerGroup> {
    sort(&mut items);
    let (small, large): (Vec<_>, Vec<_>) = items
        .into_iter()
        .partition(|i| single || i.entry.size < LARGE_BYTES);
    let mut groups = vec![LayerGroup {
        items: small,
        large: None,
    }];
    for (n, item) in large.into_iter().enumerate() {
        let name = item.entry.name.clone();
        let parents = parents(&item.entry.name, &groups[0].items);
        if n < LARGE_LAYERS {
            groups.push(LayerGroup::default());
        }
        if let Some(group) = groups.last_mut() {
            let new = parents
                .into_iter()
                .filter(|p| !group.items.iter().any(|i| i.entry.name == p.entry.name));
            let new: Vec<_> = new.collect();
            group.items.extend(new);
            group.items.push(item);
            group.large.get_or_insert_default().push(name);
        }
    }
    groups
}

/// Returns the directories above a name. Every layer must list them: engines create missing ones with modes of their
/// own.
pub(super) fn parents(name: &str, known: &[Item]) -> Vec<Item> {
    let find = |directory: &str| {
        known
            .iter()
            .find(|i| i.entry.name == directory)
            .map(|i| i.entry.clone())
    };
    name.match_indices('/')
        .map(|(at, _)| &name[..at])
        .map(|directory| find(directory).unwrap_or_else(|| Entry::directory(directory)))
        .map(|entry| Item {
            entry,
            content: ItemContent::None,
        })
        .collect()
}

/// Keeps small files on disk until they are written, for a source that can only be read from front to end.
#[derive(Debug)]
pub(super) struct Spool {
    file: std::fs::File,
    at: u64,
}

impl Spool {
    /// Creates an unnamed file in a directory.
    pub(super) fn new(dir: &Path) -> Result<Self, Error> {
        use std::os::unix::fs::OpenOptionsExt;
        let mut open = std::fs::OpenOptions::new();
        open.read(true).write(true).mode(0o600);
        let file = match open
            .custom_flags(libc::O_TMPFILE | libc::O_CLOEXEC)
            .open(dir)
        {
            Ok(file) => file,
            // Not every file system supports unnamed files.
            Err(_) => {
                let path = dir.join(".spool");
                let file = open
                    .create_new(true)
                    .custom_flags(libc::O_CLOEXEC)
                    .open(&path);
                let file = file.map_err(Error::io(&path, "create it"))?;
                std::fs::remove_file(&path).map_err(Error::io(&path, "remove it"))?;
                file
            }
        };
        Ok(Self { file, at: 0 })
    }

    /// Adds a file's content and returns its position.
    pub(super) fn add(&mut self, reader: &mut dyn Read, size: u64) -> io::Result<Section> {
        self.file.seek(io::SeekFrom::Start(self.at))?;
        let copied = io::copy(&mut reader.take(size), &mut self.file)?;
        if copied != size {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.file.flush()?;
        let section = Section::new(std::sync::Arc::new(self.file.try_clone()?), self.at, size);
        self.at += size;
        Ok(section)
    }
}
