//! Runs other programs, with a time limit each.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::{Pid, getpgid};

/// Most bytes that are kept of each output. The rest is read, too: the program goes on.
const KEPT: u64 = 4 << 20;
/// The longest pause between two checks whether a program has ended.
const PAUSE: Duration = Duration::from_millis(5);
/// How long the output of a program that has ended may take to end: its children may hold it open.
const REST: Duration = Duration::from_millis(500);
/// How long the thread that reads it may take for what is in the pipe already, where the machine is busy.
const LATE: Duration = Duration::from_secs(10);

/// The longest limit. `Instant` does not reach those that a stranger may state, as OCI's hooks do.
const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long a program may run.
#[derive(Debug, Clone, Copy)]
pub struct ProgramLimit {
    pub time: Duration,
    /// How long it may take to end after SIGTERM. Zero: it is killed at once.
    pub grace: Duration,
}

impl From<Duration> for ProgramLimit {
    fn from(time: Duration) -> Self {
        let grace = Duration::ZERO;
        Self { time, grace }
    }
}

/// Runs a program to its end, and returns what it prints; its standard error if that is a pipe in `command`. Passes it
/// `stdin`, or leaves it what `command` has. Ends it after the limit; if it leads a process group, all of that.
///
/// # Errors
/// It cannot be run; [`io::ErrorKind::TimedOut`].
pub fn run(
    command: &mut Command,
    stdin: Option<&[u8]>,
    limit: impl Into<ProgramLimit>,
) -> io::Result<Output> {
    let limit = limit.into();
    let until = end_of(limit.time);
    if stdin.is_some() {
        command.stdin(Stdio::piped());
    }
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    if let (Some(mut input), Some(stdin)) = (child.stdin.take(), stdin) {
        let stdin = stdin.to_vec();
        // A program that does not read its input does not need it.
        thread::spawn(move || input.write_all(&stdin));
    }
    let (out, err) = (drain(child.stdout.take()), drain(child.stderr.take()));
    if let Some(status) = ended(&mut child, until)? {
        return Ok(Output {
            status,
            stdout: out.bytes(),
            stderr: err.bytes(),
        });
    }
    if !limit.grace.is_zero() {
        let _ = kill(pid(&child), Signal::SIGTERM);
        ended(&mut child, end_of(limit.grace))?;
    }
    Err(give_up(&mut child, limit.time))
}

fn end_of(limit: Duration) -> Instant {
    Instant::now() + limit.min(LONGEST)
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX))
}

fn ended(child: &mut Child, until: Instant) -> io::Result<Option<ExitStatus>> {
    let mut pause = Duration::from_micros(200);
    loop {
        let status = child.try_wait()?;
        if status.is_some() || Instant::now() >= until {
            return Ok(status);
        }
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSE);
    }
}

/// Asks again after each `pause` until it is so, and returns true, or until the time is up.
pub fn wait_until(limit: Duration, pause: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let end = end_of(limit);
    loop {
        if is_so() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        thread::sleep(pause);
    }
}

/// What a thread has read so far.
struct OutputReader {
    read: Arc<Mutex<Vec<u8>>>,
    /// The pipe once more: it shows what the thread has not read yet.
    pipe: Option<OwnedFd>,
    thread: JoinHandle<()>,
}

impl OutputReader {
    fn bytes(self) -> Vec<u8> {
        wait_until(REST, Duration::from_micros(200), || {
            self.thread.is_finished()
        });
        wait_until(LATE, Duration::from_millis(1), || {
            self.thread.is_finished() || self.has_all()
        });
        std::mem::take(&mut *self.read.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Returns true if nothing is in the pipe, which a child may hold open.
    fn has_all(&self) -> bool {
        let pipe = self.pipe.as_ref();
        pipe.is_none_or(|pipe| !has_more(pipe.as_fd(), PollTimeout::ZERO))
    }
}

/// Waits for a pipe to have data or to be closed; false if it has neither in time.
fn has_more(pipe: BorrowedFd<'_>, limit: PollTimeout) -> bool {
    loop {
        match poll(&mut [PollFd::new(pipe, PollFlags::POLLIN)], limit) {
            Err(Errno::EINTR) => {}
            ready => return ready != Ok(0),
        }
    }
}

fn drain<R: Read + AsFd + Send + 'static>(pipe: Option<R>) -> OutputReader {
    let read = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&read);
    let copy = pipe.as_ref().map(|pipe| pipe.as_fd().try_clone_to_owned());
    let thread = thread::spawn(move || {
        let Some(mut pipe) = pipe else { return };
        let mut part = vec![0; 64 << 10];
        while has_more(pipe.as_fd(), PollTimeout::NONE) {
            // Whoever finds the pipe empty finds here what was in it.
            let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            let Ok(n @ 1..) = pipe.read(&mut part) else {
                return;
            };
            let room = (KEPT as usize).saturating_sub(kept.len());
            kept.extend_from_slice(&part[..n.min(room)]);
        }
    });
    let pipe = copy.and_then(Result::ok);
    OutputReader { read, pipe, thread }
}

/// Does work that may hang because of a child; kills the child after the limit.
///
/// # Errors
/// The work's own; [`io::ErrorKind::TimedOut`].
pub fn within<T: Send + 'static>(
    child: &mut Child,
    until: Instant,
    limit: Duration,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let (done, answer) = mpsc::sync_channel(1);
    thread::Builder::new().spawn(move || {
        let _ = done.send(work());
    })?;
    let left = until.saturating_duration_since(Instant::now());
    answer
        .recv_timeout(left)
        .unwrap_or_else(|_| Err(give_up(child, limit)))
}

fn give_up(child: &mut Child, limit: Duration) -> io::Error {
    if let Ok(None) = child.try_wait() {
        let pid = pid(child);
        if getpgid(Some(pid)) == Ok(pid) {
            let _ = killpg(pid, Signal::SIGKILL);
        }
        let _ = child.kill();
        let _ = child.wait();
    }
    let what = format!("no answer within {limit:?}; it was ended");
    io::Error::new(io::ErrorKind::TimedOut, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::CommandExt;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(50);

    fn sh(script: &str, stdin: &[u8], limit: impl Into<ProgramLimit>) -> io::Result<Output> {
        let mut command = Command::new("sh");
        run(
            command.args(["-c", script]).process_group(0),
            Some(stdin),
            limit,
        )
    }

    #[test]
    fn what_it_is_told_and_says() {
        let said = sh("cat; exit 3", b"told", LONG).unwrap();
        assert_eq!(
            (said.status.code(), &said.stdout[..]),
            (Some(3), &b"told"[..])
        );
        // Far more than a pipe takes, and nobody reads it.
        let said = sh("exit 0", &vec![0; 1 << 20], LONG).unwrap();
        assert!(said.status.success());
        sh("exit 0", b"", Duration::MAX).unwrap();
        let much = sh("head -c 20000000 /dev/zero", b"", LONG).unwrap();
        assert_eq!(
            (much.status.code(), much.stdout.len()),
            (Some(0), KEPT as usize)
        );
        // A child that goes on has the pipe.
        let said = sh("echo out; sleep 600 & echo $!", b"", LONG).unwrap();
        let text = String::from_utf8(said.stdout).unwrap();
        let (first, child) = text.trim().split_once('\n').unwrap();
        assert_eq!(first, "out");
        kill(Pid::from_raw(child.parse().unwrap()), Signal::SIGKILL).unwrap();
    }

    #[test]
    fn what_hangs_is_killed() {
        for hangs in ["sleep 1000 & sleep 1000", "exec >&-; exec sleep 1000"] {
            let e = sh(hangs, &vec![0; 1 << 20], SHORT).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::TimedOut, "{e}");
        }
        let dir = tempfile::tempdir().unwrap();
        let told = dir.path().join("told");
        let script = format!(
            "trap 'kill $!; touch {}; exit' TERM; sleep 1000 & wait",
            told.display()
        );
        let (time, grace) = (Duration::from_secs(3), LONG); // it has its trap by then
        sh(&script, b"", ProgramLimit { time, grace }).unwrap_err();
        assert!(told.exists());
    }
}
