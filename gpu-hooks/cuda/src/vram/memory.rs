//! Allocates memory for GPU memory: a file without a name, in hugepages where the kernel has them.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use cryopod_host::detached::Detached;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, memfd_create, openat};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// A hugepage of x86-64; buffers are rounded up to it.
pub const HUGE: u64 = 2 << 20;
/// Bytes that one thread touches at a time.
const STRIDE: usize = 64 << 20;

/// Makes a file of this size in memory. Nothing is allocated yet.
pub fn new_file(bytes: u64) -> io::Result<File> {
    let sealable = memfd_has_hugepages().then(plain);
    let fd = match sealable {
        Some(Ok(fd)) => fd,
        _ => in_hugepages().or_else(|_| plain())?,
    };
    let file = File::from(fd);
    file.set_len(bytes.next_multiple_of(HUGE))?;
    Ok(file)
}

/// Seals the file's size against every holder of a descriptor: truncating it would kill every program that reads a
/// mapping of it. Returns `false` where the kernel cannot, as on a private tmpfs. There a truncation kills the worker,
/// a process of its own, and so the checkpoint fails.
pub fn seal(file: &File) -> bool {
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(file, seals).is_ok()
}

/// Returns true if the kernel gives hugepages to files that can be sealed; its usual settings do not.
fn memfd_has_hugepages() -> bool {
    std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled").is_ok_and(|text| {
        ["[always]", "[within_size]", "[advise]", "[force]"]
            .iter()
            .any(|setting| text.contains(setting))
    })
}

/// On a tmpfs that no one else sees: there hugepages do not depend on the system's settings.
fn in_hugepages() -> io::Result<OwnedFd> {
    let options = [(c"huge", "always"), (c"size", "0"), (c"mode", "700")];
    let mount = Detached::new(c"tmpfs", &options)?;
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    Ok(openat(mount, c".", flags, Mode::from_raw_mode(0o600))?)
}

fn plain() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    Ok(memfd_create(c"cryopod-vram", flags)?)
}

pub struct Mapped {
    address: *mut u8,
    len: usize,
    writable: bool,
}

// SAFETY: plain memory, whose ownership can pass to another thread.
unsafe impl Send for Mapped {}

impl Mapped {
    pub fn new(file: &File, bytes: u64, writable: bool) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        if file.metadata()?.len() < bytes {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if len == 0 {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut prot = ProtFlags::READ;
        prot.set(ProtFlags::WRITE, writable);
        // SAFETY: a new mapping.
        let address = unsafe { mmap(null_mut(), len, prot, MapFlags::SHARED, file, 0)? };
        // SAFETY: the mapping just made; advice may be refused, which changes nothing.
        let _ = unsafe { madvise(address, len, Advice::LinuxHugepage) };
        Ok(Self {
            address: address.cast(),
            len,
            writable,
        })
    }

    /// The contents. Nobody else who has the file mapped may change it meanwhile; the digest reveals changes that
    /// happen anyway.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped and readable as long as `self` lives; the file does not shrink.
        unsafe { std::slice::from_raw_parts(self.address, self.len) }
    }

    /// The contents, mutable. An error if it was mapped read-only.
    pub fn bytes_mut(&mut self) -> io::Result<&mut [u8]> {
        if !self.writable {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // SAFETY: as in `bytes`; writable, and `self` is borrowed mutably.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.address, self.len) })
    }

    /// Has the kernel allocate the pages of the last `bytes`, with several threads.
    ///
    /// # Errors
    /// Memory ran out. A kernel that cannot (before 5.14) is no error: pages then come as they are used.
    pub fn populate_end(&self, bytes: u64, threads: usize) -> io::Result<()> {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX).min(self.len);
        let range = (self.len - bytes) / HUGE as usize * HUGE as usize..self.len;
        populate_all(&[self], range, threads, &AtomicBool::new(false))
    }
}

/// Has the kernel allocate what these mappings have between two offsets, the lowest offsets first, with several threads.
/// Ends early at `stop`.
pub fn populate_all(
    maps: &[&Mapped],
    range: Range<usize>,
    threads: usize,
    stop: &AtomicBool,
) -> io::Result<()> {
    let mut parts: Vec<(usize, usize, usize)> = Vec::new();
    for map in maps {
        let end = range.end.min(map.len);
        let offsets = (range.start..end).step_by(STRIDE);
        let part = |at| {
            (
                at,
                map.address.expose_provenance() + at,
                STRIDE.min(end - at),
            )
        };
        parts.extend(offsets.map(part));
    }
    parts.sort_unstable();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((_, address, len)) = parts.get(next.fetch_add(1, Relaxed)) {
            if stop.load(Relaxed) {
                break;
            }
            // SAFETY: within the mapping.
            unsafe { populate(*address, *len)? };
        }
        Ok(())
    };
    let threads = threads.clamp(1, 256).min(parts.len());
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().try_for_each(|thread| {
            thread
                .join()
                .unwrap_or_else(|_| Err(io::Error::other("a thread died")))
        })
    })
}

/// Has the kernel allocate a part of a mapping. Changes no contents.
pub fn populate_part(part: &mut [u8]) -> io::Result<()> {
    // SAFETY: memory that is mapped, by its type.
    unsafe { populate(part.as_mut_ptr().expose_provenance(), part.len()) }
}

/// # Safety
/// The range must be mapped.
unsafe fn populate(address: usize, len: usize) -> io::Result<()> {
    let at = with_exposed_provenance_mut::<c_void>(address);
    // SAFETY: the caller's promise; allocates, and changes no contents.
    let populate = || unsafe { madvise(at, len, Advice::LinuxPopulateWrite) };
    loop {
        match populate() {
            // A kernel before 5.14: pages then come as they are used.
            Ok(()) | Err(Errno::INVAL) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(e) => return Err(e.into()),
        }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`; no reference into it outlives `self`.
        let _ = unsafe { munmap(self.address.cast(), self.len) };
    }
}

/// Bytes of memory that can be taken without an OOM kill: what the host has, within the limits of this program's
/// cgroups.
pub fn available() -> u64 {
    available_to("self")
}

/// The same for a process, by its pid or `self`.
pub fn available_to(process: &str) -> u64 {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let host = read("/proc/meminfo")
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .map_or(u64::MAX, |kib| kib * 1024);
    let cgroups = read(&format!("/proc/{process}/cgroup"));
    let own = cgroups.lines().find_map(|line| line.strip_prefix("0::"));
    let mut least = host;
    let mut at = own.map(|own| format!("/sys/fs/cgroup{}", own.trim_end_matches('/')));
    while let Some(dir) = at {
        let number = |name: &str| read(&format!("{dir}/{name}")).trim().parse::<u64>().ok();
        if let (Some(max), Some(current)) = (number("memory.max"), number("memory.current")) {
            let cache: u64 = read(&format!("{dir}/memory.stat"))
                .lines()
                .filter_map(|line| {
                    let (name, value) = line.split_once(' ')?;
                    matches!(name, "inactive_file" | "active_file")
                        .then(|| value.parse::<u64>().ok())?
                })
                .sum();
            least = least.min(max.saturating_sub(current.saturating_sub(cache)));
        }
        let up = dir.rsplit_once('/').map(|(up, _)| up.to_owned());
        at = up.filter(|up| up.starts_with("/sys/fs/cgroup"));
    }
    least
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that has the file mapped, and so had a descriptor of it, cannot truncate it.
    #[test]
    fn sealed_memory_keeps_its_size() {
        let file = File::from(plain().unwrap());
        file.set_len(2 * HUGE).unwrap();
        assert!(seal(&file));
        assert!(file.set_len(HUGE).is_err());
        assert!(file.set_len(3 * HUGE).is_err());
        Mapped::new(&file, HUGE, true).unwrap().bytes_mut().unwrap()[0] = 1;
    }

    #[test]
    fn memory_is_shared_and_zero() {
        let file = new_file(5 << 20).unwrap();
        assert_eq!(file.metadata().unwrap().len(), 6 << 20);
        let mut one = Mapped::new(&file, 5 << 20, true).unwrap();
        one.populate_end(5 << 20, 3).unwrap();
        assert!(one.bytes().iter().all(|byte| *byte == 0));
        one.bytes_mut().unwrap()[4 << 20] = 7;
        let mut other = Mapped::new(&file, 5 << 20, false).unwrap();
        assert_eq!(other.bytes()[4 << 20], 7);
        assert!(other.bytes_mut().is_err());
        assert!(Mapped::new(&file, 7 << 20, false).is_err());
        assert!(available() > 1 << 20);
    }
}
