//! Walks every entry of a checkpoint on all cores and checks every digest.

use std::io::{self, Read};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::image::ImageSource;
use super::tarball::Tarball;
use super::{Layer, Source, SourceInner, Visitor, visit_tar};
use crate::bytes::decode::{CountedInput, Decoder, Digests, Hash};
use crate::bytes::encryption::Identities;
use crate::bytes::hash::{HashStream, Tee};
use crate::bytes::stream::{Allowance, Section};
use crate::bytes::tarread::TarReader;
use crate::error::{Bad, Error};
use crate::format::compression::Compression;
use crate::format::entry::{Entry, Ledger};
use crate::format::limits::Limits;

/// Layers that are read at the same time: each has two threads of its own.
const AT_ONCE: usize = 16;

/// Receives entries from several threads at once. Unread content of an entry is skipped.
pub(crate) trait Sink: Sync {
    fn entry(&self, entry: &Entry, reader: &mut dyn Read) -> Result<(), Error>;

    /// Whether a layer that states its files is read at all. One that is not is not checked either.
    fn layer(&self, _files: &[String]) -> bool {
        true
    }

    /// The layer digests to check.
    fn hash(&self) -> Hash {
        Hash::Stored
    }
}

/// Passes every entry to the sink. A directory may come after its content.
pub(crate) fn walk(
    source: &Source,
    limits: &Limits,
    decoder: &Decoder<'_>,
    sink: &dyn Sink,
) -> Result<(), Error> {
    let ledger = Mutex::new(Ledger::new(limits));
    let stop = AtomicBool::new(false);
    let walk = Walk {
        source,
        limits,
        decoder,
        sink,
        ledger: &ledger,
        stop: &stop,
    };
    decoder.progress().set_total(source.stored_bytes()?);
    match &source.inner {
        SourceInner::Directory(directory) => {
            let entries = directory.list(limits)?;
            walk.each(&entries, |entry| {
                if entry.is_file() {
                    walk.counted(entry, directory.content(entry)?)
                } else {
                    walk.entry(entry, &mut io::empty())
                }
            })
        }
        SourceInner::Tar(tar) => match tar.index(limits)? {
            Some(index) => walk.each(&index, |(entry, section)| {
                walk.counted(entry, section.clone())
            }),
            None => walk.tar(Raw::of_tar(tar, limits)).map(drop),
        },
        SourceInner::Image(image) => {
            // The largest first, so that none runs alone at the end.
            let wanted = |l: &&Layer| l.files().is_none_or(|files| sink.layer(&files));
            let mut layers: Vec<&Layer> = image.layers().filter(wanted).collect();
            let bytes = layers.iter().map(|l| l.descriptor.size).sum();
            decoder.progress().set_total(bytes);
            layers.sort_by_key(|l| std::cmp::Reverse(l.descriptor.size));
            walk.each(&layers, |layer| walk.layer(image, layer))
        }
        SourceInner::Containerd(_) => visit(
            source,
            limits,
            decoder,
            &|_| true,
            Hash::Both,
            &mut |entry, reader| sink.entry(entry, reader),
        ),
    }
}

struct Walk<'w> {
    source: &'w Source,
    limits: &'w Limits,
    decoder: &'w Decoder<'w>,
    sink: &'w dyn Sink,
    ledger: &'w Mutex<Ledger>,
    stop: &'w AtomicBool,
}

impl Walk<'_> {
    fn entry(&self, entry: &Entry, reader: &mut dyn Read) -> Result<(), Error> {
        if self.stop.load(Ordering::Relaxed) {
            // Another thread has failed; the caller reports its error.
            return Err(Error::Cancelled {
                path: self.source.path().into(),
            });
        }
        let new = self
            .ledger
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take(entry);
        if new.map_err(|bad| Error::bad(self.source.path(), bad))? {
            self.sink.entry(entry, reader)?;
        }
        Ok(())
    }

    fn counted(&self, entry: &Entry, section: Section) -> Result<(), Error> {
        let mut reader = CountedInput {
            inner: section,
            progress: self.decoder.progress(),
        };
        self.entry(entry, &mut reader)
    }

    /// Runs `work` for each item, several at a time; returns the first error in the order of the items.
    fn each<T: Sync>(
        &self,
        items: &[T],
        work: impl Fn(&T) -> Result<(), Error> + Sync,
    ) -> Result<(), Error> {
        let at_once = self
            .decoder
            .threads()
            .clamp(1, AT_ONCE)
            .min(items.len().max(1));
        let next = Mutex::new(items.iter().enumerate());
        let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
        thread::scope(|scope| {
            for _ in 0..at_once {
                scope.spawn(|| {
                    loop {
                        let item = next.lock().unwrap_or_else(PoisonError::into_inner).next();
                        let Some((n, item)) = item else { return };
                        if self.stop.load(Ordering::Relaxed) {
                            return;
                        }
                        if let Err(error) = work(item) {
                            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                            let stopped = self.stop.swap(true, Ordering::Relaxed);
                            let real = !matches!(error, Error::Cancelled { .. });
                            let better = failed.as_ref().is_none_or(|(other, e)| {
                                n < *other || matches!(e, Error::Cancelled { .. })
                            });
                            if !stopped || (real && better) {
                                *failed = Some((n, error));
                            }
                            return;
                        }
                    }
                });
            }
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    fn layer(&self, image: &ImageSource, layer: &Layer) -> Result<(), Error> {
        let digests = self.tar(Raw::of(image, layer, self.limits, self.sink.hash())?)?;
        layer
            .check(&digests)
            .map_err(|bad| Error::bad(self.source.path(), bad))
    }

    fn tar(&self, raw: Raw<'_>) -> Result<Digests, Error> {
        let source = self.source.path();
        raw.entries(self.decoder, self.limits, source, &mut |entry, reader| {
            self.entry(entry, reader)
        })
    }
}

/// A tar that is read from front to end.
struct Raw<'r> {
    section: Section,
    /// It is encrypted, and one of these may open it.
    identities: Option<&'r Identities>,
    compression: Compression,
    allowance: Allowance,
    layer: Option<usize>,
    below: Option<&'r str>,
    hash: Hash,
}

impl<'r> Raw<'r> {
    fn of(
        image: &'r ImageSource,
        layer: &Layer,
        limits: &Limits,
        hash: Hash,
    ) -> Result<Self, Error> {
        let encrypted = layer.descriptor.is_encrypted();
        Ok(Self {
            section: image.blobs.open(&layer.descriptor)?,
            identities: encrypted.then_some(&image.identities),
            compression: layer.compression,
            allowance: layer.allowance(limits),
            layer: Some(layer.index),
            below: None,
            hash,
        })
    }

    fn of_tar(tar: &'r Tarball, limits: &Limits) -> Self {
        Self {
            section: tar.section().clone(),
            identities: None,
            compression: tar.compression(),
            allowance: Allowance::of(limits),
            layer: None,
            below: tar.below(),
            hash: Hash::No,
        }
    }

    fn entries(
        self,
        decoder: &Decoder<'_>,
        limits: &Limits,
        path: &Path,
        visitor: &mut Visitor<'_>,
    ) -> Result<Digests, Error> {
        let section = self.section.clone();
        let Some(identities) = self.identities else {
            return self.decoded(section, self.hash, decoder, limits, path, visitor);
        };
        // The digest is that of the stored bytes; `age` proves the others.
        let hash = HashStream::new();
        let tee = Tee {
            inner: section.clone(),
            hash: Some(&hash),
        };
        let plain = identities.decrypt(&section, tee, path)?;
        self.decoded(plain, Hash::No, decoder, limits, path, visitor)?;
        let blob = hash.finish().map_err(Error::io(path, "read it"))?;
        Ok(Digests {
            blob: Some(blob),
            content: None,
        })
    }

    fn decoded(
        &self,
        raw: impl Read + Send,
        hash: Hash,
        decoder: &Decoder<'_>,
        limits: &Limits,
        path: &Path,
        visitor: &mut Visitor<'_>,
    ) -> Result<Digests, Error> {
        let read = decoder.read(raw, self.compression, self.allowance, hash, |output| {
            let mut reader = TarReader::new(output, limits, self.layer);
            visit_tar(&mut reader, self.below, path, visitor).map_err(WalkError::Ours)?;
            reader.finish()?;
            Ok::<_, WalkError>(())
        });
        match read {
            Ok(((), digests)) => Ok(digests),
            Err(WalkError::Ours(e)) => Err(e),
            Err(WalkError::Io(e)) => Err(Error::from_io(path, "read it", e)),
        }
    }
}

/// Visits the entries one after the other, without the layers for which `wanted` returns false; these are not checked.
/// `hash`: the layer digests to check.
pub(crate) fn visit(
    source: &Source,
    limits: &Limits,
    decoder: &Decoder<'_>,
    wanted: &dyn Fn(&Layer) -> bool,
    hash: Hash,
    visitor: &mut Visitor<'_>,
) -> Result<(), Error> {
    let path = source.path();
    let mut ledger = Ledger::new(limits);
    let counts = matches!(
        source.inner,
        SourceInner::Directory(_) | SourceInner::Containerd(_)
    );
    let mut new = |entry: &Entry, reader: &mut dyn Read| match ledger.take(entry) {
        Ok(true) => {
            if counts {
                decoder.progress().add_done(entry.size);
            }
            visitor(entry, reader)
        }
        Ok(false) => Ok(()),
        Err(bad) => Err(Error::bad(path, bad)),
    };
    match &source.inner {
        SourceInner::Tar(tar) => {
            let raw = Raw::of_tar(tar, limits);
            raw.entries(decoder, limits, path, &mut new).map(drop)
        }
        SourceInner::Image(image) => {
            for layer in image.layers().filter(|l| wanted(l)) {
                let raw = Raw::of(image, layer, limits, hash)?;
                let digests = raw.entries(decoder, limits, path, &mut new)?;
                layer.check(&digests).map_err(|bad| Error::bad(path, bad))?;
            }
            Ok(())
        }
        SourceInner::Directory(directory) => directory.visit(limits, &mut new),
        SourceInner::Containerd(containerd) => containerd.visit(limits, &mut new),
    }
}

impl Layer {
    /// Compares the digests with those of manifest and config. The blob's digest must be there. If it matches, a wrong
    /// digest of the decompressed content is a mistake of the config; only a verification looks for it.
    pub(crate) fn check(&self, digests: &Digests) -> Result<(), Bad> {
        let blob = &digests.blob;
        // That of an encrypted content would confirm a guess, so the config has the blob's.
        let content = match self.descriptor.is_encrypted() {
            true => blob,
            false => &digests.content,
        };
        if blob.as_ref() != Some(&self.descriptor.digest) {
            let found = blob
                .as_ref()
                .map_or_else(|| "none".into(), ToString::to_string);
            return Err(Bad::BlobDigest {
                expected: self.descriptor.digest.to_string(),
                found,
            });
        }
        match content {
            Some(found) if *found != self.diff_id => Err(Bad::DiffId {
                layer: self.index,
                expected: self.diff_id.to_string(),
                found: found.to_string(),
            }),
            _ => Ok(()),
        }
    }
}

enum WalkError {
    Ours(Error),
    Io(io::Error),
}

impl From<io::Error> for WalkError {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}
