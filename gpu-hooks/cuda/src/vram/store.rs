//! Keeps the agent's buffers and their places, and carries out what the plugin asks about them.

mod put_back;
mod reading;
mod work;

use self::reading::Reading;
pub use self::work::Joining;
use self::work::{Together, Work};
use super::ceiling::Ceiling;
use super::memory::{self, Mapped};
use super::reserve::Reserve;
use super::worker::{Memory, State};
use super::{SPARE_BYTES, SharedBuffer, Wanted};
use crate::messages::protocol::{DriverError, ErrorKind, Op, Outcome};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Default)]
pub struct VramFiles {
    inner: Mutex<Inner>,
    changed: Condvar,
    reserve: Reserve,
}

#[derive(Default)]
struct Inner {
    last: u64,
    buffers: BTreeMap<u64, Arc<Buffer>>,
    places: BTreeMap<u64, Place>,
    /// Buffers into which regions are read.
    read: BTreeMap<u64, Reading>,
    /// [`super::userfault::DEVICE`], for the plugin.
    userfault: Option<File>,
    work: Work,
    /// What a writer has said it needs of a buffer: `Said::Needed`.
    needed: BTreeMap<u64, Vec<u64>>,
    /// How many end the work: until they have, none begins.
    ending: usize,
    together: Together,
    ceiling: Ceiling,
    /// Files with the keys for encrypted shards.
    identities: Vec<PathBuf>,
}

struct Buffer {
    file: File,
    bytes: u64,
    /// Its process; `None` at a restore.
    pid: Option<i32>,
    /// What happens to it meanwhile.
    state: Mutex<State>,
    /// A part of it is neither here nor in the process.
    is_lost: AtomicBool,
}

impl Buffer {
    fn state(&self) -> State {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy)]
struct Place {
    pid: i32,
    tid: i32,
    address: u64,
}

fn refused(kind: ErrorKind, message: impl Into<String>) -> DriverError {
    DriverError {
        kind,
        code: None,
        message: message.into(),
    }
}

fn failed(what: &str) -> impl FnOnce(io::Error) -> DriverError {
    let what = what.to_owned();
    move |error| {
        let kind = match error.kind() {
            io::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
            _ => ErrorKind::Vram,
        };
        refused(kind, format!("{what}: {error}"))
    }
}

impl VramFiles {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change, at most so long.
    fn changed_within<'a>(
        &self,
        inner: MutexGuard<'a, Inner>,
        limit: Duration,
    ) -> MutexGuard<'a, Inner> {
        match self.changed.wait_timeout(inner, limit) {
            Ok((inner, _)) => inner,
            Err(poisoned) => poisoned.into_inner().0,
        }
    }

    /// Waits until `answer` has one; it is asked after each change.
    fn answered<T>(
        &self,
        limit: Duration,
        late: &str,
        answer: impl Fn(&Inner) -> Option<Result<T, DriverError>>,
    ) -> Result<T, DriverError> {
        let deadline = Instant::now() + limit;
        let mut inner = self.inner();
        loop {
            if let Some(answer) = answer(&inner) {
                return answer;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(refused(ErrorKind::TimedOut, late));
            }
            inner = self.changed_within(inner, left);
        }
    }

    pub fn bound(&self, ceiling: Ceiling) {
        self.inner().ceiling = ceiling;
    }

    pub fn unlock_with(&self, identities: Vec<PathBuf>) {
        self.inner().identities = identities;
    }

    /// Refuses more memory than a process may have.
    fn may_have(&self, more: &Wanted) -> Result<(), DriverError> {
        let inner = self.inner();
        let sum = |of: Option<i32>| {
            let buffers = inner.buffers.values();
            let of = buffers.filter(|b| of.is_none() || b.pid == of);
            of.fold(0u64, |sum, b| sum.saturating_add(b.bytes))
        };
        let allowed = inner.ceiling.allows(sum(Some(more.pid)), sum(None), more);
        allowed.map_err(|what| refused(ErrorKind::Vram, what))
    }

    /// Carries out a request; `None` when it is not about VRAM files.
    pub fn perform(self: &Arc<Self>, op: &Op) -> Option<Outcome> {
        let done = match op {
            Op::VramReserve { wanted, threads } => {
                self.reserve(wanted, *threads).map(|()| Outcome::Done)
            }
            Op::VramPrepare {
                pid,
                bytes,
                threads,
                ..
            } => self.prepare(*pid, *bytes, *threads).map(Outcome::Buffer),
            Op::VramPlaced {
                id,
                pid,
                tid,
                address,
            } => {
                let (pid, tid, address) = (*pid, *tid, *address);
                self.inner().places.insert(*id, Place { pid, tid, address });
                Ok(Outcome::Done)
            }
            Op::VramCopy {
                id,
                pid,
                address,
                limit_ms,
            } => self
                .make_private(*id, *pid, *address, Duration::from_millis(*limit_ms))
                .map(|()| Outcome::Done),
            Op::VramDrop { id } => {
                self.forget(*id);
                Ok(Outcome::Done)
            }
            Op::VramWriteAhead {
                dir,
                buffers,
                config,
            } if !self.writes_ahead() => self
                .write_ahead(dir, buffers, config)
                .map(|()| Outcome::Done),
            // The last process to leave has begun it, and `write` adds what is not among its buffers.
            Op::VramWriteAhead { .. } => Ok(Outcome::Done),
            Op::VramWrite {
                dir,
                buffers,
                config,
            } => self.write(dir, buffers, config).map(|()| Outcome::Done),
            Op::VramLoad {
                dir,
                regions,
                config,
            } => self.load(dir, regions, config).map(Outcome::Buffers),
            Op::VramUserfault {
                id,
                address,
                userfaultfd,
            } => self
                .hold_back(*id, *address, *userfaultfd)
                .map(|()| Outcome::Done),
            Op::VramWait { limit_ms } => self
                .wait(Duration::from_millis(*limit_ms))
                .map(Outcome::Vram),
            Op::VramRead { buffers, limit_ms } => {
                let limit = Duration::from_millis(*limit_ms);
                let mut buffers = buffers.iter();
                buffers
                    .try_for_each(|id| self.has_been_read(*id, self.buffer(*id)?.bytes, limit))
                    .map(|()| Outcome::Done)
            }
            Op::VramCancel => {
                self.cancel();
                Ok(Outcome::Done)
            }
            _ => return None,
        };
        Some(done.unwrap_or_else(Outcome::Error))
    }

    pub fn clear(&self) {
        let mut inner = self.inner();
        inner.buffers.clear();
        inner.places.clear();
        inner.read.clear();
        inner.needed.clear();
        inner.together = Together::default();
        drop(inner);
        self.reserve.clear();
    }

    /// Frees a buffer.
    pub fn forget(&self, id: u64) {
        let mut inner = self.inner();
        inner.buffers.remove(&id);
        inner.places.remove(&id);
        inner.read.remove(&id);
    }

    /// Notes what happens to a buffer while it is written.
    pub fn set_state(&self, id: u64, state: State) {
        if let Some(buffer) = self.inner().buffers.get(&id) {
            *buffer.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
        }
    }

    /// Another descriptor of a buffer's file.
    pub fn file(&self, id: u64) -> Result<File, DriverError> {
        let file = self.buffer(id)?.file.try_clone();
        file.map_err(failed("a buffer's file"))
    }

    fn buffer(&self, id: u64) -> Result<Arc<Buffer>, DriverError> {
        let found = self.inner().buffers.get(&id).cloned();
        found.ok_or_else(|| refused(ErrorKind::BadRequest, format!("there is no buffer {id}")))
    }

    fn reserve(&self, wanted: &[Wanted], threads: usize) -> Result<(), DriverError> {
        let all = wanted.iter().map(|w| w.bytes);
        let all = all.fold(0, u64::saturating_add);
        there_is(all)?;
        // An allocation that fails while the driver works could cost the process its life: this makes it most unlikely.
        let plenty = there_is(all.saturating_mul(2)).is_ok();
        let first = if plenty { AWAITED } else { usize::MAX };
        let filled = self.reserve.fill(wanted, threads, first);
        filled.map_err(failed("host memory for the GPU's"))
    }

    /// Makes memory for a process's GPU memory, and allocates all of it.
    fn prepare(&self, pid: i32, bytes: u64, threads: usize) -> Result<SharedBuffer, DriverError> {
        let (buffer, shared, missing) = self.make(pid, bytes)?;
        let populated = Mapped::new(&buffer.file, bytes, true)
            .and_then(|map| map.populate_end(missing, threads));
        if let Err(error) = populated {
            self.inner().buffers.remove(&shared.id);
            return Err(failed("host memory for the GPU's")(error));
        }
        Ok(shared)
    }

    /// Makes memory for a process's GPU memory, which is allocated as it is filled.
    pub fn make_for(&self, pid: i32, bytes: u64) -> Result<SharedBuffer, DriverError> {
        // What is reserved is the driver's.
        self.may_have(&Wanted { pid, bytes })?;
        self.allocate(bytes, Some(pid)).map(|(_, shared)| shared)
    }

    /// The same in a file of the caller's, of which so many bytes are to be allocated.
    pub fn adopt(
        &self,
        pid: i32,
        file: File,
        bytes: u64,
        missing: u64,
    ) -> Result<SharedBuffer, DriverError> {
        self.may_have(&Wanted { pid, bytes })?;
        there_is(missing)?;
        Ok(self.keep(file, bytes, Some(pid)).1)
    }

    /// Makes memory; what was reserved for the process is used first. Also returns how many bytes are not allocated.
    fn make(&self, pid: i32, bytes: u64) -> Result<(Arc<Buffer>, SharedBuffer, u64), DriverError> {
        self.may_have(&Wanted { pid, bytes })?;
        match self.reserve.take(pid, bytes) {
            Some((file, missing)) => {
                there_is(missing)?;
                let (buffer, shared) = self.keep(file, bytes, Some(pid));
                let reserved = true;
                Ok((buffer, SharedBuffer { reserved, ..shared }, missing))
            }
            None => {
                let (buffer, shared) = self.allocate(bytes, Some(pid))?;
                Ok((buffer, shared, bytes))
            }
        }
    }

    fn allocate(
        &self,
        bytes: u64,
        pid: Option<i32>,
    ) -> Result<(Arc<Buffer>, SharedBuffer), DriverError> {
        there_is(bytes)?;
        let file = memory::new_file(bytes).map_err(failed("host memory for the GPU's"))?;
        Ok(self.keep(file, bytes, pid))
    }

    fn keep(&self, file: File, bytes: u64, pid: Option<i32>) -> (Arc<Buffer>, SharedBuffer) {
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        if !memory::seal(&file) {
            tracing::debug!("memory for the GPU's is on a tmpfs, which has no seals");
        }
        let buffer = Arc::new(Buffer {
            file,
            bytes,
            pid,
            state: Mutex::new(State::Changing),
            is_lost: AtomicBool::new(false),
        });
        let mut inner = self.inner();
        inner.last += 1;
        let id = inner.last;
        inner.buffers.insert(id, Arc::clone(&buffer));
        let shared = SharedBuffer {
            id,
            path,
            reserved: false,
            userfault: None,
        };
        (buffer, shared)
    }

    fn memory(&self, id: u64, name: &str) -> Result<Memory, DriverError> {
        let buffer = self.buffer(id)?;
        Ok(Memory {
            name: name.to_owned(),
            path: format!(
                "/proc/{}/fd/{}",
                std::process::id(),
                buffer.file.as_raw_fd()
            )
            .into(),
            bytes: buffer.bytes,
            state: buffer.state(),
        })
    }
}

/// Bytes of each process's memory whose allocation is waited for where there is plenty.
const AWAITED: usize = 1 << 30;

fn there_is(bytes: u64) -> Result<(), DriverError> {
    let available = memory::available();
    if bytes.saturating_add(SPARE_BYTES) <= available {
        return Ok(());
    }
    let mib = |bytes: u64| bytes >> 20;
    let what = format!(
        "{} MiB of host memory are needed for the GPU's, and {} MiB are available",
        mib(bytes),
        mib(available)
    );
    Err(refused(ErrorKind::OutOfMemory, what))
}

/// Opens the directory and resolves its path, for messages.
fn directory(dir: &Path) -> Result<(File, PathBuf), DriverError> {
    let opened = File::open(dir).map_err(failed("the image directory cannot be opened"))?;
    let held = PathBuf::from(format!(
        "/proc/{}/fd/{}",
        std::process::id(),
        opened.as_raw_fd()
    ));
    let same = |path: &PathBuf| {
        let (a, b) = (std::fs::metadata(path).ok()?, opened.metadata().ok()?);
        ((a.dev(), a.ino()) == (b.dev(), b.ino())).then_some(())
    };
    let path = std::fs::read_link(&held)
        .ok()
        .filter(|path| same(path).is_some());
    Ok((opened, path.unwrap_or(held)))
}
