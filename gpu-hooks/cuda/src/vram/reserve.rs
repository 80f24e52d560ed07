//! Allocates memory before a container is frozen, so that this takes no frozen time: for each process as much as the
//! driver reports for it on GPUs. What the driver then asks for in the process differs a little.
//!
//! The driver fills memory from the start at some 5 GiB/s, and several threads allocate it many times as fast. So where
//! there is plenty of memory, only its first part is waited for.

use super::Wanted;
use super::memory::{self, HUGE, Mapped};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Allocated memory by process. A caller that asks while the first part is allocated waits for it: it would have to
/// allocate the same.
#[derive(Default)]
pub struct Reserve {
    reserved: Mutex<Reserved>,
}

#[derive(Default)]
struct Reserved {
    files: BTreeMap<i32, File>,
    rest: Arc<Rest>,
}

/// The allocation of what is not waited for.
#[derive(Default)]
struct Rest {
    stop: AtomicBool,
    failed: AtomicBool,
}

impl Reserve {
    fn reserved(&self) -> MutexGuard<'_, Reserved> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates the first `first` bytes of each memory with so many threads, and the rest with half of them when it has
    /// returned. On error nothing is kept.
    pub fn fill(&self, wanted: &[Wanted], threads: usize, first: usize) -> io::Result<()> {
        self.clear();
        let mut reserved = self.reserved();
        let (mut files, mut maps) = (BTreeMap::new(), Vec::new());
        for Wanted { pid, bytes } in wanted {
            let file = memory::new_file(*bytes)?;
            maps.push(Mapped::new(&file, *bytes, true)?);
            files.insert(*pid, file);
        }
        let rest = Arc::new(Rest::default());
        populate(&maps, 0..first, threads, &rest)?;
        if wanted.iter().any(|w| w.bytes > first as u64) {
            let its = Arc::clone(&rest);
            // CRIU and the driver begin meanwhile and need cores too.
            let threads = threads.div_ceil(2);
            let allocate = move || {
                if let Err(error) = populate(&maps, first..usize::MAX, threads, &its) {
                    its.failed.store(true, Relaxed);
                    tracing::debug!("memory is allocated as it is used: {error}");
                }
            };
            std::thread::Builder::new().spawn(allocate)?;
        }
        *reserved = Reserved { files, rest };
        Ok(())
    }

    /// Takes the memory for a process, cut to size; its allocation may still go on. Also returns how many bytes of it
    /// are not allocated.
    pub fn take(&self, pid: i32, bytes: u64) -> Option<(File, u64)> {
        let mut reserved = self.reserved();
        let file = reserved.files.remove(&pid)?;
        if reserved.rest.failed.load(Relaxed) {
            return None;
        }
        let had = file.metadata().ok()?.len();
        file.set_len(bytes.next_multiple_of(HUGE)).ok()?;
        Some((file, bytes.saturating_sub(had)))
    }

    /// Gives up what nobody has taken, and what has not been allocated yet.
    pub fn clear(&self) {
        let unused = std::mem::take(&mut *self.reserved());
        unused.rest.stop.store(true, Relaxed);
    }
}

fn populate(maps: &[Mapped], range: Range<usize>, threads: usize, rest: &Rest) -> io::Result<()> {
    let maps: Vec<&Mapped> = maps.iter().collect();
    memory::populate_all(&maps, range, threads, &rest.stop)
}

#[cfg(test)]
mod tests {
    use super::super::store::VramFiles;
    use super::*;
    use crate::messages::protocol::{ErrorKind, Op, Outcome};
    use std::os::unix::fs::MetadataExt;
    use std::time::{Duration, Instant};

    fn allocated(file: &File) -> u64 {
        file.metadata().unwrap().blocks() * 512
    }

    #[test]
    fn more_or_less_than_was_expected() {
        let reserve = Reserve::default();
        let wanted = [7, 8, 9].map(|pid| Wanted {
            pid,
            bytes: 5 << 20,
        });
        reserve.fill(&wanted, 2, usize::MAX).unwrap();
        assert!(reserve.take(6, 1).is_none());
        let (less, missing) = reserve.take(7, 2 << 20).unwrap();
        assert_eq!((less.metadata().unwrap().len(), missing), (2 << 20, 0));
        assert!(allocated(&less) <= 2 << 20);
        let (more, missing) = reserve.take(8, 11 << 20).unwrap();
        assert_eq!(
            (more.metadata().unwrap().len(), missing),
            (12 << 20, 5 << 20)
        );
        assert!(allocated(&more) >= 5 << 20);
        assert!(reserve.take(8, 1).is_none());
        reserve.clear();
        assert!(reserve.take(9, 1).is_none());
    }

    #[test]
    fn nothing_is_kept_of_what_failed() {
        let reserve = Reserve::default();
        let too_much = [(1, 1 << 20), (2, u64::MAX >> 1)].map(|(pid, bytes)| Wanted { pid, bytes });
        assert!(reserve.fill(&too_much, 1, 0).is_err());
        assert!(reserve.take(1, 1).is_none());
    }

    /// Only the start is waited for. The rest comes, until it is given up.
    #[test]
    fn the_rest_is_not_waited_for() {
        let reserve = Reserve::default();
        let (first, bytes) = (64 << 20, 160 << 20);
        let wanted = [7, 8].map(|pid| Wanted { pid, bytes });
        reserve.fill(&wanted, 2, first as usize).unwrap();
        let (taken, missing) = reserve.take(7, bytes).unwrap();
        assert_eq!(missing, 0);
        assert!(allocated(&taken) >= first);
        let ends = Instant::now() + Duration::from_secs(60);
        while allocated(&taken) < bytes {
            assert!(Instant::now() < ends, "{} bytes", allocated(&taken));
            std::thread::sleep(Duration::from_millis(1));
        }
        reserve.clear();
        assert!(reserve.take(8, bytes).is_none());
    }

    /// A reservation beyond the machine's memory is refused and says what is missing. The checkpoint allocates what it
    /// needs later.
    #[test]
    fn a_reservation_that_fails_is_no_loss() {
        let vram_files = Arc::new(VramFiles::default());
        let wanted = vec![Wanted {
            pid: 7,
            bytes: u64::MAX >> 1,
        }];
        let asked = vram_files.perform(&Op::VramReserve { wanted, threads: 1 });
        let Some(Outcome::Error(error)) = asked else {
            panic!("{asked:?}");
        };
        assert_eq!(error.kind, ErrorKind::OutOfMemory);
        assert!(
            error.message.contains("MiB of host memory are needed"),
            "{error}"
        );
        let prepared = vram_files.perform(&Op::VramPrepare {
            pid: 7,
            bytes: 1 << 20,
            threads: 1,
            limit_ms: 10_000,
        });
        let Some(Outcome::Buffer(buffer)) = prepared else {
            panic!("{prepared:?}");
        };
        assert!(!buffer.reserved);
    }

    /// A process in the driver's place asks again and again; a restore names more regions than GPUs have memory.
    #[test]
    fn what_is_asked_is_bounded_in_all() {
        use super::super::WantedRegion;
        use super::super::ceiling::Ceiling;
        use crate::gpus::gpu::GpuUuid;
        use crate::messages::protocol::AgentGpu;
        use crate::messages::report::GpuUser;
        let vram_files = Arc::new(VramFiles::default());
        let gpu = AgentGpu {
            uuid: GpuUuid([1; 16]),
            name: String::new(),
            total_memory: 8 << 20,
            compute_capability: None,
            free_memory: None,
            mig: None,
        };
        let user = GpuUser {
            pid: 7,
            gpu: gpu.uuid,
            bytes: 1 << 20,
        };
        vram_files.bound(Ceiling::new(&[gpu], &[user]));
        let prepare = |pid, bytes| {
            vram_files.perform(&Op::VramPrepare {
                pid,
                bytes,
                threads: 1,
                limit_ms: 10_000,
            })
        };
        let Some(Outcome::Buffer(first)) = prepare(7, 2 << 20) else {
            panic!("what it has");
        };
        let refused = |outcome: Option<Outcome>| match outcome {
            Some(Outcome::Error(error)) => error.message,
            other => panic!("{other:?}"),
        };
        // Within the bound alone, and beyond it with the first.
        let error = refused(prepare(7, 1 << 30));
        assert!(error.contains("process 7"), "{error}");
        let error = refused(prepare(8, (1 << 30) + (9 << 20)));
        assert!(error.contains("this host's GPUs have 8 MiB"), "{error}");
        // Freed memory no longer counts.
        vram_files.perform(&Op::VramDrop { id: first.id });
        assert!(matches!(prepare(7, 3 << 20), Some(Outcome::Buffer(_))));
        let region = |name: &str| WantedRegion {
            name: name.into(),
            bytes: 600 << 20,
        };
        let error = refused(vram_files.perform(&Op::VramLoad {
            dir: "/".into(),
            regions: vec![region("a"), region("b")],
            config: crate::vram::VramConfig::default(),
        }));
        assert!(error.contains("1200 MiB of host memory"), "{error}");
    }
}
