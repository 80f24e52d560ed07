//! containerd: a runtime of the CRI, for Kubernetes. The keys are those of examples/kubernetes/containerd.toml.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use cryopod_gpu_plan::live;
use cryopod_operations::criu;
use toml_edit::{DocumentMut, Item, value};

use super::WantedSetup;
use super::change::{self, Change};
use super::toml_file::{hide, put_back, set, table};

const FILE: &str = "/etc/containerd/config.toml";
const EXAMPLE: &str = include_str!("../../../examples/kubernetes/containerd.toml");
const NAME: &str = "cryopod";
const OWN_FILE: &str = "cryopod.toml";
/// The CRI plugin, by the version of the configuration.
const PLUGIN_2: &str = "io.containerd.grpc.v1.cri";
const PLUGIN_3: &str = "io.containerd.cri.v1.runtime";
const RESTORES: &str = "enable_experimental_restore_via_create";
const LIMIT: Duration = Duration::from_secs(30);

pub fn changes(wanted: &WantedSetup<'_>) -> anyhow::Result<Vec<Change>> {
    let path = wanted.config.map_or(PathBuf::from(FILE), Path::to_owned);
    let before = change::read(wanted.host, &path)?;
    let version = containerds(wanted);
    let at = || path.display().to_string();
    let text = before.as_deref().unwrap_or_default();
    let main: DocumentMut = text.parse().with_context(at)?;
    disabled(&main).with_context(at)?;
    // Which restores containerd has by a key that older ones ignore.
    let restores = matches!(version.as_deref(), Some([2, 3, ..]));
    if let Some(own) = drop_in(&main) {
        let there = change::read(wanted.host, &own)?;
        let text = there.as_deref().unwrap_or("version = 3\n");
        let mut doc: DocumentMut = text.parse().with_context(|| own.display().to_string())?;
        add(&mut doc, Some(&main), restores, wanted.default)
            .with_context(|| own.display().to_string())?;
        return Ok(Change::of(own, there, doc.to_string())
            .into_iter()
            .collect());
    }
    let mut doc = main;
    if before.is_none() {
        let newer = version.is_some_and(|v| v.first() >= Some(&2));
        doc.insert("version", value(if newer { 3 } else { 2 }));
    }
    add(&mut doc, None, restores, wanted.default).with_context(at)?;
    Ok(Change::of(path, before, doc.to_string())
        .into_iter()
        .collect())
}

/// Returns true if a containerd runs that has started since its configuration was written. It reads it when it starts;
/// `ctr` finds our shim without.
pub fn is_read(wanted: &WantedSetup<'_>) -> anyhow::Result<bool> {
    let host = wanted.host;
    let main = wanted.config.map_or(PathBuf::from(FILE), Path::to_owned);
    let text = change::read(host, &main)?.unwrap_or_default();
    let own = drop_in(&text.parse().with_context(|| main.display().to_string())?);
    let written = [Some(main), own].into_iter().flatten();
    let written = written.filter_map(|p| host.path(p).metadata().ok()?.modified().ok());
    let now = SystemTime::now();
    let ages = written.filter_map(|at| now.duration_since(at).ok());
    let Some(age) = ages.min() else {
        return Ok(true);
    };
    let up = host.text("/proc/uptime").unwrap_or_default();
    let up: f64 = up.split(' ').next().unwrap_or_default().parse()?;
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?;
    let ticks = ticks.filter(|t| *t > 0).unwrap_or(100) as f64;
    let pids = host.names("/proc");
    let mut pids = pids.iter().filter_map(|name| name.parse::<i32>().ok());
    Ok(pids.any(|pid| {
        let name = host.line(format!("/proc/{pid}/comm"));
        let started = live::start_time(host, pid).filter(|_| name.as_deref() == Some("containerd"));
        started.is_some_and(|started| up - started as f64 / ticks < age.as_secs_f64())
    }))
}

fn containerds(wanted: &WantedSetup<'_>) -> Option<Vec<u32>> {
    let path = wanted.tools.find("containerd")?;
    criu::numbers(&criu::version_line(wanted.tools, &path, LIMIT)?)
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
fn drop_in(main: &DocumentMut) -> Option<PathBuf> {
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

/// Adds the runtime. `main`: the file from which to take the options of the present default runtime, if not from `doc`.
fn add(
    doc: &mut DocumentMut,
    main: Option<&DocumentMut>,
    restores: bool,
    default: bool,
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
    let example: DocumentMut = EXAMPLE.parse()?;
    let mut ours = example
        .get("plugins")
        .and_then(|p| {
            p.get(PLUGIN_3)?
                .get("containerd")?
                .get("runtimes")?
                .get(NAME)
        })
        .context("the example has no runtime")?
        .clone();
    if let Some(theirs) = ours.get_mut("options").and_then(Item::as_table_like_mut) {
        for (key, item) in options {
            if let Item::Value(new) = item {
                set(theirs, &key, new);
            }
        }
    }
    let plugins = table(doc.as_table_mut(), "plugins")?;
    let cri = table(plugins, plugin)?;
    if restores && version == 3 && !cri.contains_key(RESTORES) {
        cri.insert(RESTORES, value(true));
    }
    let containerd = table(cri, "containerd")?;
    if default {
        set(containerd, "default_runtime_name", NAME.into());
    }
    let runtimes = table(containerd, "runtimes")?;
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

    fn done(text: &str, default: bool) -> String {
        let mut doc: DocumentMut = text.parse().unwrap();
        add(&mut doc, None, true, default).unwrap();
        let after = doc.to_string();
        add(&mut doc, None, true, default).unwrap();
        assert_eq!(doc.to_string(), after, "a second time changes nothing");
        after
    }

    fn runtime<'a>(doc: &'a DocumentMut, plugin: &str) -> &'a Item {
        &doc["plugins"][plugin]["containerd"]["runtimes"][NAME]
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
    fn what_cannot_be_set_up() {
        for text in ["", "version = 1", "version = 2\nplugins = 1"] {
            let mut doc: DocumentMut = text.parse().unwrap();
            assert!(add(&mut doc, None, false, false).is_err(), "{text}");
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
