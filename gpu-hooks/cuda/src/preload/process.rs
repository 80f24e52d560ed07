//! The steps of one process: its GPU memory goes into a buffer of the agent's, and comes back.
//!
//! Until the library has released the memory, any failure leaves the process as it was. After that the buffer is the only
//! place of the contents. The process keeps the buffer's file until somebody else has it ([`Library::forget`]), so that
//! they are not lost when the agent dies; [`Preloads::is_out`] stays true until they are back.

use super::{Library, size};
use crate::copy::{Copier, Gpus, Imported, Piece, Way};
use crate::gpus::gpu::GpuUuid;
use crate::messages::protocol::{DriverError, ErrorKind, Op, Outcome, TakenOut, WriteTo};
use crate::procfs;
use crate::vram::SharedBuffer;
use crate::vram::memory::Mapped;
use crate::vram::store::{Joining, VramFiles};
use crate::vram::worker::State;
use cryopod_preload_wire::Request;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

/// How long the copying may take before the process goes on by itself.
const HOLD: Duration = Duration::from_secs(120);
/// How much later than its limit a library's answer may come.
const MARGIN: Duration = Duration::from_secs(5);
/// GPU memory that a process allocates before the first of it is filled, in bytes.
const ALLOCATED_AT_ONCE: u64 = 4 << 30;
/// The same where as much is still held: both have to be there at once.
const ALLOCATED_BESIDE_HELD: u64 = 1 << 30;
/// Messages with allocated pieces that may wait to be filled.
const AHEAD: usize = 1 << 10;
/// How long to wait for room beside what is held, and how often to look.
const FOR_ROOM: Duration = Duration::from_millis(500);
const TICK: Duration = Duration::from_millis(10);
/// How long releasing the memory may take.
const RELEASE: Duration = Duration::from_secs(60);

/// Processes whose GPU memory is in the agent's buffers.
#[derive(Default)]
pub struct Preloads {
    /// The GPUs whose memory is copied.
    pub gpus: Gpus,
    out: Mutex<BTreeMap<i32, Out>>,
}

/// Where a process's GPU memory is.
struct Out {
    buffer: u64,
    /// Its pieces, still on the GPU with their contents: the short way back.
    held: Vec<Imported>,
}

fn failed(kind: ErrorKind, message: impl Into<String>) -> DriverError {
    DriverError {
        kind,
        code: None,
        message: message.into(),
    }
}

fn told(error: &io::Error) -> DriverError {
    let kind = match error.kind() {
        io::ErrorKind::ResourceBusy => ErrorKind::LockTimeout,
        io::ErrorKind::TimedOut => ErrorKind::TimedOut,
        io::ErrorKind::OutOfMemory => ErrorKind::OutOfMemory,
        _ => ErrorKind::Vram,
    };
    failed(kind, format!("the preload library: {error}"))
}

impl Preloads {
    /// Carries out a request; `None` when it is not [`Op::PreloadPrepare`].
    pub fn perform(self: &Arc<Self>, op: &Op) -> Option<Outcome> {
        let Op::PreloadPrepare { pids, gpus } = op else {
            return None;
        };
        self.prepare_later(gpus);
        let prepared = self.prepare(pids);
        Some(prepared.map_or_else(Outcome::Error, |()| Outcome::Done))
    }

    /// Makes GPUs ready, without waiting for it: whoever copies waits.
    fn prepare_later(self: &Arc<Self>, gpus: &[GpuUuid]) {
        if gpus.is_empty() {
            return;
        }
        let (own, gpus) = (Arc::clone(self), gpus.to_vec());
        let prepare = move || {
            if let Err(error) = own.gpus.prepare(&gpus) {
                tracing::info!("the GPUs are not ready ahead: {error}");
            }
        };
        if let Err(error) = std::thread::Builder::new().spawn(prepare) {
            tracing::info!("the GPUs are not ready ahead: {error}");
        }
    }

    fn prepare(&self, pids: &[i32]) -> Result<(), DriverError> {
        let pids: Vec<i32> = pids
            .iter()
            .copied()
            .filter(|p| Library::is_in(*p))
            .collect();
        if pids.is_empty() {
            return Ok(());
        }
        let by_minor: BTreeMap<u32, GpuUuid> = procfs::gpus_by_minor().into_iter().collect();
        let open = |pid: &i32| procfs::open_gpu_minors(*pid);
        let used: Vec<GpuUuid> = pids
            .iter()
            .flat_map(open)
            .filter_map(|minor| by_minor.get(&minor).copied())
            .collect();
        self.gpus.prepare(&used)
    }

    fn out(&self) -> std::sync::MutexGuard<'_, BTreeMap<i32, Out>> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if the process's GPU memory is in a buffer here.
    pub fn is_out(&self, pid: i32) -> bool {
        self.out().contains_key(&pid)
    }

    /// Forgets all: the processes keep their memory themselves.
    pub fn forget(&self) {
        self.out().clear();
    }

    /// Takes the GPU memory out of a process. With `hold` its pieces also stay on the GPU, where [`Preloads::bring_in`] finds
    /// them.
    ///
    /// # Errors
    /// Its GPU work did not end, and it goes on; or it has lost memory to a buffer from which it could not be brought back
    /// at once.
    pub fn take_out(
        &self,
        pid: i32,
        threads: usize,
        limit: Duration,
        hold: bool,
        write: Option<&WriteTo>,
        files: &Arc<VramFiles>,
    ) -> Result<TakenOut, DriverError> {
        let joining = files.joining(write);
        let Some(library) = Library::of(pid) else {
            return Ok(TakenOut::Without);
        };
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let stop = Request::Stop {
            limit_ms: millis(limit),
            hold_ms: millis(HOLD),
        };
        let pieces = match library.ask(stop, None, limit + MARGIN) {
            Ok(pieces) => pieces,
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                return Err(failed(ErrorKind::LockTimeout, error.to_string()));
            }
            Err(error) => return Ok(TakenOut::LeftOut(told(&error).message)),
        };
        let go = || library.ask(Request::Go, None, MARGIN);
        if pieces.is_empty() {
            return Ok(match go() {
                Ok(_) => TakenOut::Without,
                Err(error) => TakenOut::LeftOut(told(&error).message),
            });
        }
        let (buffer, bytes, mut held) = match self.copied(pid, pieces, threads, joining, files) {
            Ok(copied) => copied,
            Err(error) => {
                // Without this it goes on after a while.
                let _ = go();
                return Ok(TakenOut::LeftOut(error.message));
            }
        };
        let file = match files.file(buffer.id) {
            Ok(file) => file,
            Err(error) => {
                let _ = go();
                give_up(buffer.id, files);
                return Ok(TakenOut::LeftOut(error.message));
            }
        };
        if !hold {
            held.clear();
        }
        let out = Out {
            buffer: buffer.id,
            held,
        };
        self.out().insert(pid, out);
        let Err(error) = library.ask(Request::Release, Some(file.as_fd()), RELEASE) else {
            let writes = files.is_written_ahead(buffer.id);
            return Ok(TakenOut::Out {
                buffer,
                bytes,
                writes,
            });
        };
        tracing::warn!(pid, "releasing its GPU memory: {error}");
        call_off(buffer.id, files);
        self.bring_in(pid, Some(buffer.id), threads, RELEASE, files)?;
        give_up(buffer.id, files);
        Ok(TakenOut::LeftOut(told(&error).message))
    }

    /// Copies the pieces into a new buffer. Returns it, its size, and the pieces.
    fn copied(
        &self,
        pid: i32,
        pieces: Vec<Piece>,
        threads: usize,
        joining: Joining<'_>,
        files: &Arc<VramFiles>,
    ) -> Result<(SharedBuffer, u64, Vec<Imported>), DriverError> {
        let bytes = size(&pieces).map_err(|error| told(&error))?;
        // The threads that copy allocate it faster than others could ahead of them.
        let buffer = files.make_for(pid, bytes)?;
        files.set_state(buffer.id, State::Filling);
        joining.with(buffer.id);
        let filled = |bytes| files.has_filled(buffer.id, bytes);
        let copied = files.file(buffer.id).and_then(|file| {
            let mut map = Mapped::new(&file, bytes, true).map_err(|error| told(&error))?;
            let memory = map.bytes_mut().map_err(|error| told(&error))?;
            let copier = self.gpus.copier()?;
            let pieces = copier.import(pieces, bytes)?;
            copier.copy(&pieces, memory, Way::Out(&filled), threads)?;
            Ok(pieces)
        });
        match copied {
            Ok(pieces) => {
                files.set_state(buffer.id, State::Complete);
                Ok((buffer, bytes, pieces))
            }
            Err(error) => {
                give_up(buffer.id, files);
                Err(error)
            }
        }
    }

    /// Brings the GPU memory of a process back, and lets its calls go on.
    ///
    /// # Errors
    /// It waits, and this can be called again.
    pub fn bring_in(
        &self,
        pid: i32,
        buffer: Option<u64>,
        threads: usize,
        limit: Duration,
        files: &VramFiles,
    ) -> Result<(), DriverError> {
        let library = library_of(pid)?;
        let (own, held) = match self.out().get_mut(&pid) {
            Some(out) => (Some(out.buffer), std::mem::take(&mut out.held)),
            None => (None, Vec::new()),
        };
        let file = match buffer.or(own) {
            Some(id) => files.file(id)?,
            None => kept(&library, limit)?,
        };
        let ask = |request| {
            let answer = library.ask(request, None, limit);
            answer.map_err(|error| told(&error))
        };
        let end = file.metadata().map_err(|error| told(&error))?.len();
        let held = Held::new(held);
        let ready = |bytes| match buffer.or(own) {
            Some(id) => files.has_been_read(id, bytes, limit),
            None => Ok(()),
        };
        let fill = |pieces: Vec<Piece>| {
            let bytes = size(&pieces).map_err(|error| told(&error))?;
            let mut map = Mapped::new(&file, bytes, true).map_err(|error| told(&error))?;
            let memory = map.bytes_mut().map_err(|error| told(&error))?;
            let copier = self.gpus.copier()?;
            let pieces = copier.import(pieces, bytes)?;
            let pieces = held.fill(copier, pieces);
            copier.copy(&pieces, memory, Way::In(&ready), threads)
        };
        fill_while_allocating(end, &held, &ask, &fill)?;
        ask(Request::Go)?;
        self.out().remove(&pid);
        Ok(())
    }

    /// Gives a process the file with its GPU memory, which then outlives the agent.
    pub fn keep(&self, pid: i32, limit: Duration, files: &VramFiles) -> Result<(), DriverError> {
        let buffer = self.out().get(&pid).map(|out| out.buffer);
        let buffer =
            buffer.ok_or_else(|| failed(ErrorKind::WrongState, "its GPU memory is its own"))?;
        let file = files.file(buffer)?;
        let kept = library_of(pid)?.ask(Request::Keep, Some(file.as_fd()), limit);
        kept.map(drop).map_err(|error| told(&error))
    }
}

/// Pieces that are still on the GPU with their contents, by place.
struct Held {
    pieces: Mutex<BTreeMap<(u64, u64), Imported>>,
    /// There were some.
    any: bool,
}

impl Held {
    fn new(pieces: Vec<Imported>) -> Self {
        let any = !pieces.is_empty();
        let by_place = pieces.into_iter().map(|piece| (piece.place(), piece));
        let pieces = Mutex::new(by_place.collect());
        Self { pieces, any }
    }

    fn pieces(&self) -> std::sync::MutexGuard<'_, BTreeMap<(u64, u64), Imported>> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies what is held to the process's new pieces, and lets go of it. Returns the pieces that are still to be filled.
    fn fill(&self, copier: &Copier, pieces: Vec<Imported>) -> Vec<Imported> {
        let (mut filled, mut from, mut rest) = (Vec::new(), Vec::new(), Vec::new());
        for piece in pieces {
            match self.pieces().remove(&piece.place()) {
                Some(held) => {
                    from.push(held);
                    filled.push(piece);
                }
                None => rest.push(piece),
            }
        }
        let pairs: Vec<_> = from.iter().zip(&filled).collect();
        if let Err(error) = copier.copy_on_gpus(&pairs) {
            tracing::info!("the memory held on the GPU: {error}");
            rest.append(&mut filled);
        }
        rest
    }

    /// Has the process allocate memory, beside what is held if there is room for both.
    fn allocate(
        &self,
        request: Request,
        ask: &dyn Fn(Request) -> Result<Vec<Piece>, DriverError>,
    ) -> Result<Vec<Piece>, DriverError> {
        let start = Instant::now();
        loop {
            match ask(request) {
                Err(error)
                    if error.kind == ErrorKind::OutOfMemory
                        && self.any
                        && start.elapsed() < 2 * FOR_ROOM =>
                {
                    // What is being filled makes room; if that is not enough, the rest comes from the file.
                    if start.elapsed() > FOR_ROOM {
                        self.pieces().clear();
                    }
                    std::thread::sleep(TICK);
                }
                done => return done,
            }
        }
    }
}

/// Copies what is allocated already while the process allocates the rest.
fn fill_while_allocating(
    end: u64,
    held: &Held,
    ask: &dyn Fn(Request) -> Result<Vec<Piece>, DriverError>,
    fill: &(dyn Fn(Vec<Piece>) -> Result<(), DriverError> + Sync),
) -> Result<(), DriverError> {
    std::thread::scope(|scope| {
        let (bytes, ahead) = match held.any {
            true => (ALLOCATED_BESIDE_HELD, 1),
            false => (ALLOCATED_AT_ONCE, AHEAD),
        };
        let (sender, allocated) = mpsc::sync_channel::<Vec<Piece>>(ahead);
        let filler = scope.spawn(move || {
            while let Ok(mut pieces) = allocated.recv() {
                pieces.extend(allocated.try_iter().flatten());
                fill(pieces)?;
            }
            Ok(())
        });
        let allocate = || {
            let mut from = 0;
            while from < end {
                let pieces = held.allocate(Request::Allocate { from, bytes }, ask)?;
                // None: an earlier try filled them, or they were never released. There may be others behind them.
                let next = size(&pieces).map_err(|error| told(&error))?;
                if !pieces.is_empty() && sender.send(pieces).is_err() {
                    return Ok(());
                }
                from = next.max(from.saturating_add(bytes));
            }
            Ok(())
        };
        let asked = allocate();
        drop(sender);
        let filled = filler
            .join()
            .unwrap_or_else(|_| Err(failed(ErrorKind::Driver, "a thread died")));
        filled.and(asked)
    })
}

/// Ends the writing of a buffer whose memory the process keeps.
fn call_off(buffer: u64, files: &Arc<VramFiles>) {
    if files.is_written_ahead(buffer) {
        files.call_off();
    }
}

/// Drops a buffer. Its writer may have begun a moment ago.
fn give_up(buffer: u64, files: &Arc<VramFiles>) {
    files.forget(buffer);
    call_off(buffer, files);
}

fn library_of(pid: i32) -> Result<Library, DriverError> {
    Library::of(pid).ok_or_else(|| {
        let what = "the preload library, which its GPU memory belongs to, is not in it, or is another version's: use the cryopod that took the memory out";
        failed(ErrorKind::Vram, what)
    })
}

fn kept(library: &Library, limit: Duration) -> Result<File, DriverError> {
    let pieces = library.ask(Request::Kept, None, limit);
    let piece = pieces.map_err(|error| told(&error))?.pop();
    let piece = piece.ok_or_else(|| failed(ErrorKind::Vram, "it keeps no file"))?;
    Ok(piece.handle.into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn memory_behind_some_that_was_never_released_is_allocated_too() {
        let asked = Mutex::new(Vec::new());
        let ask = |request| {
            let Request::Allocate { from, .. } = request else {
                panic!("{request:?}");
            };
            asked.lock().unwrap().push(from);
            let piece = |offset| Piece {
                offset,
                bytes: 6 << 30,
                handle: File::open("/dev/null").unwrap().into(),
            };
            Ok(match from >> 30 {
                8 => vec![piece(9 << 30)],
                _ => Vec::new(),
            })
        };
        let filled = Mutex::new(Vec::new());
        let fill = |pieces: Vec<Piece>| {
            let offsets = pieces.iter().map(|piece| piece.offset >> 30);
            filled.lock().unwrap().extend(offsets);
            Ok(())
        };
        fill_while_allocating(16 << 30, &Held::new(Vec::new()), &ask, &fill).unwrap();
        assert_eq!(*asked.lock().unwrap(), [0, 4 << 30, 8 << 30, 15 << 30]);
        assert_eq!(*filled.lock().unwrap(), [9]);
    }

    #[test]
    fn what_is_held_makes_room_or_is_let_go_of() {
        let held = Held {
            pieces: Mutex::default(),
            any: true,
        };
        let request = Request::Allocate { from: 0, bytes: 1 };
        let asked = Mutex::new(0);
        let full = |times: u32| {
            let asked = &asked;
            *asked.lock().unwrap() = 0;
            move |_| {
                *asked.lock().unwrap() += 1;
                match *asked.lock().unwrap() > times {
                    true => Ok(Vec::new()),
                    false => Err(failed(ErrorKind::OutOfMemory, "full")),
                }
            }
        };
        assert!(held.allocate(request, &full(3)).unwrap().is_empty());
        let error = held.allocate(request, &full(u32::MAX)).unwrap_err();
        assert_eq!(error.kind, ErrorKind::OutOfMemory);
        // Nothing was held: it is told at once.
        let none = Held::new(Vec::new());
        none.allocate(request, &full(u32::MAX)).unwrap_err();
        assert_eq!(*asked.lock().unwrap(), 1);
    }
}
