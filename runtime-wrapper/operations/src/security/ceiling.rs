//! Computes what the engine's spec lets a process reach: ids, capabilities, limits.
//!
//! A process may have less than the spec gives its first one, and more only where the kernel would have let that process
//! get it: a root user gets its bounding set at an exec unless the spec says `noNewPrivileges`, and whoever has
//! `CAP_SETUID` becomes any user. A set-user-id program could give more to others; the spec does not promise one, so a
//! process that has used one is refused.

use cryopod_archive::criu::privileges::{Capabilities, Credentials};
use cryopod_host::spec::Spec;
use rustix::thread::CapabilitySet;
use serde_json::Value;

/// Securebits that need no capability: `KEEP_CAPS`, which an exec clears.
const KEEP_CAPS: u32 = 1 << 4;

/// The most that a process of the container can have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CredentialsCeiling {
    uid: u32,
    /// The spec's group, and its additional ones.
    gids: Vec<u32>,
    /// Permitted, effective and ambient sets.
    reachable: u64,
    inheritable: u64,
    bounding: u64,
}

impl CredentialsCeiling {
    pub fn of(spec: &Spec) -> Self {
        let json = spec.json();
        let number = |pointer: &str| {
            let number = json.pointer(pointer).and_then(Value::as_u64);
            number.and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
        };
        let set = |name: &str| capability_set(json, name);
        let uid = number("/process/user/uid");
        let no_new_privs = json.pointer("/process/noNewPrivileges") == Some(&Value::Bool(true));
        let bounding = set("bounding");
        let at_exec = match uid == 0 && !no_new_privs {
            true => bounding,
            false => 0,
        };
        let reachable = set("permitted") | set("effective") | set("ambient") | at_exec;
        let more = json.pointer("/process/user/additionalGids");
        let more = more.and_then(Value::as_array).into_iter().flatten();
        let more = more.filter_map(|g| u32::try_from(g.as_u64()?).ok());
        Self {
            uid,
            gids: std::iter::once(number("/process/user/gid"))
                .chain(more)
                .collect(),
            reachable,
            inheritable: set("inheritable") | reachable,
            // A set that the spec leaves out is empty, and nothing is above the bounding set but what was given.
            bounding: bounding | reachable,
        }
    }

    /// Returns the spec's user, and its groups.
    pub fn ids(&self) -> (u32, &[u32]) {
        (self.uid, &self.gids)
    }

    /// Returns true if a process of the container can have this capability.
    pub fn has(&self, capability: &str) -> bool {
        let capability = CapabilitySet::from_name(capability);
        capability.is_some_and(|c| self.reachable & c.bits() != 0)
    }

    /// Returns what these credentials have beyond the ceiling, each a sentence's end: "has ...".
    pub fn exceeded(&self, of: &Credentials) -> Vec<String> {
        let mut told = Vec::new();
        let Capabilities {
            inheritable,
            permitted,
            effective,
            bounding,
            ambient,
        } = of.capabilities;
        let more = [
            permitted & !self.reachable,
            effective & !self.reachable,
            ambient & !self.reachable,
            inheritable & !self.inheritable,
            bounding & !self.bounding,
        ];
        let more = more.into_iter().fold(0, |all, set| all | set);
        if more != 0 {
            let names: Vec<String> = (0..64).filter(|n| more >> n & 1 == 1).map(name).collect();
            told.push(format!(
                "has capabilities in the images that the spec does not give: {}",
                names.join(", ")
            ));
        }
        if !self.has("SETUID")
            && let Some(uid) = of.uids.iter().find(|uid| **uid != self.uid)
        {
            told.push(format!(
                "has the user id {uid} in the images, and the spec says {}",
                self.uid
            ));
        }
        let mut groups = of.gids.iter().chain(&of.groups);
        if !self.has("SETGID")
            && let Some(gid) = groups.find(|gid| !self.gids.contains(gid))
        {
            told.push(format!(
                "has the group {gid} in the images, which the spec does not give"
            ));
        }
        if of.securebits & !KEEP_CAPS != 0 && !self.has("SETPCAP") {
            told.push("has securebits in the images that the spec does not give".to_owned());
        }
        told
    }
}

fn capability_set(spec: &Value, set: &str) -> u64 {
    let names = spec
        .pointer("/process/capabilities")
        .and_then(|c| c.get(set));
    let names = names.and_then(Value::as_array).into_iter().flatten();
    names.filter_map(Value::as_str).fold(0, |all, name| {
        let name = name.trim_start_matches("CAP_");
        CapabilitySet::from_name(name).map_or(all, |c| all | c.bits())
    })
}

/// Returns the name of a capability, `CAP_CHOWN` for 0.
fn name(number: u32) -> String {
    let capability = CapabilitySet::from_bits_retain(1 << number);
    match capability.iter_names().next() {
        Some((name, _)) => format!("CAP_{name}"),
        None => format!("capability {number}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn ceiling(uid: u32, no_new_privs: bool, effective: &[&str]) -> CredentialsCeiling {
        let spec = json!({"process": {
            "user": {"uid": uid, "gid": 5, "additionalGids": [6]},
            "noNewPrivileges": no_new_privs,
            "capabilities": {
                "bounding": ["CAP_CHOWN", "CAP_KILL", "CAP_SETUID"],
                "permitted": effective,
                "effective": effective,
            },
        }});
        CredentialsCeiling::of(&Spec::from_json(spec))
    }

    fn credentials(uid: u32, permitted: u64, bounding: u64) -> Credentials {
        Credentials {
            uids: [uid; 4],
            gids: [5; 4],
            capabilities: Capabilities {
                permitted,
                effective: permitted,
                bounding,
                ..Capabilities::default()
            },
            ..Credentials::default()
        }
    }

    #[test]
    fn set_by_set() {
        const CHOWN: u64 = 1;
        const KILL: u64 = 1 << 5;
        let told = |ceiling: &CredentialsCeiling, of: &Credentials| ceiling.exceeded(of).join("; ");
        let limited = ceiling(0, true, &["CAP_CHOWN"]);
        assert_eq!(told(&limited, &credentials(0, CHOWN, CHOWN | KILL)), "");
        // What is only in the bounding set cannot be had without an exec.
        assert!(told(&limited, &credentials(0, CHOWN | KILL, 0)).contains("CAP_KILL"));
        assert!(told(&limited, &credentials(7, CHOWN, 0)).contains("user id 7"));
        let root = ceiling(0, false, &["CAP_CHOWN"]);
        assert_eq!(told(&root, &credentials(0, CHOWN | KILL, CHOWN)), "");
        assert_eq!(told(&root, &credentials(7, 0, 0)), "", "CAP_SETUID");
        assert!(told(&root, &credentials(0, 1 << 21, 0)).contains("CAP_SYS_ADMIN"));
        let user = ceiling(1000, false, &[]);
        assert_eq!(told(&user, &credentials(1000, 0, CHOWN)), "");
        assert!(told(&user, &credentials(0, 0, 0)).contains("user id 0"));
        assert!(told(&user, &credentials(1000, CHOWN, 0)).contains("CAP_CHOWN"));
    }

    #[test]
    fn groups_and_securebits() {
        let user = ceiling(1000, false, &[]);
        let mut of = credentials(1000, 0, 0);
        of.groups = vec![5, 6];
        of.securebits = KEEP_CAPS;
        assert_eq!(user.exceeded(&of), [""; 0]);
        of.groups.push(0);
        of.securebits = 1;
        assert_eq!(user.exceeded(&of).len(), 2);
    }

    #[test]
    fn names_are_the_kernels() {
        assert_eq!(
            [name(0), name(21), name(40), name(50)],
            [
                "CAP_CHOWN",
                "CAP_SYS_ADMIN",
                "CAP_CHECKPOINT_RESTORE",
                "capability 50"
            ]
        );
    }
}
