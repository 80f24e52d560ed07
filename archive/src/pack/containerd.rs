//! Writes containerd's own checkpoint again, with its large files taken from a store.

use std::path::Path;
use std::sync::Arc;

use super::PackOptions;
use super::image::{Store, json, put_end, put_entry};
use super::pipeline::{Pool, StreamFormat, with_pool};
use super::{Destination, Packed, not_encrypted};
use crate::bytes::blobs::Blobs;
use crate::bytes::staging::Staging;
use crate::bytes::stream::Section;
use crate::bytes::tarread::TarReader;
use crate::error::{Bad, Error};
use crate::format::digest::Digest;
use crate::format::entry::Entry;
use crate::format::limits::Limits;
use crate::format::names;
use crate::format::oci::{self, Descriptor, Index, media};
use crate::progress::Progress;
use crate::source::{Source, SourceInner};
use crate::store::{Found, StoreError};

/// Writes containerd's checkpoint again, in containerd's form. Adds the files of the store's entry to CRIU's images,
/// and removes the reference. Ignores level, compression, names and annotations of the options. Fails with
/// [`Error::Unsupported`] if the source is not such a checkpoint, or if the destination is not a layout.
pub fn complete(
    source: &Source,
    stored: &Found,
    to: &Destination,
    options: &PackOptions,
) -> Result<Packed, Error> {
    let SourceInner::Containerd(containerd) = &source.inner else {
        return Err(Error::Unsupported {
            path: source.path().into(),
            reason: format!("a {} is no checkpoint of containerd's own", source.kind()),
        });
    };
    if options.recipients.is_some() {
        return Err(not_encrypted(to.path()));
    }
    let bytes = source
        .stored_bytes()?
        .saturating_add(stored.reference.bytes());
    options.progress.set_total(bytes);
    with_pool(options.threads, 1, &options.progress, true, |pool| {
        let run = CompleteParts {
            source,
            blobs: &containerd.blobs,
            criu: &containerd.parts.criu,
            stored,
            pool,
            limits: &options.limits,
        };
        let (staging, out) = match to {
            Destination::Archive(path) => {
                let staging = Staging::file(path, options.replace)?;
                let out = Store::tar(&staging)?;
                (staging, out)
            }
            Destination::Layout(path) => {
                let staging = Staging::directory(path, options.replace)?;
                let out = Store::directory(&staging)?;
                (staging, out)
            }
            Destination::Tar(path, _) => {
                return Err(Error::Unsupported {
                    path: path.clone(),
                    reason: "containerd's checkpoint is a layout: oci:DIR or oci-archive:FILE"
                        .into(),
                });
            }
        };
        let packed = run.write(out)?;
        staging.commit()?;
        Ok(packed)
    })
}

struct CompleteParts<'c> {
    source: &'c Source,
    blobs: &'c Blobs,
    criu: &'c Descriptor,
    stored: &'c Found,
    pool: &'c Pool<'c>,
    limits: &'c Limits,
}

/// The new index of the layout. If the checkpoint's index is a blob: also its old digest and its new content.
struct Indexes {
    old: Option<Digest>,
    nested: Option<Vec<u8>>,
    index: Vec<u8>,
}

impl CompleteParts<'_> {
    fn write(&self, mut out: Store) -> Result<Packed, Error> {
        let mut content_bytes = 0;
        let written = out.layer(self.pool, &StreamFormat::PLAIN, |input| {
            let section = self.blobs.open(self.criu)?;
            let mut reader = TarReader::new(section, self.limits, None);
            let read = |e| Error::from_io(self.source.path(), "read it", e);
            let mut own = Vec::new();
            while let Some(entry) = reader.next().map_err(read)? {
                if entry.name == names::STORE_REFERENCE {
                    continue;
                }
                content_bytes += entry.size;
                put_entry(input, &entry, &mut reader, self.source.path())?;
                own.push(entry.name);
            }
            for file in &self.stored.reference.files {
                if own.contains(&file.name) {
                    continue;
                }
                let failed = |e: StoreError| Error::Unsupported {
                    path: self.source.path().into(),
                    reason: e.to_string(),
                };
                let entry = Entry::file(&file.name, file.bytes);
                content_bytes += entry.size;
                let path = self.stored.path(file);
                let section = Section::whole(self.stored.open(file).map_err(failed)?);
                let mut section = section.map_err(Error::io(&path, "read its size"))?;
                put_entry(input, &entry, &mut section, &path)?;
            }
            put_end(input, self.source.path())
        })?;
        let digest = written.blob.clone().ok_or_else(|| self.without_digest())?;
        let criu = Descriptor {
            digest,
            size: written.output,
            ..self.criu.clone()
        };
        let Indexes { old, nested, index } = self.indexes(&criu)?;
        let mut stored_bytes = written.output;
        for digest in self.blobs.digests()? {
            if digest == self.criu.digest || Some(&digest) == old.as_ref() {
                continue;
            }
            stored_bytes += copy(self.blobs, &out, self.pool, &digest)?;
        }
        if let Some(nested) = &nested {
            out.blob(nested)?;
        }
        out.close(&index)?;
        Ok(Packed {
            digest: Some(Digest::of(nested.as_deref().unwrap_or(&index))),
            layers: Vec::new(),
            content_bytes,
            stored_bytes: stored_bytes + index.len() as u64,
            refers: false,
        })
    }

    /// Builds the indexes with another descriptor of CRIU's images.
    fn indexes(&self, criu: &Descriptor) -> Result<Indexes, Error> {
        let bad = |bad| Error::bad(self.blobs.path(), bad);
        let text = self.blobs.document(names::OCI_INDEX)?;
        let mut index: Index = oci::parse(names::OCI_INDEX, &text).map_err(bad)?;
        if replace(&mut index, self.criu, criu) {
            return Ok(Indexes {
                old: None,
                nested: None,
                index: json(&index)?,
            });
        }
        for descriptor in &mut index.manifests {
            if descriptor.media_type != media::INDEX {
                continue;
            }
            let text = self.blobs.json(descriptor, "the image index")?;
            let mut inner: Index = oci::parse("the image index", &text).map_err(bad)?;
            if !replace(&mut inner, self.criu, criu) {
                continue;
            }
            let inner = json(&inner)?;
            let old = std::mem::replace(&mut descriptor.digest, Digest::of(&inner));
            descriptor.size = inner.len() as u64;
            return Ok(Indexes {
                old: Some(old),
                nested: Some(inner),
                index: json(&index)?,
            });
        }
        Err(bad(Bad::NoImage))
    }

    fn without_digest(&self) -> Error {
        Error::Unsupported {
            path: self.source.path().into(),
            reason: "a blob was written without its digest".into(),
        }
    }
}

/// Writes the blobs of an image unchanged into a tar of its layout, so that its digest and its signature stay valid.
///
/// # Errors
/// [`Error::Unsupported`]: it is no image. [`Error::Exists`].
pub fn copy_image(source: &Source, to: &Path, progress: &Arc<Progress>) -> Result<(), Error> {
    let SourceInner::Image(image) = &source.inner else {
        return Err(source.no_image());
    };
    let staging = Staging::file(to, false)?;
    let mut out = Store::tar(&staging)?;
    let digests = image.blobs.digests()?;
    with_pool(1, 1, progress, true, |pool| {
        let mut blobs = digests.iter();
        blobs.try_for_each(|digest| copy(&image.blobs, &out, pool, digest).map(drop))
    })?;
    out.close(&image.blobs.document(names::OCI_INDEX)?)?;
    staging.commit()
}

/// Copies a blob. Returns its size in bytes.
fn copy(blobs: &Blobs, out: &Store, pool: &Pool<'_>, digest: &Digest) -> Result<u64, Error> {
    let mut section = blobs.raw(digest)?;
    let bytes = section.left();
    let written = out.layer(pool, &StreamFormat::PLAIN, |input| {
        let taken = input.take(&mut section, bytes);
        taken.map_err(|e| Error::from_io(blobs.path(), "read it", e))
    })?;
    match &written.blob {
        Some(found) if found == digest => Ok(bytes),
        found => Err(Error::bad(
            blobs.path(),
            Bad::BlobDigest {
                expected: digest.to_string(),
                found: found.as_ref().map_or_else(String::new, Digest::to_string),
            },
        )),
    }
}

fn replace(index: &mut Index, old: &Descriptor, new: &Descriptor) -> bool {
    let mut places = index
        .manifests
        .iter_mut()
        .filter(|d| d.media_type == old.media_type && d.digest == old.digest);
    match places.next() {
        Some(place) => {
            *place = Descriptor {
                digest: new.digest.clone(),
                size: new.size,
                ..place.clone()
            };
            true
        }
        None => false,
    }
}
