//! Runs the low-level runtime as a child and watches it until it ends.
//!
//! The child dies with this process, signals reach it, CRIU's questions are answered ([`ActionScript`]), and every wait
//! has a limit. An interrupted checkpoint is not killed: CRIU is in the middle of the container's processes, and only
//! CRIU can leave them as they were. CRIU's next question is answered with no; CRIU then resumes the container and
//! ends. It is killed only if it does not.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cryopod_gpu_plan::live;
use cryopod_host::files::{Host, bytes_below};
use cryopod_host::processes::signals::not_ignored;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, kill, signal, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::error::Error;
use crate::request::lowlevel::LowLevel;
use crate::run::action_script::{ActionScript, StageQuestion};
use crate::run::hidden_gpus::HiddenGpus;
use crate::run::mount_namespace;
use crate::run::stuck_freeze::Freeze;
use crate::run::stuck_kill::InitProcess;
use crate::run::stuck_restore::{CriuProcess, is_criu};

const INTERRUPTS: [Signal; 4] = [
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];
/// What to tell of a CRIU that was killed.
pub const CRIU_KILLED: &str = "CRIU was killed in the middle of it; see the kernel's log for why, memory that ran out for one";
/// Interval between two looks for a CRIU whose runtime has died.
const ORPHAN_PAUSE: Duration = Duration::from_millis(50);
/// Signals that are only forwarded.
const FORWARDED: [Signal; 3] = [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGWINCH];

/// What the low-level runtime is run for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunKind {
    /// The container with this init process exists already and must survive an interruption.
    Checkpoint {
        init: i32,
        /// It goes on running, or is ended by somebody else: CRIU ends no process.
        leave_running: bool,
    },
    /// The container is being made; an interruption removes what exists of it.
    Restore {
        /// True if the runtime ends when the container runs (`--detach`).
        detach: bool,
    },
}

impl RunKind {
    fn is_checkpoint(self) -> bool {
        matches!(self, Self::Checkpoint { .. })
    }

    /// CRIU's stage after which there is no way back: the container is gone, or it runs. (CRIU ignores the answer at
    /// `pre-resume`.)
    fn final_stage(self) -> &'static str {
        match self {
            Self::Checkpoint { .. } => "post-dump",
            Self::Restore { .. } => "pre-resume",
        }
    }
}

/// What a run is watched with.
#[derive(Debug)]
pub struct RunWatch<'a> {
    pub kind: RunKind,
    pub action_script: &'a ActionScript,
    pub limit: Duration,
    pub abort_limit: Duration,
    /// Created when the operation is interrupted or refused: the plugin looks for it.
    pub abort_file: PathBuf,
    /// The directory that a checkpoint writes to: as long as it grows, CRIU is not stuck.
    pub images: Option<PathBuf>,
    pub criu_log: PathBuf,
    /// The driver agent, which puts processes back when all else has failed: never killed here.
    pub agent: Option<i32>,
    /// What the low-level runtime and CRIU must not see.
    pub hidden: Option<HiddenGpus>,
    /// In place of this process's standard error.
    pub stderr: Option<File>,
}

/// How a run of the low-level runtime ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunOutcome {
    /// Its exit code; 128 + the number of the signal that ended it.
    pub code: i32,
    pub interrupted: Option<String>,
    /// CRIU went through its final stage.
    pub passed: bool,
    /// CRIU did not end in time and was killed: it could not leave the container as it was.
    pub killed: bool,
    /// Something killed the restored processes; we then killed CRIU, which would wait for them for ever.
    pub lost_processes: bool,
    /// CRIU gave up the freeze, because a process did not stop.
    pub not_frozen: bool,
}

/// The signals that an operation watches from its first step on; before that they end the process as usual.
#[derive(Debug)]
pub struct Signals {
    fd: SignalFd,
    before: SigSet,
    /// The interrupts that have come, a bit each.
    came: AtomicU32,
}

impl Signals {
    /// Starts to watch. The signals stay blocked until the process ends, so that they cannot cut the clean-up short.
    pub fn watch() -> Result<Self, Error> {
        let watched = [&INTERRUPTS[..], &FORWARDED, &[Signal::SIGCHLD]].concat();
        let set = not_ignored(&watched);
        let mut before = SigSet::empty();
        let fd = sigprocmask(SigmaskHow::SIG_BLOCK, Some(&set), Some(&mut before))
            .and_then(|()| {
                SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)
            })
            .map_err(|e| Error::io("signals cannot be watched")(e.into()))?;
        Ok(Self {
            fd,
            before,
            came: AtomicU32::new(0),
        })
    }

    /// The same for a process of [`detached`], also if it has become another program since: its children have none blocked.
    pub fn watch_detached() -> Result<Self, Error> {
        Ok(Self {
            before: SigSet::empty(),
            ..Self::watch()?
        })
    }

    /// Whether an interrupt has come, to an earlier operation too: whoever asks gives up.
    pub fn interrupted(&self) -> bool {
        INTERRUPTS.iter().any(|signal| self.interrupted_by(*signal))
    }

    /// Whether this interrupt has come.
    pub fn interrupted_by(&self, signal: Signal) -> bool {
        while self.next().is_some() {}
        self.came.load(Ordering::Relaxed) & bit(signal) != 0
    }

    /// Forgets this interrupt: the next operation is not interrupted by it.
    pub fn answered(&self, signal: Signal) {
        while self.next().is_some() {}
        self.came.fetch_and(!bit(signal), Ordering::Relaxed);
    }

    fn next(&self) -> Option<Signal> {
        let info = self.fd.read_signal().ok()??;
        let signal = Signal::try_from(i32::try_from(info.ssi_signo).ok()?).ok()?;
        if INTERRUPTS.contains(&signal) {
            self.came.fetch_or(bit(signal), Ordering::Relaxed);
        }
        Some(signal)
    }
}

fn bit(signal: Signal) -> u32 {
    1 << signal as i32
}

/// Returns the command that runs this program under another name, as a process that outlives this one.
pub fn detached(name: &str) -> Command {
    detached_program(Path::new("/proc/self/exe"), name)
}

/// The same for another file of this program.
pub fn detached_program(program: &Path, name: &str) -> Command {
    let mut command = Command::new(program);
    command
        .arg0(name)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    // SAFETY: between fork and exec only system calls are made.
    unsafe {
        command.pre_exec(|| {
            // Engines wait until nobody has their pipes open.
            libc::close_range(
                3,
                libc::c_uint::MAX,
                libc::CLOSE_RANGE_CLOEXEC as libc::c_int,
            );
            nix::unistd::setsid()?;
            // It is told to give up by signals that this program's caller may ignore, and this program blocks.
            for interrupt in INTERRUPTS {
                signal(interrupt, SigHandler::SigDfl)?;
            }
            Ok(SigSet::empty().thread_set_mask()?)
        });
    }
    command
}

/// Runs the low-level runtime and watches it. `decide` answers CRIU's questions by stage while the operation is not
/// interrupted.
pub fn run(
    low: &LowLevel,
    args: &[OsString],
    env: &[(&str, OsString)],
    watch: &RunWatch<'_>,
    signals: &Signals,
    decide: &mut dyn FnMut(&StageQuestion) -> bool,
) -> Result<RunOutcome, Error> {
    while let Some(signal) = signals.next() {
        if INTERRUPTS.contains(&signal) {
            return Err(Error::Failed(format!(
                "interrupted by {signal}; nothing was touched"
            )));
        }
    }
    if watch.kind.is_checkpoint() {
        // CRIU outlives a killed runtime: as its reaper this process can wait for it.
        let _ = prctl::set_child_subreaper(true);
    }
    let child = spawn(low, args, env, watch, signals.before)?;
    let mut watcher = Watcher {
        child: pid_of(&child),
        watch,
        deadline: Some(Instant::now() + watch.limit),
        interrupted: None,
        refuse: false,
        passed: false,
        written: 0,
        escalated: false,
        killed: false,
        lost_processes: false,
        code: None,
        criu: CriuProcess::default(),
        freeze: Freeze::default(),
        not_frozen: false,
        init: match watch.kind {
            RunKind::Checkpoint { init, .. } => Some(InitProcess::of(init)),
            RunKind::Restore { .. } => None,
        },
    };
    watcher.wait(signals, decide);
    Ok(RunOutcome {
        code: watcher.code.unwrap_or(1),
        interrupted: watcher.interrupted,
        passed: watcher.passed,
        killed: watcher.killed,
        lost_processes: watcher.lost_processes,
        not_frozen: watcher.not_frozen,
    })
}

/// This program's exit code for that of the low-level runtime.
pub fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

/// Runs the low-level runtime until it ends, with this program's descriptors but for standard error. It dies with this
/// program.
pub fn attend(low: &LowLevel, args: &[OsString], stderr: File) -> Result<RunOutcome, Error> {
    let mut command = Command::new(&low.path);
    command.arg0(&low.name).args(args).stderr(stderr);
    let parent = Pid::this();
    // SAFETY: between fork and exec only async-signal-safe calls are made: prctl and getppid.
    unsafe {
        command.pre_exec(move || die_with(parent));
    }
    let status = command
        .status()
        .map_err(Error::at(&low.path, "cannot be started"))?;
    Ok(RunOutcome {
        code: exit_of(status),
        ..RunOutcome::default()
    })
}

/// [`attend`] for a checkpoint: when the runtime has died, CRIU works on, and may yet end the container. Waits at most
/// `limit` for it, and says so if it has not ended then.
pub fn attend_checkpoint(
    low: &LowLevel,
    args: &[OsString],
    stderr: File,
    limit: Duration,
) -> Result<RunOutcome, Error> {
    // As its reaper this process can wait for it.
    let _ = prctl::set_child_subreaper(true);
    let mut ended = attend(low, args, stderr)?;
    let deadline = Instant::now() + limit;
    while ended.code != 0 && orphaned_criu() {
        if Instant::now() >= deadline {
            let (name, limit) = (low.label(), limit.as_secs());
            ended.interrupted = Some(format!(
                "{name} has died, and its CRIU still works after {limit} s: it may yet end the container; look again when it has ended"
            ));
            break;
        }
        std::thread::sleep(ORPHAN_PAUSE);
    }
    Ok(ended)
}

/// Reaps what has ended. Returns true if a CRIU is still below this process.
fn orphaned_criu() -> bool {
    while waitpid(None, Some(WaitPidFlag::WNOHANG)).is_ok_and(|status| status.pid().is_some()) {}
    criu_below(this_process())
}

fn criu_below(parent: i32) -> bool {
    live::tree(&Host::system(), parent)
        .into_iter()
        .any(|pid| pid != parent && is_criu(pid))
}

/// As [`RunOutcome::code`].
fn exit_of(status: ExitStatus) -> i32 {
    let by_signal = status.signal().map(|signal| 128 + signal);
    status.code().or(by_signal).unwrap_or(1)
}

/// Has the kernel kill this process, which is about to become another program, when `parent` dies.
fn die_with(parent: Pid) -> io::Result<()> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    match nix::unistd::getppid() == parent {
        true => Ok(()),
        false => Err(io::ErrorKind::BrokenPipe.into()),
    }
}

fn this_process() -> i32 {
    i32::try_from(std::process::id()).unwrap_or(0)
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX))
}

fn spawn(
    low: &LowLevel,
    args: &[OsString],
    env: &[(&str, OsString)],
    watch: &RunWatch<'_>,
    mask: SigSet,
) -> Result<Child, Error> {
    let mut command = Command::new(&low.path);
    command.arg0(&low.name).args(args);
    command.envs(env.iter().map(|(k, v)| (k, v)));
    // A checkpoint's child leaves the terminal's process group, so that ^C comes to this process alone; a
    // restore may have the container in the foreground and stays.
    if watch.kind.is_checkpoint() {
        command.process_group(0);
    }
    if let Some(file) = &watch.stderr {
        command.stderr(file.try_clone().map_err(Error::io("standard error"))?);
    }
    let parent = Pid::this();
    let hidden = watch.hidden.clone();
    let restores = !watch.kind.is_checkpoint();
    // SAFETY: between fork and exec only async-signal-safe calls are made: prctl, getppid, unshare, mount, sigprocmask.
    unsafe {
        command.pre_exec(move || {
            die_with(parent)?;
            if restores {
                mount_namespace::enter()?;
            }
            if let Some(hidden) = &hidden {
                hidden.hide()?;
            }
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&mask), None).map_err(io::Error::from)
        });
    }
    command
        .spawn()
        .map_err(Error::at(&low.path, "cannot be started"))
}

struct Watcher<'a> {
    child: Pid,
    watch: &'a RunWatch<'a>,
    /// `None`: no limit, as the container runs in the foreground.
    deadline: Option<Instant>,
    interrupted: Option<String>,
    /// The runtime ended before CRIU: nobody waits for CRIU's result.
    refuse: bool,
    passed: bool,
    /// Bytes in the images when last checked.
    written: u64,
    escalated: bool,
    killed: bool,
    lost_processes: bool,
    code: Option<i32>,
    criu: CriuProcess,
    freeze: Freeze,
    not_frozen: bool,
    /// That of a checkpoint.
    init: Option<InitProcess>,
}

impl Watcher<'_> {
    fn wait(&mut self, signals: &Signals, decide: &mut dyn FnMut(&StageQuestion) -> bool) {
        let mut cut_off = false;
        while !cut_off {
            if self.over() {
                return;
            }
            let mut fds = [
                PollFd::new(signals.fd.as_fd(), PollFlags::POLLIN),
                PollFd::new(
                    self.watch.action_script.listener().as_fd(),
                    PollFlags::POLLIN,
                ),
            ];
            // At most a second: the end of an orphan is not always signalled.
            let pause = self
                .deadline
                .map_or(Duration::from_secs(1), |d| {
                    d.saturating_duration_since(Instant::now())
                })
                .min(Duration::from_secs(1));
            let pause = u16::try_from(pause.as_millis()).unwrap_or(1000).max(1);
            let _ = poll(&mut fds, PollTimeout::from(pause));
            while let Some(signal) = signals.next() {
                self.signal(signal);
            }
            // The runtime may have died before CRIU asked.
            if self.over() {
                return;
            }
            self.questions(signals, decide);
            self.end_orphans();
            match self.watch.kind {
                RunKind::Checkpoint { leave_running, .. } => {
                    self.stuck_freeze();
                    if leave_running || !self.passed {
                        self.stuck_kill();
                    }
                }
                RunKind::Restore { .. } => self.stuck_restore(),
            }
            if self.deadline.is_some_and(|d| Instant::now() >= d) {
                cut_off = self.patience_ends();
            }
        }
    }

    /// Notes the runtime's end. Returns true if CRIU has ended, too.
    fn over(&mut self) -> bool {
        self.reap();
        if self.code.is_none() {
            return false;
        }
        if !self.orphans() {
            return true;
        }
        if !self.passed && !self.refuse {
            self.refuse = true;
            abort(&self.watch.abort_file);
        }
        false
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
        // CRIU, if it still runs, gets as long as an interrupted operation.
        self.deadline = Some(Instant::now() + self.watch.abort_limit);
    }

    /// Returns true if CRIU still works after the runtime's end. Only for a checkpoint, where this process is the
    /// reaper.
    fn orphans(&self) -> bool {
        self.watch.kind.is_checkpoint() && criu_below(this_process())
    }

    fn signal(&mut self, signal: Signal) {
        if signal == Signal::SIGCHLD {
            return;
        }
        if !INTERRUPTS.contains(&signal) {
            let _ = kill(self.child, signal);
        } else if !self.passed {
            // Not forwarded: the runtime would die, and CRIU go on without it.
            self.interrupt(&format!("it was interrupted by {signal}"));
        } else if self.watch.kind == (RunKind::Restore { detach: false }) {
            let _ = kill(self.child, signal);
        }
    }

    fn interrupt(&mut self, why: &str) {
        if self.interrupted.is_none() {
            tracing::warn!("giving up: {why}");
            self.interrupted = Some(why.to_owned());
            self.deadline = Some(Instant::now() + self.watch.abort_limit);
        }
        abort(&self.watch.abort_file);
    }

    fn questions(&mut self, signals: &Signals, decide: &mut dyn FnMut(&StageQuestion) -> bool) {
        let script = self.watch.action_script;
        script.answer(|question| self.question(question, signals, decide));
    }

    fn question(
        &mut self,
        question: &StageQuestion,
        signals: &Signals,
        decide: &mut dyn FnMut(&StageQuestion) -> bool,
    ) -> bool {
        // The last answer cannot be taken back: whatever came before the question counts.
        while let Some(signal) = signals.next() {
            self.signal(signal);
        }
        self.over();
        let watch = self.watch;
        let last = watch.kind.final_stage();
        let stage = question.stage.as_str();
        self.freeze.at(stage);
        if !watch.kind.is_checkpoint() {
            self.criu.find(this_process());
        }
        // From here on CRIU restores whatever it is answered, so this was no interruption.
        if stage == last && !watch.kind.is_checkpoint() {
            self.interrupted = None;
        }
        let yes = self.interrupted.is_none() && !self.refuse && decide(question);
        tracing::debug!("CRIU at {stage}: {}", if yes { "go on" } else { "stop" });
        if !yes {
            abort(&watch.abort_file);
        } else if stage == last {
            self.passed = true;
            self.deadline = match watch.kind {
                RunKind::Restore { detach: false } => None,
                _ => Some(Instant::now() + watch.limit),
            };
        }
        yes
    }

    /// Ends a checkpoint whose freeze would hang.
    fn stuck_freeze(&mut self) {
        if let Some(process) = self.freeze.end_waiting(this_process()) {
            self.not_frozen = true;
            self.interrupt(&process.to_string());
        }
    }

    /// Ends a checkpoint that would hang because its container was killed.
    fn stuck_kill(&mut self) {
        let init = self.init.as_mut();
        if init.is_some_and(|init| init.end_waiting(this_process())) {
            self.interrupt("the container was killed in the middle of it");
        }
    }

    /// Ends what holds the connection of a killed CRIU open, for which the runtime would wait.
    fn end_orphans(&mut self) {
        let waits = self.code.is_none() && !self.passed;
        if waits
            && self
                .criu
                .end_orphans(self.child.as_raw(), &self.watch.criu_log)
        {
            self.criu_was_killed();
        }
    }

    fn criu_was_killed(&mut self) {
        if self.interrupted.is_none() {
            self.interrupt(CRIU_KILLED);
        }
    }

    /// Ends a restore that would hang: the container waits for a dead CRIU, or CRIU for killed processes.
    fn stuck_restore(&mut self) {
        if self.code.is_some() {
            return;
        }
        if self.criu.end_waiting(this_process()) {
            // Whatever CRIU was answered before: there is no container.
            self.passed = false;
            self.lost_processes = true;
            self.interrupt("the container's processes were killed in the middle of it, and CRIU waited for their end in vain; see the kernel's log for why, memory that ran out for one");
        }
        if !self.passed && self.criu.end_stuck_restore(this_process()) {
            self.criu_was_killed();
        }
    }

    /// Acts on a passed deadline. Returns true if nothing is left to wait for.
    fn patience_ends(&mut self) -> bool {
        if self.code.is_none() && self.interrupted.is_none() && !self.passed {
            let limit = self.watch.limit.as_secs();
            self.interrupt(&format!(
                "it took longer than {limit} s (limits in {})",
                crate::config::PATH
            ));
            return false;
        }
        self.deadline = Some(Instant::now() + self.watch.abort_limit);
        // CRIU asks nothing for long while it writes a large memory, and is not stuck.
        let written = self.watch.images.as_deref().map_or(0, bytes_below);
        if written > self.written {
            self.written = written;
            return false;
        }
        let me = this_process();
        let everybody = live::tree(&Host::system(), me);
        if !self.escalated && self.watch.kind.is_checkpoint() && self.code.is_none() {
            // Without the runtime CRIU's next message to it fails, and CRIU resumes the container.
            self.escalated = true;
            let _ = kill(self.child, Signal::SIGKILL);
            return false;
        }
        for pid in everybody {
            if pid != me && Some(pid) != self.watch.agent {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
        self.killed = true;
        std::thread::sleep(Duration::from_millis(100));
        self.reap();
        true
    }
}

/// Creates the file that tells the plugin to give up.
fn abort(file: &std::path::Path) {
    if let Err(e) = std::fs::File::create(file) {
        tracing::warn!("{}: cannot be made: {e}", file.display());
    }
}
