//! containerd: a runtime of the CRI, for Kubernetes. The keys are those of examples/kubernetes/containerd.toml.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_operations::criu;
use toml_edit::{DocumentMut, Item, value};

use super::WantedSetup;
use super::change::{self, Change};
use super::toml_file::{hide, put_back, set, table};
use super::trial;

const FILE: &str = "/etc/containerd/config.toml";
const EXAMPLE: &str = include_str!("../../../examples/kubernetes/containerd.toml");
const NAME: &str = "cryopod";
const OWN_FILE: &str = "cryopod.toml";
/// The CRI plugin, by the version of the configuration.
const PLUGIN_2: &str = "io.containerd.grpc.v1.cri";
const PLUGIN_3: &str = "io.containerd.cri.v1.runtime";
const RESTORES: &str = "enable_experimental_restore_via_create";
const LIMIT: Duration = Duration::from_secs(30);

/// Returns the change of containerd's configuration, or of a file that it imports.
pub fn changes(wanted: &WantedSetup<'_>) -> anyhow::Result<Vec<Change>> {
    let path = file(wanted);
    let before = change::read(wanted.host, &path)?;
    let at = || path.display().to_string();
    let text = before.as_deref().unwrap_or_default();
    let main: DocumentMut = text.parse().with_context(at)?;
    disabled(&main).with_context(at)?;
    if let Some(own) = drop_in(&main) {
        return drop_in_change(wanted, own, &main);
    }
    let mut doc = main;
    if before.is_none() {
        let newer = version(wanted).is_some_and(|v| v.first() >= Some(&2));
        doc.insert("version", value(if newer { 3 } else { 2 }));
    }
    add(&mut doc, None, &Stanza::of(wanted)).with_context(at)?;
    Ok(Change::of(path, before, doc.to_string())
        .into_iter()
        .collect())
}

/// The main configuration file.
pub fn file(wanted: &WantedSetup<'_>) -> PathBuf {
    wanted.config.map_or(PathBuf::from(FILE), Path::to_owned)
}

/// The change of a file of our own. `main`: the configuration that imports it.
pub fn drop_in_change(
    wanted: &WantedSetup<'_>,
    own: PathBuf,
    main: &DocumentMut,
) -> anyhow::Result<Vec<Change>> {
    let there = change::read(wanted.host, &own)?;
    let text = there.as_deref().unwrap_or("version = 3\n");
    let at = || own.display().to_string();
    let mut doc: DocumentMut = text.parse().with_context(at)?;
    add(&mut doc, Some(main), &Stanza::of(wanted)).with_context(at)?;
    Ok(Change::of(own, there, doc.to_string())
        .into_iter()
        .collect())
}

/// The runtime alone, as text for a template. `main`: the configuration that the template made.
pub fn stanza(wanted: &WantedSetup<'_>, main: &DocumentMut) -> anyhow::Result<String> {
    let mut doc = DocumentMut::new();
    if let Some(version) = main.get("version") {
        doc.insert("version", version.clone());
    }
    let alone = Stanza {
        restores: false,
        default: false,
        shim: wanted.shim_path(),
    };
    add(&mut doc, Some(main), &alone)?;
    doc.remove("version");
    Ok(doc.to_string())
}

/// What is added to a configuration beside the runtime.
struct Stanza<'a> {
    /// Enables restores by creating a container.
    restores: bool,
    /// cryopod becomes the default runtime.
    default: bool,
    /// The shim's path, if it is in no directory of containerd's PATH.
    shim: Option<&'a Path>,
}

impl<'a> Stanza<'a> {
    fn of(wanted: &'a WantedSetup<'_>) -> Self {
        Self {
            // By a key that older ones ignore.
            restores: matches!(version(wanted).as_deref(), Some([2, 3, ..])),
            default: wanted.default,
            shim: wanted.shim_path(),
        }
    }
}

fn version(wanted: &WantedSetup<'_>) -> Option<Vec<u32>> {
    let path = wanted.tools.find("containerd")?;
    criu::numbers(&criu::version_line(wanted.tools, &path, LIMIT)?)
}

/// Fails if containerd would not know the runtime, or no longer its default one, by the configuration as it is now:
/// containerd 1 lets a file that it imports replace the whole section. What it cannot be asked is not held against it.
pub fn ensure_known(wanted: &WantedSetup<'_>) -> anyhow::Result<()> {
    let path = file(wanted);
    let Some(containerd) = wanted.tools.find("containerd") else {
        return Ok(());
    };
    let words = ["--config", &*path.to_string_lossy(), "config", "dump"];
    let Ok(text) = trial::run_one(wanted.tools, &containerd, &words, LIMIT) else {
        return Ok(());
    };
    let Some(missing) = text.parse().ok().and_then(|dump| missing(&dump)) else {
        return Ok(());
    };
    bail!(
        "{}: with it containerd would not know the runtime `{missing}`: another file that it imports (`imports`) replaces the section. Before containerd starts again: `cryopod setup {target} --undo`, then `cryopod setup {target} --config` with that file",
        path.display(),
        target = if wanted.node.is_some() {
            "kubernetes"
        } else {
            "containerd"
        },
    )
}

/// Which runtime a configuration lacks that must be there: cryopod's, or the default one.
fn missing(dump: &DocumentMut) -> Option<String> {
    let cri = |plugin| dump.get("plugins")?.get(plugin)?.get("containerd");
    let containerd = cri(PLUGIN_3).or_else(|| cri(PLUGIN_2))?;
    let default = containerd.get("default_runtime_name");
    let default = default.and_then(Item::as_str).filter(|n| !n.is_empty());
    let known = |name: &str| {
        containerd
            .get("runtimes")
            .is_some_and(|r| r.get(name).is_some())
    };
    [NAME, default.unwrap_or("runc")]
        .into_iter()
        .find(|name| !known(name))
        .map(str::to_owned)
}

/// docker's package of containerd disables the CRI.
fn disabled(main: &DocumentMut) -> anyhow::Result<()> {
    let list = main.get("disabled_plugins").and_then(Item::as_array);
    let cri =
        |name: &str| name == "cri" || name.starts_with("io.containerd.") && name.contains("cri");
    match list.is_some_and(|l| l.iter().filter_map(|n| n.as_str()).any(cri)) {
        true => bail!(
            "`disabled_plugins` disables the CRI, which Kubernetes needs: remove it there. `ctr`, nerdctl and docker need no setup of containerd"
        ),
        false => Ok(()),
    }
}

/// Returns a file of our own in a directory from which containerd imports files. Only with version 3: containerd 1.7
/// would let the file replace the whole section of the plugin.
pub fn drop_in(main: &DocumentMut) -> Option<PathBuf> {
    if main.get("version")?.as_integer()? < 3 {
        return None;
    }
    main.get("imports")?
        .as_array()?
        .iter()
        .filter_map(|pattern| pattern.as_str()?.strip_suffix("/*.toml"))
        .find(|directory| directory.starts_with('/') && !directory.contains('*'))
        .map(|directory| Path::new(directory).join(OWN_FILE))
}

/// Returns the runtime of the example.
fn example() -> anyhow::Result<Item> {
    let example: DocumentMut = EXAMPLE.parse()?;
    let plugin = example.get("plugins").and_then(|p| p.get(PLUGIN_3));
    plugin
        .and_then(|p| p.get("containerd")?.get("runtimes")?.get(NAME))
        .context("the example has no runtime")
        .cloned()
}

/// The annotations that a pod may pass to its containers: names, or beginnings of names before a `*`.
pub fn pod_annotations() -> anyhow::Result<Vec<String>> {
    let runtime = example()?;
    let list = runtime.get("pod_annotations").and_then(Item::as_array);
    let list = list.context("the example has no list of annotations")?;
    let names = list.iter().filter_map(|name| name.as_str());
    Ok(names.map(str::to_owned).collect())
}

/// Adds the runtime. `main`: the file from which to take the options of the present default runtime, if not from `doc`.
fn add(
    doc: &mut DocumentMut,
    main: Option<&DocumentMut>,
    stanza: &Stanza<'_>,
) -> anyhow::Result<()> {
    let version = doc.get("version").and_then(Item::as_integer).unwrap_or(1);
    let plugin = match version {
        2 => PLUGIN_2,
        3 => PLUGIN_3,
        other => bail!(
            "its version is {other}, and cryopod knows 2 and 3: `containerd config migrate` writes a newer one"
        ),
    };
    let options = options(main.unwrap_or(doc), plugin);
    let mut ours = example()?;
    if let Some(theirs) = ours.get_mut("options").and_then(Item::as_table_like_mut) {
        for (key, item) in options {
            if let Item::Value(new) = item {
                set(theirs, &key, new);
            }
        }
    }
    if let (Some(path), Some(runtime)) = (stanza.shim, ours.as_table_like_mut()) {
        set(
            runtime,
            "runtime_path",
            path.to_string_lossy().as_ref().into(),
        );
        if let Some(mut key) = runtime.key_mut("runtime_path") {
            key.leaf_decor_mut().set_prefix("  ");
        }
    }
    let plugins = table(doc.as_table_mut(), "plugins")?;
    let cri = table(plugins, plugin)?;
    if stanza.restores && version == 3 && !cri.contains_key(RESTORES) {
        cri.insert(RESTORES, value(true));
    }
    let containerd = table(cri, "containerd")?;
    if stanza.default {
        set(containerd, "default_runtime_name", NAME.into());
    }
    let default = containerd.get("default_runtime_name");
    let is_default = default.is_none_or(|name| name.as_str() == Some("runc"));
    let runtimes = table(containerd, "runtimes")?;
    // containerd 1 has a runc of its own until there is a table of runtimes; without its default the CRI does not load.
    if version == 2 && is_default && !runtimes.contains_key("runc") {
        let mut runc = toml_edit::Table::new();
        runc.insert("runtime_type", value("io.containerd.runc.v2"));
        runtimes.insert("runc", Item::Table(runc));
    }
    if !runtimes.contains_key(NAME) {
        // Positions of the example would sort it among the tables of this file.
        unplace(&mut ours);
        runtimes.insert(NAME, ours);
    }
    Ok(())
}

/// The options of the runtime that is the default now: which runtime of OCI, and whether systemd makes cgroups.
fn options(doc: &DocumentMut, plugin: &str) -> Vec<(String, Item)> {
    let of = || {
        let containerd = doc.get("plugins")?.get(plugin)?.get("containerd")?;
        let name = containerd
            .get("default_runtime_name")
            .and_then(Item::as_str)
            .filter(|name| *name != NAME)
            .unwrap_or("runc");
        let options = containerd.get("runtimes")?.get(name)?.get("options")?;
        let kept = ["BinaryName", "SystemdCgroup"];
        let set = |item: &Item| item.as_str() != Some("");
        Some(
            options
                .as_table_like()?
                .iter()
                .filter(|(key, item)| kept.contains(key) && set(item))
                .map(|(key, item)| (key.to_owned(), item.clone()))
                .collect(),
        )
    };
    of().unwrap_or_default()
}

fn unplace(item: &mut Item) {
    if let Item::Table(table) = item {
        table.set_position(None);
        for (_, inner) in table.iter_mut() {
            unplace(inner);
        }
    }
}

/// Returns the text without the runtime; `before` is what it was before the setup.
pub fn without(text: &str, before: Option<&str>) -> anyhow::Result<Option<String>> {
    let mut doc: DocumentMut = text.parse()?;
    let old: DocumentMut = before.unwrap_or_default().parse()?;
    for plugin in [PLUGIN_2, PLUGIN_3] {
        let was = old
            .get("plugins")
            .and_then(|p| p.get(plugin))
            .and_then(Item::as_table_like);
        let was_containerd = was
            .and_then(|p| p.get("containerd"))
            .and_then(Item::as_table_like);
        let was_runtimes = was_containerd
            .and_then(|c| c.get("runtimes"))
            .and_then(Item::as_table_like);
        let Some(cri) = doc
            .get_mut("plugins")
            .and_then(|p| p.get_mut(plugin))
            .and_then(Item::as_table_like_mut)
        else {
            continue;
        };
        put_back(cri, was, RESTORES);
        if let Some(containerd) = cri.get_mut("containerd").and_then(Item::as_table_like_mut) {
            if containerd
                .get("default_runtime_name")
                .and_then(Item::as_str)
                == Some(NAME)
            {
                put_back(containerd, was_containerd, "default_runtime_name");
            }
            if let Some(runtimes) = containerd
                .get_mut("runtimes")
                .and_then(Item::as_table_like_mut)
            {
                put_back(runtimes, was_runtimes, NAME);
                let own = runtimes.get("runc").and_then(Item::as_table_like);
                if plugin == PLUGIN_2 && own.is_some_and(|runc| runc.len() == 1) {
                    put_back(runtimes, was_runtimes, "runc");
                }
            }
        }
        hide(
            cri.get_mut("containerd"),
            was.and_then(|p| p.get("containerd")),
        );
        let was = old.get("plugins").and_then(|p| p.get(plugin));
        hide(doc.get_mut("plugins").and_then(|p| p.get_mut(plugin)), was);
    }
    Ok(Some(doc.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stanza(default: bool) -> Stanza<'static> {
        Stanza {
            restores: true,
            default,
            shim: None,
        }
    }

    fn done(text: &str, default: bool) -> String {
        let mut doc: DocumentMut = text.parse().unwrap();
        add(&mut doc, None, &stanza(default)).unwrap();
        let after = doc.to_string();
        add(&mut doc, None, &stanza(default)).unwrap();
        assert_eq!(doc.to_string(), after, "a second time changes nothing");
        after
    }

    fn runtime<'a>(doc: &'a DocumentMut, plugin: &str) -> &'a Item {
        &doc["plugins"][plugin]["containerd"]["runtimes"][NAME]
    }

    #[test]
    fn containerd_1_keeps_the_runc_that_it_has_by_itself() {
        let text = "version = 2\n";
        let after = done(text, false);
        let doc: DocumentMut = after.parse().unwrap();
        let runtimes = &doc["plugins"][PLUGIN_2]["containerd"]["runtimes"];
        let runc = runtimes["runc"]["runtime_type"].as_str();
        assert_eq!(runc, Some("io.containerd.runc.v2"));
        let undone = without(&after, Some(text)).unwrap().unwrap();
        assert!(!undone.contains("runc"), "{undone}");
        let own = "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]\nruntime_type = 'mine'\n";
        let undone = without(&done(own, false), Some(own)).unwrap().unwrap();
        assert!(undone.contains("'mine'"), "{undone}");
    }

    #[test]
    fn version_3_keeps_comments_and_takes_the_options_of_the_default_runtime() {
        let text = "version = 3 # mine\n\n[plugins.'io.containerd.cri.v1.runtime'.containerd]\n  default_runtime_name = 'nvidia'\n  [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]\n    runtime_type = 'io.containerd.runc.v2'\n    [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]\n      BinaryName = '/usr/bin/nvidia-container-runtime'\n      SystemdCgroup = true\n\n[ttrpc]\n  uid = 0\n";
        let after = done(text, false);
        assert!(after.contains("version = 3 # mine"), "{after}");
        assert!(after.contains("[ttrpc]\n  uid = 0"), "{after}");
        let doc: DocumentMut = after.parse().unwrap();
        let ours = runtime(&doc, PLUGIN_3);
        assert_eq!(
            ours["runtime_type"].as_str(),
            Some("io.containerd.cryopod.v2")
        );
        assert_eq!(
            ours["options"]["BinaryName"].as_str(),
            Some("/usr/bin/nvidia-container-runtime")
        );
        assert_eq!(ours["options"]["SystemdCgroup"].as_bool(), Some(true));
        assert!(ours["pod_annotations"].as_array().unwrap().len() > 5);
        assert_eq!(doc["plugins"][PLUGIN_3][RESTORES].as_bool(), Some(true));
        assert_eq!(without(&after, Some(text)).unwrap().unwrap(), text);
    }

    #[test]
    fn version_2() {
        let text = "version = 2\n";
        let after = done(text, true);
        let doc: DocumentMut = after.parse().unwrap();
        assert_eq!(
            runtime(&doc, PLUGIN_2)["options"]["BinaryName"].as_str(),
            Some("runc")
        );
        assert_eq!(
            doc["plugins"][PLUGIN_2]["containerd"]["default_runtime_name"].as_str(),
            Some(NAME)
        );
        let undone = without(&after, Some(text)).unwrap().unwrap();
        assert!(!undone.contains(NAME), "{undone}");
    }

    #[test]
    fn a_drop_in_only_where_containerd_merges_it() {
        let of = |text: &str| drop_in(&text.parse().unwrap());
        assert_eq!(
            of("version = 3\nimports = ['/etc/containerd/conf.d/*.toml']"),
            Some("/etc/containerd/conf.d/cryopod.toml".into())
        );
        assert_eq!(
            of("version = 2\nimports = ['/etc/containerd/conf.d/*.toml']"),
            None
        );
        assert_eq!(of("version = 3"), None);
        assert_eq!(of("version = 3\nimports = ['/etc/one.toml']"), None);
    }

    #[test]
    fn a_runtime_that_an_imported_file_takes_away() {
        let of = |runtimes: &[&str]| {
            let tables = runtimes.iter().map(|name| {
                format!("[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.{name}]\n")
            });
            let text = format!(
                "[plugins.'io.containerd.grpc.v1.cri'.containerd]\ndefault_runtime_name = 'nvidia'\n{}",
                tables.collect::<String>()
            );
            missing(&text.parse().unwrap())
        };
        assert_eq!(of(&["cryopod", "nvidia"]), None);
        assert_eq!(of(&["nvidia"]).as_deref(), Some(NAME));
        assert_eq!(of(&["cryopod", "runc"]).as_deref(), Some("nvidia"));
        assert_eq!(missing(&DocumentMut::new()), None);
    }

    #[test]
    fn what_cannot_be_set_up() {
        for text in ["", "version = 1", "version = 2\nplugins = 1"] {
            let mut doc: DocumentMut = text.parse().unwrap();
            assert!(add(&mut doc, None, &stanza(false)).is_err(), "{text}");
        }
        for list in [
            "cri",
            "io.containerd.grpc.v1.cri",
            "io.containerd.cri.v1.runtime",
        ] {
            let doc = format!("disabled_plugins = ['{list}']").parse().unwrap();
            assert!(disabled(&doc).is_err(), "{list}");
        }
        let doc = "disabled_plugins = ['btrfs']".parse().unwrap();
        assert!(disabled(&doc).is_ok());
    }
}
