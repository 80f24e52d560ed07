//! Tests the programs that CRIU runs: `tar` with gzip, `ip`, and the network lock. Missing or unfit ones fail a dump
//! after the GPUs have been checkpointed, so the plan runs each as CRIU will, before anything is frozen.
//!
//! When CRIU 4.1 to 4.2 calls which, from its sources:
//!
//! - `tar --gzip` (filesystems.c), at checkpoint and restore: for every tmpfs that is not external.
//! - `ip` (net.c), at checkpoint and restore: for every network namespace that is neither CRIU's own nor external,
//!   unless the runtime asks for an empty one, as runc always does.
//! - The network lock (net.c, netfilter.c), at a checkpoint: for a network namespace that is not CRIU's own, external
//!   or not; in CRIU's own for each TCP connection. At a restore: by runc always; by crun to remove the lock that the
//!   images hold.
//!
//! The lock is `iptables-restore`, or libnftables within CRIU, as the option `network-lock` says.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_gpu_plan::hazards::Connection;
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::files::Host;
use cryopod_host::mountinfo;
use cryopod_host::processes::Scan;
use cryopod_host::programs::{Output, Tools};
use cryopod_host::spec::Spec;
use nix::sched::{CloneFlags, unshare};

use crate::config::Config;
use crate::config::criu_values::Lock;
use crate::request::lowlevel::{LowLevel, RuntimeKind};

/// The environment variable that names another `ip` to CRIU.
const IP_TOOL: &str = "CR_IP_TOOL";
/// CRIU's rules that block a network namespace (net.c), fed to the program `$0`.
const LOCK_NAMESPACE: &str = r#"exec "$0" -w --noflush << END
*filter
:CRIU - [0:0]
-I INPUT -j CRIU
-I OUTPUT -j CRIU
-A CRIU -m mark --mark 0xC114 -j ACCEPT
-A CRIU -j DROP
COMMIT
END"#;
/// CRIU's rule that blocks one connection (netfilter.c), of the program `$0` for the address `$1`.
const LOCK_CONNECTION: &str = r#"exec "$0" -w -t filter -I INPUT --protocol tcp -m mark ! --mark 0xC114 --source "$1" --sport 1 --destination "$1" --dport 1 -j DROP"#;

/// A program that CRIU runs, or what it is needed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Helper {
    /// Archives the content of tmpfs.
    Tar,
    /// Saves addresses, routes and rules of a network namespace.
    Ip,
    Lock(Lock),
}

impl Helper {
    /// The name in the metadata.
    pub fn word(self) -> &'static str {
        match self {
            Self::Tar => "tar",
            Self::Ip => "ip",
            Self::Lock(lock) => lock.word(),
        }
    }

    /// `None` for a helper that this version does not know.
    fn of(word: &str) -> Option<Self> {
        match word {
            "tar" => Some(Self::Tar),
            "ip" => Some(Self::Ip),
            _ => Lock::of(word).map(Self::Lock),
        }
    }
}

/// A helper that does not work, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub what: String,
    pub remedy: String,
}

impl Fault {
    fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            remedy: remedy.into(),
        }
    }

    fn refusal(self) -> Refusal {
        Refusal::new(self.what, self.remedy)
    }
}

/// Runs the helpers as CRIU does, without touching the container or the host's network.
#[derive(Clone, Copy)]
pub struct Probe<'a> {
    pub tools: &'a dyn Tools,
    pub limit: Duration,
}

impl Probe<'_> {
    /// Packs nothing, with the options that CRIU packs a tmpfs with. The error names the package to install.
    pub fn tar(&self) -> Result<String, Fault> {
        let fault = |why: String| {
            Fault::new(
                format!("CRIU packs the container's tmpfs mounts with GNU tar and gzip, and {why}"),
                "install the packages tar and gzip, on the PATH of the container engine",
            )
        };
        let tar = self
            .tools
            .find("tar")
            .ok_or_else(|| fault("tar is not on PATH".into()))?;
        let args = [
            "--create",
            "--gzip",
            "--no-unquote",
            "--no-wildcards",
            "--one-file-system",
            "--check-links",
            "--preserve-permissions",
            "--sparse",
            "--numeric-owner",
            "--files-from",
            "/dev/null",
        ];
        let done = self.run(&tar, &args);
        match done {
            Ok(out) if !out.stdout.is_empty() => Ok(tar.display().to_string()),
            Ok(_) => Err(fault(format!("{} writes nothing", tar.display()))),
            Err(why) if self.tools.find("gzip").is_none() => {
                tracing::debug!("{}: {why}", tar.display());
                Err(fault("gzip is not on PATH".into()))
            }
            Err(why) => Err(fault(format!(
                "{} cannot be used for that: {why}",
                tar.display()
            ))),
        }
    }

    /// Saves the addresses of a new network namespace. The error names the package to install.
    pub fn ip(&self) -> Result<String, Fault> {
        let fault = |why: String| {
            Fault::new(
                format!(
                    "CRIU saves the container's network namespace with iproute2's `ip`, and {why}"
                ),
                "install the package iproute2 (Fedora: iproute), on the PATH of the container engine",
            )
        };
        let named = std::env::var(IP_TOOL).ok().filter(|n| !n.is_empty());
        let name = named.as_deref().unwrap_or("ip");
        let ip = self
            .tools
            .find(name)
            .ok_or_else(|| fault(format!("{name} is not on PATH")))?;
        let done = in_new_network(|| self.run(&ip, &["addr", "save"]))
            .unwrap_or_else(|| self.run(&ip, &["addr", "save"]));
        match done {
            Ok(out) if !out.stdout.is_empty() => Ok(ip.display().to_string()),
            Ok(_) => Err(fault(format!("{} addr save writes nothing", ip.display()))),
            Err(why) => Err(fault(format!(
                "`{} addr save` fails (busybox's ip cannot do it): {why}",
                ip.display()
            ))),
        }
    }

    /// Locks a new network namespace, all of it or one connection in it. The error names the package to install.
    pub fn lock(&self, lock: Lock, connections_only: bool) -> Result<String, Fault> {
        let done = match lock {
            Lock::Skip => Ok("not locked (network-lock skip)".into()),
            Lock::Iptables => self.iptables(connections_only),
            Lock::Nftables => self.nftables(),
        };
        done.map_err(|why| {
            let (package, other) = match lock {
                Lock::Nftables => ("a CRIU with libnftables", Lock::Iptables),
                _ => ("the package iptables", Lock::Nftables),
            };
            Fault::new(
                format!("CRIU locks the container's network by {}, and {why}", lock.word()),
                format!(
                    "install {package} (and see that the kernel has netfilter), or have CRIU lock it otherwise: `network-lock = \"{}\"` under [criu.options] in {}, or the annotation dev.cryopod.criu.network-lock",
                    other.word(),
                    crate::config::PATH
                ),
            )
        })
    }

    /// Returns the first lock that works, for a CRIU that was not told which.
    pub fn any_lock(&self, connections_only: bool) -> Result<(Lock, String), Fault> {
        let by_iptables = match self.iptables(connections_only) {
            Ok(found) => return Ok((Lock::Iptables, found)),
            Err(why) => why,
        };
        match self.nftables() {
            Ok(found) => Ok((Lock::Nftables, found)),
            Err(by_nftables) => Err(Fault::new(
                format!(
                    "CRIU locks the container's network by iptables or nftables, and neither works: {by_iptables}; {by_nftables}"
                ),
                format!(
                    "install the package iptables, or a CRIU with libnftables (and see that the kernel has netfilter); where nothing needs the lock: `network-lock = \"skip\"` under [criu.options] in {}",
                    crate::config::PATH
                ),
            )),
        }
    }

    fn iptables(&self, connections_only: bool) -> Result<String, String> {
        let (suffix, script) = match connections_only {
            true => ("", LOCK_CONNECTION),
            false => ("-restore", LOCK_NAMESPACE),
        };
        let sh = self.tools.find("sh").ok_or("sh is not on PATH")?;
        let mut families = vec![("iptables", "127.0.0.1")];
        if Host::system().path("/proc/sys/net/ipv6").exists() {
            families.push(("ip6tables", "::1"));
        }
        let mut found = None;
        for (family, address) in families {
            let name = format!("{family}{suffix}");
            let path = self.tools.find(&name);
            let path = path.ok_or_else(|| format!("{name} is not on PATH"))?;
            let text = path.display().to_string();
            // Never in the host's own namespace, where the rules would take effect.
            let locked = in_new_network(|| self.run(&sh, &["-c", script, &text, address]));
            if let Some(Err(why)) = locked {
                return Err(format!("{name} cannot lock it: {why}"));
            }
            found = found.or(Some(text));
        }
        Ok(found.unwrap_or_default())
    }

    fn nftables(&self) -> Result<String, String> {
        let criu = self.tools.find("criu").ok_or("criu is not on PATH")?;
        self.run(&criu, &["check", "--feature", "network_lock_nftables"])
            .map(|_| "CRIU's own, by libnftables".into())
            .map_err(|why| format!("CRIU cannot use nftables here: {why}"))
    }

    fn run(&self, program: &Path, args: &[&str]) -> Result<Output, String> {
        let args: Vec<&OsStr> = args.iter().map(OsStr::new).collect();
        match self.tools.output(program, &args, self.limit) {
            Ok(out) if out.code == 0 => Ok(out),
            Ok(out) => {
                let said = out.stderr.lines().chain(out.stdout.lines());
                let said = said.map(str::trim).find(|l| !l.is_empty());
                Err(said.map_or_else(|| format!("exit code {}", out.code), str::to_owned))
            }
            Err(e) => Err(e.to_string()),
        }
    }
}

/// Runs something in a temporary network namespace; `None` where none can be made.
fn in_new_network<T: Send>(run: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        // In a thread of its own, as the thread stays in that namespace.
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET).ok()?;
            Some(run())
        });
        thread.join().ok().flatten()
    })
}

/// What a container's networks require of CRIU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NetworkNeeds {
    /// CRIU's own namespace, with connections or without.
    Hosts { connections: bool },
    /// Another namespace. `saved`: CRIU saves addresses and routes.
    Apart { saved: bool },
}

fn network(
    host: &Host,
    kind: RuntimeKind,
    spec: &Spec,
    init: i32,
    scan: &Scan,
    connections: &[Connection],
) -> NetworkNeeds {
    let namespace = |process: &str| -> Option<PathBuf> {
        fs::read_link(host.path(format!("/proc/{process}/ns/net"))).ok()
    };
    let hosts = namespace("self");
    let own = namespace(&init.to_string());
    let mut others: BTreeSet<PathBuf> = scan
        .pids()
        .iter()
        .filter_map(|pid| namespace(&pid.to_string()))
        .chain(own.clone())
        .filter(|n| Some(n) != hosts.as_ref())
        .collect();
    if own == hosts {
        let connections = !connections.is_empty();
        return NetworkNeeds::Hosts { connections };
    }
    if let (false, Some(own)) = (spec.has_own_namespace("network"), &own) {
        others.remove(own);
    }
    let saved = kind == RuntimeKind::Crun && !others.is_empty();
    NetworkNeeds::Apart { saved }
}

/// Returns true if the container has a tmpfs of its own: only its content does CRIU dump.
fn has_tmpfs(host: &Host, init: i32) -> bool {
    let outside = mountinfo::of(host, "self");
    mountinfo::of(host, &init.to_string())
        .iter()
        .any(|m| m.fs_type == "tmpfs" && !outside.iter().any(|o| o.device == m.device))
}

pub struct HelperSubject<'a> {
    pub host: &'a Host,
    pub kind: RuntimeKind,
    pub spec: &'a Spec,
    pub init: i32,
    pub scan: &'a Scan,
    pub connections: &'a [Connection],
    pub lock: Option<Lock>,
}

#[derive(Debug, Default)]
pub struct HelperFindings {
    /// What a restore needs, in the metadata's words.
    pub recorded: Vec<String>,
    /// The lock to configure in CRIU.
    pub lock: Option<Lock>,
    pub refusals: Vec<Refusal>,
}

/// Tests the helpers that the dump of this container needs.
pub fn checkpoint(probe: Probe<'_>, subject: &HelperSubject<'_>) -> HelperFindings {
    let network = network(
        subject.host,
        subject.kind,
        subject.spec,
        subject.init,
        subject.scan,
        subject.connections,
    );
    let mut found = HelperFindings::default();
    let mut wanted = BTreeSet::new();
    if has_tmpfs(subject.host, subject.init) {
        wanted.insert(Helper::Tar);
    }
    if (network == NetworkNeeds::Apart { saved: true }) {
        wanted.insert(Helper::Ip);
    }
    let connections_only = matches!(network, NetworkNeeds::Hosts { .. });
    if network != (NetworkNeeds::Hosts { connections: false }) {
        match subject.lock {
            Some(Lock::Skip) => {}
            Some(lock) => {
                wanted.insert(Helper::Lock(lock));
            }
            // Some distributions build CRIU with another default.
            None => match probe.any_lock(connections_only) {
                Ok((lock, _)) => found.lock = Some(lock),
                Err(fault) => found.refusals.push(fault.refusal()),
            },
        }
    }
    found
        .refusals
        .extend(missing(probe, &wanted, connections_only));
    wanted.extend(found.lock.map(Helper::Lock));
    // In CRIU's own namespace a restore has no lock to remove.
    wanted.retain(|helper| !(connections_only && matches!(helper, Helper::Lock(_))));
    found.recorded = wanted.iter().map(|h| h.word().to_owned()).collect();
    found
}

/// Returns what this host lacks for a restore of a checkpoint with these helpers in its metadata.
pub fn restore(config: &Config, tools: &dyn Tools, recorded: &[String]) -> Vec<Refusal> {
    let Ok(low) = LowLevel::find(config) else {
        return Vec::new();
    };
    let probe = Probe {
        tools,
        limit: config.limits.tool(),
    };
    let recorded: BTreeSet<Helper> = recorded.iter().filter_map(|w| Helper::of(w)).collect();
    let saved = recorded.contains(&Helper::Ip);
    let needed = |helper: &Helper| match helper {
        Helper::Tar => true,
        Helper::Ip => low.kind == RuntimeKind::Crun,
        // crun's CRIU removes the lock that the images hold; runc's locks an empty namespace first.
        Helper::Lock(_) => low.kind == RuntimeKind::Runc || saved,
    };
    let wanted = recorded.into_iter().filter(needed).collect();
    missing(probe, &wanted, false)
}

fn missing(probe: Probe<'_>, wanted: &BTreeSet<Helper>, connections_only: bool) -> Vec<Refusal> {
    let fault = |helper: &Helper| match helper {
        Helper::Tar => probe.tar().err(),
        Helper::Ip => probe.ip().err(),
        Helper::Lock(lock) => probe.lock(*lock, connections_only).err(),
    };
    wanted
        .iter()
        .filter_map(fault)
        .map(Fault::refusal)
        .collect()
}

#[cfg(test)]
mod tests;
