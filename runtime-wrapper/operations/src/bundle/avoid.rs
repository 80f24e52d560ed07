//! Keeps a container from using what cannot be checkpointed: follows the annotation `dev.cryopod.env.avoid =
//! "io_uring,nccl"` when the container is created.
//!
//! The variables go into `process.env` of the bundle before the low-level runtime reads it. The annotation
//! `dev.cryopod.env.set` there lists them. Variables that the container already has stay as they are. Without the
//! annotation the only cost is one read of the spec's text.
//!
//! libuv from 1.49 on makes one io_uring whatever `UV_USE_IO_URING` says (seen with 1.50 and 1.53). So for `io_uring`
//! the spec's seccomp profile forbids it, too: the call fails with ENOSYS, and libraries fall back to epoll.

use cryopod_host::files::Host;
use cryopod_host::spec::Spec;
use serde_json::{Value, json};

use crate::bundle::{Edit, environment};
use crate::error::Error;

/// Names what the container is to avoid, separated by commas.
pub const ANNOTATION: &str = "dev.cryopod.env.avoid";
/// Lists the variables that cryopod set.
pub const SET: &str = "dev.cryopod.env.set";

/// What can be avoided, and the variables that do so.
const KNOWN: [(&str, &[(&str, &str)]); 5] = [
    ("io_uring", &[("UV_USE_IO_URING", "0")]),
    (
        "nccl",
        &[
            ("NCCL_P2P_DISABLE", "1"),
            ("NCCL_SHM_DISABLE", "1"),
            ("NCCL_NVLS_ENABLE", "0"),
        ],
    ),
    ("rdma", &[("NCCL_IB_DISABLE", "1")]),
    (
        "gdrcopy",
        &[
            ("NCCL_GDRCOPY_ENABLE", "0"),
            ("NVSHMEM_DISABLE_GDRCOPY", "1"),
        ],
    ),
    (
        "inductor",
        &[("TORCHINDUCTOR_QUIESCE_ASYNC_COMPILE_POOL", "1")],
    ),
];

/// Returns the edit for a new container whose annotation asks for it.
pub fn edit(spec: &Spec) -> Result<Option<Box<dyn Edit>>, Error> {
    let Some(words) = spec.annotation(ANNOTATION) else {
        return Ok(None);
    };
    Ok(Some(Box::new(Avoidance {
        variables: variables(words)?,
        io_uring: words.split(',').any(|w| w.trim() == "io_uring"),
    })))
}

fn variables(words: &str) -> Result<Vec<(&'static str, &'static str)>, Error> {
    let mut found = Vec::new();
    for word in words.split(',').map(str::trim).filter(|w| !w.is_empty()) {
        let Some((_, variables)) = KNOWN.iter().find(|(name, _)| *name == word) else {
            let known: Vec<&str> = KNOWN.iter().map(|(name, _)| *name).collect();
            return Err(Error::Failed(format!(
                "annotation {ANNOTATION}: {word:?} is not known; it takes {}, separated by commas",
                known.join(", ")
            )));
        };
        found.extend_from_slice(variables);
    }
    Ok(found)
}

struct Avoidance {
    variables: Vec<(&'static str, &'static str)>,
    io_uring: bool,
}

const RING_CALLS: [&str; 3] = ["io_uring_setup", "io_uring_enter", "io_uring_register"];
const ENOSYS: u32 = 38;

/// Forbids io_uring in the spec's seccomp profile. A spec without one gets a profile that forbids nothing else.
fn forbid_io_uring(spec: &mut Value) {
    let Some(linux) = spec.get_mut("linux").and_then(Value::as_object_mut) else {
        return;
    };
    let profile = linux
        .entry("seccomp")
        .or_insert_with(|| json!({"defaultAction": "SCMP_ACT_ALLOW"}));
    let Some(profile) = profile.as_object_mut() else {
        return;
    };
    let rules = profile.entry("syscalls").or_insert_with(|| json!([]));
    let Some(rules) = rules.as_array_mut() else {
        return;
    };
    for rule in rules.iter_mut() {
        if let Some(names) = rule.get_mut("names").and_then(Value::as_array_mut) {
            names.retain(|n| !n.as_str().is_some_and(|n| RING_CALLS.contains(&n)));
        }
    }
    rules.retain(|r| {
        let names = r.get("names").and_then(Value::as_array);
        names.is_none_or(|n| !n.is_empty())
    });
    rules.push(json!({"names": RING_CALLS, "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}));
}

impl Edit for Avoidance {
    fn name(&self) -> &'static str {
        "environment that avoids what cannot be checkpointed"
    }

    fn apply(&self, _: &Host, spec: &mut Value) -> Result<(), Error> {
        if self.io_uring {
            forbid_io_uring(spec);
        }
        let Some(env) = environment(spec) else {
            return Ok(());
        };
        let mut set = Vec::new();
        for (name, value) in &self.variables {
            let there = env.iter().filter_map(Value::as_str).any(|entry| {
                entry
                    .strip_prefix(name)
                    .is_some_and(|rest| rest.starts_with('='))
            });
            if there {
                tracing::info!("{name} is set by the container itself");
            } else {
                env.push(json!(format!("{name}={value}")));
                set.push(format!("{name}={value}"));
            }
        }
        if !set.is_empty()
            && let Some(annotations) = spec.get_mut("annotations").and_then(Value::as_object_mut)
        {
            annotations.insert(SET.into(), json!(set.join(" ")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn avoid(words: &str, env: Value) -> Value {
        let mut spec = json!({"process": {"env": env}, "annotations": {ANNOTATION: words}});
        let edit = Avoidance {
            variables: variables(words).unwrap(),
            io_uring: false,
        };
        edit.apply(&Host::system(), &mut spec).unwrap();
        spec
    }

    #[test]
    fn variables_are_added_and_none_is_changed() {
        let spec = avoid(
            "io_uring, nccl",
            json!(["PATH=/bin", "NCCL_P2P_DISABLE=0", "NCCL_SHM_DISABLED=1"]),
        );
        assert_eq!(
            spec["process"]["env"],
            json!([
                "PATH=/bin",
                "NCCL_P2P_DISABLE=0",
                "NCCL_SHM_DISABLED=1",
                "UV_USE_IO_URING=0",
                "NCCL_SHM_DISABLE=1",
                "NCCL_NVLS_ENABLE=0"
            ])
        );
        assert_eq!(
            spec["annotations"][SET],
            "UV_USE_IO_URING=0 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0"
        );
        let again = avoid("io_uring", json!(["UV_USE_IO_URING=1"]));
        assert_eq!(again["process"]["env"], json!(["UV_USE_IO_URING=1"]));
        assert_eq!(again["annotations"].get(SET), None);
    }

    #[test]
    fn io_uring_is_forbidden_and_nothing_else() {
        let mut bare = json!({"linux": {}});
        forbid_io_uring(&mut bare);
        let rule = json!({"names": RING_CALLS, "action": "SCMP_ACT_ERRNO", "errnoRet": 38});
        assert_eq!(
            bare["linux"]["seccomp"],
            json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]})
        );
        let mut with = json!({"linux": {"seccomp": {"defaultAction": "SCMP_ACT_ERRNO", "x": 1, "syscalls": [
            {"names": ["read", "io_uring_setup"], "action": "SCMP_ACT_ALLOW"},
            {"names": ["io_uring_enter"], "action": "SCMP_ACT_ALLOW"}
        ]}}});
        forbid_io_uring(&mut with);
        assert_eq!(
            with["linux"]["seccomp"],
            json!({"defaultAction": "SCMP_ACT_ERRNO", "x": 1, "syscalls": [
                {"names": ["read"], "action": "SCMP_ACT_ALLOW"}, rule
            ]})
        );
    }

    #[test]
    fn nccl_is_kept_to_what_comes_back() {
        use cryopod_cuda::sharing::SAFE;
        let set = variables("nccl").unwrap();
        assert!(SAFE.iter().any(|safe| safe[..] == set[..]), "{set:?}");
    }

    #[test]
    fn a_word_that_is_not_known() {
        let e = variables("io_uring,iouring").unwrap_err().to_string();
        assert!(
            e.contains("dev.cryopod.env.avoid: \"iouring\"") && e.contains("io_uring, nccl, rdma"),
            "{e}"
        );
    }
}
