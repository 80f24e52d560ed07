//! What a restore that failed has left of a container: processes that CRIU had restored, and the runtime's directory.
//!
//! A runtime or a CRIU that is killed, as containerd's death has the stock shim kill the runtime, cleans nothing up: the
//! restored processes run on in a container that was never started, and the root that runc mounts for CRIU in its
//! directory of the container keeps `runc delete` from removing it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use cryopod_host::cgroups::Cgroups;
use cryopod_host::limited;
use cryopod_host::mountinfo::unmount_below;

use crate::criu;

/// How long one `delete --force` may take.
const DELETE: Duration = Duration::from_secs(10);
/// How often it is tried: the last processes of a killed runtime end one after the other.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(200);

/// The low-level runtime's place of a container.
#[derive(Debug, Clone)]
pub struct Place {
    /// The runtime.
    pub runtime: PathBuf,
    /// Where it keeps the containers of this namespace of containerd's.
    pub root: PathBuf,
    /// The container's name there.
    pub id: String,
    /// Its cgroups, of those that nobody was in before: whatever is in them is the container's.
    pub cgroups: Cgroups,
    /// Where CRIU works on it: [`criu::directories`].
    pub criu: Vec<PathBuf>,
}

impl Place {
    /// The runtime's directory of the container.
    pub fn directory(&self) -> PathBuf {
        self.root.join(&self.id)
    }

    /// Ends whatever is there.
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
            // It would keep what was killed, and that the runtime.
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
            let _ = limited::run(&mut command, &[], DELETE);
            thread::sleep(PAUSE);
        }
        sweep(&directory);
    }
}

/// Removes a runtime's directory of a container that is none any more.
pub fn sweep(directory: &Path) {
    // With a state it is a container still, and the runtime's.
    if !directory.is_dir() || directory.join("state.json").exists() {
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
        let place = Place {
            runtime: "/bin/false".into(),
            root: root.path().into(),
            id: "c1".into(),
            cgroups: Cgroups::default(),
            criu: Vec::new(),
        };
        fs::create_dir_all(place.directory().join("criu-root")).unwrap();
        fs::write(place.directory().join("state.json"), "{}").unwrap();
        sweep(&place.directory());
        assert!(place.directory().exists());
        fs::remove_file(place.directory().join("state.json")).unwrap();
        place.end();
        assert!(!place.directory().exists());
        let none = Place {
            id: String::new(),
            ..place
        };
        none.end();
        assert!(root.path().exists());
    }
}
