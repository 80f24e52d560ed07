//! Counts operations for `cryopod metrics`: how many, how long their steps took, how many bytes, why they failed.
//!
//! The totals are in one small file, which outlives the operations and the host's restart. Each operation adds to it at its
//! end. Nothing depends on that: an operation that cannot lock or write the file in time goes uncounted.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use cryopod_host::files::{if_there, own_directory, read_bounded};
use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::run::child::RunOutcome;

/// The file with the totals, unless `CRYOPOD_METRICS_FILE` names another.
pub const PATH: &str = "/var/lib/cryopod/metrics.json";
const VERSION: u32 = 1;
/// Most bytes of the file. All of its keys are of this program, so it has a few KiB.
const MAX_BYTES: u64 = 1 << 20;
/// How long an operation waits for another to add its numbers.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);

/// Why an operation failed, as a label of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureReason {
    /// The plan refused it; nothing was touched.
    Refused,
    /// The GPU driver or its agent.
    Driver,
    /// CRIU or the low-level runtime.
    Criu,
    /// A disk that is full, or files that cannot be read or written.
    Storage,
    /// A signal, or the time limit.
    Interrupted,
    /// The configuration, or a program that is missing.
    Setup,
    Other,
}

impl FailureReason {
    fn label(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Driver => "driver",
            Self::Criu => "criu",
            Self::Storage => "storage",
            Self::Interrupted => "interrupted",
            Self::Setup => "setup",
            Self::Other => "other",
        }
    }

    fn of(error: &Error) -> Self {
        match error {
            Error::Plan(_) | Error::Privileges(_) | Error::Refused { .. } => Self::Refused,
            Error::Config(_) | Error::LowLevel(_) | Error::Spec(_) | Error::Tool(_) => Self::Setup,
            Error::Metadata(_) | Error::Io { .. } => Self::Storage,
            Error::Namespace(_) | Error::Failed(_) => Self::Other,
        }
    }
}

/// All that `cryopod metrics` shows.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    pub version: u32,
    pub operations: BTreeMap<String, OperationCounts>,
}

/// The totals of one kind of operation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OperationCounts {
    pub succeeded: u64,
    /// By [`FailureReason`].
    pub failed: BTreeMap<String, u64>,
    /// Microseconds, of those that succeeded.
    pub micros: u64,
    /// Microseconds by step, of those that succeeded. A step of several processes counts as long as its slowest.
    pub steps: BTreeMap<String, u64>,
    /// Bytes by kind, of those that succeeded.
    pub bytes: BTreeMap<String, u64>,
    /// The last one that succeeded: seconds since 1970, and its microseconds.
    pub last_at: u64,
    pub last_micros: u64,
}

/// What the operation of this process has noted so far. A process runs one operation at a time.
#[derive(Debug, Default)]
struct Notes {
    steps: BTreeMap<String, u64>,
    bytes: BTreeMap<&'static str, u64>,
    reason: Option<FailureReason>,
}

static NOTES: Mutex<Option<Notes>> = Mutex::new(None);

fn note(with: impl FnOnce(&mut Notes)) {
    let mut notes = NOTES.lock().unwrap_or_else(PoisonError::into_inner);
    with(notes.get_or_insert_default());
}

/// Notes how long a step took, in microseconds.
pub fn step(name: &str, micros: u64) {
    note(|notes| *notes.steps.entry(name.to_owned()).or_default() += micros);
}

/// Notes bytes of a kind.
pub fn bytes(kind: &'static str, n: u64) {
    note(|notes| *notes.bytes.entry(kind).or_default() += n);
}

/// Notes why the operation fails. The first reason stays.
pub fn failed(reason: FailureReason) {
    note(|notes| {
        notes.reason.get_or_insert(reason);
    });
}

/// Notes why the low-level runtime ended with an error. `driver`: the plugin reports one of its own. `storage`: the disk is
/// full, or the metadata could not be written.
pub fn failed_run(ended: &RunOutcome, driver: bool, storage: bool) {
    failed(if ended.interrupted.is_some() || ended.killed {
        FailureReason::Interrupted
    } else if storage {
        FailureReason::Storage
    } else if driver {
        FailureReason::Driver
    } else {
        FailureReason::Criu
    });
}

/// Runs an operation and counts it. `succeeded` says whether a result is a success.
pub fn measured<T>(
    operation: &str,
    work: impl FnOnce() -> Result<T, Error>,
    succeeded: impl FnOnce(&T) -> bool,
) -> Result<T, Error> {
    let started = Instant::now();
    let done = work();
    if let Err(e) = &done {
        failed(FailureReason::of(e));
    }
    count(
        operation,
        started.elapsed(),
        done.as_ref().is_ok_and(succeeded),
    );
    done
}

/// Counts an operation that took so long, with what was noted of it.
pub fn count(operation: &str, took: Duration, succeeded: bool) {
    let notes = NOTES.lock().unwrap_or_else(PoisonError::into_inner).take();
    let notes = notes.unwrap_or_default();
    let path = path();
    if let Err(e) = add_to(&path, operation, took, succeeded, notes) {
        tracing::debug!("{}: this operation is not counted: {e}", path.display());
    }
}

/// Returns the file with the totals.
pub fn path() -> PathBuf {
    std::env::var_os("CRYOPOD_METRICS_FILE").map_or_else(|| PATH.into(), PathBuf::from)
}

/// Reads the totals; none if nothing was counted yet, or the file is of another version.
pub fn read(path: &Path) -> io::Result<Totals> {
    let Some(text) = if_there(read_bounded(path, MAX_BYTES))? else {
        return Ok(Totals::default());
    };
    let totals: Option<Totals> = serde_json::from_slice(&text).ok();
    Ok(totals.filter(|t| t.version == VERSION).unwrap_or_default())
}

fn add_to(
    path: &Path,
    operation: &str,
    took: Duration,
    succeeded: bool,
    notes: Notes,
) -> io::Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(directory)?;
    if !own_directory(directory) {
        return Err(io::Error::other("others can write to its directory"));
    }
    let _lock = lock(&path.with_extension("lock"))?;
    let mut totals = read(path)?;
    totals.version = VERSION;
    let own = totals.operations.entry(operation.to_owned()).or_default();
    own.add(took, succeeded, notes);
    let new = path.with_extension("new");
    fs::write(&new, serde_json::to_vec(&totals)?)?;
    // Not synced: numbers may be lost in a crash of the host, and no operation waits for a disk.
    fs::rename(new, path)
}

fn lock(path: &Path) -> io::Result<Flock<File>> {
    let mut open = OpenOptions::new();
    open.create(true).append(true).mode(0o600);
    let mut file = open
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(path)?;
    let end = Instant::now() + PATIENCE;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((_, e)) if Instant::now() >= end => return Err(e.into()),
            Err((back, _)) => file = back,
        }
        std::thread::sleep(PAUSE);
    }
}

impl OperationCounts {
    fn add(&mut self, took: Duration, succeeded: bool, notes: Notes) {
        let sum = |total: &mut u64, n: u64| *total = total.saturating_add(n);
        if !succeeded {
            let reason = notes.reason.unwrap_or(FailureReason::Other).label();
            return sum(self.failed.entry(reason.to_owned()).or_default(), 1);
        }
        sum(&mut self.succeeded, 1);
        self.last_micros = cryopod_host::micros(took);
        sum(&mut self.micros, self.last_micros);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        self.last_at = now.map_or(0, |d| d.as_secs());
        for (name, micros) in notes.steps {
            sum(self.steps.entry(name).or_default(), micros);
        }
        for (kind, n) in notes.bytes {
            sum(self.bytes.entry(kind.to_owned()).or_default(), n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notes(reason: Option<FailureReason>) -> Notes {
        Notes {
            steps: BTreeMap::from([("dump".to_owned(), 7)]),
            bytes: BTreeMap::from([("gpu", 5)]),
            reason,
        }
    }

    #[test]
    fn what_is_added_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state/metrics.json");
        assert_eq!(read(&path).unwrap(), Totals::default());
        let add = |succeeded, reason| {
            let took = Duration::from_micros(10);
            add_to(&path, "checkpoint", took, succeeded, notes(reason)).unwrap();
        };
        add(true, None);
        add(true, Some(FailureReason::Refused));
        add(false, Some(FailureReason::Refused));
        add(false, None);
        let all = read(&path).unwrap();
        let own = &all.operations["checkpoint"];
        assert_eq!(
            (
                own.succeeded,
                own.micros,
                own.steps["dump"],
                own.bytes["gpu"]
            ),
            (2, 20, 14, 10)
        );
        assert_eq!((own.failed["refused"], own.failed["other"]), (1, 1));
        assert!(own.last_at > 0 && own.last_micros == 10);
        // A file that nobody understands is begun anew.
        fs::write(&path, "{").unwrap();
        add(true, None);
        assert_eq!(read(&path).unwrap().operations["checkpoint"].succeeded, 1);
    }

    #[test]
    fn many_at_once_are_all_counted() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics.json");
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    add_to(&path, "restore", Duration::ZERO, true, Notes::default()).unwrap()
                });
            }
        });
        assert_eq!(read(&path).unwrap().operations["restore"].succeeded, 8);
        // One that holds the lock for long stops nobody.
        let _held = lock(&path.with_extension("lock")).unwrap();
        let e = add_to(&path, "restore", Duration::ZERO, true, Notes::default());
        assert_eq!(e.unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn why_a_run_failed() {
        let ended = |killed| RunOutcome {
            code: 1,
            interrupted: None,
            passed: false,
            killed,
            lost_processes: false,
            not_frozen: false,
        };
        let reason = |killed, driver, storage| {
            failed_run(&ended(killed), driver, storage);
            let notes = NOTES.lock().unwrap().take();
            notes.unwrap().reason.unwrap().label()
        };
        assert_eq!(reason(true, true, true), "interrupted");
        assert_eq!(reason(false, true, true), "storage");
        assert_eq!(reason(false, true, false), "driver");
        assert_eq!(reason(false, false, false), "criu");
    }
}
