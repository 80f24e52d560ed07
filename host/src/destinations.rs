//! Finds where the mounts of a spec end up inside the container's root.
//!
//! A destination may pass through a symbolic link of the root file system: `/var/run/secrets` of every Kubernetes pod,
//! where `/var/run` leads to `/run`. The kernel names such a mount by the link's target. runc and crun resolve the link
//! within the container's root directory on the host, at creation, at a checkpoint and at a restore. This module does
//! the same, so that the spec's mounts are known under the kernel's names. Like the runtimes it does not see a link
//! that is itself inside another mount.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use nix::fcntl::{OFlag, readlinkat};

use crate::files::{Host, open_in_root};
use crate::spec::Spec;

/// Links that are followed in one path, as many as the kernel follows.
const MAX_LINKS: usize = 40;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountDestination {
    /// Where the spec puts it, without `.` and `..`.
    pub named: PathBuf,
    pub path: PathBuf,
    pub bind: bool,
    pub source: Option<PathBuf>,
}

impl MountDestination {
    /// True for a bind mount whose destination leads through a link.
    pub fn is_linked(&self) -> bool {
        self.bind && self.path != self.named
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Destinations(pub Vec<MountDestination>);

impl Destinations {
    /// Resolves the destinations of a bundle's spec. Where the root directory cannot be opened, links stay as they are.
    pub fn of(host: &Host, spec: &Spec, bundle: &Path) -> Self {
        let root = spec.json().pointer("/root/path").and_then(|p| p.as_str());
        let root = root.and_then(|r| File::open(host.path(bundle.join(r))).ok());
        let mounts = spec.mounts();
        let all = mounts.iter().map(|m| {
            let options = m.options().iter().flatten();
            let named = clean(m.destination());
            MountDestination {
                path: match &root {
                    Some(root) => resolve(root, &named),
                    None => named.clone(),
                },
                named,
                bind: m.typ().as_deref() == Some("bind")
                    || options.into_iter().any(|o| o == "bind" || o == "rbind"),
                source: m.source().clone(),
            }
        });
        Self(all.collect())
    }

    /// Bind mounts whose destination leads through a link.
    pub fn linked(&self) -> impl Iterator<Item = &MountDestination> {
        self.0.iter().filter(|d| d.is_linked())
    }

    /// Returns the innermost mount above a path, and the rest of the path in it.
    pub fn covering<'a>(&self, path: &'a Path) -> Option<(&MountDestination, &'a Path)> {
        let above = self.0.iter().filter(|d| d.path != path);
        above
            .filter_map(|d| Some((d, path.strip_prefix(&d.path).ok()?)))
            .min_by_key(|(_, rest)| rest.components().count())
    }

    /// Returns true if a path is in one of the mounts, or is one.
    pub fn hold(&self, path: &Path) -> bool {
        self.0.iter().any(|d| path.starts_with(&d.path))
    }
}

/// Removes `.` and `..` from a path, by its text alone.
pub fn clean(path: &Path) -> PathBuf {
    let mut out = PathBuf::from("/");
    for part in path.components() {
        match part {
            Component::Normal(name) => out.push(name),
            Component::ParentDir => {
                out.pop();
            }
            _ => {}
        }
    }
    out
}

/// Resolves `path` with `root` as its root: follows links, which do not lead out of it. Missing entries stay as they
/// are.
fn resolve(root: &File, path: &Path) -> PathBuf {
    let mut out = PathBuf::from("/");
    let mut rest: VecDeque<OsString> = parts(path);
    let mut links = 0;
    while let Some(name) = rest.pop_front() {
        if name == ".." {
            out.pop();
            continue;
        }
        let target = entry(root, &out.join(&name)).and_then(|fd| readlinkat(fd, "").ok());
        let Some(target) = target.filter(|_| links < MAX_LINKS) else {
            out.push(name);
            continue;
        };
        links += 1;
        let target = Path::new(&target);
        if target.is_absolute() {
            out = "/".into();
        }
        for part in parts(target).into_iter().rev() {
            rest.push_front(part);
        }
    }
    out
}

fn parts(path: &Path) -> VecDeque<OsString> {
    let parts = path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    });
    parts.collect()
}

/// Opens the entry itself, be it a link. The directories above it are resolved already; were one swapped for a link
/// meanwhile, it would still not lead out of the root.
fn entry(root: &File, path: &Path) -> Option<OwnedFd> {
    open_in_root(root, path, OFlag::O_PATH | OFlag::O_NOFOLLOW).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_test_files::TestFiles;
    use serde_json::json;

    #[test]
    fn links_are_followed_within_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("b/rootfs");
        root.dir("var/lib");
        root.link("var/run", "/run");
        root.link("var/rel", "../run");
        root.link("var/out", "../../../../../../etc");
        root.link("var/loop", "loop");
        root.link("var/chain", "run/there");
        root.link("run/there", "../var/lib");
        let mounts: Vec<_> = [
            "/var/run/secrets/x",
            "/var/rel/secrets/",
            "/var/out/shadow",
            "/var/chain/deep",
            "/var/lib/../run/y",
            "/plain/./z",
            "/var/loop/x",
        ]
        .map(|d| json!({"destination": d, "type": "bind", "source": "/s"}))
        .into();
        let spec = Spec::from_json(json!({"root": {"path": "rootfs"}, "mounts": mounts}));
        let host = Host::at(dir.path());
        let found = Destinations::of(&host, &spec, Path::new("/b"));
        let paths: Vec<_> = found.0.iter().map(|d| d.path.to_str().unwrap()).collect();
        assert_eq!(
            paths,
            [
                "/run/secrets/x",
                "/run/secrets",
                "/etc/shadow",
                "/var/lib/deep",
                "/run/y",
                "/plain/z",
                "/var/loop/x"
            ]
        );
        assert!(found.hold(Path::new("/run/secrets/x/y")) && !found.hold(Path::new("/var/run/y")));
        assert_eq!(found.linked().count(), 5);
        let (above, rest) = found.covering(Path::new("/run/secrets/x/y")).unwrap();
        assert_eq!(above.path, Path::new("/run/secrets/x"));
        assert_eq!(rest, Path::new("y"));
        let (above, _) = found.covering(Path::new("/run/secrets/x")).unwrap();
        assert_eq!(above.path, Path::new("/run/secrets"), "not itself");
        assert!(found.covering(Path::new("/plain/z")).is_none());
        let nowhere = Destinations::of(&host, &spec, Path::new("/none"));
        assert_eq!(nowhere.linked().count(), 0);
        assert_eq!(nowhere.0[0].path, Path::new("/var/run/secrets/x"));
    }
}
