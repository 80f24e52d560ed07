//! The steps of one process: its GPU memory goes into a buffer of the agent's, and comes back.
//!
//! Until the library has released the memory, any failure leaves the process as it was. After that the buffer is the only
//! place of the contents. The process keeps the buffer's file until somebody else has it ([`Library::forget`]), so that
//! they are not lost when the agent dies; [`Preloads::is_out`] stays true until they are back.
//!
//! With [`Hold::CopyLater`] the only place is the pieces on the GPU, which this agent has imported and the plugin has
//! handles of. Once the process has its memory again, in other pieces, a thread copies the old ones into the buffer.

mod ahead;
mod held;
pub mod kept;
mod later;

use self::ahead::Ahead;
use self::held::{Held, Room};
use self::kept::Kept;
use super::{Library, size};
use crate::copy::{Gpus, Imported, Piece, Way};
use crate::gpus::gpu::GpuUuid;
use crate::inject::Descriptor;
use crate::messages::protocol::{
    DriverError, ErrorKind, HeldPiece, Hold, Op, Outcome, RELEASE, TakenOut, WriteTo,
};
use crate::procfs;
use crate::vram::SharedBuffer;
use crate::vram::memory::Mapped;
use crate::vram::store::{Joining, VramFiles};
use crate::vram::worker::State;
use cryopod_preload_wire::{FILLED, Request, UNFILLED};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

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
/// Most pieces of a process that are copied later: one message names all.
const MAX_HELD: usize = 2048;

/// Processes whose GPU memory is in the agent's buffers.
#[derive(Default)]
pub struct Preloads {
    /// The GPUs whose memory is copied.
    pub gpus: Gpus,
    out: Mutex<BTreeMap<i32, Out>>,
    /// GPU memory that processes need beside what is held.
    room: Room,
    /// The same, before their memory is taken out.
    promised: Mutex<BTreeMap<i32, held::Taken>>,
    ahead: Mutex<BTreeMap<i32, Ahead>>,
}

/// Where a process's GPU memory is.
struct Out {
    buffer: u64,
    /// Its pieces, still on the GPU with their contents: the short way back.
    held: Vec<Imported>,
    /// For pieces that are copied later: nothing else has the contents.
    later: Option<Later>,
}

/// What belongs to pieces that are copied later.
struct Later {
    /// For the plugin, and for the process itself if this agent cannot give it back.
    handles: Vec<Piece>,
    /// The room for both.
    _room: held::Taken,
    threads: usize,
    /// What the buffer lacks.
    ranges: Vec<Range<u64>>,
    /// The size of the chunks in which it is written, if that is known.
    chunk: Option<u32>,
}

/// Memory that has been taken out of a process, as far as it has been copied.
struct TakenMemory {
    buffer: SharedBuffer,
    bytes: u64,
    pieces: Vec<Imported>,
    /// Bytes that had changed since they were copied ahead.
    copied: u64,
    /// The room for others beside the pieces, and what is still to be copied.
    later: Option<(held::Taken, Vec<Range<u64>>)>,
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
    /// Carries out a request; `None` when it is about a process, or other parts of the agent do.
    pub fn perform(self: &Arc<Self>, op: &Op, files: &Arc<VramFiles>) -> Option<Outcome> {
        let done = match op {
            Op::PreloadPrepare {
                pids,
                gpus,
                in_bulk,
                wait,
            } => {
                let gpus = used(pids, gpus);
                match (gpus.is_empty(), wait) {
                    (true, _) => Ok(()),
                    (false, true) => self.gpus.prepare(&gpus, *in_bulk),
                    (false, false) => {
                        self.prepare_later(gpus, *in_bulk);
                        Ok(())
                    }
                }
            }
            Op::PreloadLetGo => {
                self.gpus.let_go();
                Ok(())
            }
            _ => return self.perform_ahead(op, files),
        };
        Some(done.map_or_else(Outcome::Error, |()| Outcome::Done))
    }

    /// Makes GPUs ready as [`Gpus::prepare`] does, without waiting for it: whoever copies waits.
    pub fn prepare_later(self: &Arc<Self>, gpus: Vec<GpuUuid>, in_bulk: bool) {
        let own = Arc::clone(self);
        let prepare = move || {
            if let Err(error) = own.gpus.prepare(&gpus, in_bulk) {
                tracing::info!("the GPUs are not ready ahead: {error}");
            }
        };
        if let Err(error) = std::thread::Builder::new().spawn(prepare) {
            tracing::info!("the GPUs are not ready ahead: {error}");
        }
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
        self.ahead().clear();
        self.promised().clear();
    }

    /// Takes the GPU memory out of a process. What is held stays on the GPU, where [`Preloads::bring_in`] finds it.
    ///
    /// # Errors
    /// Its GPU work did not end, and it goes on; or it has lost memory to a buffer from which it could not be brought back
    /// at once.
    pub fn take_out(
        self: &Arc<Self>,
        pid: i32,
        threads: usize,
        limit: Duration,
        hold: Hold,
        write: Option<&WriteTo>,
        files: &Arc<VramFiles>,
    ) -> Result<TakenOut, DriverError> {
        let joining = files.joining(write);
        let chunk = write.map(|to| to.config.chunk_bytes);
        drop(self.promised().remove(&pid));
        let ahead = self.ahead().remove(&pid);
        let kept = match hold {
            Hold::Keep => Kept::of(pid),
            _ => None,
        };
        let in_vain = ahead.as_ref().map(|ahead| ahead.buffer.id);
        let taken = self.take_out_of(
            pid, threads, limit, hold, chunk, joining, ahead, kept, files,
        );
        // A process that could not be given its memory back still needs the buffer.
        if let Some(buffer) = in_vain.filter(|_| !self.is_out(pid)) {
            give_up(buffer, files);
        }
        taken
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "one step, with all that it needs"
    )]
    fn take_out_of(
        self: &Arc<Self>,
        pid: i32,
        threads: usize,
        limit: Duration,
        hold: Hold,
        chunk: Option<u32>,
        joining: Joining<'_>,
        ahead: Option<Ahead>,
        kept: Option<Kept>,
        files: &Arc<VramFiles>,
    ) -> Result<TakenOut, DriverError> {
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
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                // The driver's own checkpoint of it would not end.
                return Err(failed(ErrorKind::NotSupported, error.to_string()));
            }
            Err(error) => {
                // It may stop after this, and would wait as long as the hold.
                library.go_on();
                return Ok(TakenOut::LeftOut(told(&error).message));
            }
        };
        let go = || library.ask(Request::Go { filled: UNFILLED }, None, MARGIN);
        if pieces.is_empty() {
            return Ok(match go() {
                Ok(_) => TakenOut::Without,
                Err(error) => TakenOut::LeftOut(told(&error).message),
            });
        }
        let later = hold == Hold::CopyLater && pieces.len() <= MAX_HELD;
        let copied = match hold {
            Hold::Keep => {
                let copied = self.copied_to_keep(pid, &pieces, threads, kept, files);
                copied.or_else(|error| {
                    tracing::info!(pid, "its copy cannot be kept: {error}");
                    self.copied(pid, &pieces, threads, false, joining, ahead, files)
                })
            }
            _ => self.copied(pid, &pieces, threads, later, joining, ahead, files),
        };
        let taken = match copied {
            Ok(taken) => taken,
            Err(error) => {
                // Without this it goes on after a while.
                let _ = go();
                return Ok(TakenOut::LeftOut(error.message));
            }
        };
        let (buffer, mut held) = (taken.buffer, taken.pieces);
        let out_with = |buffer: SharedBuffer, held| TakenOut::Out {
            writes: files.is_written_ahead(buffer.id),
            buffer,
            bytes: taken.bytes,
            copied: taken.copied,
            held,
        };
        if let Some((room, ranges)) = taken.later {
            let named = |piece: &Piece| HeldPiece {
                offset: piece.offset,
                bytes: piece.bytes,
                handle: Descriptor {
                    pid: std::process::id() as i32,
                    fd: piece.handle.as_raw_fd(),
                },
            };
            let named = pieces.iter().map(named).collect();
            let out = Out {
                buffer: buffer.id,
                held,
                later: Some(Later {
                    handles: pieces,
                    _room: room,
                    threads,
                    ranges,
                    chunk,
                }),
            };
            self.out().insert(pid, out);
            return Ok(out_with(buffer, named));
        }
        drop(pieces);
        let file = match files.file(buffer.id) {
            Ok(file) => file,
            Err(error) => {
                let _ = go();
                give_up(buffer.id, files);
                return Ok(TakenOut::LeftOut(error.message));
            }
        };
        if matches!(hold, Hold::No | Hold::Keep) {
            held.clear();
        }
        let out = Out {
            buffer: buffer.id,
            held,
            later: None,
        };
        self.out().insert(pid, out);
        let Err(error) = library.ask(Request::Release, Some(file.as_fd()), RELEASE) else {
            return Ok(out_with(buffer, Vec::new()));
        };
        tracing::warn!(pid, "releasing its GPU memory: {error}");
        call_off(buffer.id, files);
        self.bring_in(pid, Some(buffer.id), threads, RELEASE, false, files)?;
        give_up(buffer.id, files);
        Ok(TakenOut::LeftOut(told(&error).message))
    }

    /// Has a process let go of pieces that are copied later, once the plugin has handles of them. If it does not, it goes
    /// on with its memory, and why is returned.
    ///
    /// # Errors
    /// It has lost memory that could not be brought back at once.
    pub fn release(
        self: &Arc<Self>,
        pid: i32,
        files: &Arc<VramFiles>,
    ) -> Result<Option<String>, DriverError> {
        let out = self.out();
        let Some((buffer, threads)) =
            (out.get(&pid)).and_then(|out| Some((out.buffer, out.later.as_ref()?.threads)))
        else {
            return Err(failed(ErrorKind::WrongState, "nothing of it is held"));
        };
        drop(out);
        let Err(error) = library_of(pid)?.ask(Request::Release, None, RELEASE) else {
            return Ok(None);
        };
        tracing::warn!(pid, "releasing its GPU memory: {error}");
        call_off(buffer, files);
        self.bring_in(pid, Some(buffer), threads, RELEASE, false, files)?;
        give_up(buffer, files);
        Ok(Some(told(&error).message))
    }

    /// Copies the pieces into a buffer, or what has changed of them since they were copied `ahead`; or finds room for
    /// others beside them, if that is to be done `later`.
    #[allow(
        clippy::too_many_arguments,
        reason = "one step, with all that it needs"
    )]
    fn copied(
        &self,
        pid: i32,
        pieces: &[Piece],
        threads: usize,
        later: bool,
        joining: Joining<'_>,
        ahead: Option<Ahead>,
        files: &Arc<VramFiles>,
    ) -> Result<TakenMemory, DriverError> {
        let needed = size(pieces).map_err(|error| told(&error))?;
        let copier = self.gpus.copier()?;
        let pieces = copier.import(pieces, needed)?;
        if let Some(ahead) = ahead.as_ref().filter(|ahead| needed > ahead.bytes) {
            give_up(ahead.buffer.id, files);
        }
        let all = || std::iter::once(0..needed).collect::<Vec<_>>();
        let (buffer, bytes, ranges) = match ahead.filter(|ahead| needed <= ahead.bytes) {
            Some(ahead) => {
                let changed = ahead.changed(&copier, &pieces).unwrap_or_else(|error| {
                    tracing::info!("what has changed cannot be told: {error}");
                    all()
                });
                (ahead.buffer, ahead.bytes, changed)
            }
            None => {
                // The threads that copy allocate it faster than others could ahead of them.
                let buffer = files.make_for(pid, needed)?;
                files.set_state(buffer.id, State::Filling);
                joining.with(buffer.id);
                (buffer, needed, all())
            }
        };
        let copied = || {
            let room = match later && !ranges.is_empty() {
                true => self.room.take(&copier.room(&pieces)?),
                false => None,
            };
            if room.is_none() {
                let filled = |bytes| files.has_filled(buffer.id, bytes);
                let file = files.file(buffer.id)?;
                let mut map = Mapped::new(&file, bytes, true).map_err(|error| told(&error))?;
                let memory = map.bytes_mut().map_err(|error| told(&error))?;
                copier.copy_ranges(&pieces, &ranges, memory, Way::Out(&filled), threads)?;
                files.set_state(buffer.id, State::Complete);
            }
            Ok(room)
        };
        match copied() {
            Ok(room) => Ok(TakenMemory {
                buffer,
                bytes,
                pieces,
                copied: ranges.iter().map(|range| range.end - range.start).sum(),
                later: room.map(|room| (room, ranges)),
            }),
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
        self: &Arc<Self>,
        pid: i32,
        buffer: Option<u64>,
        threads: usize,
        limit: Duration,
        keep: bool,
        files: &Arc<VramFiles>,
    ) -> Result<(), DriverError> {
        let library = library_of(pid)?;
        let own = self.out().get(&pid).map(|out| out.buffer);
        let file = match buffer.or(own) {
            Some(id) => files.file(id)?,
            None => file_of(&library, limit)?,
        };
        let ask = |request| {
            let answer = library.ask(request, None, limit);
            answer.map_err(|error| told(&error))
        };
        let end = file.metadata().map_err(|error| told(&error))?.len();
        let (held, later) = match self.out().get_mut(&pid) {
            Some(out) => (std::mem::take(&mut out.held), out.later.take()),
            None => (Vec::new(), None),
        };
        let put_away = |pieces: &[Imported]| {
            let mut map = Mapped::new(&file, end, true).map_err(|error| told(&error))?;
            let memory = map.bytes_mut().map_err(|error| told(&error))?;
            let copier = self.gpus.copier()?;
            copier.copy(pieces, memory, Way::Out(&|_| {}), threads)
        };
        let held = Held::new(
            held,
            later.as_ref().map(|_| &put_away as &held::PutAway<'_>),
        );
        let ready = |bytes| match buffer.or(own) {
            Some(id) => files.has_been_read(id, bytes, limit),
            None => Ok(()),
        };
        let fill = |pieces: Vec<Piece>| {
            let bytes = size(&pieces).map_err(|error| told(&error))?;
            let mut map = Mapped::new(&file, bytes, true).map_err(|error| told(&error))?;
            let memory = map.bytes_mut().map_err(|error| told(&error))?;
            let copier = self.gpus.copier()?;
            let pieces = copier.import(&pieces, bytes)?;
            let pieces = held.fill(&copier, pieces)?;
            copier.copy(&pieces, memory, Way::In(&ready), threads)
        };
        let back = match library.is_away(limit) {
            Ok(true) => fill_while_allocating(end, &held, &ask, &fill).map(|()| FILLED),
            // It has not released it, or has gone on by itself.
            Ok(false) => Ok(UNFILLED),
            Err(error) => Err(told(&error)),
        };
        // Only the file that the process keeps may stay with it.
        if keep && back.is_ok() && buffer.or(own).is_none() && kept::is_whole(&file) {
            let _ = ask(Request::Spare).inspect_err(|error| tracing::info!("{error}"));
        }
        if let Err(error) = back.and_then(|filled| ask(Request::Go { filled }).map(drop)) {
            held.put_all_away();
            let rest = held.left();
            match (self.out().get_mut(&pid), later) {
                (Some(out), Some(later)) if !rest.is_empty() => {
                    (out.held, out.later) = (rest, Some(later));
                }
                (Some(out), Some(_)) => files.is_complete(out.buffer),
                _ => {}
            }
            return Err(error);
        }
        let own = self.out().remove(&pid).map(|out| out.buffer);
        match (own, later) {
            (Some(buffer), Some(later)) => {
                self.copy_later(Some(library), buffer, held.left(), file, later, files);
            }
            _ => library.let_go(),
        }
        Ok(())
    }

    /// Lets go of what is held of a process that has died; what is to be copied later still is.
    pub fn forget_process(self: &Arc<Self>, pid: i32, files: &Arc<VramFiles>) {
        let out = self.out().remove(&pid);
        if let Some(out) = out
            && let Some(later) = out.later
        {
            match files.file(out.buffer) {
                Ok(file) => self.copy_later(None, out.buffer, out.held, file, later, files),
                Err(error) => files.fail(&error.message),
            }
        }
    }

    /// Gives a process its GPU memory, which then outlives the agent: the file with it, or the pieces that are held.
    pub fn keep(&self, pid: i32, limit: Duration, files: &VramFiles) -> Result<(), DriverError> {
        let library = library_of(pid)?;
        if let Some(later) = (self.out().get_mut(&pid)).and_then(|out| out.later.as_mut()) {
            let handles = std::mem::take(&mut later.handles);
            let alone = library.go_on_alone(handles, None);
            return alone.map_err(|error| told(&error));
        }
        let buffer = self.out().get(&pid).map(|out| out.buffer);
        let buffer =
            buffer.ok_or_else(|| failed(ErrorKind::WrongState, "its GPU memory is its own"))?;
        let file = files.file(buffer)?;
        let kept = library.ask(Request::Keep, Some(file.as_fd()), limit);
        kept.map(drop).map_err(|error| told(&error))
    }
}

/// Returns these GPUs, and those of the processes that have the library.
fn used(pids: &[i32], gpus: &[GpuUuid]) -> Vec<GpuUuid> {
    let mut used = gpus.to_vec();
    let with = pids.iter().copied().filter(|pid| Library::is_in(*pid));
    let minors: Vec<u32> = with.flat_map(procfs::open_gpu_minors).collect();
    if !minors.is_empty() {
        let by_minor: BTreeMap<u32, GpuUuid> = procfs::gpus_by_minor().into_iter().collect();
        used.extend(minors.iter().filter_map(|minor| by_minor.get(minor)));
    }
    used
}

/// Copies what is allocated already while the process allocates the rest.
fn fill_while_allocating(
    end: u64,
    held: &Held,
    ask: &dyn Fn(Request) -> Result<Vec<Piece>, DriverError>,
    fill: &(dyn Fn(Vec<Piece>) -> Result<(), DriverError> + Sync),
) -> Result<(), DriverError> {
    std::thread::scope(|scope| {
        let (bytes, ahead) = match held.any() {
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

fn file_of(library: &Library, limit: Duration) -> Result<File, DriverError> {
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
        fill_while_allocating(16 << 30, &Held::new(Vec::new(), None), &ask, &fill).unwrap();
        assert_eq!(*asked.lock().unwrap(), [0, 4 << 30, 8 << 30, 15 << 30]);
        assert_eq!(*filled.lock().unwrap(), [9]);
    }
}
