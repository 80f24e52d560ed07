//! Reads the container's OCI spec.
//!
//! The spec is kept as JSON, so that fields unknown to this version survive an edit. Devices, mounts and rules are read
//! one entry at a time, leniently: the low-level runtime reports entries that do not parse.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use crate::nodes::{DeviceNode, NodeSource};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceCgroup, LinuxDeviceType, Mount};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::files::Host;
use crate::nodes;

const MAX_SPEC: u64 = 64 << 20;

#[derive(Debug, thiserror::Error)]
pub enum SpecError {
    #[error("{path}: cannot read the container's spec: {source}")]
    Read { path: PathBuf, source: io::Error },
    #[error("{path}: not an OCI runtime spec: {reason}")]
    Invalid { path: PathBuf, reason: String },
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Spec {
    json: Value,
}

impl Spec {
    /// Reads the `config.json` of a bundle.
    pub fn of_bundle(bundle: &Path) -> Result<Self, SpecError> {
        let path = bundle.join("config.json");
        let read = |source| SpecError::Read {
            path: path.clone(),
            source,
        };
        let mut text = Vec::new();
        File::open(&path)
            .map_err(read)?
            .take(MAX_SPEC)
            .read_to_end(&mut text)
            .map_err(read)?;
        let json: Value = serde_json::from_slice(&text).map_err(|e| SpecError::Invalid {
            path: path.clone(),
            reason: e.to_string(),
        })?;
        if !json.is_object() {
            return Err(SpecError::Invalid {
                path,
                reason: "not a JSON object".into(),
            });
        }
        Ok(Self { json })
    }

    /// Takes a spec that is parsed already; nothing in it is checked.
    pub fn from_json(json: Value) -> Self {
        Self { json }
    }

    /// Returns the spec as it was read, with what this crate does not know.
    pub fn json(&self) -> &Value {
        &self.json
    }

    /// The spec as JSON, to be changed and written back: nothing of it is lost.
    pub fn into_json(self) -> Value {
        self.json
    }

    fn list<T: DeserializeOwned>(&self, pointer: &str) -> Vec<T> {
        self.json
            .pointer(pointer)
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(|v| serde_json::from_value(v.clone()).ok())
            .collect()
    }

    /// Returns `linux.devices`. What is not of its form is left out.
    pub fn devices(&self) -> Vec<LinuxDevice> {
        self.list("/linux/devices")
    }

    /// Returns `mounts`. What is not of its form is left out.
    pub fn mounts(&self) -> Vec<Mount> {
        self.list("/mounts")
    }

    /// Returns `linux.resources.devices`. What is not of its form is left out.
    pub fn device_rules(&self) -> Vec<LinuxDeviceCgroup> {
        self.list("/linux/resources/devices")
    }

    /// The container's cgroup below each hierarchy: `linux.cgroupsPath`, or the container's id where there is none.
    /// `None` for systemd's form (`SLICE:PREFIX:NAME`), which systemd removes itself, and for one that leads elsewhere.
    pub fn cgroup<'a>(&'a self, id: &'a str) -> Option<&'a Path> {
        let path = self.cgroups_path().filter(|p| !p.is_empty()).unwrap_or(id);
        let path = Path::new(path.trim_start_matches('/'));
        let plain = |c| matches!(c, Component::Normal(n) if !n.to_string_lossy().contains(':'));
        (!path.as_os_str().is_empty() && path.components().all(plain)).then_some(path)
    }

    /// The absolute path of the container's cgroup in each hierarchy; systemd's form as systemd makes it. `None`: the
    /// runtime chooses it.
    pub fn cgroup_path(&self) -> Option<String> {
        let path = self.cgroups_path()?;
        if path.starts_with('/') {
            return Some(path.to_owned());
        }
        let mut parts = path.split(':');
        let (slice, prefix, name) = (parts.next()?, parts.next()?, parts.next()?);
        let slice = if slice.is_empty() {
            "system.slice"
        } else {
            slice
        };
        let inner = slice
            .strip_suffix(".slice")
            .filter(|_| parts.next().is_none())?;
        // "a-b.slice" is in "a.slice".
        let mut above = String::new();
        if inner != "-" {
            for (at, _) in inner.match_indices('-').chain([(inner.len(), "")]) {
                above.push_str(&format!("/{}.slice", &inner[..at]));
            }
        }
        Some(format!("{above}/{prefix}-{name}.scope"))
    }

    /// Returns true if the container's cgroup has systemd's form (`SLICE:PREFIX:NAME`).
    pub fn names_a_slice(&self) -> bool {
        self.cgroups_path().is_some_and(|path| {
            let mut parts = path.split(':');
            parts.next().is_some_and(|slice| slice.ends_with(".slice")) && parts.count() == 2
        })
    }

    fn cgroups_path(&self) -> Option<&str> {
        self.json.pointer("/linux/cgroupsPath")?.as_str()
    }

    /// Returns the value of an annotation.
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.json.get("annotations")?.get(key)?.as_str()
    }

    /// Returns what an annotation that is a [`switch`] says; `None`: it is not set.
    ///
    /// # Errors
    /// Names the annotation, whose word is another.
    pub fn switch(&self, key: &str) -> Result<Option<bool>, String> {
        let Some(text) = self.annotation(key) else {
            return Ok(None);
        };
        let on =
            switch(text).ok_or_else(|| format!("{key}: {text:?} is neither \"on\" nor \"off\""));
        on.map(Some)
    }

    /// The value of a variable in the environment of the container's process.
    pub fn variable(&self, name: &str) -> Option<&str> {
        let env = self.json.pointer("/process/env")?.as_array()?;
        let mut pairs = env.iter().filter_map(|e| e.as_str()?.split_once('='));
        pairs.find(|(n, _)| *n == name).map(|(_, value)| value)
    }

    /// Returns true if the runtime makes the container a namespace of this type (`network`, `uts`). One with a path is
    /// the engine's.
    pub fn has_own_namespace(&self, kind: &str) -> bool {
        let namespaces = self.json.pointer("/linux/namespaces");
        let mut namespaces = namespaces.and_then(Value::as_array).into_iter().flatten();
        namespaces.any(|n| {
            let path = n.get("path").and_then(Value::as_str).unwrap_or_default();
            n.get("type").is_some_and(|t| t == kind) && path.is_empty()
        })
    }

    /// Returns the spec without an annotation.
    #[must_use]
    pub fn without_annotation(mut self, key: &str) -> Self {
        if let Some(all) = self
            .json
            .get_mut("annotations")
            .and_then(Value::as_object_mut)
        {
            all.remove(key);
        }
        self
    }

    /// The annotations whose keys begin with `prefix`: the rest of the key, and the value.
    pub fn annotations<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let all = self.json.get("annotations").and_then(Value::as_object);
        all.into_iter()
            .flatten()
            .filter_map(move |(key, value)| Some((key.strip_prefix(prefix)?, value.as_str()?)))
    }

    /// Returns true if the device rules let the container open a character device for reading and writing. The last rule
    /// that matches decides; with no rule at all everything is allowed, as in the runtimes.
    pub fn allows(&self, major: u64, minor: u64) -> bool {
        self.allows_node(LinuxDeviceType::C, major, minor)
    }

    /// As [`Self::allows`], of a block device.
    pub fn allows_block(&self, major: u64, minor: u64) -> bool {
        self.allows_node(LinuxDeviceType::B, major, minor)
    }

    fn allows_node(&self, kind: LinuxDeviceType, major: u64, minor: u64) -> bool {
        let hits = |want: Option<i64>, got: u64| match want {
            None | Some(-1) => true,
            Some(n) => u64::try_from(n) == Ok(got),
        };
        self.device_rules()
            .iter()
            .filter(|r| {
                let of = match r.typ() {
                    Some(LinuxDeviceType::U) => Some(LinuxDeviceType::C),
                    other => other,
                };
                of.is_none_or(|of| of == LinuxDeviceType::A || of == kind)
                    && hits(r.major(), major)
                    && hits(r.minor(), minor)
                    && r.access()
                        .as_deref()
                        .is_none_or(|a| a.contains('r') && a.contains('w'))
            })
            .fold(true, |_, r| r.allow())
    }

    /// The GPU device nodes that the spec names: its devices, and bind mounts of nodes or of directories that hold
    /// nodes. Each container path once.
    pub fn gpu_nodes(&self, host: &Host) -> Vec<DeviceNode> {
        let mut found: Vec<DeviceNode> = Vec::new();
        let mut add = |node: DeviceNode| {
            if !found.iter().any(|n| n.path == node.path) {
                found.push(node);
            }
        };
        for device in self.devices() {
            let path = device.path().to_string_lossy().into_owned();
            let (Ok(major), Ok(minor)) =
                (u64::try_from(device.major()), u64::try_from(device.minor()))
            else {
                continue;
            };
            if !matches!(device.typ(), LinuxDeviceType::C | LinuxDeviceType::U) {
                continue;
            }
            let Some(kind) = nodes::identify(host, &path, major, minor) else {
                continue;
            };
            add(DeviceNode {
                // Engines pass `st_mode` whole; only the permission bits are a mode.
                file_mode: device.file_mode().map(|m| m & 0o7777),
                uid: device.uid(),
                gid: device.gid(),
                allowed: self.allows(major, minor),
                ..DeviceNode::new(path, kind, (major, minor))
            });
        }
        for mount in self.mounts() {
            let bind = mount.typ().as_deref() == Some("bind")
                || mount
                    .options()
                    .iter()
                    .flatten()
                    .any(|o| o == "bind" || o == "rbind");
            let Some(source) = mount.source().as_ref().filter(|_| bind) else {
                continue;
            };
            for (below, target) in bound_nodes(host, source, mount.destination()) {
                let Some((major, minor)) = host.char_device(&below) else {
                    continue;
                };
                // The container's name counts; a node bound under another name is known by the host's.
                let Some(kind) = nodes::identify(host, &target, major, minor)
                    .or_else(|| nodes::identify(host, &below, major, minor))
                else {
                    continue;
                };
                add(DeviceNode {
                    source: NodeSource::BindMount,
                    host_path: Some(below),
                    allowed: self.allows(major, minor),
                    ..DeviceNode::new(target, kind, (major, minor))
                });
            }
        }
        found
    }
}

/// Host path and container path of the nodes in a bind mount: the node itself, or the nodes in a directory under `/dev`
/// (`/dev`, `/dev/dri`, `/dev/nvidia-caps`).
fn bound_nodes(host: &Host, source: &Path, destination: &Path) -> Vec<(String, String)> {
    let text = |p: &Path| p.to_str().map(str::to_owned);
    let (Some(from), Some(to)) = (text(source), text(destination)) else {
        return Vec::new();
    };
    if !host.is_dir(&from) {
        return vec![(from, to)];
    }
    if !source.starts_with("/dev") && !destination.starts_with("/dev") {
        return Vec::new();
    }
    let mut found = Vec::new();
    for name in host.names(&from) {
        let (below, target) = (format!("{from}/{name}"), format!("{to}/{name}"));
        if matches!(
            name.as_str(),
            "dri" | "nvidia-caps" | "nvidia-caps-imex-channels"
        ) && host.is_dir(&below)
        {
            for name in host.names(&below) {
                found.push((format!("{below}/{name}"), format!("{target}/{name}")));
            }
        } else {
            found.push((below, target));
        }
    }
    found
}

/// Parses the words by which users switch something: `on`, `true`, `off`, `false`.
pub fn switch(text: &str) -> Option<bool> {
    match text.trim() {
        "on" | "true" => Some(true),
        "off" | "false" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::{NodeRole, Vendor};
    use serde_json::json;

    fn spec(json: Value) -> Spec {
        Spec::from_json(json)
    }

    #[test]
    fn words_that_switch() {
        let key = "dev.cryopod.store";
        let says = |word: &str| spec(json!({"annotations": {key: word}})).switch(key);
        for (word, on) in [
            ("on", true),
            ("true", true),
            (" off\n", false),
            ("false", false),
        ] {
            assert_eq!(says(word), Ok(Some(on)), "{word}");
        }
        for word in ["", "yes", "On", "1"] {
            let said = says(word).unwrap_err();
            assert!(
                said.starts_with(&format!("{key}: {word:?} is neither")),
                "{said}"
            );
        }
        assert_eq!(spec(json!({})).switch(key), Ok(None));
    }

    #[test]
    fn whose_namespace_it_is() {
        let own = |namespaces| {
            let spec = Spec::from_json(json!({"linux": {"namespaces": namespaces}}));
            spec.has_own_namespace("network")
        };
        assert!(own(json!([{"type": "pid"}, {"type": "network"}])));
        assert!(!own(json!([{"type": "network", "path": "/run/netns/x"}])));
        assert!(!own(json!([{"type": "pid"}])));
    }

    #[test]
    fn paths_of_cgroups() {
        for (named, path) in [
            ("/libpod_parent/libpod-1", Some("/libpod_parent/libpod-1")),
            (
                "machine.slice:libpod:1",
                Some("/machine.slice/libpod-1.scope"),
            ),
            (
                "user-1000.slice:docker:1",
                Some("/user.slice/user-1000.slice/docker-1.scope"),
            ),
            ("-.slice:docker:1", Some("/docker-1.scope")),
            (":runc:1", Some("/system.slice/runc-1.scope")),
            ("below/this", None),
            ("a.slice:b:c:d", None),
            ("", None),
        ] {
            let s = spec(json!({"linux": {"cgroupsPath": named}}));
            assert_eq!(s.cgroup_path().as_deref(), path, "{named}");
        }
        assert_eq!(spec(json!({})).cgroup_path(), None);
    }

    #[test]
    fn nodes_among_devices() {
        let s = spec(json!({"linux": {"devices": [
            {"path": "/dev/nvidia0", "type": "c", "major": 195, "minor": 0, "fileMode": 8630, "uid": 0, "gid": 44},
            {"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229},
            {"path": "/dev/kfd", "type": "b", "major": 7, "minor": 0},
            {"path": "/dev/nvidia-uvm"},
            "nonsense",
            {"path": "/dev/dri/renderD128", "type": "c", "major": 226, "minor": 128}
        ], "resources": {"devices": [
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "major": 195, "minor": 0, "access": "rwm"}
        ]}}}));
        let nodes = s.gpu_nodes(&Host::at("/nowhere"));
        let short: Vec<_> = nodes
            .iter()
            .map(|n| (n.path.as_str(), n.vendor, n.role, n.allowed))
            .collect();
        assert_eq!(
            short,
            [
                ("/dev/nvidia0", Vendor::Nvidia, NodeRole::Gpu, true),
                ("/dev/dri/renderD128", Vendor::Amd, NodeRole::Render, false),
            ]
        );
        assert_eq!((nodes[0].file_mode, nodes[0].gid), (Some(438), Some(44)));
    }

    #[test]
    fn rules_are_read_in_order() {
        let rules = |r: Value| spec(json!({"linux": {"resources": {"devices": r}}}));
        assert!(spec(json!({})).allows(195, 0));
        assert!(!rules(json!([{"allow": false, "access": "rwm"}])).allows(195, 0));
        assert!(rules(json!([{"allow": false, "access": "rwm"}, {"allow": true, "type": "c", "major": 195, "access": "rw"}])).allows(195, 7));
        assert!(
            !rules(
                json!([{"allow": false}, {"allow": true, "type": "c", "major": 195, "access": "r"}])
            )
            .allows(195, 7)
        );
        assert!(!rules(json!([{"allow": true, "major": 195, "minor": 1}, {"allow": false, "major": -1, "type": "a"}])).allows(195, 1));
        assert!(
            !rules(json!([{"allow": false}, {"allow": true, "type": "b", "major": 195}]))
                .allows(195, 7)
        );
    }

    #[test]
    fn bind_mounted_nodes_and_directories() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("skipped: mknod needs root");
            return;
        }
        use nix::sys::stat::{Mode, SFlag, makedev, mknod};
        let dir = tempfile::tempdir().unwrap();
        for d in ["dev/dri", "srv"] {
            std::fs::create_dir_all(dir.path().join(d)).unwrap();
        }
        for (p, major, minor) in [
            ("dev/nvidiactl", 195, 255),
            ("dev/dri/renderD129", 226, 129),
            ("dev/kfd", 242, 0),
        ] {
            mknod(
                &dir.path().join(p),
                SFlag::S_IFCHR,
                Mode::S_IRUSR,
                makedev(major, minor),
            )
            .unwrap();
        }
        std::fs::write(dir.path().join("dev/nvidia0"), "a regular file").unwrap();
        let s = spec(json!({"mounts": [
            {"destination": "/dev/nvidiactl", "type": "bind", "source": "/dev/nvidiactl", "options": ["ro"]},
            {"destination": "/dev/nvidia0", "type": "bind", "source": "/dev/nvidia0"},
            {"destination": "/gpu/ctl", "source": "/dev/kfd", "options": ["rbind"]},
            {"destination": "/dev/dri", "source": "/dev/dri", "options": ["rbind"]},
            {"destination": "/srv", "source": "/srv", "options": ["rbind"]},
            {"destination": "/proc", "type": "proc", "source": "proc"}
        ]}));
        let nodes = s.gpu_nodes(&Host::at(dir.path()));
        let short: Vec<_> = nodes
            .iter()
            .map(|n| (n.path.as_str(), n.host_path.as_deref(), n.major, n.minor))
            .collect();
        assert_eq!(
            short,
            [
                ("/dev/nvidiactl", Some("/dev/nvidiactl"), 195, 255),
                ("/gpu/ctl", Some("/dev/kfd"), 242, 0),
                ("/dev/dri/renderD129", Some("/dev/dri/renderD129"), 226, 129),
            ]
        );
    }

    #[test]
    fn bad_specs_name_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let error = || Spec::of_bundle(dir.path()).unwrap_err().to_string();
        assert!(error().contains("config.json: cannot read"));
        std::fs::write(dir.path().join("config.json"), "{").unwrap();
        assert!(error().contains("config.json: not an OCI runtime spec: EOF"));
        std::fs::write(dir.path().join("config.json"), "[]").unwrap();
        assert!(error().contains("not a JSON object"));
    }
}
