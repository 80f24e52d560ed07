//! Defines the messages between the plugin and the driver agent: one JSON object a line, both ways.
//!
//! The client chooses a request's id; the answer repeats it. Several requests may be in flight, and answers come in the
//! order the driver finishes. A request for a process whose previous driver call still runs gets [`ErrorKind::Busy`].

use super::buffers::{NamedBuffer, SharedBuffer, VramConfig, VramDone, Wanted, WantedRegion};
use crate::gpus::gpu::{GpuPair, GpuUuid};
use crate::inject::Descriptor;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::Duration;

/// A longer line ends the connection.
pub const MAX_LINE: usize = 256 * 1024;
/// How long a request may take that has no limit of its own, in milliseconds.
pub const QUERY_MS: u64 = 10_000;
/// How much longer than its own timeout a lock may take before it counts as hanging.
const LOCK_GRACE: Duration = Duration::from_secs(3);
/// How long releasing GPU memory may take.
pub const RELEASE: Duration = Duration::from_secs(60);
/// How much longer than its own timeout the copying of a process's GPU memory may take.
const COPY_GRACE: Duration = Duration::from_secs(180);
/// How long NCCL's communicators may take to go, and to come again.
const NCCL: Duration = Duration::from_secs(300);
/// How much later than the agent's own limit its answer may come.
const MARGIN: Duration = Duration::from_secs(10);

/// A CUDA process's checkpoint state, as the driver names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProcessState {
    Running,
    Locked,
    /// GPU memory is in host memory, no GPU is held.
    Checkpointed,
    /// The driver gave up on the process.
    Failed,
    /// A checkpoint is under way (drivers that report it).
    Checkpointing,
    /// A restore is under way (drivers that report it).
    Restoring,
    Unknown,
}

impl ProcessState {
    /// From `CUprocessState`.
    pub fn from_raw(raw: u32) -> Self {
        match raw {
            0 => Self::Running,
            1 => Self::Locked,
            2 => Self::Checkpointed,
            3 => Self::Failed,
            4 => Self::Checkpointing,
            5 => Self::Restoring,
            _ => Self::Unknown,
        }
    }
}

impl std::fmt::Display for ProcessState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Locked => "locked",
            Self::Checkpointed => "checkpointed",
            Self::Failed => "failed",
            Self::Checkpointing => "checkpointing",
            Self::Restoring => "restoring",
            Self::Unknown => "unknown",
        })
    }
}

/// A request to the agent. Pids are host pids (of the agent's PID namespace). `limit_ms` is how long the agent waits
/// before it answers [`ErrorKind::TimedOut`] while the call goes on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "op", deny_unknown_fields)]
pub enum Op {
    /// Identifies the agent. Answered by [`Outcome::Hello`].
    Hello,
    /// Checks for a CUDA process. Needs nothing of the process, which may be stopped. Answered by [`Outcome::Thread`].
    Find {
        pid: i32,
        limit_ms: u64,
    },
    /// Asks for the state of a CUDA process, which must be running: its driver's thread answers. Answered by
    /// [`Outcome::State`].
    Query {
        pid: i32,
        limit_ms: u64,
    },
    /// Blocks its CUDA calls and waits for its GPU work.
    Lock {
        pid: i32,
        /// How long the driver may wait for the GPU work.
        timeout_ms: u64,
    },
    /// Moves its GPU memory to host memory and releases the GPUs.
    Checkpoint {
        pid: i32,
        limit_ms: u64,
    },
    Restore {
        pid: i32,
        /// Where each GPU goes; empty: the same GPUs.
        #[serde(default)]
        gpu_map: Vec<GpuPair>,
        limit_ms: u64,
    },
    /// Lets CUDA calls through again.
    Unlock {
        pid: i32,
        limit_ms: u64,
    },
    /// The dump is complete and CRIU is about to kill its processes: nothing is undone when the connection ends. The
    /// exception is a process that is still alive well after that: a failed post-dump script lets the tasks go on after
    /// the plugin's end.
    Commit,
    /// Keeps the processes as they are when the connection ends; the agent then holds none of their memory.
    Keep,
    /// Allocates, ahead of the freeze, what processes are about to need.
    VramReserve {
        wanted: Vec<Wanted>,
        threads: usize,
    },
    /// Allocates all the memory for a process's GPU memory. Answered by [`Outcome::Buffer`].
    VramPrepare {
        pid: i32,
        bytes: u64,
        threads: usize,
        limit_ms: u64,
    },
    /// Records the place of a buffer: when the process is put back, it must be there.
    VramPlaced {
        id: u64,
        pid: i32,
        /// The thread to do it with.
        tid: i32,
        address: u64,
    },
    /// Copies a buffer into private memory of the process, and frees it.
    VramCopy {
        id: u64,
        pid: i32,
        /// The address, at which memory is mapped.
        address: u64,
        limit_ms: u64,
    },
    VramDrop {
        id: u64,
    },
    /// Begins to write buffers into the image directory while the driver fills them. [`Op::VramWrite`] must follow.
    VramWriteAhead {
        dir: PathBuf,
        buffers: Vec<u64>,
        config: VramConfig,
    },
    /// Begins to write buffers into the image directory, or goes on: they are complete.
    VramWrite {
        dir: PathBuf,
        buffers: Vec<NamedBuffer>,
        config: VramConfig,
    },
    /// Begins to read regions of the image directory. Answered by [`Outcome::Buffers`].
    VramLoad {
        dir: PathBuf,
        regions: Vec<WantedRegion>,
        config: VramConfig,
    },
    /// A restored process has a buffer mapped, and is to wait where it touches what has not been read yet.
    VramUserfault {
        id: u64,
        address: u64,
        /// A userfaultfd of the process.
        userfaultfd: Descriptor,
    },
    /// Waits for the writing or reading. Answered by [`Outcome::Vram`].
    VramWait {
        limit_ms: u64,
    },
    /// Waits until these buffers have been read.
    VramRead {
        buffers: Vec<u64>,
        limit_ms: u64,
    },
    /// Ends it and removes what was written.
    VramCancel,
    /// Makes GPUs ready for a copy, ahead of it: those of processes that have the preload library, and these.
    PreloadPrepare {
        pids: Vec<i32>,
        gpus: Vec<GpuUuid>,
        /// Whether more than a few blocks are copied.
        in_bulk: bool,
        /// Whether the answer waits until they are ready. A copy does in any case.
        wait: bool,
    },
    /// Frees what the agent itself has on the GPUs for copies. A later copy makes it anew.
    PreloadLetGo,
    /// Copies the GPU memory of those processes that have the preload library while they work, and begins to write it.
    /// [`Op::PreloadOut`] then copies only what has changed. Answered by [`Outcome::Ahead`].
    PreloadAhead {
        pids: Vec<i32>,
        threads: usize,
        /// As for [`Op::PreloadOut`]: what is copied later is not copied ahead.
        hold: Hold,
        write: WriteTo,
    },
    /// Takes the GPU memory out of a process that runs and has the preload library. Answered by [`Outcome::TakenOut`].
    PreloadOut {
        pid: i32,
        /// How long its GPU work may take to end.
        timeout_ms: u64,
        threads: usize,
        #[serde(default)]
        hold: Hold,
        /// Where its memory is to be written while it is copied; `None`: [`Op::VramWriteAhead`] follows.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        write: Option<WriteTo>,
    },
    /// Has a process let go of GPU memory that [`Hold::CopyLater`] holds, once others than the agent hold it, too.
    /// Answered by [`Outcome::Done`], or [`TakenOut::LeftOut`].
    PreloadRelease {
        pid: i32,
    },
    /// Takes the NCCL communicators of these processes down, which run and have the preload library, if memory is shared
    /// through them; they come up again when the connection ends, unless it is committed. Answered by
    /// [`Outcome::Nccl`], with no communicators if there is nothing to do.
    NcclDown {
        pids: Vec<i32>,
        /// How long the ranks may take to come level.
        quiesce_ms: u64,
        /// Whether GPU memory that is still shared then is an error.
        refuse_shared: bool,
    },
    /// Makes the communicators of these running processes again that are down. Answered by [`Outcome::Nccl`].
    NcclUp {
        pids: Vec<i32>,
    },
    /// Brings it back after the driver's unlock, and lets the process's calls go on. Its library's thread must run.
    PreloadIn {
        pid: i32,
        /// Where the contents are; `None`: where this agent has put them, or in the file that the process keeps.
        buffer: Option<u64>,
        threads: usize,
        limit_ms: u64,
        /// Whether the file that the process keeps stays with it, if [`Hold::Keep`] made it.
        #[serde(default)]
        keep: bool,
    },
}

/// What becomes of the pieces on the GPU when a process's GPU memory is taken out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hold {
    /// They are free once they are copied.
    #[default]
    No,
    /// The same, and the copy has what the next one needs ([`Op::PreloadIn`]).
    Keep,
    /// They are copied, and stay until the process has its memory again, which it then has sooner.
    Copied,
    /// They are copied after the process has its memory again, if the GPU has room for both.
    CopyLater,
}

/// What the agent does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// It answers at once, or other parts of the agent do.
    Other,
    /// It calls the driver about a process.
    Asks,
    /// The same, and the call changes the process: it is undone when the connection ends.
    Changes,
}

impl Op {
    /// The one table of the requests: name, process, work, and how long the agent may take.
    fn row(&self) -> (&'static str, Option<i32>, Work, Duration) {
        use Work::{Asks, Changes, Other};
        let ms = |ms: u64| Duration::from_millis(ms);
        let short = ms(QUERY_MS);
        match self {
            Self::Hello => ("hello", None, Other, short),
            Self::Find { pid, limit_ms } => ("find", Some(*pid), Asks, ms(*limit_ms)),
            Self::Query { pid, limit_ms } => ("query", Some(*pid), Asks, ms(*limit_ms)),
            Self::Lock { pid, timeout_ms } => {
                let limit = ms(*timeout_ms).saturating_add(LOCK_GRACE);
                ("lock", Some(*pid), Changes, limit)
            }
            Self::Checkpoint { pid, limit_ms } => {
                ("checkpoint", Some(*pid), Changes, ms(*limit_ms))
            }
            Self::Restore { pid, limit_ms, .. } => ("restore", Some(*pid), Changes, ms(*limit_ms)),
            Self::Unlock { pid, limit_ms } => ("unlock", Some(*pid), Changes, ms(*limit_ms)),
            Self::Commit => ("commit", None, Other, short),
            Self::Keep => ("keep", None, Other, short),
            Self::VramReserve { .. } => ("vram-reserve", None, Other, short),
            Self::VramPrepare { pid, limit_ms, .. } => {
                ("vram-prepare", Some(*pid), Other, ms(*limit_ms))
            }
            Self::VramPlaced { pid, .. } => ("vram-placed", Some(*pid), Other, short),
            Self::VramCopy { pid, limit_ms, .. } => ("vram-copy", Some(*pid), Other, ms(*limit_ms)),
            Self::VramDrop { .. } => ("vram-drop", None, Other, short),
            Self::VramWriteAhead { .. } => ("vram-write-ahead", None, Other, short),
            Self::VramWrite { .. } => ("vram-write", None, Other, short),
            Self::VramLoad { .. } => ("vram-load", None, Other, short),
            Self::VramUserfault { .. } => ("vram-userfault", None, Other, short),
            Self::VramWait { limit_ms } => ("vram-wait", None, Other, ms(*limit_ms)),
            Self::VramRead { limit_ms, .. } => ("vram-read", None, Other, ms(*limit_ms)),
            Self::VramCancel => ("vram-cancel", None, Other, short),
            Self::PreloadPrepare { .. } => ("preload-prepare", None, Other, short),
            Self::PreloadLetGo => ("preload-let-go", None, Other, short),
            Self::PreloadAhead { .. } => ("preload-ahead", None, Other, COPY_GRACE),
            Self::PreloadOut {
                pid, timeout_ms, ..
            } => {
                let limit = ms(*timeout_ms).saturating_add(COPY_GRACE);
                ("preload-out", Some(*pid), Changes, limit)
            }
            Self::PreloadRelease { pid } => ("preload-release", Some(*pid), Changes, RELEASE),
            Self::PreloadIn { pid, limit_ms, .. } => {
                ("preload-in", Some(*pid), Changes, ms(*limit_ms))
            }
            Self::NcclDown { quiesce_ms, .. } => (
                "nccl-down",
                None,
                Other,
                ms(*quiesce_ms).saturating_add(NCCL),
            ),
            Self::NcclUp { .. } => ("nccl-up", None, Other, NCCL),
        }
    }

    pub fn name(&self) -> &'static str {
        self.row().0
    }

    pub fn pid(&self) -> Option<i32> {
        self.row().1
    }

    pub fn work(&self) -> Work {
        self.row().2
    }

    /// How long the agent may take until it answers.
    pub fn limit(&self) -> Duration {
        self.row().3
    }

    /// How long a client waits for the answer.
    pub fn patience(&self) -> Duration {
        self.limit().saturating_add(MARGIN)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    pub id: u64,
    pub request: Op,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    pub id: u64,
    /// The driver's time in microseconds.
    pub micros: u64,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    Hello(Hello),
    /// Answer to [`Op::Find`]: the thread that does the driver's work in the process; `None`: it does not use CUDA.
    Thread(Option<i32>),
    State(ProcessState),
    Done,
    Buffer(SharedBuffer),
    /// Answer to [`Op::VramLoad`], in the order of the regions.
    Buffers(Vec<SharedBuffer>),
    /// Answer to [`Op::VramWait`]: what was written or read; `None` if it was never begun.
    Vram(Option<VramDone>),
    TakenOut(TakenOut),
    Ahead(CopiedAhead),
    Nccl(NcclDone),
    Error(DriverError),
}

impl Outcome {
    /// Returns the buffer, or why there is none.
    pub fn buffer(&self) -> Result<&SharedBuffer, String> {
        match self {
            Self::Buffer(buffer) => Ok(buffer),
            Self::Error(error) => Err(error.message.clone()),
            other => Err(format!("unexpected answer {other:?}")),
        }
    }
}

/// What was done with NCCL's communicators.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NcclDone {
    /// How many; each counts once, whatever its number of ranks.
    pub communicators: usize,
    /// The steps in their order, with the microseconds that each took.
    pub steps: Vec<(NcclStep, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NcclStep {
    /// Until all ranks had made the same calls.
    Level,
    /// Until the GPUs had done their work.
    Idle,
    /// Until the communicators were destroyed.
    Down,
    /// Until they were made again.
    Up,
}

impl NcclDone {
    /// Measures a step.
    pub fn time<T, E>(
        &mut self,
        step: NcclStep,
        work: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let from = std::time::Instant::now();
        let done = work()?;
        let micros = cryopod_host::micros(from.elapsed());
        self.steps.push((step, micros));
        Ok(done)
    }
}

impl std::fmt::Display for NcclDone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let plural = if self.communicators == 1 { "" } else { "s" };
        write!(f, "NCCL: {} communicator{plural}", self.communicators)?;
        for (step, micros) in &self.steps {
            let what = match step {
                NcclStep::Level => "level",
                NcclStep::Idle => "idle",
                NcclStep::Down => "down",
                NcclStep::Up => "up",
            };
            write!(f, ", {what} in {} ms", micros / 1000)?;
        }
        Ok(())
    }
}

/// What became of a process's GPU memory: answer to [`Op::PreloadOut`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TakenOut {
    /// The process has no preload library, or no GPU memory behind it.
    Without,
    /// The driver will copy it; why.
    LeftOut(String),
    /// The memory is in this buffer of the agent's, whose file the process keeps, and the process waits for it.
    Out {
        buffer: SharedBuffer,
        bytes: u64,
        /// It is being written.
        writes: bool,
        /// Bytes that had to be copied, or are still to be.
        copied: u64,
        /// If there are any, the buffer is still empty: these have the contents, and [`Op::PreloadRelease`] must follow.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        held: Vec<HeldPiece>,
    },
}

/// Answer to [`Op::PreloadAhead`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopiedAhead {
    /// It is being written.
    pub writes: bool,
    /// Why memory of processes was not copied: they have to wait for all of it.
    pub left_out: Vec<(i32, String)>,
}

/// A piece of GPU memory, its place in its process's buffer, and the agent's handle of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldPiece {
    pub offset: u64,
    pub bytes: u64,
    pub handle: Descriptor,
}

/// An image directory for VRAM files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriteTo {
    pub dir: PathBuf,
    pub config: VramConfig,
    /// How many processes are taken out at once: the writer begins with the memory of all.
    pub processes: usize,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// The kernel driver's version ("580.159.04"), when it can be read.
    #[serde(default)]
    pub driver_version: Option<String>,
    /// `cuDriverGetVersion`: 13000 is CUDA 13.0.
    pub cuda_version: i32,
    pub gpus: Vec<AgentGpu>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentGpu {
    pub uuid: GpuUuid,
    pub name: String,
    pub total_memory: u64,
    /// Its compute capability, (9, 0).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_capability: Option<(u32, u32)>,
    /// Unused memory in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free_memory: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<bool>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct DriverError {
    pub kind: ErrorKind,
    /// The driver's error code, if the driver returned one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub code: Option<i32>,
    /// What to print: the step, the driver's name of the error and its text.
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ErrorKind {
    /// The process's GPU work did not finish within the lock timeout; it is not locked.
    LockTimeout,
    /// The call did not return within its limit; it still runs.
    TimedOut,
    /// An earlier call for this process still runs.
    Busy,
    /// The process is in a state in which the step makes no sense.
    WrongState,
    /// The driver refused: unsupported feature (UVM, IPC, MPS, MIG) or driver too old.
    NotSupported,
    OutOfMemory,
    NoProcess,
    /// The VRAM files failed, for a reason outside of the driver.
    Vram,
    Driver,
    BadRequest,
}

#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("line longer than {MAX_LINE} bytes")]
    TooLong,
    #[error("malformed message: {0}")]
    Json(#[from] serde_json::Error),
}

#[derive(Debug, Default)]
pub struct LineBuffer {
    bytes: Vec<u8>,
    scanned: usize,
}

impl LineBuffer {
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    pub fn next_message<T: serde::de::DeserializeOwned>(
        &mut self,
    ) -> Result<Option<T>, FrameError> {
        let Some(offset) = self.bytes[self.scanned..].iter().position(|b| *b == b'\n') else {
            self.scanned = self.bytes.len();
            if self.scanned > MAX_LINE {
                return Err(FrameError::TooLong);
            }
            return Ok(None);
        };
        let end = self.scanned + offset;
        if end > MAX_LINE {
            return Err(FrameError::TooLong);
        }
        let message = serde_json::from_slice(&self.bytes[..end]);
        self.bytes.drain(..=end);
        self.scanned = 0;
        Ok(Some(message?))
    }
}

pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut line = serde_json::to_vec(message)?;
    if line.len() > MAX_LINE {
        return Err(FrameError::TooLong);
    }
    line.push(b'\n');
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_op() -> impl Strategy<Value = Op> {
        let numbers = (any::<i32>(), any::<u64>());
        let map = proptest::collection::vec(any::<([u8; 16], [u8; 16])>(), 0..9);
        prop_oneof![
            Just(Op::Hello),
            numbers.prop_map(|(pid, timeout_ms)| Op::Lock { pid, timeout_ms }),
            (numbers, map).prop_map(|((pid, limit_ms), map)| {
                let pair = |(old, new)| GpuPair {
                    old: GpuUuid(old),
                    new: GpuUuid(new),
                };
                let gpu_map = map.into_iter().map(pair).collect();
                Op::Restore {
                    pid,
                    limit_ms,
                    gpu_map,
                }
            }),
        ]
    }

    proptest! {
        #[test]
        fn messages_survive_any_split(ops in proptest::collection::vec(any_op(), 1..5), cut in 1usize..50) {
            let requests: Vec<_> = ops
                .into_iter()
                .enumerate()
                .map(|(id, request)| Request { id: id as u64, request })
                .collect();
            let wire: Vec<u8> = requests.iter().flat_map(|r| encode(r).unwrap()).collect();
            let mut buffer = LineBuffer::default();
            let mut seen = Vec::new();
            for piece in wire.chunks(cut) {
                buffer.push(piece);
                while let Some(request) = buffer.next_message::<Request>().unwrap() {
                    seen.push(request);
                }
            }
            prop_assert_eq!(seen, requests);
        }

        #[test]
        fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..500)) {
            let mut buffer = LineBuffer::default();
            buffer.push(&bytes);
            for _ in 0..bytes.len() + 1 {
                match buffer.next_message::<Request>() {
                    Ok(Some(_)) | Err(FrameError::Json(_)) => {}
                    Ok(None) | Err(FrameError::TooLong) => break,
                }
            }
        }
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut buffer = LineBuffer::default();
        buffer.push(&vec![b'x'; MAX_LINE + 1]);
        assert!(matches!(
            buffer.next_message::<Request>(),
            Err(FrameError::TooLong)
        ));
    }
}
