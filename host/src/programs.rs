//! Finds other programs and runs them within a time limit. Tests replace them.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::limited;

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
        let mut command = Command::new(program);
        let command = command.args(args).env("PATH", &self.search);
        let command = command.stdin(Stdio::null()).stderr(Stdio::piped());
        let said = limited::run(command, None, limit).map_err(|source| match source.kind() {
            io::ErrorKind::TimedOut => ToolError::Timeout {
                program: program.to_owned(),
                args: args.join(OsStr::new(" ")).to_string_lossy().into_owned(),
                limit,
            },
            _ => ToolError::Run {
                program: program.to_owned(),
                source,
            },
        })?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let signal = said.status.signal().unwrap_or(0);
        Ok(Output {
            code: said.status.code().unwrap_or(128 + signal),
            stdout: text(&said.stdout),
            stderr: text(&said.stderr),
        })
    }
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
