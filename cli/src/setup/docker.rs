//! docker: the runtime `cryopod` and `experimental` in daemon.json, and our shim in place of containerd's, without which
//! `docker start --checkpoint` fails (docs/containerd.md).

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::Serialize;
use serde_json::ser::PrettyFormatter;
use serde_json::{Map, Value, json};

use super::WantedSetup;
use super::change::{self, Change};

const FILE: &str = "/etc/docker/daemon.json";
/// The first directory of the PATH that systemd gives to services, and of root's.
const SHIM: &str = "/usr/local/sbin/containerd-shim-runc-v2";
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
    use super::*;

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
