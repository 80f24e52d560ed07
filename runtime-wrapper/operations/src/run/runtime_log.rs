//! Keeps crun's log of an operation apart until the operation has ended.
//!
//! crun from 1.23 on copies every line of CRIU's log with the word "Error" to its own, the harmless first one included
//! (`Can't setup RLIMIT_NOFILE`), and podman shows the first error of that log as the reason. So crun logs to a file of
//! the operation. After a success its lines are copied to the engine's log. After a failure the only error there is
//! this program's, which includes crun's reason and CRIU's: podman reads a one-line log.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use nix::sys::memfd::{MFdFlags, memfd_create};
use serde_json::Value;

use crate::request::argv::Invocation;
use crate::request::lowlevel::{LowLevel, RuntimeKind};
use crate::run::failure::records;
use crate::run::operation::Operation;

const FILE: &str = "runtime.log";
const MAX: u64 = 4 << 20;

/// The file that crun logs to, and the engine's log.
#[derive(Debug)]
pub struct RuntimeLog {
    apart: PathBuf,
    engine: PathBuf,
}

impl RuntimeLog {
    /// Changes the command line; `None` where the runtime may write to the engine's log directly.
    pub fn apart(
        op: &Operation,
        low: &LowLevel,
        inv: &Invocation,
        args: &mut [OsString],
    ) -> Option<Self> {
        let engine = inv
            .globals
            .log
            .clone()
            .filter(|_| low.kind == RuntimeKind::Crun)?;
        let apart = op.file(FILE);
        replace(args, inv.verb_at, &engine, &apart).then_some(Self { apart, engine })
    }

    /// Returns crun's last error, if it says more than that CRIU failed.
    pub fn own_error(&self) -> Option<String> {
        let text = self.read().ok()?;
        let mut said = records(&text).into_iter().rev().filter_map(said);
        said.find(|s| own(s))
    }

    /// Copies the lines to the engine's log, after a success.
    pub fn hand_on(&self) {
        if let Err(e) = self.read().and_then(|text| self.append(&text)) {
            tracing::debug!("{}: {e}", self.engine.display());
        }
    }

    fn read(&self) -> io::Result<String> {
        let mut text = Vec::new();
        let file = File::open(&self.apart)?;
        file.take(MAX).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn append(&self, text: &str) -> io::Result<()> {
        let mut options = OpenOptions::new();
        let mut file = options.append(true).create(true).open(&self.engine)?;
        file.write_all(text.as_bytes())
    }
}

/// What the low-level runtime writes to standard error, kept until this program has said why it failed: containerd's own
/// shim shows the engine the first line alone, and runc's is `criu failed: type NOTIFY errno 0`.
#[derive(Debug)]
pub struct HeldErrors(File);

impl HeldErrors {
    /// Returns the file for the low-level runtime, too.
    pub fn new() -> io::Result<(Self, File)> {
        let file: File = memfd_create("cryopod-errors", MFdFlags::MFD_CLOEXEC)?.into();
        Ok((Self(file.try_clone()?), file))
    }

    /// What was written.
    pub fn text(&self) -> String {
        let path = format!("/proc/self/fd/{}", self.0.as_raw_fd());
        let mut text = Vec::new();
        // Opened anew: the low-level runtime has left the other one at its end.
        if let Err(e) = File::open(&path).and_then(|file| file.take(MAX).read_to_end(&mut text)) {
            tracing::debug!("{path}: {e}");
        }
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Passes the kept messages on to where the engine looks for them.
    pub fn hand_on(&self) {
        if let Err(e) = io::stderr().lock().write_all(self.text().as_bytes()) {
            tracing::debug!("standard error: {e}");
        }
    }
}

fn said(record: &str) -> Option<String> {
    match serde_json::from_str::<Value>(record) {
        Ok(json) if json.get("level")? == "error" => Some(json.get("msg")?.as_str()?.to_owned()),
        Ok(_) => None,
        Err(_) => Some(record.split_once("level=error")?.1.trim().to_owned()),
    }
}

/// Returns false for lines of CRIU's log and for "CRIU failed": both are reported elsewhere.
fn own(said: &str) -> bool {
    !["(", "--- ", "CRIU "]
        .iter()
        .any(|start| said.starts_with(start))
}

/// Replaces the value of `--log` among the global flags.
fn replace(args: &mut [OsString], verb_at: usize, old: &Path, new: &Path) -> bool {
    let mut found = false;
    let mut flag = false;
    for arg in args.iter_mut().take(verb_at) {
        if flag && Path::new(arg) == old {
            *arg = new.into();
            found = true;
        }
        flag = arg == "--log";
        let joined = arg.to_str().and_then(|a| a.strip_prefix("--log="));
        if joined.is_some_and(|value| Path::new(value) == old) {
            let mut with = OsString::from("--log=");
            with.push(new);
            *arg = with;
            found = true;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_of_the_global_flag() {
        let replaced = |line: &str, verb_at| {
            let mut args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            let found = replace(&mut args, verb_at, Path::new("/e/log"), Path::new("/o"));
            let args: Vec<_> = args
                .iter()
                .map(|a| a.to_str().unwrap().to_owned())
                .collect();
            found.then(|| args.join(" "))
        };
        assert_eq!(
            replaced("--log-format json --log /e/log restore c1", 4).unwrap(),
            "--log-format json --log /o restore c1"
        );
        assert_eq!(
            replaced("--log=/e/log restore c1", 1).unwrap(),
            "--log=/o restore c1"
        );
        assert_eq!(replaced("restore --log /e/log", 0), None);
    }

    #[test]
    fn what_crun_says_itself() {
        let line = |msg: &str| said(&serde_json::json!({"msg": msg, "level": "error"}).to_string());
        assert!(own(&line("error opening `/x`").unwrap()));
        for others in [
            "(00.1) Error (x.c:1): y",
            "--- end of excerpt",
            "CRIU restoring failed: -52",
        ] {
            assert!(!own(&line(others).unwrap()));
        }
        assert_eq!(said(r#"{"msg":"x","level":"warning"}"#), None);
    }
}
