//! Reads a checkpoint in a tar, compressed or not.

use std::io;
use std::path::{Path, PathBuf};

use super::Visitor;
use crate::bytes::stream::{Allowance, Decoded, Section, Stream};
use crate::bytes::tarread::TarReader;
use crate::error::{Bad, Error};
use crate::format::compression::Compression;
use crate::format::entry::{Entry, Ledger};
use crate::format::limits::Limits;
use crate::format::names;

#[derive(Debug, Clone)]
pub(crate) struct Tarball {
    path: PathBuf,
    section: Section,
    compression: Compression,
    /// `true`: CRIU's images are at the top level.
    bare: bool,
}

impl Tarball {
    pub(crate) fn new(path: &Path, section: Section, compression: Compression) -> Self {
        Self {
            path: path.into(),
            section,
            compression,
            bare: false,
        }
    }

    pub(crate) fn bare(self) -> Self {
        Self { bare: true, ..self }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.section.left()
    }

    pub(crate) fn compression(&self) -> Compression {
        self.compression
    }

    /// Returns the directory to prepend to all names, if the tar does not have it.
    pub(crate) fn below(&self) -> Option<&'static str> {
        self.bare.then_some(names::CHECKPOINT_DIR)
    }

    pub(crate) fn section(&self) -> &Section {
        &self.section
    }

    /// Returns a reader of its entries. It seeks through a plain tar, and reads through a compressed one.
    pub(crate) fn reader(&self, limits: &Limits) -> io::Result<TarReader<Box<dyn Stream + '_>>> {
        let section = self.section.clone();
        let stream: Box<dyn Stream> = match self.compression {
            Compression::None => Box::new(section),
            compression => Box::new(Decoded::new(section, compression, Allowance::of(limits))?),
        };
        Ok(TarReader::new(stream, limits, None))
    }

    /// Returns the entries and the position of their content; `None` if the tar is compressed.
    pub(crate) fn index(&self, limits: &Limits) -> Result<Option<Vec<(Entry, Section)>>, Error> {
        if self.compression != Compression::None {
            return Ok(None);
        }
        let wrap = |e| Error::from_io(&self.path, "read it", e);
        let bad = |bad| Error::bad(&self.path, bad);
        let mut ledger = Ledger::new(limits);
        let mut entries = Vec::new();
        let mut reader = TarReader::new(self.section.clone(), limits, None);
        if self.bare {
            let directory = checkpoint_directory();
            ledger.take(&directory).map_err(bad)?;
            entries.push((directory, Section::new(self.section.file().clone(), 0, 0)));
        }
        while let Some(mut entry) = reader.next().map_err(wrap)? {
            if self.bare {
                entry.name = format!("{}/{}", names::CHECKPOINT_DIR, entry.name);
            }
            let content = Section::new(self.section.file().clone(), reader.position(), entry.size);
            if ledger.take(&entry).map_err(bad)? {
                entries.push((entry, content));
            }
        }
        Ok(Some(entries))
    }
}

/// Visits the entries of a tar, below a directory if one is given.
pub(crate) fn visit_tar<S: Stream>(
    reader: &mut TarReader<S>,
    below: Option<&str>,
    path: &Path,
    visitor: &mut Visitor<'_>,
) -> Result<(), Error> {
    if below.is_some() {
        visitor(&checkpoint_directory(), &mut io::empty())?;
    }
    while let Some(mut entry) = reader
        .next()
        .map_err(|e| Error::from_io(path, "read it", e))?
    {
        if let Some(directory) = below {
            entry.name = format!("{directory}/{}", entry.name);
        }
        let last = entry.name.rsplit('/').next().unwrap_or_default();
        if entry.layer.is_some() && last.starts_with(".wh.") {
            return Err(Error::bad(path, Bad::Whiteout(entry.name)));
        }
        visitor(&entry, reader)?;
    }
    Ok(())
}

/// The directory that a tar of bare images lacks.
fn checkpoint_directory() -> Entry {
    Entry::directory(names::CHECKPOINT_DIR)
}
