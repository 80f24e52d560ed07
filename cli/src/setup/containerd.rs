//! containerd: a runtime of the CRI, for Kubernetes. The keys are those of examples/kubernetes/containerd.toml.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_operations::criu;
use toml_edit::{DocumentMut, Item, TableLike, value};

use super::WantedSetup;
use super::change::{self, Change};
use super::toml_file::{hide, put_back, set, table};
use super::trial;

const FILE: &str = "/etc/containerd/config.toml";
const EXAMPLE: &str = include_str!("../../../examples/kubernetes/containerd.toml");
const NAME: &str = "cryopod";
const RUNC: &str = "runc";
/// Options of a runtime.
const BINARY: &str = "BinaryName";
const CGROUP: &str = "SystemdCgroup";
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
        return drop_in_change(wanted, own, &path, &main);
    }
    let mut doc = main;
    if before.is_none() {
        let newer = version(wanted).is_some_and(|v| v.first() >= Some(&2));
        doc.insert("version", value(if newer { 3 } else { 2 }));
    }
    let options = effective_options(wanted, &path, &doc);
    add(&mut doc, None, options, &Stanza::of(wanted)).with_context(at)?;
    Ok(Change::of(path, before, doc.to_string())
        .into_iter()
        .collect())
}

/// The main configuration file.
pub fn file(wanted: &WantedSetup<'_>) -> PathBuf {
    wanted.config.map_or(PathBuf::from(FILE), Path::to_owned)
}

/// The change of a file of our own. `main`: the configuration that imports it, from `path`.
pub fn drop_in_change(
    wanted: &WantedSetup<'_>,
    own: PathBuf,
    path: &Path,
    main: &DocumentMut,
) -> anyhow::Result<Vec<Change>> {
    let there = change::read(wanted.host, &own)?;
    let text = there.as_deref().unwrap_or("version = 3\n");
    let at = || own.display().to_string();
    let mut doc: DocumentMut = text.parse().with_context(at)?;
    let options = effective_options(wanted, path, main);
    add(&mut doc, Some(main), options, &Stanza::of(wanted)).with_context(at)?;
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
    add(&mut doc, Some(main), options(main), &alone)?;
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

/// The configuration as containerd understands it: with the files that it imports, and its defaults.
fn effective(wanted: &WantedSetup<'_>, path: &Path) -> Option<DocumentMut> {
    let containerd = wanted.tools.find("containerd")?;
    let path = path.to_string_lossy();
    let words = ["--config", &path, "config", "dump"];
    let dump = trial::run_one(wanted.tools, &containerd, &words, LIMIT).ok()?;
    dump.parse().ok()
}

/// The options for cryopod's runtime, by the configuration in `path`; by `main`, its text, if containerd does not say it.
fn effective_options(
    wanted: &WantedSetup<'_>,
    path: &Path,
    main: &DocumentMut,
) -> Vec<(&'static str, Item)> {
    let dump = effective(wanted, path).filter(|dump| section(dump).is_some());
    options(dump.as_ref().unwrap_or(main))
}

/// Fails if containerd would not know the runtime, or no longer its default one, by the configuration as it is now:
/// containerd 1 lets a file that it imports replace the whole section. What it cannot be asked is not held against it.
pub fn ensure_known(wanted: &WantedSetup<'_>) -> anyhow::Result<()> {
    let path = file(wanted);
    let Some(missing) = effective(wanted, &path).and_then(|dump| missing(&dump)) else {
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
    let containerd = section(dump)?;
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

/// Adds the runtime with these options, or changes those that it has. `main`: the configuration of which `doc` becomes a
/// part, if it is not all of it.
fn add(
    doc: &mut DocumentMut,
    main: Option<&DocumentMut>,
    options: Vec<(&'static str, Item)>,
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
    let lacks = lacks_runc(section(main.unwrap_or(doc)));
    let mut ours = example()?;
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
    let runtimes = table(containerd, "runtimes")?;
    if version == 2 && lacks && !runtimes.contains_key(RUNC) {
        runtimes.insert(RUNC, runc());
    }
    if !runtimes.contains_key(NAME) {
        // Positions of the example would sort it among the tables of this file.
        unplace(&mut ours);
        runtimes.insert(NAME, ours);
    }
    for (key, item) in options {
        if let Item::Value(new) = item {
            set(table(table(runtimes, NAME)?, "options")?, key, new);
        }
    }
    Ok(())
}

/// The CRI's section with the runtimes.
fn section(doc: &DocumentMut) -> Option<&dyn TableLike> {
    let cri = |plugin| doc.get("plugins")?.get(plugin)?.get("containerd");
    cri(PLUGIN_3).or_else(|| cri(PLUGIN_2))?.as_table_like()
}

/// Returns true if runc is the default runtime and no table describes it. containerd 1 has one of its own until there is a
/// table of runtimes; without its default runtime the CRI does not load.
fn lacks_runc(section: Option<&dyn TableLike>) -> bool {
    let of = |key| section.and_then(|s| s.get(key));
    let default = of("default_runtime_name").and_then(Item::as_str);
    default.is_none_or(|name| name == RUNC) && of("runtimes").is_none_or(|r| r.get(RUNC).is_none())
}

fn runc() -> Item {
    let mut runc = toml_edit::Table::new();
    runc.insert("runtime_type", value("io.containerd.runc.v2"));
    Item::Table(runc)
}

/// The options of the runtime that is the default now: which runtime of OCI, and whether systemd makes cgroups. None if they
/// are not known, or if that is cryopod's.
fn options(doc: &DocumentMut) -> Vec<(&'static str, Item)> {
    let of = || {
        let section = section(doc)?;
        let name = section.get("default_runtime_name").and_then(Item::as_str);
        let name = name.filter(|name| !name.is_empty()).unwrap_or(RUNC);
        let options = section.get("runtimes")?.get(name)?.get("options")?;
        let options = options.as_table_like().filter(|_| name != NAME)?;
        let binary = options.get(BINARY).filter(|b| b.as_str() != Some(""));
        let mut kept = vec![(BINARY, binary.cloned().unwrap_or(value(RUNC)))];
        kept.extend(options.get(CGROUP).map(|item| (CGROUP, item.clone())));
        Some(kept)
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
            let lacks = plugin == PLUGIN_2 && lacks_runc(Some(containerd));
            if let Some(runtimes) = containerd
                .get_mut("runtimes")
                .and_then(Item::as_table_like_mut)
            {
                put_back(runtimes, was_runtimes, NAME);
                let own = runtimes.get(RUNC).and_then(Item::as_table_like);
                let own = own.is_some_and(|runc| runc.len() == 1);
                let others = runtimes.iter().any(|(name, _)| name != RUNC);
                match others {
                    true if lacks => drop(runtimes.insert(RUNC, runc())),
                    false if plugin == PLUGIN_2 && own => put_back(runtimes, was_runtimes, RUNC),
                    _ => {}
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
    use std::ffi::OsStr;

    use cryopod_host::files::Host;
    use cryopod_host::programs::{Output, ToolError, Tools};
    use cryopod_test_files::TestFiles;

    use super::*;
    use crate::setup::tests::packaged;

    fn stanza(default: bool) -> Stanza<'static> {
        Stanza {
            restores: true,
            default,
            shim: None,
        }
    }

    fn done(text: &str, default: bool) -> String {
        let mut doc: DocumentMut = text.parse().unwrap();
        let from = options(&doc);
        add(&mut doc, None, from, &stanza(default)).unwrap();
        let after = doc.to_string();
        let from = options(&doc);
        add(&mut doc, None, from, &stanza(default)).unwrap();
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

    /// `nvidia-ctk runtime configure` adds its runtime, and takes no other for the default.
    #[test]
    fn containerd_1_keeps_runc_beside_the_runtime_of_a_later_toolkit() {
        let text = "version = 2\n";
        let nvidia = "\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.nvidia]\nruntime_type = 'io.containerd.runc.v2'\n";
        let runtimes_of = |text: &str| {
            let doc: DocumentMut = text.parse().unwrap();
            let all = section(&doc).unwrap().get("runtimes").unwrap();
            let all = all.as_table_like().unwrap().iter();
            all.map(|(name, _)| name.to_owned()).collect::<Vec<_>>()
        };
        for default in [false, true] {
            let configured = done(text, default) + nvidia;
            let undone = without(&configured, Some(text)).unwrap().unwrap();
            assert_eq!(runtimes_of(&undone), ["runc", "nvidia"], "{undone}");
            // An earlier setup as the default runtime left runc out.
            let mut doc: DocumentMut = configured.parse().unwrap();
            let runtimes = &mut doc["plugins"][PLUGIN_2]["containerd"]["runtimes"];
            runtimes.as_table_like_mut().unwrap().remove(RUNC);
            let undone = without(&doc.to_string(), Some(text)).unwrap().unwrap();
            assert_eq!(runtimes_of(&undone), ["nvidia", "runc"], "{undone}");
        }
    }

    /// The template of k3s and rke2 has it.
    #[test]
    fn a_stanza_beside_a_runc_has_none() {
        let added = |main: &str| {
            let main: DocumentMut = main.parse().unwrap();
            let mut doc: DocumentMut = "version = 2\n".parse().unwrap();
            add(&mut doc, Some(&main), Vec::new(), &stanza(false)).unwrap();
            doc.to_string()
        };
        let cri = "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd";
        let base = format!("{cri}.runtimes.runc]\nruntime_type = 'io.containerd.runc.v2'\n");
        assert!(!added(&base).contains("runtimes.runc"));
        assert!(added("version = 2\n").contains("runtimes.runc"));
        let nvidia = format!("{cri}]\ndefault_runtime_name = 'nvidia'\n");
        assert!(!added(&nvidia).contains("runtimes.runc"));
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
    fn the_default_runtime_of_an_imported_file_and_of_later() {
        struct Dumps(&'static str);
        impl Tools for Dumps {
            fn find(&self, name: &str) -> Option<PathBuf> {
                (name == "containerd").then(|| name.into())
            }
            fn output(&self, _: &Path, args: &[&OsStr], _: Duration) -> Result<Output, ToolError> {
                let stdout = match args.contains(&OsStr::new("dump")) {
                    true => self
                        .0
                        .replace('@', "[plugins.'io.containerd.cri.v1.runtime'.containerd"),
                    false => String::new(),
                };
                Ok(Output {
                    stdout,
                    ..Output::default()
                })
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let main = "version = 3\nimports = ['/etc/containerd/conf.d/*.toml']\n";
        dir.put("etc/containerd/config.toml", main);
        let host = Host::at(dir.path());
        let text_by = |dump| {
            let tools = Dumps(dump);
            let wanted = packaged(&host, &tools);
            for change in changes(&wanted).unwrap() {
                dir.dir("etc/containerd/conf.d");
                change.make(&host).unwrap();
            }
            assert!(changes(&wanted).unwrap().is_empty());
            let text = dir.path().join("etc/containerd/conf.d/cryopod.toml");
            std::fs::read_to_string(text).unwrap()
        };
        let nvidia = "@]\ndefault_runtime_name = 'nvidia'\n@.runtimes.nvidia.options]\nBinaryName = '/usr/bin/nvidia-container-runtime'\nSystemdCgroup = true\n";
        let runc = "@.runtimes.runc.options]\nBinaryName = ''\nSystemdCgroup = false\n";
        let first = text_by(runc);
        assert!(first.contains("BinaryName = 'runc'"), "{first}");
        let later = text_by(nvidia);
        assert!(
            later.contains("BinaryName = '/usr/bin/nvidia-container-runtime'"),
            "{later}"
        );
        assert!(later.contains("SystemdCgroup = true"), "{later}");
        // What cannot be told stays.
        assert_eq!(text_by(""), later);
        assert_eq!(
            text_by(
                "@]\ndefault_runtime_name = 'cryopod'\n@.runtimes.cryopod.options]\nBinaryName = ''\n"
            ),
            later
        );
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
            assert!(
                add(&mut doc, None, Vec::new(), &stanza(false)).is_err(),
                "{text}"
            );
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
