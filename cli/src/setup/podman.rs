//! podman: the runtime's name in containers.conf. If there is no such file, in a file of its own beside it, because podman 6
//! reads the distribution's containers.conf only where there is none in /etc.

use std::path::{Path, PathBuf};

use anyhow::Context;
use toml_edit::{Array, DocumentMut, Item, value};

use super::WantedSetup;
use super::change::{self, Change};
use super::toml_file::{hide, put_back, set, table};

const FILE: &str = "/etc/containers/containers.conf";
const OWN_FILE: &str = "/etc/containers/containers.conf.d/cryopod.conf";
/// The distribution's.
const VENDOR_FILE: &str = "/usr/share/containers/containers.conf";
const NAME: &str = "cryopod-runtime";
const SUPPORTS: &str = "runtime_supports_json";
/// podman's own list, which a list in the file replaces.
const PODMANS: [&str; 8] = [
    "crun", "runc", "kata", "runsc", "youki", "krun", "crun-vm", "ocijail",
];

pub fn changes(wanted: &WantedSetup<'_>) -> anyhow::Result<Vec<Change>> {
    let path = match wanted.config {
        Some(path) => path.to_owned(),
        None if wanted.host.path(FILE).exists() => FILE.into(),
        None => PathBuf::from(OWN_FILE),
    };
    let before = change::read(wanted.host, &path)?;
    let vendor = match before.is_some() {
        true => None,
        false => change::read(wanted.host, Path::new(VENDOR_FILE))?,
    };
    let after = with(
        before.as_deref().unwrap_or_default(),
        vendor.as_deref(),
        &wanted.runtime,
        wanted.default,
    )
    .with_context(|| path.display().to_string())?;
    Ok(Change::of(path, before, after).into_iter().collect())
}

fn with(text: &str, vendor: Option<&str>, runtime: &Path, default: bool) -> anyhow::Result<String> {
    let mut doc: DocumentMut = text.parse()?;
    let engine = table(doc.as_table_mut(), "engine")?;
    if default {
        set(engine, "runtime", NAME.into());
    }
    if !engine.contains_key(SUPPORTS) {
        let vendors = vendor.and_then(|v| v.parse::<DocumentMut>().ok());
        let vendors = vendors
            .as_ref()
            .and_then(|d| d.get("engine")?.get(SUPPORTS)?.as_array());
        let list = vendors
            .cloned()
            .unwrap_or_else(|| Array::from_iter(PODMANS));
        engine.insert(SUPPORTS, value(list));
    }
    let supports = engine
        .get_mut(SUPPORTS)
        .and_then(Item::as_array_mut)
        .with_context(|| format!("engine.{SUPPORTS} is not a list"))?;
    if !supports.iter().any(|name| name.as_str() == Some(NAME)) {
        supports.push(NAME);
    }
    let runtimes = table(engine, "runtimes")?;
    let path = runtime.to_string_lossy().into_owned();
    let known = runtimes.get(NAME).and_then(Item::as_array);
    if !known.is_some_and(|k| k.iter().any(|p| p.as_str() == Some(&path))) {
        runtimes.insert(NAME, value(Array::from_iter([path])));
    }
    Ok(doc.to_string())
}

pub fn without(text: &str, before: Option<&str>) -> anyhow::Result<Option<String>> {
    let mut doc: DocumentMut = text.parse()?;
    let old: DocumentMut = before.unwrap_or_default().parse()?;
    let old_engine = old.get("engine").and_then(Item::as_table_like);
    let Some(engine) = doc.get_mut("engine").and_then(Item::as_table_like_mut) else {
        return Ok(Some(text.to_owned()));
    };
    if engine.get("runtime").and_then(Item::as_str) == Some(NAME) {
        put_back(engine, old_engine, "runtime");
    }
    let was = |key| old_engine.and_then(|old| old.get(key));
    if let Some(list) = engine.get_mut(SUPPORTS).and_then(Item::as_array_mut) {
        let before = was(SUPPORTS).and_then(Item::as_array);
        if !before.is_some_and(|b| b.iter().any(|n| n.as_str() == Some(NAME))) {
            list.retain(|name| name.as_str() != Some(NAME));
        }
        let rest = list.iter().filter_map(|name| name.as_str());
        if before.is_none() && rest.eq(PODMANS) {
            engine.remove(SUPPORTS);
        }
    }
    let old_runtimes = was("runtimes").and_then(Item::as_table_like);
    if let Some(runtimes) = engine.get_mut("runtimes").and_then(Item::as_table_like_mut) {
        put_back(runtimes, old_runtimes, NAME);
        if runtimes.is_empty() && old_runtimes.is_none() {
            engine.remove("runtimes");
        }
    }
    if engine.is_empty() && old_engine.is_none() {
        doc.remove("engine");
    }
    hide(doc.get_mut("engine"), old.get("engine"));
    let text = doc.to_string();
    Ok((before.is_some() || !text.trim().is_empty()).then_some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNTIME: &str = "/usr/bin/cryopod-runtime";

    fn done(text: &str, default: bool) -> String {
        let after = with(text, None, Path::new(RUNTIME), default).unwrap();
        assert_eq!(
            with(&after, None, Path::new(RUNTIME), default).unwrap(),
            after,
            "a second time changes nothing"
        );
        after
    }

    #[test]
    fn an_empty_file() {
        let after = done("", false);
        assert_eq!(
            after,
            "[engine]\nruntime_supports_json = [\"crun\", \"runc\", \"kata\", \"runsc\", \"youki\", \"krun\", \"crun-vm\", \"ocijail\", \"cryopod-runtime\"]\n\n[engine.runtimes]\ncryopod-runtime = [\"/usr/bin/cryopod-runtime\"]\n"
        );
        assert_eq!(without(&after, None).unwrap(), None);
        assert_eq!(without(&after, Some("")).unwrap().unwrap().trim(), "");
    }

    #[test]
    fn comments_and_everything_else_stay() {
        let text = "# mine\n[containers]\nlog_driver = \"k8s-file\" # why\n\n[engine]\n# how\nruntime = \"runc\" # that one\nruntime_supports_json = [\"runc\"]\n[engine.runtimes]\nrunc = [\"/x/runc\"]\n";
        let after = done(text, true);
        assert_eq!(
            after,
            text.replace("\"runc\" # that", "\"cryopod-runtime\" # that")
                .replace("[\"runc\"]", "[\"runc\", \"cryopod-runtime\"]")
                + "cryopod-runtime = [\"/usr/bin/cryopod-runtime\"]\n"
        );
        let edited = after.replace("# mine", "# still mine");
        let undone = without(&edited, Some(text)).unwrap().unwrap();
        assert_eq!(undone, text.replace("# mine", "# still mine"));
    }

    #[test]
    fn what_was_there_before_the_setup_stays() {
        let text = "[engine.runtimes]\ncryopod-runtime = [\"/opt/cryopod-runtime\"]\n";
        let after = done(text, false);
        assert!(after.contains(RUNTIME), "{after}");
        let undone = without(&format!("{after}# more\n"), Some(text)).unwrap();
        assert_eq!(undone.unwrap(), format!("{text}# more\n"));
    }

    #[test]
    fn a_file_that_podman_does_not_read_either() {
        for text in [
            "[engine",
            "engine = 1",
            "[engine]\nruntime_supports_json = 1",
            "[engine]\nruntimes = 1",
        ] {
            assert!(
                with(text, None, Path::new(RUNTIME), false).is_err(),
                "{text}"
            );
        }
    }
}
