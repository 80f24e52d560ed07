//! The VRAM files, the plugin's part: which memory the driver was given in place of its own, and where that
//! memory is at the moment.

use crate::criu::{self, Level};
use cryopod_cuda::protocol::Outcome;
use cryopod_cuda::released::{Released, own_pid};
use cryopod_cuda::vram::{SharedBuffer, VramConfig};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::Instant;

/// Memory that the driver was given.
pub struct Captured {
    /// The process.
    pub pid: i32,
    /// The driver's thread in it.
    pub tid: i32,
    /// The agent's number of the buffer.
    pub id: u64,
    /// Where the driver has it.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
    /// How long the driver waited for it, in microseconds.
    pub micros: u64,
    /// Kept open, so that the memory outlives the agent.
    pub(crate) file: File,
    /// Whether an empty mapping is in its place.
    pub(crate) away: bool,
}

/// The VRAM files during one dump.
#[derive(Default)]
pub struct Vram {
    /// What the driver was given.
    pub captured: Vec<Captured>,
    /// Why the VRAM files was not used where it might have been.
    pub left_out: Option<String>,
    /// Whether the agent writes.
    pub writes: bool,
}

/// Opens memory of the agent's.
pub(crate) fn open(buffer: &SharedBuffer) -> io::Result<File> {
    File::options().read(true).write(true).open(&buffer.path)
}

/// CRIU's image directory, as another process can open it.
pub fn image_directory() -> Option<PathBuf> {
    let fd = criu::image_dir()?.as_raw_fd();
    Some(format!("/proc/{}/fd/{fd}", own_pid()?).into())
}

impl Vram {
    /// The agent's answer for a thread that is held: it gets the memory, or goes its own way.
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
            let buffer = match outcome {
                Outcome::Buffer(buffer) => buffer,
                Outcome::Error(error) => return Err(error.message.clone()),
                other => return Err(format!("unexpected answer {other:?}")),
            };
            dropped = Some(buffer.id);
            if buffer.reserved {
                ahead = ", allocated before the freeze";
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
                micros: u64::try_from(since.elapsed().as_micros()).unwrap_or(u64::MAX),
                file,
                away: false,
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

    /// The VRAM files is not used for a process.
    pub fn leave_out(&mut self, pid: i32, reason: String) {
        let text = format!("process {pid}: its GPU memory goes through CRIU: {reason}");
        criu::log(Level::Warn, &text);
        self.left_out.get_or_insert(reason);
    }
}

/// Fails where the configuration says so.
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
