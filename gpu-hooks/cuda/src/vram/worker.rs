//! Writes or reads the image directory in a process of its own, so that neither a full memory nor a stranger's archive
//! can kill the agent.
//!
//! The worker gets its job as a line of JSON on stdin, answers with lines of JSON on stdout, and dies with the agent. A
//! writer begins with memory that is still being filled, and gets a second line when that is complete ([`Complete`]).

use super::front::Front;
use super::memory::{Mapped, populate_part};
use super::{VramDone, VramParent, filling};
use cryopod_archive::format::limits::raise_open_files;
use cryopod_archive::vram::{
    Ahead, ChunkDigest, Codec, MemorySource, ReadOptions, Vram, WriteOptions, Writer, Written,
};
use cryopod_host::sandbox::Sandbox;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::getppid;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

/// The agent's argument that makes it a worker.
pub const ARGUMENT: &str = "--vram-worker";
/// Longest line that a worker says, in bytes.
const MAX_LINE: u64 = 1 << 20;
/// Longest line that a worker is told, in bytes.
const MAX_JOB: u64 = 16 << 20;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Memory {
    pub name: String,
    pub path: PathBuf,
    pub bytes: u64,
    pub state: State,
}

/// What happens to memory while it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// Another program fills it, in any order.
    Changing,
    /// The agent fills it, and tells how far it is ([`Progress::Filled`]).
    Filling,
    /// The same, and what is there may still change.
    Ahead,
    Complete,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Job {
    Write {
        dir: PathBuf,
        /// May be none.
        memory: Vec<Memory>,
        chunk_bytes: u32,
        shard_bytes: u64,
        codec: Codec,
        level: i32,
        threads: usize,
        /// The previous VRAM files.
        parent: Option<VramParent>,
        search: Vec<PathBuf>,
    },
    Load {
        dir: PathBuf,
        memory: Vec<Memory>,
        /// The table's digest in the metadata.
        digest: Option<String>,
        check: bool,
        threads: usize,
        search: Vec<PathBuf>,
        /// Files with the keys for encrypted shards.
        identities: Vec<PathBuf>,
    },
}

/// What a writer is told after its job.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Progress {
    /// So many bytes from the start of one of the job's memories are there, and change no more.
    Filled {
        memory: usize,
        bytes: u64,
    },
    /// The digests of all chunks of one of the job's memories, in this file: the GPU has made them. Answered with
    /// [`Said::Needed`].
    Digests {
        memory: usize,
        path: PathBuf,
    },
    Complete(Complete),
}

/// All memory that is to be written: it is complete.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Complete {
    pub memory: Vec<Memory>,
    /// Which of the job's each one is, if it is one of them.
    pub filled_before: Vec<Option<usize>>,
}

/// By how much a writer's priority is lower.
const NICE: i32 = 5;

/// Tells a worker one thing.
pub fn tell(stdin: &mut ChildStdin, what: &impl Serialize) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    stdin.write_all(&line)
}

/// Whether a worker can be told a short thing without waiting for it.
pub fn listens(stdin: &ChildStdin) -> bool {
    let mut fds = [PollFd::new(stdin.as_fd(), PollFlags::POLLOUT)];
    poll(&mut fds, PollTimeout::ZERO) == Ok(1)
}

/// Starts a worker; the job of a writer is not complete yet.
pub fn start(job: &Job) -> std::io::Result<Child> {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new("/proc/self/exe");
    command
        .arg(ARGUMENT)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let agent = std::process::id();
    // SAFETY: between fork and exec only system calls are made.
    unsafe {
        command.pre_exec(move || {
            set_pdeathsig(Signal::SIGKILL)?;
            // The agent may have died in between.
            match getppid().as_raw() as u32 == agent {
                true => Ok(()),
                false => Err(std::io::ErrorKind::BrokenPipe.into()),
            }
        });
    }
    let mut child = command.spawn()?;
    if let Some(stdin) = &mut child.stdin {
        tell(stdin, job)?;
    }
    Ok(child)
}

/// A line of a worker's.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Said {
    /// So many bytes from the start of a memory, by its number in the job, have been read and checked.
    Read {
        memory: usize,
        bytes: u64,
    },
    /// Runs of a memory's chunks, by turns of those that are needed and of those that are not.
    Needed {
        memory: usize,
        runs: Vec<u64>,
    },
    Done(Result<VramDone, String>),
}

fn say(said: &Said) -> std::io::Result<()> {
    let mut line = serde_json::to_vec(said)?;
    line.push(b'\n');
    std::io::stdout().lock().write_all(&line)
}

/// Waits for a worker's end, and calls `heard` with what it says before that.
pub(super) fn finish(mut child: Child, mut heard: impl FnMut(Said)) -> Result<VramDone, String> {
    let mut done = None;
    if let Some(stdout) = child.stdout.take() {
        let mut stdout = BufReader::new(stdout);
        let mut line = Vec::new();
        while let Ok(1..) = stdout.by_ref().take(MAX_LINE).read_until(b'\n', &mut line) {
            match serde_json::from_slice(&line) {
                Ok(Said::Done(result)) => done = Some(result),
                Ok(said) => heard(said),
                Err(_) => break,
            }
            line.clear();
        }
    }
    let status = child.wait().map_err(|error| error.to_string())?;
    done.unwrap_or_else(|| {
        let of_memory = match status.signal() {
            Some(libc::SIGKILL) => {
                ": the kernel may have killed it for want of memory, which images on a tmpfs take, too; free some, or put them on a disk"
            }
            _ => "",
        };
        Err(format!(
            "the VRAM files' worker ended without an answer ({status}){of_memory}"
        ))
    })
}

pub fn main() -> u8 {
    // When memory runs out, the OOM killer should take this process before the container.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    raise_open_files();
    let done = told().and_then(|job| run(&job));
    let failed = done.is_err();
    let told = say(&Said::Done(done));
    u8::from(failed || told.is_err())
}

/// The next line of the agent's.
fn told<T: DeserializeOwned>() -> Result<T, String> {
    let mut line = Vec::new();
    let read = std::io::stdin()
        .lock()
        .take(MAX_JOB)
        .read_until(b'\n', &mut line);
    read.map_err(|error| error.to_string())?;
    serde_json::from_slice(&line).map_err(|error| error.to_string())
}

fn run(job: &Job) -> Result<VramDone, String> {
    match job {
        Job::Write {
            dir,
            memory,
            chunk_bytes,
            shard_bytes,
            codec,
            level,
            threads,
            parent,
            search,
        } => {
            // The driver and CRIU, which work meanwhile, come first.
            let _ = rustix::process::nice(NICE);
            let options = WriteOptions {
                chunk_bytes: *chunk_bytes,
                shard_bytes: *shard_bytes,
                threads: *threads,
                codec: *codec,
                level: *level,
                sync: true,
            };
            let parent = match parent {
                Some(parent) => open(&parent.directory, Some(&parent.digest), search)?,
                None => None,
            };
            let written = write(dir, memory, &options, parent.as_ref())?;
            Ok(VramDone {
                facts: written.facts,
                work_us: written.write_us,
                sync_us: written.sync_us,
                ahead: written.ahead,
                changed: written.changed,
            })
        }
        Job::Load {
            dir,
            memory,
            digest,
            check,
            threads,
            search,
            identities,
        } => {
            let options = ReadOptions {
                threads: *threads,
                check: *check,
                zeroed: true,
            };
            open(dir, digest.as_deref(), search)
                .and_then(|mut vram| {
                    if let Some(vram) = &mut vram {
                        vram.unlock(identities);
                    }
                    load(vram, dir, memory, &options)
                })
                .map_err(|error| format!("the GPU memory cannot be read: {error}"))
        }
    }
}

/// Writes while the memory is being filled, and the rest when it is complete.
fn write(
    dir: &Path,
    filling: &[Memory],
    options: &WriteOptions,
    parent: Option<&Vram>,
) -> Result<Written, String> {
    let failed = |error| format!("the GPU memory cannot be written: {error}");
    let never = AtomicBool::new(false);
    let mut writer = Writer::new(dir, options, parent, &never);
    let complete: Complete = {
        let maps = maps(filling)?;
        let digests: Vec<OnceLock<Vec<ChunkDigest>>> =
            filling.iter().map(|_| OnceLock::new()).collect();
        let ahead = filling.iter().zip(&maps).zip(&digests);
        let ahead = ahead.map(|((memory, map), digests)| Ahead {
            bytes: map.bytes(),
            complete: matches!(memory.state, State::Filling | State::Complete),
            digests: (memory.state == State::Filling).then_some(digests),
        });
        let memory: Vec<Ahead<'_>> = ahead.collect();
        let filled: Vec<_> = filling.iter().map(filled_so_far).collect();
        let over = AtomicBool::new(memory.is_empty());
        std::thread::scope(|scope| {
            let watched = filling.iter().zip(&memory).zip(&filled);
            let watched = watched.filter(|((job, _), _)| job.state == State::Changing);
            let watched = watched.map(|((_, memory), filled)| (memory.bytes, filled));
            let (bytes, fronts): (Vec<_>, Vec<_>) = watched.unzip();
            let over = &over;
            scope.spawn(move || filling::watch(&bytes, &fronts, over));
            let ahead = scope.spawn(|| writer.ahead(&memory, &filled, over));
            let complete = told_complete(&filled, |number, path| {
                let (Some(memory), Some(made)) = (filling.get(number), digests.get(number)) else {
                    return Ok(());
                };
                let read = read_digests(path, memory.bytes / u64::from(options.chunk_bytes.max(1)));
                let read = read.map_err(|error| format!("the digests of the GPU's: {error}"))?;
                let needed = Writer::needed(options, parent, &read);
                let _ = made.set(read);
                let runs = runs(&needed);
                let memory = number;
                say(&Said::Needed { memory, runs }).map_err(|error| error.to_string())
            });
            over.store(true, Relaxed);
            let ahead = ahead.join().map_err(|_| "a thread died")?;
            ahead.map_err(failed)?;
            complete
        })?
    };
    let maps = maps(&complete.memory)?;
    let sources = complete
        .memory
        .iter()
        .zip(&maps)
        .map(|(memory, map)| MemorySource {
            id: &memory.name,
            bytes: map.bytes(),
        });
    let sources: Vec<MemorySource<'_>> = sources.collect();
    let written = writer.finish(&sources, &complete.filled_before);
    written.map_err(failed)
}

fn filled_so_far(memory: &Memory) -> AtomicUsize {
    let bytes = usize::try_from(memory.bytes).unwrap_or(usize::MAX);
    AtomicUsize::new(if memory.state == State::Complete {
        bytes
    } else {
        0
    })
}

/// Reads so many digests.
fn read_digests(path: &Path, count: u64) -> std::io::Result<Vec<ChunkDigest>> {
    let mut digests = Vec::new();
    let mut file = BufReader::new(File::open(path)?);
    for _ in 0..count {
        let mut digest = ChunkDigest::default();
        file.read_exact(&mut digest.0)?;
        digests.push(digest);
    }
    Ok(digests)
}

/// Returns the lengths of runs, of needed and not needed chunks by turns.
fn runs(needed: &[bool]) -> Vec<u64> {
    let mut runs = vec![0];
    let mut now = true;
    for one in needed {
        if *one != now {
            now = *one;
            runs.push(0);
        }
        if let Some(last) = runs.last_mut() {
            *last += 1;
        }
    }
    runs
}

/// Notes how far memory is filled, until all is complete. Calls `digests` with what it is told of those.
fn told_complete(
    filled: &[AtomicUsize],
    digests: impl Fn(usize, &Path) -> Result<(), String>,
) -> Result<Complete, String> {
    loop {
        match told()? {
            Progress::Complete(complete) => return Ok(complete),
            Progress::Digests { memory, path } => digests(memory, &path)?,
            Progress::Filled { memory, bytes } => {
                let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
                if let Some(filled) = filled.get(memory) {
                    filled.store(bytes, Relaxed);
                }
            }
        }
    }
}

fn maps(memory: &[Memory]) -> Result<Vec<Mapped>, String> {
    memory.iter().map(|m| map(m, false)).collect()
}

fn map(memory: &Memory, writable: bool) -> Result<Mapped, String> {
    File::options()
        .read(true)
        .write(writable)
        .open(&memory.path)
        .and_then(|file| Mapped::new(&file, memory.bytes, writable))
        .map_err(|error| format!("{}: {error}", memory.name))
}

fn open(dir: &Path, digest: Option<&str>, search: &[PathBuf]) -> Result<Option<Vram>, String> {
    let digest = digest.map(str::parse::<ChunkDigest>).transpose()?;
    Vram::open_with(dir, digest, search).map_err(|error| error.to_string())
}

fn load(
    vram: Option<Vram>,
    dir: &Path,
    memory: &[Memory],
    options: &ReadOptions,
) -> Result<VramDone, String> {
    let start = Instant::now();
    let vram = vram.ok_or_else(|| {
        let index = dir.join(cryopod_archive::format::names::VRAM_INDEX);
        format!(
            "{} is missing; the checkpoint is incomplete",
            index.display()
        )
    })?;
    let never = AtomicBool::new(false);
    // All at once: each process's driver waits for its own.
    let all: u64 = memory.iter().map(|m| m.bytes).sum();
    let threads_for = |bytes: u64| {
        let share = bytes
            .saturating_mul(options.threads as u64)
            .div_ceil(all.max(1));
        usize::try_from(share).unwrap_or(usize::MAX).max(1)
    };
    let maps: Vec<Mapped> = memory
        .iter()
        .map(|m| map(m, true))
        .collect::<Result<_, _>>()?;
    // All is open: what decompresses needs no file, and nothing else.
    let confined = Sandbox::default().confine();
    confined.map_err(|error| format!("its process cannot be confined: {error}"))?;
    let read = |((number, memory), mut map): ((usize, &Memory), Mapped)| -> Result<(), String> {
        let missing = || format!("the VRAM files have no region {}", memory.name);
        let (region, _) = vram.index.find(&memory.name).ok_or_else(missing)?;
        let bytes = map.bytes_mut().map_err(|error| error.to_string())?;
        let front = Mutex::new(Front::new(bytes.len()));
        let each = ReadOptions {
            threads: threads_for(memory.bytes),
            ..options.clone()
        };
        vram.read_with(region, bytes, &each, &never, &|at, piece| {
            // Zeros have not been written; the driver would wait for each of their pages.
            populate_part(piece)?;
            let mut front = front.lock().unwrap_or_else(PoisonError::into_inner);
            match front.advance(at, piece.len()) {
                Some(bytes) => say(&Said::Read {
                    memory: number,
                    bytes,
                }),
                None => Ok(()),
            }
        })
        .map_err(|error| error.to_string())
    };
    std::thread::scope(|scope| {
        let readers: Vec<_> = (memory.iter().enumerate().zip(maps))
            .map(|one| scope.spawn(move || read(one)))
            .collect();
        readers.into_iter().try_for_each(|reader| {
            let joined = reader.join();
            joined.unwrap_or_else(|_| Err("a thread died".into()))
        })
    })?;
    Ok(VramDone {
        facts: vram.facts(),
        work_us: cryopod_host::micros(start.elapsed()),
        ..VramDone::default()
    })
}
