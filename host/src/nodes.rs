//! Classifies device paths by the vendors' naming.
//!
//! NVIDIA's names are those of its driver's `nvidia-modprobe`; AMD's come from the amdkfd and DRM drivers. Render nodes
//! belong to every DRM driver, so the host's files tell their vendor.

use serde::{Deserialize, Serialize};

use crate::files::Host;

pub const DRM_MAJOR: u64 = 226;
/// The fixed character major of `/dev/nvidiaN` and `/dev/nvidiactl`.
pub const NVIDIA_MAJOR: u64 = 195;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Vendor {
    /// `/dev/nvidia*`.
    Nvidia,
    /// `/dev/kfd` and render nodes.
    Amd,
}

impl std::fmt::Display for Vendor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Nvidia => "NVIDIA",
            Self::Amd => "AMD",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeRole {
    /// One GPU: `/dev/nvidiaN`.
    Gpu,
    /// The driver's control node: `/dev/nvidiactl`, `/dev/kfd`.
    Control,
    /// Unified memory: `/dev/nvidia-uvm`, `/dev/nvidia-uvm-tools`.
    Uvm,
    /// A capability: `/dev/nvidia-caps/*`, `/dev/nvidia-caps-imex-channels/*`.
    Capability,
    /// A DRM render node: `/dev/dri/renderD*`.
    Render,
    /// Mode setting and everything else of the vendor: `/dev/nvidia-modeset`, `/dev/dri/card*`.
    Other,
}

/// How a device node came into the container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NodeSource {
    /// `linux.devices` of the spec.
    Device,
    /// A bind mount of the node, or of a directory that holds it.
    BindMount,
    /// Found in the live container only: neither the devices nor the mounts of the spec name it.
    Live,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceNode {
    /// Path inside the container.
    pub path: String,
    pub vendor: Vendor,
    pub role: NodeRole,
    pub source: NodeSource,
    /// Device major, as the container saw it.
    pub major: u64,
    pub minor: u64,
    /// For a bind mount: its source on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// Permission bits, where the spec gives them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// True if a cgroup rule of the spec lets the container open it.
    #[serde(default)]
    pub allowed: bool,
    /// The id of the GPU behind the node, where known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<String>,
}

impl DeviceNode {
    /// A device of the container's spec that the container may open, with nothing else known.
    pub fn new(
        path: impl Into<String>,
        (vendor, role): (Vendor, NodeRole),
        (major, minor): (u64, u64),
    ) -> Self {
        Self {
            path: path.into(),
            vendor,
            role,
            source: NodeSource::Device,
            major,
            minor,
            host_path: None,
            file_mode: None,
            uid: None,
            gid: None,
            allowed: true,
            gpu: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    Known(Vendor, NodeRole),
    /// A DRM node: its vendor depends on the device behind it.
    Drm(NodeRole),
}

/// Classifies a path; `None` if it is no GPU node.
pub fn classify(path: &str) -> Option<Class> {
    use Class::{Drm, Known};
    let name = path.strip_prefix("/dev/")?;
    let digits = |s: &str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_digit());
    if let Some(rest) = name.strip_prefix("nvidia") {
        let role = match rest {
            n if digits(n) => NodeRole::Gpu,
            "ctl" => NodeRole::Control,
            "-uvm" | "-uvm-tools" => NodeRole::Uvm,
            "-modeset" => NodeRole::Other,
            r => {
                let plain = |s: &str| s.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
                let below = |directory: &str| {
                    r.strip_prefix(directory)
                        .is_some_and(|n| plain(n) && !n.is_empty())
                };
                let named = |start: &str| r.starts_with(start) && plain(r);
                if below("-caps/") || below("-caps-imex-channels/") {
                    NodeRole::Capability
                } else if named("-nvswitch") || named("-nvlink") || named("-vgpu") {
                    NodeRole::Other
                } else {
                    return None;
                }
            }
        };
        return Some(Known(Vendor::Nvidia, role));
    }
    if name == "kfd" {
        return Some(Known(Vendor::Amd, NodeRole::Control));
    }
    let dri = name.strip_prefix("dri/")?;
    if dri.strip_prefix("renderD").is_some_and(digits) {
        return Some(Drm(NodeRole::Render));
    }
    dri.strip_prefix("card")
        .is_some_and(digits)
        .then_some(Drm(NodeRole::Other))
}

/// Returns true if both names are of one kind of node: the same name, or two GPUs' nodes of one vendor that differ in
/// their number. `/dev/nvidia-modeset` and `/dev/nvidia-nvswitchctl` have a role in common and are two kinds.
pub fn same_kind(a: &str, b: &str) -> bool {
    let (Some(of_a), Some(of_b)) = (classify(a), classify(b)) else {
        return false;
    };
    let numbered = matches!(
        of_a,
        Class::Known(_, NodeRole::Gpu) | Class::Drm(NodeRole::Render)
    );
    of_a == of_b && (numbered || a == b)
}

/// The names under which the kernel lists the driver of the node at `path` in `/proc/devices`, and the major that is
/// the driver's on every host, if there is one.
fn drivers(path: &str) -> (&'static [&'static str], Option<u64>) {
    // The first beginning that fits.
    const DRIVERS: [(&str, &[&str], Option<u64>); 9] = [
        ("kfd", &["kfd"], None),
        ("dri/", &["drm"], Some(DRM_MAJOR)),
        ("nvidia-uvm", &["nvidia-uvm"], None),
        ("nvidia-caps-imex", &["nvidia-caps-imex-channels"], None),
        ("nvidia-caps", &["nvidia-caps"], None),
        ("nvidia-nvswitch", &["nvidia-nvswitch"], None),
        ("nvidia-nvlink", &["nvidia-nvlink"], None),
        ("nvidia-vgpu", &["nvidia-vgpu", "nvidia-vgpu-vfio"], None),
        (
            "",
            &["nvidia", "nvidiactl", "nvidia-frontend", "nvidia-modeset"],
            Some(NVIDIA_MAJOR),
        ),
    ];
    let name = path.strip_prefix("/dev/");
    let fits = |name: &str| DRIVERS.iter().find(|(start, ..)| name.starts_with(start));
    name.and_then(fits)
        .map_or((&[], None), |(_, names, major)| (*names, *major))
}

/// Checks in this host's `/proc/devices` that `major` belongs to the driver of the node `path`.
pub fn registered(host: &Host, path: &str, major: u64) -> Result<(), (String, String)> {
    let (names, fixed) = drivers(path);
    let text = host.text("/proc/devices").unwrap_or_default();
    let listed: Vec<(u64, &str)> = text
        .lines()
        .take_while(|line| !line.starts_with("Block"))
        .filter_map(|line| {
            let (number, name) = line.trim().split_once(' ')?;
            Some((number.parse().ok()?, name.trim()))
        })
        .collect();
    if fixed == Some(major)
        || listed
            .iter()
            .any(|(n, name)| *n == major && names.contains(name))
    {
        return Ok(());
    }
    let known = listed.iter().any(|(_, name)| names.contains(name));
    let whose = listed.iter().find(|(n, _)| *n == major);
    let driver = names.first().unwrap_or(&"GPU");
    Err(match (known || fixed.is_some(), whose) {
        (true, Some((_, other))) => (
            format!("its device major {major} is that of the driver {other}, not of {driver}"),
            format!("make the node anew; /proc/devices lists the majors of {driver}"),
        ),
        (true, None) => (
            format!("its device major {major} is not that of the driver {driver}"),
            format!("make the node anew; /proc/devices lists the majors of {driver}"),
        ),
        (false, _) => (
            format!(
                "the driver {driver} is not loaded: /proc/devices of this host does not list it"
            ),
            format!("load the driver {driver}, which registers the major of its nodes"),
        ),
    })
}

/// Returns vendor and role of the node at `path` with this device number.
///
/// A DRM node whose device the host does not describe counts as AMD's if it is a render node. Only AMD's compute stack
/// needs one, and an extra node in the record does no harm.
pub fn identify(host: &Host, path: &str, major: u64, minor: u64) -> Option<(Vendor, NodeRole)> {
    match classify(path)? {
        Class::Known(vendor, role) => Some((vendor, role)),
        Class::Drm(role) => {
            let id = host.line(format!("/sys/dev/char/{major}:{minor}/device/vendor"));
            match id.as_deref() {
                Some("0x1002") => Some((Vendor::Amd, role)),
                Some("0x10de") => Some((Vendor::Nvidia, role)),
                Some(_) => None,
                None => (role == NodeRole::Render).then_some((Vendor::Amd, role)),
            }
        }
    }
}

/// The minor of the NVIDIA GPU behind a node: under NVIDIA's major the node's own; for other nodes (simulated ones) the
/// number in its name.
pub fn nvidia_minor(node: &DeviceNode) -> Option<u64> {
    ((node.vendor, node.role) == (Vendor::Nvidia, NodeRole::Gpu))
        .then(|| number(node))
        .flatten()
}

/// The number of the GPU behind a node of NVIDIA's `nvidiaN` or of DRM's `renderDN` and `cardN`: the minor under the
/// driver's own major, else the number in the name. `None` for nodes of another kind.
pub fn number(node: &DeviceNode) -> Option<u64> {
    let (major, prefix) = match (node.vendor, node.role) {
        (Vendor::Nvidia, NodeRole::Gpu) => (NVIDIA_MAJOR, "nvidia"),
        (_, NodeRole::Render) => (DRM_MAJOR, "renderD"),
        _ => return None,
    };
    if node.major == major {
        return Some(node.minor);
    }
    let path = node.host_path.as_ref().unwrap_or(&node.path);
    path.rsplit('/').next()?.strip_prefix(prefix)?.parse().ok()
}

/// The native name of a GPU's node, `/dev/nvidia1` or `/dev/dri/renderD130`.
pub fn native(vendor: Vendor, number: u64) -> String {
    match vendor {
        Vendor::Nvidia => format!("/dev/nvidia{number}"),
        Vendor::Amd => format!("/dev/dri/renderD{number}"),
    }
}

/// The GPUs' nodes of a vendor on this host, by number: `/dev/nvidiaN`, or AMD's `/dev/dri/renderDN`.
pub fn of_host(host: &Host, vendor: Vendor) -> Vec<DeviceNode> {
    let (directory, role) = match vendor {
        Vendor::Nvidia => ("/dev", NodeRole::Gpu),
        Vendor::Amd => ("/dev/dri", NodeRole::Render),
    };
    let mut found: Vec<DeviceNode> = host
        .names(directory)
        .iter()
        .filter_map(|name| {
            let path = format!("{directory}/{name}");
            // Names first: most of /dev belongs to no GPU, and only the rest is examined.
            classify(&path)?;
            let number = host.char_device(&path)?;
            let identified = identify(host, &path, number.0, number.1)?;
            (identified == (vendor, role)).then(|| DeviceNode::new(path, identified, number))
        })
        .collect();
    found.sort_by_key(number);
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;

    #[test]
    fn names() {
        use Class::{Drm, Known};
        use NodeRole::*;
        for (path, want) in [
            ("/dev/nvidia0", Some(Known(Vendor::Nvidia, Gpu))),
            ("/dev/nvidia15", Some(Known(Vendor::Nvidia, Gpu))),
            ("/dev/nvidiactl", Some(Known(Vendor::Nvidia, Control))),
            ("/dev/nvidia-uvm", Some(Known(Vendor::Nvidia, Uvm))),
            ("/dev/nvidia-uvm-tools", Some(Known(Vendor::Nvidia, Uvm))),
            (
                "/dev/nvidia-caps/nvidia-cap1",
                Some(Known(Vendor::Nvidia, Capability)),
            ),
            ("/dev/nvidia-modeset", Some(Known(Vendor::Nvidia, Other))),
            ("/dev/kfd", Some(Known(Vendor::Amd, Control))),
            ("/dev/dri/renderD128", Some(Drm(Render))),
            ("/dev/dri/card0", Some(Drm(Other))),
            ("/dev/dri/renderD", None),
            ("/dev/nvidia", None),
            ("/dev/nvidia0x", None),
            ("/dev/null", None),
            ("/home/nvidia0", None),
            ("/dev/nvidia-caps/../sg0", None),
            ("/dev/nvidia-caps/", None),
            ("/dev/nvidia-vgpu/../mem", None),
            (
                "/dev/nvidia-nvswitchctl",
                Some(Known(Vendor::Nvidia, Other)),
            ),
            ("/dev/kfd2", None),
        ] {
            assert_eq!(classify(path), want, "{path}");
        }
    }

    #[test]
    fn kinds_of_nodes() {
        for (a, b, same) in [
            ("/dev/nvidia0", "/dev/nvidia7", true),
            ("/dev/dri/renderD128", "/dev/dri/renderD130", true),
            ("/dev/nvidiactl", "/dev/nvidiactl", true),
            ("/dev/nvidiactl", "/dev/nvidia0", false),
            ("/dev/nvidia-modeset", "/dev/nvidia-nvswitchctl", false),
            (
                "/dev/nvidia-caps/nvidia-cap1",
                "/dev/nvidia-caps/nvidia-cap2",
                false,
            ),
            ("/dev/dri/card0", "/dev/dri/card1", false),
            ("/dev/sg0", "/dev/sg0", false),
        ] {
            assert_eq!(same_kind(a, b), same, "{a} {b}");
        }
    }

    #[test]
    fn majors_are_those_that_the_kernel_lists() {
        let dir = tempfile::tempdir().unwrap();
        let host = Host::at(dir.path());
        let told = |path: &str, major| registered(&host, path, major).map_err(|(what, _)| what);
        assert!(told("/dev/nvidia0", 195).is_ok() && told("/dev/dri/renderD128", 226).is_ok());
        assert!(
            told("/dev/nvidia-uvm", 511)
                .unwrap_err()
                .contains("nvidia-uvm is not loaded")
        );
        let list = "Character devices:\n  1 mem\n 21 sg\n195 nvidiactl\n511 nvidia-uvm\n\nBlock devices:\n  7 nvidia-uvm\n";
        dir.put("proc/devices", list);
        assert!(told("/dev/nvidia-uvm", 511).is_ok());
        assert!(told("/dev/nvidia-uvm", 7).is_err(), "a block device's");
        assert!(
            told("/dev/nvidia-uvm", 21)
                .unwrap_err()
                .contains("21 is that of the driver sg")
        );
        assert!(
            told("/dev/nvidiactl", 1)
                .unwrap_err()
                .contains("that of the driver mem")
        );
        assert!(
            told("/dev/kfd", 510)
                .unwrap_err()
                .contains("kfd is not loaded")
        );
    }

    #[test]
    fn drm_nodes_belong_to_the_device_behind_them() {
        let dir = tempfile::tempdir().unwrap();
        for (minor, id) in [(128, "0x1002"), (129, "0x10de"), (130, "0x8086")] {
            let d = dir.path().join(format!("sys/dev/char/226:{minor}/device"));
            d.put("vendor", format!("{id}\n"));
        }
        let host = Host::at(dir.path());
        let id = |minor| identify(&host, &format!("/dev/dri/renderD{minor}"), 226, minor);
        assert_eq!(id(128), Some((Vendor::Amd, NodeRole::Render)));
        assert_eq!(id(129), Some((Vendor::Nvidia, NodeRole::Render)));
        assert_eq!(id(130), None);
        assert_eq!(id(131), Some((Vendor::Amd, NodeRole::Render)));
        assert_eq!(identify(&host, "/dev/dri/card9", 226, 9), None);
    }
}
