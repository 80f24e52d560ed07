//! Reads CRIU's images for reports: what the checkpoint holds, process by process. No restore needs this, and nothing
//! here writes.
//!
//! The caller passes in the small files ([`is_wanted`]); memory pages are not read.

pub mod image_files;
pub mod message;
pub mod mounts;
pub mod needs;
pub mod network;
pub mod open_files;
pub mod privileges;
pub mod schema;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde::Serialize;

pub use image_files::ImageError;
use image_files::{first_message, messages};
use message::Message;

/// Page size in bytes where the images do not state it.
const PAGE: u64 = 4096;

const INVENTORY: &str = crate::format::names::CRIU_INVENTORY;
const PSTREE: &str = "pstree.img";

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
pub struct ImageFacts {
    pub image_version: u32,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub plugins: Vec<String>,
    /// The machine, in the kernel's words; `None` if CRIU's name for it is unknown here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arch: Option<&'static str>,
    /// The processes, in the order of the images: normally parents before children.
    pub processes: Vec<ProcessFacts>,
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
pub struct ProcessFacts {
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

/// CRIU's statistics of a dump; times in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct DumpStats {
    /// Until all processes were frozen.
    pub freezing_us: u64,
    /// How long the processes were frozen.
    pub frozen_us: u64,
    /// Taking the memory.
    pub memdump_us: u64,
    /// Writing the memory.
    pub memwrite_us: u64,
    pub pages_scanned: u64,
    pub pages_skipped_parent: u64,
    pub pages_written: u64,
    pub pages_lazy: u64,
}

/// CRIU's statistics of a restore; times in microseconds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RestoreStats {
    /// Creating the processes.
    pub forking_us: u64,
    pub restore_us: u64,
    /// Pages compared with those of the parent process.
    pub pages_compared: u64,
    /// Pages shared with the parent process.
    pub pages_skipped_cow: u64,
    pub pages_restored: u64,
}

/// Reads the images. `files` maps names (without directories) to contents. `pages_bytes` is the size of all
/// `pages-*.img` together, or 0 if unknown.
pub fn read(files: &BTreeMap<String, Vec<u8>>, pages_bytes: u64) -> Result<ImageFacts, ImageError> {
    let mut facts = ImageFacts::default();
    let content = files
        .get(INVENTORY)
        .ok_or_else(|| ImageError::missing(INVENTORY))?;
    let inventory = needed_message(INVENTORY, content)?;
    facts.image_version = inventory.u32("img_version").unwrap_or(0);
    let plugins = inventory.message("plugins_entry");
    facts.plugins = plugins.map_or(Vec::new(), |p| p.texts("plugins").collect());
    processes(files, &mut facts)?;
    memory(files, pages_bytes, &mut facts)?;
    for (name, content) in with_prefix(files, "mountpoints-") {
        for mount in messages(name, content)? {
            let mount = mount?;
            let is = |field| mount.number(field) == Some(1);
            let external = is("ext_mount") || is("with_plugin") || mount.has("ext_key");
            facts.mounts += 1;
            facts.external_mounts += usize::from(external);
        }
    }
    if let Some(content) = files.get("files.img") {
        for file in messages("files.img", content)? {
            let kind = file_kind(file?.u32("type").unwrap_or(0));
            *facts.files.entry(kind).or_default() += 1;
        }
    }
    let dump = stats(files, "stats-dump")?;
    facts.dump = dump.as_ref().and_then(|s| s.message("dump")).map(|dump| {
        let get = |field| dump.number(field).unwrap_or(0);
        DumpStats {
            freezing_us: get("freezing_time"),
            frozen_us: get("frozen_time"),
            memdump_us: get("memdump_time"),
            memwrite_us: get("memwrite_time"),
            pages_scanned: get("pages_scanned"),
            pages_skipped_parent: get("pages_skipped_parent"),
            pages_written: get("pages_written"),
            pages_lazy: get("pages_lazy"),
        }
    });
    let restore = stats(files, "stats-restore")?;
    facts.restore = restore
        .as_ref()
        .and_then(|s| s.message("restore"))
        .map(|restore| {
            let get = |field| restore.number(field).unwrap_or(0);
            RestoreStats {
                forking_us: get("forking_time"),
                restore_us: get("restore_time"),
                pages_compared: get("pages_compared"),
                pages_skipped_cow: get("pages_skipped_cow"),
                pages_restored: get("pages_restored"),
            }
        });
    Ok(facts)
}

/// Returns true if memory pages of these images may be compressed with LZ4 (CRIU 4.3). `inventory` is the content of
/// `inventory.img`.
pub fn has_compressed_pages(inventory: &[u8]) -> Result<bool, ImageError> {
    let compress = needed_message(INVENTORY, inventory)?.number("compress");
    Ok(compress.is_some_and(|mode| mode != 0))
}

/// Returns the first message of an image that has one.
fn needed_message(name: &str, content: &[u8]) -> Result<Message, ImageError> {
    let empty = || ImageError::Empty { file: name.into() };
    first_message(name, content)?.ok_or_else(empty)
}

fn processes(files: &BTreeMap<String, Vec<u8>>, facts: &mut ImageFacts) -> Result<(), ImageError> {
    let Some(content) = files.get(PSTREE) else {
        return Ok(()); // a pre-dump has none
    };
    for entry in messages(PSTREE, content)? {
        let entry = entry?;
        let get = |field| entry.u32(field).unwrap_or(0);
        let mut process = ProcessFacts {
            pid: get("pid"),
            parent: get("ppid"),
            threads: entry.numbers("threads").count(),
            state: "unknown",
            ..ProcessFacts::default()
        };
        let name = format!("core-{}.img", process.pid);
        if let Some(content) = files.get(&name) {
            let core = needed_message(&name, content)?;
            facts.arch = facts.arch.or(core.u32("mtype").and_then(arch));
            if let Some(task) = core.message("tc") {
                process.state = task_state(task.u32("task_state").unwrap_or(0));
                process.comm = task.text("comm").unwrap_or_default();
            }
        }
        facts.processes.push(process);
    }
    Ok(())
}

/// What one entry of a pagemap says of its pages.
struct Pages {
    count: u64,
    in_parent: bool,
    present: bool,
    /// Bytes of the blocks in which they are compressed (CRIU 4.3).
    compressed: Option<u64>,
}

impl Pages {
    fn of(entry: &Message) -> Self {
        const PARENT: u64 = 1;
        const PRESENT: u64 = 4;
        let flags = entry.number("flags");
        let count = entry.number("nr_pages");
        let blocks = entry.message("blocks");
        Self {
            count: count.or(entry.number("compat_nr_pages")).unwrap_or(0),
            // CRIU before 2.9 had no flags; then every page that is not in the parent is here.
            in_parent: flags.map_or(entry.number("in_parent") == Some(1), |f| f & PARENT != 0),
            present: flags.is_none_or(|flags| flags & PRESENT != 0),
            compressed: blocks.map(|b| b.number("total_payload_size").unwrap_or(0)),
        }
    }
}

fn memory(
    files: &BTreeMap<String, Vec<u8>>,
    pages_bytes: u64,
    facts: &mut ImageFacts,
) -> Result<(), ImageError> {
    let mut pages = BTreeMap::new();
    let (mut all, mut parent) = (0_u64, 0_u64);
    // Pages in LZ4 blocks, and the bytes of these blocks in `pages-*.img`.
    let (mut compressed, mut compressed_bytes) = (0_u64, 0_u64);
    for (name, content) in with_prefix(files, "pagemap-") {
        let mut own = 0_u64;
        for entry in messages(name, content)?.skip(1) {
            let entry = Pages::of(&entry?);
            if entry.in_parent {
                parent = parent.saturating_add(entry.count);
            } else if entry.present {
                own = own.saturating_add(entry.count);
                if let Some(bytes) = entry.compressed {
                    compressed = compressed.saturating_add(entry.count);
                    compressed_bytes = compressed_bytes.saturating_add(bytes);
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

fn stats(files: &BTreeMap<String, Vec<u8>>, name: &str) -> Result<Option<Message>, ImageError> {
    let content = files.get(name).map(|content| first_message(name, content));
    Ok(content.transpose()?.flatten())
}

fn task_state(state: u32) -> &'static str {
    match state {
        1 => "running",
        2 => "dead",
        3 => "stopped",
        6 => "zombie",
        _ => "unknown",
    }
}

fn arch(mtype: u32) -> Option<&'static str> {
    let names = [
        "x86_64",
        "arm",
        "aarch64",
        "ppc64le",
        "s390x",
        "mips",
        "loongarch64",
        "riscv64",
    ];
    names.get((mtype as usize).checked_sub(1)?).copied()
}

fn file_kind(kind: u32) -> &'static str {
    const NAMES: [&str; 20] = [
        "file",
        "pipe",
        "fifo",
        "inet socket",
        "unix socket",
        "eventfd",
        "epoll",
        "inotify",
        "signalfd",
        "packet socket",
        "terminal",
        "fanotify",
        "netlink socket",
        "namespace",
        "tun",
        "device of a plugin",
        "timerfd",
        "memfd",
        "bpf map",
        "pidfd",
    ];
    let at = (kind as usize).checked_sub(1);
    at.and_then(|at| NAMES.get(at).copied()).unwrap_or("other")
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
