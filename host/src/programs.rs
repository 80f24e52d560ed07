//! Finds other programs and runs them within a time limit. Tests replace them.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const MAX_OUTPUT: u64 = 4 << 20;
/// How long the output of a program that has ended may take to end: its children may hold it open.
const REST: Duration = Duration::from_millis(500);

#[derive(Debug, Clone, Default)]
pub struct Output {
    /// Exit code; 128 + the signal's number if one ended it.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    #[error("{program}: cannot be run: {source}")]
    Run { program: PathBuf, source: io::Error },
    /// It did not end in time and was killed.
    #[error("{program} {args}: no answer within {limit:?}; it was killed")]
    Timeout {
        program: PathBuf,
        args: String,
        limit: Duration,
    },
}

pub trait Tools: Sync {
    /// The path of a program; a name with `/` is a path already.
    fn find(&self, name: &str) -> Option<PathBuf>;

    /// Runs a program to its end, with no standard input. Fails if it does not end within `limit`.
    fn output(&self, program: &Path, args: &[&OsStr], limit: Duration)
    -> Result<Output, ToolError>;
}

/// The programs of this host, by a search path.
#[derive(Debug, Clone)]
pub struct SystemTools {
    search: OsString,
}

impl SystemTools {
    /// Searches `$PATH`, or the usual directories if it is unset.
    pub fn from_env() -> Self {
        Self::with_path(std::env::var_os("PATH").unwrap_or_else(|| {
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".into()
        }))
    }

    /// Returns the directories that it searches, as `$PATH` has them.
    pub fn search(&self) -> &OsStr {
        &self.search
    }

    /// Searches the directories of `search`, separated by `:`.
    pub fn with_path(search: impl Into<OsString>) -> Self {
        Self {
            search: search.into(),
        }
    }
}

fn executable(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

impl Tools for SystemTools {
    fn find(&self, name: &str) -> Option<PathBuf> {
        if name.contains('/') {
            let path = PathBuf::from(name);
            return executable(&path).then_some(path);
        }
        std::env::split_paths(&self.search)
            .map(|dir| dir.join(name))
            .find(|p| executable(p))
    }

    fn output(
        &self,
        program: &Path,
        args: &[&OsStr],
        limit: Duration,
    ) -> Result<Output, ToolError> {
        let failed = |source| ToolError::Run {
            program: program.to_owned(),
            source,
        };
        let mut child = Command::new(program)
            .args(args)
            .env("PATH", &self.search)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let readers = (drain(child.stdout.take()), drain(child.stderr.take()));
        let end = Instant::now() + limit;
        let mut pause = Duration::from_micros(200);
        let status = loop {
            if let Some(status) = child.try_wait().map_err(failed)? {
                break status;
            }
            if Instant::now() >= end {
                // Its own children may hold the pipes open; the readers are left to end by themselves.
                let _ = child.kill();
                let _ = child.wait();
                return Err(ToolError::Timeout {
                    program: program.to_owned(),
                    args: args
                        .iter()
                        .map(|a| a.to_string_lossy())
                        .collect::<Vec<_>>()
                        .join(" "),
                    limit,
                });
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(2));
        };
        use std::os::unix::process::ExitStatusExt;
        Ok(Output {
            code: status
                .code()
                .unwrap_or_else(|| 128 + status.signal().unwrap_or(0)),
            stdout: readers.0.text(),
            stderr: readers.1.text(),
        })
    }
}

/// What a thread has read so far.
struct OutputReader {
    bytes: Arc<Mutex<Vec<u8>>>,
    thread: JoinHandle<()>,
}

impl OutputReader {
    fn text(self) -> String {
        let end = Instant::now() + REST;
        while !self.thread.is_finished() && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(200));
        }
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn drain<R: Read + Send + 'static>(pipe: Option<R>) -> OutputReader {
    let bytes = Arc::new(Mutex::new(Vec::new()));
    let read = Arc::clone(&bytes);
    let thread = std::thread::spawn(move || {
        let Some(pipe) = pipe else { return };
        let mut pipe = pipe.take(MAX_OUTPUT);
        let mut part = vec![0; 64 << 10];
        while let Ok(n @ 1..) = pipe.read(&mut part) {
            let mut bytes = read.lock().unwrap_or_else(PoisonError::into_inner);
            bytes.extend_from_slice(&part[..n]);
        }
    });
    OutputReader { bytes, thread }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_limits() {
        let tools = SystemTools::from_env();
        let sh = tools.find("sh").unwrap();
        let run = |script: &str, ms| {
            tools.output(
                &sh,
                &["-c".as_ref(), script.as_ref()],
                Duration::from_millis(ms),
            )
        };
        let out = run("echo out; echo err >&2; exit 3", 5000).unwrap();
        assert_eq!(
            (out.code, out.stdout.as_str(), out.stderr.as_str()),
            (3, "out\n", "err\n")
        );
        assert_eq!(run("kill -9 $$", 5000).unwrap().code, 137);
        let begun = Instant::now();
        assert_eq!(run("echo out; sleep 60 &", 5000).unwrap().stdout, "out\n");
        assert!(begun.elapsed() < Duration::from_secs(30));
        assert!(matches!(
            run("exec sleep 60", 50),
            Err(ToolError::Timeout { .. })
        ));
        assert!(tools.find("no-such-program-here").is_none());
        assert!(SystemTools::with_path("/nowhere").find("sh").is_none());
        assert_eq!(
            SystemTools::with_path("").find("/bin/sh"),
            Some("/bin/sh".into())
        );
    }
}
