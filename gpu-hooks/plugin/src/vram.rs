//! Tracks the VRAM files in the plugin: which memory the driver was given in place of its own, and where that memory is
//! now.

use crate::criu::{self, Level};
use cryopod_cuda::inject::{Descriptor, take_descriptor};
use cryopod_cuda::messages::protocol::{HeldPiece, Op, Outcome};
use cryopod_cuda::released::{Released, own_pid};
use cryopod_cuda::vram::{SharedBuffer, VramConfig};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::time::Instant;

pub struct Captured {
    pub pid: i32,
    pub tid: i32,
    pub id: u64,
    /// Where the driver has it.
    pub address: u64,
    pub bytes: u64,
    /// How long the driver waited for it, in microseconds.
    pub micros: u64,
    /// Kept open, so that the memory outlives the agent.
    pub(crate) file: File,
    /// An empty mapping is in its place.
    pub(crate) away: bool,
    /// The agent has perhaps copied a part of it out of `file`.
    pub(crate) copied: bool,
}

/// GPU memory that the preload library of a process has handed over: in a buffer of the agent's.
pub struct PreloadedMemory {
    pub pid: i32,
    pub id: u64,
    pub bytes: u64,
    /// Kept open, so that the memory outlives the agent.
    pub file: File,
    /// The same, for memory that is still on the GPU: places and handles of its pieces.
    pub held: Vec<(HeldPiece, OwnedFd)>,
}

#[derive(Default)]
pub struct VramSteps {
    pub captured: Vec<Captured>,
    pub preloaded: Vec<PreloadedMemory>,
    /// Why VRAM files were not used where they might have been.
    pub left_out: Option<String>,
    pub writes: bool,
    /// A restore: the buffers that the driver reads. Processes wait for what has not been read yet, and the driver may begin.
    pub reading: Vec<u64>,
}

/// Returns the agent's descriptor of a buffer. At a restore CRIU does not see the agent in `/proc`, so it is taken by a
/// system call.
pub(crate) fn open(buffer: &SharedBuffer) -> io::Result<File> {
    let named = buffer.path.strip_prefix("/proc/");
    let named = named.and_then(|rest| rest.split_once("/fd/"));
    let descriptor = named.and_then(|(pid, fd)| {
        Some(Descriptor {
            pid: pid.parse().ok()?,
            fd: fd.parse().ok()?,
        })
    });
    let descriptor = descriptor.ok_or(io::ErrorKind::NotFound)?;
    Ok(take_descriptor(descriptor)?.into())
}

/// CRIU's image directory, as a path that another process can open.
pub fn image_directory() -> Option<PathBuf> {
    let fd = criu::image_dir()?.as_raw_fd();
    Some(format!("/proc/{}/fd/{fd}", own_pid()?).into())
}

impl VramSteps {
    /// Applies the agent's answer to a thread that is held: the driver gets the memory, or its own call is made.
    pub fn answer(
        &mut self,
        config: &VramConfig,
        thread: &mut Released,
        bytes: u64,
        since: Instant,
        outcome: &Outcome,
    ) -> Option<u64> {
        let (pid, tid) = thread.ids();
        let mut dropped = None;
        let mut ahead = "";
        let mut answer = || -> Result<Captured, String> {
            let buffer = outcome.buffer()?;
            dropped = Some(buffer.id);
            if buffer.reserved {
                ahead = ", allocated ahead";
            }
            let told = |error: io::Error| error.to_string();
            test_fails(config, "open").map_err(told)?;
            let file = open(buffer).map_err(told)?;
            let given = match test_fails(config, "map") {
                Ok(()) => file.try_clone().map_err(told)?,
                // A descriptor that cannot be mapped: the call fails in the process.
                Err(_) => File::open("/").map_err(told)?,
            };
            let address = thread.substitute(&given, bytes).map_err(told)?;
            Ok(Captured {
                pid,
                tid,
                id: buffer.id,
                address,
                bytes,
                micros: cryopod_host::micros(since.elapsed()),
                file,
                away: false,
                copied: false,
            })
        };
        match answer() {
            Ok(captured) => {
                let text = format!(
                    "process {pid}: {} MiB for the driver at {:#x} in {} ms{ahead}",
                    bytes >> 20,
                    captured.address,
                    captured.micros / 1000
                );
                criu::log(Level::Info, &text);
                self.captured.push(captured);
                None
            }
            Err(reason) => {
                self.leave_out(pid, reason);
                thread.pass();
                dropped
            }
        }
    }

    /// Once every one of so many processes has asked for its memory: has the agent write it while the driver fills it.
    pub fn write_ahead(&mut self, config: &VramConfig, processes: usize) -> Option<Op> {
        let mut pids: Vec<i32> = self.captured.iter().map(|captured| captured.pid).collect();
        pids.sort_unstable();
        pids.dedup();
        if self.writes || pids.len() < processes || test_fails(config, "ahead").is_err() {
            return None;
        }
        let dir = image_directory()?;
        self.writes = true;
        Some(Op::VramWriteAhead {
            dir,
            buffers: self.captured.iter().map(|captured| captured.id).collect(),
            config: config.clone(),
        })
    }

    /// Records that VRAM files are not used for a process.
    pub fn leave_out(&mut self, pid: i32, reason: String) {
        let text = format!("process {pid}: its GPU memory goes through CRIU: {reason}");
        criu::log(Level::Warn, &text);
        self.left_out.get_or_insert(reason);
    }
}

#[cfg(feature = "test-hooks")]
pub(crate) fn test_fails(config: &VramConfig, step: &str) -> io::Result<()> {
    match &config.test_fail_at {
        Some(at) if at == step => Err(io::Error::other(format!("test: {step} was told to fail"))),
        _ => Ok(()),
    }
}

#[cfg(not(feature = "test-hooks"))]
pub(crate) fn test_fails(_config: &VramConfig, _step: &str) -> io::Result<()> {
    Ok(())
}
