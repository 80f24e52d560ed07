//! Verifies that an archive is complete and undamaged.

mod shards;

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::shards::SeenShards;
use crate::bytes::decode::{Hash, with_decoder};
use crate::container::file_sizes::{self, FileSizes};
use crate::error::{Bad, Error};
use crate::format::entry::Entry;
use crate::format::limits::Limits;
use crate::format::limits::threads_or_cores;
use crate::format::names;
use crate::format::oci::annotation;
use crate::metadata::Metadata;
use crate::progress::Progress;
use crate::source::walk::{Sink, walk};
use crate::source::{Kind, Source};
use crate::store::{self, Found, Reference, StoreError};
use crate::vram::index::MAX_BYTES;
use crate::vram::{self, VramError};

#[derive(Debug, Clone, Default)]
pub struct VerifyOptions {
    /// 0: one per core.
    pub threads: usize,
    /// Directories to search for parent checkpoints that have moved.
    pub parents: Vec<PathBuf>,
    /// Stores to search for the large files of a checkpoint.
    pub stores: Vec<PathBuf>,
    pub limits: Limits,
    pub progress: Arc<Progress>,
}

#[derive(Debug, Clone)]
pub struct Verified {
    pub kind: Kind,
    pub files: u64,
    pub bytes: u64,
    /// Layers whose digests were checked, both of the blob and of its decompressed content.
    pub layers: usize,
    pub chunks: u64,
    pub metadata: Option<Metadata>,
    /// The large files in a store. The counts above do not include them.
    pub stored: Option<Found>,
}

/// Reads a whole checkpoint and checks everything possible: digests, names, the compression's checksums, CRIU's magic
/// numbers, `cryopod.json`, the VRAM files' chunks, stated sizes, and the sizes of the files that processes have open.
pub fn verify(source: &Source, options: &VerifyOptions) -> Result<Verified, Error> {
    verify_with(source, table(source, &options.limits)?, options)
}

/// Reads the table of GPU memory in an archive; `None` if it has none.
pub fn table(source: &Source, limits: &Limits) -> Result<Option<Vec<u8>>, Error> {
    let table = format!("{}/{}", names::CHECKPOINT_DIR, names::VRAM_INDEX);
    let limits = Limits {
        small_file_bytes: MAX_BYTES,
        small_total_bytes: MAX_BYTES,
        ..limits.clone()
    };
    let mut tables = source.small_files(&|name| name == table, &limits)?;
    Ok(tables.remove(&table))
}

/// [`verify`], with the archive's [`table`].
pub fn verify_with(
    source: &Source,
    table: Option<Vec<u8>>,
    options: &VerifyOptions,
) -> Result<Verified, Error> {
    // CRIU's list of open files may be long.
    let limits = Limits {
        small_file_bytes: options.limits.small_file_bytes.max(256 << 20),
        small_total_bytes: options.limits.small_total_bytes.max(1 << 30),
        ..options.limits.clone()
    };
    let opened = source.small_files(&|name| file_sizes::is_wanted(name), &limits)?;
    let sizes = FileSizes::of(source, &opened)?;
    let shards = table.map(|text| SeenShards::new(&text)).transpose();
    let shards = shards.map_err(|bad| Error::bad(source.path(), bad))?;
    let sink = Verifier {
        source,
        limits: &options.limits,
        shards,
        sizes,
        found: Mutex::default(),
    };
    with_decoder(options.threads, &options.progress, |decoder| {
        walk(source, &options.limits, decoder, &sink)
    })?;
    if let Some(reason) = sink.sizes.differences().into_iter().next() {
        let name = names::ROOTFS_DIFF.to_owned();
        return Err(Error::bad(source.path(), Bad::Content { name, reason }));
    }
    let found = sink
        .found
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    let missing = |name: &str| Err(Error::bad(source.path(), Bad::MissingFile(name.into())));
    if !found.inventory {
        return missing(INVENTORY);
    }
    if let Some(stated) = stated_bytes(source).filter(|bytes| *bytes != found.bytes) {
        let reason = format!(
            "the image says {stated} bytes of content and has {}",
            found.bytes
        );
        return Err(Error::bad(
            source.path(),
            Bad::Content {
                name: annotation::CONTENT_BYTES.into(),
                reason,
            },
        ));
    }
    let mut found = found;
    let stored = stored(source, sink.shards.as_ref(), &mut found, options)?;
    let found = found;
    let chunks = match &sink.shards {
        None if !found.wants_vram => 0,
        None => return missing(&format!("{}/{}", names::CHECKPOINT_DIR, names::VRAM_INDEX)),
        Some(shards) => shards.checked(),
    };
    let absent = |name: &&String| !found.shards.contains(*name);
    if let Some(name) = sink.shards.iter().flat_map(SeenShards::names).find(absent) {
        return missing(name);
    }
    if found.gpu && found.metadata.is_none() {
        return missing(names::METADATA);
    }
    if let Some(metadata) = &found.metadata {
        SeenShards::recorded(sink.shards.as_ref(), metadata)
            .map_err(|bad| Error::bad(source.path(), bad))?;
    }
    let chunks = match &sink.shards {
        Some(shards) => chunks + parent_chunks(source, shards, options)?,
        None => chunks,
    };
    let layers = source.image().map_or(0, |i| i.manifest.layers.len());
    let (files, bytes, metadata) = (found.files, found.bytes, found.metadata);
    Ok(Verified {
        kind: source.kind(),
        files,
        bytes,
        layers,
        chunks,
        metadata,
        stored,
    })
}

/// Checks the files in a store. Skips those that the checkpoint has itself, like a restore.
fn stored(
    source: &Source,
    shards: Option<&SeenShards>,
    found: &mut SeenFiles,
    options: &VerifyOptions,
) -> Result<Option<Found>, Error> {
    let Some(text) = &found.reference else {
        return Ok(None);
    };
    let path = source.path().join(names::STORE_REFERENCE);
    let failed = |e: StoreError| Error::Unsupported {
        path: source.path().into(),
        reason: e.to_string(),
    };
    let reference = Reference::parse(text, &path).map_err(failed)?;
    let stored = store::find_in(reference, &path, &options.stores).map_err(failed)?;
    stored
        .verify(threads_or_cores(options.threads), None)
        .map_err(failed)?;
    for file in &stored.reference.files {
        let name = format!("{}/{}", names::CHECKPOINT_DIR, file.name);
        if found.shards.contains(&name) {
            continue;
        }
        if let Some(shards) = shards {
            let mut reader = io::BufReader::new(stored.open(file).map_err(failed)?);
            let checked = shards.check(&name, file.bytes, &mut reader);
            if checked.map_err(|e| Error::from_io(&stored.path(file), "read it", e))? {
                found.shards.insert(name);
            }
        }
    }
    Ok(Some(stored))
}

/// Checks the chunks in parent checkpoints. Returns their number.
fn parent_chunks(
    source: &Source,
    shards: &SeenShards,
    options: &VerifyOptions,
) -> Result<u64, Error> {
    let failed = |e: VramError| Error::Unsupported {
        path: source.path().into(),
        reason: e.to_string(),
    };
    let dir = source.images_directory();
    let search: Vec<PathBuf> = options
        .parents
        .iter()
        .chain(&options.stores)
        .cloned()
        .collect();
    let found = vram::parent_of(shards.table(), dir.as_deref(), &search);
    let Some(parent) = found.map_err(failed)? else {
        return Ok(0);
    };
    let path = dir.as_deref().unwrap_or(source.path());
    parent
        .holds(shards.table(), &path.join(names::VRAM_INDEX))
        .map_err(failed)?;
    let numbers = shards.in_parent();
    let threads = threads_or_cores(options.threads);
    parent
        .verify_chunks(&numbers, threads, &AtomicBool::new(false))
        .map_err(failed)?;
    Ok(numbers.len() as u64)
}

/// The content size that an image of cryopod states.
fn stated_bytes(source: &Source) -> Option<u64> {
    source
        .image()?
        .manifest
        .annotations
        .get(annotation::CONTENT_BYTES)?
        .parse()
        .ok()
}

const INVENTORY: &str = "checkpoint/inventory.img";
/// CRIU's magic of an image file, and that of the inventory.
const INVENTORY_MAGIC: [u8; 4] = [0x16, 0x31, 0x31, 0x58];
/// CRIU 4.1 and 4.2 write the inventory, alone of all images, without this prefix.
const COMMON_MAGIC: [u8; 4] = [0x19, 0x43, 0x56, 0x54];
const JSON: [&str; 5] = [
    names::CONFIG_DUMP,
    names::SPEC_DUMP,
    names::STATUS_DUMP,
    names::NETWORK_STATUS,
    names::DELETED_FILES,
];

#[derive(Default)]
struct SeenFiles {
    files: u64,
    bytes: u64,
    inventory: bool,
    shards: BTreeSet<String>,
    /// cryopod's plugin has saved processes, and the metadata comes last.
    gpu: bool,
    /// Some buffers need the VRAM files for their contents.
    wants_vram: bool,
    metadata: Option<Metadata>,
    reference: Option<Vec<u8>>,
}

struct Verifier<'v> {
    source: &'v Source,
    limits: &'v Limits,
    shards: Option<SeenShards>,
    sizes: FileSizes,
    found: Mutex<SeenFiles>,
}

impl Verifier<'_> {
    fn found(&self) -> MutexGuard<'_, SeenFiles> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks a shard of the VRAM files; `false` if the entry is not a shard.
    fn shard(&self, entry: &Entry, reader: &mut dyn Read) -> Result<bool, Error> {
        let Some(shards) = &self.shards else {
            return Ok(false);
        };
        let checked = shards.check(&entry.name, entry.size, reader);
        checked.map_err(|e| Error::from_io(self.source.path(), "read it", e))
    }

    fn small(&self, entry: &Entry, reader: &mut dyn Read) -> Result<Vec<u8>, Error> {
        let read = entry.read_small(reader, self.limits);
        read.map_err(|e| Error::from_io(self.source.path(), "read it", e))
    }
}

impl Sink for Verifier<'_> {
    fn hash(&self) -> Hash {
        Hash::Both
    }

    fn entry(&self, entry: &Entry, reader: &mut dyn Read) -> Result<(), Error> {
        let bad = |bad| Error::bad(self.source.path(), bad);
        let content = |reason: String| {
            bad(Bad::Content {
                name: entry.name.clone(),
                reason,
            })
        };
        if !entry.is_file() {
            return Ok(());
        }
        if entry.name == INVENTORY {
            let text = self.small(entry, reader)?;
            let own = text.strip_prefix(&COMMON_MAGIC[..]).unwrap_or(&text);
            if !own.starts_with(&INVENTORY_MAGIC) {
                return Err(content("not an image of CRIU".into()));
            }
            self.found().inventory = true;
        } else if entry.name.strip_prefix("checkpoint/") == Some(names::METADATA) {
            let text = self.small(entry, reader)?;
            let metadata =
                Metadata::parse(&text, entry.name.as_ref()).map_err(|e| content(e.to_string()))?;
            self.found().metadata = Some(metadata);
        } else if entry.name.strip_prefix("checkpoint/") == Some(names::STORE_REFERENCE) {
            let text = self.small(entry, reader)?;
            self.found().reference = Some(text);
        } else if entry.name.strip_prefix("checkpoint/") == Some(names::NVIDIA_IMAGE) {
            let text = self.small(entry, reader)?;
            let record: serde_json::Value =
                serde_json::from_slice(&text).map_err(|e| content(e.to_string()))?;
            let processes = record.get("processes").and_then(|p| p.as_array());
            let buffers = |p: &serde_json::Value| p.get("vram")?.as_array().map(Vec::len);
            let mut counts = processes.into_iter().flatten().filter_map(buffers);
            let wants_vram = counts.any(|count| count > 0);
            let mut found = self.found();
            (found.gpu, found.wants_vram) = (true, wants_vram);
        } else if JSON.contains(&entry.name.as_str()) && entry.size > 0 {
            let text = self.small(entry, reader)?;
            serde_json::from_slice::<serde::de::IgnoredAny>(&text).map_err(|e| {
                bad(Bad::Json {
                    file: entry.name.clone(),
                    reason: e.to_string(),
                })
            })?;
        } else if self.shard(entry, reader)? {
            self.found().shards.insert(entry.name.clone());
        } else {
            let read = match self.sizes.counts(&entry.name) {
                true => self.sizes.read(&entry.name, entry.size, reader),
                false => io::copy(reader, &mut io::sink()),
            };
            let read = read.map_err(|e| Error::from_io(self.source.path(), "read it", e))?;
            if read != entry.size {
                return Err(content(format!("{read} bytes instead of {}", entry.size)));
            }
        }
        let mut found = self.found();
        found.files += 1;
        found.bytes += entry.size;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;

    #[test]
    fn a_table_has_the_limit_of_its_format() {
        let dir = tempfile::tempdir().unwrap();
        dir.path().put("inventory.img", "x");
        dir.path().put(names::VRAM_INDEX, "x");
        let file = std::fs::File::options()
            .append(true)
            .open(dir.path().join(names::VRAM_INDEX));
        file.unwrap().set_len(40 << 20).unwrap();
        let source = Source::open(dir.path()).unwrap();
        let table = table(&source, &Limits::default()).unwrap().unwrap();
        assert_eq!(table.len(), 40 << 20);
    }
}
