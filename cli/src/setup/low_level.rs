//! cryopod's own configuration: runc as the low-level runtime, where cryopod would take a crun that was built without CRIU,
//! such as Debian 12's.

use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_host::files::Host;
use cryopod_host::programs::Tools;
use cryopod_operations::request::lowlevel::{ENV, LowLevel};
use toml_edit::{DocumentMut, Item};

use super::change::Change;
use super::toml_file::{put_back, set, table};
use super::{WantedSetup, crio, running};

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

/// Fails if a change of the configuration would ask another low-level runtime for a container than the one that has its
/// state.
pub fn ensure_kept(host: &Host, tools: &dyn Tools, changes: &[Change]) -> anyhow::Result<()> {
    let own = changes.iter().find(|change| is_own(change));
    let Some(Change::File { before, after, .. }) = own else {
        return Ok(());
    };
    let named = |text: &Option<String>| {
        let doc: DocumentMut = text.as_deref()?.parse().ok()?;
        Some(doc.get(TABLE)?.get(KEY)?.as_str()?.to_owned())
    };
    let (before, after) = (named(before), named(after));
    let moved = |env: Option<&str>| {
        let find = |config: &Option<String>| {
            LowLevel::search(config.as_deref(), env, tools).map(|low| low.path)
        };
        find(&before).ok() != find(&after).ok()
    };
    let running = running::find(host, |process| {
        // The shim names a runtime to the processes of its containers.
        let all = host
            .text(format!("/proc/{}/environ", process.pid))
            .unwrap_or_default();
        let mut all = all.split('\0');
        moved(all.find_map(|set| set.strip_prefix(ENV)?.strip_prefix('=')))
    });
    // CRI-O keeps those that have ended, without a process.
    let mut kept = host.names(crio::STATE).into_iter();
    let kept = kept.find(|id| !id.starts_with('.') && moved(None));
    let one = running.map(|process| format!("process {} is of one", process.pid));
    match one.or_else(|| kept.map(|id| format!("CRI-O's {id} is one"))) {
        Some(one) => bail!(
            "{FILE}: there are containers of cryopod ({one}), and with this change another low-level runtime than theirs would be asked for them: remove them first"
        ),
        None => Ok(()),
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
    use cryopod_test_files::TestFiles;

    use super::*;
    use crate::setup::tests::Debian12;

    #[test]
    fn containers_keep_their_runtime() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let named = |runtime: &str| (!runtime.is_empty()).then(|| with("", runtime).unwrap());
        let refusal = |before, after| {
            let change = Change::File {
                path: FILE.into(),
                before: named(before),
                after: named(after),
            };
            let kept = ensure_kept(&host, &Debian12, &[change]);
            kept.err().map(|e| e.to_string())
        };
        let process = |words: &str, environ: &str| {
            dir.put("proc/3/cmdline", words);
            dir.put("proc/3/environ", environ);
        };
        // A shim names runc itself, unless containerd's options say otherwise.
        let shim = "/usr/bin/containerd-shim-cryopod-v2\0serve\0";
        process(shim, "A=1\0CRYOPOD_LOW_LEVEL_RUNTIME=runc\0");
        assert_eq!(refusal(RUNC, ""), None);
        assert_eq!(refusal("", RUNC), None);
        process(shim, "CRYOPOD_LOW_LEVEL_RUNTIME=crun\0");
        assert!(refusal(RUNC, "").unwrap().contains("process 3"));
        // A monitor names none, and crun is the first that is found.
        process("conmon\0-r\0/usr/bin/cryopod-runtime\0", "A=1\0");
        assert!(refusal(RUNC, "").is_some() && refusal("", RUNC).is_some());
        assert_eq!(refusal("crun", ""), None);
        process(
            "dockerd\0--add-runtime=cryopod=/usr/bin/cryopod-runtime\0",
            "",
        );
        assert_eq!(refusal(RUNC, ""), None);
        dir.dir("run/cryopod-runtime/.empty-directory");
        assert_eq!(refusal(RUNC, ""), None);
        dir.dir("run/cryopod-runtime/c1");
        assert!(refusal(RUNC, "").unwrap().contains("CRI-O's c1"));
        assert_eq!(refusal("crun", ""), None);
    }

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
