//! CRIU's images, read for people: what the checkpoint holds, process by process. Nothing here is needed for a
//! restore, and nothing is written.
//!
//! An image is a head of one or two magic numbers, then messages in protobuf, each after its length. The numbers
//! of the fields are those of CRIU's `images/*.proto`; fields that are not named here are passed over, so images
//! of newer versions are read too. The caller hands in the small files ([`is_wanted`]); memory pages are not
//! looked at.

mod image;
pub mod privileges;
mod proto;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::Serialize;

pub use image::ImageError;
use image::{Bounds, messages};
use proto::{CoreEntry, FileEntry, MntEntry, PagemapEntry, PagemapHead, PstreeEntry, StatsEntry};

/// Bytes of a page where the images do not say otherwise.
const PAGE: u64 = 4096;

/// Is this file of an image directory (or beside it) one that [`read`] looks at? `name` is without directories.
pub fn is_wanted(name: &str) -> bool {
    let numbered = |prefix: &str| name.starts_with(prefix) && name.ends_with(".img");
    matches!(
        name,
        "inventory.img" | "pstree.img" | "files.img" | "stats-dump" | "stats-restore"
    ) || ["core-", "pagemap-", "mountpoints-"]
        .into_iter()
        .any(numbered)
}

/// What the images tell.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Facts {
    /// CRIU's version of its image format.
    pub image_version: u32,
    /// CRIU's plugins that the images need.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub plugins: Vec<String>,
    /// The machine, in the kernel's words; `None` if CRIU has a name that is not known here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arch: Option<&'static str>,
    /// The processes, parents before children where the images have them so.
    pub processes: Vec<Process>,
    /// Bytes of memory in these images, over all processes and shared memory.
    pub memory_bytes: u64,
    /// Bytes of memory left in the images of a pre-dump.
    pub parent_bytes: u64,
    /// Mounts, over all mount namespaces.
    pub mounts: usize,
    /// Those of them that come from outside: bind mounts and what a plugin serves.
    pub external_mounts: usize,
    /// Open files by kind.
    pub files: BTreeMap<&'static str, u64>,
    /// The dump's times and counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dump: Option<DumpStats>,
    /// The times of the last restore from this directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore: Option<RestoreStats>,
}

/// A process.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Process {
    /// Process id inside the container.
    pub pid: u32,
    /// Its parent's; 0 for the first.
    pub parent: u32,
    /// Its name; empty where it has none (a zombie of an old image).
    pub comm: String,
    /// `running`, `stopped`, `zombie`, ...
    pub state: &'static str,
    /// Threads, the first included.
    pub threads: usize,
    /// Bytes of its own memory in the images.
    pub memory_bytes: u64,
}

/// CRIU's own account of a dump.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct DumpStats {
    /// Until all processes stood still, in microseconds.
    pub freezing_us: u64,
    /// How long they stood still, in microseconds.
    pub frozen_us: u64,
    /// Taking the memory, in microseconds.
    pub memdump_us: u64,
    /// Writing the memory, in microseconds.
    pub memwrite_us: u64,
    /// Pages looked at.
    pub pages_scanned: u64,
    /// Pages not written, as the parent has them.
    pub pages_skipped_parent: u64,
    /// Pages written.
    pub pages_written: u64,
    /// Pages left for a lazy migration.
    pub pages_lazy: u64,
}

/// CRIU's own account of a restore.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct RestoreStats {
    /// Making the processes, in microseconds.
    pub forking_us: u64,
    /// All of it, in microseconds.
    pub restore_us: u64,
    /// Pages compared with those of the parent process.
    pub pages_compared: u64,
    /// Pages shared with the parent process.
    pub pages_skipped_cow: u64,
    /// Pages read.
    pub pages_restored: u64,
}

/// Reads the images: `files` are name (without directories) and content, `pages_bytes` is the size of all
/// `pages-*.img` together, 0 if it is not known.
///
/// # Errors
/// [`ImageError`] with the file's name and the field, if an image is damaged or `inventory.img` is missing.
pub fn read(files: &BTreeMap<String, Vec<u8>>, pages_bytes: u64) -> Result<Facts, ImageError> {
    let mut bounds = Bounds::default();
    let mut facts = Facts::default();
    inventory(files, &mut bounds, &mut facts)?;
    processes(files, &mut bounds, &mut facts)?;
    memory(files, &mut bounds, pages_bytes, &mut facts)?;
    for (name, content) in with_prefix(files, "mountpoints-") {
        let mounts: Vec<MntEntry> = messages(name, content, proto::MOUNTS_MAGIC, &mut bounds)?;
        facts.mounts += mounts.len();
        let external = |m: &&MntEntry| {
            m.ext_mount == Some(true) || m.with_plugin == Some(true) || m.ext_key.is_some()
        };
        facts.external_mounts += mounts.iter().filter(external).count();
    }
    if let Some(content) = files.get("files.img") {
        let opened: Vec<FileEntry> =
            messages("files.img", content, proto::FILES_MAGIC, &mut bounds)?;
        for file in opened {
            *facts.files.entry(proto::file_kind(file.kind)).or_default() += 1;
        }
    }
    if let Some(stats) = stats(files, "stats-dump", &mut bounds)? {
        facts.dump = stats.dump.map(Into::into);
    }
    if let Some(stats) = stats(files, "stats-restore", &mut bounds)? {
        facts.restore = stats.restore.map(Into::into);
    }
    Ok(facts)
}

/// Returns true if memory pages of these images may be compressed with LZ4 (CRIU 4.3). `inventory`: `inventory.img`.
///
/// # Errors
/// [`ImageError`] if the image is damaged.
pub fn has_compressed_pages(inventory: &[u8]) -> Result<bool, ImageError> {
    let entry = inventory_entry(inventory, &mut Bounds::default())?;
    Ok(entry.compress.is_some_and(|mode| mode != 0))
}

fn inventory(
    files: &BTreeMap<String, Vec<u8>>,
    bounds: &mut Bounds,
    facts: &mut Facts,
) -> Result<(), ImageError> {
    const NAME: &str = crate::names::CRIU_INVENTORY;
    let content = files
        .get(NAME)
        .ok_or(ImageError::Missing { file: NAME.into() })?;
    let entry = inventory_entry(content, bounds)?;
    facts.image_version = entry.img_version;
    facts.plugins = entry.plugins.map(|p| p.plugins).unwrap_or_default();
    Ok(())
}

fn inventory_entry(
    content: &[u8],
    bounds: &mut Bounds,
) -> Result<proto::InventoryEntry, ImageError> {
    const NAME: &str = crate::names::CRIU_INVENTORY;
    let entries: Vec<proto::InventoryEntry> =
        messages(NAME, content, proto::INVENTORY_MAGIC, bounds)?;
    let first = entries.into_iter().next();
    first.ok_or(ImageError::Empty { file: NAME.into() })
}

fn processes(
    files: &BTreeMap<String, Vec<u8>>,
    bounds: &mut Bounds,
    facts: &mut Facts,
) -> Result<(), ImageError> {
    const NAME: &str = "pstree.img";
    let Some(content) = files.get(NAME) else {
        return Ok(()); // a pre-dump has none
    };
    let tree: Vec<PstreeEntry> = messages(NAME, content, proto::PSTREE_MAGIC, bounds)?;
    for entry in tree {
        let name = format!("core-{}.img", entry.pid);
        let mut process = Process {
            pid: entry.pid,
            parent: entry.ppid,
            threads: entry.threads.len(),
            state: "unknown",
            ..Process::default()
        };
        if let Some(content) = files.get(&name) {
            let cores: Vec<CoreEntry> = messages(&name, content, proto::CORE_MAGIC, bounds)?;
            let core = cores
                .into_iter()
                .next()
                .ok_or(ImageError::Empty { file: name })?;
            facts.arch = facts.arch.or(proto::arch(core.mtype));
            if let Some(task) = core.tc {
                process.state = proto::task_state(task.task_state);
                process.comm = task.comm;
            }
        }
        facts.processes.push(process);
    }
    Ok(())
}

fn memory(
    files: &BTreeMap<String, Vec<u8>>,
    bounds: &mut Bounds,
    pages_bytes: u64,
    facts: &mut Facts,
) -> Result<(), ImageError> {
    let mut pages = BTreeMap::new();
    let (mut all, mut parent) = (0_u64, 0_u64);
    // Pages in LZ4 blocks, and the blocks' bytes in `pages-*.img`.
    let (mut compressed, mut compressed_bytes) = (0_u64, 0_u64);
    for (name, content) in with_prefix(files, "pagemap-") {
        let mut own = 0_u64;
        let (_, entries): (PagemapHead, Vec<PagemapEntry>) =
            image::head_and_messages(name, content, proto::PAGEMAP_MAGIC, bounds)?;
        for entry in entries {
            let count = entry.count();
            if entry.is_in_parent() {
                parent = parent.saturating_add(count);
            } else if entry.is_present() {
                own = own.saturating_add(count);
                if let Some(blocks) = entry.blocks {
                    compressed = compressed.saturating_add(count);
                    compressed_bytes = compressed_bytes.saturating_add(blocks.total_payload_size);
                }
            }
        }
        all = all.saturating_add(own);
        let pid = name
            .strip_prefix("pagemap-")
            .and_then(|n| n.strip_suffix(".img"))
            .and_then(|n| n.parse::<u32>().ok()); // not a pid: shared memory
        if let Some(pid) = pid {
            pages.insert(pid, own);
        }
    }
    // The images do not name the size of a page; that of the plain pages does, where it is known.
    let plain = all.saturating_sub(compressed);
    let plain_bytes = pages_bytes.saturating_sub(compressed_bytes);
    let page = match plain_bytes.checked_div(plain) {
        Some(n @ (4096 | 16384 | 65536)) if n.checked_mul(plain) == Some(plain_bytes) => n,
        _ => PAGE,
    };
    facts.memory_bytes = all.saturating_mul(page);
    facts.parent_bytes = parent.saturating_mul(page);
    for process in &mut facts.processes {
        let own = pages.get(&process.pid).copied().unwrap_or(0);
        process.memory_bytes = own.saturating_mul(page);
    }
    Ok(())
}

fn stats(
    files: &BTreeMap<String, Vec<u8>>,
    name: &str,
    bounds: &mut Bounds,
) -> Result<Option<StatsEntry>, ImageError> {
    let Some(content) = files.get(name) else {
        return Ok(None);
    };
    let entries: Vec<StatsEntry> = messages(name, content, proto::STATS_MAGIC, bounds)?;
    Ok(entries.into_iter().next())
}

fn with_prefix<'a>(
    files: &'a BTreeMap<String, Vec<u8>>,
    prefix: &'static str,
) -> impl Iterator<Item = (&'a str, &'a [u8])> {
    files
        .range(prefix.to_owned()..)
        .take_while(move |(name, _)| name.starts_with(prefix))
        .filter(|(name, _)| name.ends_with(".img"))
        .map(|(name, content)| (name.as_str(), content.as_slice()))
}
