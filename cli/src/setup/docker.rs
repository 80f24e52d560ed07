//! docker: the runtime `cryopod` and `experimental` in daemon.json, and our shim in place of containerd's, without which
//! `docker start --checkpoint` fails (docs/containerd.md).

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_host::files::Host;
use serde::Serialize;
use serde_json::ser::PrettyFormatter;
use serde_json::{Map, Value, json};

use crate::temp_dir::{Holds, LockedTempDir};

use super::change::{self, Change};
use super::{WantedSetup, low_level, running, trial};

const FILE: &str = "/etc/docker/daemon.json";
/// The first directory of the PATH that systemd gives to services, and of root's.
const SHIM: &str = "/usr/local/sbin/containerd-shim-runc-v2";
const DAEMON: &str = "dockerd";
const REFUSES: &str = "unable to configure the Docker daemon";
const LIMIT: Duration = Duration::from_secs(30);
const NAME: &str = "cryopod";
const DEFAULT: &str = "default-runtime";
const EXPERIMENTAL: &str = "experimental";

pub fn changes(wanted: &WantedSetup<'_>) -> anyhow::Result<Vec<Change>> {
    let path = wanted.config.map_or(PathBuf::from(FILE), Path::to_owned);
    let before = change::read(wanted.host, &path)?;
    let after = with(
        before.as_deref().unwrap_or_default(),
        &wanted.runtime,
        wanted.default,
    )
    .with_context(|| path.display().to_string())?;
    let mut all: Vec<_> = Change::of(path, before, after).into_iter().collect();
    let link = wanted.host.path(SHIM);
    match std::fs::read_link(&link) {
        Ok(to) if to == wanted.shim => {}
        // A link to ours elsewhere on PATH, made by hand, serves as well.
        Err(_) if !link.exists() && in_place(wanted) => {}
        Err(_) if !link.exists() => all.push(Change::Link {
            path: SHIM.into(),
            before: None,
            after: Some(wanted.shim.clone()),
        }),
        _ => bail!("{SHIM} is not cryopod's: see whether it is needed, and move it away"),
    }
    Ok(all)
}

/// Fails if the docker that runs here says that it would not start with the change: a key may also be one of its flags.
/// docker knows the question since version 23.
pub fn ensure_valid(wanted: &WantedSetup<'_>, changes: &[Change]) -> anyhow::Result<()> {
    let new = changes.iter().find_map(|change| match change {
        Change::File {
            path,
            after: Some(text),
            ..
        } if !low_level::is_own(change) => Some((path, text)),
        _ => None,
    });
    let (Some((path, text)), Some(program)) = (new, wanted.tools.find(DAEMON)) else {
        return Ok(());
    };
    let temp = LockedTempDir::anywhere(Holds::Copy)?;
    let file = temp.path().join("daemon.json");
    std::fs::write(&file, text)?;
    let file = file.to_string_lossy();
    let flags = flags(wanted.host);
    let mut words: Vec<&str> = flags.iter().map(String::as_str).collect();
    words.extend(["--config-file", &file, "--validate"]);
    match trial::run_one(wanted.tools, &program, &words, LIMIT) {
        Err(error) if error.to_string().contains(REFUSES) => {
            Err(error).with_context(|| format!("{}: docker would not start", path.display()))
        }
        _ => Ok(()),
    }
}

/// The flags of the daemon that runs, without the name of its file.
fn flags(host: &Host) -> Vec<String> {
    let pids = host.names("/proc").into_iter();
    let daemon = pids.into_iter().find(|pid| {
        let name = host.line(format!("/proc/{pid}/comm"));
        name.as_deref() == Some(DAEMON) && running::is_of_host(host, pid)
    });
    let words = daemon.and_then(|pid| host.text(format!("/proc/{pid}/cmdline")).ok());
    let words = words.unwrap_or_default();
    let mut words = words.split_terminator('\0').skip(1);
    let mut all = Vec::new();
    while let Some(word) = words.next() {
        match word {
            "--config-file" => drop(words.next()),
            word if word.starts_with("--config-file=") => {}
            word => all.push(word.to_owned()),
        }
    }
    all
}

/// Returns true if our shim is the first of the stock shim's name on PATH.
fn in_place(wanted: &WantedSetup<'_>) -> bool {
    let first = wanted.tools.find("containerd-shim-runc-v2");
    let real = |path: &Path| path.canonicalize().ok();
    first.is_some_and(|first| real(&first).is_some() && real(&first) == real(&wanted.shim))
}

fn parsed(text: &str) -> anyhow::Result<Map<String, Value>> {
    match text.trim() {
        "" => Ok(Map::new()),
        text => serde_json::from_str(text).context("not a JSON object"),
    }
}

fn with(text: &str, runtime: &Path, default: bool) -> anyhow::Result<String> {
    let mut all = parsed(text)?;
    let old = all.clone();
    let runtimes = all
        .entry("runtimes")
        .or_insert_with(|| json!({}))
        .as_object_mut()
        .context("`runtimes` is not an object")?;
    let entry = runtimes.entry(NAME).or_insert_with(|| json!({}));
    entry
        .as_object_mut()
        .with_context(|| format!("`runtimes.{NAME}` is not an object"))?
        .insert("path".into(), runtime.to_string_lossy().into());
    all.insert(EXPERIMENTAL.into(), true.into());
    if default {
        all.insert(DEFAULT.into(), NAME.into());
    }
    if all == old {
        return Ok(text.to_owned());
    }
    written(&all, text)
}

pub fn without(text: &str, before: Option<&str>) -> anyhow::Result<Option<String>> {
    let mut all = parsed(text)?;
    let old = parsed(before.unwrap_or_default())?;
    let restore = |all: &mut Map<String, Value>, old: &Map<String, Value>, key: &str| {
        match old.get(key) {
            Some(value) => all.insert(key.into(), value.clone()),
            None => all.shift_remove(key),
        };
    };
    let none = Map::new();
    if let Some(runtimes) = all.get_mut("runtimes").and_then(Value::as_object_mut) {
        let before = old.get("runtimes").and_then(Value::as_object);
        restore(runtimes, before.unwrap_or(&none), NAME);
        if runtimes.is_empty() && before.is_none() {
            all.shift_remove("runtimes");
        }
    }
    if all.get(EXPERIMENTAL) == Some(&true.into()) {
        restore(&mut all, &old, EXPERIMENTAL);
    }
    if all.get(DEFAULT).and_then(Value::as_str) == Some(NAME) {
        restore(&mut all, &old, DEFAULT);
    }
    if all.is_empty() && before.is_none() {
        return Ok(None);
    }
    written(&all, text).map(Some)
}

/// Writes JSON with the indentation of an existing text.
fn written(all: &Map<String, Value>, like: &str) -> anyhow::Result<String> {
    let indent = like.lines().find_map(|line| {
        let rest = line.trim_start_matches([' ', '\t']);
        let space = &line[..line.len() - rest.len()];
        (rest.starts_with('"') && !space.is_empty()).then_some(space)
    });
    let mut bytes = Vec::new();
    let format = PrettyFormatter::with_indent(indent.unwrap_or("    ").as_bytes());
    all.serialize(&mut serde_json::Serializer::with_formatter(
        &mut bytes, format,
    ))?;
    let mut text = String::from_utf8(bytes)?;
    if like.is_empty() || like.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use cryopod_host::programs::{Output, ToolError, Tools};
    use cryopod_test_files::TestFiles;

    use super::*;
    use crate::setup::tests::packaged;

    const RUNTIME: &str = "/usr/bin/cryopod-runtime";

    fn done(text: &str, default: bool) -> String {
        let after = with(text, Path::new(RUNTIME), default).unwrap();
        assert_eq!(
            with(&after, Path::new(RUNTIME), default).unwrap(),
            after,
            "a second time changes nothing"
        );
        after
    }

    #[test]
    fn no_file() {
        let after = done("", false);
        assert_eq!(
            after,
            "{\n    \"runtimes\": {\n        \"cryopod\": {\n            \"path\": \"/usr/bin/cryopod-runtime\"\n        }\n    },\n    \"experimental\": true\n}\n"
        );
        assert_eq!(without(&after, None).unwrap(), None);
    }

    #[test]
    fn everything_else_stays_in_its_order() {
        let text = "{\n  \"log-driver\": \"local\",\n  \"default-runtime\": \"nvidia\",\n  \"runtimes\": {\n    \"nvidia\": {\n      \"args\": [],\n      \"path\": \"nvidia-container-runtime\"\n    }\n  },\n  \"bip\": \"172.30.0.1/24\"\n}";
        let after = done(text, true);
        let keys: Vec<_> = parsed(&after).unwrap().keys().cloned().collect();
        assert_eq!(
            keys,
            [
                "log-driver",
                "default-runtime",
                "runtimes",
                "bip",
                "experimental"
            ]
        );
        assert!(after.starts_with("{\n  \"log-driver\"") && !after.ends_with('\n'));
        assert_eq!(without(&after, Some(text)).unwrap().unwrap(), text);
        let edited = after.replace("local", "journald");
        assert_eq!(
            without(&edited, Some(text)).unwrap().unwrap(),
            text.replace("local", "journald")
        );
    }

    #[test]
    fn what_was_there_before_stays() {
        let text = "{\"experimental\": true, \"runtimes\": {\"cryopod\": {\"path\": \"/opt/x\", \"runtimeArgs\": [\"--debug\"]}}}";
        let after = done(text, false);
        let runtime = &parsed(&after).unwrap()["runtimes"]["cryopod"];
        assert_eq!(
            *runtime,
            json!({"path": RUNTIME, "runtimeArgs": ["--debug"]})
        );
        let undone = without(&after, Some(text)).unwrap().unwrap();
        assert_eq!(parsed(&undone).unwrap(), parsed(text).unwrap());
    }

    #[test]
    fn a_daemon_that_would_not_start() {
        /// Also has `experimental` as a flag.
        struct Flagged;
        impl Tools for Flagged {
            fn find(&self, name: &str) -> Option<PathBuf> {
                (name == DAEMON).then(|| name.into())
            }
            fn output(&self, _: &Path, args: &[&OsStr], _: Duration) -> Result<Output, ToolError> {
                let words = args.iter().map(|word| word.to_str().unwrap());
                let words: Vec<_> = words.collect();
                let [flags @ .., "--config-file", file, "--validate"] = &words[..] else {
                    panic!("{words:?}");
                };
                assert!(std::fs::read_to_string(file).unwrap().contains(RUNTIME));
                let stderr = match flags.contains(&"--experimental") {
                    true => format!("{REFUSES} with file {file}: experimental"),
                    false => "unknown flag: --validate".into(),
                };
                let code = 1;
                let stdout = String::new();
                Ok(Output {
                    code,
                    stdout,
                    stderr,
                })
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let wanted = packaged(&host, &Flagged);
        let changes = changes(&wanted).unwrap();
        ensure_valid(&wanted, &changes).unwrap();
        dir.put("proc/3/comm", "dockerd\n");
        dir.put(
            "proc/3/cmdline",
            "dockerd\0--config-file\0/x\0--experimental\0",
        );
        let error = ensure_valid(&wanted, &changes).unwrap_err().to_string();
        assert!(error.contains(FILE), "{error}");
    }

    #[test]
    fn a_file_that_docker_does_not_read_either() {
        for text in [
            "[]",
            "{",
            "{\"runtimes\": 1}",
            "{\"runtimes\": {\"cryopod\": 1}}",
        ] {
            assert!(with(text, Path::new(RUNTIME), false).is_err(), "{text}");
        }
    }
}
