//! Ends a checkpoint whose freeze would hang: CRIU waits for a process that is inside vfork(2).
//!
//! Such a process sleeps in the kernel until its child has called exec or exited. If CRIU has stopped the child, neither
//! happens, and CRIU waits for the process until its `timeout` is over ("Unseizable non-zombie N found, state D"). For
//! containers with GPUs that limit is high, because CRIU counts the driver's work as part of the freeze. SIGALRM is what
//! CRIU sends itself when the limit is over (`alarm_handler` in its cr-dump.c): it gives up and releases all processes.

use std::time::{Duration, Instant};

use cryopod_cuda::procfs;
use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::stuck_restore::is_criu;

/// How long a process may take to stop.
const PATIENCE: Duration = Duration::from_secs(3);
/// Interval between two scans of all processes.
const PAUSE: Duration = Duration::from_secs(1);
/// CRIU's only stage before the freeze.
const BEFORE: &str = "pre-dump";

#[derive(Debug, Default)]
pub struct Freeze {
    over: bool,
    /// Time of the last scan.
    looked: Option<Instant>,
    /// A process inside vfork that CRIU waits for, and since when.
    waits_for: Option<(i32, Instant)>,
}

impl Freeze {
    /// Notes a question of CRIU's.
    pub fn at(&mut self, stage: &str) {
        self.over |= stage != BEFORE;
    }

    /// Has CRIU give up if it has been waiting for a process inside vfork for a while, and returns that process. To be
    /// called repeatedly while the runtime, a child of `parent`, runs.
    pub fn end_waiting(&mut self, parent: i32) -> Option<i32> {
        if self.over || self.looked.is_some_and(|at| at.elapsed() < PAUSE) {
            return None;
        }
        self.looked = Some(Instant::now());
        let mut all = procfs::pids().into_iter();
        let Some((pid, criu)) = all.find_map(|pid| Some((pid, waits_inside_vfork(pid, parent)?)))
        else {
            self.waits_for = None;
            return None;
        };
        match self.waits_for {
            Some((before, since)) if before == pid => {
                let ends = since.elapsed() >= PATIENCE
                    && kill(Pid::from_raw(criu), Signal::SIGALRM).is_ok();
                ends.then(|| {
                    self.over = true;
                    pid
                })
            }
            _ => {
                self.waits_for = Some((pid, Instant::now()));
                None
            }
        }
    }
}

/// Returns the CRIU below `parent` that traces a process which sleeps in a system call that makes processes.
fn waits_inside_vfork(pid: i32, parent: i32) -> Option<i32> {
    procfs::stat(pid).filter(|stat| stat.state == 'D')?;
    let tracer = procfs::status(pid).ok()?.tracer;
    let ours = tracer > 0 && is_criu(tracer);
    let calls = [libc::SYS_clone, libc::SYS_clone3];
    #[cfg(target_arch = "x86_64")]
    let calls = [calls[0], calls[1], libc::SYS_vfork];
    let call = procfs::system_call(pid)?;
    let below = || live::tree(&Host::system(), parent).contains(&tracer);
    (ours && calls.contains(&call) && below()).then_some(tracer)
}
