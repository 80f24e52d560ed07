//! Finds and runs the programs underneath: containerd's own shim, and cryopod-runtime.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cryopod_host::limited;

use crate::Error;
use crate::options::DEFAULT_LOW_LEVEL;

/// The stock shim's path, if it is not on PATH.
pub const ENV: &str = "CRYOPOD_STOCK_SHIM";
/// cryopod-runtime's path, if it is not on PATH.
pub const RUNTIME_ENV: &str = "CRYOPOD_RUNTIME";
/// The environment variable that tells cryopod-runtime its low-level runtime.
pub const LOW_LEVEL_ENV: &str = "CRYOPOD_LOW_LEVEL_RUNTIME";
const NAME: &str = "containerd-shim-runc-v2";
const RUNTIME: &str = "cryopod-runtime";

/// Finds containerd's own shim.
pub fn shim() -> Result<PathBuf, Error> {
    find(ENV, NAME).ok_or(Error::NoStockShim)
}

/// Finds cryopod-runtime.
pub fn runtime() -> Result<PathBuf, Error> {
    find(RUNTIME_ENV, RUNTIME).ok_or(Error::NoRuntime)
}

/// Returns the low-level runtime in the environment; else runc, as with the stock shim.
pub fn inherited_low_level() -> OsString {
    std::env::var_os(LOW_LEVEL_ENV)
        .filter(|v| !v.is_empty())
        .unwrap_or_else(|| DEFAULT_LOW_LEVEL.into())
}

/// Searches the environment variable, then this program's directory, then PATH.
fn find(variable: &str, name: &str) -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(variable).filter(|v| !v.is_empty()) {
        return Some(PathBuf::from(path)).filter(|p| is_program(p));
    }
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(|d| d.join(name));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path = std::env::split_paths(&path).map(|d| d.join(name));
    let found = beside.into_iter().chain(on_path);
    // If installed in place of the stock shim, this program would find itself.
    let is_own = |p: &PathBuf| own.is_some() && p.canonicalize().ok() == own;
    found.into_iter().find(|p| is_program(p) && !is_own(p))
}

/// Returns true if this program was started in place of the stock shim, by a link of its name. Then containers keep the
/// OCI runtime that their engine names.
pub fn in_place(called_as: Option<&OsStr>) -> bool {
    called_as.map(Path::new).and_then(Path::file_name) == Some(NAME.as_ref())
}

fn is_program(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

#[derive(Debug)]
pub struct StockAnswer {
    pub stdout: Vec<u8>,
    /// 1 for a signal.
    pub code: u8,
}

/// Time limit for the stock shim's `start`, `delete` or `-info`. It answers at once, and containerd itself gives
/// `delete` five seconds.
const ANSWER: Duration = Duration::from_secs(60);

/// Runs the stock shim with our own arguments, working directory, environment and standard error.
pub fn run(args: &[OsString], env: &[(&str, &OsStr)], stdin: &[u8]) -> Result<StockAnswer, Error> {
    let program = shim()?;
    let mut command = Command::new(&program);
    command.args(args).envs(env.iter().copied());
    let said = limited::run(&mut command, Some(stdin), ANSWER).map_err(|e| {
        let what = match e.kind() {
            io::ErrorKind::TimedOut => {
                "try again, or see what hangs in `containerd-shim-runc-v2 -info`"
            }
            _ => "is it containerd's own shim, for this machine?",
        };
        Error::io(format!("{} cannot be run ({what})", program.display()))(e)
    })?;
    let code = said
        .status
        .code()
        .and_then(|c| u8::try_from(c).ok())
        .unwrap_or(1);
    let stdout = said.stdout;
    Ok(StockAnswer { stdout, code })
}
