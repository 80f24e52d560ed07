//! Settings of a restored network namespace that neither CRIU nor the low-level runtime restores.
//!
//! - The loopback device: runc tells CRIU not to restore it ("Runc doesn't manage network devices") and leaves it down; a
//!   new container has it up. Nothing in the restored container could reach 127.0.0.1.
//! - The spec's `net.*` sysctls: CRIU restores few, and none in a namespace that an engine made anew (podman's networks).
//!   runc and crun write them for a new container only.
//!
//! CRIU's hook sets both before sockets are restored.

use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use cryopod_host::files::Host;
use cryopod_host::processes::ensure_other_namespace;
use cryopod_host::spec::Spec;
use nix::sched::{CloneFlags, setns};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::Error;
use crate::run::operation::{self, Operation};
use crate::security::host_facts::of_host;

/// File in an operation's directory that asks the hook for this.
const FILE: &str = "network.json";
/// The stage of CRIU's restore at which the network namespace exists, but no socket yet.
pub const STAGE: &str = "setup-namespaces";

/// Settings of a network namespace that CRIU does not restore.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkSettings {
    loopback: bool,
    /// Files below `/proc/sys`, and what to write.
    sysctls: Vec<(PathBuf, String)>,
    /// The container has a user namespace, in whose numbers the sysctls are.
    user_namespace: bool,
}

impl NetworkSettings {
    /// Nothing for a container with the host's network. `loopback`: a namespace of the container's own has it down.
    pub fn of(host: &Host, spec: &Spec, loopback: bool) -> Self {
        let namespaces = spec.json().pointer("/linux/namespaces");
        let mut namespaces = namespaces.and_then(Value::as_array).into_iter().flatten();
        let network = namespaces.find(|n| n["type"] == "network");
        if network.is_none_or(|n| of_host(host, n)) {
            return Self::default();
        }
        let sysctls = spec.json().pointer("/linux/sysctl");
        let sysctls = sysctls.and_then(Value::as_object).into_iter().flatten();
        let sysctls = sysctls.filter(|(name, _)| name.starts_with("net."));
        Self {
            loopback: loopback && spec.has_own_namespace("network"),
            sysctls: sysctls
                .filter_map(|(name, value)| Some((file_of(name), value.as_str()?.to_owned())))
                .collect(),
            user_namespace: spec.has_own_namespace("user"),
        }
    }

    /// Asks the hook of this operation.
    pub fn ask(&self, op: &Operation) -> Result<(), Error> {
        if !self.loopback && self.sysctls.is_empty() {
            return Ok(());
        }
        op.note(FILE, self)
    }

    /// What the operation in this directory asks for, if anything.
    pub fn asked(directory: &Path) -> Option<Self> {
        operation::noted(directory, FILE)
    }

    /// Sets them in the network namespace of this init process, in which the calling thread then stays. Returns what
    /// could not be set.
    pub fn set(&self, init: i32) -> Vec<String> {
        let namespaces = Path::new("/proc").join(init.to_string()).join("ns");
        let enter = |kind: &str, flag| -> Result<(), String> {
            let path = namespaces.join(kind);
            let failed = |e: io::Error| format!("{}: {e}", path.display());
            let namespace = File::open(&path).map_err(failed)?;
            setns(namespace, flag).map_err(|e| failed(e.into()))
        };
        if let Err(e) = ensure_other_namespace(init, "net") {
            return vec![e.to_string()];
        }
        if let Err(e) = enter("net", CloneFlags::CLONE_NEWNET) {
            return vec![e];
        }
        let mut failed = Vec::new();
        if self.loopback
            && let Err(e) = set_loopback_up()
        {
            failed.push(format!("the loopback device: {e}"));
        }
        if self.user_namespace && !self.sysctls.is_empty() {
            failed.extend(enter("user", CloneFlags::CLONE_NEWUSER).err());
        }
        for (file, value) in &self.sysctls {
            let path = Path::new("/proc/sys").join(file);
            if let Err(e) = fs::write(&path, value) {
                failed.push(format!("{}: {e}", path.display()));
            }
        }
        failed
    }
}

/// The file of a sysctl as runc finds it: all dots separate directories. So none is `..`.
fn file_of(name: &str) -> PathBuf {
    name.replace('.', "/").into()
}

fn set_loopback_up() -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: a plain structure of numbers, for which zeros are a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = libc::c_char::from_ne_bytes([*from]);
    }
    // SAFETY: reads and writes `request`, which the kernel fills in for the name there.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS as _, &mut request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the flags are what the call before has filled in; both are numbers in a union.
    unsafe { request.ifr_ifru.ifru_flags |= libc::IFF_UP as libc::c_short };
    // SAFETY: reads `request`.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &request) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sysctls_of_the_network() {
        let settings = |namespaces: Value| {
            let sysctl = json!({"net.core.somaxconn": "77", "kernel.msgmax": "5", "net.../x": "1"});
            let spec = json!({"linux": {"namespaces": namespaces, "sysctl": sysctl}});
            NetworkSettings::of(&Host::system(), &Spec::from_json(spec), true)
        };
        let found = settings(json!([{"type": "network"}]));
        let mut files = found.sysctls.iter().map(|(file, _)| file.as_path());
        assert!(found.loopback && files.any(|f| f == Path::new("net/core/somaxconn")));
        let inside =
            |f: &Path| f.starts_with("net") && !f.components().any(|c| c.as_os_str() == "..");
        assert!(found.sysctls.iter().all(|(file, _)| inside(file)));
        let named =
            settings(json!([{"type": "network", "path": "/run/netns/x"}, {"type": "user"}]));
        assert!(!named.loopback && named.user_namespace && named.sysctls.len() == 2);
        assert_eq!(
            settings(json!([{"type": "pid"}])),
            NetworkSettings::default()
        );
    }
}
