//! The action script: lets CRIU ask cryopod before each of its stages, above all before a checkpoint becomes final.
//!
//! CRIU runs the `action-script` of its configuration at each stage and stops with an error if the script fails. At
//! `post-dump` the images are complete but the container still exists: after a failure there it runs on
//! (`cr_dump_finish`). The script is this program under the name [`HOOK_NAME`]. It asks the wrapper through the socket
//! beside it and passes the answer on. If nobody answers (the wrapper was killed), the answer is no.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use crate::error::Error;
use crate::run::operation::Operation;

/// The name under which this program runs as CRIU's action script.
pub const HOOK_NAME: &str = "cryopod-criu-hook";
const SOCKET: &str = "action-script.sock";
/// How long the hook waits for an answer: GPU memory may still be on its way to a slow disk. The wrapper has limits of
/// its own, and the hook notices at once if the wrapper dies.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);

/// The wrapper's end of the action script.
#[derive(Debug)]
pub struct ActionScript {
    listener: UnixListener,
}

impl ActionScript {
    /// Opens the socket in the operation's directory and puts the hook beside it.
    pub fn open(op: &Operation) -> Result<Self, Error> {
        let path = op.file(SOCKET);
        let listener = UnixListener::bind(&path)
            .and_then(|l| l.set_nonblocking(true).map(|()| l))
            .map_err(Error::at(&path, "cannot listen"))?;
        // By process, not by path: a package upgrade may remove the file meanwhile.
        let me = format!("/proc/{}/exe", std::process::id());
        let hook = op.file(HOOK_NAME);
        std::os::unix::fs::symlink(me, &hook).map_err(Error::at(&hook, "cannot be made"))?;
        Ok(Self { listener })
    }

    /// Returns the socket on which CRIU's questions come, to wait for them.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }

    /// Answers every waiting hook. `decide` returns true if CRIU may go on.
    pub fn answer(&self, mut decide: impl FnMut(&StageQuestion) -> bool) {
        while let Ok((stream, _)) = self.listener.accept() {
            if let Err(e) = answer_one(stream, &mut decide) {
                tracing::warn!("CRIU's question could not be answered: {e}");
            }
        }
    }
}

/// What CRIU asks at a stage.
#[derive(Debug, PartialEq, Eq)]
pub struct StageQuestion {
    pub stage: String,
    /// The container's init process in CRIU's PID namespace; 0: not known.
    pub init: i32,
}

impl StageQuestion {
    fn parse(line: &str) -> Self {
        let (stage, init) = line.split_once(' ').unwrap_or((line, ""));
        Self {
            stage: stage.to_owned(),
            init: init.parse().unwrap_or(0),
        }
    }
}

fn answer_one(
    mut stream: UnixStream,
    decide: &mut impl FnMut(&StageQuestion) -> bool,
) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.set_write_timeout(Some(Duration::from_secs(5)))?;
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() < 64 && stream.read(&mut byte)? == 1 && byte[0] != b'\n' {
        line.push(byte[0]);
    }
    let yes = decide(&StageQuestion::parse(&String::from_utf8_lossy(&line)));
    stream.write_all(if yes { b"y" } else { b"n" })
}

/// A stage of CRIU, as its action script sees it.
#[derive(Debug)]
pub struct Stage {
    pub name: String,
    /// The container's init process in CRIU's PID namespace; 0: not known.
    pub init: i32,
}

impl Stage {
    /// Reads what CRIU tells its action script.
    pub fn from_env() -> Self {
        let pid = std::env::var("CRTOOLS_INIT_PID").ok();
        Self {
            name: std::env::var("CRTOOLS_SCRIPT_ACTION").unwrap_or_default(),
            init: pid.and_then(|p| p.parse().ok()).unwrap_or(0),
        }
    }

    /// Asks the wrapper of the operation in this directory. Returns true if CRIU may go on.
    pub fn ask(&self, directory: &Path) -> io::Result<bool> {
        ask(&directory.join(SOCKET), &self.name, self.init)
    }
}

fn ask(socket: &Path, stage: &str, init: i32) -> io::Result<bool> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(format!("{stage} {init}\n").as_bytes())?;
    let mut answer = [0];
    stream.read_exact(&mut answer)?;
    Ok(answer[0] == b'y')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn questions_and_answers() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join(SOCKET);
        assert!(ask(&socket, "post-dump", 7).is_err(), "nobody there is no");
        let listener = UnixListener::bind(&socket).unwrap();
        let action_script = ActionScript { listener };
        let server = std::thread::spawn(move || {
            action_script.listener.set_nonblocking(false).unwrap();
            for _ in 0..2 {
                let (stream, _) = action_script.listener.accept().unwrap();
                answer_one(stream, &mut |q| q.stage == "pre-dump" && q.init == 7).unwrap();
            }
        });
        assert!(ask(&socket, "pre-dump", 7).unwrap());
        assert!(!ask(&socket, "post-dump", 7).unwrap());
        server.join().unwrap();
    }
}
