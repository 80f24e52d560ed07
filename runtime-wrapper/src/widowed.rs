//! Processes of a restore whose CRIU is dead.
//!
//! CRIU forks the container's first process, which waits without a limit for CRIU's word to go on and, until its
//! own files are restored, holds CRIU's connection to the runtime open (`__restore_task_with_children` in CRIU's
//! cr-restore.c). If CRIU is killed at that time, by a kernel short of memory say, nobody tells that process; the
//! runtime never sees the connection's end and waits as long.

use std::time::{Duration, Instant};

use cryopod_gpu_hooks::cuda::procfs;
use cryopod_gpu_hooks::host::Host;
use cryopod_gpu_hooks::live;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long the runtime may take to notice CRIU's end by itself.
const PATIENCE: Duration = Duration::from_secs(3);

/// The CRIU of a restore.
#[derive(Debug, Default)]
pub struct Criu {
    /// Its pid and start time.
    process: Option<(i32, u64)>,
    gone: Option<Instant>,
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
    pub fn end_widowed(&mut self, parent: i32) -> bool {
        let Some((criu, start_time)) = self.process else {
            return false;
        };
        if procfs::stat(criu).is_some_and(|s| !s.exiting && s.start_time == start_time) {
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
        assert!(!criu.end_widowed(parent), "none is known yet");
        let first = pid_of("criu");
        criu.find(parent);
        assert_eq!(criu.process.map(|(pid, _)| pid), Some(first));
        drop(runtime.stdin.take());
        let child: i32 = pid_of("child");
        criu.find(parent);
        assert_eq!(criu.process.map(|(pid, _)| pid), Some(first));
        assert!(!criu.end_widowed(parent), "CRIU is there");
        kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
        assert!(!criu.end_widowed(parent), "the runtime has time to notice");
        while !criu.end_widowed(parent) {
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
