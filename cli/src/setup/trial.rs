//! Tests a setup: checkpoints, removes and restores a small container, which has no GPU and no network. Its files are those
//! of this host, read-only, so that no image is pulled.

use std::ffi::OsStr;
use std::io::Write;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use cryopod_archive::format::digest::Digest;
use cryopod_host::files::Host;
use cryopod_host::limited::wait_until;
use cryopod_host::programs::Tools;
use serde_json::{Value, json};

use crate::temp_dir::{Holds, LockedTempDir};

use super::{Target, WantedSetup};

const LIMIT: Duration = Duration::from_secs(120);
const SHIM: &str = "io.containerd.cryopod.v2";
const SOCKET: &str = "/run/containerd/containerd.sock";
const CONTAINER: &str = "cryopod-setup";
const IMAGE: &str = "localhost/cryopod-setup:test";
/// Directories of programs and libraries.
pub const PROGRAMS: [&str; 7] = ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"];
pub const EMPTY: [&str; 7] = ["dev", "etc", "proc", "run", "sys", "tmp", "var"];

pub enum TrialOutcome {
    Works(String),
    /// The engine does not run, or has not read its configuration yet.
    NotNow(String),
}

/// `waits`: containerd was just restarted, and answers soon.
pub fn run(target: Target, wanted: &WantedSetup<'_>, waits: bool) -> anyhow::Result<TrialOutcome> {
    let (host, tools) = (wanted.host, wanted.tools);
    let name = match target {
        Target::Podman => "podman",
        Target::Docker => "docker",
        Target::Containerd | Target::Kubernetes => "ctr",
    };
    let Some(program) = tools.find(name) else {
        return Ok(TrialOutcome::NotNow(format!(
            "install {name}, which asks the engine"
        )));
    };
    let engine = TrialEngine {
        tools,
        program: &program,
    };
    let temp = LockedTempDir::anywhere(Holds::Copy)?;
    let (mounts, file) = (mounts(host), temp.path().join("image.tar"));
    image(host, &file).with_context(|| file.display().to_string())?;
    let trial = Trial {
        engine,
        temp: temp.path(),
        file: file.to_string_lossy().into_owned(),
        container: match target {
            Target::Podman | Target::Docker => format!("{CONTAINER}-{}", std::process::id()),
            // One name: the next run removes what a killed one left.
            Target::Containerd | Target::Kubernetes => CONTAINER.into(),
        },
        shim: wanted
            .shim_path()
            .map_or(SHIM.into(), |path| path.to_string_lossy().into_owned()),
        mounts,
    };
    let start = Instant::now();
    let not_now = match target {
        Target::Podman => None,
        Target::Docker => trial.docker_not_now(),
        Target::Containerd | Target::Kubernetes => trial.containerd_not_now(waits),
    };
    if let Some(why) = not_now {
        return Ok(TrialOutcome::NotNow(why));
    }
    let done = match target {
        Target::Podman => trial.podman(),
        Target::Docker => trial.docker(),
        Target::Containerd | Target::Kubernetes => trial.containerd(),
    };
    let left = trial.clean(target);
    done?;
    left.context("the test's container cannot be removed")?;
    Ok(works(start))
}

/// Returns the outcome of a test that began then and succeeded.
pub fn works(start: Instant) -> TrialOutcome {
    TrialOutcome::Works(format!(
        "a container without a GPU was checkpointed and restored in {:.1} s",
        start.elapsed().as_secs_f64()
    ))
}

/// Runs a program. Fails with what it said.
pub fn run_one(
    tools: &dyn Tools,
    program: &Path,
    args: &[&str],
    limit: Duration,
) -> anyhow::Result<String> {
    let words: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
    let out = tools.output(program, &words, limit)?;
    if out.code == 0 {
        return Ok(out.stdout);
    }
    let said: Vec<&str> = out.stderr.lines().map(str::trim).collect();
    let said = said[said.len().saturating_sub(4)..].join("; ");
    bail!("{} {}: {said}", program.display(), args.join(" "))
}

struct TrialEngine<'a> {
    tools: &'a dyn Tools,
    program: &'a Path,
}

impl TrialEngine<'_> {
    fn run(&self, args: &[&str]) -> anyhow::Result<String> {
        run_one(self.tools, self.program, args, LIMIT)
    }

    fn ctr(&self, namespace: &str, args: &[&str]) -> anyhow::Result<String> {
        let mut all = vec!["--namespace", namespace];
        all.extend(args);
        self.run(&all)
    }

    /// Removes a namespace of the test's, if there is one, with all that is in it.
    fn clean_namespace(&self, name: &str) -> anyhow::Result<()> {
        let all = self.run(&["namespaces", "list", "--quiet"])?;
        if !all.lines().any(|line| line.trim() == name) {
            return Ok(());
        }
        let _ = self.ctr(name, &["tasks", "delete", "--force", name]);
        let _ = self.ctr(name, &["containers", "delete", name]);
        let images = self.ctr(name, &["images", "list", "--quiet"]);
        for image in images.unwrap_or_default().lines() {
            let _ = self.ctr(name, &["images", "remove", "--sync", image]);
        }
        self.run(&["namespaces", "remove", name]).map(drop)
    }
}

struct Trial<'a> {
    engine: TrialEngine<'a>,
    temp: &'a Path,
    file: String,
    container: String,
    /// The shim, as `ctr` names it.
    shim: String,
    /// Directories that the container sees of the host.
    mounts: Vec<String>,
}

pub const COMMAND: [&str; 2] = ["sleep", "1000"];

impl Trial<'_> {
    /// `podman` and `docker` have the same options.
    fn start(&self, runtime: &str) -> anyhow::Result<()> {
        // Not recursive: CRIU cannot dump what is mounted on files below them.
        let binds: Vec<_> = self
            .mounts
            .iter()
            .map(|m| format!("type=bind,src={m},dst={m},readonly=true,bind-nonrecursive=true"))
            .collect();
        let mut args = vec!["run", "--detach", "--name", &self.container];
        args.extend(["--runtime", runtime, "--network", "none"]);
        for bind in &binds {
            args.extend(["--mount", bind]);
        }
        args.push(IMAGE);
        args.extend(COMMAND);
        self.engine.run(&args).map(drop)
    }

    fn runs(&self) -> anyhow::Result<()> {
        let ask = ["inspect", "--format", "{{.State.Running}}", &self.container];
        match self.engine.run(&ask)?.trim() {
            "true" => Ok(()),
            _ => bail!("the restored container does not run"),
        }
    }

    fn podman(&self) -> anyhow::Result<()> {
        let export = self.temp.join("checkpoint.tar");
        let export = export.to_string_lossy();
        self.engine
            .run(&["load", "--quiet", "--input", &self.file])?;
        self.start("cryopod-runtime")?;
        self.engine.run(&[
            "container",
            "checkpoint",
            "--export",
            &export,
            &self.container,
        ])?;
        self.engine.run(&["rm", "--force", &self.container])?;
        self.engine
            .run(&["container", "restore", "--import", &export])?;
        self.runs()
    }

    fn docker_not_now(&self) -> Option<String> {
        if self.engine.run(&["version"]).is_err() {
            return Some("start docker".into());
        }
        let said = self.engine.run(&["info", "--format", "{{json .}}"]);
        let said = said.unwrap_or_default();
        let info: Value = serde_json::from_str(&said).unwrap_or_default();
        let known = info["Runtimes"].get("cryopod").is_some() && info["ExperimentalBuild"] == true;
        (!known).then(|| {
            "docker has not read its new configuration; restart containerd and docker".into()
        })
    }

    fn docker(&self) -> anyhow::Result<()> {
        self.engine
            .run(&["load", "--quiet", "--input", &self.file])?;
        self.start("cryopod")?;
        self.engine
            .run(&["checkpoint", "create", &self.container, "test"])?;
        self.engine.run(&["wait", &self.container])?;
        let start = ["start", "--checkpoint", "test", &self.container];
        let end = Instant::now() + LIMIT;
        // docker refuses it as long as containerd still holds what it kept of the checkpoint.
        while let Err(error) = self.engine.run(&start) {
            if !error.to_string().contains("already exists") || Instant::now() > end {
                return Err(error);
            }
            thread::sleep(Duration::from_secs(1));
        }
        self.runs()
    }

    fn containerd_not_now(&self, waits: bool) -> Option<String> {
        let limit = if waits { LIMIT } else { Duration::ZERO };
        let runs = || self.engine.run(&["version"]).is_ok();
        (!wait_until(limit, Duration::from_secs(1), runs)).then(|| "start containerd".into())
    }

    fn ctr(&self, args: &[&str]) -> anyhow::Result<String> {
        self.engine.ctr(&self.container, args)
    }

    fn containerd(&self) -> anyhow::Result<()> {
        let binds: Vec<_> = self
            .mounts
            .iter()
            .map(|m| format!("type=bind,src={m},dst={m},options=bind:ro"))
            .collect();
        let checkpoint = "localhost/cryopod-setup:checkpoint";
        self.engine.clean_namespace(CONTAINER)?;
        self.ctr(&["images", "import", &self.file])?;
        let mut run = vec!["run", "--detach", "--runtime", &self.shim];
        for bind in &binds {
            run.extend(["--mount", bind]);
        }
        run.extend([IMAGE, &self.container]);
        run.extend(COMMAND);
        self.ctr(&run)?;
        self.ctr(&[
            "containers",
            "checkpoint",
            "--task",
            "--rw",
            "--image",
            &self.container,
            checkpoint,
        ])?;
        self.ctr(&["tasks", "delete", "--force", &self.container])?;
        self.ctr(&["containers", "delete", &self.container])?;
        self.ctr(&[
            "containers",
            "restore",
            "--live",
            &self.container,
            checkpoint,
        ])?;
        match self.ctr(&["tasks", "list"])?.contains("RUNNING") {
            true => Ok(()),
            false => bail!("the restored container does not run"),
        }
    }

    /// Removes all that the test made with the engine.
    fn clean(&self, target: Target) -> anyhow::Result<()> {
        match target {
            Target::Podman | Target::Docker => {
                // Some fail where the test ended early: nothing is there to remove.
                // podman would wait ten seconds for a process that heeds no signal.
                let at_once: &[&str] = match target {
                    Target::Podman => &["--time", "0"],
                    _ => &[],
                };
                let rm = [&["rm", "--force"], at_once, &[&self.container]].concat();
                let removed = self.engine.run(&rm);
                let _ = self.engine.run(&["rmi", "--force", IMAGE]);
                removed.map(drop)
            }
            Target::Containerd | Target::Kubernetes => self.engine.clean_namespace(&self.container),
        }
    }
}

/// Removes what a test that was killed left with containerd.
pub fn remove_leftovers(tools: &dyn Tools) -> anyhow::Result<()> {
    let socket = std::env::var_os("CONTAINERD_ADDRESS").unwrap_or_else(|| SOCKET.into());
    let program = tools.find("ctr").filter(|_| Path::new(&socket).exists());
    let Some(program) = program else {
        return Ok(());
    };
    let engine = TrialEngine {
        tools,
        program: &program,
    };
    // If containerd does not run, nothing of it does.
    match engine.run(&["version"]) {
        Ok(_) => engine.clean_namespace(CONTAINER),
        Err(_) => Ok(()),
    }
}

/// Directories of the host with programs and libraries; those that are links to others are links in the image, too.
pub fn mounts(host: &Host) -> Vec<String> {
    PROGRAMS
        .iter()
        .map(|name| format!("/{name}"))
        .filter(|path| host.is_dir(path) && !host.path(path).is_symlink())
        .collect()
}

/// Writes an image in docker's format, which all engines read: directories and links alone.
fn image(host: &Host, file: &Path) -> anyhow::Result<()> {
    let mut layer = tar::Builder::new(Vec::new());
    let entry = |kind| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(0o755);
        header.set_size(0);
        header
    };
    for name in EMPTY.iter().chain(&PROGRAMS) {
        let path = host.path(format!("/{name}"));
        match path.read_link() {
            Ok(to) => {
                layer.append_link(&mut entry(tar::EntryType::Symlink), name, to)?;
            }
            Err(_) if path.is_dir() => {
                layer.append_data(
                    &mut entry(tar::EntryType::Directory),
                    format!("{name}/"),
                    std::io::empty(),
                )?;
            }
            Err(_) => {}
        }
    }
    let layer = layer.into_inner()?;
    let digest = Digest::of(&layer).to_string();
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let config = json!({
        "architecture": architecture,
        "os": "linux",
        "config": {"Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [digest]},
        "history": [{"created_by": "cryopod setup"}],
    });
    let manifest = json!([{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]);
    let mut image = tar::Builder::new(std::fs::File::create(file)?);
    for (name, content) in [
        ("layer.tar", layer),
        ("config.json", config.to_string().into_bytes()),
        ("manifest.json", manifest.to_string().into_bytes()),
    ] {
        let mut header = entry(tar::EntryType::Regular);
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        image.append_data(&mut header, name, content.as_slice())?;
    }
    image.into_inner()?.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn the_image_has_the_hosts_directories_and_links() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["usr", "etc", "proc", "lib"] {
            std::fs::create_dir(dir.path().join(name)).unwrap();
        }
        std::os::unix::fs::symlink("usr/bin", dir.path().join("bin")).unwrap();
        let host = Host::at(dir.path());
        assert_eq!(mounts(&host), ["/usr", "/lib"]);
        let file = dir.path().join("image.tar");
        image(&host, &file).unwrap();
        let mut all = tar::Archive::new(std::fs::File::open(&file).unwrap());
        let mut layer = Vec::new();
        let first = all.entries().unwrap().next().unwrap();
        first.unwrap().read_to_end(&mut layer).unwrap();
        let mut layer = tar::Archive::new(layer.as_slice());
        let names: Vec<_> = layer
            .entries()
            .unwrap()
            .map(|e| e.unwrap().path().unwrap().display().to_string())
            .collect();
        assert_eq!(names, ["etc/", "proc/", "usr/", "bin", "lib/"]);
    }
}
