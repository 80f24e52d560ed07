//! Leaves CRIU's amdgpu plugin only the GPUs chosen for it, through the container's device rules.
//!
//! The plugin uses what the kernel shows it of the KFD's topology. The kernel shows a reader only the GPUs whose render
//! nodes its device cgroup allows. The plugin wants as many GPUs as the checkpoint has, and chooses among them itself.

use std::collections::BTreeSet;

use cryopod_amd::topology::Topology;
use cryopod_host::files::Host;
use cryopod_host::nodes::DRM_MAJOR;
use cryopod_host::spec::Spec;
use serde_json::{Value, json};

use crate::bundle::Edit;
use crate::error::Error;

/// Denies the render nodes of all AMD GPUs but these.
#[derive(Debug)]
pub struct OnlyRender {
    /// The render minors that stay.
    pub visible: Vec<u32>,
}

impl Edit for OnlyRender {
    fn name(&self) -> &'static str {
        "render nodes of other AMD GPUs are denied"
    }

    fn apply(&self, host: &Host, spec: &mut Value) -> Result<(), Error> {
        let rules = Spec::from_json(spec.clone());
        let topology = Topology::read(host);
        let minors: BTreeSet<u32> = topology.gpus().map(|gpu| gpu.render_minor()).collect();
        let denied: Vec<Value> = minors
            .into_iter()
            .filter(|minor| !self.visible.contains(minor))
            .filter(|minor| rules.allows(DRM_MAJOR, (*minor).into()))
            .map(|minor| json!({"allow": false, "type": "c", "major": DRM_MAJOR, "minor": minor, "access": "rwm"}))
            .collect();
        if denied.is_empty() {
            return Ok(());
        }
        let unusable = || Error::Failed("config.json: linux.resources.devices is no list".into());
        let mut at = spec;
        for key in ["linux", "resources", "devices"] {
            let empty = match key {
                "devices" => json!([]),
                _ => json!({}),
            };
            at = at
                .as_object_mut()
                .ok_or_else(unusable)?
                .entry(key)
                .or_insert(empty);
        }
        at.as_array_mut().ok_or_else(unusable)?.extend(denied);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;

    #[test]
    fn what_was_allowed_and_is_not_chosen_is_denied() {
        let dir = tempfile::tempdir().unwrap();
        for (node, minor) in [(1, 128), (2, 129), (3, 130)] {
            let at = dir
                .path()
                .join(format!("sys/class/kfd/kfd/topology/nodes/{node}"));
            at.dir("io_links");
            at.put("gpu_id", format!("{node}00"));
            at.put("properties", format!("drm_render_minor {minor}\n"));
            let bank = "heap_type 1\nsize_in_bytes 1024\n";
            at.put("mem_banks/0/properties", bank);
        }
        let host = Host::at(dir.path());
        let edit = OnlyRender { visible: vec![129] };
        let allow = |minor: Value| json!({"allow": true, "type": "c", "major": 226, "minor": minor, "access": "rwm"});
        let deny = |minor: u32| json!({"allow": false, "type": "c", "major": 226, "minor": minor, "access": "rwm"});
        let closed = json!({"allow": false, "access": "rwm"});
        let all = json!({"allow": true, "type": "c", "major": 226, "access": "rwm"});
        for (rules, added) in [
            (vec![closed.clone(), all], vec![deny(128), deny(130)]),
            (
                vec![closed.clone(), allow(json!(130)), allow(json!(129))],
                vec![deny(130)],
            ),
            (vec![closed, allow(json!(129))], vec![]),
        ] {
            let mut spec = json!({"linux": {"resources": {"devices": rules}}});
            edit.apply(&host, &mut spec).unwrap();
            let want: Vec<Value> = rules.into_iter().chain(added).collect();
            assert_eq!(spec["linux"]["resources"]["devices"], Value::from(want));
        }
        let mut bare = json!({});
        edit.apply(&host, &mut bare).unwrap();
        let rules = bare.pointer("/linux/resources/devices").unwrap();
        assert_eq!(*rules, json!([deny(128), deny(130)]));
        let mut odd = json!({"linux": 5});
        assert!(edit.apply(&host, &mut odd).is_err());
    }
}
