//! Reads CRIU's images for reports: what the checkpoint holds, process by process. No restore needs this, and nothing
//! here writes.
//!
//! An image starts with one or two magic numbers; protobuf messages follow, each after its length. The field numbers
//! are those of CRIU's `images/*.proto`. Unknown fields are skipped, so images of newer versions can be read too. The
//! caller passes in the small files ([`is_wanted`]); memory pages are not read.

mod image;
pub mod image_files;
pub mod message;
pub mod mounts;
pub mod network;
pub mod open_files;
pub mod privileges;
mod proto;
pub mod schema;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::Serialize;

pub use image::ImageError;
use image::{Bounds, messages};
use proto::{CoreEntry, FileEntry, MntEntry, PagemapEntry, PagemapHead, PstreeEntry, StatsEntry};
pub use proto::{DumpStats, RestoreStats};

/// Page size in bytes where the images do not state it.
const PAGE: u64 = 4096;

/// Returns true if [`read`] uses this file. `name` has no directories.
pub fn is_wanted(name: &str) -> bool {
    let numbered = |prefix: &str| name.starts_with(prefix) && name.ends_with(".img");
    matches!(
        name,
        "inventory.img" | "pstree.img" | "files.img" | "stats-dump" | "stats-restore"
    ) || ["core-", "pagemap-", "mountpoints-"]
        .into_iter()
        .any(numbered)
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Facts {
    pub image_version: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub plugins: Vec<String>,
    /// The machine, in the kernel's words; `None` if CRIU's name for it is unknown here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arch: Option<&'static str>,
    /// The processes, in the order of the images: normally parents before children.
    pub processes: Vec<Process>,
    /// Bytes of memory in these images, over all processes and shared memory.
    pub memory_bytes: u64,
    /// Bytes of memory that only the images of a pre-dump have.
    pub parent_bytes: u64,
    pub mounts: usize,
    /// Mounts whose content comes from outside: bind mounts and those that a plugin serves.
    pub external_mounts: usize,
    pub files: BTreeMap<&'static str, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dump: Option<DumpStats>,
    /// The times of the last restore from this directory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restore: Option<RestoreStats>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Process {
    /// Process id inside the container.
    pub pid: u32,
    /// The parent's process id; 0 for the first process.
    pub parent: u32,
    /// Empty if unknown (a zombie in an old image).
    pub comm: String,
    /// `running`, `stopped`, `zombie`, ...
    pub state: &'static str,
    /// Number of threads, the leader included.
    pub threads: usize,
    /// Bytes of its own memory in the images.
    pub memory_bytes: u64,
}

/// Reads the images. `files` maps names (without directories) to contents. `pages_bytes` is the size of all
/// `pages-*.img` together, or 0 if unknown.
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
        facts.dump = stats.dump;
    }
    if let Some(stats) = stats(files, "stats-restore", &mut bounds)? {
        facts.restore = stats.restore;
    }
    Ok(facts)
}

/// Returns true if memory pages of these images may be compressed with LZ4 (CRIU 4.3). `inventory` is the content of
/// `inventory.img`.
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
    // Pages in LZ4 blocks, and the bytes of these blocks in `pages-*.img`.
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
    // The images do not state the page size. It follows from the size of the uncompressed pages, where that is known.
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
