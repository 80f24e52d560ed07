//! Defines the fields of CRIU's messages that are read here. Field numbers and magic numbers are those of CRIU's
//! `images/*.proto` and its list of magics. A missing `required` field reads as 0.

use prost::Message;
use serde::Serialize;

pub const COMMON_MAGIC: u32 = 0x5456_4319;
pub const SERVICE_MAGIC: u32 = 0x5510_5940;
pub const INVENTORY_MAGIC: u32 = 0x5831_3116;
pub const PSTREE_MAGIC: u32 = 0x5027_3030;
pub const CORE_MAGIC: u32 = 0x5505_3847;
pub const PAGEMAP_MAGIC: u32 = 0x5608_4025;
pub const MOUNTS_MAGIC: u32 = 0x5556_3928;
pub const FILES_MAGIC: u32 = 0x5630_3138;
pub const IDS_MAGIC: u32 = 0x5443_2030;
pub const NETNS_MAGIC: u32 = 0x5593_3752;
pub const STATS_MAGIC: u32 = 0x5709_3306;

const PARENT: u32 = 1;
const PRESENT: u32 = 4;

#[derive(Clone, PartialEq, Message)]
pub struct InventoryEntry {
    #[prost(uint32, tag = "1")]
    pub img_version: u32,
    /// The namespaces that CRIU ran in at the checkpoint.
    #[prost(message, optional, tag = "3")]
    pub root_ids: Option<Ids>,
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
    #[prost(message, optional, tag = "5")]
    pub thread_core: Option<ThreadCore>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TaskCoreEntry {
    #[prost(uint32, tag = "1")]
    pub task_state: u32,
    #[prost(string, tag = "6")]
    pub comm: String,
    #[prost(uint32, optional, tag = "11")]
    pub old_seccomp_mode: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct ThreadCore {
    #[prost(message, optional, tag = "10")]
    pub creds: Option<Creds>,
    #[prost(uint32, optional, tag = "11")]
    pub seccomp_mode: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    pub seccomp_filter: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Creds {
    #[prost(uint32, tag = "1")]
    pub uid: u32,
    #[prost(uint32, tag = "2")]
    pub gid: u32,
    #[prost(uint32, tag = "3")]
    pub euid: u32,
    #[prost(uint32, tag = "4")]
    pub egid: u32,
    #[prost(uint32, tag = "5")]
    pub suid: u32,
    #[prost(uint32, tag = "6")]
    pub sgid: u32,
    #[prost(uint32, tag = "7")]
    pub fsuid: u32,
    #[prost(uint32, tag = "8")]
    pub fsgid: u32,
    #[prost(uint32, repeated, packed = "false", tag = "9")]
    pub cap_inh: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "10")]
    pub cap_prm: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "11")]
    pub cap_eff: Vec<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "12")]
    pub cap_bnd: Vec<u32>,
    #[prost(uint32, tag = "13")]
    pub secbits: u32,
    #[prost(uint32, repeated, packed = "false", tag = "14")]
    pub groups: Vec<u32>,
    #[prost(string, optional, tag = "15")]
    pub lsm_profile: Option<String>,
    #[prost(uint32, optional, tag = "18")]
    pub no_new_privs: Option<u32>,
    #[prost(uint32, repeated, packed = "false", tag = "19")]
    pub cap_amb: Vec<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Ids {
    #[prost(uint32, optional, tag = "5")]
    pub pid: Option<u32>,
    #[prost(uint32, optional, tag = "6")]
    pub net: Option<u32>,
    #[prost(uint32, optional, tag = "7")]
    pub ipc: Option<u32>,
    #[prost(uint32, optional, tag = "8")]
    pub uts: Option<u32>,
    #[prost(uint32, optional, tag = "9")]
    pub mnt: Option<u32>,
    #[prost(uint32, optional, tag = "10")]
    pub user: Option<u32>,
    #[prost(uint32, optional, tag = "11")]
    pub cgroup: Option<u32>,
    #[prost(uint32, optional, tag = "12")]
    pub time: Option<u32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct NetnsEntry {
    #[prost(string, optional, tag = "8")]
    pub ext_key: Option<String>,
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
    #[prost(uint32, tag = "1")]
    pub fstype: u32,
    #[prost(uint32, tag = "2")]
    pub mnt_id: u32,
    #[prost(uint32, tag = "3")]
    pub root_dev: u32,
    #[prost(uint32, tag = "4")]
    pub parent_mnt_id: u32,
    #[prost(uint32, tag = "5")]
    pub flags: u32,
    #[prost(string, tag = "6")]
    pub root: String,
    #[prost(string, tag = "7")]
    pub mountpoint: String,
    #[prost(bool, optional, tag = "12")]
    pub with_plugin: Option<bool>,
    #[prost(bool, optional, tag = "13")]
    pub ext_mount: Option<bool>,
    #[prost(uint32, optional, tag = "17")]
    pub sb_flags: Option<u32>,
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
    pub dump: Option<DumpStats>,
    #[prost(message, optional, tag = "2")]
    pub restore: Option<RestoreStats>,
}

/// CRIU's statistics of a dump; times in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Message)]
pub struct DumpStats {
    /// Until all processes were frozen.
    #[prost(uint32, tag = "1")]
    pub freezing_us: u32,
    /// How long the processes were frozen.
    #[prost(uint32, tag = "2")]
    pub frozen_us: u32,
    /// Taking the memory.
    #[prost(uint32, tag = "3")]
    pub memdump_us: u32,
    /// Writing the memory.
    #[prost(uint32, tag = "4")]
    pub memwrite_us: u32,
    #[prost(uint64, tag = "5")]
    pub pages_scanned: u64,
    #[prost(uint64, tag = "6")]
    pub pages_skipped_parent: u64,
    #[prost(uint64, tag = "7")]
    pub pages_written: u64,
    #[prost(uint64, tag = "9")]
    pub pages_lazy: u64,
}

/// CRIU's statistics of a restore; times in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Message)]
pub struct RestoreStats {
    /// Creating the processes.
    #[prost(uint32, tag = "3")]
    pub forking_us: u32,
    #[prost(uint32, tag = "4")]
    pub restore_us: u32,
    /// Pages compared with those of the parent process.
    #[prost(uint64, tag = "1")]
    pub pages_compared: u64,
    /// Pages shared with the parent process.
    #[prost(uint64, tag = "2")]
    pub pages_skipped_cow: u64,
    #[prost(uint64, tag = "5")]
    pub pages_restored: u64,
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
