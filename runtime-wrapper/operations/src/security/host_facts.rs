//! What the checks of CRIU's images have to know of the host. It is read before they run: where they run, the host is not
//! to be seen ([`super::decoder`]).

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use cryopod_host::files::Host;
use cryopod_host::mountinfo::{self, Mount};
use cryopod_host::spec::Spec;
use nix::sched::{CloneFlags, setns};
use serde_json::Value;

/// What a read-only mount has set.
pub const READ_ONLY: u32 = 1;

#[derive(Debug, Clone, Default)]
pub struct HostFacts {
    /// The kinds of namespaces that the spec names and that are not the host's.
    pub own_namespaces: Vec<String>,
    /// The paths that the spec makes read-only or masks, as far as this host has them, and the flags of a mount that does
    /// so.
    pub closed: Vec<(String, u32)>,
    pub apparmor: bool,
    pub selinux: bool,
    /// The host's mounts.
    pub mounts: Vec<Mount>,
    /// The first port for which a process needs no capability, in the network namespace of the container.
    pub first_port: u64,
    /// This process's own, which a new container would get.
    pub oom_score: Option<i64>,
}

impl HostFacts {
    pub fn of(host: &Host, spec: &Spec) -> Self {
        let list = |pointer: &str| spec.json().pointer(pointer).and_then(Value::as_array);
        let namespaces = list("/linux/namespaces").into_iter().flatten();
        let own = namespaces.filter(|n| !of_host(host, n));
        let closed = |pointer, flag| {
            let paths = list(pointer).into_iter().flatten();
            let paths = paths.filter_map(Value::as_str);
            let paths = paths.filter(|path| host.path(path).exists());
            paths.map(move |path| (path.to_owned(), flag))
        };
        Self {
            own_namespaces: own
                .filter_map(|n| Some(n.get("type")?.as_str()?.to_owned()))
                .collect(),
            closed: closed("/linux/readonlyPaths", READ_ONLY)
                .chain(closed("/linux/maskedPaths", 0))
                .collect(),
            apparmor: host.path("/sys/kernel/security/apparmor").is_dir(),
            selinux: host.path("/sys/fs/selinux").is_dir(),
            mounts: mountinfo::of(host, "self"),
            first_port: first_port(host, spec),
            oom_score: host
                .line("/proc/self/oom_score_adj")
                .and_then(|text| text.trim().parse().ok()),
        }
    }
}

/// Reads the first port that needs no capability: of the spec, of the namespace that it names, of a new one.
fn first_port(host: &Host, spec: &Spec) -> u64 {
    const NAME: &str = "net.ipv4.ip_unprivileged_port_start";
    const FILE: &str = "/proc/sys/net/ipv4/ip_unprivileged_port_start";
    /// `PROT_SOCK` of the kernel.
    const OF_NEW: u64 = 1024;
    let number = |text: &str| text.trim().parse().ok();
    let sysctls = spec.json().pointer("/linux/sysctl");
    let of_spec = sysctls.and_then(|s| s.get(NAME)?.as_str());
    if let Some(of_spec) = of_spec.and_then(number) {
        return of_spec;
    }
    let own = in_network(host, spec, || number(&host.line(FILE)?));
    own.unwrap_or(OF_NEW)
}

/// Reads something in the network namespace that the spec gives the container; `None`: in a new one.
pub fn in_network<T: Send>(
    host: &Host,
    spec: &Spec,
    read: impl FnOnce() -> Option<T> + Send,
) -> Option<T> {
    let namespaces = spec.json().pointer("/linux/namespaces");
    let mut namespaces = namespaces.and_then(Value::as_array).into_iter().flatten();
    let path = match namespaces.find(|n| n["type"] == "network") {
        None => None,
        Some(namespace) => match namespace.get("path").and_then(Value::as_str) {
            None | Some("") => return None,
            Some(path) => Some(host.path(path)),
        },
    };
    let read = || {
        if let Some(path) = path {
            setns(std::fs::File::open(path).ok()?, CloneFlags::CLONE_NEWNET).ok()?;
        }
        read()
    };
    // A thread that ends there.
    std::thread::scope(|scope| scope.spawn(read).join())
        .ok()
        .flatten()
}

/// Returns true if this entry of the spec's namespaces is the host's own: a path (of a pod on the host's network, say)
/// that leads there.
pub fn of_host(host: &Host, entry: &Value) -> bool {
    let text = |key: &str| entry.get(key).and_then(Value::as_str);
    let (Some(named), Some(path)) = (text("type"), text("path").filter(|p| !p.is_empty())) else {
        return false;
    };
    let file = match named {
        "network" => "net",
        "mount" => "mnt",
        other => other,
    };
    let identity = |path: PathBuf| {
        let meta = std::fs::metadata(path).ok()?;
        Some((meta.dev(), meta.ino()))
    };
    let hosts = identity(host.path(format!("/proc/self/ns/{file}")));
    hosts.is_some() && hosts == identity(host.path(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_namespace_by_path_may_be_the_hosts() {
        let host = Host::system();
        let entry = |kind: &str, path: &str| json!({"type": kind, "path": path});
        assert!(of_host(&host, &entry("network", "/proc/self/ns/net")));
        assert!(of_host(&host, &entry("uts", "/proc/self/ns/uts")));
        assert!(!of_host(&host, &entry("network", "/proc/self/ns/uts")));
        assert!(!of_host(&host, &entry("network", "/nowhere")));
        assert!(!of_host(&host, &json!({"type": "network"})));
    }
}
