//! Memory that all ranks of a communicator have in common: a file that is removed when all have it.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

pub const RANKS: usize = 8;
/// Calls that a rank may be ahead of the others.
pub const RING: usize = 64;

pub const JOINED: usize = 0;
pub const PID: usize = 1;
pub const HANDLE: usize = 2;
/// Values of collective calls, their numbers, and how many this rank has done.
pub const VALUE: usize = 16;
pub const STAMP: usize = VALUE + RING;
pub const DONE: usize = STAMP + RING;
/// The same for what is sent to each rank, and how much of each was received.
const SENT: usize = 160;
pub const RECEIVED: usize = SENT + RANKS * 2 * RING;
const BLOCK: usize = RECEIVED + RANKS;

pub fn sent(to: usize, number: u64) -> (usize, usize) {
    let value = SENT + to * 2 * RING + (number as usize) % RING;
    (value, value + RING)
}

pub struct Board {
    words: &'static [AtomicU64],
    pub path: PathBuf,
}

pub fn directory() -> PathBuf {
    let root = std::env::var("CUSIM_DEV_ROOT").unwrap_or_else(|_| "/dev".into());
    Path::new(&root).join("shm")
}

impl Board {
    pub fn open(name: &str) -> io::Result<Self> {
        let directory = directory();
        fs::create_dir_all(&directory)?;
        let path = directory.join(name);
        let mut options = File::options();
        let file = options.read(true).write(true).create(true).open(&path)?;
        let bytes = 8 * RANKS * BLOCK;
        file.set_len(bytes as u64)?;
        // SAFETY: a new mapping of a file that is as long.
        let p = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if p == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: mapped until `drop`, aligned to a page, and only ever used as atomic words.
        let words = unsafe { std::slice::from_raw_parts(p.cast(), RANKS * BLOCK) };
        Ok(Self { words, path })
    }

    pub fn get(&self, rank: usize, word: usize) -> u64 {
        self.words[rank * BLOCK + word].load(SeqCst)
    }

    pub fn set(&self, rank: usize, word: usize, value: u64) {
        self.words[rank * BLOCK + word].store(value, SeqCst);
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        let bytes = 8 * self.words.len();
        // SAFETY: the mapping is this value's own; `words` is not handed out.
        unsafe { libc::munmap(self.words.as_ptr().cast_mut().cast(), bytes) };
    }
}
