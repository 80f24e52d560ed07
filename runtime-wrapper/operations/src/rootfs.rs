//! Carries the container's own changes of its root file system with the checkpoint.
//!
//! podman, containerd's CRI and `ctr c checkpoint --rw` put them into their archives. docker and nerdctl do not, and a
//! restore in a fresh container then lacks the files that its processes have open. And where the container goes on
//! running, all engines pack its files after CRIU's dump: a file that has grown meanwhile is another than the one that
//! CRIU saw open (`has bad size`), and no restore succeeds. So in both cases cryopod packs the writable layer into the
//! image directory while the container is frozen, and unpacks it before a restore, over what the engine has packed. The
//! same holds for podman's `/dev/shm`, a tmpfs on the host that is only this container's.
//!
//! The layer is overlayfs's upper directory; the tar has OCI's whiteouts for deleted files. Devices and sockets are
//! left out.

mod adopt;
mod apply;
mod capture;
pub mod frozen;
mod layer;
mod left_out;
mod program_rights;
mod records;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use cryopod_host::destinations::Destinations;
use cryopod_host::files::{Host, open_in_root};
use cryopod_host::spec::Spec;
use nix::fcntl::OFlag;

use crate::config::Config;
use crate::config::rootfs::{Carry, RootfsOptions};
use crate::error::Error;
use crate::rootfs::frozen::Frozen;
use crate::rootfs::program_rights::ProgramRights;

pub use adopt::adopt;

/// The tar of the container's changes, in the image directory.
pub const FILE: &str = cryopod_archive::format::names::CARRIED_ROOTFS;
/// The files of `/dev/shm`, where that is a mount from outside of the container.
pub const SHM_FILE: &str = "cryopod-shm.tar";
pub const SHM: &str = "/dev/shm";
/// The annotation that overrides `rootfs.carry`: `on`, `off`.
pub const ANNOTATION: &str = "dev.cryopod.rootfs";
/// docker's usual namespace in containerd, a directory in the path of its bundles. With `--userns-remap` and with
/// `--containerd-namespace` it is another.
const DOCKER: &str = "moby";
/// What docker mounts into each container, from files of the same names in its directory of the container.
const OF_DOCKER: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];
/// Prefix of nerdctl's annotations.
const NERDCTL: &str = "nerdctl/";

/// Prefix of a whiteout's name; the name of the deleted file follows.
const WHITEOUT: &str = ".wh.";
/// Marks a directory through which nothing from below shows.
const OPAQUE: &str = ".wh..wh..opq";
/// A PAX record: the name is a file's own, though it begins like a whiteout's. Earlier builds refuse it at a restore.
const LITERAL: &str = "CRYOPOD.literal";
/// The extended attribute that is carried: a program's capabilities.
const CAPABILITY: &str = "security.capability";

/// Returns true if this container's changes must be carried. `goes_on`: its processes run on when CRIU has dumped them.
///
/// # Errors
/// Nobody knows what the annotation means: without its files a container does not come back.
pub fn wanted(
    options: &RootfsOptions,
    spec: &Spec,
    (bundle, id): (&Path, &str),
    goes_on: bool,
) -> Result<bool, Error> {
    let asked = spec.switch(ANNOTATION).map_err(Error::untouched)?;
    Ok(asked.unwrap_or_else(|| match options.carry {
        Carry::Always => true,
        Carry::Never => false,
        Carry::Auto => goes_on || is_unpacked_again(spec, bundle, id),
    }))
}

/// Returns true for an engine that unpacks containerd's checkpoint into a directory of its own: docker and nerdctl.
pub fn is_unpacked_again(spec: &Spec, bundle: &Path, id: &str) -> bool {
    let mut above = bundle.parent().into_iter().flat_map(Path::file_name);
    above.any(|name| name == DOCKER)
        || spec.annotations(NERDCTL).next().is_some()
        || own_directory(spec, id).is_some()
}

/// Returns docker's directory of a container, from which it mounts [`OF_DOCKER`]. Users name directories like containers, too.
pub fn own_directory(spec: &Spec, id: &str) -> Option<PathBuf> {
    let mounts = spec.mounts();
    let sources = mounts.iter().filter_map(|m| {
        let to = OF_DOCKER
            .iter()
            .map(Path::new)
            .find(|p| p == m.destination())?;
        let source = m.source().as_deref();
        source.filter(|source| source.file_name() == to.file_name())
    });
    let mut above = sources.filter_map(Path::parent);
    above
        .find(|dir| dir.file_name().is_some_and(|name| name == id))
        .map(Path::to_owned)
}

/// Returns podman's `/dev/shm` on the host, new with its container. Another one (the host's, a pod's) is others' too.
pub fn own_shm(mounts: &Destinations, bundle: &Path) -> Option<PathBuf> {
    let mut mounts = mounts
        .0
        .iter()
        .filter(|d| d.bind && d.path == Path::new(SHM));
    let source = bundle.join(mounts.next_back()?.source.as_ref()?);
    source.starts_with(bundle).then_some(source)
}

/// Opens a file of the container on the host (`O_PATH`), if it is in one of the spec's bind mounts. Returns its path there.
pub fn open_in_volume(
    mounts: &Destinations,
    bundle: &Path,
    path: &Path,
) -> Option<(PathBuf, OwnedFd)> {
    let above = mounts.0.iter().filter(|d| path.starts_with(&d.path));
    let mount = above.max_by_key(|d| d.path.components().count())?;
    let source = bundle.join(mount.source.as_ref().filter(|_| mount.bind)?);
    // Its files are in the checkpoint.
    if own_shm(mounts, bundle).is_some_and(|shm| shm == source) {
        return None;
    }
    let rest = path.strip_prefix(&mount.path).ok()?;
    // To open a FIFO or a device would do more.
    let mut options = File::options();
    let options = options.read(true).custom_flags(libc::O_PATH);
    let root = options.open(&source).ok()?;
    match rest.as_os_str().is_empty() {
        true => Some((source, root.into())),
        false => {
            let file = open_in_root(&root, rest, OFlag::O_PATH | OFlag::O_NOFOLLOW).ok()?;
            Some((source.join(rest), file))
        }
    }
}

/// Packs the changes of the container with the init process `init` and its `/dev/shm` into the image directory, with its
/// cgroup frozen; if this process is killed, `operation` says how to thaw it. Only logs a warning where the root is no overlay, as then nobody knows what has changed.
pub fn capture(
    options: &RootfsOptions,
    host: &Host,
    container: &ContainerRoot<'_>,
    images: &Path,
    operation: Option<&Path>,
) -> Result<(), Error> {
    let failed = |what: String| {
        Error::Failed(format!(
            "the container's changes of files cannot be packed: {what} (dev.cryopod.rootfs=off leaves them out)"
        ))
    };
    let upper = match container.root() {
        Some(root) => layer::upper(host, &root).map_err(failed)?,
        None => None,
    };
    if upper.is_none() {
        tracing::warn!(
            "the container's root is no overlay of its own: its changes of files are not in the checkpoint"
        );
    }
    let shm = container
        .shm
        .as_ref()
        .map(|path| (File::open(path), path.as_path(), SHM_FILE));
    let upper = upper
        .as_ref()
        .map(|upper| (upper.open(), upper.path(), FILE));
    let _frozen = Frozen::of(host, container.spec, container.init, operation).map_err(failed)?;
    for (directory, path, name) in shm.into_iter().chain(upper) {
        let partial = images.join(format!(".{name}.partial"));
        let done = directory
            .and_then(|directory| capture::pack(&directory, &partial, options))
            .and_then(|left_out| {
                left_out.warn();
                std::fs::rename(&partial, images.join(name))
            });
        done.map_err(|source| {
            let _ = std::fs::remove_file(&partial);
            Error::Io {
                what: format!(
                    "the container's changes of files cannot be packed from {} into {} (dev.cryopod.rootfs=off leaves them out)",
                    path.display(),
                    images.display()
                ),
                source,
            }
        })?;
    }
    Ok(())
}

/// A container whose root file system is read.
pub struct ContainerRoot<'a> {
    pub init: i32,
    pub bundle: &'a Path,
    pub spec: &'a Spec,
    /// Its [`own_shm`].
    pub shm: Option<PathBuf>,
}

impl ContainerRoot<'_> {
    fn root(&self) -> Option<PathBuf> {
        let root = self.spec.json().pointer("/root/path")?.as_str()?;
        Some(self.bundle.join(root))
    }
}

/// Unpacks the carried changes over the root of a container that is about to be restored.
///
/// # Errors
/// [`Error::Io`] names the entry. Nothing was written if the tar exceeds its bounds or names something outside the
/// root.
pub fn apply(config: &Config, images: &Path, bundle: &Path) -> Result<(), Error> {
    let path = images.join(FILE);
    // A stranger's link would have other files of the host unpacked.
    if !path.symlink_metadata().is_ok_and(|m| m.is_file()) {
        return Ok(());
    }
    let spec = Spec::of_bundle(bundle)?;
    if spec.switch(ANNOTATION) == Ok(Some(false)) {
        tracing::info!("{}: left aside, as the container says", path.display());
        return Ok(());
    }
    let root = spec.json().pointer("/root/path").and_then(|p| p.as_str());
    let Some(root) = root.map(|r| bundle.join(r)) else {
        return Ok(());
    };
    let rights = ProgramRights::of(config, &spec);
    apply::unpack(&path, &root, &config.rootfs, rights).map_err(Error::io(format!(
        "the files of the checkpoint ({}) cannot be put into {}",
        path.display(),
        root.display()
    )))
}

/// Unpacks the carried files of `/dev/shm` into the directory that the new container has there.
pub fn apply_shm(
    config: &Config,
    spec: &Spec,
    images: &Path,
    directory: &Path,
) -> Result<(), Error> {
    let path = images.join(SHM_FILE);
    if !path.symlink_metadata().is_ok_and(|m| m.is_file()) {
        return Ok(());
    }
    let rights = ProgramRights::of(config, spec);
    apply::unpack(&path, directory, &config.rootfs, rights).map_err(Error::io(format!(
        "the files of /dev/shm ({}) cannot be put into {}",
        path.display(),
        directory.display()
    )))
}

#[cfg(test)]
mod tests;
