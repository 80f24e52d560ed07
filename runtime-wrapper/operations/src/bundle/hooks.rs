//! Removes OCI hooks that a restore must not run again.
//!
//! runc runs prestart and createRuntime hooks at a restore, before CRIU has made the mounts; crun runs none. NVIDIA's
//! hooks fail then, and the restore provides what they did in another way ([`crate::preflight::surroundings`]). Unknown hooks
//! stay.

use cryopod_host::files::Host;
use serde_json::Value;

use super::Edit;
use crate::error::Error;

/// Removes the hooks that the configuration names.
pub struct DroppedHooks<'a> {
    /// Paths, or names of programs.
    pub drop: &'a [String],
}

impl Edit for DroppedHooks<'_> {
    fn name(&self) -> &'static str {
        "hooks that a restore must not run again were taken out"
    }

    fn apply(&self, _: &Host, spec: &mut Value) -> Result<(), Error> {
        let Some(stages) = spec.get_mut("hooks").and_then(Value::as_object_mut) else {
            return Ok(());
        };
        for (stage, hooks) in stages {
            let Some(hooks) = hooks.as_array_mut() else {
                continue;
            };
            hooks.retain(|hook| {
                let path = hook.get("path").and_then(Value::as_str).unwrap_or_default();
                let dropped = self.drops(path);
                if dropped {
                    tracing::info!("the {stage} hook {path} is not run again (hooks.drop)");
                }
                !dropped
            });
        }
        Ok(())
    }
}

impl DroppedHooks<'_> {
    /// Returns true for the path of a hook that is to be removed.
    pub fn drops(&self, path: &str) -> bool {
        let name = path.rsplit('/').next().unwrap_or_default();
        self.drop.iter().any(|d| match d.contains('/') {
            true => d == path,
            false => d == name && !name.is_empty(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn by_name_or_path_and_no_others() {
        let drop = ["nvidia-ctk", "/opt/hook.sh"].map(str::to_owned);
        let hooks = DroppedHooks { drop: &drop };
        let mut spec = json!({"hooks": {
            "createRuntime": [
                {"path": "/usr/bin/nvidia-ctk", "args": ["nvidia-ctk", "hook", "create-symlinks"]},
                {"path": "/opt/hook.sh"},
                {"path": "/srv/hook.sh", "unknown": 1}
            ],
            "poststop": [{"path": "/usr/bin/nvidia-ctk-other"}, {}],
            "odd": 3
        }});
        hooks.apply(&Host::system(), &mut spec).unwrap();
        assert_eq!(
            spec,
            json!({"hooks": {
                "createRuntime": [{"path": "/srv/hook.sh", "unknown": 1}],
                "poststop": [{"path": "/usr/bin/nvidia-ctk-other"}, {}],
                "odd": 3
            }})
        );
        let mut none = json!({"ociVersion": "1.0"});
        hooks.apply(&Host::system(), &mut none).unwrap();
        assert_eq!(none, json!({"ociVersion": "1.0"}));
    }
}
