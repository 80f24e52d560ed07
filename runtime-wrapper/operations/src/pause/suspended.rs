//! Reads and writes the record of a suspended container, `/run/cryopod/suspended/PID-STARTTIME.json`: its processes,
//! and where their GPU memory is. A reboot removes it together with the processes.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cryopod_cuda::suspend::Suspended;
use cryopod_cuda::write_json;
use cryopod_gpu_plan::live;
use cryopod_host::files::{Host, if_there, read_bounded};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::run::operation;

const DIRECTORY: &str = "suspended";
const MAX_BYTES: u64 = 4 << 20;

/// A suspended container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuspendedRecord {
    pub version: u32,
    pub name: String,
    pub init: i32,
    /// Its start time.
    pub start_time: u64,
    /// When it was suspended, RFC 3339.
    pub since: String,
    /// The directory with its GPU memory; `None`: host memory.
    pub directory: Option<PathBuf>,
    /// Digest of the table there.
    pub digest: Option<String>,
    pub processes: Vec<Suspended>,
    /// Only their CUDA calls are locked, since the container was paused for a checkpoint.
    #[serde(default)]
    pub locked_at_pause: bool,
}

/// The lock of whoever suspends or resumes a container's GPU memory: of its init process's `environ` in `/proc`, which is
/// there as long as the process is, and which other users cannot open, and so not lock.
#[derive(Debug)]
pub struct SuspendLock {
    _lock: Flock<File>,
}

impl SuspendLock {
    /// Takes it, with `patience` if another one has it. Records are read, written and removed under it.
    ///
    /// # Errors
    /// Another one works at the container, or it has ended.
    pub fn take(host: &Host, init: i32, patience: Duration) -> io::Result<Self> {
        let mut process = File::open(host.path(format!("/proc/{init}/environ")))?;
        let until = Instant::now() + patience;
        loop {
            match Flock::lock(process, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => return Ok(Self { _lock: lock }),
                Err((same, Errno::EWOULDBLOCK)) if Instant::now() < until => process = same,
                Err((_, Errno::EWOULDBLOCK)) => {
                    let what = "a checkpoint, suspend or resume of it is under way; try again when that has ended";
                    return Err(io::Error::new(io::ErrorKind::ResourceBusy, what));
                }
                Err((_, e)) => return Err(e.into()),
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl SuspendedRecord {
    /// The version that this cryopod writes.
    pub const VERSION: u32 = 1;

    fn path(init: i32, start_time: u64) -> PathBuf {
        operation::base()
            .join(DIRECTORY)
            .join(format!("{init}-{start_time}.json"))
    }

    /// Reads the record of the container with this init process. `None`: it is not suspended.
    ///
    /// # Errors
    /// There is one that this version does not know: the container is suspended.
    pub fn of(host: &Host, init: i32) -> io::Result<Option<Self>> {
        match live::start_time(host, init) {
            Some(start_time) => Self::read(&Self::path(init, start_time)),
            None => Ok(None),
        }
    }

    fn read(path: &Path) -> io::Result<Option<Self>> {
        let bytes = if_there(read_bounded(path, MAX_BYTES));
        let Some(bytes) = bytes.map_err(|e| at(path, e))? else {
            return Ok(None);
        };
        let record = serde_json::from_slice(&bytes).ok();
        let record = record.filter(|record: &Self| record.version <= Self::VERSION);
        record.map(Some).ok_or_else(|| {
            let what = "another version of cryopod suspended it: update this one, or resume it with that one";
            at(path, io::Error::other(what))
        })
    }

    /// Writes the record, whole or not at all.
    pub fn write(&self) -> io::Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        let path = Self::path(self.init, self.start_time);
        if let Some(directory) = path.parent() {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(directory)?;
        }
        write_json(&path, self)
    }

    /// Removes the record, and the directory if it was the last one.
    pub fn remove(&self) {
        let _ = fs::remove_file(Self::path(self.init, self.start_time));
        let _ = fs::remove_dir(operation::base().join(DIRECTORY));
    }

    /// Says where the container's GPU memory is.
    pub fn place(&self) -> String {
        match &self.directory {
            Some(directory) => format!("in {}", directory.display()),
            None => "in host memory".into(),
        }
    }
}

fn at(path: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Returns true if there may be suspended containers.
pub fn any() -> bool {
    operation::base().join(DIRECTORY).exists()
}

/// Removes the records of containers that do not exist any more.
pub fn sweep(host: &Host) {
    let directory = operation::base().join(DIRECTORY);
    let Ok(entries) = fs::read_dir(&directory) else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let owner = name
            .to_str()
            .and_then(|n| n.strip_suffix(".json")?.split_once('-'))
            .and_then(|(pid, start)| Some((pid.parse::<i32>().ok()?, start.parse::<u64>().ok()?)));
        if owner.is_some_and(|(pid, start)| live::start_time(host, pid) != Some(start)) {
            let _ = fs::remove_file(entry.path());
        }
    }
    let _ = fs::remove_dir(directory);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_another_version_is_no_absence() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("7-1.json");
        assert_eq!(SuspendedRecord::read(&path).unwrap(), None);
        let record = |version: u32| {
            serde_json::json!({
                "version": version, "name": "c", "init": 7, "start_time": 1, "since": "", "processes": [],
            })
        };
        fs::write(&path, record(SuspendedRecord::VERSION).to_string()).unwrap();
        assert!(SuspendedRecord::read(&path).unwrap().is_some());
        let later = record(SuspendedRecord::VERSION + 1).to_string();
        for text in [later.as_str(), "{}", "["] {
            fs::write(&path, text).unwrap();
            let e = SuspendedRecord::read(&path).unwrap_err().to_string();
            assert!(e.contains("7-1.json: another version"), "{text}: {e}");
        }
    }
}
