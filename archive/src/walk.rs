//! Every entry of a checkpoint, on all cores, with every digest checked.

use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::decode::{Decoder, Digests};
use crate::entry::{Entry, Ledger};
use crate::error::{Bad, Error};
use crate::limits::Limits;
use crate::progress::Progress;
use crate::source::{Inner, Layer, Source, visit_tar};
use crate::stream::{Allowance, Compression, Section};
use crate::tarread::TarReader;

/// Layers that are read at the same time: each has up to three threads of its own.
const AT_ONCE: usize = 6;

/// Takes entries, from several threads at once. What was not read of an entry is left out.
pub(crate) trait Sink: Sync {
    fn entry(&self, entry: &Entry, reader: &mut dyn Read) -> Result<(), Error>;
}

/// Gives every entry to the sink. A folder may come after what lies in it.
///
/// # Errors
/// The first thing that is wrong. Digests are checked at the end of each layer: until this has returned, nothing
/// that the sink was given may be used.
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
        Inner::Folder(folder) => {
            let entries = folder.list(limits)?;
            walk.each(&entries, |entry| {
                if entry.is_file() {
                    walk.counted(entry, folder.content(entry)?)
                } else {
                    walk.entry(entry, &mut io::empty())
                }
            })
        }
        Inner::Tar(tar) => match tar.index(limits)? {
            Some(index) => walk.each(&index, |(entry, section)| {
                walk.counted(entry, section.clone())
            }),
            None => {
                let allowance = Allowance::of(limits);
                let raw = tar.section().clone();
                walk.tar(raw, tar.compression(), allowance, None, tar.below(), false)
                    .map(drop)
            }
        },
        Inner::Image(image) => {
            // The largest first, so that none is left alone at the end.
            let mut layers: Vec<&Layer> = image.layers().collect();
            layers.sort_by_key(|l| std::cmp::Reverse(l.descriptor.size));
            walk.each(&layers, |layer| {
                walk.layer(layer, image.blobs.open(&layer.descriptor)?)
            })
        }
        Inner::Containerd(_) => source.visit(limits, &mut |entry, reader| {
            decoder.progress().add_done(entry.size);
            sink.entry(entry, reader)
        }),
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
        if self.decoder.progress().is_cancelled() {
            return Err(Error::Cancelled {
                path: self.source.path().into(),
            });
        }
        if self.stop.load(Ordering::Relaxed) {
            // Another thread has failed, and its error is the one that is told.
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
        let mut reader = Counted {
            inner: section,
            progress: self.decoder.progress(),
        };
        self.entry(entry, &mut reader)
    }

    /// Runs `work` for each item, several at a time; the first error in the order of the items is returned.
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

    fn layer(&self, layer: &Layer, section: Section) -> Result<(), Error> {
        let allowance = layer.allowance(self.limits);
        let index = Some(layer.index);
        let digests = self.tar(section, layer.compression, allowance, index, None, true)?;
        layer
            .check(&digests)
            .map_err(|bad| Error::bad(self.source.path(), bad))
    }

    fn tar(
        &self,
        raw: Section,
        compression: Compression,
        allowance: Allowance,
        layer: Option<usize>,
        below: Option<&str>,
        hash: bool,
    ) -> Result<Digests, Error> {
        let path = self.source.path();
        let read = self
            .decoder
            .read(raw, compression, allowance, hash, |output| {
                let mut reader = TarReader::new(output, self.limits, layer);
                let visited = visit_tar(&mut reader, below, path, &mut |entry, reader| {
                    self.entry(entry, reader)
                });
                visited.map_err(Carried::Ours)?;
                reader.finish()?;
                Ok::<_, Carried>(())
            });
        match read {
            Ok(((), digests)) => Ok(digests),
            Err(Carried::Ours(e)) => Err(e),
            Err(Carried::Io(e)) => Err(Error::from_io(path, "read it", e)),
        }
    }
}

impl Layer {
    /// Are these the digests that manifest and config state?
    pub(crate) fn check(&self, digests: &Digests) -> Result<(), Bad> {
        let (blob, content) = (&digests.blob, &digests.content);
        if blob.as_ref() != Some(&self.descriptor.digest) {
            let found = blob
                .as_ref()
                .map_or_else(|| "none".into(), ToString::to_string);
            return Err(Bad::BlobDigest {
                expected: self.descriptor.digest.to_string(),
                found,
            });
        }
        if content.as_ref() != Some(&self.diff_id) {
            let found = content
                .as_ref()
                .map_or_else(|| "none".into(), ToString::to_string);
            return Err(Bad::DiffId {
                layer: self.index,
                expected: self.diff_id.to_string(),
                found,
            });
        }
        Ok(())
    }
}

enum Carried {
    Ours(Error),
    Io(io::Error),
}

impl From<io::Error> for Carried {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}

struct Counted<'p> {
    inner: Section,
    progress: &'p Progress,
}

impl Read for Counted<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buf)?;
        self.progress.add_done(n as u64);
        Ok(n)
    }
}
