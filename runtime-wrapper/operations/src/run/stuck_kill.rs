//! Ends a checkpoint whose container is killed meanwhile, which would hang: the dying init process waits until CRIU lets
//! go of its children, and CRIU waits for the init process.

use std::time::{Duration, Instant};

use cryopod_cuda::procfs;
use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::run::stuck_restore::is_criu;

/// How long a killed init process may take to end.
const DYING: Duration = Duration::from_millis(300);

/// A container's init process.
#[derive(Debug)]
pub struct InitProcess {
    pid: i32,
    started: Option<u64>,
    /// Since when it has been seen to die.
    dying: Option<Instant>,
}

impl InitProcess {
    pub fn of(pid: i32) -> Self {
        let started = live::start_time(&Host::system(), pid);
        Self {
            pid,
            started,
            dying: None,
        }
    }

    /// Kills the CRIUs below `parent` if this process was killed and cannot end, and returns true then. To be called
    /// repeatedly.
    pub fn end_waiting(&mut self, parent: i32) -> bool {
        let host = Host::system();
        let is_there = self.started.is_some() && live::start_time(&host, self.pid) == self.started;
        let is_dying = is_there && procfs::stat(self.pid).is_some_and(|stat| stat.exiting);
        self.dying = is_dying.then(|| self.dying.unwrap_or_else(Instant::now));
        if self.dying.is_none_or(|since| since.elapsed() < DYING) {
            return false;
        }
        self.dying = None;
        let below = live::tree(&host, parent);
        for criu in below.into_iter().filter(|pid| is_criu(*pid)) {
            let _ = kill(Pid::from_raw(criu), Signal::SIGKILL);
        }
        true
    }
}
