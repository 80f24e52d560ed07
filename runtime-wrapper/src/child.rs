//! The low-level runtime as a child, watched until it ends.
//!
//! The child dies with this process, signals reach it, CRIU's questions are answered ([`Gate`]), and no wait is
//! without a limit. A checkpoint that is interrupted is not killed: CRIU is in the middle of the container's
//! processes, and only CRIU can leave them as they were. It is told no at its next question, resumes the
//! container and ends; only if it does not is it killed.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use cryopod_gpu_hooks::host::Host;
use cryopod_gpu_hooks::live;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::Error;
use crate::gate::Gate;
use crate::lowlevel::LowLevel;

/// Signals that interrupt an operation.
const INTERRUPTS: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];
/// Signals that are only handed on.
const FORWARDED: [Signal; 3] = [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGWINCH];

/// Which operation the child does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The container exists already and must survive an interruption.
    Checkpoint,
    /// The container is being made; an interruption takes away what there is of it.
    Restore {
        /// `true` if the runtime ends when the container runs (`--detach`).
        detach: bool,
    },
}

impl Kind {
    /// CRIU's stage after which there is no way back: the container is gone, or it runs.
    fn final_stage(self) -> &'static str {
        match self {
            Self::Checkpoint => "post-dump",
            Self::Restore { .. } => "post-resume",
        }
    }
}

/// What is to be watched, and how long.
#[derive(Debug)]
pub struct Watch<'a> {
    /// The operation.
    pub kind: Kind,
    /// Where CRIU asks.
    pub gate: &'a Gate,
    /// Time for the whole operation.
    pub limit: Duration,
    /// Time for an interrupted operation to give up by itself.
    pub abort_limit: Duration,
    /// Made when the operation is interrupted or refused: the plugin looks for it.
    pub abort_file: PathBuf,
}

/// How the child ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    /// Its exit code; 128 + the number of the signal that ended it.
    pub code: i32,
    /// Why the operation was interrupted, if it was.
    pub interrupted: Option<String>,
    /// CRIU went through its final stage.
    pub passed: bool,
}

/// Runs the low-level runtime and watches it. `decide` answers CRIU's questions by stage while the operation
/// is not interrupted.
///
/// # Errors
/// [`Error::Io`] if the child cannot be started.
pub fn run(
    low: &LowLevel,
    args: &[OsString],
    env: &[(&str, OsString)],
    watch: &Watch<'_>,
    decide: &mut dyn FnMut(&str) -> bool,
) -> Result<Ended, Error> {
    let mut set = SigSet::empty();
    for signal in INTERRUPTS
        .into_iter()
        .chain(FORWARDED)
        .chain([Signal::SIGCHLD])
    {
        set.add(signal);
    }
    let mut before = SigSet::empty();
    let signals = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&set), Some(&mut before))
        .and_then(|()| SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC))
        .map_err(|e| Error::io("signals cannot be watched")(e.into()))?;
    if watch.kind == Kind::Checkpoint {
        // CRIU outlives a killed runtime: as its reaper this process can wait for it.
        // SAFETY: a plain system call that touches no memory of ours.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
    }
    let child = spawn(low, args, env, watch.kind, before)?;
    let mut watcher = Watcher {
        child: pid_of(&child),
        watch,
        deadline: Some(Instant::now() + watch.limit),
        interrupted: None,
        passed: false,
        escalated: false,
        code: None,
    };
    watcher.wait(&signals, decide);
    let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&before), None);
    Ok(Ended {
        code: watcher.code.unwrap_or(1),
        interrupted: watcher.interrupted,
        passed: watcher.passed,
    })
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX))
}

fn spawn(
    low: &LowLevel,
    args: &[OsString],
    env: &[(&str, OsString)],
    kind: Kind,
    mask: SigSet,
) -> Result<Child, Error> {
    let mut command = Command::new(&low.path);
    command.arg0(&low.name).args(args);
    command.envs(env.iter().map(|(k, v)| (k, v)));
    // A checkpoint's child leaves the terminal's process group, so that ^C comes to this process alone; a
    // restore may have the container in the foreground and stays.
    if kind == Kind::Checkpoint {
        command.process_group(0);
    }
    let parent = Pid::this();
    // SAFETY: between fork and exec only async-signal-safe calls are made: prctl, getppid, sigprocmask.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0 {
                return Err(io::Error::last_os_error());
            }
            if nix::unistd::getppid() != parent {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&mask), None).map_err(io::Error::from)
        });
    }
    command.spawn().map_err(Error::io(format!(
        "{}: cannot be started",
        low.path.display()
    )))
}

struct Watcher<'a> {
    child: Pid,
    watch: &'a Watch<'a>,
    /// When patience ends; `None`: the container runs in the foreground.
    deadline: Option<Instant>,
    interrupted: Option<String>,
    passed: bool,
    escalated: bool,
    code: Option<i32>,
}

impl Watcher<'_> {
    fn wait(&mut self, signals: &SignalFd, decide: &mut dyn FnMut(&str) -> bool) {
        let mut cut_off = false;
        while !cut_off {
            self.reap();
            if self.code.is_some() && !self.orphans() {
                return;
            }
            let mut fds = [
                PollFd::new(signals.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.watch.gate.listener().as_fd(), PollFlags::POLLIN),
            ];
            // A second at most: an orphan's end is not always signalled.
            let pause = self
                .deadline
                .map_or(Duration::from_secs(1), |d| {
                    d.saturating_duration_since(Instant::now())
                })
                .min(Duration::from_secs(1));
            let pause = u16::try_from(pause.as_millis()).unwrap_or(1000).max(1);
            let _ = poll(&mut fds, PollTimeout::from(pause));
            while let Ok(Some(info)) = signals.read_signal() {
                if let Some(signal) = i32::try_from(info.ssi_signo)
                    .ok()
                    .and_then(|n| Signal::try_from(n).ok())
                {
                    self.signal(signal);
                }
            }
            self.questions(decide);
            if self.deadline.is_some_and(|d| Instant::now() >= d) {
                cut_off = self.patience_ends();
            }
        }
    }

    fn reap(&mut self) {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) if pid == self.child => self.ended(code),
                Ok(WaitStatus::Signaled(pid, signal, _)) if pid == self.child => {
                    self.ended(128 + signal as i32)
                }
                Ok(WaitStatus::StillAlive) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    fn ended(&mut self, code: i32) {
        self.code = Some(code);
        // CRIU, if it is still there, gets as long as an interrupted operation.
        self.deadline = Some(Instant::now() + self.watch.abort_limit);
    }

    /// After the runtime's end: is CRIU still at work? Only for a checkpoint, where this process is the reaper.
    fn orphans(&self) -> bool {
        let me = i32::try_from(std::process::id()).unwrap_or(0);
        self.watch.kind == Kind::Checkpoint
            && live::tree(&Host::system(), me)
                .into_iter()
                .any(|pid| pid != me && is_criu(pid))
    }

    fn signal(&mut self, signal: Signal) {
        if signal == Signal::SIGCHLD {
            return;
        }
        let on_the_way = !self.passed && self.code.is_none();
        if INTERRUPTS.contains(&signal) && on_the_way {
            self.interrupt(&format!("it was interrupted by {signal}"));
            if self.watch.kind == Kind::Checkpoint {
                return;
            }
        } else if INTERRUPTS.contains(&signal) && self.watch.kind == Kind::Checkpoint {
            return;
        }
        let _ = kill(self.child, signal);
    }

    fn interrupt(&mut self, why: &str) {
        if self.interrupted.is_none() {
            tracing::warn!("giving up: {why}");
            self.interrupted = Some(why.to_owned());
            self.deadline = Some(Instant::now() + self.watch.abort_limit);
        }
        abort(&self.watch.abort_file);
    }

    fn questions(&mut self, decide: &mut dyn FnMut(&str) -> bool) {
        let Self {
            watch,
            interrupted,
            passed,
            deadline,
            ..
        } = self;
        watch.gate.answer(|stage| {
            let yes = interrupted.is_none() && decide(stage);
            tracing::debug!("CRIU at {stage}: {}", if yes { "go on" } else { "stop" });
            if !yes {
                abort(&watch.abort_file);
            } else if stage == watch.kind.final_stage() {
                *passed = true;
                *deadline = match watch.kind {
                    Kind::Restore { detach: false } => None,
                    _ => Some(Instant::now() + watch.limit),
                };
            }
            yes
        });
    }

    /// The deadline is over. `true`: nothing more can be waited for.
    fn patience_ends(&mut self) -> bool {
        if self.code.is_none() && self.interrupted.is_none() && !self.passed {
            let limit = self.watch.limit.as_secs();
            self.interrupt(&format!(
                "it took longer than {limit} s (limits in {})",
                crate::config::PATH
            ));
            return false;
        }
        let me = i32::try_from(std::process::id()).unwrap_or(0);
        let everybody = live::tree(&Host::system(), me);
        self.deadline = Some(Instant::now() + self.watch.abort_limit);
        if !self.escalated && self.watch.kind == Kind::Checkpoint && self.code.is_none() {
            // Without the runtime CRIU's next message to it fails, and CRIU resumes the container.
            self.escalated = true;
            let _ = kill(self.child, Signal::SIGKILL);
            return false;
        }
        for pid in everybody.into_iter().filter(|p| *p != me) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(100));
        self.reap();
        true
    }
}

fn is_criu(pid: i32) -> bool {
    Host::system()
        .line(format!("/proc/{pid}/comm"))
        .is_some_and(|c| c.starts_with("criu"))
}

/// Makes the file that tells the plugin to give up.
fn abort(file: &std::path::Path) {
    if let Err(e) = std::fs::File::create(file) {
        tracing::warn!("{}: cannot be made: {e}", file.display());
    }
}
