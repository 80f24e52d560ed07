//! Quotes what CRIU and the low-level runtime report about a failure of this operation.
//!
//! An engine reuses work directories and logs, so both hold messages of earlier operations. [`LogMarks::note`] notes
//! their state before the low-level runtime starts; only what was written since is quoted.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use serde_json::{Deserializer, Map, Value};

use crate::request::argv::Globals;
use crate::request::lowlevel::LowLevel;
use crate::run::child::{CRIU_KILLED, RunOutcome};

const MAX_READ: u64 = 1 << 20;
const OURS: &str = "cryopod: ";

/// What to do about errors of CRIU's restore that no check foresees: a part of the message, and the remedy.
const REMEDIES: [(&str, &str); 9] = [
    (
        " has bad size ",
        "that file is not the checkpoint's: use the same image (by its digest, not a tag that has moved) and the same volumes",
    ),
    (
        "has bad build-ID",
        "that file is not the checkpoint's: use the same image (by its digest, not a tag that has moved) and the same volumes",
    ),
    (
        "Address already in use",
        "another process has that address or port (`ss -lnp` shows it): end it",
    ),
    (
        "Cannot assign requested address",
        "the container had another address: give it the same",
    ),
    (
        " killed by signal 9",
        "something killed the process: often the memory limit, of the container or of a cgroup above (`dmesg` says so)",
    ),
    (
        "No space left on device",
        "a tmpfs or disk of the new container is smaller than the checkpoint's, or is full",
    ),
    (
        "Read-only file system",
        "a file that a process writes is read-only now: mount it as at the checkpoint",
    ),
    (
        "Resource temporarily unavailable",
        "raise the limit of processes: of the container, of its user (nproc), of a cgroup above",
    ),
    (
        "Cannot allocate memory",
        "free memory, or raise the container's limit, vm.max_map_count or vm.overcommit_memory",
    ),
];

/// How long the logs were before the run.
#[derive(Debug)]
pub struct LogMarks {
    criu_log: PathBuf,
    stamp: Option<Stamp>,
    /// The file of `--log`, and its length.
    runtime_log: Option<(PathBuf, u64)>,
}

/// Changes when a file is written or replaced: inode, length, time of the last change.
type Stamp = (u64, u64, i64, i64);

fn stamp(path: &Path) -> Option<Stamp> {
    let meta = fs::metadata(path).ok()?;
    Some((meta.ino(), meta.len(), meta.ctime(), meta.ctime_nsec()))
}

impl LogMarks {
    /// Notes the state of CRIU's log and of the log that the command line names.
    pub fn note(criu_log: PathBuf, globals: &Globals) -> Self {
        let length = |path: &PathBuf| fs::metadata(path).map_or(0, |m| m.len());
        Self {
            stamp: stamp(&criu_log),
            criu_log,
            runtime_log: globals.log.as_ref().map(|p| (p.clone(), length(p))),
        }
    }

    /// Returns CRIU's log, if CRIU has written to it since.
    pub fn criu_log(&self) -> Option<&Path> {
        let now = stamp(&self.criu_log)?;
        (Some(now) != self.stamp).then_some(&*self.criu_log)
    }

    /// Returns the last error that the low-level runtime has written since to the log that its engine reads. `None`
    /// without such a log: then it went to standard error, where the engine sees it beside ours.
    pub fn runtime_error(&self) -> Option<String> {
        let (path, offset) = self.runtime_log.as_ref()?;
        let mut file = File::open(path).ok()?;
        // Shorter than before: the runtime began a new one.
        let from = if file.metadata().ok()?.len() < *offset {
            0
        } else {
            *offset
        };
        file.seek(SeekFrom::Start(from)).ok()?;
        let mut bytes = Vec::new();
        file.take(MAX_READ).read_to_end(&mut bytes).ok()?;
        last_error(&String::from_utf8_lossy(&bytes))
    }
}

fn last_error(text: &str) -> Option<String> {
    let mut errors = records(text).into_iter().rev().filter_map(error_of);
    errors.find(|message| !message.starts_with(OURS))
}

/// Splits a runtime's log into its messages: each a line, or a JSON object, which crun 1.28 and newer write in several
/// lines.
pub fn records(text: &str) -> Vec<&str> {
    let mut records = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let line = rest.find('\n').unwrap_or(rest.len());
        let mut objects = Deserializer::from_str(rest).into_iter::<Map<String, Value>>();
        let end = match rest.starts_with('{').then(|| objects.next()) {
            Some(Some(Ok(_))) => objects.byte_offset(),
            _ => line,
        };
        let (record, after) = rest.split_at(end);
        records.push(record);
        rest = after.trim_start();
    }
    records
}

/// Returns the text of a message, if it is an error: JSON, logrus's text, or crun's text (time and message).
fn error_of(line: &str) -> Option<String> {
    let line = line.trim();
    let message = if line.starts_with('{') {
        let json: Value = serde_json::from_str(line).ok()?;
        // crun before 1.9 wrote no level, and errors only.
        let level = json.get("level").and_then(|l| l.as_str());
        level
            .is_none_or(|l| matches!(l, "error" | "fatal" | "panic"))
            .then(|| json.get("msg")?.as_str().map(str::to_owned))?
    } else if line.starts_with("time=") {
        let error = ["level=error ", "level=fatal "];
        error
            .iter()
            .any(|level| line.contains(level))
            .then(|| logrus_message(line))?
    } else {
        let message = line.split_once("Z: ").map_or(line, |(_, rest)| rest);
        let noise = ["[warning]", "warning", "[debug]", "debug"];
        (!noise.iter().any(|n| message.starts_with(n))).then(|| message.to_owned())
    };
    message
        .map(|m| m.trim().to_owned())
        .filter(|m| !m.is_empty())
}

/// Returns the value of `msg=`, quoted as Go does where it has more than a word.
fn logrus_message(line: &str) -> Option<String> {
    let rest = line.split_once(" msg=")?.1;
    let Some(quoted) = rest.strip_prefix('"') else {
        return rest.split(' ').next().map(str::to_owned);
    };
    let mut out = String::new();
    let mut chars = quoted.chars();
    while let Some(c) = chars.next() {
        match c {
            '"' => break,
            '\\' => match chars.next()? {
                'n' | 't' => out.push(' '),
                other => out.push(other),
            },
            c => out.push(c),
        }
    }
    Some(out)
}

/// Returns the first real error in a CRIU log. CRIU logs some failures as errors that are harmless: it tries to raise a
/// limit and to join cgroups as far as it is allowed. Its helper for cgroups complains when CRIU has given up, which may
/// come before the reason. How a program ended comes before the line that names the program.
pub fn first_criu_error(log: &Path) -> Option<String> {
    let text = std::fs::read(log).ok()?;
    let text = String::from_utf8_lossy(&text);
    const HARMLESS: [&str; 4] = [
        "RLIMIT_NOFILE",
        "Can't setup RLIMIT",
        "cgroupd: recv req error",
        ": exited, status=",
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

/// Returns true if CRIU has begun this log and not ended it.
fn cut_off(log: &Path) -> bool {
    let text = std::fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let ends = ["FAILED", "finished successfully"];
    !text.is_empty() && !ends.iter().any(|end| text.contains(end))
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

/// Returns why an operation failed: the interruption, else the known reasons and CRIU's first error, else the low-level
/// runtime's own error. It repeats the latter because some engines read only the last error of a log, and containerd's
/// shim the first line. `held`: what the runtime has written to standard error.
pub fn describe(
    low: &LowLevel,
    ended: &RunOutcome,
    mut reasons: Vec<String>,
    before: &LogMarks,
    held: &str,
) -> String {
    if let Some(interruption) = &ended.interrupted {
        return interruption.clone();
    }
    if let Ok(signal) = Signal::try_from(ended.code - 128) {
        reasons.push(format!("{} was ended by {signal}", low.label()));
    }
    if let Some(log) = before.criu_log() {
        if let Some(error) = first_criu_error(log) {
            reasons.push(format!("CRIU: {error} (log: {})", log.display()));
        } else if reasons.is_empty() && cut_off(log) {
            reasons.push(CRIU_KILLED.to_owned());
        }
    }
    if reasons.is_empty() {
        let said = before.runtime_error().or_else(|| last_error(held));
        reasons.extend(said.map(|error| format!("{}: {error}", low.label())));
    }
    if reasons.is_empty() {
        reasons.push(format!("{} ended with code {}", low.label(), ended.code));
    }
    reasons.join("; ")
}

/// Returns what to do about this failure, as the end of its sentence.
pub fn remedy(why: &str) -> Option<&'static str> {
    let (_, of_criu) = why.split_once("CRIU: ")?;
    let known = REMEDIES.iter().find(|(error, _)| of_criu.contains(error));
    known.map(|(_, remedy)| *remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::lowlevel::RuntimeKind;
    use std::io::Write;

    fn globals(log: &Path) -> Globals {
        Globals {
            log: Some(log.to_owned()),
            ..Globals::default()
        }
    }

    #[test]
    fn an_old_log_is_not_this_operations() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("dump.log");
        let before = LogMarks::note(log.clone(), &Globals::default());
        assert_eq!(before.criu_log(), None, "there is none");
        fs::write(&log, "(00.1) Error (criu/old.c:1): of last week\n").unwrap();
        assert_eq!(before.criu_log(), Some(&*log), "written since");
        let before = LogMarks::note(log.clone(), &Globals::default());
        assert_eq!(before.criu_log(), None, "as it was");
        // CRIU truncates it; the same length again would still differ in its time, or here in its inode.
        fs::remove_file(&log).unwrap();
        fs::write(&log, "(00.1) Error (criu/new.c:1): of this minute").unwrap();
        assert_eq!(before.criu_log(), Some(&*log));
    }

    #[test]
    fn the_runtimes_last_error_and_not_ours_or_an_older_one() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log.json");
        fs::write(&log, "{\"level\":\"error\",\"msg\":\"an old one\"}\n").unwrap();
        let before = LogMarks::note("x".into(), &globals(&log));
        assert_eq!(before.runtime_error(), None);
        let mut file = fs::OpenOptions::new().append(true).open(&log).unwrap();
        file.write_all(b"{\"level\":\"error\",\"msg\":\"criu is missing features: [MemTrack]\"}\n{\"level\":\"warning\",\"msg\":\"careful\"}\n{\"level\":\"error\",\"msg\":\"cryopod: checkpoint failed\"}\n").unwrap();
        assert_eq!(
            before.runtime_error().unwrap(),
            "criu is missing features: [MemTrack]"
        );
        fs::write(&log, "{\"msg\":\"begun anew\"}\n").unwrap();
        assert_eq!(before.runtime_error().unwrap(), "begun anew");
        let none = LogMarks::note("x".into(), &Globals::default());
        assert_eq!(none.runtime_error(), None);
    }

    #[test]
    fn json_over_several_lines() {
        // As crun 1.28 writes it.
        let crun = "{\n  \"msg\": \"error creating CRIU work directory `\\/tmp\\/x`: Not a directory\",\n  \"level\": \"error\",\n  \"time\": \"2026-11-23T00:40:51.042359Z\"\n}\n";
        let ours = "{\"level\":\"warning\",\"msg\":\"cryopod: {\"}";
        let text =
            format!("{ours}\n\n{crun}time=\"x\" level=error msg={{\n{crun}{{ broken\n{crun}");
        let crun = crun.trim_end();
        assert_eq!(
            records(&text),
            [
                ours,
                crun,
                "time=\"x\" level=error msg={",
                crun,
                "{ broken",
                crun
            ]
        );
        assert_eq!(
            error_of(crun).unwrap(),
            "error creating CRIU work directory `/tmp/x`: Not a directory"
        );
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log.json");
        let before = LogMarks::note("x".into(), &globals(&log));
        fs::write(&log, format!("{crun}\n{ours}\n")).unwrap();
        assert!(before.runtime_error().unwrap().contains("/tmp/x"));
    }

    #[test]
    fn lines_of_each_runtime() {
        for (line, want) in [
            (
                r#"time="2026-01-01T00:00:00Z" level=error msg="a \"b\" c""#,
                Some(r#"a "b" c"#),
            ),
            ("time=\"x\" level=error msg=short", Some("short")),
            ("time=\"x\" level=warning msg=careful", None),
            (
                "2026-01-01T00:00:00.123456Z: CRIU checkpointing failed",
                Some("CRIU checkpointing failed"),
            ),
            (r#"{"level":"fatal","msg":"x"}"#, Some("x")),
            (r#"{"level":"info","msg":"x"}"#, None),
            ("{broken", None),
            ("", None),
        ] {
            assert_eq!(error_of(line).as_deref(), want, "{line}");
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
    fn who_was_killed_and_what_only_standard_error_has() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("dump.log");
        let low = LowLevel {
            path: "/usr/sbin/runc".into(),
            name: "runc".into(),
            kind: RuntimeKind::Runc,
        };
        let before = LogMarks::note(log.clone(), &Globals::default());
        let told = |code, held| {
            let ended = RunOutcome {
                code,
                ..RunOutcome::default()
            };
            describe(&low, &ended, Vec::new(), &before, held)
        };
        let held = "time=\"x\" level=error msg=\"of an option\"\n";
        assert_eq!(told(1, held), "runc: of an option");
        assert_eq!(told(1, ""), "runc ended with code 1");
        assert_eq!(told(137, ""), "runc was ended by SIGKILL");
        let begun = "(00.2) Error (criu/util.c:9): Can't setup RLIMIT_NOFILE for self: Operation not permitted\n(00.3) Dumping task\n";
        fs::write(&log, begun).unwrap();
        assert_eq!(told(1, held), CRIU_KILLED);
        fs::write(&log, format!("{begun}(00.4) Error (criu/util.c:656): exited, status=1\n(00.4) Error (criu/action-scripts.c:94): Script /act exited with -1\n")).unwrap();
        assert!(told(1, held).starts_with("CRIU: Error (criu/action-scripts.c:94): Script /act"));
    }

    #[test]
    fn what_to_do_about_errors_as_criu_writes_them() {
        for (error, word) in [
            (
                "CRIU: Error (criu/files-reg.c:2175): File bin/busybox has bad size 2 (expect 1) (log: /x)",
                "same image",
            ),
            (
                "CRIU: Error (criu/sk-inet.c:1059): inet: Can't bind inet socket (id 8): Address already in use",
                "ss -lnp",
            ),
            (
                "CRIU: Error (criu/cr-restore.c:1262): 1322 killed by signal 9: Killed",
                "memory limit",
            ),
        ] {
            assert!(
                remedy(error).is_some_and(|remedy| remedy.contains(word)),
                "{error}"
            );
        }
        assert_eq!(remedy("CRIU: Error (criu/x.c:1): strange"), None);
    }
}
