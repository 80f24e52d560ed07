//! Shims and monitors of the containers that run with cryopod. An engine loses these containers without the files and the
//! setup by which it started them.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;
use cryopod_host::files::{Host, open_regular, read_bounded_from};

use super::node::NodeRuntime;
use super::{Target, own_files};

const SHIM: &str = "containerd-shim-cryopod-v2";
const RUNTIME: &str = "cryopod-runtime";
/// The name by which docker's containers get the shim.
const STOCK_SHIM: &str = "containerd-shim-runc-v2";
/// In a bundle of containerd: the path of the shim, which containerd needs for the container when it starts.
const STARTED_AS: &str = "shim-binary-path";
const MAX_PATH: u64 = 4096;
/// The namespace of the CRI.
const CRI: &str = "k8s.io";
const END: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(100);

/// A process of cryopod's that a container needs.
pub struct ContainerProcess {
    pub pid: String,
    /// Its command line, and its own program.
    words: Vec<String>,
    /// cryopod's program: its own, or one in its command line.
    program: PathBuf,
    /// By which path containerd started the shim, if that can be told.
    started_as: Option<PathBuf>,
}

impl ContainerProcess {
    fn of(host: &Host, pid: &str) -> Option<Self> {
        pid.parse::<u32>().ok()?;
        let at = |name: &str| host.path(format!("/proc/{pid}/{name}"));
        let words = fs::read_to_string(at("cmdline")).unwrap_or_default();
        let mut words: Vec<String> = words.split('\0').map(str::to_owned).collect();
        let exe = fs::read_link(at("exe")).unwrap_or_default();
        // After an upgrade the shim runs on from a file that is no longer there.
        words.push(exe.to_string_lossy().replace(" (deleted)", ""));
        let ours = |path: &&Path| path.is_absolute() && named(path, &[SHIM, RUNTIME]);
        let program = words.iter().map(Path::new).find(ours)?.to_owned();
        let started_as = open_regular(&at("cwd").join(STARTED_AS)).ok();
        let started_as = started_as.and_then(|file| read_bounded_from(file, MAX_PATH).ok());
        Some(Self {
            pid: pid.to_owned(),
            words,
            program,
            started_as: started_as.map(|path| OsString::from_vec(path).into()),
        })
    }

    /// Returns true if its container is one of this engine, or if that cannot be told.
    fn is_of(&self, target: Target, node: Option<NodeRuntime>) -> bool {
        let is_shim = named(&self.program, &[SHIM]);
        let has = |part: &str| self.words.iter().any(|word| word.contains(part));
        match (target, node) {
            (Target::Podman, _) => !is_shim && !has("/crio/"),
            (Target::Kubernetes, Some(NodeRuntime::Crio)) => !is_shim && !has("--exit-command"),
            // All that containerd started by docker's link, whoever asked for it.
            (Target::Docker, _) => {
                let path = self.started_as.as_deref();
                is_shim && path.is_none_or(|path| named(path, &[STOCK_SHIM]))
            }
            (Target::Containerd | Target::Kubernetes, _) => {
                let mut after = self.words.iter().skip_while(|word| *word != "-namespace");
                is_shim && after.nth(1).is_none_or(|namespace| namespace == CRI)
            }
        }
    }
}

fn named(path: &Path, names: &[&str]) -> bool {
    path.file_name()
        .is_some_and(|name| names.iter().any(|of| name == *of))
}

/// Fails if an engine has containers that run with cryopod. `own_files`: with the files that an installer brought.
pub fn ensure_none(
    host: &Host,
    target: Target,
    node: Option<NodeRuntime>,
    own_files: bool,
) -> anyhow::Result<()> {
    let found = find(host, |process| {
        let brought = process.program.starts_with(own_files::DIRECTORY);
        brought == own_files && (own_files || process.is_of(target, node))
    });
    let Some(process) = found else {
        return Ok(());
    };
    let which = match target {
        Target::Docker => ", as all do that containerd started since the setup of docker",
        _ => "",
    };
    bail!(
        "containers run with cryopod{which} (process {} is of one): remove them first",
        process.pid
    )
}

/// Returns true if the mount namespace of a process is the host's or ours: no container's, whose processes can have any name
/// and command line.
pub fn is_of_host(host: &Host, pid: &str) -> bool {
    let namespace = |pid: &str| fs::read_link(host.path(format!("/proc/{pid}/ns/mnt"))).ok();
    ["1", "self"].map(namespace).contains(&namespace(pid))
}

/// Finds a process that `counts`.
pub fn find(host: &Host, counts: impl Fn(&ContainerProcess) -> bool) -> Option<ContainerProcess> {
    let once = || {
        let mut all = host.names("/proc").into_iter();
        all.find_map(|pid| {
            let process = ContainerProcess::of(host, &pid).filter(|_| is_of_host(host, &pid))?;
            counts(&process).then_some(process)
        })
    };
    // A shim ends soon after its container.
    let end = Instant::now() + END;
    loop {
        match once() {
            Some(_) if Instant::now() < end => thread::sleep(PAUSE),
            found => return found,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use cryopod_test_files::TestFiles;

    use super::*;

    const CRIO: Option<NodeRuntime> = Some(NodeRuntime::Crio);

    /// For whom a process counts: podman, docker, containerd, CRI-O, an installer's own files.
    fn counts(host: &Host) -> [bool; 5] {
        let process = ContainerProcess::of(host, "3").unwrap();
        let of = |target, node| process.is_of(target, node);
        [
            of(Target::Podman, None),
            of(Target::Docker, None),
            of(Target::Containerd, None),
            of(Target::Kubernetes, CRIO),
            process.program.starts_with(own_files::DIRECTORY),
        ]
    }

    #[test]
    fn each_engine_has_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let of = |words: &str| {
            dir.put("proc/3/cmdline", words);
            counts(&host)
        };
        let podmans = "conmon\0-r\0/usr/bin/cryopod-runtime\0--exit-command\0/usr/bin/podman\0";
        assert_eq!(of(podmans), [true, false, false, false, false]);
        let crios = "conmon\0-r\0/opt/cryopod/bin/cryopod-runtime\0--exit-dir\0/run/crio/exits\0";
        assert_eq!(of(crios), [false, false, false, true, true]);
        let unknown = "conmon\0-r\0/usr/bin/cryopod-runtime\0";
        assert_eq!(of(unknown), [true, false, false, true, false]);
        let shim = |namespace| format!("/usr/bin/{SHIM}\0-namespace\0{namespace}\0-id\0a\0");
        assert_eq!(of(&shim("k8s.io")), [false, true, true, false, false]);
        dir.put(
            "proc/3/cwd/shim-binary-path",
            "/usr/bin/containerd-shim-cryopod-v2",
        );
        assert_eq!(of(&shim("k8s.io")), [false, false, true, false, false]);
        assert_eq!(of(&shim("default")), [false; 5]);
        dir.put(
            "proc/3/cwd/shim-binary-path",
            "/usr/local/sbin/containerd-shim-runc-v2",
        );
        assert_eq!(of(&shim("moby")), [false, true, false, false, false]);
        assert_eq!(of(&shim("default")), [false, true, false, false, false]);
        // Its file was replaced, and its first word is the link's name.
        symlink(
            format!("/usr/bin/{SHIM} (deleted)"),
            dir.path().join("proc/3/exe"),
        )
        .unwrap();
        let linked = "/usr/local/sbin/containerd-shim-runc-v2\0-namespace\0moby\0";
        assert_eq!(of(linked), [false, true, false, false, false]);
    }

    #[test]
    fn what_runs_and_what_a_container_only_says() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let process = |pid: &str, words: &str, namespace: &str| {
            dir.put(format!("proc/{pid}/cmdline"), words);
            dir.dir(format!("proc/{pid}/ns"));
            symlink(namespace, dir.path().join(format!("proc/{pid}/ns/mnt"))).unwrap();
        };
        let ensure = |own_files| ensure_none(&host, Target::Kubernetes, None, own_files);
        process("1", "/sbin/init\0", "mnt:[1]");
        process("self", "cryopod\0", "mnt:[1]");
        process("2", "/opt/cryopod/bin/cryopod\0setup\0", "mnt:[1]");
        process("4", "/x/cryopod-runtime\0inf\0", "mnt:[2]");
        process("5", "/opt/cryopod/bin/cryopod-runtime\0inf\0", "mnt:[2]");
        ensure(true).unwrap();
        process(
            "3",
            "conmon\0-r\0/opt/cryopod/bin/cryopod-runtime\0",
            "mnt:[1]",
        );
        assert!(ensure(true).unwrap_err().to_string().contains("process 3"));
        ensure(false).unwrap();
    }
}
