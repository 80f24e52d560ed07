//! A container that is created from a checkpoint, between Create and Start.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, umount2};
use serde_json::Value;

use crate::holder::{self, Holder};
use crate::images;

/// Our folder in a bundle, for the network namespace.
const FOLDER: &str = "cryopod";
/// What CRIU names the folder in which it mounts cgroups.
const CGROUP_YARD: &str = ".criu.cgyard";
/// What containerd names the folders into which it unpacks a checkpoint. It never removes them.
const UNPACKED: &str = "ctrd-checkpoint";

/// What there is of it before it runs.
#[derive(Debug)]
pub struct Restoring {
    /// As containerd named them.
    images: PathBuf,
    bundle: PathBuf,
    holder: Option<Holder>,
    done: bool,
}

/// Why a restore cannot be prepared.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The bundle's spec.
    #[error("{path}: {reason}")]
    Spec {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// The images, or the namespace.
    #[error("the checkpoint {images} cannot be prepared for a restore into a network: {source}")]
    Prepare {
        /// The checkpoint.
        images: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl Restoring {
    /// Prepares a restore. With `network`, the engine connects networks before Start: the container's own namespace,
    /// if it is to have one, is made now.
    ///
    /// # Errors
    /// [`RestoreError`]; nothing is left of it.
    pub fn new(bundle: &Path, images: &Path, network: bool) -> Result<Self, RestoreError> {
        let mut restoring = Self {
            images: images.to_owned(),
            bundle: bundle.to_owned(),
            holder: None,
            done: false,
        };
        if network
            && unpacked(images)
            && let Some(spec) = own_network(bundle)?
        {
            restoring.join(spec)?;
        }
        Ok(restoring)
    }

    fn join(&mut self, mut spec: Value) -> Result<(), RestoreError> {
        let failed = |images: &Path| {
            let images = images.to_owned();
            move |source| RestoreError::Prepare { images, source }
        };
        let folder = self.folder();
        if !images::set_outer_network(&self.images).map_err(failed(&self.images))? {
            return Ok(());
        }
        fs::create_dir_all(&folder).map_err(failed(&self.images))?;
        self.holder = Some(Holder::start(&folder).map_err(failed(&self.images))?);
        let place = holder::place(&folder);
        for namespace in network_namespaces(&mut spec) {
            namespace["path"] = place.to_string_lossy().into();
        }
        let path = self.bundle.join("config.json");
        let partial = self.bundle.join(".config.json.cryopod");
        fs::write(&partial, spec.to_string())
            .and_then(|()| fs::set_permissions(&partial, fs::metadata(&path)?.permissions()))
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(failed(&self.images))
    }

    fn folder(&self) -> PathBuf {
        self.bundle.join(FOLDER)
    }

    /// A process that has the container's network namespace; `None`: Create answers no pid.
    pub fn pid(&self) -> Option<u32> {
        self.holder.as_ref().map(Holder::pid)
    }

    /// The container runs.
    pub fn succeeded(mut self) {
        // The mounted namespace is the container's now.
        self.done = true;
    }
}

impl Drop for Restoring {
    fn drop(&mut self) {
        self.holder = None;
        if !self.done {
            remove(&self.bundle);
        }
        if unpacked(&self.images) {
            let _ = fs::remove_dir_all(&self.images);
        }
    }
}

/// Is this containerd's own copy, made for one restore?
fn unpacked(images: &Path) -> bool {
    let name = images.file_name().unwrap_or_default();
    name.to_string_lossy().starts_with(UNPACKED)
}

/// Removes what a restore has left in a bundle: when the container is deleted, or after our process died.
pub fn remove(bundle: &Path) {
    let folder = bundle.join(FOLDER);
    if folder.exists() {
        holder::release(&folder);
        let _ = fs::remove_dir_all(folder);
    }
    // A CRIU that was killed leaves the cgroups that it mounts in its work folder, which then cannot be removed.
    let Ok(work) = bundle.join("work").canonicalize() else {
        return;
    };
    let yard = |name: &OsStr| name.to_string_lossy().starts_with(CGROUP_YARD);
    let entries = fs::read_dir(&work).into_iter().flatten().flatten();
    for entry in entries.filter(|e| yard(&e.file_name())) {
        unmount_below(&entry.path());
        let _ = fs::remove_dir(entry.path());
    }
}

/// Unmounts a folder and all that is mounted in it, the last first.
pub fn unmount_below(folder: &Path) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = mounts.lines().rev().filter_map(|l| l.split(' ').nth(4));
    for mount in mounts.map(Path::new).filter(|m| m.starts_with(folder)) {
        let _ = umount2(mount, MntFlags::MNT_DETACH);
    }
}

/// The bundle's spec, if the container is to have a network namespace of its own that the runtime would make.
fn own_network(bundle: &Path) -> Result<Option<Value>, RestoreError> {
    let path = bundle.join("config.json");
    let wrong = |reason: String| RestoreError::Spec {
        path: path.clone(),
        reason,
    };
    let bytes = fs::read(&path).map_err(|e| wrong(e.to_string()))?;
    let mut spec: Value = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
    let own = network_namespaces(&mut spec)
        .next()
        .is_some_and(|n| n.get("path").is_none_or(|p| p.as_str() == Some("")));
    Ok(own.then_some(spec))
}

fn network_namespaces(spec: &mut Value) -> impl Iterator<Item = &mut Value> {
    let all = spec
        .pointer_mut("/linux/namespaces")
        .and_then(Value::as_array_mut);
    all.into_iter()
        .flatten()
        .filter(|n| n.get("type").is_some_and(|t| t == "network"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn whose_network_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let own = |namespaces: Value| {
            let spec = json!({"linux": {"namespaces": namespaces}});
            fs::write(dir.path().join("config.json"), spec.to_string()).unwrap();
            own_network(dir.path()).unwrap().is_some()
        };
        assert!(own(json!([{"type": "pid"}, {"type": "network"}])));
        assert!(own(json!([{"type": "network", "path": ""}])));
        assert!(!own(json!([{"type": "network", "path": "/run/netns/x"}])));
        assert!(!own(json!([{"type": "pid"}])));
        fs::write(dir.path().join("config.json"), "{").unwrap();
        let e = own_network(dir.path()).unwrap_err().to_string();
        assert!(e.contains("config.json"), "{e}");
    }

    #[test]
    fn without_networks_nothing_is_prepared() {
        let dir = tempfile::tempdir().unwrap();
        let unpacked = dir.path().join("ctrd-checkpoint1");
        fs::create_dir(&unpacked).unwrap();
        let restoring = Restoring::new(dir.path(), &unpacked, false).unwrap();
        assert_eq!(restoring.pid(), None);
        restoring.succeeded();
        assert!(!unpacked.exists());
        let kept = dir.path().join("images");
        fs::create_dir(&kept).unwrap();
        Restoring::new(dir.path(), &kept, false)
            .unwrap()
            .succeeded();
        drop(Restoring::new(dir.path(), &kept, false).unwrap());
        assert!(kept.exists());
    }
}
