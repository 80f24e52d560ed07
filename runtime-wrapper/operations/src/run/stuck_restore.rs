//! Ends restores that would hang for ever: CRIU died while the container's init process waits for it, or the init
//! process was killed while CRIU waits for it.
//!
//! CRIU forks the container's init process, which waits without a limit for CRIU's permission to go on. Until its own
//! files are restored it holds CRIU's connection to the runtime open (`__restore_task_with_children` in CRIU's
//! cr-restore.c). If CRIU is killed at that time, by the OOM killer say, the init process never learns of it. The
//! runtime never sees the connection's end and waits as long.
//!
//! If the OOM killer ends the container's processes while CRIU is about to resume them, CRIU waits for the first of
//! them (`out_kill` of `restore_root_task`, there). The init process of a PID namespace ends last, after every other
//! thread in it has been reaped (`zap_pid_ns_processes` in the kernel), and only CRIU can reap those that it traces.
//! If they end earlier, CRIU waits for the init process to get to the next stage. The init process is the runtime's child,
//! and CRIU never learns of its end (`restore_wait_inprogress_tasks`, there).

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use cryopod_cuda::procfs;
use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long the runtime may take to notice CRIU's end by itself, and CRIU that of a process.
const PATIENCE: Duration = Duration::from_secs(3);
/// Interval between two scans of all processes.
const PAUSE: Duration = Duration::from_millis(500);

/// A CRIU that restores.
#[derive(Debug, Default)]
pub struct CriuProcess {
    /// Its pid and start time.
    process: Option<(i32, u64)>,
    gone: Option<Instant>,
    /// Since when there is a CRIU that a signal ended.
    killed: Option<Instant>,
    /// Time of the last scan.
    looked: Option<Instant>,
    /// A process that cannot end, and since when.
    unreaped: Option<(i32, Instant)>,
}

impl CriuProcess {
    /// Finds CRIU among the descendants of `parent`. Must be called while CRIU waits for the answer to its first
    /// question. Then the container's init process, which has CRIU's name, does not exist yet, and every other process
    /// of that name is CRIU's child.
    pub fn find(&mut self, parent: i32) {
        if self.process.is_none() {
            // Not the one that the runtime started for CRIU's version and that is exiting.
            self.process = live::tree(&Host::system(), parent)
                .into_iter()
                .filter(|pid| *pid != parent && is_criu(*pid))
                .filter_map(|pid| Some((pid, procfs::stat(pid)?)))
                .find(|(_, stat)| !stat.exiting)
                .map(|(pid, stat)| (pid, stat.start_time));
        }
    }

    /// Ends the processes that still wait for CRIU, if it has been gone for a while. Returns true if there were any. To
    /// be called repeatedly while the runtime, a child of `parent`, runs.
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

    /// Ends CRIU if it has been waiting for a while for a process that cannot end before CRIU does. Returns true if it
    /// has. To be called repeatedly while the runtime, a child of `parent`, runs.
    pub fn end_waiting(&mut self, parent: i32) -> bool {
        let Some(criu) = self.alive() else {
            return false;
        };
        if self.looked.is_some_and(|at| at.elapsed() < PAUSE) {
            return false;
        }
        self.looked = Some(Instant::now());
        let pids = live::tree(&Host::system(), parent);
        let below = live::tree(&Host::system(), criu);
        let stuck = |pid: &i32| unreaped(*pid, criu) || (!below.contains(pid) && killed(*pid));
        let Some(pid) = pids.into_iter().find(|pid| *pid != criu && stuck(pid)) else {
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

    /// Ends what a killed CRIU left: before its first question it may have a child with which it tries the kernel out. The
    /// child sleeps, and holds CRIU's connection to the runtime open (`fork_and_ptrace_attach` in CRIU's util.c). Returns
    /// true if there was any. To be called repeatedly while the runtime runs. `log` is CRIU's.
    pub fn end_orphans(&mut self, runtime: i32, log: &Path) -> bool {
        // The runtime reaps CRIU when the connection ends.
        let is_left = |pid| is_criu(pid) && killed(pid);
        if !live::tree(&Host::system(), runtime)
            .into_iter()
            .any(is_left)
        {
            self.killed = None;
            return false;
        }
        if self.killed.get_or_insert_with(Instant::now).elapsed() < PATIENCE {
            return false;
        }
        let lives = |pid: &i32| procfs::stat(*pid).is_some_and(|s| !s.exiting);
        let orphans = criu_with(log).into_iter().filter(lives);
        let ended = orphans.filter(|pid| kill(Pid::from_raw(*pid), Signal::SIGKILL).is_ok());
        ended.count() > 0
    }

    fn alive(&self) -> Option<i32> {
        let (criu, start_time) = self.process?;
        let stat = procfs::stat(criu)?;
        (!stat.exiting && stat.start_time == start_time).then_some(criu)
    }
}

/// Returns true if CRIU traces this process and the process is stuck exiting. A process that is freeing much memory is
/// exiting too, but runs (state R).
fn unreaped(pid: i32, criu: i32) -> bool {
    procfs::stat(pid).is_some_and(|s| s.exiting && s.state == 'S')
        && procfs::status(pid).is_ok_and(|s| s.tracer == criu)
}

fn killed(pid: i32) -> bool {
    procfs::stat(pid).is_some_and(|s| s.killed)
}

/// Finds the processes of the CRIU that writes this log.
pub fn criu_with(log: &Path) -> Vec<i32> {
    let Ok(log) = fs::canonicalize(log) else {
        return Vec::new();
    };
    let criu = procfs::pids().into_iter().filter(|pid| is_criu(*pid));
    criu.filter(|pid| {
        let open = fs::read_dir(format!("/proc/{pid}/fd"));
        let mut open = open.into_iter().flatten().flatten();
        open.any(|fd| fs::read_link(fd.path()).is_ok_and(|to| to == log))
    })
    .collect()
}

/// Returns true if a process has CRIU's name, as CRIU's new children have at first.
pub fn is_criu(pid: i32) -> bool {
    procfs::comm(pid).starts_with("criu")
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
        // Waits until it has the name.
        let pid_of = |name: &str| loop {
            let text = std::fs::read_to_string(dir.path().join(name)).unwrap_or_default();
            match text.trim().parse() {
                Ok(pid) if is_criu(pid) => break pid,
                _ => thread::sleep(Duration::from_millis(10)),
            }
        };
        let mut criu = CriuProcess::default();
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
