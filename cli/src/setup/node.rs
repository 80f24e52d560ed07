//! A Kubernetes node: which container runtime it has, and how the installer's container works on it.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use cryopod_gpu_plan::live;
use cryopod_host::files::Host;
use cryopod_host::programs::{SystemTools, Tools};
use nix::sched::CloneFlags;

use super::change::Change;
use super::own_files::OwnFiles;
use super::{WantedSetup, change, containerd, crio, own_files, rancher};

const SYSTEMS_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Directories of `ctr` and runc of k3s and rke2.
const RANCHERS_PATH: &str = "/var/lib/rancher/k3s/data/current/bin:/var/lib/rancher/rke2/bin";
const RANCHERS_ADDRESS: &str = "/run/k3s/containerd/containerd.sock";
const START: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeRuntime {
    Containerd,
    K3s,
    Rke2,
    Crio,
}

impl NodeRuntime {
    /// Finds the node's runtime by its files. On a node with several, k3s and rke2 bring their own, and CRI-O runs.
    pub fn of(host: &Host, tools: &dyn Tools) -> Option<Self> {
        let rancher = |of: Self| of.rancher().is_some_and(|dir| host.is_dir(dir));
        let crio = tools.find("crio").is_some();
        let containerd = tools.find("containerd").is_some();
        match () {
            () if rancher(Self::K3s) => Some(Self::K3s),
            () if rancher(Self::Rke2) => Some(Self::Rke2),
            () if crio && (!containerd || host.path(crio::SOCKET).exists()) => Some(Self::Crio),
            () if containerd => Some(Self::Containerd),
            () => None,
        }
    }

    /// The directory of containerd's configuration, which k3s and rke2 write themselves.
    fn rancher(self) -> Option<&'static str> {
        match self {
            Self::K3s => Some("/var/lib/rancher/k3s/agent/etc/containerd"),
            Self::Rke2 => Some("/var/lib/rancher/rke2/agent/etc/containerd"),
            Self::Containerd | Self::Crio => None,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Containerd => "containerd",
            Self::K3s => "k3s",
            Self::Rke2 => "rke2",
            Self::Crio => "CRI-O",
        }
    }

    /// The services of which one runs it.
    pub fn services(self) -> &'static [&'static str] {
        match self {
            Self::Containerd => &["containerd"],
            Self::K3s => &["k3s", "k3s-agent"],
            Self::Rke2 => &["rke2-server", "rke2-agent"],
            Self::Crio => &["crio"],
        }
    }

    fn process(self) -> &'static str {
        match self {
            Self::Crio => "crio",
            _ => "containerd",
        }
    }

    pub fn changes(self, wanted: &WantedSetup<'_>) -> anyhow::Result<Vec<Change>> {
        match (self, self.rancher()) {
            (Self::Crio, _) => crio::changes(wanted),
            (_, Some(directory)) if wanted.config.is_none() => {
                rancher::changes(wanted, Path::new(directory))
            }
            _ => containerd::changes(wanted),
        }
    }

    /// Returns true if the runtime has started since these files were written. It reads them when it starts.
    pub fn has_read(self, host: &Host, files: &[PathBuf]) -> anyhow::Result<bool> {
        let written = files.iter();
        let written = written.filter_map(|p| host.path(p).metadata().ok()?.modified().ok());
        let now = SystemTime::now();
        // One of the future was written before the clock was set: whether it was read is not known.
        let ages = written.map(|at| now.duration_since(at).unwrap_or_default());
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
            let started = live::start_time(host, pid);
            let started = started.filter(|_| name.as_deref() == Some(self.process()));
            started.is_some_and(|started| up - started as f64 / ticks < age.as_secs_f64())
        }))
    }

    /// The service to restart: of several, that which is active.
    pub fn active(self, tools: &dyn Tools, systemctl: &Path) -> anyhow::Result<&'static str> {
        let [first, others @ ..] = self.services() else {
            bail!("no service");
        };
        let active = |service: &str| {
            let words = ["is-active", "--quiet", service].map(AsRef::as_ref);
            let asked = tools.output(systemctl, &words, START);
            asked.is_ok_and(|out| out.code == 0)
        };
        let mut all = self.services().iter();
        match all.find(|service| others.is_empty() || active(service)) {
            Some(service) => Ok(service),
            None => bail!("neither {first} nor {} is active", others.join(", ")),
        }
    }
}

/// The programs of this host, with those of k3s and rke2.
pub fn tools() -> SystemTools {
    let path = std::env::var("PATH").unwrap_or_else(|_| SYSTEMS_PATH.into());
    SystemTools::with_path(format!("{path}:{RANCHERS_PATH}"))
}

/// Lets `ctr` find the containerd of k3s and rke2. Only before other threads start.
pub fn address(runtime: NodeRuntime) {
    if runtime.rancher().is_some() {
        // SAFETY: this process has no other threads yet.
        unsafe { std::env::set_var("CONTAINERD_ADDRESS", RANCHERS_ADDRESS) };
    }
}

/// What the installer's container brings to the node.
pub struct Brought {
    pub files: OwnFiles,
    /// The text for the node's `/etc/cryopod/config.toml`.
    pub settings: Option<String>,
}

/// Opens what this container brings, and goes to the node: its root becomes that of this process, so that what follows is
/// the same as on the node itself.
pub fn enter(root: &Path, settings: Option<&Path>) -> anyhow::Result<Brought> {
    let files = OwnFiles::open()?;
    let read = |path: &Path| {
        let text = change::read(&Host::system(), path)?;
        text.with_context(|| format!("{}: no such file", path.display()))
    };
    let settings = settings.map(read).transpose()?;
    change_root(root)?;
    Ok(Brought { files, settings })
}

/// The node's own `cryopod`.
pub fn program() -> PathBuf {
    Path::new(own_files::DIRECTORY).join("bin/cryopod")
}

/// Makes a node's root that of this process. Process 1 has it on a running node, and its mount namespace, too: there runtimes
/// and CRIU work as on the node itself.
pub fn change_root(root: &Path) -> anyhow::Result<()> {
    let failed = || format!("{}: cannot become the root", root.display());
    let place = |path: &Path| path.metadata().ok().map(|m| (m.dev(), m.ino()));
    let is_running = place(&root.join("proc/1/root")).is_some_and(|of| place(root) == Some(of));
    match is_running {
        true => {
            let namespace = File::open(root.join("proc/1/ns/mnt")).with_context(failed)?;
            nix::sched::setns(namespace, CloneFlags::CLONE_NEWNS).with_context(failed)?;
        }
        false => nix::unistd::chroot(root).with_context(failed)?,
    }
    std::env::set_current_dir("/").with_context(failed)?;
    for (variable, value) in [
        ("PATH", SYSTEMS_PATH),
        // systemctl restarts nothing where it sees another root than its own.
        ("SYSTEMD_IGNORE_CHROOT", "1"),
    ] {
        // SAFETY: this process has no other threads yet.
        unsafe { std::env::set_var(variable, value) };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use cryopod_host::programs::{Output, ToolError};

    use super::*;
    use cryopod_test_files::TestFiles;

    struct Node(&'static [&'static str]);

    impl Tools for Node {
        fn find(&self, name: &str) -> Option<PathBuf> {
            self.0.contains(&name).then(|| name.into())
        }
        fn output(&self, _: &Path, args: &[&OsStr], _: Duration) -> Result<Output, ToolError> {
            let known = self.0.iter().any(|name| args.contains(&OsStr::new(name)));
            Ok(Output {
                code: i32::from(!known),
                ..Output::default()
            })
        }
    }

    #[test]
    fn by_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let of = |programs| NodeRuntime::of(&host, &Node(programs));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&["containerd"]), Some(NodeRuntime::Containerd));
        assert_eq!(of(&["crio"]), Some(NodeRuntime::Crio));
        assert_eq!(of(&["crio", "containerd"]), Some(NodeRuntime::Containerd));
        dir.put("run/crio/crio.sock", "");
        assert_eq!(of(&["crio", "containerd"]), Some(NodeRuntime::Crio));
        for (name, runtime) in [("rke2", NodeRuntime::Rke2), ("k3s", NodeRuntime::K3s)] {
            let path = format!("var/lib/rancher/{name}/agent/etc/containerd");
            dir.dir(path);
            assert_eq!(of(&["crio", "containerd"]), Some(runtime));
        }
    }

    #[test]
    fn the_service_that_is_active() {
        let of = |runtime: NodeRuntime, active| {
            let service = runtime.active(&Node(active), Path::new("systemctl"));
            service.map_err(|e| e.to_string())
        };
        assert_eq!(of(NodeRuntime::Containerd, &[]), Ok("containerd"));
        assert_eq!(of(NodeRuntime::K3s, &["k3s-agent"]), Ok("k3s-agent"));
        let none = of(NodeRuntime::Rke2, &[]);
        assert_eq!(
            none,
            Err("neither rke2-server nor rke2-agent is active".into())
        );
    }
}
