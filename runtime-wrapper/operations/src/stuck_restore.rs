//! Waits of a restore that have no end: for a CRIU that is dead, and CRIU's for processes that were killed.
//!
//! CRIU forks the container's first process, which waits without a limit for CRIU's word to go on and, until its
//! own files are restored, holds CRIU's connection to the runtime open (`__restore_task_with_children` in CRIU's
//! cr-restore.c). If CRIU is killed at that time, by a kernel short of memory say, nobody tells that process; the
//! runtime never sees the connection's end and waits as long.
//!
//! If the container's processes are killed, by the same kernel, when CRIU has its hands on them to let them go, CRIU waits
//! for the first of them (`out_kill` of `restore_root_task`, there). The init of a namespace of pids ends last, after every
//! other thread in it has been reaped (`zap_pid_ns_processes` in the kernel), and those that CRIU traces only CRIU can reap.

use std::time::{Duration, Instant};

use cryopod_cuda::procfs;
use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long the runtime may take to notice CRIU's end by itself, and CRIU that of a process.
const PATIENCE: Duration = Duration::from_secs(3);
/// Between two looks at every process.
const PAUSE: Duration = Duration::from_millis(500);

/// The CRIU of a restore.
#[derive(Debug, Default)]
pub struct Criu {
    /// Its pid and start time.
    process: Option<(i32, u64)>,
    gone: Option<Instant>,
    /// When every process was looked at.
    looked: Option<Instant>,
    /// One that cannot end, since when.
    unreaped: Option<(i32, Instant)>,
}

impl Criu {
    /// Finds it among the descendants of `parent`. To be asked while CRIU waits for an answer to its first question:
    /// the container's first process, which has CRIU's name, is not there yet, and what else has it is CRIU's child.
    pub fn find(&mut self, parent: i32) {
        if self.process.is_none() {
            // Not the one that the runtime asked for CRIU's version, on its way out.
            self.process = live::tree(&Host::system(), parent)
                .into_iter()
                .filter(|pid| *pid != parent && is_criu(*pid))
                .filter_map(|pid| Some((pid, procfs::stat(pid)?)))
                .find(|(_, stat)| !stat.exiting)
                .map(|(pid, stat)| (pid, stat.start_time));
        }
    }

    /// To be asked now and then while the runtime, a child of `parent`, has not ended: if CRIU has been gone for a while,
    /// ends the processes that still wait for it. `true` if there were any.
    pub fn end_stuck_restore(&mut self, parent: i32) -> bool {
        if self.process.is_none() || self.alive().is_some() {
            return false;
        }
        if self.gone.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
            return false;
        }
        let mut any = false;
        for pid in live::tree(&Host::system(), parent) {
            let lives = |pid| procfs::stat(pid).is_some_and(|s| !s.exiting);
            if pid != parent && is_criu(pid) && lives(pid) {
                any |= kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok();
            }
        }
        any
    }

    /// To be asked now and then while the runtime, a child of `parent`, has not ended: if CRIU has been waiting for a while
    /// for a process that cannot end before CRIU does, ends CRIU. `true` if it has.
    pub fn end_waiting(&mut self, parent: i32) -> bool {
        let Some(criu) = self.alive() else {
            return false;
        };
        if self.looked.is_some_and(|at| at.elapsed() < PAUSE) {
            return false;
        }
        self.looked = Some(Instant::now());
        let pids = live::tree(&Host::system(), parent).into_iter();
        let Some(pid) = pids.filter(|pid| *pid != criu).find(|p| unreaped(*p, criu)) else {
            self.unreaped = None;
            return false;
        };
        match self.unreaped {
            Some((before, since)) if before == pid => {
                since.elapsed() >= PATIENCE && kill(Pid::from_raw(criu), Signal::SIGKILL).is_ok()
            }
            _ => {
                self.unreaped = Some((pid, Instant::now()));
                false
            }
        }
    }

    fn alive(&self) -> Option<i32> {
        let (criu, start_time) = self.process?;
        let stat = procfs::stat(criu)?;
        (!stat.exiting && stat.start_time == start_time).then_some(criu)
    }
}

/// Is a process that this CRIU traces on its way out, and asleep on it? One that gives a large memory back is not asleep.
fn unreaped(pid: i32, criu: i32) -> bool {
    procfs::stat(pid).is_some_and(|s| s.exiting && s.state == 'S')
        && procfs::status(pid).is_ok_and(|s| s.tracer == criu)
}

/// Does a process have CRIU's name, as what CRIU forks has it at first?
pub fn is_criu(pid: i32) -> bool {
    let comm = Host::system().line(format!("/proc/{pid}/comm"));
    comm.is_some_and(|c| c.starts_with("criu"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::thread;

    use super::*;

    #[test]
    fn what_waits_for_a_killed_criu_is_ended() {
        let dir = tempfile::tempdir().unwrap();
        let sleep = dir.path().join("criu-like");
        std::fs::copy("/bin/sleep", &sleep).unwrap();
        let script = "\"$0\" 1000 & echo $! > \"$1/criu\"; read line; \"$0\" 1000 & echo $! > \"$1/child\"; exec sleep 1000";
        let mut runtime = Command::new("sh")
            .args(["-c", script])
            .args([sleep.as_path(), dir.path()])
            .stdin(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let parent = i32::try_from(runtime.id()).unwrap();
        // Once it has the name.
        let pid_of = |name: &str| loop {
            let text = std::fs::read_to_string(dir.path().join(name)).unwrap_or_default();
            match text.trim().parse() {
                Ok(pid) if is_criu(pid) => break pid,
                _ => thread::sleep(Duration::from_millis(10)),
            }
        };
        let mut criu = Criu::default();
        assert!(!criu.end_stuck_restore(parent), "none is known yet");
        let first = pid_of("criu");
        criu.find(parent);
        assert_eq!(criu.process.map(|(pid, _)| pid), Some(first));
        drop(runtime.stdin.take());
        let child: i32 = pid_of("child");
        criu.find(parent);
        assert_eq!(criu.process.map(|(pid, _)| pid), Some(first));
        assert!(!criu.end_stuck_restore(parent), "CRIU is there");
        kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
        assert!(
            !criu.end_stuck_restore(parent),
            "the runtime has time to notice"
        );
        while !criu.end_stuck_restore(parent) {
            assert!(procfs::stat(child).is_some_and(|s| !s.exiting));
            thread::sleep(Duration::from_millis(100));
        }
        while procfs::stat(child).is_some_and(|s| !s.exiting) {
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(runtime.try_wait().unwrap(), None);
        runtime.kill().unwrap();
        runtime.wait().unwrap();
    }
}
