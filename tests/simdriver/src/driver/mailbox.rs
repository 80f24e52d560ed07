//! How another process reaches the restore thread: one anonymous page at a fixed address.
//!
//! The caller finds the page through `/proc/PID/mem`, so that neither mount nor pid namespaces
//! matter and nothing but ordinary private memory is left in a checkpointed process. The restore
//! thread polls the page. It therefore answers only while it runs, as with the real driver: the
//! caller that stopped it must let it run.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use crate::abi::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_PERMITTED, CuResult};
use crate::uuid::GpuUuid;

/// Where the page is, in every client process: far from where programs, heaps, stacks and other
/// mappings are put.
pub const ADDRESS: usize = 0x2c0d_a000_0000;
pub const SIZE: usize = 4096;
pub const MAX_PAIRS: usize = 64;

const MAGIC: u64 = u64::from_le_bytes(*b"CUSIMBX1");

#[derive(Clone, Copy)]
#[repr(usize)]
pub enum Word {
    Magic = 0,
    /// The process, in its own pid namespace: a forked child has the page but not this pid.
    Owner = 1,
    /// The restore thread, in the process's pid namespace.
    Thread = 2,
    State = 3,
    /// Number of the last request; set last by the caller.
    Request = 8,
    /// Number of the last request that the restore thread took up.
    Taken = 9,
    /// Number of the last request that is done; set last by the restore thread.
    Done = 10,
    /// Number of a request that the caller gave up.
    Withdrawn = 11,
    Step = 12,
    TimeoutMs = 13,
    Pairs = 14,
    Code = 15,
    Value = 16,
}

/// First word of the pairs: old and new UUID, two words each.
const PAIR_WORDS: usize = 64;

#[derive(Clone, Copy)]
pub struct Mailbox(&'static [AtomicU64; SIZE / 8]);

impl Mailbox {
    /// Makes the page. Fails where the address is taken.
    pub fn create() -> io::Result<Self> {
        // SAFETY: a new anonymous mapping; NOREPLACE keeps it from covering another.
        let p = unsafe {
            libc::mmap(
                std::ptr::without_provenance_mut(ADDRESS),
                SIZE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE,
                -1,
                0,
            )
        };
        if p == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the page is mapped, aligned, zeroed, never unmapped, and only ever accessed as
        // atomic words.
        Ok(Self(unsafe { &*p.cast() }))
    }

    /// Says whose page this is; from now on callers find the process.
    pub fn publish(self, pid: u64, tid: u64) {
        self.set(Word::Thread, tid);
        self.set(Word::Owner, pid);
        self.set(Word::Magic, MAGIC);
    }

    pub fn get(self, w: Word) -> u64 {
        self.0[w as usize].load(SeqCst)
    }

    pub fn set(self, w: Word, value: u64) {
        self.0[w as usize].store(value, SeqCst);
    }

    pub fn pairs(self) -> impl Iterator<Item = (GpuUuid, GpuUuid)> {
        let n = usize::try_from(self.get(Word::Pairs))
            .unwrap_or(0)
            .min(MAX_PAIRS);
        (0..n).map(move |i| {
            let w = |k: usize| self.0[PAIR_WORDS + 4 * i + k].load(SeqCst);
            (
                GpuUuid::from_words([w(0), w(1)]),
                GpuUuid::from_words([w(2), w(3)]),
            )
        })
    }
}

pub struct Remote {
    memory: File,
    pid: i32,
}

impl Remote {
    /// Finds the page. The error is the one that the caller of the API gets: a process that is
    /// not there, or that does not use CUDA, is an invalid value.
    pub fn open(pid: i32) -> Result<Self, CuResult> {
        if pid <= 0 {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let memory = OpenOptions::new()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .map_err(|e| match e.kind() {
                io::ErrorKind::PermissionDenied => CUDA_ERROR_NOT_PERMITTED,
                _ => CUDA_ERROR_INVALID_VALUE,
            })?;
        let remote = Self { memory, pid };
        let owner = remote
            .get(Word::Owner)
            .map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        let magic = remote
            .get(Word::Magic)
            .map_err(|_| CUDA_ERROR_INVALID_VALUE)?;
        if magic != MAGIC || innermost(pid, pid, "NStgid:") != Some(owner) {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        Ok(remote)
    }

    /// Reads a word; an error means that the process is gone.
    pub fn get(&self, w: Word) -> io::Result<u64> {
        let mut b = [0u8; 8];
        self.memory.read_exact_at(&mut b, address(w as usize))?;
        Ok(u64::from_le_bytes(b))
    }

    pub fn set(&self, w: Word, value: u64) -> io::Result<()> {
        self.memory
            .write_all_at(&value.to_le_bytes(), address(w as usize))
    }

    pub fn set_pairs(&self, pairs: &[(GpuUuid, GpuUuid)]) -> io::Result<()> {
        let bytes: Vec<u8> = pairs
            .iter()
            .flat_map(|(o, n)| [o.words(), n.words()])
            .flatten()
            .flat_map(u64::to_le_bytes)
            .collect();
        self.memory.write_all_at(&bytes, address(PAIR_WORDS))?;
        self.set(Word::Pairs, pairs.len() as u64)
    }

    /// The restore thread as this process sees it.
    pub fn thread(&self) -> Option<i32> {
        let inner = self.get(Word::Thread).ok()?;
        let tasks = fs::read_dir(format!("/proc/{}/task", self.pid)).ok()?;
        tasks
            .flatten()
            .filter_map(|t| t.file_name().to_str()?.parse().ok())
            .find(|tid| innermost(self.pid, *tid, "NSpid:") == Some(inner))
    }
}

fn address(word: usize) -> u64 {
    (ADDRESS + 8 * word) as u64
}

/// The last number of this field of a task's status: the id in the task's own pid namespace.
fn innermost(pid: i32, tid: i32, field: &str) -> Option<u64> {
    let path = if pid == tid {
        format!("/proc/{pid}/status")
    } else {
        format!("/proc/{pid}/task/{tid}/status")
    };
    let status = fs::read_to_string(path).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix(field))?;
    line.split_whitespace().next_back()?.parse().ok()
}
