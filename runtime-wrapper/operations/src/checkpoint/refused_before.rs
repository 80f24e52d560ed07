//! Refuses checkpoints that fail in any case, with or without a GPU: when another one of the container is under way,
//! when podman will refuse to export it, which it says only after the container has ended, and without cgroups.

use std::time::Duration;

use cryopod_host::files::Host;
use cryopod_host::spec::Spec;

use crate::bundle::lock::BundleLock;
use crate::error::Error;
use crate::request::Request;
use crate::request::state::ContainerState;

/// podman's name in the annotation `io.container.manager`.
const PODMAN: &str = "libpod";
/// Set by podman for a container of a pod, which it can export without the pod.
const POD: &str = "io.kubernetes.cri-o.SandboxID";
/// Part of the cgroup's name of each container of podman.
const PODMAN_CGROUP: &str = "libpod-";

/// Locks the container, for as long as it is checkpointed.
pub(super) fn lock(
    request: &Request<'_>,
    state: &ContainerState,
    patience: Duration,
) -> Result<BundleLock, Error> {
    let directory = state.lock_directory(request.ctx, request.inv);
    BundleLock::take(&directory, patience, || {
        format!(
            "checkpoint of {} refused: a checkpoint or pause of it is under way; try again when that has ended",
            request.id()
        )
    })
}

/// Refuses an export of a container that shares a namespace with another one of podman's.
///
/// # Errors
/// The container and how to go on.
pub(super) fn lost_export(request: &Request<'_>) -> Result<(), Error> {
    let (host, spec) = (&request.host, &request.spec);
    let manager = spec.annotation("io.container.manager");
    if manager != Some(PODMAN) || spec.annotation(POD).is_some() {
        return Ok(());
    }
    let engine = nix::unistd::getppid();
    let line = host.text(format!("/proc/{engine}/cmdline"));
    if !exports(&line.unwrap_or_default()) {
        return Ok(());
    }
    match shared(host, spec) {
        None => Ok(()),
        Some(kind) => Err(Error::untouched(format!(
            "checkpoint of {} refused: it is in the {kind} namespace of another container, and podman exports no such container; it says so only after the checkpoint. Leave --export away, put both into a pod, or give it a namespace of its own",
            request.id()
        ))),
    }
}

/// Refuses a checkpoint without cgroups: a restore compares them with the container's, and refuses it.
///
/// # Errors
/// The option.
pub(super) fn without_cgroups(request: &Request<'_>) -> Result<(), Error> {
    match request.inv.flags.value("manage-cgroups-mode") {
        Some(mode) if mode == "ignore" => Err(Error::untouched(format!(
            "checkpoint of {} refused: no restore takes one that was made with --manage-cgroups-mode ignore; leave the option away",
            request.id()
        ))),
        _ => Ok(()),
    }
}

/// Returns true for the command line of `podman container checkpoint` with `-e` or `--export`.
fn exports(line: &str) -> bool {
    let words: Vec<&str> = line.split('\0').collect();
    let verb = words.iter().position(|w| *w == "checkpoint");
    let flags = verb.map(|at| &words[at + 1..]).unwrap_or_default();
    let mut flags = flags.iter().take_while(|w| **w != "--");
    flags.any(|word| {
        let short = word.strip_prefix('-').filter(|w| !w.starts_with('-'));
        // `-Re FILE`: letters of flags without a value before it.
        let short = short.is_some_and(|w| {
            w.trim_start_matches(['a', 'k', 'l', 'P', 'R'])
                .starts_with('e')
        });
        short || *word == "--export" || word.starts_with("--export=")
    })
}

/// Returns the type of a namespace that is another podman container's.
fn shared(host: &Host, spec: &Spec) -> Option<String> {
    let namespaces = spec.json().pointer("/linux/namespaces")?.as_array()?;
    namespaces.iter().find_map(|namespace| {
        let path = namespace.get("path")?.as_str()?;
        let pid: u32 = path
            .strip_prefix("/proc/")?
            .split('/')
            .next()?
            .parse()
            .ok()?;
        let cgroup = host.text(format!("/proc/{pid}/cgroup")).ok()?;
        let kind = namespace.get("type")?.as_str()?;
        cgroup.contains(PODMAN_CGROUP).then(|| kind.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;
    use serde_json::json;

    #[test]
    fn podmans_export_in_all_spellings() {
        for (line, want) in [
            ("podman container checkpoint -e /x c1", true),
            ("podman container checkpoint --export /x c1", true),
            (
                "podman --log-level debug container checkpoint c1 --export=/x",
                true,
            ),
            ("podman container checkpoint -Re /x c1", true),
            ("podman container checkpoint -e/x c1", true),
            ("podman container checkpoint -R c1", false),
            ("podman container checkpoint --keep c1", false),
            ("podman container checkpoint -c none c1", false),
            ("podman container checkpoint -- -e", false),
            ("podman system service", false),
            ("", false),
        ] {
            assert_eq!(exports(&line.replace(' ', "\0")), want, "{line}");
        }
    }

    #[test]
    fn namespaces_of_other_containers() {
        let dir = tempfile::tempdir().unwrap();
        let cgroup = |pid: &str, path: &str| {
            let proc = dir.path().join("proc").join(pid);
            proc.put("cgroup", format!("0::{path}\n"));
        };
        cgroup("10", "/machine.slice/libpod-abc.scope/container");
        cgroup("11", "/system.slice/x.service");
        let host = Host::at(dir.path());
        let with = |path: &str| {
            let ipc = json!({"type": "ipc", "path": path});
            let spec = json!({"linux": {"namespaces": [{"type": "pid"}, ipc]}});
            shared(&host, &Spec::from_json(spec))
        };
        assert_eq!(with("/proc/10/ns/ipc").as_deref(), Some("ipc"));
        for path in [
            "/proc/11/ns/ipc",
            "/proc/12/ns/ipc",
            "/run/netns/a",
            "/proc/x",
        ] {
            assert_eq!(with(path), None, "{path}");
        }
    }
}
