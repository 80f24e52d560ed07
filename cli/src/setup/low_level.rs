//! cryopod's own configuration: runc as the low-level runtime, where cryopod would take a crun that was built without CRIU,
//! such as Debian 12's.

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use cryopod_host::programs::Tools;
use toml_edit::{DocumentMut, Item};

use super::WantedSetup;
use super::change::Change;
use super::toml_file::{put_back, set, table};

pub const FILE: &str = "/etc/cryopod/config.toml";
const TABLE: &str = "runtime";
const KEY: &str = "low_level";
const RUNC: &str = "runc";
const CRIO_PROGRAMS: &str = "/usr/libexec/crio/";
const LIMIT: Duration = Duration::from_secs(30);

/// The text of the configuration that this setup wants. `text`: as it is.
pub fn wanted_text(wanted: &WantedSetup<'_>, text: &str) -> anyhow::Result<String> {
    let on_path = |name: &str| wanted.tools.find(name).is_some();
    if crun_without_criu(wanted.tools) && on_path(RUNC) {
        return with(text, RUNC).context(FILE);
    }
    if on_path(RUNC) || on_path("crun") {
        return Ok(text.to_owned());
    }
    // CRI-O's packages have runtimes of their own.
    let own = [RUNC, "crun"].map(|name| format!("{CRIO_PROGRAMS}{name}"));
    match own.iter().find(|path| wanted.tools.find(path).is_some()) {
        Some(path) => with(text, path).context(FILE),
        None => Ok(text.to_owned()),
    }
}

/// Returns true if this changes cryopod's own configuration.
pub fn is_own(change: &Change) -> bool {
    change.path() == Path::new(FILE)
}

fn crun_without_criu(tools: &dyn Tools) -> bool {
    let Some(crun) = tools.find("crun") else {
        return false;
    };
    let said = tools.output(&crun, &[OsStr::new("--version")], LIMIT);
    said.is_ok_and(|out| out.code == 0 && !out.stdout.contains("+CRIU"))
}

/// Names a runtime, unless the configuration names one.
fn with(text: &str, runtime: &str) -> anyhow::Result<String> {
    let mut doc: DocumentMut = text.parse()?;
    let table = table(doc.as_table_mut(), TABLE)?;
    if table.contains_key(KEY) {
        return Ok(text.to_owned());
    }
    set(table, KEY, runtime.into());
    Ok(doc.to_string())
}

pub fn without(text: &str, before: Option<&str>) -> anyhow::Result<Option<String>> {
    let mut doc: DocumentMut = text.parse()?;
    let old: DocumentMut = before.unwrap_or_default().parse()?;
    let was = old.get(TABLE).and_then(Item::as_table_like);
    if let Some(table) = doc.get_mut(TABLE).and_then(Item::as_table_like_mut) {
        let ours = |named: &str| named == RUNC || named.starts_with(CRIO_PROGRAMS);
        if table.get(KEY).and_then(Item::as_str).is_some_and(ours) {
            put_back(table, was, KEY);
        }
        if table.is_empty() && was.is_none() {
            doc.remove(TABLE);
        }
    }
    let text = doc.to_string();
    Ok((before.is_some() || !text.trim().is_empty()).then_some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runc_where_nothing_is_named() {
        let text = "# [runtime]\n# low_level = \"crun\"\n";
        let after = with(text, RUNC).unwrap();
        let doc: DocumentMut = after.parse().unwrap();
        assert_eq!(doc[TABLE][KEY].as_str(), Some(RUNC));
        assert!(after.starts_with(text) || after.ends_with(text), "{after}");
        assert_eq!(with(&after, RUNC).unwrap(), after);
        let edited = format!("{after}# more\n");
        let undone = without(&edited, Some(text)).unwrap().unwrap();
        assert!(
            !undone.contains(RUNC) && undone.contains("# more"),
            "{undone}"
        );
        assert_eq!(without(&with("", RUNC).unwrap(), None).unwrap(), None);
        let named = "[runtime]\nlow_level = \"/opt/crun\"\n";
        assert_eq!(with(named, RUNC).unwrap(), named);
    }
}
