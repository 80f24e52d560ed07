//! Finds a running container of any engine: by its id in the records of the low-level runtimes, or by its name through
//! podman or docker.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use cryopod_gpu_plan::live;
use cryopod_host::cgroups;
use cryopod_host::files::{Host, own_directory, read_bounded};
use cryopod_host::limited::wait_until;
use cryopod_host::processes::stat::Stat;
use serde_json::Value;

use crate::engines::engine::EngineCall;

/// Where crun and runc keep their state; containerd and docker have subdirectories there.
const ROOTS: [&str; 2] = ["/run/crun", "/run/runc"];
/// Directories with one such root per namespace.
const NAMESPACED: [&str; 2] = ["/run/containerd/runc", "/run/docker/runtime-runc"];
/// Shortest accepted prefix of an id.
const SHORTEST: usize = 4;
const LIMIT: Duration = Duration::from_secs(30);
/// Time for the kernel to report that the last process runs again.
const THAW: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub struct Container {
    pub init: i32,
    pub start_time: u64,
}

impl Container {
    /// Finds containers by what [`Container::find`] takes, at the same time: an engine may take 0.1 s to name a process.
    pub fn find_all(host: &Host, names: &[&str]) -> Vec<anyhow::Result<Self>> {
        at_once(names, |name| Self::find(host, name))
    }

    /// Finds a container by id, by a prefix of the id, by name, or as `pid:N`, its init process. Fails if there is
    /// none, if there are several, or if it does not run.
    pub fn find(host: &Host, name: &str) -> anyhow::Result<Self> {
        let init = match name.strip_prefix("pid:") {
            Some(pid) => pid
                .parse()
                .with_context(|| format!("{name}: not a process id"))?,
            None => init_of(name)?,
        };
        let start_time = live::start_time(host, init)
            .filter(|_| init > 0 && !live::tree(host, init).is_empty())
            .with_context(|| format!("{name}: it does not run"))?;
        Ok(Self { init, start_time })
    }

    /// Returns its processes: the init process, its descendants, and those in its cgroup.
    pub fn processes(&self, host: &Host) -> Vec<i32> {
        let mut all = live::tree(host, self.init);
        let of = |pid: i32| host.text(format!("/proc/{pid}/cgroup")).ok();
        let own = of(self.init).unwrap_or_default();
        // Only a cgroup of its own: never the root cgroup, nor that of whoever has started it.
        let parent = Stat::read(host, self.init).and_then(|stat| of(stat.parent));
        let told = own.lines().any(|line| !line.ends_with(":/")) && parent.is_none_or(|p| p != own);
        if told && of(1).is_none_or(|root| root != own) {
            let pids = host.names("/proc");
            let pids = pids.iter().filter_map(|n| n.parse::<i32>().ok());
            all.extend(pids.filter(|pid| of(*pid).is_some_and(|text| text == own)));
        }
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Returns its bundle, if a low-level runtime has a record of it.
    pub fn bundle(&self) -> Option<PathBuf> {
        bundle_in(&self.record()?)
    }

    /// Returns the low-level runtime's directory for it.
    pub fn state_directory(&self) -> Option<PathBuf> {
        Some(self.record()?.parent()?.into())
    }

    fn record(&self) -> Option<PathBuf> {
        let mut records = records().into_iter().map(|(_, record)| record);
        records.find(|record| pid_in(record).is_ok_and(|pid| pid == self.init))
    }

    /// Fails if the container is paused: the driver's thread in it would not answer.
    pub fn is_unpaused(&self, host: &Host, name: &str) -> anyhow::Result<()> {
        if !wait_until(THAW, THAW / 20, || !cgroups::is_frozen(host, self.init)) {
            bail!("{name}: it is paused, and its driver cannot work; unpause it first");
        }
        Ok(())
    }
}

fn init_of(name: &str) -> anyhow::Result<i32> {
    let records = records();
    let with = |fits: &dyn Fn(&str) -> bool| -> Vec<(String, PathBuf)> {
        records.iter().filter(|(id, _)| fits(id)).cloned().collect()
    };
    let mut found = with(&|id| id == name);
    if found.is_empty() {
        if let Some(pid) = by_engine(name, &records)? {
            return Ok(pid);
        }
        if name.len() >= SHORTEST {
            found = with(&|id| id.starts_with(name));
        }
    }
    match &found[..] {
        [] => bail!(
            "{name}: no running container of podman, docker, containerd, crun or runc has this name or id; `pid:N` names one by its first process"
        ),
        [(_, record)] => pid_in(record),
        several => {
            let ids: Vec<_> = several.iter().map(|(id, _)| id.as_str()).collect();
            bail!("{name}: several containers: {}", ids.join(", "))
        }
    }
}

/// Lists every container of crun and runc: its id and its record.
fn records() -> Vec<(String, PathBuf)> {
    let below = |dir: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    };
    let roots = ROOTS.iter().map(PathBuf::from);
    let roots = roots.chain(NAMESPACED.iter().flat_map(|dir| below(Path::new(dir))));
    let record = |dir: PathBuf| {
        let id = dir.file_name()?.to_str()?.to_owned();
        let file = ["status", "state.json"].map(|name| dir.join(name));
        Some((id, file.into_iter().find(|file| file.is_file())?))
    };
    roots
        .flat_map(|root| below(&root))
        .filter_map(record)
        .collect()
}

/// Reads the pid from crun's or runc's record. Fails if another process has it by now.
fn pid_in(record: &Path) -> anyhow::Result<i32> {
    let text = fs::read(record).with_context(|| format!("{}: cannot be read", record.display()))?;
    let json: Value = serde_json::from_slice(&text)
        .with_context(|| format!("{}: cannot be understood", record.display()))?;
    let number = |keys: [&str; 2]| keys.iter().find_map(|key| json.get(key)?.as_u64());
    let pid = number(["pid", "init_process_pid"]).and_then(|pid| i32::try_from(pid).ok());
    let pid = pid.with_context(|| format!("{}: names no process", record.display()))?;
    let started = number(["process-start-time", "init_process_start"]);
    if started.is_some_and(|time| live::start_time(&Host::system(), pid) != Some(time)) {
        bail!("{}: its process {pid} has ended", record.display());
    }
    Ok(pid)
}

/// Returns the bundle in a record: crun has a field for it, runc a label.
fn bundle_in(record: &Path) -> Option<PathBuf> {
    let json: Value = serde_json::from_slice(&fs::read(record).ok()?).ok()?;
    if let Some(bundle) = json.get("bundle").and_then(Value::as_str) {
        return Some(bundle.into());
    }
    let labels = json.pointer("/config/labels")?.as_array()?;
    let mut labels = labels.iter().filter_map(Value::as_str);
    labels.find_map(|label| label.strip_prefix("bundle=").map(PathBuf::from))
}

/// The files with the names of podman's containers, beside their bundles; the second is for `--rm`.
const NAMES: [&str; 2] = ["containers.json", "volatile-containers.json"];
/// Bytes of such a file that are read at most: some 10,000 containers.
const MAX_NAMES: u64 = 64 << 20;

/// Returns the process of the container that has this name in podman's storage; podman itself takes 0.1 s to start.
fn in_podmans_storage(name: &str, records: &[(String, PathBuf)]) -> Option<i32> {
    let mut storages: BTreeMap<PathBuf, Vec<Value>> = BTreeMap::new();
    let read = |file: &PathBuf| {
        serde_json::from_slice::<Vec<Value>>(&read_bounded(file, MAX_NAMES).ok()?).ok()
    };
    let mut is_named = |id: &str, record: &Path| {
        let bundle = bundle_in(record)?; // STORAGE/overlay-containers/ID/userdata
        let own = bundle.parent().filter(|_| bundle.ends_with("userdata"))?;
        let storage = own.parent().filter(|_| own.ends_with(id))?;
        let storage = Some(storage).filter(|storage| own_directory(storage))?;
        let all = storages.entry(storage.into()).or_insert_with(|| {
            let files = NAMES.iter().map(|file| storage.join(file));
            files.filter_map(|file| read(&file)).flatten().collect()
        });
        let own = all.iter().find(|container| container["id"] == id)?;
        Some(own["names"].as_array()?.iter().any(|one| one == name))
    };
    let mut named = Vec::new();
    for (id, record) in records {
        if is_named(id, record) == Some(true) {
            named.push(record);
        }
    }
    match named[..] {
        [record] => pid_in(record).ok(),
        _ => None,
    }
}

/// Asks podman and docker. A missing program knows no containers.
fn by_engine(name: &str, records: &[(String, PathBuf)]) -> anyhow::Result<Option<i32>> {
    if name.starts_with('-') {
        return Ok(None);
    }
    let answers = at_once(&["podman", "docker"], |engine| {
        if let ("podman", Some(pid)) = (*engine, in_podmans_storage(name, records)) {
            return Some((*engine, pid));
        }
        let args = ["container", "inspect", "--format", "{{.State.Pid}}", name];
        let said = EngineCall::new(engine, LIMIT).args(args).run().ok()?;
        let pid = said.trim().parse::<i32>().ok().filter(|pid| *pid > 0)?;
        Some((*engine, pid))
    });
    one_of(name, &answers.into_iter().flatten().collect::<Vec<_>>())
}

/// Returns what `ask` says of each, in their order.
fn at_once<T: Sync, A: Send>(all: &[T], ask: impl Fn(&T) -> A + Sync) -> Vec<A> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = all.iter().map(|one| scope.spawn(|| ask(one))).collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|answer| answer.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// podman's own command `docker` answers with podman's containers: the same process.
fn one_of(name: &str, answers: &[(&str, i32)]) -> anyhow::Result<Option<i32>> {
    match answers {
        [(one, a), (other, b)] if a != b => bail!(
            "{name}: {one} and {other} have a running container of this name: say which by its id, or as pid:{a} ({one}) or pid:{b} ({other})"
        ),
        _ => Ok(answers.first().map(|(_, pid)| *pid)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_both_runtimes() {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("status", r#"{"pid": 7, "bundle": "/b"}"#),
            (
                "state.json",
                r#"{"init_process_pid": 8, "config": {"labels": ["a=b", "bundle=/b"]}}"#,
            ),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        assert_eq!(pid_in(&dir.path().join("status")).unwrap(), 7);
        assert_eq!(pid_in(&dir.path().join("state.json")).unwrap(), 8);
        for name in ["status", "state.json"] {
            assert_eq!(bundle_in(&dir.path().join(name)), Some("/b".into()));
        }
        let own = std::process::id();
        let started = live::start_time(&Host::system(), own.try_into().unwrap()).unwrap();
        for (text, is_its) in [
            ("{}".to_owned(), false),
            (
                format!(r#"{{"pid": {own}, "process-start-time": {started}}}"#),
                true,
            ),
            (
                format!(r#"{{"pid": {own}, "process-start-time": 1}}"#),
                false,
            ),
        ] {
            fs::write(dir.path().join("status"), &text).unwrap();
            assert_eq!(pid_in(&dir.path().join("status")).is_ok(), is_its, "{text}");
        }
    }

    #[test]
    fn names_in_podmans_storage() {
        let dir = tempfile::tempdir().unwrap();
        let storage = dir.path().join("overlay-containers");
        let record = |id: &str, pid: i32| {
            fs::create_dir_all(storage.join(id)).unwrap();
            let bundle = storage.join(id).join("userdata");
            let record = dir.path().join(id);
            let text = serde_json::json!({"pid": pid, "bundle": bundle}).to_string();
            fs::write(&record, text).unwrap();
            (id.to_owned(), record)
        };
        let records = [record("a1", 7), record("b2", 8), record("c3", 9)];
        assert_eq!(in_podmans_storage("one", &records), None);
        let names = r#"[{"id": "a1", "names": ["one", "uno"]}, {"id": "b2", "names": ["two"]},
            {"id": "d4", "names": ["four"]}, {}]"#;
        fs::write(storage.join("containers.json"), names).unwrap();
        let names = r#"[{"id": "c3", "names": ["two"]}]"#;
        fs::write(storage.join("volatile-containers.json"), names).unwrap();
        for (name, pid) in [
            ("one", Some(7)),
            ("uno", Some(7)),
            ("two", None),
            ("four", None),
        ] {
            assert_eq!(in_podmans_storage(name, &records), pid, "{name}");
        }
    }

    #[test]
    fn a_name_that_two_engines_have() {
        assert_eq!(one_of("job", &[]).unwrap(), None);
        assert_eq!(one_of("job", &[("docker", 7)]).unwrap(), Some(7));
        let alias = [("podman", 7), ("docker", 7)];
        assert_eq!(one_of("job", &alias).unwrap(), Some(7));
        let error = one_of("job", &[("podman", 7), ("docker", 8)]).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("pid:7 (podman) or pid:8 (docker)")
        );
    }

    #[test]
    fn a_process_that_is_gone() {
        let host = Host::system();
        assert!(Container::find(&host, "pid:999999999").is_err());
        assert!(Container::find(&host, "pid:x").is_err());
        let own = format!("pid:{}", std::process::id());
        let own = Container::find(&host, &own).unwrap();
        assert!(own.processes(&host).contains(&own.init));
        assert!(!cgroups::is_frozen(&host, own.init));
    }

    #[test]
    fn paused_as_soon_as_it_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let host = Host::at(dir.path());
        let paused = || {
            let container = Container {
                init: 7,
                start_time: 0,
            };
            cgroups::is_frozen(&host, container.init)
        };
        write("proc/7/cgroup", "0::/a\n");
        write("sys/fs/cgroup/a/cgroup.events", "populated 1\nfrozen 0\n");
        write("sys/fs/cgroup/a/cgroup.freeze", "0\n");
        assert!(!paused());
        write("sys/fs/cgroup/a/cgroup.freeze", "1\n");
        assert!(paused());
        write("sys/fs/cgroup/a/cgroup.freeze", "0\n");
        write("sys/fs/cgroup/a/cgroup.events", "populated 1\nfrozen 1\n");
        assert!(paused());
        write("proc/7/cgroup", "5:freezer:/b\n4:memory:/b\n");
        for (state, want) in [
            ("THAWED\n", false),
            ("FREEZING\n", true),
            ("FROZEN\n", true),
        ] {
            write("sys/fs/cgroup/freezer/b/freezer.state", state);
            assert_eq!(paused(), want, "{state}");
        }
    }
}
