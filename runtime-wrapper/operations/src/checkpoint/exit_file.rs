//! Waits until conmon has recorded that the container ended.
//!
//! podman and CRI-O learn from a file of conmon's that a container ended. podman's restore removes an old file and starts
//! another conmon. On a busy machine the old one may write its file only after that: podman then takes the restored
//! container for ended, and its clean-up kills it.

use std::path::PathBuf;
use std::time::Duration;

use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use cryopod_host::limited::wait_until;
use cryopod_host::processes::stat::Stat;

/// A conmon that takes longer hangs.
const LIMIT: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(2);

/// The file in which a container's conmon records the end.
pub(super) struct ExitFile<'a> {
    host: &'a Host,
    init: i32,
    conmon: i32,
    path: PathBuf,
}

impl<'a> ExitFile<'a> {
    /// Returns `None` if the parent of the container's init process is not conmon.
    pub fn find(host: &'a Host, init: i32) -> Option<Self> {
        let conmon = Stat::read(host, init)?.parent;
        let line = host.text(format!("/proc/{conmon}/cmdline")).ok()?;
        let words: Vec<&str> = line.split('\0').collect();
        let after = |option| words.iter().skip_while(|w| **w != option).nth(1);
        let path = PathBuf::from(after("--exit-dir")?).join(after("-c")?);
        Some(Self {
            host,
            init,
            conmon,
            path,
        })
    }

    /// Returns at once if the container goes on running. `ended`: CRIU has killed it, and on a busy machine its processes
    /// may still be there.
    pub fn wait(&self, ended: bool) {
        let is_written = || {
            !ended && live::is_alive(self.host, self.init)
                || !live::is_alive(self.host, self.conmon)
                || self.host.path(&self.path).exists()
        };
        if !wait_until(LIMIT, PAUSE, is_written) {
            tracing::warn!("conmon does not write {}", self.path.display());
        }
    }
}
