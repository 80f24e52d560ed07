//! Finds out where an engine will keep a checkpoint.

use std::fs;
use std::path::Path;
use std::time::Duration;

use cryopod_archive::store::{KnownOrigins, Origin};
use cryopod_host::containerd::is_image_directory;
use cryopod_host::spec::Spec;

use crate::request::Request;
use crate::rootfs;

/// Prefix of the annotations of the CRI's containers. Their checkpoints become archives that people carry away.
const CRI: &str = "io.kubernetes.cri.";
/// containerd's content store, below its root.
const CONTENT: &str = "io.containerd.content.v1.content";
/// The link from a bundle to `ROOT/io.containerd.runtime.v2.task/NAMESPACE/ID`.
const WORK: &str = "work";
/// docker makes the directory of a checkpoint so long before at most.
const JUST_MADE: Duration = Duration::from_secs(120);

/// Returns true if containerd packs this image directory for an engine that keeps the result on this host.
pub fn is_packed(spec: &Spec, images: &Path) -> bool {
    is_image_directory(images) && spec.annotations(CRI).next().is_none()
}

/// Returns where the engine keeps this checkpoint; `None`: nobody knows.
pub fn of(request: &Request<'_>) -> Option<Origin> {
    if !is_packed(&request.spec, &request.images) {
        return None;
    }
    let content = content(&request.bundle);
    let mut origin = Origin {
        temporary: request.images.parent().map(Path::to_owned),
        elsewhere: content.is_none(),
        content,
        directory: None,
    };
    if rootfs::is_unpacked_again(&request.spec, &request.bundle, request.id()) {
        let own = rootfs::own_directory(&request.spec, request.id());
        origin.directory = own
            .as_deref()
            .filter(|own| expects(own))
            .and_then(|own| KnownOrigins::of(own.parent()?));
        origin.elsewhere |= origin.directory.is_none();
    }
    Some(origin)
}

fn content(bundle: &Path) -> Option<KnownOrigins> {
    let work = fs::read_link(bundle.join(WORK)).ok()?;
    KnownOrigins::of(&work.ancestors().nth(3)?.join(CONTENT))
}

/// Returns true if docker has just made a directory for a checkpoint here. With `--checkpoint-dir` it makes one elsewhere.
fn expects(container: &Path) -> bool {
    let empty = |path: &Path| fs::read_dir(path).is_ok_and(|mut all| all.next().is_none());
    let fresh = |path: &Path| {
        let made = path.symlink_metadata().and_then(|m| m.modified());
        made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age < JUST_MADE))
    };
    let all = fs::read_dir(container.join("checkpoints"));
    let mut all = all.into_iter().flatten().flatten().map(|e| e.path());
    all.any(|path| fresh(&path) && empty(&path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn dockers_directory_of_a_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let own = dir.path().join("c1");
        fs::create_dir_all(own.join("checkpoints/old")).unwrap();
        let source = own.join("hostname");
        let spec = Spec::from_json(json!({"mounts": [
            {"destination": "/data", "source": "/srv/data", "type": "bind"},
            {"destination": "/etc/hostname", "source": source, "type": "bind"},
        ]}));
        assert_eq!(
            rootfs::own_directory(&spec, "c1").as_deref(),
            Some(own.as_path())
        );
        assert_eq!(rootfs::own_directory(&spec, "c2"), None);
        for (destination, source) in [
            ("/data", own.join("data")),
            ("/etc/hosts", own.join("mine")),
        ] {
            let users = json!({"mounts": [{"destination": destination, "source": source}]});
            assert_eq!(rootfs::own_directory(&Spec::from_json(users), "c1"), None);
        }
        fs::write(own.join("checkpoints/old/inventory.img"), "x").unwrap();
        assert!(!expects(&own), "another checkpoint is in it");
        fs::create_dir(own.join("checkpoints/new")).unwrap();
        assert!(expects(&own));
        assert!(!expects(dir.path()));
    }

    #[test]
    fn containerds_content_store() {
        let dir = tempfile::tempdir().unwrap();
        let (bundle, content) = (dir.path().join("bundle"), dir.path().join(CONTENT));
        let work = dir.path().join("io.containerd.runtime.v2.task/ns/c1");
        fs::create_dir(&bundle).unwrap();
        assert_eq!(super::content(&bundle), None);
        std::os::unix::fs::symlink(&work, bundle.join(WORK)).unwrap();
        assert_eq!(super::content(&bundle), None);
        fs::create_dir(&content).unwrap();
        assert_eq!(super::content(&bundle).unwrap().path, content);
    }
}
