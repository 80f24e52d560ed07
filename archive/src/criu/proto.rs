//! Defines the fields of CRIU's messages that are read here. Field numbers and magic numbers are those of CRIU's
//! `images/*.proto` and its list of magics. A missing `required` field reads as 0.

use prost::Message;

use super::{DumpStats, RestoreStats};

pub const COMMON_MAGIC: u32 = 0x5456_4319;
pub const SERVICE_MAGIC: u32 = 0x5510_5940;
pub const INVENTORY_MAGIC: u32 = 0x5831_3116;
pub const PSTREE_MAGIC: u32 = 0x5027_3030;
pub const CORE_MAGIC: u32 = 0x5505_3847;
pub const PAGEMAP_MAGIC: u32 = 0x5608_4025;
pub const MOUNTS_MAGIC: u32 = 0x5556_3928;
pub const FILES_MAGIC: u32 = 0x5630_3138;
pub const STATS_MAGIC: u32 = 0x5709_3306;

const PARENT: u32 = 1;
const PRESENT: u32 = 4;

#[derive(Clone, PartialEq, Message)]
pub struct InventoryEntry {
    #[prost(uint32, tag = "1")]
    pub img_version: u32,
    #[prost(message, optional, tag = "12")]
    pub plugins: Option<PluginsEntry>,
    /// Compression of the memory pages; 0: none.
    #[prost(uint32, optional, tag = "15")]
    pub compress: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PluginsEntry {
    #[prost(string, repeated, tag = "12")]
    pub plugins: Vec<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PstreeEntry {
    #[prost(uint32, tag = "1")]
    pub pid: u32,
    #[prost(uint32, tag = "2")]
    pub ppid: u32,
    #[prost(uint32, repeated, packed = "false", tag = "5")]
    pub threads: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct CoreEntry {
    #[prost(uint32, tag = "1")]
    pub mtype: u32,
    #[prost(message, optional, tag = "3")]
    pub tc: Option<TaskCoreEntry>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TaskCoreEntry {
    #[prost(uint32, tag = "1")]
    pub task_state: u32,
    #[prost(string, tag = "6")]
    pub comm: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct PagemapHead {
    #[prost(uint32, tag = "1")]
    pub pages_id: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct PagemapEntry {
    #[prost(uint32, tag = "2")]
    pub compat_nr_pages: u32,
    #[prost(bool, optional, tag = "3")]
    pub in_parent: Option<bool>,
    #[prost(uint32, optional, tag = "4")]
    pub flags: Option<u32>,
    #[prost(uint64, optional, tag = "5")]
    pub nr_pages: Option<u64>,
    /// Where compressed pages lie (CRIU 4.3).
    #[prost(message, optional, tag = "6")]
    pub blocks: Option<PagemapBlocks>,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub struct PagemapBlocks {
    #[prost(uint64, tag = "2")]
    pub total_payload_size: u64,
}

impl PagemapEntry {
    pub fn count(&self) -> u64 {
        self.nr_pages
            .unwrap_or_else(|| u64::from(self.compat_nr_pages))
    }

    pub fn is_in_parent(&self) -> bool {
        match self.flags {
            Some(flags) => flags & PARENT != 0,
            None => self.in_parent == Some(true),
        }
    }

    /// Returns true if these images have the pages. CRIU before 2.9 had no flags; then every page that is not in the
    /// parent is here.
    pub fn is_present(&self) -> bool {
        self.flags.is_none_or(|flags| flags & PRESENT != 0)
    }
}

#[derive(Clone, PartialEq, Message)]
pub struct MntEntry {
    #[prost(bool, optional, tag = "12")]
    pub with_plugin: Option<bool>,
    #[prost(bool, optional, tag = "13")]
    pub ext_mount: Option<bool>,
    #[prost(string, optional, tag = "18")]
    pub ext_key: Option<String>,
}

#[derive(Clone, PartialEq, Message)]
pub struct FileEntry {
    #[prost(uint32, tag = "1")]
    pub kind: u32,
}

#[derive(Clone, PartialEq, Message)]
pub struct StatsEntry {
    #[prost(message, optional, tag = "1")]
    pub dump: Option<DumpStatsEntry>,
    #[prost(message, optional, tag = "2")]
    pub restore: Option<RestoreStatsEntry>,
}

#[derive(Clone, PartialEq, Message)]
pub struct DumpStatsEntry {
    #[prost(uint32, tag = "1")]
    pub freezing_time: u32,
    #[prost(uint32, tag = "2")]
    pub frozen_time: u32,
    #[prost(uint32, tag = "3")]
    pub memdump_time: u32,
    #[prost(uint32, tag = "4")]
    pub memwrite_time: u32,
    #[prost(uint64, tag = "5")]
    pub pages_scanned: u64,
    #[prost(uint64, tag = "6")]
    pub pages_skipped_parent: u64,
    #[prost(uint64, tag = "7")]
    pub pages_written: u64,
    #[prost(uint64, tag = "9")]
    pub pages_lazy: u64,
}

impl From<DumpStatsEntry> for DumpStats {
    fn from(e: DumpStatsEntry) -> Self {
        Self {
            freezing_us: e.freezing_time.into(),
            frozen_us: e.frozen_time.into(),
            memdump_us: e.memdump_time.into(),
            memwrite_us: e.memwrite_time.into(),
            pages_scanned: e.pages_scanned,
            pages_skipped_parent: e.pages_skipped_parent,
            pages_written: e.pages_written,
            pages_lazy: e.pages_lazy,
        }
    }
}

#[derive(Clone, PartialEq, Message)]
pub struct RestoreStatsEntry {
    #[prost(uint64, tag = "1")]
    pub pages_compared: u64,
    #[prost(uint64, tag = "2")]
    pub pages_skipped_cow: u64,
    #[prost(uint32, tag = "3")]
    pub forking_time: u32,
    #[prost(uint32, tag = "4")]
    pub restore_time: u32,
    #[prost(uint64, tag = "5")]
    pub pages_restored: u64,
}

impl From<RestoreStatsEntry> for RestoreStats {
    fn from(e: RestoreStatsEntry) -> Self {
        Self {
            forking_us: e.forking_time.into(),
            restore_us: e.restore_time.into(),
            pages_compared: e.pages_compared,
            pages_skipped_cow: e.pages_skipped_cow,
            pages_restored: e.pages_restored,
        }
    }
}

pub fn task_state(state: u32) -> &'static str {
    match state {
        1 => "running",
        2 => "dead",
        3 => "stopped",
        6 => "zombie",
        _ => "unknown",
    }
}

pub fn arch(mtype: u32) -> Option<&'static str> {
    Some(match mtype {
        1 => "x86_64",
        2 => "arm",
        3 => "aarch64",
        4 => "ppc64le",
        5 => "s390x",
        6 => "mips",
        7 => "loongarch64",
        8 => "riscv64",
        _ => return None,
    })
}

pub fn file_kind(kind: u32) -> &'static str {
    match kind {
        1 => "file",
        2 => "pipe",
        3 => "fifo",
        4 => "inet socket",
        5 => "unix socket",
        6 => "eventfd",
        7 => "epoll",
        8 => "inotify",
        9 => "signalfd",
        10 => "packet socket",
        11 => "terminal",
        12 => "fanotify",
        13 => "netlink socket",
        14 => "namespace",
        15 => "tun",
        16 => "device of a plugin",
        17 => "timerfd",
        18 => "memfd",
        19 => "bpf map",
        20 => "pidfd",
        _ => "other",
    }
}
