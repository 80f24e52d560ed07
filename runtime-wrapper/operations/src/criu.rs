//! Gathers facts about this host and its tools, for the metadata and for messages.

pub mod compressed;
pub mod conf;
pub mod elf;
pub mod file;
pub mod helpers;
pub mod opts;
pub mod plugins;
pub mod program;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_archive::metadata::HostFacts;
use cryopod_gpu_plan::checks::cpu;
use cryopod_host::cgroups;
use cryopod_host::files::Host;
use cryopod_host::programs::Tools;

use crate::error::Error;

/// Returns the first line of `PROGRAM --version`, if it answers.
pub fn version_line(tools: &dyn Tools, program: &Path, limit: Duration) -> Option<String> {
    let out = tools
        .output(program, &[OsStr::new("--version")], limit)
        .ok()?;
    Some(out.stdout.lines().next()?.trim().to_owned()).filter(|l| !l.is_empty())
}

/// Parses the dotted version in a line: `[4, 1, 1]` from `Version: 4.1.1`.
pub fn numbers(line: &str) -> Option<Vec<u32>> {
    line.split(|c: char| c.is_whitespace() || c == '-' || c == '+' || c == '~')
        .map(|w| w.trim_start_matches('v'))
        .filter(|w| w.contains('.'))
        .find_map(|w| w.split('.').map(|n| n.parse().ok()).collect())
}

/// The CRIU of this host.
#[derive(Debug, Clone)]
pub struct Criu {
    pub path: PathBuf,
    /// `4.1.1`.
    pub version: Option<String>,
}

/// Finds CRIU on PATH and asks for its version. `limit`: how long it may take to answer.
pub fn find(tools: &dyn Tools, limit: Duration) -> Option<Criu> {
    let path = tools.find("criu")?;
    let version = version_line(tools, &path, limit)
        .as_deref()
        .and_then(numbers)
        .map(|n| n.iter().map(u32::to_string).collect::<Vec<_>>().join("."));
    Some(Criu { path, version })
}

/// What to tell on a host without CRIU.
pub const NO_CRIU: &str = "criu was not found on PATH; install the criu package (4.1 or newer)";

/// Returns the error for a host without CRIU.
pub fn no_criu() -> Error {
    Error::untouched(NO_CRIU)
}

/// Returns what the metadata says of this host: kernel, architecture, cgroup version, CRIU's version.
pub fn host_facts(host: &Host, criu: Option<&Criu>) -> HostFacts {
    let (kernel, arch) = match nix::sys::utsname::uname() {
        Ok(u) => (
            u.release().to_string_lossy().into_owned(),
            u.machine().to_string_lossy().into_owned(),
        ),
        Err(_) => Default::default(),
    };
    HostFacts {
        kernel,
        arch,
        cgroup: cgroups::setup(host).label().to_owned(),
        criu: criu.and_then(|c| c.version.clone()),
        cpu: cpu::features(host).into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_in_lines() {
        for (line, want) in [
            ("Version: 4.1.1", Some(vec![4, 1, 1])),
            ("Version: 4.2", Some(vec![4, 2])),
            ("crun version 1.21", Some(vec![1, 21])),
            ("runc version 1.1.15+ds1", Some(vec![1, 1, 15])),
            ("crun version 1.28-rc", Some(vec![1, 28])),
            ("nothing here.", None),
        ] {
            assert_eq!(numbers(line), want, "{line}");
        }
    }
}
