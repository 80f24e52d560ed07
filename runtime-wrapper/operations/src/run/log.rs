//! Writes messages where the engine looks for them.
//!
//! Engines read the file that `--log` names: JSON lines of `level`, `msg` and `time` with `--log-format json`, logrus's
//! text otherwise; podman shows standard error. Errors go to both, as runc's do. `tracing` events below an error go to
//! the log file alone, and only with `--debug` below a warning.

use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use cryopod_archive::format::names;
use cryopod_archive::format::text::printable;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

use crate::request::argv::Globals;

struct Lines {
    file: Option<PathBuf>,
    json: bool,
    level: Level,
    /// Standard error is that file.
    one: bool,
}

/// The log of processes of ours that go on without an engine. The engine's log is read while its command runs, and may be
/// gone later.
pub const DETACHED: &str = names::DETACHED_LOG;

/// A log of this size makes room for a new one.
const MAX_DETACHED: u64 = 1 << 20;

/// Makes room for messages of processes that go on without an engine.
pub fn make_room(log: &Path) {
    if log.metadata().is_ok_and(|m| m.len() > MAX_DETACHED) {
        let _ = std::fs::rename(log, log.with_extension("log.1"));
    }
}

/// Directs messages to a log of cryopod's own, which is standard error, too.
pub fn init_at(file: &Path) {
    let lines = Lines {
        file: Some(file.to_owned()),
        json: false,
        level: Level::INFO,
        one: true,
    };
    let _ = tracing_subscriber::registry().with(lines).try_init();
}

/// Directs messages to the log that the command line names.
pub fn init(globals: Option<&Globals>) {
    let lines = Lines {
        file: globals.and_then(|g| g.log.clone()),
        json: globals.is_some_and(|g| g.log_json),
        level: if globals.is_some_and(|g| g.debug) {
            Level::DEBUG
        } else {
            Level::WARN
        },
        one: false,
    };
    // A second call keeps the first one's subscriber.
    let _ = tracing_subscriber::registry().with(lines).try_init();
}

/// Reports an error to the engine.
pub fn error(message: &str) {
    tracing::error!("{message}");
}

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let level = *event.metadata().level();
        if level > self.level || !event.metadata().target().starts_with("cryopod") {
            return;
        }
        let mut text = Text::default();
        event.record(&mut text);
        // Somebody else chose the names of processes and files, and podman prints the log on a terminal.
        let message = format!("cryopod: {}{}", text.message, text.fields);
        let message = printable(&message);
        let written = self.file.as_ref().is_some_and(|path| {
            if self.one {
                make_room(path);
            }
            append(path, &line(&message, level, self.json, SystemTime::now())).is_ok()
        });
        // Without a log file standard error is the log. Errors go there in any case, for people to see.
        if level == Level::ERROR && !self.one || !written {
            let shown = if self.json && self.file.is_none() {
                line(&message, level, true, SystemTime::now())
            } else {
                format!("{message}\n")
            };
            let _ = std::io::stderr().lock().write_all(shown.as_bytes());
        }
    }
}

fn append(path: &Path, line: &str) -> std::io::Result<()> {
    // An engine's log is as the low-level runtime would make it.
    let mode = if path == Path::new(DETACHED) {
        0o600
    } else {
        0o644
    };
    OpenOptions::new()
        .append(true)
        .create(true)
        .mode(mode)
        .open(path)?
        .write_all(line.as_bytes())
}

fn line(message: &str, level: Level, json: bool, now: SystemTime) -> String {
    let level = match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        _ => "debug",
    };
    let time = rfc3339(now);
    if json {
        format!(
            "{}\n",
            serde_json::json!({"level": level, "msg": message, "time": time})
        )
    } else {
        format!("time=\"{time}\" level={level} msg={message:?}\n")
    }
}

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

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn lines_are_what_engines_read() {
        let time = SystemTime::UNIX_EPOCH;
        let json: serde_json::Value =
            serde_json::from_str(&line("a \"b\"\nc", Level::ERROR, true, time)).unwrap();
        assert_eq!(
            json,
            serde_json::json!({"level": "error", "msg": "a \"b\"\nc", "time": "1970-01-01T00:00:00Z"})
        );
        assert_eq!(
            line("a\nb", Level::WARN, false, time),
            "time=\"1970-01-01T00:00:00Z\" level=warning msg=\"a\\nb\"\n"
        );
    }

    #[test]
    fn events_reach_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("log.json");
        let layer = Lines {
            file: Some(file.clone()),
            json: true,
            level: Level::WARN,
            one: false,
        };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::warn!(target: "cryopod_runtime", pid = 7, "careful");
            tracing::info!(target: "cryopod_runtime", "not shown");
            error("process 7 (\u{1b}]0;owned\u{7}sh) fails");
            tracing::warn!(target: "another_crate", "not ours");
        });
        let text = std::fs::read_to_string(file).unwrap();
        assert_eq!(text.lines().count(), 2, "{text}");
        // Escaped once as text and once as JSON: nothing that decodes it gets the character back.
        let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        let shown = last["msg"].as_str().unwrap();
        assert!(!shown.contains(char::is_control), "{shown:?}");
        assert!(
            shown.contains(r"process 7 (\u{1b}]0;owned\u{7}sh)"),
            "{shown}"
        );
        assert!(text.contains(r#""msg":"cryopod: careful pid=7""#), "{text}");
    }

    #[test]
    fn times() {
        assert_eq!(
            rfc3339(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)),
            "2001-09-09T01:46:40Z"
        );
    }
}
