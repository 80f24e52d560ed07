//! Ends a checkpoint whose freeze would hang: CRIU waits for a process that does not stop.
//!
//! - A process inside vfork(2) sleeps in the kernel until its child has called exec or exited. If CRIU has stopped the
//!   child, neither happens.
//! - A process in another uninterruptible sleep: the freezer of cgroup v1 at times leaves a process frozen (CRIU's
//!   `cgroupv1_freezer_kludges`), a network file system does not answer.
//!
//! - A process that SIGSTOP stopped, in the freezer of cgroup v1: since Linux 6.1 it sleeps there until it is thawed, and
//!   ptrace(2), with which CRIU attaches to it, waits for it. No limit of CRIU's ends that, only a thaw: then CRIU goes on.
//!
//! CRIU would wait until its `timeout` is over ("Unseizable non-zombie N found, state D"). For containers with GPUs that
//! limit is high, because CRIU counts the driver's work as part of the freeze. SIGALRM is what CRIU sends itself when the
//! limit is over (`alarm_handler` in its cr-dump.c): it gives up and releases all processes.

use std::fmt;
use std::time::{Duration, Instant};

use cryopod_cuda::procfs;
use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::rootfs::frozen;
use crate::run::stuck_restore::is_criu;

/// How long a process may stay inside vfork after CRIU has told it to stop.
const INSIDE_VFORK: Duration = Duration::from_secs(3);
/// How long it may stay in another uninterruptible sleep: CRIU's own limit where none is given.
const ASLEEP: Duration = Duration::from_secs(10);
/// Interval between two scans of all processes.
const PAUSE: Duration = Duration::from_secs(1);
/// CRIU's only stage before the freeze.
const BEFORE: &str = "pre-dump";

/// A process that does not stop for CRIU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unstoppable {
    pub pid: i32,
    inside_vfork: bool,
}

impl Unstoppable {
    fn patience(self) -> Duration {
        if self.inside_vfork {
            INSIDE_VFORK
        } else {
            ASLEEP
        }
    }
}

impl fmt::Display for Unstoppable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, inside_vfork } = self;
        let was = match inside_vfork {
            true => "was inside vfork(2)",
            false => "slept in the kernel and could not be interrupted (state D)",
        };
        write!(
            f,
            "process {pid} {was} when CRIU froze the container, and CRIU waits in vain for it to stop; try again"
        )
    }
}

/// Watches CRIU's freeze of a container.
#[derive(Debug, Default)]
pub struct Freeze {
    over: bool,
    /// The frozen process to which CRIU was attaching at the last scan.
    attaching: Option<i32>,
    /// Time of the last scan.
    looked: Option<Instant>,
    /// What CRIU waits for, and since when.
    waits_for: Option<(Unstoppable, Instant)>,
}

impl Freeze {
    /// Notes a question of CRIU's.
    pub fn at(&mut self, stage: &str) {
        self.over |= stage != BEFORE;
    }

    /// Has CRIU give up if it has been waiting for a process for too long, and returns that process. To be called
    /// repeatedly while the runtime, a child of `parent`, runs.
    pub fn end_waiting(&mut self, parent: i32) -> Option<Unstoppable> {
        if self.over || self.looked.is_some_and(|at| at.elapsed() < PAUSE) {
            return None;
        }
        self.looked = Some(Instant::now());
        let attaching = attached_to(parent);
        if let Some(pid) = attaching.filter(|_| attaching == self.attaching) {
            tracing::warn!(
                "process {pid} is stopped and frozen, and CRIU cannot attach to it; the container is thawed"
            );
            frozen::thaw_v1(&Host::system(), pid);
        }
        self.attaching = attaching;
        let Some((process, criu)) = waited_for(parent) else {
            self.waits_for = None;
            return None;
        };
        match self.waits_for {
            Some((before, since)) if before == process => {
                let ends = since.elapsed() >= process.patience()
                    && kill(Pid::from_raw(criu), Signal::SIGALRM).is_ok();
                self.over |= ends;
                ends.then_some(process)
            }
            _ => {
                self.waits_for = Some((process, Instant::now()));
                None
            }
        }
    }
}

/// Returns a process or thread that sleeps uninterruptibly while a CRIU below `parent` waits for it to stop, and that
/// CRIU.
fn waited_for(parent: i32) -> Option<(Unstoppable, i32)> {
    let mut below = live::tree(&Host::system(), parent).into_iter();
    below.find_map(|criu| is_criu(criu).then(|| Some((asleep(criu)?, criu)))?)
}

/// Returns a process that sleeps uninterruptibly, as CRIU does that attaches to it.
fn attached_to(parent: i32) -> Option<i32> {
    let sleeps = |pid| procfs::stat(pid).is_some_and(|stat| stat.state == 'D');
    let below = live::tree(&Host::system(), parent).into_iter();
    let mut attaching = below.filter(|pid| is_criu(*pid) && sleeps(*pid));
    attaching.find_map(|criu| {
        let (call, [_, pid]) = procfs::system_call(criu)?;
        let pid = i32::try_from(pid).ok()?;
        (call == libc::SYS_ptrace && sleeps(pid)).then_some(pid)
    })
}

fn asleep(criu: i32) -> Option<Unstoppable> {
    let (call, [argument, _]) = procfs::system_call(criu)?;
    let pid = i32::try_from(argument).ok()?;
    let waits = call == libc::SYS_wait4 && procfs::stat(pid)?.state == 'D';
    waits.then_some(Unstoppable {
        pid,
        inside_vfork: inside_vfork(pid),
    })
}

/// Returns true for a thread that makes a process and waits for it: inside vfork(2), or a clone like it.
pub fn inside_vfork(thread: i32) -> bool {
    let makes_processes = [libc::SYS_clone, libc::SYS_clone3];
    #[cfg(target_arch = "x86_64")]
    let makes_processes = [makes_processes[0], makes_processes[1], libc::SYS_vfork];
    procfs::system_call(thread).is_some_and(|(call, _)| makes_processes.contains(&call))
}
