//! Runs other programs, with a time limit each.

use std::io::{self, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

const MAX_BYTES: u64 = 4 << 20;
/// The longest pause between two checks whether a program has ended.
const PAUSE: Duration = Duration::from_millis(5);

/// Runs a program to its end. Passes it `stdin`, and returns what it prints; its standard error is as `command` has it.
/// Kills it after `limit`, but not its children.
///
/// # Errors
/// It cannot be run; [`io::ErrorKind::TimedOut`].
pub fn run(
    command: &mut Command,
    stdin: &[u8],
    limit: Duration,
) -> io::Result<(ExitStatus, Vec<u8>)> {
    let until = Instant::now() + limit;
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let (input, output) = (child.stdin.take(), child.stdout.take());
    let stdin = stdin.to_vec();
    let said = within(&mut child, until, limit, move || {
        // A program that does not read its input does not need it.
        if let Some(mut input) = input {
            let _ = input.write_all(&stdin);
        }
        let mut bytes = Vec::new();
        if let Some(output) = output {
            output.take(MAX_BYTES).read_to_end(&mut bytes)?;
        }
        Ok(bytes)
    })?;
    let mut pause = Duration::from_micros(200);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok((status, said));
        }
        if Instant::now() >= until {
            return Err(give_up(&mut child, limit));
        }
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSE);
    }
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
    let _ = child.kill();
    let _ = child.wait();
    let what = format!("no answer within {} s, it was killed", limit.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(60);
    const SHORT: Duration = Duration::from_millis(50);

    fn sh(script: &str, stdin: &[u8], limit: Duration) -> io::Result<(ExitStatus, Vec<u8>)> {
        run(Command::new("sh").args(["-c", script]), stdin, limit)
    }

    #[test]
    fn what_it_is_told_and_says() {
        let (status, said) = sh("cat; exit 3", b"told", LONG).unwrap();
        assert_eq!((status.code(), said.as_slice()), (Some(3), &b"told"[..]));
        // Far more than a pipe takes, and nobody reads it.
        let (status, _) = sh("exit 0", &vec![0; 1 << 20], LONG).unwrap();
        assert!(status.success());
    }

    #[test]
    fn what_hangs_is_killed() {
        for hangs in ["exec sleep 1000", "exec >&-; exec sleep 1000"] {
            let e = sh(hangs, &vec![0; 1 << 20], SHORT).unwrap_err();
            assert_eq!(e.kind(), io::ErrorKind::TimedOut, "{e}");
        }
    }
}
