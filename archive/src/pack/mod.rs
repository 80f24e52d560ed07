//! Writes a checkpoint as one portable file or image.
//!
//! [`pack`] also converts: it accepts any [`Source`]. The destination gets its name only when it is complete and on
//! disk.

mod containerd;
mod entropy;
mod facts;
mod image;
mod layers;
mod pipeline;
mod plan;
mod tarwrite;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use self::containerd::{complete, copy_image};
use self::image::{Carried, Store, descriptor, put, put_end, put_entry};
use self::pipeline::{Input, Pool, StreamFormat, with_pool};
use self::plan::{Item, KnownContent};
use crate::bytes::decode::{Decoder, Hash, with_decoder};
use crate::bytes::encryption::Recipients;
use crate::bytes::staging::Staging;
use crate::bytes::write_back::WriteBack;
use crate::error::Error;
use crate::format::compression::Compression;
use crate::format::digest::Digest;
use crate::format::entry::Entry;
use crate::format::limits::Limits;
use crate::format::limits::threads_or_cores;
use crate::format::names;
use crate::format::oci::Descriptor;
use crate::progress::Progress;
use crate::source::walk;
use crate::source::{Source, Visitor};

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Destination {
    /// An OCI image layout in a directory: `oci:DIR`.
    Layout(PathBuf),
    /// A tar of one: `oci-archive:FILE`.
    Archive(PathBuf),
    /// A file as podman's `checkpoint --export` writes it, for `podman restore --import` and, uncompressed, for
    /// Kubernetes.
    Tar(PathBuf, Compression),
}

impl Destination {
    /// Parses `oci:DIR`, `oci-archive:FILE`, or a file name: `.tar` is uncompressed, `.tar.gz` and `.tgz` are gzip,
    /// everything else is zstd.
    pub fn parse(text: &str) -> Self {
        if let Some(dir) = text.strip_prefix("oci:") {
            return Self::Layout(dir.into());
        }
        if let Some(file) = text.strip_prefix("oci-archive:") {
            return Self::Archive(file.into());
        }
        let compression = match text {
            t if t.ends_with(".tar") => Compression::None,
            t if t.ends_with(".gz") || t.ends_with(".tgz") => Compression::Gzip,
            _ => Compression::Zstd,
        };
        Self::Tar(text.into(), compression)
    }

    /// Checks that the destination may be written. An existing one is replaced only if `replace` is set, and a
    /// directory only if it is an image layout: a mistyped name must not cost a directory.
    pub fn check(&self, replace: bool) -> Result<(), Error> {
        let path = self.path();
        let Ok(meta) = std::fs::symlink_metadata(path) else {
            return Ok(());
        };
        let layout = matches!(self, Self::Layout(_));
        let empty = || std::fs::read_dir(path).is_ok_and(|mut d| d.next().is_none());
        if layout && meta.is_dir() && empty() {
            return Ok(());
        }
        if !replace {
            return Err(Error::Exists { path: path.into() });
        }
        let other = layout && !path.join(names::OCI_LAYOUT).is_file();
        if other || layout != meta.is_dir() {
            return Err(Error::Unsupported {
                path: path.into(),
                reason: "what lies there is no archive of that kind, and is not replaced; choose another name".into(),
            });
        }
        Ok(())
    }

    /// Returns the file or directory that will be written.
    pub fn path(&self) -> &Path {
        match self {
            Self::Layout(path) | Self::Archive(path) | Self::Tar(path, _) => path,
        }
    }
}

#[derive(Debug, Clone)]
pub struct PackOptions {
    /// zstd level, -7 to 19, or gzip level 1 to 9.
    pub level: i32,
    /// Compression of an image's layers. Data that does not shrink is stored uncompressed.
    pub compression: Compression,
    /// Threads that compress; 0: one per core. The result does not depend on it.
    pub threads: usize,
    pub single_layer: bool,
    /// Annotations of the image, in addition to those of the checkpoint.
    pub annotations: BTreeMap<String, String>,
    pub name: Option<String>,
    /// Files that replace or complete those of the source, by their normalised names.
    pub extra_files: BTreeMap<String, Vec<u8>>,
    pub replace: bool,
    /// Encrypts the layers of an image for these.
    pub recipients: Option<Recipients>,
    pub limits: Limits,
    pub progress: Arc<Progress>,
}

impl PackOptions {
    /// Checks that the destination may be written, as [`Destination::check`] does, and as it is wished.
    pub fn check(&self, to: &Destination) -> Result<(), Error> {
        to.check(self.replace)?;
        match (to, &self.recipients) {
            (Destination::Tar(path, _), Some(_)) => Err(not_encrypted(path)),
            _ => Ok(()),
        }
    }

    fn layer(&self, compression: Compression) -> StreamFormat<'_> {
        StreamFormat {
            compression,
            hash: true,
            recipients: self.recipients.as_ref(),
        }
    }
}

impl Default for PackOptions {
    fn default() -> Self {
        Self {
            level: 1,
            compression: Compression::Zstd,
            threads: 0,
            single_layer: false,
            annotations: BTreeMap::new(),
            name: None,
            extra_files: BTreeMap::new(),
            replace: false,
            recipients: None,
            limits: Limits::default(),
            progress: Arc::default(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packed {
    /// Digest of an image's manifest; `None` for a tar.
    pub digest: Option<Digest>,
    pub layers: Vec<Descriptor>,
    /// Bytes of all files of the checkpoint.
    pub content_bytes: u64,
    pub stored_bytes: u64,
    /// It only refers to large files in a store.
    pub refers: bool,
}

/// Writes a checkpoint to a destination. After an error nothing has the destination's name or, with
/// [`PackOptions::replace`], the old content still has it.
pub fn pack(source: &Source, to: &Destination, options: &PackOptions) -> Result<Packed, Error> {
    options.check(to)?;
    check_options(source, options)?;
    let items = plan::random_access(source, options)?;
    if let (Destination::Tar(..), Some(items)) = (to, &items)
        && !items.iter().any(|i| i.entry.name == names::CONFIG_DUMP)
    {
        return Err(no_engine(source));
    }
    // If the source can only be read from front to end, the decoder counts progress, in stored bytes.
    let counts = items.is_some();
    options.progress.set_total(match &items {
        Some(items) => items.iter().map(|i| i.entry.size).sum(),
        None => source.stored_bytes()?,
    });
    let level = match (to, options.compression) {
        (Destination::Tar(_, Compression::Gzip), _) | (_, Compression::Gzip) => {
            options.level.clamp(1, 9)
        }
        _ => options.level,
    };
    // Decompression takes a fraction of the time of compression.
    let decoders = threads_or_cores(options.threads).div_ceil(2);
    let unseen = Progress::default();
    let seen = if counts { &unseen } else { &*options.progress };
    with_decoder(decoders, seen, |decoder| {
        with_pool(options.threads, level, &options.progress, counts, |pool| {
            let run = Run {
                source,
                pool,
                decoder,
                options,
            };
            match to {
                Destination::Tar(path, compression) => {
                    let staging = Staging::file(path, options.replace)?;
                    let packed = run.tarball(items, &staging, *compression)?;
                    staging.commit()?;
                    Ok(packed)
                }
                Destination::Archive(path) => {
                    let staging = Staging::file(path, options.replace)?;
                    let packed = run.image(items, Store::tar(&staging)?, &staging)?;
                    staging.commit()?;
                    Ok(packed)
                }
                Destination::Layout(path) => {
                    let staging = Staging::directory(path, options.replace)?;
                    let packed = run.image(items, Store::directory(&staging)?, &staging)?;
                    staging.commit()?;
                    Ok(packed)
                }
            }
        })
    })
}

/// An export file names its container; CRIU's images do not.
fn no_engine(source: &Source) -> Error {
    Error::Unsupported {
        path: source.path().into(),
        reason: format!(
            "a {} has no {}: which image, mounts and settings the container had is not in it, and no engine could restore an export file of it; oci:DIR and oci-archive:FILE carry it as it is, for `cryopod unpack --images-only`",
            source.kind(),
            names::CONFIG_DUMP
        ),
    }
}

fn not_encrypted(path: &Path) -> Error {
    Error::Unsupported {
        path: path.into(),
        reason: "an engine's own file cannot be encrypted, as the engine could not read it; oci:DIR and oci-archive:FILE can".into(),
    }
}

fn check_options(source: &Source, options: &PackOptions) -> Result<(), Error> {
    let unsupported = |reason| Error::Unsupported {
        path: source.path().into(),
        reason,
    };
    if !(-7..=19).contains(&options.level) {
        return Err(unsupported(format!(
            "compression level {}; levels are -7 to 19",
            options.level
        )));
    }
    for name in options.extra_files.keys() {
        if crate::format::entry::clean_name(name.as_bytes(), &options.limits).as_ref() != Ok(name) {
            return Err(unsupported(format!(
                "{name:?} is not a name for a file of a checkpoint"
            )));
        }
    }
    Ok(())
}

struct Run<'r> {
    source: &'r Source,
    pool: &'r Pool<'r>,
    decoder: &'r Decoder<'r>,
    options: &'r PackOptions,
}

impl Run<'_> {
    /// Writes podman's tar: first the files that identify it, in podman's order, then the others by name.
    fn tarball(
        &self,
        items: Option<Vec<Item>>,
        staging: &Staging,
        compression: Compression,
    ) -> Result<Packed, Error> {
        let wrap = |e| Error::from_io(staging.path(), "write it", e);
        let mut out = staging.handle().and_then(WriteBack::new).map_err(wrap)?;
        let mut known = KnownContent::default();
        let how = StreamFormat {
            compression,
            hash: false,
            recipients: None,
        };
        let written = self.pool.write(&how, &mut out, |input| {
            self.everything(items, input, &mut known)
                .map_err(Carried::from)
        });
        let written = written.map_err(|e| e.into_error(staging.path()))?;
        known.check(self.source.path())?;
        if !known.files.contains_key(names::CONFIG_DUMP) {
            return Err(no_engine(self.source));
        }
        let (content_bytes, stored_bytes) = (known.bytes, written.output);
        Ok(Packed {
            digest: None,
            layers: Vec::new(),
            content_bytes,
            stored_bytes,
            refers: known.reference,
        })
    }

    fn everything(
        &self,
        items: Option<Vec<Item>>,
        input: &mut Input<'_>,
        known: &mut KnownContent,
    ) -> Result<(), Error> {
        let (source, options) = (self.source, self.options);
        match items {
            Some(items) => {
                let mut groups = plan::layers(items, false);
                for group in &mut groups {
                    group.items.sort_by_key(|i| !plan::early(&i.entry)); // stable sort
                }
                let mut directories = BTreeSet::new();
                for item in groups.iter().flat_map(|g| &g.items) {
                    if item.entry.is_file() || directories.insert(item.entry.name.clone()) {
                        note(known, item, source, options)?;
                        put(input, item, source)?;
                    }
                }
            }
            None => {
                for item in plan::extra(options) {
                    note(known, &item, source, options)?;
                    put(input, &item, source)?;
                }
                self.visit(&mut |entry, reader| {
                    known.note(entry);
                    if known.wants(entry) {
                        let text = entry
                            .read_small(reader, &options.limits)
                            .map_err(|e| Error::from_io(source.path(), "read it", e))?;
                        known.keep(&entry.name, &text);
                        return put_entry(input, entry, &mut &text[..], source.path());
                    }
                    put_entry(input, entry, reader, source.path())
                })?;
            }
        }
        put_end(input, source.path())
    }

    /// Visits the entries of a source that is read from front to end, except those that the caller replaces.
    fn visit(&self, visitor: &mut Visitor<'_>) -> Result<(), Error> {
        let options = self.options;
        let mut kept = |entry: &Entry, reader: &mut dyn Read| {
            if options.extra_files.contains_key(&entry.name) {
                return Ok(());
            }
            visitor(entry, reader)
        };
        walk::visit(
            self.source,
            &options.limits,
            self.decoder,
            &|_| true,
            Hash::Stored,
            &mut kept,
        )
    }

    fn image(
        &self,
        items: Option<Vec<Item>>,
        store: Store,
        staging: &Staging,
    ) -> Result<Packed, Error> {
        let (source, options) = (self.source, self.options);
        let mut known = KnownContent::default();
        let mut written = Vec::new();
        match items {
            Some(items) => {
                for item in &items {
                    note(&mut known, item, source, options)?;
                }
                known.check(source.path())?;
                let groups = plan::layers(items, options.single_layer);
                written = layers::parallel(source, &groups, &store, self.pool, options)?;
            }
            None if options.single_layer => {
                let how = options.layer(options.compression);
                let layer = store.layer(self.pool, &how, |input| {
                    self.everything(None, input, &mut known)
                })?;
                written.push((layer.content.clone(), descriptor(&layer, &how, None)?));
            }
            None => written.extend(layers::streamed(self, &store, staging, &mut known)?),
        }
        known.check(source.path())?;
        let (diff_ids, layers): (Vec<_>, Vec<_>) = written.into_iter().unzip();
        store.finish(
            layers,
            diff_ids.into_iter().flatten().collect(),
            &known,
            source,
            options,
        )
    }
}

fn note(
    known: &mut KnownContent,
    item: &Item,
    source: &Source,
    options: &PackOptions,
) -> Result<(), Error> {
    known.note(&item.entry);
    if known.wants(&item.entry) {
        let text = (item.entry)
            .read_small(&mut *item.open(source)?, &options.limits)
            .map_err(|e| Error::from_io(source.path(), "read it", e))?;
        known.keep(&item.entry.name, &text);
    }
    Ok(())
}
