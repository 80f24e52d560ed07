//! Checks what an engine needs here to restore an archive: the container's image, volumes, networks, bind mounts,
//! runtime. An engine needs these before it calls its runtime, so the runtime's own checks come too late.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_archive::container::engine::Facts;
use cryopod_archive::metadata::Metadata;
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::programs::Tools;
use cryopod_host::spec::Spec;
use ipnet::IpNet;
use serde_json::Value;

use crate::engines::engine::Engine;

const ASK: Duration = Duration::from_secs(60);
/// Most volumes, networks and bind mounts to check; an archive may come from a stranger.
const MAX_ASKED: usize = 256;
/// Bind mounts that podman creates anew.
const MADE_BY_PODMAN: [&str; 8] = [
    "/dev/shm",
    "/etc/resolv.conf",
    "/etc/hostname",
    "/etc/hosts",
    "/run/.containerenv",
    "/run/secrets",
    "/var/run/.containerenv",
    "/var/run/secrets",
];

#[derive(Default)]
pub struct Records {
    pub facts: Facts,
    /// podman's `config.dump`.
    pub config: Value,
    /// podman's `network.status`.
    pub network_status: Value,
    /// The named volumes whose content is in the archive.
    pub volumes: BTreeSet<String>,
    /// The archive has the container's image.
    pub has_image: bool,
}

pub struct EngineQuestion<'a> {
    pub host: &'a Host,
    pub tools: &'a dyn Tools,
    /// The engine for the restore; `None`: the one that made the archive.
    pub engine: Option<Engine>,
    /// The restore will use podman's `--ignore-volumes`.
    pub ignore_volumes: bool,
    pub records: &'a Records,
    pub spec: &'a Spec,
    pub metadata: Option<&'a Metadata>,
}

/// Returns everything that the engine would miss.
pub fn missing(question: &EngineQuestion<'_>) -> Vec<Refusal> {
    let made_by = question.records.facts.engine.and_then(Engine::named);
    let Some(engine) = question.engine.or(made_by) else {
        return Vec::new();
    };
    let name = engine.program();
    let Some(program) = question.tools.find(name) else {
        return vec![Refusal::new(
            format!("{name}, which is to restore it, is not on PATH"),
            "install it, or name another engine with --engine",
        )];
    };
    let asked = AskedEngine {
        question,
        name,
        program,
    };
    let mut all = match engine {
        Engine::Podman => asked.podman(),
        Engine::Docker => asked.docker(),
        Engine::Containerd => asked.containerd(),
    };
    all.extend(asked.bind_mounts(engine));
    all
}

/// Checks a name: it may only hold characters that are safe for shells and terminals.
fn plain(name: &str) -> Result<&str, Refusal> {
    let usual = |c: char| c.is_ascii_alphanumeric() || "._-/:@+".contains(c);
    match !name.is_empty() && !name.starts_with('-') && name.chars().all(usual) {
        true => Ok(name),
        false => Err(Refusal::new(
            format!("the archive names {name:?}, which no engine takes for a name"),
            "the archive is damaged, or made to mislead: do not use it",
        )),
    }
}

struct AskedEngine<'a> {
    question: &'a EngineQuestion<'a>,
    name: &'static str,
    program: PathBuf,
}

impl AskedEngine<'_> {
    /// Asks the engine. Returns its output, or `None` if it exits with code 1, which means no.
    fn ask(&self, args: &[&str]) -> Result<Option<String>, Refusal> {
        let words: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
        let remedy = || format!("see whether {} works", self.name);
        match self.question.tools.output(&self.program, &words, ASK) {
            Ok(out) if out.code == 0 => Ok(Some(out.stdout)),
            Ok(out) if out.code == 1 => Ok(None),
            Ok(out) => {
                let said = out.stderr.lines().last().unwrap_or("it gives no reason");
                let what = format!("{} {}: {said}", self.name, args.join(" "));
                Err(Refusal::new(what, remedy()))
            }
            Err(e) => Err(Refusal::new(e.to_string(), remedy())),
        }
    }

    fn has(&self, args: &[&str]) -> Result<bool, Refusal> {
        Ok(self.ask(args)?.is_some())
    }

    fn podman(&self) -> Vec<Refusal> {
        let mut all = Vec::new();
        let facts = &self.question.records.facts;
        let config = &self.question.records.config;
        let rootfs = config.get("rootfs").and_then(Value::as_str);
        match (&facts.image, &facts.image_id, rootfs) {
            (_, _, Some(directory)) if !directory.is_empty() => {
                if !self.question.host.is_dir(directory) {
                    all.push(Refusal::new(
                        format!("podman's container has the root directory {directory:?}, and it is not here"),
                        "put the container's root file system there",
                    ));
                }
            }
            (Some(image), Some(id), _) if facts.engine == Some("podman") => {
                let missing = self.podman_image(image, id).err();
                all.extend(missing.filter(|_| !self.question.records.has_image));
            }
            _ => all.push(Refusal::new(
                "its config.dump is not podman's, which restores only what says which image and settings its container had",
                "name the engine that is to restore it with --engine",
            )),
        }
        all.extend(self.podman_runtime().err());
        all.extend(self.podman_pid_files().unwrap_or_else(|e| vec![e]));
        let volumes = config.get("namedVolumes").and_then(Value::as_array);
        for volume in volumes.into_iter().flatten().take(MAX_ASKED) {
            let name = volume.get("volumeName").and_then(Value::as_str);
            all.extend(name.and_then(|name| self.podman_volume(name).err()));
        }
        for name in networks(config).into_iter().take(MAX_ASKED) {
            all.extend(self.podman_network(name).err());
        }
        all
    }

    /// podman creates the container's storage from the image with this id. Before that it pulls a missing image by its
    /// name.
    fn podman_image(&self, image: &str, id: &str) -> Result<(), Refusal> {
        let (image, id) = (plain(image)?, plain(id)?);
        let short = id.get(..12).unwrap_or(id);
        let named = self.has(&["image", "exists", "--", image])?;
        if self.has(&["image", "exists", "--", id])? {
            return match named {
                true => Ok(()),
                false => Err(Refusal::new(
                    format!(
                        "podman has the container's image {short} not by its name {image}, and would pull that"
                    ),
                    format!("podman tag {id} {image}"),
                )),
            };
        }
        let carry = format!(
            "where it is: podman save -o image.tar {image}; here: podman load -i image.tar"
        );
        let what = match named {
            true => {
                format!("podman's image {image} is not the container's, which has the id {short}")
            }
            false => format!("podman does not have the container's image {image} (id {short})"),
        };
        let remote = !image.starts_with("localhost/") && !named;
        Err(Refusal::new(
            what,
            match remote {
                true => format!("podman pull {image}; or, if that gives another id, {carry}"),
                false => carry,
            },
        ))
    }

    /// podman calls the runtime with the name in the archive.
    fn podman_runtime(&self) -> Result<(), Refusal> {
        let Some(name) = &self.question.records.facts.runtime else {
            return Ok(());
        };
        let name = plain(name)?;
        // podman has no better query, and its exit code for a missing runtime is the same as for any error.
        let path = [
            "--runtime",
            name,
            "info",
            "--format",
            "{{.Host.OCIRuntime.Path}}",
        ];
        let words: Vec<&OsStr> = path.iter().map(OsStr::new).collect();
        let said = self.question.tools.output(&self.program, &words, ASK);
        if said.is_ok_and(|out| out.code == 0) {
            return Ok(());
        }
        if name.starts_with('/') {
            return Err(Refusal::new(
                format!("podman's container has the runtime {name}, and it is not here"),
                "install the runtime there",
            ));
        }
        let place = match self.question.tools.find(name) {
            Some(path) => path.display().to_string(),
            None => format!("/usr/local/bin/{name}"),
        };
        Err(Refusal::new(
            format!("podman knows no runtime {name}, with which the checkpoint was made"),
            format!(
                "in /etc/containers/containers.conf, below [engine.runtimes]: {name} = [\"{place}\"]"
            ),
        ))
    }

    /// podman writes the pid files of a restored container where the old ones were. Below its directory for running
    /// state it creates new ones.
    fn podman_pid_files(&self) -> Result<Vec<Refusal>, Refusal> {
        let said = self.ask(&["info", "--format", "{{.Store.RunRoot}}"])?;
        let made = said.unwrap_or_default();
        let files = ["conmonPidFile", "pidFile"].into_iter();
        let directories: BTreeSet<&Path> = files
            .filter_map(|name| self.question.records.config.get(name)?.as_str())
            .filter(|file| !file.starts_with(made.trim()))
            .filter_map(|file| Path::new(file).parent())
            .collect();
        let gone = directories
            .into_iter()
            .filter(|f| !f.as_os_str().is_empty() && !self.is_here(f));
        Ok(gone
            .map(|directory| {
                Refusal::new(
                    format!("podman writes the container's pid files into {directory:?}, and that is not here (it was below the other podman's runroot)"),
                    format!("mkdir -p {directory:?}"),
                )
            })
            .collect())
    }

    /// podman creates the container's volumes and fills them from the archive; it refuses existing ones.
    fn podman_volume(&self, name: &str) -> Result<(), Refusal> {
        let name = plain(name)?;
        let here = self.has(&["volume", "exists", "--", name])?;
        let carried = self.question.records.volumes.contains(name);
        match (here, carried, self.question.ignore_volumes) {
            (_, true, true) | (true, _, true) | (false, true, false) => Ok(()),
            (true, true, false) => Err(Refusal::new(
                format!("podman has a volume {name} already, and the archive has its content too"),
                format!(
                    "to use it as it is here, restore with --ignore-volumes (and say --ignore-volumes to this check); or podman volume rm {name}"
                ),
            )),
            (true, false, false) => Err(Refusal::new(
                format!(
                    "the archive does not have the content of the volume {name}, and podman looks for it there"
                ),
                "to use the volume as it is here, restore with --ignore-volumes (and say --ignore-volumes to this check)",
            )),
            (false, false, _) => Err(Refusal::new(
                format!(
                    "podman does not have the volume {name}, and its content is not in the archive"
                ),
                format!(
                    "podman volume create {name}; fill it as it was (podman volume export, podman volume import), and restore with --ignore-volumes (and say --ignore-volumes to this check)"
                ),
            )),
        }
    }

    /// podman connects the container to the networks of these names, with its old addresses.
    fn podman_network(&self, name: &str) -> Result<(), Refusal> {
        let name = plain(name)?;
        let interfaces = self.question.records.network_status.get(name);
        let interfaces = interfaces.and_then(|n| n.get("interfaces")?.as_object());
        let subnets: Vec<IpNet> = interfaces
            .into_iter()
            .flat_map(|all| all.values())
            .filter_map(|i| i.get("subnets")?.as_array())
            .flatten()
            .filter_map(|s| s.get("ipnet")?.as_str()?.parse().ok())
            .take(MAX_ASKED)
            .collect();
        let create: String = subnets
            .iter()
            .map(|s| format!(" --subnet {}", s.trunc()))
            .collect();
        if !self.has(&["network", "exists", "--", name])? {
            return Err(Refusal::new(
                format!("podman does not have the network {name}"),
                format!("podman network create{create} {name}"),
            ));
        }
        let said = self.ask(&["network", "inspect", "--", name])?;
        let said: Value = serde_json::from_str(&said.unwrap_or_default()).unwrap_or_default();
        let has = said.pointer("/0/subnets").and_then(Value::as_array);
        let has: Vec<IpNet> = has
            .into_iter()
            .flatten()
            .filter_map(|s| s.get("subnet")?.as_str()?.parse().ok())
            .collect();
        match subnets
            .iter()
            .find(|s| !has.iter().any(|h| h.contains(&s.addr())))
        {
            None => Ok(()),
            Some(lost) => Err(Refusal::new(
                format!(
                    "podman's network {name} has no place for the container's address {}",
                    lost.addr()
                ),
                format!("podman network rm {name}, and podman network create{create} {name}"),
            )),
        }
    }

    /// docker restores into a container that was created from the image beforehand.
    fn docker(&self) -> Vec<Refusal> {
        let facts = &self.question.records.facts;
        // Without a daemon docker prints null, and may report success.
        let runtimes: Runtimes = match self.ask(&["info", "--format", "{{json .Runtimes}}"]) {
            Ok(said) => match serde_json::from_str(&said.unwrap_or_default()) {
                Ok(runtimes) => runtimes,
                Err(_) => {
                    let remedy = "start it: systemctl start docker";
                    return vec![Refusal::new("docker's daemon does not answer", remedy)];
                }
            },
            Err(refusal) => return vec![refusal],
        };
        let image = facts.image.as_deref().or(facts.image_id.as_deref());
        let image = image.and_then(|image| self.docker_image(image).err());
        let image = image.filter(|_| !self.question.records.has_image);
        let runtime = facts.runtime.as_deref();
        let runtime = runtime.filter(|_| facts.engine == Some("docker"));
        let runtime = runtime.and_then(|name| docker_runtime(name, &runtimes).err());
        image.into_iter().chain(runtime).collect()
    }

    fn docker_image(&self, image: &str) -> Result<(), Refusal> {
        let image = plain(image)?;
        match self.has(&["image", "inspect", "--", image])? {
            true => Ok(()),
            false => Err(Refusal::new(
                format!("docker does not have the container's image {image}"),
                format!(
                    "docker pull {image}; or, where it is: docker save -o image.tar {image}; here: docker load -i image.tar"
                ),
            )),
        }
    }

    fn containerd(&self) -> Vec<Refusal> {
        let facts = &self.question.records.facts;
        // The CRI's containers are in a namespace of their own.
        let namespace = match facts.engine {
            Some("containerd") => "k8s.io",
            _ => "default",
        };
        let image = facts.image.as_deref().map(|image| {
            let image = plain(image)?;
            let filter = format!("name=={image}");
            let words = ["--namespace", namespace, "images", "ls", "--quiet", &filter];
            match self.ask(&words)? {
                Some(said) if !said.trim().is_empty() => Ok(()),
                Some(_) => Err(Refusal::new(
                    format!("containerd does not have the container's image {image} in its namespace {namespace}"),
                    format!("ctr --namespace {namespace} images pull {image}; or, where it is: ctr images export image.tar {image}; here: ctr --namespace {namespace} images import image.tar"),
                )),
                None => Err(Refusal::new("containerd does not answer", "start it: systemctl start containerd")),
            }
        });
        image.and_then(Result::err).into_iter().collect()
    }

    /// Sources of bind mounts must be where they were.
    fn bind_mounts(&self, engine: Engine) -> Vec<Refusal> {
        let records = self.question.records;
        // Engines that create a container anew take these from its new description.
        if engine != Engine::Podman || records.facts.engine != Some("podman") {
            return Vec::new();
        }
        let volumes = records.config.get("namedVolumes").and_then(Value::as_array);
        let volumes: Vec<&str> = volumes
            .into_iter()
            .flatten()
            .filter_map(|v| v.get("dest")?.as_str())
            .collect();
        // The bind mounts of GPUs change at a restore, as the map says.
        let nodes = self.question.metadata.map_or(&[][..], |s| &s.gpu.nodes);
        let elsewhere = |at: &str| {
            MADE_BY_PODMAN.contains(&at)
                || volumes.contains(&at)
                || nodes.iter().any(|n| n.path == at)
        };
        let mounts = self.question.spec.mounts();
        let binds = mounts.iter().filter(|m| {
            let options = m.options().iter().flatten();
            let bind = options.into_iter().any(|o| o == "bind" || o == "rbind");
            (bind || m.typ().as_deref() == Some("bind"))
                && !m.destination().to_str().is_some_and(elsewhere)
        });
        let sources = binds.filter_map(|m| Some((m.destination(), m.source().as_deref()?)));
        sources
            .filter(|(_, source)| source.is_absolute() && !self.is_here(source))
            .take(MAX_ASKED)
            .map(|(at, source)| {
                Refusal::new(
                    format!("the container has {source:?} of its host at {at:?}, and it is not here"),
                    format!("put it there, with the content that it had; for an empty directory: mkdir -p {source:?}"),
                )
            })
            .collect()
    }

    fn is_here(&self, path: &Path) -> bool {
        self.question.host.path(path).exists()
    }
}

type Runtimes = BTreeMap<String, Value>;

/// Checks that docker's daemon lists the runtime.
fn docker_runtime(name: &str, known: &Runtimes) -> Result<(), Refusal> {
    let name = plain(name)?;
    match known.contains_key(name) {
        true => Ok(()),
        false => Err(Refusal::new(
            format!("docker knows no runtime {name}, with which the checkpoint was made"),
            format!("add {name} to \"runtimes\" in /etc/docker/daemon.json, and reload docker"),
        )),
    }
}

/// Returns the networks of podman's container: a list since podman 6, before that a map.
fn networks(config: &Value) -> BTreeSet<&str> {
    let listed = config.get("orderedNetworks").and_then(Value::as_array);
    let listed = listed.into_iter().flatten();
    let mapped = config.get("newNetworks").and_then(Value::as_object);
    let mapped = mapped.into_iter().flat_map(|all| all.keys());
    listed
        .filter_map(|n| n.get("name")?.as_str())
        .chain(mapped.map(String::as_str))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for name in ["localhost/busybox:latest", "r.io:5000/a@sha256:ab", "net_1"] {
            assert!(plain(name).is_ok(), "{name}");
        }
        for name in ["", "-v", "a b", "a;rm", "a\u{1b}[0m", "$(x)"] {
            assert!(plain(name).is_err(), "{name}");
        }
    }

    #[test]
    fn networks_of_both_kinds() {
        let config =
            serde_json::json!({"newNetworks": {"b": {}, "a": {}}, "orderedNetworks": null});
        assert_eq!(
            networks(&config).into_iter().collect::<Vec<_>>(),
            ["a", "b"]
        );
        let config = serde_json::json!({"orderedNetworks": [{"name": "c"}]});
        assert_eq!(networks(&config).into_iter().collect::<Vec<_>>(), ["c"]);
    }
}
