//! The worker that writes and reads the VRAM files: its start, its end, and what it is told meanwhile.

use super::{VramFiles, directory, failed, refused};
use crate::messages::protocol::{DriverError, ErrorKind, WriteTo};
use crate::vram::memory;
use crate::vram::worker::{self, Complete, Job, Memory, Progress, Said, State};
use crate::vram::{NamedBuffer, VramConfig, VramDone};
use cryopod_archive::vram::ChunkDigest;
use cryopod_host::pidfd;
use rustix::process::{Signal, pidfd_send_signal};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::ChildStdin;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// How long a killed worker may take to end.
const KILLED: Duration = Duration::from_secs(10);
/// How long a writer may take to tell which chunks it needs.
const DIGESTS: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) enum Work {
    #[default]
    None,
    Running {
        number: u64,
        worker: Option<Arc<OwnedFd>>,
        /// A writer that is still to be told what is complete.
        ahead: Option<Filling>,
        /// The directory whose VRAM files are removed when the work fails or is cancelled.
        writes: Option<PathBuf>,
        /// Files that a writer reads digests from, which may be late.
        digests: Vec<File>,
    },
    Ended {
        result: Result<VramDone, String>,
        /// As `writes`, of a writer that has ended well.
        wrote: Option<PathBuf>,
    },
}

impl Work {
    fn failed(reason: &str) -> Self {
        Self::Ended {
            result: Err(reason.to_owned()),
            wrote: None,
        }
    }
}

/// Buffers that are written while they are filled.
pub(super) struct Filling {
    writer: ChildStdin,
    /// The writer's, in its order.
    buffers: Vec<u64>,
    /// What it is told once these buffers are complete.
    complete: Option<(Complete, Vec<u64>)>,
}

/// Processes whose memory is written together, and those that are ready for it.
#[derive(Default)]
pub(super) struct Together {
    ready: usize,
    buffers: Vec<u64>,
}

impl Together {
    /// Adds a process, with its buffer if it has one. Returns all buffers when so many processes have come.
    fn join(&mut self, buffer: Option<u64>, processes: usize) -> Vec<u64> {
        self.ready += 1;
        self.buffers.extend(buffer);
        match self.ready < processes {
            true => Vec::new(),
            false => std::mem::take(self).buffers,
        }
    }
}

/// A process whose memory is written together with that of others. When dropped, these no longer wait for it.
pub struct Joining<'a> {
    files: &'a Arc<VramFiles>,
    to: Option<&'a WriteTo>,
}

impl Joining<'_> {
    /// Has the buffer written while it is filled, as soon as the last process has joined. It must have the state
    /// [`worker::State::Filling`].
    pub fn with(mut self, buffer: u64) {
        self.join(Some(buffer));
    }

    fn join(&mut self, buffer: Option<u64>) {
        let Some(to) = self.to.take() else {
            return;
        };
        if let Err(error) = self.files.write_together(to, buffer) {
            tracing::info!("it is written later: {error}");
        }
    }
}

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        self.join(None);
    }
}

impl VramFiles {
    /// One of the processes whose memory is written together, if it is to be written at once.
    pub fn joining<'a>(self: &'a Arc<Self>, to: Option<&'a WriteTo>) -> Joining<'a> {
        Joining { files: self, to }
    }

    fn write_together(
        self: &Arc<Self>,
        to: &WriteTo,
        buffer: Option<u64>,
    ) -> Result<(), DriverError> {
        let mut inner = self.inner();
        let mut buffers = inner.together.join(buffer, to.processes);
        buffers.retain(|id| inner.buffers.contains_key(id));
        drop(inner);
        match buffers.is_empty() {
            true => Ok(()),
            false => self.write_ahead(&to.dir, &buffers, &to.config),
        }
    }

    /// Whether a writer works that is still to be told what is complete.
    pub(super) fn writes_ahead(&self) -> bool {
        matches!(&self.inner().work, Work::Running { ahead: Some(_), .. })
    }

    /// Whether a buffer is being written while it is filled.
    pub fn is_written_ahead(&self, id: u64) -> bool {
        matches!(&self.inner().work, Work::Running { ahead: Some(filling), .. } if filling.buffers.contains(&id))
    }

    /// Whether a buffer is to be written once it is complete.
    pub fn is_awaited(&self, id: u64) -> bool {
        let inner = self.inner();
        let Work::Running {
            ahead: Some(filling),
            ..
        } = &inner.work
        else {
            return false;
        };
        let last = filling.complete.iter().any(|(_, last)| last.contains(&id));
        last || filling.buffers.contains(&id)
    }

    /// Tells the writer, if it waits for that alone, that a buffer is complete after all others that it writes.
    pub fn is_complete(&self, id: u64) {
        self.set_state(id, State::Complete);
        let mut inner = self.inner();
        let buffers = inner.buffers.clone();
        if let Work::Running { ahead, .. } = &mut inner.work
            && let Some(Filling {
                complete: Some((_, last)),
                ..
            }) = ahead
            && last.iter().all(|id| {
                buffers
                    .get(id)
                    .is_none_or(|b| !matches!(b.state(), State::Filling | State::Ahead))
            })
            && let Some(Filling {
                mut writer,
                complete: Some((complete, _)),
                ..
            }) = ahead.take()
        {
            tell_complete(&mut writer, complete);
        }
    }

    /// Ends the writer for this reason.
    pub fn fail(&self, reason: &str) {
        self.end_work(Work::failed(reason));
    }

    /// Tells the writer that so many bytes from the start of a buffer are there. It must have the state
    /// [`worker::State::Filling`] since before the writer began.
    pub fn has_filled(&self, id: u64, bytes: u64) {
        let mut inner = self.inner();
        let Work::Running { ahead, .. } = &mut inner.work else {
            return;
        };
        let Some(Filling {
            writer, buffers, ..
        }) = ahead
        else {
            return;
        };
        let Some(memory) = buffers.iter().position(|buffer| *buffer == id) else {
            return;
        };
        // A worker that is busy elsewhere hears the next one, or that it is complete. Its end shows why it does not listen.
        if worker::listens(writer) {
            let _ = worker::tell(writer, &Progress::Filled { memory, bytes });
        }
    }

    /// Tells the writer the digests of a buffer's chunks before any of it is filled. Returns runs of chunks: by turns those
    /// whose bytes it needs, and those that it does not.
    ///
    /// # Errors
    /// The buffer is not being written, or the writer does not answer: it needs all.
    pub fn needed(&self, id: u64, digests: &[ChunkDigest]) -> Result<Vec<u64>, DriverError> {
        let refuse = |what: &str| refused(ErrorKind::Vram, what);
        let bytes: Vec<u8> = digests.iter().flat_map(|digest| digest.0).collect();
        let file = memory::new_file(bytes.len() as u64)
            .and_then(|file| file.write_all_at(&bytes, 0).map(|()| file));
        let file = file.map_err(failed("a file of digests"))?;
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        // A writer takes the digests of no other: one that reads ahead would miss what is left out.
        if self.buffer(id)?.state() != State::Filling {
            return Err(refuse("it is not being filled"));
        }
        let mut inner = self.inner();
        inner.needed.remove(&id);
        let Work::Running {
            ahead: Some(filling),
            digests: told,
            ..
        } = &mut inner.work
        else {
            return Err(refuse("nothing is being written"));
        };
        let place = filling.buffers.iter().position(|buffer| *buffer == id);
        let memory = place.ok_or_else(|| refuse("it is not being written"))?;
        told.push(file);
        let path = path.into();
        if !worker::listens(&filling.writer)
            || worker::tell(&mut filling.writer, &Progress::Digests { memory, path }).is_err()
        {
            return Err(refuse("the writer does not listen"));
        }
        drop(inner);
        self.answered(DIGESTS, "the writer does not tell what it needs", |inner| {
            let ended = !matches!(inner.work, Work::Running { .. });
            let needed = inner.needed.get(&id).cloned().map(Ok);
            needed.or_else(|| ended.then(|| Err(refuse("the writer has ended"))))
        })
    }

    /// Ends a writer whose memory is not to be written after all; another may begin.
    pub fn call_off(&self) {
        self.end_work(Work::None);
    }

    /// Begins to write buffers that are being filled.
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

    pub(super) fn write(
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
            Work::None | Work::Ended { result: Ok(_), .. } => false,
            Work::Running { ahead, .. } => ahead.is_some(),
            // Whoever waits for it hears why.
            Work::Ended { result: Err(_), .. } => return Ok(()),
        };
        if !begun {
            self.write_ahead(dir, &[], config)?;
        }
        let ahead = match &mut self.inner().work {
            Work::Running { ahead, .. } => ahead.take(),
            _ => None,
        };
        let Some(mut filling) = ahead else {
            return Ok(());
        };
        let before = |b: &NamedBuffer| filling.buffers.iter().position(|id| *id == b.id);
        let complete = Complete {
            filled_before: buffers.iter().map(before).collect(),
            memory,
        };
        let is_filling = |(_, memory): &(&NamedBuffer, &Memory)| {
            matches!(memory.state, State::Filling | State::Ahead)
        };
        let last = buffers.iter().zip(&complete.memory).filter(is_filling);
        let last: Vec<u64> = last.map(|(buffer, _)| buffer.id).collect();
        if last.is_empty() {
            tell_complete(&mut filling.writer, complete);
        } else {
            filling.complete = Some((complete, last));
            if let Work::Running { ahead, .. } = &mut self.inner().work {
                *ahead = Some(filling);
            }
        }
        Ok(())
    }

    /// Starts a worker; `directory` stays open as long as it works. A writer has its directory's path, and the buffers
    /// that are still being filled.
    pub(super) fn start(
        self: &Arc<Self>,
        job: Job,
        directory: File,
        writer: Option<(PathBuf, Vec<u64>)>,
    ) -> Result<(), DriverError> {
        let (writes, filling) = writer.unzip();
        let mut inner = self.inner();
        let deadline = Instant::now() + KILLED;
        while inner.ending > 0 && Instant::now() < deadline {
            inner = self.changed_within(inner, KILLED);
        }
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
        let written = filling.clone().unwrap_or_default();
        let read_into: Vec<u64> = inner.read.keys().copied().collect();
        let work = move || {
            // It dies with the thread that starts it: with this one, which waits for it.
            let mut child = match worker::start(&job) {
                Ok(child) => child,
                Err(error) => return drop(sender.send(Err(error))),
            };
            let _ = sender.send(Ok((
                pidfd::open(child.id() as i32).ok(),
                child.stdin.take(),
            )));
            let result = worker::finish(child, |said| match said {
                Said::Read { memory, bytes } => {
                    if let Some(id) = read_into.get(memory) {
                        vram_files.has_read(*id, bytes);
                    }
                }
                Said::Needed { memory, runs } => {
                    if let Some(id) = written.get(memory) {
                        vram_files.inner().needed.insert(*id, runs);
                        vram_files.changed.notify_all();
                    }
                }
                Said::Done(_) => {}
            });
            if let (Err(error), Some(dir)) = (&result, &dir) {
                tracing::error!("{error}");
                cryopod_archive::vram::write::remove(dir);
            }
            drop(directory);
            let mut inner = vram_files.inner();
            if matches!(inner.work, Work::Running { number: n, .. } if n == number) {
                let wrote = dir.filter(|_| result.is_ok());
                inner.work = Work::Ended { result, wrote };
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
            ahead: stdin.zip(filling).map(|(writer, buffers)| Filling {
                writer,
                buffers,
                complete: None,
            }),
            writes,
            digests: Vec::new(),
        };
        Ok(())
    }

    pub(super) fn wait(&self, limit: Duration) -> Result<Option<VramDone>, DriverError> {
        let late = "the VRAM files' worker still works";
        self.answered(limit, late, |inner| match &inner.work {
            Work::None => Some(Ok(None)),
            Work::Ended { result, .. } => Some(match result {
                Ok(done) => Ok(Some(done.clone())),
                Err(error) => Err(refused(ErrorKind::Vram, error.clone())),
            }),
            Work::Running { .. } => None,
        })
    }

    /// Ends a worker that nobody waits for any more: its files are no checkpoint.
    pub fn settle(&self) {
        let works = matches!(&self.inner().work, Work::Running { .. });
        if works {
            self.cancel();
        }
    }

    /// Ends the worker, and waits until what it wrote is removed, also if it had ended well.
    pub(super) fn cancel(&self) {
        self.end_work(Work::failed("called off"));
    }

    /// The same. From then on the work is `then`; no other begins before that, whose files would be removed, too. One that
    /// hangs on its disk is left to end by itself.
    fn end_work(&self, then: Work) {
        let deadline = Instant::now() + KILLED;
        let mut inner = self.inner();
        inner.ending += 1;
        let dir = match &inner.work {
            Work::Running { worker, writes, .. } => {
                if let Some(worker) = worker {
                    let _ = pidfd_send_signal(worker, Signal::KILL);
                }
                writes.clone()
            }
            // Nobody has used its files yet.
            Work::Ended { wrote, .. } => wrote.clone(),
            Work::None => None,
        };
        while matches!(inner.work, Work::Running { .. }) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            inner = self.changed_within(inner, left);
        }
        // If not, the worker's thread removes them when it can.
        let has_ended = !matches!(inner.work, Work::Running { .. });
        drop(inner);
        if let Some(dir) = dir.filter(|_| has_ended) {
            cryopod_archive::vram::write::remove(&dir);
        }
        let mut inner = self.inner();
        if has_ended {
            inner.work = then;
        }
        inner.ending -= 1;
        drop(inner);
        self.changed.notify_all();
    }
}

fn tell_complete(writer: &mut ChildStdin, complete: Complete) {
    if let Err(error) = worker::tell(writer, &Progress::Complete(complete)) {
        tracing::info!("the VRAM files' worker: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_process_has_all_buffers() {
        let mut together = Together::default();
        assert_eq!(together.join(Some(5), 1), [5]);
        assert!(together.join(Some(1), 3).is_empty());
        assert!(together.join(None, 3).is_empty());
        assert_eq!(together.join(Some(2), 3), [1, 2]);
        assert!(together.join(None, 2).is_empty());
        assert!(together.join(None, 2).is_empty());
        assert!(together.join(Some(3), 2).is_empty());
    }
}
