//! Looks for symbolic links of the container's that would lead CRIU out of it.
//!
//! CRIU makes most mounts in its own mount namespace, where the host is to be seen. So mount points, and the places of
//! deleted files that CRIU makes, must not lead through links, when the container's files are as CRIU will find them.
//! Nothing is decoded here: what the images say comes from [`super::decoder`].

use std::fs::File;
use std::path::{Path, PathBuf};

use cryopod_archive::criu::mounts::{CriuMount, fs_type};
use cryopod_host::destinations::Destinations;
use cryopod_host::files::open_without_links;
use cryopod_host::spec::Spec;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::image_check::opened::MadePath;
use super::privileges::top;

/// Returns what is wrong. `made`: the files that CRIU makes.
pub fn links(
    all: &[CriuMount],
    made: &[MadePath],
    spec: &Spec,
    destinations: &Destinations,
    bundle: &Path,
) -> Vec<String> {
    let place = ContainerFiles {
        root: in_root(spec, bundle),
        destinations,
        bundle,
    };
    let mut told = Vec::new();
    for namespace in all.chunk_by(|a, b| a.namespace == b.namespace) {
        for mount in namespace {
            told.extend(elsewhere(&place, mount));
            let parent = namespace.iter().find(|m| m.id == mount.parent);
            if let Some(parent) = parent {
                told.extend(link(&place, parent, &mount.path));
            }
            told.extend(bound_from(mount, all).and_then(|(from, path)| link(&place, from, &path)));
        }
        for made in made {
            let has = |id| namespace.iter().any(|m| u64::from(m.id) == id);
            if made.mount.is_some_and(|id| !has(id)) {
                continue; // another namespace's
            }
            let path = Path::new("/").join(&made.path);
            let above = path.parent().unwrap_or(Path::new("/")).to_string_lossy();
            let Some(shown) = top(namespace, &above) else {
                continue;
            };
            told.extend(link(&place, shown, &above));
            if made.mount.is_some_and(|id| u64::from(shown.id) != id) {
                told.push(format!(
                    "{} is made in another mount than the one that its path shows",
                    path.display()
                ));
            }
        }
    }
    told
}

/// Returns what is wrong if a mount of the runtime's is not where the runtime mounts it.
fn elsewhere(place: &ContainerFiles<'_>, mount: &CriuMount) -> Option<String> {
    let (key, path) = (Path::new(&mount.key), Path::new(&mount.path));
    let of_spec = place
        .destinations
        .0
        .iter()
        .find(|d| d.path == key || d.named == key);
    let is_there = of_spec.is_none_or(|d| d.path == path || d.named == path);
    (mount.external && !is_there).then(|| {
        format!(
            "the mount of {} is at {} in the images",
            key.display(),
            path.display()
        )
    })
}

/// Returns the mount of the runtime's from which CRIU binds another one, and the path of that in the container.
fn bound_from<'a>(mount: &CriuMount, all: &'a [CriuMount]) -> Option<(&'a CriuMount, String)> {
    let is_bind = !mount.external
        && mount.path != "/"
        && fs_type(mount.fs_type).is_none_or(|t| t == "overlay");
    let mut from = all.iter().filter(|m| m.external || m.path == "/");
    let from =
        from.find(|m| m.device == mount.device && Path::new(&mount.root).starts_with(&m.root))?;
    let inner = Path::new(&mount.root).strip_prefix(&from.root).ok()?;
    is_bind.then(|| {
        (
            from,
            Path::new(&from.path).join(inner).display().to_string(),
        )
    })
}

/// Where the container's files lie on the host.
struct ContainerFiles<'a> {
    root: PathBuf,
    destinations: &'a Destinations,
    bundle: &'a Path,
}

/// Returns what is wrong if `path` of the container, which lies in `mount`, leads through a link.
fn link(place: &ContainerFiles<'_>, mount: &CriuMount, path: &str) -> Option<String> {
    let below = Path::new(path).strip_prefix(&mount.path).ok()?;
    let at = match mount.path.as_str() {
        "/" if !mount.external => place.root.clone(),
        _ => {
            let key = Path::new(&mount.key);
            let mut of_spec = place.destinations.0.iter().filter(|d| d.bind);
            let found = of_spec.find(|d| mount.external && (d.path == key || d.named == key))?;
            place.bundle.join(found.source.as_ref()?)
        }
    };
    if below.as_os_str().is_empty() || !at.is_dir() {
        return None;
    }
    let root = File::open(&at).ok()?;
    match open_without_links(&root, below, OFlag::O_PATH) {
        Err(Errno::ELOOP | Errno::EXDEV) => Some(format!(
            "{path} leads through a symbolic link of the container's, and CRIU would follow it outside of the container"
        )),
        // What does not exist CRIU reports itself.
        _ => None,
    }
}

/// Where a container's file lies on the host, if its mount is the root's.
fn in_root(spec: &Spec, bundle: &Path) -> PathBuf {
    let root = spec.json().pointer("/root/path").and_then(|p| p.as_str());
    bundle.join(root.unwrap_or("rootfs"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn mount(path: &str) -> CriuMount {
        CriuMount {
            path: path.into(),
            root: "/".into(),
            ..CriuMount::default()
        }
    }

    #[test]
    fn links_of_the_container() {
        let bundle = tempfile::tempdir().unwrap();
        let root = bundle.path().join("rootfs");
        std::fs::create_dir_all(root.join("data/deep")).unwrap();
        symlink("/etc", root.join("out")).unwrap();
        symlink("data", root.join("in")).unwrap();
        let volume = bundle.path().join("volume");
        std::fs::create_dir_all(volume.join("plain")).unwrap();
        symlink("/usr/bin", volume.join("programs")).unwrap();
        let destinations = Destinations(vec![cryopod_host::destinations::MountDestination {
            named: "/vol".into(),
            path: "/vol".into(),
            bind: true,
            source: Some(volume),
        }]);
        let place = ContainerFiles {
            root,
            destinations: &destinations,
            bundle: bundle.path(),
        };
        let of_volume = CriuMount {
            external: true,
            key: "/vol".into(),
            ..mount("/vol")
        };
        for (on, path, fine) in [
            (&mount("/"), "/data/deep", true),
            (&mount("/"), "/not/there", true),
            (&mount("/"), "/out", false),
            (&mount("/"), "/out/passwd", false),
            (&mount("/"), "/in/deep", false),
            (&of_volume, "/vol/plain", true),
            (&of_volume, "/vol/programs", false),
        ] {
            assert_eq!(link(&place, on, path).is_none(), fine, "{path}");
        }
    }
}
