//! Writes an OCI image, as a layout directory or a tar of one.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use cryopod_host::files::{create_private, sync_directory, write_private};

use super::pipeline::{Input, Pool, StreamFormat, WrittenStream};
use super::plan::{Item, KnownContent};
use super::{PackOptions, Packed, facts, tarwrite};
use crate::bytes::blobs::blob_name;
use crate::bytes::staging::Staging;
use crate::bytes::write_back::WriteBack;
use crate::error::Error;
use crate::format::compression::Compression;
use crate::format::digest::Digest;
use crate::format::entry::Entry;
use crate::format::names;
use crate::format::oci::{Descriptor, Index, Manifest, annotation, media};
use crate::source::Source;

/// Samples of a large file that decide whether it is compressed, and the bytes of each.
const SAMPLES: u64 = 64;
const SAMPLE_BYTES: usize = 16 << 10;

pub(super) enum Store {
    /// A layout: each blob is a file; several can be written at once.
    Directory { dir: PathBuf, next: AtomicU64 },
    /// A tar: one blob after the other. The header is written once size and digest are known.
    Tar { file: File, path: PathBuf },
}

impl Store {
    pub(super) fn directory(staging: &Staging) -> Result<Self, Error> {
        let dir = staging.path().join(names::OCI_BLOBS).join("sha256");
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .map_err(Error::io(&dir, "create it"))?;
        Ok(Self::Directory {
            dir,
            next: AtomicU64::new(0),
        })
    }

    pub(super) fn tar(staging: &Staging) -> Result<Self, Error> {
        let path = staging.path().to_owned();
        let file = staging.handle().map_err(Error::io(&path, "open it"))?;
        let mut store = Self::Tar { file, path };
        for directory in [
            names::OCI_BLOBS.to_owned(),
            format!("{}/sha256", names::OCI_BLOBS),
        ] {
            let mode = 0o755;
            let entry = Entry {
                mode,
                ..Entry::directory(directory)
            };
            store.put_header(&entry)?;
        }
        Ok(store)
    }

    pub(super) fn parallel(&self) -> bool {
        matches!(self, Self::Directory { .. })
    }

    fn put_header(&mut self, entry: &Entry) -> Result<(), Error> {
        if let Self::Tar { file, path } = self {
            tarwrite::header(entry)
                .and_then(|h| file.write_all(&h))
                .map_err(Error::io(path, "write it"))?;
        }
        Ok(())
    }

    /// Writes a layer whose tar `produce` makes.
    pub(super) fn layer(
        &self,
        pool: &Pool<'_>,
        how: &StreamFormat<'_>,
        produce: impl FnOnce(&mut Input<'_>) -> Result<(), Error>,
    ) -> Result<WrittenStream, Error> {
        match self {
            Self::Directory { dir, next } => {
                let path = dir.join(format!("partial-{}", next.fetch_add(1, Ordering::Relaxed)));
                let wrap = |action| Error::io(&path, action);
                let file = create_private(&path).map_err(wrap("create it"))?;
                let mut out = WriteBack::new(file.try_clone().map_err(wrap("open it"))?)
                    .map_err(wrap("write it"))?;
                let written = run(pool, how, &mut out, &path, produce)?;
                file.sync_all().map_err(wrap("write it to disk"))?;
                if let Some(blob) = &written.blob {
                    let name = dir.join(blob.hex());
                    fs::rename(&path, &name).map_err(wrap("give it its name"))?;
                }
                Ok(written)
            }
            Self::Tar { file, path } => {
                let wrap = |action| Error::io(path, action);
                let mut at = file;
                let start = at.stream_position().map_err(wrap("write it"))?;
                at.write_all(&[0; tarwrite::BLOCK as usize])
                    .map_err(wrap("write it"))?;
                let mut out = WriteBack::new(file.try_clone().map_err(wrap("open it"))?)
                    .map_err(wrap("write it"))?;
                let written = run(pool, how, &mut out, path, produce)?;
                let padding = vec![0; tarwrite::padding(written.output) as usize];
                at.seek(SeekFrom::End(0))
                    .and_then(|_| at.write_all(&padding))
                    .map_err(wrap("write it"))?;
                if let Some(blob) = &written.blob {
                    let entry = blob_entry(blob_name(blob), written.output);
                    let header = tarwrite::header(&entry).map_err(wrap("write it"))?;
                    file.write_all_at(&header, start)
                        .map_err(wrap("write it"))?;
                }
                Ok(written)
            }
        }
    }

    /// Writes a small file of the layout.
    fn document(&mut self, name: &str, content: &[u8]) -> Result<(), Error> {
        match self {
            Self::Directory { dir, .. } => {
                // The root is two directories up.
                let root = dir.ancestors().nth(2).unwrap_or(dir);
                let path = root.join(name);
                match write_private(&path, content) {
                    // A blob of the same content.
                    Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
                    other => other.map_err(Error::io(&path, "write it")),
                }
            }
            Self::Tar { .. } => {
                self.put_header(&blob_entry(name.into(), content.len() as u64))?;
                if let Self::Tar { file, path } = self {
                    let padding = vec![0; tarwrite::padding(content.len() as u64) as usize];
                    let written = file
                        .write_all(content)
                        .and_then(|()| file.write_all(&padding));
                    written.map_err(Error::io(path, "write it"))?;
                }
                Ok(())
            }
        }
    }

    pub(super) fn blob(&mut self, content: &[u8]) -> Result<(), Error> {
        self.document(&blob_name(&Digest::of(content)), content)
    }

    /// Writes the files that turn the blobs into a layout. Call this last.
    pub(super) fn close(&mut self, index: &[u8]) -> Result<(), Error> {
        self.document(names::OCI_INDEX, index)?;
        self.document(names::OCI_LAYOUT, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
        match self {
            Self::Directory { dir, .. } => {
                for dir in dir.ancestors().take(2) {
                    sync_directory(dir).map_err(Error::io(dir, "write it to disk"))?;
                }
                Ok(())
            }
            Self::Tar { file, path } => file
                .write_all(&[0; 1024])
                .map_err(Error::io(path, "write it")),
        }
    }

    /// Writes config, manifest and index.
    pub(super) fn finish(
        mut self,
        layers: Vec<Descriptor>,
        diff_ids: Vec<Digest>,
        known: &KnownContent,
        source: &Source,
        options: &PackOptions,
    ) -> Result<Packed, Error> {
        let mut annotations = match options.recipients {
            None => facts::annotations(known, source.kind()),
            Some(_) => facts::of_encrypted(known),
        };
        annotations.extend(options.annotations.clone());
        let config = json(&facts::config(known, &annotations, diff_ids))?;
        let config_descriptor =
            Descriptor::new(media::CONFIG, Digest::of(&config), config.len() as u64);
        self.document(&blob_name(&config_descriptor.digest), &config)?;
        let manifest = json(&Manifest {
            schema_version: 2,
            media_type: Some(media::MANIFEST.into()),
            config: config_descriptor,
            layers: layers.clone(),
            annotations,
        })?;
        let digest = Digest::of(&manifest);
        self.document(&blob_name(&digest), &manifest)?;
        let mut descriptor =
            Descriptor::new(media::MANIFEST, digest.clone(), manifest.len() as u64);
        if let Some(name) = &options.name {
            descriptor
                .annotations
                .insert(annotation::REF_NAME.into(), name.clone());
        }
        let index = json(&Index {
            schema_version: 2,
            media_type: Some(media::INDEX.into()),
            manifests: vec![descriptor],
            annotations: BTreeMap::new(),
        })?;
        self.close(&index)?;
        let stored = layers.iter().map(|l| l.size).sum::<u64>()
            + (config.len() + manifest.len() + index.len()) as u64;
        Ok(Packed {
            digest: Some(digest),
            layers,
            content_bytes: known.bytes,
            stored_bytes: stored,
            refers: known.reference,
        })
    }
}

fn blob_entry(name: String, size: u64) -> Entry {
    let mode = 0o644;
    Entry {
        mode,
        ..Entry::file(name, size)
    }
}

pub(super) fn json(value: &impl serde::Serialize) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(value).map_err(|e| Error::Unsupported {
        path: PathBuf::new(),
        reason: format!("cannot describe the image: {e}"),
    })
}

fn run(
    pool: &Pool<'_>,
    how: &StreamFormat<'_>,
    out: &mut (dyn Write + Send),
    path: &Path,
    produce: impl FnOnce(&mut Input<'_>) -> Result<(), Error>,
) -> Result<WrittenStream, Error> {
    pool.write(how, out, |input| produce(input).map_err(Carried::from))
        .map_err(|e| e.into_error(path))
}

pub(super) enum Carried {
    Ours(Error),
    Io(io::Error),
}

impl From<io::Error> for Carried {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

impl From<Error> for Carried {
    fn from(e: Error) -> Self {
        Self::Ours(e)
    }
}

impl Carried {
    pub(super) fn into_error(self, path: &Path) -> Error {
        match self {
            Self::Ours(e) => e,
            Self::Io(e) => Error::from_io(path, "write it", e),
        }
    }
}

/// Puts items into a tar, without its end mark.
pub(super) fn put(input: &mut Input<'_>, item: &Item, source: &Source) -> Result<(), Error> {
    let mut reader = item.open(source)?;
    put_entry(input, &item.entry, &mut *reader, source.path())
}

pub(super) fn put_entry(
    input: &mut Input<'_>,
    entry: &Entry,
    reader: &mut dyn Read,
    path: &Path,
) -> Result<(), Error> {
    let mut all = || -> io::Result<()> {
        input.write_all(&tarwrite::header(entry)?)?;
        if entry.is_file() {
            input.take(reader, entry.size)?;
            input.zeros(tarwrite::padding(entry.size))?;
        }
        Ok(())
    };
    all().map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => {
            let reason = "became shorter while it was read".to_owned();
            Error::bad(
                path,
                crate::Bad::Content {
                    name: entry.name.clone(),
                    reason,
                },
            )
        }
        _ => Error::from_io(path, "read it", e),
    })
}

pub(super) fn put_end(input: &mut Input<'_>, path: &Path) -> Result<(), Error> {
    input
        .zeros(2 * tarwrite::BLOCK)
        .map_err(|e| Error::from_io(path, "read it", e))
}

pub(super) fn descriptor(
    written: &WrittenStream,
    how: &StreamFormat<'_>,
    large: Option<&[String]>,
) -> Result<Descriptor, Error> {
    let kind = match how.compression {
        Compression::None => media::LAYER,
        Compression::Gzip => media::LAYER_GZIP,
        Compression::Zstd => media::LAYER_ZSTD,
    };
    let encrypted = how.recipients.map_or("", |_| media::AGE);
    let digest = written.blob.clone().ok_or_else(|| Error::Unsupported {
        path: PathBuf::new(),
        reason: "a layer was written without its digest".into(),
    })?;
    let mut descriptor = Descriptor::new(&format!("{kind}{encrypted}"), digest, written.output);
    descriptor
        .annotations
        .insert(annotation::LAYER_BYTES.into(), written.input.to_string());
    if let Some(files) = large {
        let list = serde_json::Value::from(files.to_vec()).to_string();
        descriptor
            .annotations
            .insert(annotation::LAYER_FILES.into(), list);
    }
    Ok(descriptor)
}

/// Returns true if a file is worth compressing. Tries pieces from all over it, always the same ones.
pub(super) fn shrinks(item: &Item, source: &Source) -> Result<bool, Error> {
    let section = item.section(source)?;
    let read = |e| Error::from_io(source.path(), "read it", e);
    let mut compressor = zstd::bulk::Compressor::new(1).map_err(read)?;
    let mut out = Vec::with_capacity(zstd::zstd_safe::compress_bound(SAMPLE_BYTES));
    let mut piece = vec![0; SAMPLE_BYTES];
    let (mut before, mut after) = (0, 0);
    for n in 0..SAMPLES {
        let mut at = section.clone();
        let offset = (item.entry.size.saturating_sub(SAMPLE_BYTES as u64) / SAMPLES) * n;
        crate::bytes::stream::Stream::skip(&mut at, offset).map_err(read)?;
        at.read_exact(&mut piece).map_err(read)?;
        before += piece.len();
        out.clear();
        after += compressor
            .compress_to_buffer(&piece, &mut out)
            .map_err(read)?;
    }
    Ok(after < before - before / 32)
}
