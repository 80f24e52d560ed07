//! What a device path is, by the vendors' naming.
//!
//! NVIDIA's names are those of its driver's `nvidia-modprobe`; AMD's come from the amdkfd and DRM drivers.
//! Render nodes belong to every DRM driver, so their vendor is asked of the host.

use cryopod_archive::seal::{DeviceNode, NodeRole, NodeSource, Vendor};

use crate::host::Host;

/// DRM's fixed character major.
pub const DRM_MAJOR: u64 = 226;
/// The fixed character major of `/dev/nvidiaN` and `/dev/nvidiactl`.
pub const NVIDIA_MAJOR: u64 = 195;

/// A device path's meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Certainly this vendor's, in this role.
    Known(Vendor, NodeRole),
    /// A DRM node: whose it is depends on the device behind it.
    Drm(NodeRole),
}

/// What the path names; `None` if it is no GPU node.
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
            r if r.starts_with("-caps/") || r.starts_with("-caps-imex-channels/") => {
                NodeRole::Capability
            }
            r if r.starts_with("-nvswitch")
                || r.starts_with("-nvlink")
                || r.starts_with("-vgpu") =>
            {
                NodeRole::Other
            }
            _ => return None,
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

/// Vendor and role of the node at `path` with this device number.
///
/// A DRM node whose device the host does not describe counts as AMD's if it is a render node: only AMD's
/// compute stack needs one, and a node too many in the record does no harm.
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

/// The minor of the NVIDIA GPU behind a node: the node's own under NVIDIA's major; of a node that is none of the driver's
/// (a simulated one), the number in its name.
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
    let (folder, role) = match vendor {
        Vendor::Nvidia => ("/dev", NodeRole::Gpu),
        Vendor::Amd => ("/dev/dri", NodeRole::Render),
    };
    let mut found: Vec<DeviceNode> = host
        .names(folder)
        .iter()
        .filter_map(|name| {
            let path = format!("{folder}/{name}");
            // Names first: most of /dev is none of a GPU's, and what is left is looked at.
            classify(&path)?;
            let (major, minor) = host.char_device(&path)?;
            let identified = identify(host, &path, major, minor)?;
            (identified == (vendor, role)).then_some(DeviceNode {
                path,
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
            })
        })
        .collect();
    found.sort_by_key(number);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

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
            ("/dev/kfd2", None),
        ] {
            assert_eq!(classify(path), want, "{path}");
        }
    }

    #[test]
    fn drm_nodes_belong_to_the_device_behind_them() {
        let dir = tempfile::tempdir().unwrap();
        for (minor, id) in [(128, "0x1002"), (129, "0x10de"), (130, "0x8086")] {
            let d = dir.path().join(format!("sys/dev/char/226:{minor}/device"));
            std::fs::create_dir_all(&d).unwrap();
            std::fs::write(d.join("vendor"), format!("{id}\n")).unwrap();
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
