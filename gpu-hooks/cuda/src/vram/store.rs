//! Keeps the agent's buffers, their places, and the worker.

use super::ceiling::Ceiling;
use super::memory::{self, Mapped};
use super::reserve::Reserve;
use super::userfault::{self, Userfault};
use super::worker::{self, Complete, Job, Memory, Progress, State};
use super::{NamedBuffer, SPARE_BYTES, SharedBuffer, VramConfig, VramDone, Wanted, WantedRegion};
use crate::inject::{Descriptor, Injection, Seized, take_descriptor};
use crate::protocol::{DriverError, ErrorKind, Op, Outcome};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ChildStdin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

const COPY: usize = 16 << 20;
/// How long a killed worker may take to end.
const KILLED: Duration = Duration::from_secs(10);

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
    /// [`userfault::DEVICE`], for the plugin.
    userfault: Option<File>,
    work: Work,
    ceiling: Ceiling,
}

struct Buffer {
    file: File,
    bytes: u64,
    /// Its process; `None` at a restore.
    pid: Option<i32>,
    /// What happens to it meanwhile.
    state: Mutex<State>,
}

/// A buffer that is being read into.
#[derive(Default)]
struct Reading {
    /// Bytes from the start that have been read.
    bytes: u64,
    /// Its mapping in the process. Kept after a failure: the process must not run on.
    mapping: Option<Userfault>,
}

impl Reading {
    fn open(&mut self) -> io::Result<()> {
        let mapping = self.mapping.as_mut();
        mapping.map_or(Ok(()), |mapping| mapping.open_to(self.bytes))
    }
}

#[derive(Clone, Copy)]
struct Place {
    pid: i32,
    tid: i32,
    address: u64,
}

#[derive(Default)]
enum Work {
    #[default]
    None,
    Running {
        number: u64,
        worker: Option<Arc<OwnedFd>>,
        /// A writer that is still to be told what is complete, and the buffers that it has.
        ahead: Option<(ChildStdin, Vec<u64>)>,
        /// The directory whose VRAM files are removed when the work fails or is cancelled.
        writes: Option<PathBuf>,
    },
    Ended(Result<VramDone, String>),
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

    pub fn bound(&self, ceiling: Ceiling) {
        self.inner().ceiling = ceiling;
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
                id, pid, address, ..
            } => self
                .buffer(*id)
                .and_then(|buffer| {
                    copy(&buffer, *pid, *address).map_err(failed("copying the GPU memory"))
                })
                .map(|()| Outcome::Done),
            Op::VramDrop { id } => {
                self.forget(*id);
                Ok(Outcome::Done)
            }
            Op::VramWriteAhead {
                dir,
                buffers,
                config,
            } => self
                .write_ahead(dir, buffers, config)
                .map(|()| Outcome::Done),
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

    /// Tells the writer that so many bytes from the start of a buffer are there. It must have the state
    /// [`State::Filling`] since before the writer began.
    pub fn has_filled(&self, id: u64, bytes: u64) {
        let mut inner = self.inner();
        let Work::Running { ahead, .. } = &mut inner.work else {
            return;
        };
        let Some((stdin, buffers)) = ahead else {
            return;
        };
        let Some(memory) = buffers.iter().position(|buffer| *buffer == id) else {
            return;
        };
        // Its end shows why it does not listen.
        let _ = worker::tell(stdin, &Progress::Filled { memory, bytes });
    }

    /// Ends a writer whose memory is not to be written after all; another may begin.
    pub fn call_off(&self) {
        self.cancel();
        self.inner().work = Work::None;
    }

    /// Waits until so many bytes from the start of a buffer have been read, if it is one that is read into.
    ///
    /// # Errors
    /// They cannot be read, or not in time.
    pub fn has_been_read(&self, id: u64, bytes: u64, limit: Duration) -> Result<(), DriverError> {
        let deadline = Instant::now() + limit;
        let mut inner = self.inner();
        loop {
            if inner.read.get(&id).is_none_or(|r| r.bytes >= bytes) {
                return Ok(());
            }
            match &inner.work {
                Work::None | Work::Ended(Ok(_)) => return Ok(()),
                Work::Ended(Err(error)) => return Err(refused(ErrorKind::Vram, error.clone())),
                Work::Running { .. } => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(refused(
                    ErrorKind::TimedOut,
                    "the GPU memory was not read in time",
                ));
            }
            inner = self.changed_within(inner, left);
        }
    }

    /// Another descriptor of a buffer's file.
    ///
    /// # Errors
    /// There is no such buffer.
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
    ///
    /// # Errors
    /// It is more than the process may have, or than the host has.
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
    ///
    /// # Errors
    /// It is more than the process may have, or than the host has.
    pub fn make_for(&self, pid: i32, bytes: u64) -> Result<SharedBuffer, DriverError> {
        self.make(pid, bytes).map(|(_, shared, _)| shared)
    }

    /// Returns true if memory for a process was allocated ahead.
    pub fn has_reserved(&self, pid: i32) -> bool {
        self.reserve.has(pid)
    }

    /// # Errors
    /// The host has less memory.
    pub fn has_room(&self, bytes: u64) -> Result<(), DriverError> {
        there_is(bytes)
    }

    /// As [`VramFiles::make_for`], however much it is and the host has: for memory that would be lost otherwise.
    ///
    /// # Errors
    /// The kernel's.
    pub fn make_regardless(&self, pid: i32, bytes: u64) -> Result<SharedBuffer, DriverError> {
        let file = match self.reserve.take(pid, bytes) {
            Some((file, _)) => file,
            None => memory::new_file(bytes).map_err(failed("host memory for the GPU's"))?,
        };
        let (_, shared) = self.keep(file, bytes, Some(pid));
        Ok(shared)
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
            state: *buffer.state.lock().unwrap_or_else(PoisonError::into_inner),
        })
    }

    /// Begins to write buffers that are being filled.
    ///
    /// # Errors
    /// The worker cannot be started, or works already.
    pub fn write_ahead(
        self: &Arc<Self>,
        dir: &Path,
        buffers: &[u64],
        config: &VramConfig,
    ) -> Result<(), DriverError> {
        let (directory, dir) = directory(dir)?;
        let memory = buffers.iter().map(|id| self.memory(*id, ""));
        let memory = memory.collect::<Result<Vec<_>, _>>()?;
        let options = config.write_options(buffers.len());
        let job = Job::Write {
            dir: dir.clone(),
            memory,
            chunk_bytes: options.chunk_bytes,
            shard_bytes: options.shard_bytes,
            codec: options.codec,
            level: options.level,
            threads: options.threads,
            parent: config.parent.clone(),
            search: config.search.clone(),
        };
        self.start(job, directory, Some((dir, buffers.to_vec())))
    }

    fn write(
        self: &Arc<Self>,
        dir: &Path,
        buffers: &[NamedBuffer],
        config: &VramConfig,
    ) -> Result<(), DriverError> {
        // The driver has asked for all that it needs.
        self.reserve.clear();
        let memory = buffers.iter().map(|b| self.memory(b.id, &b.name));
        let memory = memory.collect::<Result<Vec<_>, _>>()?;
        let begun = match &self.inner().work {
            Work::None | Work::Ended(Ok(_)) => false,
            Work::Running { ahead, .. } => ahead.is_some(),
            // Whoever waits for it hears why.
            Work::Ended(Err(_)) => return Ok(()),
        };
        if !begun {
            self.write_ahead(dir, &[], config)?;
        }
        let ahead = match &mut self.inner().work {
            Work::Running { ahead, .. } => ahead.take(),
            _ => None,
        };
        let Some((mut stdin, filled)) = ahead else {
            return Ok(());
        };
        let before = |b: &NamedBuffer| filled.iter().position(|id| *id == b.id);
        let complete = Complete {
            filled_before: buffers.iter().map(before).collect(),
            memory,
        };
        if let Err(error) = worker::tell(&mut stdin, &Progress::Complete(complete)) {
            tracing::info!("the VRAM files' worker: {error}");
        }
        Ok(())
    }

    fn load(
        self: &Arc<Self>,
        dir: &Path,
        regions: &[WantedRegion],
        config: &VramConfig,
    ) -> Result<Vec<SharedBuffer>, DriverError> {
        let all = regions.iter().map(|region| region.bytes);
        let all = all.fold(0u64, u64::saturating_add);
        let allowed = self.inner().ceiling.allows_all(all);
        allowed.map_err(|what| refused(ErrorKind::Vram, what))?;
        there_is(all)?;
        let (directory, dir) = directory(dir)?;
        let mut shared = Vec::new();
        let mut memory = Vec::new();
        for region in regions {
            let (_, buffer) = self.allocate(region.bytes, None)?;
            memory.push(self.memory(buffer.id, &region.name)?);
            shared.push(buffer);
        }
        let options = config.read_options(regions.len());
        let device = userfault::device()
            .inspect_err(|error| tracing::info!("{}: {error}", userfault::DEVICE))
            .ok();
        for buffer in &mut shared {
            buffer.userfault = device.as_ref().map(own_descriptor);
        }
        let mut inner = self.inner();
        inner.read = shared.iter().map(|b| (b.id, Reading::default())).collect();
        inner.userfault = device;
        drop(inner);
        let job = Job::Load {
            dir,
            memory,
            digest: config.digest.clone(),
            check: options.check,
            threads: options.threads,
            search: config.search.clone(),
        };
        self.start(job, directory, None)?;
        Ok(shared)
    }

    /// Closes a buffer's mapping in a restored process, but for what has been read.
    fn hold_back(&self, id: u64, address: u64, fd: Descriptor) -> Result<(), DriverError> {
        let buffer = self.buffer(id)?;
        let failed = || failed("userfaultfd");
        let fd = take_descriptor(fd).map_err(failed())?;
        let mut inner = self.inner();
        let reading = inner.read.entry(id).or_default();
        let mapping = Userfault::close_all(fd, address, buffer.bytes).map_err(failed())?;
        reading.mapping = Some(mapping);
        let opened = reading.open();
        if opened.is_err() {
            reading.mapping = None;
        }
        opened.map_err(failed())
    }

    /// Notes how much of a buffer has been read.
    fn has_read(&self, id: u64, bytes: u64) {
        let mut inner = self.inner();
        let Some(reading) = inner.read.get_mut(&id) else {
            return;
        };
        reading.bytes = bytes;
        self.changed.notify_all();
        if let Err(error) = reading.open() {
            // The driver unmaps it as soon as it is done.
            tracing::debug!("userfaultfd: {error}");
        }
    }

    /// Starts a worker; `directory` stays open as long as it works. A writer has its directory's path, and the buffers
    /// that are still being filled.
    fn start(
        self: &Arc<Self>,
        job: Job,
        directory: File,
        writer: Option<(PathBuf, Vec<u64>)>,
    ) -> Result<(), DriverError> {
        let (writes, filling) = writer.unzip();
        let mut inner = self.inner();
        if matches!(inner.work, Work::Running { .. }) {
            return Err(refused(
                ErrorKind::Busy,
                "the VRAM files' worker still works",
            ));
        }
        inner.last += 1;
        let number = inner.last;
        let (sender, receiver) = mpsc::channel();
        let (vram_files, dir) = (Arc::clone(self), writes.clone());
        let read_into: Vec<u64> = inner.read.keys().copied().collect();
        let work = move || {
            // It dies with the thread that starts it: with this one, which waits for it.
            let mut child = match worker::start(&job) {
                Ok(child) => child,
                Err(error) => return drop(sender.send(Err(error))),
            };
            let _ = sender.send(Ok((pidfd(&child), child.stdin.take())));
            let result = worker::finish(child, |memory, bytes| {
                if let Some(id) = read_into.get(memory) {
                    vram_files.has_read(*id, bytes);
                }
            });
            if let (Err(error), Some(dir)) = (&result, &dir) {
                tracing::error!("{error}");
                cryopod_archive::vram::write::remove(dir);
            }
            drop(directory);
            let mut inner = vram_files.inner();
            if matches!(inner.work, Work::Running { number: n, .. } if n == number) {
                inner.work = Work::Ended(result);
            }
            drop(inner);
            vram_files.changed.notify_all();
        };
        let started = std::thread::Builder::new()
            .name("vram".into())
            .spawn(work)
            .and_then(|_| receiver.recv().unwrap_or_else(|e| Err(io::Error::other(e))));
        let (worker, stdin) =
            started.map_err(failed("the VRAM files' worker cannot be started"))?;
        inner.work = Work::Running {
            number,
            worker: worker.map(Arc::new),
            ahead: stdin.zip(filling),
            writes,
        };
        Ok(())
    }

    fn wait(&self, limit: Duration) -> Result<Option<VramDone>, DriverError> {
        let deadline = Instant::now() + limit;
        let mut inner = self.inner();
        loop {
            match &inner.work {
                Work::None => return Ok(None),
                Work::Ended(Ok(done)) => return Ok(Some(done.clone())),
                Work::Ended(Err(error)) => return Err(refused(ErrorKind::Vram, error.clone())),
                Work::Running { .. } => {}
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(refused(
                    ErrorKind::TimedOut,
                    "the VRAM files' worker still works",
                ));
            }
            inner = self.changed_within(inner, left);
        }
    }

    /// Waits for the worker; a writer that waits for the driver is ended.
    pub fn settle(&self) {
        if matches!(&self.inner().work, Work::Running { ahead: Some(_), .. }) {
            self.cancel();
        }
        let mut inner = self.inner();
        while matches!(inner.work, Work::Running { .. }) {
            inner = self
                .changed
                .wait(inner)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the worker, and waits until what it wrote is removed.
    fn cancel(&self) {
        let deadline = Instant::now() + KILLED;
        let mut inner = self.inner();
        let mut dir = None;
        if let Work::Running { worker, writes, .. } = &inner.work {
            dir.clone_from(writes);
            if let Some(worker) = worker {
                let (fd, none) = (worker.as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
                // SAFETY: numbers and a null pointer, which stands for an ordinary signal.
                unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, libc::SIGKILL, none, 0) };
            }
        }
        while matches!(inner.work, Work::Running { .. }) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            inner = self.changed_within(inner, left);
        }
        inner.work = Work::Ended(Err("called off".into()));
        drop(inner);
        self.changed.notify_all();
        if let Some(dir) = dir {
            cryopod_archive::vram::write::remove(&dir);
        }
    }

    /// Maps a process's memory back if the plugin did not. The process must not be traced, and this thread becomes its
    /// tracer for a moment. After an error the driver must not restore the process.
    pub fn put_back(&self, pid: i32) -> io::Result<()> {
        let away: Vec<(Arc<Buffer>, Place)> = {
            let inner = self.inner();
            let of = |(id, place): (&u64, &Place)| Some((inner.buffers.get(id).cloned()?, *place));
            inner
                .places
                .iter()
                .filter(|(_, place)| place.pid == pid)
                .filter_map(of)
                .collect()
        };
        for (buffer, place) in away {
            if is_mapped(&buffer, place)? {
                continue;
            }
            let _seized = Seized::new(place.tid)?;
            let mut inject = Injection::begin(pid, place.tid, 0)?;
            let mut mapped = inject.map_file(place.address, buffer.bytes, &buffer.file);
            if mapped.is_err() {
                mapped = inject.map_private(place.address, buffer.bytes);
                mapped = mapped.and_then(|()| copy(&buffer, pid, place.address));
            }
            let ended = inject.end();
            mapped.and(ended)?;
            tracing::info!(pid, "GPU memory mapped back");
        }
        Ok(())
    }
}

fn own_descriptor(file: &File) -> Descriptor {
    Descriptor {
        pid: std::process::id() as i32,
        fd: file.as_raw_fd(),
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

/// Opens a pidfd, which names the child even if its pid is reused.
fn pidfd(child: &std::process::Child) -> Option<OwnedFd> {
    // SAFETY: a number; a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    let fd = RawFd::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: a descriptor that was just made and belongs to nobody else.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
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

fn is_mapped(buffer: &Buffer, place: Place) -> io::Result<bool> {
    let inode = buffer.file.metadata()?.ino();
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", place.pid))?;
    let start = format!("{:x}-", place.address);
    Ok(maps
        .lines()
        .filter(|line| line.starts_with(&start))
        .any(|line| line.split_whitespace().nth(4) == Some(inode.to_string().as_str())))
}

/// Copies a buffer into private memory of the process; frees each piece as soon as it is there, so that there are never
/// two copies.
fn copy(buffer: &Buffer, pid: i32, address: u64) -> io::Result<()> {
    let to = File::options()
        .write(true)
        .open(format!("/proc/{pid}/mem"))?;
    let mut piece = vec![0; COPY];
    let mut at = 0;
    while at < buffer.bytes {
        let len = piece
            .len()
            .min(usize::try_from(buffer.bytes - at).unwrap_or(usize::MAX));
        buffer.file.read_exact_at(&mut piece[..len], at)?;
        to.write_all_at(&piece[..len], address + at)?;
        let flags = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: numbers; frees a part of our own file.
        unsafe { libc::fallocate(buffer.file.as_raw_fd(), flags, at as i64, len as i64) };
        at += len as u64;
    }
    Ok(())
}
