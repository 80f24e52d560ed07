//! Writes the layers of an image.

use std::sync::{Mutex, PoisonError};
use std::thread;

use super::image::{Store, descriptor, put, put_end, put_entry, shrinks};
use super::pipeline::Pool;
use super::plan::{
    self, Item, ItemContent, KnownContent, LARGE_BYTES, LARGE_LAYERS, LayerGroup, Spool,
};
use super::{PackOptions, Run};
use crate::bytes::staging::Staging;
use crate::error::Error;
use crate::format::compression::Compression;
use crate::format::digest::Digest;
use crate::format::names;
use crate::format::oci::Descriptor;
use crate::source::Source;

/// Layers that are written at the same time: each has two threads of its own, one reads and one writes.
const AT_ONCE: usize = 16;

type WrittenLayer = (Option<Digest>, Descriptor);

fn write(
    source: &Source,
    group: &LayerGroup,
    store: &Store,
    pool: &Pool<'_>,
    options: &PackOptions,
) -> Result<WrittenLayer, Error> {
    let mut compression = match group.large.as_deref() {
        Some([name]) => compression_of(name, options),
        _ => options.compression,
    };
    if compression != Compression::None && group.large.is_some() {
        // A plain layer is hashed once, a compressed one twice.
        let mut any = false;
        for item in group.items.iter().filter(|i| i.entry.size >= LARGE_BYTES) {
            any |= shrinks(item, source)?;
        }
        if !any {
            compression = Compression::None;
        }
    }
    let how = options.layer(compression);
    let written = store.layer(pool, &how, |input| {
        for item in &group.items {
            put(input, item, source)?;
        }
        put_end(input, source.path())
    })?;
    Ok((
        written.content.clone(),
        descriptor(&written, &how, group.large.as_deref())?,
    ))
}

/// Returns how a layer with this one file is compressed. The writer of VRAM files has compressed what shrinks. A layer with
/// one as it is can be put together from chunks that the reader has.
fn compression_of(name: &str, options: &PackOptions) -> Compression {
    match names::is_vram_shard(name) {
        true => Compression::None,
        false => options.compression,
    }
}

/// Writes layers whose content can be read in any order, several at a time.
pub(super) fn parallel(
    source: &Source,
    groups: &[LayerGroup],
    store: &Store,
    pool: &Pool<'_>,
    options: &PackOptions,
) -> Result<Vec<WrittenLayer>, Error> {
    let at_once = if store.parallel() {
        pool.threads().clamp(1, AT_ONCE).min(groups.len())
    } else {
        1
    };
    // The largest first, so that none runs alone at the end.
    let mut order: Vec<usize> = (0..groups.len()).collect();
    if at_once > 1 {
        order.sort_by_key(|n| {
            std::cmp::Reverse(groups[*n].items.iter().map(|i| i.entry.size).sum::<u64>())
        });
    }
    let next = Mutex::new(order.into_iter());
    let done = Mutex::new(
        (0..groups.len())
            .map(|_| None)
            .collect::<Vec<Option<WrittenLayer>>>(),
    );
    let failed = Mutex::new(None);
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let Some(n) = next.lock().unwrap_or_else(PoisonError::into_inner).next() else {
                        return;
                    };
                    if failed
                        .lock()
                        .unwrap_or_else(PoisonError::into_inner)
                        .is_some()
                    {
                        return;
                    }
                    match write(source, &groups[n], store, pool, options) {
                        Ok(layer) => {
                            done.lock().unwrap_or_else(PoisonError::into_inner)[n] = Some(layer)
                        }
                        Err(e) => {
                            failed
                                .lock()
                                .unwrap_or_else(PoisonError::into_inner)
                                .get_or_insert(e);
                            return;
                        }
                    }
                }
            });
        }
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    Ok(done
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner)
        .into_iter()
        .flatten()
        .collect())
}

/// Writes the layers of a source that can only be read from front to end: each large file as it comes, and the small
/// ones from a spool at the end.
pub(super) fn streamed(
    run: &Run<'_>,
    store: &Store,
    staging: &Staging,
    known: &mut KnownContent,
) -> Result<Vec<WrittenLayer>, Error> {
    let Run {
        source,
        pool,
        options,
        ..
    } = *run;
    let path = source.path();
    let dir = if store.parallel() {
        staging.path()
    } else {
        staging.directory_above()
    };
    let mut spool = Spool::new(dir)?;
    let mut small: Vec<Item> = Vec::new();
    for item in plan::extra(options) {
        super::note(known, &item, source, options)?;
        small.push(item);
    }
    let mut large = Vec::new();
    run.visit(&mut |entry, reader| {
        known.note(entry);
        let entry = entry.clone();
        if known.wants(&entry) {
            let text = entry
                .read_small(reader, &options.limits)
                .map_err(|e| Error::from_io(path, "read it", e))?;
            known.keep(&entry.name, &text);
            small.push(Item {
                entry,
                content: ItemContent::Bytes(text),
            });
        } else if !entry.is_file() {
            small.push(Item {
                entry,
                content: ItemContent::None,
            });
        } else if entry.size < LARGE_BYTES || large.len() >= LARGE_LAYERS {
            let section = spool
                .add(reader, entry.size)
                .map_err(|e| Error::from_io(path, "keep a part of it", e))?;
            small.push(Item {
                entry,
                content: ItemContent::Section(section),
            });
        } else {
            let how = options.layer(compression_of(&entry.name, options));
            let written = store.layer(pool, &how, |input| {
                for parent in plan::parents(&entry.name, &small) {
                    put(input, &parent, source)?;
                }
                put_entry(input, &entry, reader, path)?;
                put_end(input, path)
            })?;
            let descriptor = descriptor(&written, &how, Some(std::slice::from_ref(&entry.name)))?;
            large.push((entry.name.clone(), (written.content.clone(), descriptor)));
        }
        Ok(())
    })?;
    plan::sort(&mut small);
    let group = LayerGroup {
        items: small,
        large: None,
    };
    let mut layers = vec![write(source, &group, store, pool, options)?];
    large.sort_by(|a, b| a.0.cmp(&b.0));
    layers.extend(large.into_iter().map(|(_, layer)| layer));
    Ok(layers)
}
