//! Names sources of the spec's bind mounts that CRIU can mount.
//!
//! When a container is created, its runtime follows links in a source, as root. CRIU does neither at a restore. It
//! clones what lies at the path itself, be it a link (`open_tree` with `AT_SYMLINK_NOFOLLOW`, mount-v2.c), and mounts a
//! link in place of the volume. In a user namespace it goes along the path as the container's user, and engines keep
//! sources in directories that only root may enter; and the kernel clones no directory there without what is mounted
//! below it (`Failed to open_tree`). So for the time of a restore the spec names the end of the links, or a bind mount of
//! it alone in the operation's directory. Mounts below a recursive one are foreign mounts, which CRIU gets on their own.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use cryopod_archive::container::surroundings::MountKind;
use cryopod_gpu_plan::gpus::own_nodes;
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::destinations::MountDestination;
use cryopod_host::files::Host;
use cryopod_host::mountinfo;
use cryopod_host::spec::Spec;
use nix::mount::{MsFlags, mount};
use serde_json::{Value, json};

use crate::bundle::Edit;
use crate::error::Error;
use crate::request::Request;
use crate::run::operation::{self, Operation, open_to_container};

/// Permission of others to enter a directory.
const ENTER: u32 = 0o001;

/// The spec's sources that CRIU cannot mount as they are.
#[derive(Debug, Clone, Default)]
pub struct Sources {
    /// The mount's place in the spec's list, and its source for CRIU.
    replaced: Vec<(usize, PathBuf)>,
}

/// Returns the source of a bind mount without links; `None` for other mounts.
fn resolved(bundle: &Path, mount: &MountDestination) -> Option<(PathBuf, io::Result<PathBuf>)> {
    let source = bundle.join(mount.source.as_ref().filter(|_| mount.bind)?);
    let real = fs::canonicalize(&source);
    Some((source, real))
}

/// Returns the spec's bind mounts whose source is gone: no restore could make them.
pub fn missing(request: &Request<'_>) -> Vec<Refusal> {
    let bind = |mount| resolved(&request.bundle, mount).map(|found| (mount, found));
    let all = request.mounts.0.iter().filter_map(bind);
    all.filter_map(|(mount, (source, real))| {
        let error = real.err()?;
        Some(Refusal::new(
            format!(
                "the source {} of the mount {} cannot be found: {error}",
                source.display(),
                mount.path.display()
            ),
            "put it back on this host, or start the container without that mount",
        ))
    })
    .collect()
}

impl Sources {
    /// Resolves the sources, and makes bind mounts of those that CRIU could not reach.
    pub fn of(request: &Request<'_>, op: &Operation) -> Result<Self, Error> {
        let as_user = own_nodes::in_user_namespace(&request.host, &request.spec);
        let mounts = mountinfo::of(&request.host, "self");
        let mounts: Vec<PathBuf> = mounts.into_iter().map(|m| m.point).collect();
        let mut replaced = Vec::new();
        for (index, mount) in request.mounts.0.iter().enumerate() {
            let Some((source, Ok(real))) = resolved(&request.bundle, mount) else {
                continue;
            };
            let alone = || !mounts.iter().any(|m| m != &real && m.starts_with(&real));
            if as_user && !(is_reachable(&real) && alone()) {
                replaced.push((index, shown(op, &real, &request.spec)?));
            } else if real != source {
                replaced.push((index, real));
            }
        }
        Ok(Self { replaced })
    }

    /// The source of this mount of the spec, as CRIU is to mount it.
    pub fn source<'a>(&'a self, index: usize, mount: &'a MountDestination) -> Option<&'a Path> {
        let replaced = self.replaced.iter().find(|(i, _)| *i == index);
        replaced
            .map(|(_, path)| path)
            .or(mount.source.as_ref())
            .map(PathBuf::as_path)
    }
}

impl Edit for Sources {
    fn name(&self) -> &'static str {
        "sources of mounts that CRIU can mount, for the time of the restore"
    }

    fn is_lasting(&self) -> bool {
        false
    }

    fn apply(&self, _: &Host, spec: &mut Value) -> Result<(), Error> {
        for (index, path) in &self.replaced {
            let mount = spec.pointer_mut(&format!("/mounts/{index}"));
            if let Some(mount) = mount.and_then(Value::as_object_mut) {
                mount.insert("source".into(), json!(path));
            }
        }
        Ok(())
    }
}

/// Returns true if any user can go along this path.
fn is_reachable(path: &Path) -> bool {
    path.ancestors().skip(1).all(|directory| {
        fs::metadata(directory).is_ok_and(|meta| meta.permissions().mode() & ENTER != 0)
    })
}

/// Bind-mounts a source in the operation's directory, where the container's root can reach it, without the mounts below it.
fn shown(op: &Operation, source: &Path, spec: &Spec) -> Result<PathBuf, Error> {
    let what = |e| Error::at(source, "cannot be shown to CRIU")(e);
    let kind = match source.is_dir() {
        true => MountKind::Directory,
        false => MountKind::File,
    };
    let place = op.place(kind)?;
    for directory in place.ancestors().skip(1).take(2) {
        open_to_container(directory, spec).map_err(what)?;
    }
    let base = operation::base();
    let mode = fs::metadata(&base).map_err(what)?.permissions().mode();
    fs::set_permissions(&base, fs::Permissions::from_mode(mode | ENTER)).map_err(what)?;
    let none = None::<&str>;
    mount(Some(source), &place, none, MsFlags::MS_BIND, none)
        // Else what is mounted below the source later would come here, too.
        .and_then(|()| mount(none, &place, none, MsFlags::MS_SLAVE, none))
        .map_err(|e| what(e.into()))?;
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_followed_and_what_is_gone_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let real = fs::canonicalize(dir.path()).unwrap();
        fs::create_dir(dir.path().join("data")).unwrap();
        symlink("data", dir.path().join("link")).unwrap();
        symlink("nowhere", dir.path().join("gone")).unwrap();
        let of = |source: &str, bind| {
            let mount = MountDestination {
                named: "/x".into(),
                path: "/x".into(),
                bind,
                source: Some(source.into()),
            };
            resolved(dir.path(), &mount).map(|(_, real)| real.ok())
        };
        assert_eq!(of("link", true), Some(Some(real.join("data"))));
        assert_eq!(of("gone", true), Some(None));
        assert_eq!(of("link", false), None);
    }

    #[test]
    fn only_the_sources_change() {
        let mut spec = json!({"mounts": [{"source": "/a", "options": ["ro"]}, {"source": "/b"}]});
        let sources = Sources {
            replaced: vec![(0, "/c".into()), (7, "/d".into())],
        };
        sources.apply(&Host::system(), &mut spec).unwrap();
        let want = json!({"mounts": [{"source": "/c", "options": ["ro"]}, {"source": "/b"}]});
        assert_eq!(spec, want);
    }

    #[test]
    fn directories_of_root_alone_are_not_reachable() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let closed = dir.path().join("closed");
        fs::create_dir(&closed).unwrap();
        fs::set_permissions(&closed, fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(is_reachable(&closed), is_reachable(dir.path()));
        assert!(!is_reachable(&closed.join("file")));
    }
}
