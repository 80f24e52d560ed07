//! Fits the mounts of a checkpoint to the container that is created from it.
//!
//! The new container may be another engine's, whose spec has other mounts. They are matched by where they are in the
//! container:
//!
//! - CRIU asks for the source of each external mount of the images. The low-level runtime names those that the new spec
//!   has. What engines put into every container is provided here: `/etc/hosts` and the like are the files of the new
//!   root, `/dev/shm` is a new tmpfs. Anything else is refused.
//! - A bind mount that only the new spec has is mounted into the restored container before it runs an instruction.
//!   Where the images have a mount of their own, that one stays: processes may have its files open. It gets the spec's
//!   `nosuid`, `nodev` and `noexec`.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use cryopod_archive::container::surroundings::MountKind;
use cryopod_archive::criu::mounts::CriuMount;
use cryopod_gpu_plan::refusal::Refusal;
use cryopod_host::destinations::{Destinations, MountDestination};
use cryopod_host::detached::{self, Detached, within};
use cryopod_host::files::Host;
use cryopod_host::mountinfo::declarable;
use cryopod_host::spec::Spec;
use nix::fcntl::OFlag;
use nix::mount::{MsFlags, mount};

use crate::error::Error;
use crate::images::mountpoints;
use crate::preflight::surroundings::{MountPoints, external};
use crate::request::Request;
use crate::restore::new_container::environ;
use crate::rootfs;
use crate::run::operation::Operation;
use crate::security::mount_limits::limits;
use cryopod_host::files::open_in_root;

/// Files that engines put into every container.
const OF_ENGINES: [&str; 5] = [
    "/etc/hosts",
    "/etc/hostname",
    "/etc/resolv.conf",
    "/run/.containerenv",
    "/dev/termination-log",
];
const SHM: &str = "/dev/shm";
/// As engines mount it where nothing else is said.
const SHM_OPTIONS: &str = "mode=1777,size=65536k";
/// Masks files.
const NULL: &str = "/dev/null";
/// The same in its file system.
const MASK: &str = "/null";
/// Masks directories, under crun 1.24 and newer: in its state directory.
const OF_CRUN: &str = ".empty-directory";
/// An empty tmpfs in its place, as runc makes it.
const MASKING: &str = "mode=755,size=4k";
/// Prefix of names that CRIU gives by itself.
const OF_CRIU: &str = "CRIU:";

/// CRIU's stage at which all of the container is there and may still fail.
pub const STAGE: &str = "post-restore";

/// The mounts that a new container needs beside those that the low-level runtime makes.
#[derive(Debug, Default)]
pub struct NewMounts {
    provided: Vec<MountTarget>,
    attached: Vec<Attached>,
    /// Mounts of the images that the spec limits further, and the limits (`MOUNT_ATTR_*`).
    limited: Vec<(PathBuf, u64)>,
    /// The spec's environment ([`environ`]).
    environ: Vec<u8>,
}

/// An external mount of the images.
#[derive(Debug, PartialEq, Eq)]
struct MountTarget {
    key: String,
    source: NewMountSource,
    /// Where CRIU finds it.
    path: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum NewMountSource {
    /// The file in the new container's root.
    Root,
    /// A new one, with these options and flags.
    Tmpfs(String, MsFlags),
    Host,
}

/// A bind mount of the spec that the images lack.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Attached {
    source: PathBuf,
    at: PathBuf,
    recursive: bool,
    attributes: u64,
    propagation: u64,
    /// No mount of the images but their root is there.
    in_root: bool,
}

impl NewMounts {
    /// Compares the images with the spec. `named`: the external mounts that are named to CRIU otherwise.
    pub fn of(
        request: &Request<'_>,
        images: &[CriuMount],
        named: &[String],
        op: &Operation,
    ) -> Result<(Self, Vec<Refusal>), Error> {
        let (mut found, mut refusals) = (Self::default(), Vec::new());
        found.environ = environ::of(&request.spec);
        for mount in images.iter().filter(|m| m.external) {
            let key = &mount.key;
            let there = found.provided.iter().any(|p| p.key == *key);
            if there
                || key.starts_with(OF_CRIU)
                || is_named(&request.mounts, &request.spec, named, key)
            {
                continue;
            }
            let (source, path) = match key.as_str() {
                // runc and crun give masked files different names.
                _ if mount.root == MASK => (NewMountSource::Host, NULL.into()),
                SHM => (
                    NewMountSource::Tmpfs(shm_options(request), MsFlags::empty()),
                    op.place(MountKind::Directory)?,
                ),
                key if OF_ENGINES.contains(&key) => {
                    (NewMountSource::Root, op.place(MountKind::File)?)
                }
                key if key.starts_with('/') && key.ends_with(OF_CRUN) => {
                    let tmpfs = NewMountSource::Tmpfs(MASKING.into(), MsFlags::MS_RDONLY);
                    (tmpfs, op.place(MountKind::Directory)?)
                }
                _ => {
                    refusals.push(Refusal::new(
                        format!(
                            "the checkpoint has a mount at {} that the new container lacks",
                            mount.path
                        ),
                        "give the new container one there (--mount or -v)",
                    ));
                    continue;
                }
            };
            tracing::info!("{}: provided, as the new container has none", mount.path);
            let key = key.clone();
            found.provided.push(MountTarget { key, source, path });
        }
        let own = request.mounts.0.iter().zip(request.spec.mounts());
        for (destination, mount) in own {
            let options = mount.options().clone().unwrap_or_default();
            if let Some(there) = images
                .iter()
                .rfind(|m| Path::new(&m.path) == destination.path)
            {
                let less = less(there, &options);
                if less != 0 {
                    found.limited.push((destination.path.clone(), less));
                }
                continue;
            }
            if !destination.bind {
                continue;
            }
            let mapped = mount.uid_mappings().as_ref().is_some_and(|m| !m.is_empty());
            if mapped || options.iter().any(|o| o == "idmap" || o == "ridmap") {
                refusals.push(Refusal::new(
                    format!(
                        "the new container has a mount with mapped ids at {} that the checkpoint lacks",
                        destination.path.display()
                    ),
                    "leave it out, or checkpoint a container that has it",
                ));
                continue;
            }
            match attached(images, &request.bundle, destination, &options) {
                Ok(attached) => found.attached.extend(attached),
                Err(refusal) => refusals.push(refusal),
            }
        }
        Ok((found, refusals))
    }

    /// Lines of CRIU's configuration.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let provided = self.provided.iter();
        let provided = provided.filter(|p| declarable(&p.key).is_ok());
        let lines = provided.map(|p| external(&p.key, &p.path.display().to_string()));
        // Engines unpack the same image with other modes where its layers name none, that of `/` for one.
        lines.chain(["skip-file-rwx-check".to_owned()])
    }

    /// Makes the sources, with mount points in the new root that go away with the result.
    pub fn provide(&self, request: &Request<'_>, op: &Operation) -> Result<MountPoints, Error> {
        let root = request.spec.json().pointer("/root/path");
        let root = root.and_then(|p| p.as_str()).unwrap_or("rootfs");
        let root = request.bundle.join(root);
        let what = format!("{}: cannot open the container's root", root.display());
        let root = File::open(&root).map_err(Error::io(what))?;
        let mut points = MountPoints::below(root.try_clone().map_err(Error::io("dup(2)"))?);
        for provided in &self.provided {
            let at = Path::new(&provided.key);
            let what = || format!("{}: cannot be provided", provided.key);
            match &provided.source {
                NewMountSource::Root => {
                    let made = points.make(at, MountKind::File);
                    made.map_err(|e| Error::io(what())(e.into()))?;
                    let file = open_in_root(&root, at, OFlag::O_PATH);
                    let file = file.map_err(|e| Error::io(what())(e.into()))?;
                    op.bind(file.as_fd(), &provided.path)?;
                }
                NewMountSource::Tmpfs(options, more) => {
                    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | *more;
                    let of = Some("tmpfs");
                    mount(of, &provided.path, of, flags, Some(options.as_str()))
                        .map_err(|e| Error::io(what())(e.into()))?;
                }
                NewMountSource::Host => {}
            }
        }
        // A root that is read-only later can have mount points now.
        for attached in self.attached.iter().filter(|a| a.in_root) {
            let made = points.make(&attached.at, kind_of(&attached.source));
            let what = || format!("{}: cannot make the mount point", attached.at.display());
            made.map_err(|e| Error::io(what())(e.into()))?;
        }
        let shm = self.provided.iter().find(|p| p.key == SHM);
        // One that the engine has made is in the bundle's mounts.
        if let Some(shm) = shm {
            rootfs::apply_shm(request.config(), &request.spec, &request.images, &shm.path)?;
        }
        Ok(points)
    }

    /// Mounts what only the new spec has into the container with this init process, whose processes do not run.
    pub fn attach(&self, init: i32) -> Result<(), Error> {
        if self.attached.is_empty() && self.limited.is_empty() {
            return Ok(());
        }
        let mut copies = Vec::new();
        for mount in &self.attached {
            let copy = Detached::of(&mount.source, mount.recursive).and_then(|copy| {
                copy.set(mount.attributes, mount.propagation)?;
                Ok((copy, kind_of(&mount.source)))
            });
            copies.push(copy.map_err(Error::io(mount.source.to_string_lossy()))?);
        }
        within(init, |root| self.mount_all(root, copies))
    }

    /// Shows the container the spec's environment, when its processes have their users again. No container fails for
    /// want of it: its root may be read-only.
    pub fn put_environ(&self, host: &Host, init: i32) {
        let owner = environ::owner(host, init).unwrap_or_default();
        let failed = Error::at(Path::new(environ::PATH), "not written");
        let put = |root: &File| environ::put(root, &self.environ, owner).map_err(failed);
        if let Err(e) = within(init, put) {
            tracing::warn!("{e}");
        }
    }

    fn mount_all(&self, root: &File, copies: Vec<(Detached, MountKind)>) -> Result<(), Error> {
        let failed = |at: &Path| Error::io(format!("the mount at {}", at.display()));
        for (mount, (copy, kind)) in self.attached.iter().zip(copies) {
            let attach = || {
                let mut points = MountPoints::below(root.try_clone()?);
                points.make(&mount.at, kind)?;
                points.keep();
                copy.attach(open_in_root(root, &mount.at, OFlag::O_PATH)?.as_fd())
            };
            attach().map_err(failed(&mount.at))?;
        }
        for (at, limits) in &self.limited {
            let there = open_in_root(root, at, OFlag::O_PATH).map_err(std::io::Error::from);
            let limited = there.and_then(|there| detached::limit(there.as_fd(), *limits));
            limited.map_err(failed(at))?;
        }
        Ok(())
    }
}

fn kind_of(source: &Path) -> MountKind {
    match source.is_dir() {
        true => MountKind::Directory,
        false => MountKind::File,
    }
}

/// Returns true if the external mount of this key is named to CRIU by the low-level runtime, or by `named`.
fn is_named(mounts: &Destinations, spec: &Spec, named: &[String], key: &str) -> bool {
    let path = Path::new(key);
    let mut binds = mounts.0.iter().filter(|d| d.bind);
    // The low-level runtimes bind version 1's hierarchies one by one.
    let of_spec = spec.mounts();
    let is_cgroup = |t: &str| t.starts_with("cgroup");
    let mut cgroups = of_spec
        .iter()
        .filter(|m| m.typ().as_deref().is_some_and(is_cgroup));
    named.iter().any(|n| n == key)
        || binds.any(|d| d.path == path || d.named == path)
        || cgroups.any(|m| path.starts_with(m.destination()))
}

/// The options of the spec's own tmpfs there.
fn shm_options(request: &Request<'_>) -> String {
    let mounts = request.spec.mounts();
    let own = mounts.iter().find(|m| m.destination() == Path::new(SHM));
    let options = own.and_then(|m| m.options().as_ref());
    let options = options.into_iter().flatten().map(String::as_str);
    let kept: Vec<&str> = options
        .filter(|o| {
            ["size=", "mode=", "nr_inodes="]
                .iter()
                .any(|p| o.starts_with(p))
        })
        .collect();
    match kept.is_empty() {
        true => SHM_OPTIONS.into(),
        false => kept.join(","),
    }
}

/// Returns the limits of the options that the mount in the images lacks. Without `ro`: files may be open for writing.
fn less(there: &CriuMount, options: &[String]) -> u64 {
    let missing = limits(options).filter(|l| l.option != "ro" && there.flags & l.flag == 0);
    missing.fold(0, |all, limit| all | limit.attribute)
}

/// Describes a bind mount that the images lack.
fn attached(
    images: &[CriuMount],
    bundle: &Path,
    destination: &MountDestination,
    options: &[String],
) -> Result<Option<Attached>, Refusal> {
    let (at, Some(source)) = (&destination.path, &destination.source) else {
        return Ok(None);
    };
    if let Some(hidden) = images.iter().find(|m| Path::new(&m.path).starts_with(at)) {
        return Err(Refusal::new(
            format!(
                "the new container has a mount at {}, which would hide the checkpoint's at {}",
                at.display(),
                hidden.path
            ),
            "leave it out",
        ));
    }
    let shared = |o: &String| o.trim_start_matches('r') == "shared";
    let slave = |o: &String| o.trim_start_matches('r') == "slave";
    Ok(Some(Attached {
        source: bundle.join(source),
        at: at.clone(),
        recursive: options.iter().any(|o| o == "rbind"),
        attributes: limits(options).fold(0, |all, limit| all | limit.attribute),
        propagation: match () {
            () if options.iter().any(shared) => libc::MS_SHARED,
            () if options.iter().any(slave) => libc::MS_SLAVE,
            () => libc::MS_PRIVATE,
        },
        in_root: mountpoints::covering(images, &at.to_string_lossy()).is_none_or(|m| m.path == "/"),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn mount(path: &str, flags: u32) -> CriuMount {
        CriuMount {
            path: path.into(),
            flags,
            ..CriuMount::default()
        }
    }

    fn bind(at: &str) -> MountDestination {
        MountDestination {
            named: at.into(),
            path: at.into(),
            bind: true,
            source: Some("/srv/x".into()),
        }
    }

    fn texts(options: &[&str]) -> Vec<String> {
        options.iter().map(|o| (*o).to_owned()).collect()
    }

    #[test]
    fn options_of_the_spec() {
        const RO: u64 = libc::MOUNT_ATTR_RDONLY;
        const NOSUID: u64 = libc::MOUNT_ATTR_NOSUID;
        for (options, attributes, less) in [
            (&["rbind", "rw"][..], 0, 0),
            (&["ro", "nosuid"], RO | NOSUID, NOSUID),
            // docker's, with all that is below.
            (&["rbind", "rro", "rprivate"], RO, 0),
            (&["ro", "rw"], 0, 0),
            (&["nosuid", "nodev", "noexec"], 14, 14),
        ] {
            let options = texts(options);
            let found = attached(&[], Path::new("/b"), &bind("/x"), &options).unwrap();
            assert_eq!(found.unwrap().attributes, attributes, "{options:?}");
            assert_eq!(super::less(&mount("/x", 0), &options), less, "{options:?}");
            assert_eq!(super::less(&mount("/x", 15), &options), 0, "{options:?}");
        }
        let shared = texts(&["bind", "rshared"]);
        let found = attached(&[], Path::new("/b"), &bind("/x"), &shared);
        let found = found.unwrap().unwrap();
        assert_eq!(found.propagation, libc::MS_SHARED);
        assert!(!found.recursive);
    }

    #[test]
    fn a_mount_that_would_hide_others() {
        let images = [mount("/", 0), mount("/data/deep", 0)];
        let ask = |at| attached(&images, Path::new("/b"), &bind(at), &[]);
        assert!(ask("/data/deeper").unwrap().is_some());
        let refusal = ask("/data").unwrap_err().to_string();
        assert!(refusal.contains("would hide the checkpoint's at /data/deep"));
    }

    #[test]
    fn what_the_runtime_names() {
        let spec = json!({"mounts": [
            {"destination": "/data", "type": "bind", "source": "/srv/data"},
            {"destination": "/run", "type": "tmpfs", "source": "tmpfs"},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"}
        ]});
        let named = |key: &str| {
            let spec = cryopod_host::spec::Spec::from_json(spec.clone());
            let host = cryopod_host::files::Host::at("/nowhere");
            let all = cryopod_host::destinations::Destinations::of(&host, &spec, Path::new("/b"));
            is_named(&all, &spec, &["/own".to_owned()], key)
        };
        for key in ["/data", "/sys/fs/cgroup/memory", "/own"] {
            assert!(named(key), "{key}");
        }
        for key in ["/run", "/data/x", "/etc/hosts", "/dev/shm"] {
            assert!(!named(key), "{key}");
        }
    }
}
