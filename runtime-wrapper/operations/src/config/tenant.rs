//! Tells whose container the engine makes, for `restore.allow`.
//!
//! Only what the container's author cannot set counts:
//!
//! - the user outside of all user namespaces as whom the runtime runs: that of a rootless engine;
//! - containerd's namespace: its shim keeps the runtime's state in `ROOT/NAMESPACE` and the bundle in
//!   `.../NAMESPACE/ID`;
//! - a pod's namespace. containerd's CRI sets its annotations last, over those that a pod may pass on
//!   (`DefaultCRIAnnotations`). CRI-O adds the kubelet's labels last, and `io.container.manager`, which podman always
//!   overwrites. Pods and images bring annotations, too (CRI-O), so one counts only where containerd's namespace or
//!   CRI-O's name shows that a CRI wrote it.
//!
//! Whatever looks like a pod is not root's own.

use std::fmt;
use std::path::Path;

use cryopod_host::files::Host;
use cryopod_host::processes::id_map::IdMap;
use cryopod_host::spec::Spec;

/// containerd's namespaces of root's own engines: of `ctr` and nerdctl, and of docker.
const OWN: [&str; 2] = ["default", "moby"];
/// containerd's namespace of its CRI.
const CRI: &str = "k8s.io";
/// Set by containerd's CRI.
const CRI_NAMESPACE: &str = "io.kubernetes.cri.sandbox-namespace";
const CRI_TYPE: &str = "io.kubernetes.cri.container-type";
/// Set by the kubelet as a label, which CRI-O makes an annotation.
const POD_NAMESPACE: &str = "io.kubernetes.pod.namespace";
const MANAGER: &str = "io.container.manager";
const CRIO: &str = "cri-o";

/// The annotations by which containerd and CRI-O tell what a container of a pod is.
const HOLDS_POD: [&str; 2] = [CRI_TYPE, "io.kubernetes.cri-o.ContainerType"];

/// Returns true for the container that only holds a pod's namespaces. The pod's annotations are not for it.
pub fn holds_pod(spec: &Spec) -> bool {
    let mut kinds = HOLDS_POD.iter().map(|key| spec.annotation(key));
    kinds.any(|kind| kind == Some("sandbox"))
}

/// Whose container the engine makes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tenant {
    /// Root's engine without containerd: podman, or the runtime's own command line.
    Root,
    /// A user's own engine.
    User(u32),
    /// A namespace of root's containerd.
    Containerd(String),
    /// A pod, with its Kubernetes namespace if that can be believed.
    Pod(Option<String>),
}

impl Tenant {
    /// Whose container a command line makes; `root` is the runtime's directory of states.
    pub fn of(id: &str, bundle: &Path, root: Option<&Path>, spec: &Spec) -> Self {
        Self::from(Self::user(), containerd(id, bundle, root), spec)
    }

    /// The user outside of all user namespaces as whom this process runs; `None`: not known.
    pub fn user() -> Option<u32> {
        let map = IdMap::read(&Host::system(), "/proc/self/uid_map");
        u32::try_from(map.outside(nix::unistd::geteuid().as_raw().into())?).ok()
    }

    fn from(uid: Option<u32>, containerd: Option<&str>, spec: &Spec) -> Self {
        let named = |key| spec.annotation(key).filter(|n| !n.is_empty());
        let namespace = |key| named(key).map(str::to_owned);
        let is_pod = [CRI_NAMESPACE, CRI_TYPE, POD_NAMESPACE];
        match containerd {
            // A user that is not known is nobody.
            _ if uid != Some(0) => uid.map_or(Self::Pod(None), Self::User),
            Some(CRI) => Self::Pod(namespace(CRI_NAMESPACE)),
            None if spec.annotation(MANAGER) == Some(CRIO) => Self::Pod(namespace(POD_NAMESPACE)),
            _ if is_pod.iter().any(|key| named(key).is_some()) => Self::Pod(None),
            Some(name) => Self::Containerd(name.to_owned()),
            None => Self::Root,
        }
    }

    /// Returns true for root's own engines: podman, docker, `ctr` and nerdctl in their usual namespaces.
    pub fn is_root(&self) -> bool {
        match self {
            Self::Root => true,
            Self::Containerd(name) => OWN.contains(&name.as_str()),
            Self::User(_) | Self::Pod(_) => false,
        }
    }
}

/// The key of `restore.allow` that admits this tenant, with its value.
impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            tenant if tenant.is_root() => f.write_str("users = [0]"),
            Self::User(uid) => write!(f, "users = [{uid}]"),
            Self::Containerd(name) => write!(f, "containerd = [{name:?}]"),
            Self::Pod(Some(name)) => write!(f, "kubernetes = [{name:?}]"),
            Self::Root | Self::Pod(None) => f.write_str("kubernetes = [\"NAMESPACE\"]"),
        }
    }
}

/// Returns containerd's namespace, if its shim wrote this command line.
fn containerd<'a>(id: &str, bundle: &'a Path, root: Option<&Path>) -> Option<&'a str> {
    let of_bundle = bundle.parent()?.file_name()?;
    let same = bundle.file_name()? == id && root?.file_name()? == of_bundle;
    of_bundle.to_str().filter(|_| same)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn containerd_namespaces() {
        let of = |bundle: &'static str, root: Option<&str>| {
            containerd("c1", Path::new(bundle), root.map(Path::new))
        };
        let task = "/run/containerd/io.containerd.runtime.v2.task/a/c1";
        assert_eq!(of(task, Some("/run/containerd/runc/a")), Some("a"));
        for (bundle, root) in [
            (task, None),
            (task, Some("/run/runc")),
            ("/run/x/a/c2", Some("/run/containerd/runc/a")),
            (
                "/var/lib/containers/storage/overlay-containers/c1/userdata",
                Some("/run/crun"),
            ),
            (".", Some("/run/containerd/runc/a")),
            ("/", Some("/")),
        ] {
            assert_eq!(of(bundle, root), None, "{bundle} {root:?}");
        }
    }

    #[test]
    fn annotations_count_where_only_a_cri_can_write_them() {
        let cri = json!({CRI_NAMESPACE: "a"});
        let crio = json!({MANAGER: CRIO, POD_NAMESPACE: "a", CRI_NAMESPACE: "b"});
        let podman = json!({MANAGER: "libpod"});
        let forged = json!({MANAGER: "libpod", CRI_NAMESPACE: "a", POD_NAMESPACE: "a"});
        let pod = |name: &str| Tenant::Pod(Some(name.into()));
        let containerd = |name: &str| Tenant::Containerd(name.into());
        for (uid, namespace, annotations, want) in [
            (Some(0), None, &podman, Tenant::Root),
            (Some(0), None, &json!({}), Tenant::Root),
            (Some(0), Some("moby"), &json!({}), containerd("moby")),
            (Some(0), Some("k8s.io"), &cri, pod("a")),
            (Some(0), Some("k8s.io"), &json!({}), Tenant::Pod(None)),
            (Some(0), Some("k8s.io"), &crio, pod("b")),
            (Some(0), None, &crio, pod("a")),
            (Some(0), None, &json!({MANAGER: CRIO}), Tenant::Pod(None)),
            (Some(0), None, &forged, Tenant::Pod(None)),
            (Some(0), None, &cri, Tenant::Pod(None)),
            (Some(0), Some("default"), &cri, Tenant::Pod(None)),
            (Some(1000), Some("k8s.io"), &cri, Tenant::User(1000)),
            (Some(1000), None, &crio, Tenant::User(1000)),
            (None, None, &podman, Tenant::Pod(None)),
        ] {
            let spec = Spec::from_json(json!({"annotations": annotations}));
            assert_eq!(
                Tenant::from(uid, namespace, &spec),
                want,
                "{uid:?} {namespace:?} {annotations}"
            );
        }
    }
}
