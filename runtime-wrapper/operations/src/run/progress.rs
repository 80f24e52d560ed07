//! Says what an operation is doing, for `cryopod top`: a small file, written anew at each stage.
//!
//! A checkpoint and a restore have it in the operation's directory. Commands of `cryopod` that read or write archives have
//! theirs in [`TRANSFERS`]. A failure to write it is logged and changes nothing.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use cryopod_gpu_plan::live;
use cryopod_host::files::{Host, own_directory, read_bounded};
use serde::{Deserialize, Serialize};

use crate::run::operation::{self, Operation};

/// The file in an operation's directory.
const FILE: &str = "progress.json";
/// Transfers of root, `PID-STARTTIME.json` each.
const TRANSFERS: &str = "/run/cryopod-transfers";
const MAX_BYTES: u64 = 64 << 10;

/// What an operation is doing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProgressState {
    /// `checkpoint`, `restore`, or a verb of `cryopod`.
    pub operation: String,
    /// The container's id, or the archive.
    pub name: String,
    /// CRIU's stage, or `prepare`.
    pub step: String,
    /// When the operation began, and when the step did: milliseconds since 1970.
    pub began: u64,
    pub step_began: u64,
    /// Bytes to do, 0 if not known; and done, if the operation counts them itself.
    pub total: u64,
    pub done: Option<u64>,
    /// The directory of CRIU's images.
    pub images: Option<PathBuf>,
    /// CRIU's log, in which the plugin tells the driver's steps.
    pub log: Option<PathBuf>,
}

/// The file of one operation. Dropped, it is removed.
#[derive(Debug)]
pub struct OperationProgress {
    path: PathBuf,
    state: ProgressState,
}

impl OperationProgress {
    /// Begins a checkpoint or a restore.
    pub fn of_operation(op: &Operation, state: ProgressState) -> Self {
        Self::begin(op.file(FILE), state)
    }

    /// Begins a transfer; `None` for other users than root.
    pub fn of_transfer(state: ProgressState) -> Option<Self> {
        let directory = Path::new(TRANSFERS);
        let made = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory);
        if made.is_err() || !own_directory(directory) {
            return None;
        }
        let pid = i32::try_from(std::process::id()).ok()?;
        let start = live::start_time(&Host::system(), pid)?;
        let path = directory.join(format!("{pid}-{start}.json"));
        Some(Self::begin(path, state))
    }

    fn begin(path: PathBuf, mut state: ProgressState) -> Self {
        state.began = now();
        state.step_began = state.began;
        let progress = Self { path, state };
        progress.write();
        progress
    }

    /// Goes to the next step.
    pub fn step(&mut self, step: &str) {
        step.clone_into(&mut self.state.step);
        self.state.step_began = now();
        self.write();
    }

    /// Notes the bytes that are to do.
    pub fn total(&mut self, bytes: u64) {
        self.state.total = bytes;
        self.write();
    }

    /// Notes the bytes that are done, of how many.
    pub fn done(&mut self, done: u64, total: u64) {
        (self.state.done, self.state.total) = (Some(done), total);
        self.write();
    }

    fn write(&self) {
        let new = self.path.with_extension("new");
        let written = serde_json::to_vec(&self.state)
            .map_err(std::io::Error::other)
            .and_then(|text| fs::write(&new, text))
            .and_then(|()| fs::rename(&new, &self.path));
        if let Err(e) = written {
            tracing::debug!("{}: {e}", self.path.display());
        }
    }
}

impl Drop for OperationProgress {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    since.map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

/// A running operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    pub pid: i32,
    pub state: ProgressState,
}

/// Lists the running operations of this host, the oldest first.
pub fn running(host: &Host) -> Vec<Running> {
    let mut all = in_directory(host, &operation::base(), &|path| path.join(FILE));
    all.extend(in_directory(host, Path::new(TRANSFERS), &Path::to_owned));
    all.sort_by_key(|running| running.state.began);
    all
}

fn in_directory(host: &Host, base: &Path, file: &dyn Fn(&Path) -> PathBuf) -> Vec<Running> {
    let entries = fs::read_dir(base).into_iter().flatten().flatten();
    let running = entries.filter_map(|entry| {
        let name = entry.file_name();
        let name = name.to_str()?;
        let (pid, start) = name.strip_suffix(".json").unwrap_or(name).split_once('-')?;
        let (pid, start) = (pid.parse().ok()?, start.parse::<u64>().ok()?);
        if live::start_time(host, pid) != Some(start) {
            // Nobody else removes what a killed transfer left.
            if base == Path::new(TRANSFERS) {
                let _ = fs::remove_file(entry.path());
            }
            return None;
        }
        let text = read_bounded(&file(&entry.path()), MAX_BYTES).ok()?;
        let state = serde_json::from_slice(&text).ok()?;
        Some(Running { pid, state })
    });
    running.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_living_operations_are_running() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::system();
        let op = Operation::below(&dir.path().join("run"), &host).unwrap();
        let all = || in_directory(&host, &dir.path().join("run"), &|p| p.join(FILE));
        assert_eq!(all(), []);
        let mut progress = OperationProgress::of_operation(
            &op,
            ProgressState {
                operation: "checkpoint".into(),
                name: "job".into(),
                ..ProgressState::default()
            },
        );
        progress.total(100);
        progress.step("post-dump");
        let dead = dir.path().join("run/999999999-1");
        fs::create_dir(&dead).unwrap();
        fs::copy(op.file(FILE), dead.join(FILE)).unwrap();
        let found = all();
        assert_eq!(found.len(), 1);
        let state = &found[0].state;
        assert_eq!(
            (state.name.as_str(), state.step.as_str(), state.total),
            ("job", "post-dump", 100)
        );
        assert!(state.began > 0 && state.step_began >= state.began);
        drop(progress);
        assert_eq!(all(), []);
    }
}
