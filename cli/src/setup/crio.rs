//! CRI-O: a runtime in a file of our own, with the monitor of the present default runtime.

use std::path::{Path, PathBuf};

use anyhow::Context;
use toml_edit::{DocumentMut, Item, value};

use super::WantedSetup;
use super::change::{self, Change};
use super::toml_file::table;

const MAIN: &str = "/etc/crio/crio.conf";
const DIRECTORY: &str = "/etc/crio/crio.conf.d";
pub const SOCKET: &str = "/run/crio/crio.sock";
/// Files of the directory are merged in the order of their names.
pub const FILE: &str = "/etc/crio/crio.conf.d/90-cryopod.conf";
/// Where the runtime keeps the state of CRI-O's containers.
pub const STATE: &str = "/run/cryopod-runtime";
const NAME: &str = "cryopod";
const HEAD: &str = "# Made by `cryopod setup kubernetes`; `--undo` removes it.\n";
const MONITOR: [&str; 3] = ["monitor_path", "monitor_cgroup", "monitor_env"];

pub fn changes(wanted: &WantedSetup<'_>) -> anyhow::Result<Vec<Change>> {
    let names = wanted.host.names(DIRECTORY);
    let names = names.iter().filter(|name| name.ends_with(".conf"));
    let files = names.map(|name| Path::new(DIRECTORY).join(name));
    let mut theirs = Vec::new();
    for path in std::iter::once(PathBuf::from(MAIN)).chain(files) {
        if path == Path::new(FILE) {
            continue;
        }
        let text = change::read(wanted.host, &path)?.unwrap_or_default();
        let doc: DocumentMut = text.parse().with_context(|| path.display().to_string())?;
        theirs.push(doc);
    }
    let before = change::read(wanted.host, Path::new(FILE))?;
    let after = text(wanted, &theirs)?;
    Ok(Change::of(FILE.into(), before, after).into_iter().collect())
}

/// `theirs`: the other files, the last one counts.
fn text(wanted: &WantedSetup<'_>, theirs: &[DocumentMut]) -> anyhow::Result<String> {
    let runtime = |doc: &DocumentMut| doc.get("crio")?.get("runtime").cloned();
    let all: Vec<Item> = theirs.iter().rev().filter_map(runtime).collect();
    let default = all
        .iter()
        .find_map(|r| Some(r.get("default_runtime")?.as_str()?.to_owned()));
    let default = default.filter(|name| name != NAME);
    let mut doc = DocumentMut::new();
    let crio = table(doc.as_table_mut(), "crio")?;
    let own = table(crio, "runtime")?;
    if wanted.default {
        own.insert("default_runtime", value(NAME));
    }
    let ours = table(table(own, "runtimes")?, NAME)?;
    ours.insert(
        "runtime_path",
        value(wanted.runtime.to_string_lossy().as_ref()),
    );
    ours.insert("runtime_type", value("oci"));
    ours.insert("runtime_root", value(STATE));
    for key in MONITOR {
        let of = |r: &Item| {
            let runtimes = r.get("runtimes")?;
            let names = [default.as_deref().unwrap_or("crun"), "crun", "runc"];
            names
                .iter()
                .find_map(|name| runtimes.get(name)?.get(key).cloned())
        };
        if let Some(Item::Value(mut item)) = all.iter().find_map(of) {
            item.decor_mut().clear();
            ours.insert(key, Item::Value(item));
        }
    }
    Ok(format!("{HEAD}{doc}"))
}

/// The file is ours alone.
pub fn without(text: &str) -> Option<String> {
    (!text.starts_with(HEAD)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use cryopod_host::files::Host;
    use cryopod_host::programs::SystemTools;

    use super::*;
    use crate::setup::tests::packaged;
    use cryopod_test_files::TestFiles;

    #[test]
    fn the_monitor_of_the_default_runtime() {
        let dir = tempfile::tempdir().unwrap();
        let conf = dir.path().join("etc/crio/crio.conf.d");
        conf.put("10-crio.conf", "[crio.runtime]\ndefault_runtime = \"crun\"\n[crio.runtime.runtimes.runc]\nmonitor_path = \"/other\"\n[crio.runtime.runtimes.crun]\nruntime_path = \"/usr/libexec/crio/crun\"\nmonitor_path = \"/usr/libexec/crio/conmon\" # theirs\n");
        let (host, tools) = (Host::at(dir.path()), SystemTools::with_path(""));
        let wanted = WantedSetup {
            runtime: "/opt/cryopod/bin/cryopod-runtime".into(),
            ..packaged(&host, &tools)
        };
        let changes = changes(&wanted).unwrap();
        let [
            Change::File {
                path,
                before: None,
                after: Some(text),
            },
        ] = &changes[..]
        else {
            panic!("{changes:?}");
        };
        assert_eq!(path, Path::new(FILE));
        let want = "[crio.runtime.runtimes.cryopod]\nruntime_path = \"/opt/cryopod/bin/cryopod-runtime\"\nruntime_type = \"oci\"\nruntime_root = \"/run/cryopod-runtime\"\nmonitor_path = \"/usr/libexec/crio/conmon\"\n";
        assert_eq!(text, &format!("{HEAD}{want}"));
        assert_eq!(without(text), None);
        conf.put("90-cryopod.conf", text);
        assert!(super::changes(&wanted).unwrap().is_empty());
    }
}
