//! Gathers facts about this host and its tools, for the metadata and for messages.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use cryopod_archive::metadata::HostFacts;
use cryopod_host::files::Host;
use cryopod_host::programs::Tools;

use crate::child::Ended;
use crate::lowlevel::LowLevel;
use crate::reasons::Before;
use cryopod_host::cgroups;

/// Formats a time as the metadata and the logs write it: RFC 3339, UTC, whole seconds.
pub fn rfc3339(time: SystemTime) -> String {
    let whole = time
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs();
    i64::try_from(whole)
        .ok()
        .and_then(|s| time::OffsetDateTime::from_unix_timestamp(s).ok())
        .and_then(|t| {
            t.format(&time::format_description::well_known::Rfc3339)
                .ok()
        })
        .unwrap_or_else(|| format!("{whole} seconds after 1970"))
}

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

#[derive(Debug, Clone)]
pub struct Criu {
    pub path: PathBuf,
    /// `4.1.1`.
    pub version: Option<String>,
}

pub fn criu(tools: &dyn Tools, limit: Duration) -> Option<Criu> {
    let path = tools.find("criu")?;
    let version = version_line(tools, &path, limit)
        .as_deref()
        .and_then(numbers)
        .map(|n| n.iter().map(u32::to_string).collect::<Vec<_>>().join("."));
    Some(Criu { path, version })
}

pub fn host(host: &Host, criu: Option<&Criu>) -> HostFacts {
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
    }
}

/// Returns the first real error in a CRIU log. CRIU logs some failures as errors that are harmless: it tries to raise a
/// limit and to join cgroups as far as it is allowed. Its helper for cgroups complains when CRIU has given up, which may
/// come before the reason.
pub fn first_criu_error(log: &Path) -> Option<String> {
    let text = std::fs::read(log).ok()?;
    let text = String::from_utf8_lossy(&text);
    const HARMLESS: [&str; 3] = [
        "RLIMIT_NOFILE",
        "Can't setup RLIMIT",
        "cgroupd: recv req error",
    ];
    let harmless = |l: &str| HARMLESS.iter().any(|h| l.contains(h));
    text.lines()
        .filter(|l| l.contains("Error (") && !harmless(l))
        .map(|l| {
            l.find("Error (")
                .and_then(|i| l.get(i..))
                .unwrap_or(l)
                .trim()
                .to_owned()
        })
        .next()
}

/// Returns a message if the file system of a directory has no room left.
pub fn full_disk(dir: &Path) -> Option<String> {
    let stat = nix::sys::statvfs::statvfs(dir).ok()?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    (free < (64 << 10)).then(|| {
        format!(
            "the file system of {} is full; free some space or choose another directory",
            dir.display()
        )
    })
}

/// Sums the files of an image directory and its subdirectories, in bytes.
pub fn directory_bytes(dir: &Path) -> u64 {
    let bytes_of = |dir: &Path, below: &dyn Fn(&Path) -> u64| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let sizes = entries.filter_map(|e| match e.metadata() {
            Ok(meta) if meta.is_dir() => Some(below(&e.path())),
            Ok(meta) if meta.is_file() => Some(meta.len()),
            _ => None,
        });
        sizes.sum()
    };
    bytes_of(dir, &|directory| bytes_of(directory, &|_| 0))
}

/// Returns why an operation failed: the interruption, else the known reasons and CRIU's first error, else the low-level
/// runtime's own error. It repeats the latter because some engines read only the last error of a log.
pub fn why(low: &LowLevel, ended: &Ended, mut reasons: Vec<String>, before: &Before) -> String {
    if let Some(interruption) = &ended.interrupted {
        return interruption.clone();
    }
    if let Some(log) = before.criu_log()
        && let Some(error) = first_criu_error(log)
    {
        reasons.push(format!("CRIU: {error} (log: {})", log.display()));
    }
    if reasons.is_empty()
        && let Some(error) = before.runtime_error()
    {
        reasons.push(format!("{}: {error}", low.label()));
    }
    if reasons.is_empty() {
        reasons.push(format!("{} ended with code {}", low.label(), ended.code));
    }
    reasons.join("; ")
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

    #[test]
    fn the_first_real_error() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("dump.log");
        std::fs::write(&log, "(00.1) Warn  (criu/x.c:1): careful\n(00.2) Error (criu/util.c:9): Can't setup RLIMIT_NOFILE for self: Operation not permitted\n(00.2) Error (criu/cgroup.c:8): cg: cgroupd: recv req error: No such file or directory\n(00.3) Error (criu/files.c:2): Can't lookup mount=46 for fd=1\n(00.4) Error (criu/cr-dump.c:3): Dumping FAILED.\n").unwrap();
        assert_eq!(
            first_criu_error(&log).unwrap(),
            "Error (criu/files.c:2): Can't lookup mount=46 for fd=1"
        );
        assert_eq!(first_criu_error(&dir.path().join("none")), None);
    }

    #[test]
    fn what_a_directory_holds() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("pages-1.img"), [0; 100]).unwrap();
        std::fs::create_dir(dir.path().join("vram")).unwrap();
        std::fs::write(dir.path().join("vram/0"), [0; 11]).unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        assert_eq!(directory_bytes(dir.path()), 111);
        assert_eq!(directory_bytes(&dir.path().join("none")), 0);
    }

    #[test]
    fn times() {
        assert_eq!(
            rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)),
            "2001-09-09T01:46:40Z"
        );
    }
}
