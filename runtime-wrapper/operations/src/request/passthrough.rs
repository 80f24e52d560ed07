//! Execs the low-level runtime.

use std::ffi::{CString, OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;

use crate::error::Error;
use crate::request::lowlevel::LowLevel;

/// Replaces this process by the low-level runtime with these arguments. Descriptors that are not
/// close-on-exec, the environment, the signal mask, the working directory and the process id stay. Returns only
/// the reason why it failed.
pub fn exec(low: &LowLevel, args: &[OsString]) -> Error {
    let failed = |source| Error::Io {
        what: format!("{}: cannot be started", low.path.display()),
        source,
    };
    let word = |s: &OsStr| CString::new(s.as_bytes()).map_err(io::Error::from);
    let prepared = word(low.path.as_os_str()).and_then(|path| {
        let argv: Result<Vec<CString>, io::Error> = std::iter::once(low.name.as_os_str())
            .chain(args.iter().map(OsString::as_os_str))
            .map(word)
            .collect();
        Ok((path, argv?))
    });
    let (path, argv) = match prepared {
        Ok(p) => p,
        Err(e) => return failed(e),
    };
    // Rust's start-up ignores SIGPIPE, and that would outlive the exec: runc and crun must meet the default.
    // SAFETY: a plain system call that touches no memory of ours.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
    match nix::unistd::execv(&path, &argv) {
        Ok(never) => match never {},
        Err(e) => failed(e.into()),
    }
}
