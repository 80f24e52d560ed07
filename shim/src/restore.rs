//! Prepares a container that is created from a checkpoint, between Create and Start.

pub mod holder;
pub mod images;

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use cryopod_host::containerd::is_image_directory;
use cryopod_host::mountinfo::unmount_below;
use cryopod_host::spec::{Spec, SpecError};
use holder::NamespaceHolder;

use crate::peer::PeerProcess;
use crate::threads;

/// Our directory in a bundle, for the network namespace.
const DIRECTORY: &str = "cryopod";
/// The directory in which CRIU mounts cgroups.
const CGROUP_YARD: &str = ".criu.cgyard";
/// The mode of a directory from `os.MkdirTemp`.
const PRIVATE: u32 = 0o700;
/// Attempts to remove a directory into which somebody may still write.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(200);
/// Time limit of the work on images when the shim ends: longer than an abandoned checkpoint waits for its CRIU.
const WORK_LIMIT: Duration = Duration::from_secs(660);
/// How much [`ImageWork`] there is.
static WORK: AtomicUsize = AtomicUsize::new(0);
/// How many checkpoints containerd packs after the end of their connection.
static PACKING: AtomicUsize = AtomicUsize::new(0);
/// Time for containerd to remove a failed checkpoint's images. A killed CRIU that still writes may keep it from that.
const REMOVAL: Duration = Duration::from_secs(60);

/// Work on images, done when this is dropped. With this process it would end: [`wait_for_image_work`].
pub struct ImageWork(());

impl ImageWork {
    pub fn begin() -> Self {
        WORK.fetch_add(1, Ordering::AcqRel);
        Self(())
    }
}

impl Drop for ImageWork {
    fn drop(&mut self) {
        WORK.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The restore that containerd's Create asks for.
#[derive(Debug, Clone, Copy)]
pub struct WantedRestore<'a> {
    pub bundle: &'a Path,
    pub images: &'a Path,
    /// The options name a directory: the checkpoint is the user's own.
    pub named: bool,
    /// The engine connects networks before Start: create the container's own network namespace now, if it has one.
    pub network: bool,
}

/// The parts of a container that exist before it runs.
#[derive(Debug)]
pub struct Restoring {
    bundle: PathBuf,
    /// The checkpoint, if it is containerd's copy for this one restore.
    copy: Option<PathBuf>,
    holder: Option<NamespaceHolder>,
    done: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error("the checkpoint {images} cannot be prepared for a restore into a network: {source}")]
    Prepare { images: PathBuf, source: io::Error },
}

impl Restoring {
    /// Prepares a restore. After an error nothing is left of it.
    pub fn new(wanted: WantedRestore) -> Result<Self, RestoreError> {
        Self::prepare(wanted, &temporary())
    }

    fn prepare(wanted: WantedRestore, temporary: &Path) -> Result<Self, RestoreError> {
        let copy = !wanted.named && unpacked(wanted.images, temporary);
        let mut restoring = Self {
            bundle: wanted.bundle.to_owned(),
            copy: copy.then(|| wanted.images.to_owned()),
            holder: None,
            done: false,
        };
        if wanted.network
            && copy
            && let Some(spec) = own_network(wanted.bundle)?
        {
            restoring.join(wanted.images, spec)?;
        }
        Ok(restoring)
    }

    fn join(&mut self, images: &Path, mut spec: Value) -> Result<(), RestoreError> {
        let failed = |source| RestoreError::Prepare {
            images: images.to_owned(),
            source,
        };
        let directory = self.directory();
        if !images::set_outer_network(images).map_err(failed)? {
            return Ok(());
        }
        fs::create_dir_all(&directory).map_err(failed)?;
        self.holder = Some(NamespaceHolder::start(&directory).map_err(failed)?);
        let place = holder::place(&directory);
        for namespace in network_namespaces(&mut spec) {
            namespace["path"] = place.to_string_lossy().into();
        }
        let path = self.bundle.join("config.json");
        let partial = self.bundle.join(".config.json.cryopod");
        fs::write(&partial, spec.to_string())
            .and_then(|()| fs::set_permissions(&partial, fs::metadata(&path)?.permissions()))
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(failed)
    }

    fn directory(&self) -> PathBuf {
        self.bundle.join(DIRECTORY)
    }

    /// The pid of a process in the container's network namespace; `None`: Create's response has no pid.
    pub fn pid(&self) -> Option<u32> {
        self.holder.as_ref().map(NamespaceHolder::pid)
    }

    /// Call this when the container runs.
    pub fn succeeded(mut self) {
        // The mounted namespace now belongs to the container.
        self.done = true;
    }
}

impl Drop for Restoring {
    fn drop(&mut self) {
        self.holder = None;
        if !self.done {
            remove(&self.bundle);
        }
        let Some(copy) = self.copy.take() else { return };
        let _work = ImageWork::begin();
        let (removed, removal) = (copy.clone(), ImageWork::begin());
        // Large images take a while to remove; neither containerd nor other containers need wait.
        let spawned = threads::spawn("images", move || {
            let _removal = removal;
            let _ = fs::remove_dir_all(removed);
        });
        if spawned.is_err() {
            let _ = fs::remove_dir_all(copy);
        }
    }
}

/// Waits until no thread works on images any more.
pub fn wait_for_image_work() {
    let mut since = Instant::now();
    while has_image_work() && since.elapsed() < WORK_LIMIT {
        // containerd takes as long as it needs.
        if PACKING.load(Ordering::Acquire) != 0 {
            since = Instant::now();
        }
        thread::sleep(PAUSE);
    }
}

/// Waits while containerd, a living process, has use for a checkpoint's images: it packs those of a success however long
/// that takes, and removes those of a failure. It closes the connection of a container that ended before it has done so.
/// Returns true if it has left them.
pub fn are_left(images: &Path, containerd: &PeerProcess, succeeded: bool) -> bool {
    let start = Instant::now();
    let _packing = succeeded.then(Packing::begin);
    loop {
        if !images.exists() {
            return false;
        }
        if containerd.ends_within(PAUSE) || !succeeded && start.elapsed() >= REMOVAL {
            // The images may have gone just before the process.
            return images.exists();
        }
    }
}

struct Packing(());

impl Packing {
    fn begin() -> Self {
        PACKING.fetch_add(1, Ordering::AcqRel);
        Self(())
    }
}

impl Drop for Packing {
    fn drop(&mut self) {
        PACKING.fetch_sub(1, Ordering::AcqRel);
    }
}

pub fn has_image_work() -> bool {
    WORK.load(Ordering::Acquire) != 0
}

/// Removes the images of a checkpoint that containerd no longer packs. A killed CRIU may still be writing into them.
pub fn discard(images: &Path) {
    if !is_containerds(images) {
        return;
    }
    for _ in 0..TRIES {
        let _ = fs::remove_dir_all(images);
        if !images.exists() {
            return;
        }
        thread::sleep(PAUSE);
    }
}

/// Returns containerd's directory for temporary files, if this process still has containerd's environment.
pub fn temporary() -> PathBuf {
    let named = |name| std::env::var_os(name).filter(|v| !v.is_empty());
    named("XDG_RUNTIME_DIR")
        .or_else(|| named("TMPDIR"))
        .map_or_else(|| "/tmp".into(), PathBuf::from)
}

/// Returns true only if this is containerd's own directory for one checkpoint, or its own copy for one restore.
pub fn is_containerds(images: &Path) -> bool {
    unpacked(images, &temporary())
}

/// Returns true only if this is containerd's own copy for one restore, which containerd never removes, or its directory
/// for one checkpoint. Nothing else may be changed and removed.
fn unpacked(images: &Path, temporary: &Path) -> bool {
    let private = |m: fs::Metadata| {
        m.is_dir() && m.mode() & 0o777 == PRIVATE && m.uid() == nix::unistd::geteuid().as_raw()
    };
    is_image_directory(images)
        && images.parent() == Some(temporary)
        && fs::symlink_metadata(images).is_ok_and(private)
}

/// Removes what a restore has left in a bundle: when the container is deleted, or after our process died.
pub fn remove(bundle: &Path) {
    let directory = bundle.join(DIRECTORY);
    if directory.exists() {
        holder::release(&directory);
        let _ = fs::remove_dir_all(directory);
    }
    // A killed CRIU leaves its cgroup mounts in its work directory, which then cannot be removed.
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

/// Returns the bundle's spec, if it asks the runtime for a new network namespace.
fn own_network(bundle: &Path) -> Result<Option<Value>, SpecError> {
    let spec = Spec::of_bundle(bundle)?;
    let own = spec.has_own_namespace("network");
    Ok(own.then(|| spec.into_json()))
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
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt};

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

    fn private(dir: &Path) {
        fs::DirBuilder::new().mode(0o700).create(dir).unwrap();
    }

    #[test]
    fn without_networks_nothing_is_prepared_and_a_copy_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let restored = |images: &Path, named| {
            let wanted = WantedRestore {
                bundle: dir.path(),
                images,
                named,
                network: false,
            };
            let restoring = Restoring::prepare(wanted, dir.path()).unwrap();
            assert_eq!(restoring.pid(), None);
            restoring.succeeded();
            drop(Restoring::prepare(wanted, dir.path()).unwrap());
            wait_for_image_work();
            images.exists()
        };
        let copy = dir.path().join("ctrd-checkpoint1234567890");
        private(&copy);
        fs::write(copy.join("pages-1.img"), "pages").unwrap();
        assert!(restored(&copy, true));
        assert!(!restored(&copy, false));
        let kept = dir.path().join("images");
        private(&kept);
        assert!(restored(&kept, false));
    }

    /// Must not touch a user's directory with a similar name.
    #[test]
    fn only_containerds_copy_is_taken_for_one() {
        let dir = tempfile::tempdir().unwrap();
        let there = |name: &str| {
            let path = dir.path().join(name);
            private(&path);
            path
        };
        let copy = there("ctrd-checkpoint42");
        assert!(unpacked(&copy, dir.path()));
        assert!(unpacked(&copy, &dir.path().join("")));
        for name in [
            "ctrd-checkpoint",
            "ctrd-checkpoint-mine",
            "ctrd-checkpoint42-mine",
            "ctrd-checkpoint42.bak",
            "ctrd-checkpoint12345678901",
            "ctrd-checkpoint\u{664}\u{662}",
            "my-ctrd-checkpoint42",
        ] {
            assert!(!unpacked(&there(name), dir.path()), "{name}");
        }
        let elsewhere = there("mine");
        let below = there("mine/ctrd-checkpoint42");
        assert!(!unpacked(&below, dir.path()));
        assert!(!unpacked(&copy, &elsewhere));
        assert!(!unpacked(
            &elsewhere.join("../ctrd-checkpoint42"),
            dir.path()
        ));
        assert!(!unpacked(Path::new("ctrd-checkpoint42"), dir.path()));
        assert!(!unpacked(&dir.path().join("ctrd-checkpoint43"), dir.path()));
        let link = dir.path().join("ctrd-checkpoint44");
        std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
        assert!(!unpacked(&link, dir.path()));
        let file = dir.path().join("ctrd-checkpoint45");
        fs::write(&file, "mine").unwrap();
        assert!(!unpacked(&file, dir.path()));
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(!unpacked(&copy, dir.path()));
        fs::set_permissions(&copy, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(unpacked(&copy, dir.path()));
        // Only root can change the owner.
        if std::os::unix::fs::chown(&copy, Some(4711), None).is_ok() {
            assert!(!unpacked(&copy, dir.path()));
        }
    }
}
