//! Removes what a failed restore has left of a container: processes that CRIU restored, and the runtime's state
//! directory.
//!
//! A killed runtime or CRIU cleans nothing up; when containerd dies, for example, the stock shim kills the runtime. The
//! restored processes then continue in a container that never started. In its directory of the container runc has
//! mounted a root for CRIU, and that mount makes `runc delete` fail.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use cryopod_host::cgroups::Cgroups;
use cryopod_host::limited;
use cryopod_host::mountinfo::unmount_below;

use crate::criu;

/// Time limit of one `delete --force`.
const DELETE: Duration = Duration::from_secs(10);
/// Number of attempts: the last processes of a killed runtime exit one after the other.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);
/// What runc and crun know of a container, in its state directory.
const STATES: [&str; 2] = ["state.json", "status"];

/// Where the low-level runtime keeps a container.
#[derive(Debug, Clone)]
pub struct StatePlace {
    pub runtime: PathBuf,
    /// The runtime's root for this containerd namespace.
    pub root: PathBuf,
    /// The container's name in that root.
    pub id: String,
    /// Its cgroups that were empty before: whatever is in them belongs to the container.
    pub cgroups: Cgroups,
    /// Where CRIU works on it: [`criu::directories`].
    pub criu: Vec<PathBuf>,
}

impl StatePlace {
    /// Returns the runtime's state directory of the container.
    pub fn directory(&self) -> PathBuf {
        self.root.join(&self.id)
    }

    /// Ends the processes and removes the cgroups that a failed restore has left.
    pub fn end(&self) {
        if self.id.is_empty() {
            return;
        }
        self.end_processes();
        let _ = self.cgroups.remove(Duration::ZERO);
    }

    fn end_processes(&self) {
        let directory = self.directory();
        for _ in 0..TRIES {
            let killed = self.cgroups.kill();
            // A running CRIU would keep killed processes, and these the runtime.
            let ended = criu::end(&self.criu);
            if !killed && !ended && !directory.is_dir() {
                return;
            }
            unmount_below(&directory);
            let mut command = Command::new(&self.runtime);
            command.arg("--root").arg(&self.root);
            command
                .args(["delete", "--force", &self.id])
                .stderr(Stdio::null());
            let _ = limited::run(&mut command, Some(&[]), DELETE);
            thread::sleep(PAUSE);
        }
        sweep(&directory);
    }
}

/// Removes the runtime's state directory of a container that no longer exists.
pub fn sweep(directory: &Path) {
    // With a state file it is still a container, and belongs to the runtime.
    let known = || STATES.iter().any(|name| directory.join(name).exists());
    if !directory.is_dir() || known() {
        return;
    }
    unmount_below(directory);
    let _ = fs::remove_dir_all(directory);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_with_a_state_is_left_to_its_runtime() {
        let root = tempfile::tempdir().unwrap();
        let place = StatePlace {
            runtime: "/bin/false".into(),
            root: root.path().into(),
            id: "c1".into(),
            cgroups: Cgroups::default(),
            criu: Vec::new(),
        };
        fs::create_dir_all(place.directory().join("criu-root")).unwrap();
        for state in STATES.map(|name| place.directory().join(name)) {
            fs::write(&state, "{}").unwrap();
            sweep(&place.directory());
            assert!(place.directory().exists());
            fs::remove_file(state).unwrap();
        }
        place.end();
        assert!(!place.directory().exists());
        let none = StatePlace {
            id: String::new(),
            ..place
        };
        none.end();
        assert!(root.path().exists());
    }
}
