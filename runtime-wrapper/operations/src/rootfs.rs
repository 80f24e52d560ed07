//! The container's own changes of its root file system, carried with the checkpoint.
//!
//! podman, containerd's CRI and `ctr c checkpoint --rw` put them into their archives; docker and nerdctl do not, and a
//! restore in a fresh container then lacks the files that its processes have open. So for those two the writable layer
//! is packed into the image directory, while the container stands still, and unpacked before a restore.
//!
//! The layer is overlayfs's upper directory; the tar has OCI's whiteouts for what is deleted. Devices and sockets are left
//! out.

mod apply;
mod capture;
mod layer;
mod records;

use std::path::{Path, PathBuf};

use cryopod_host::files::Host;
use cryopod_host::spec::Spec;

use crate::config::rootfs::{Carry, Options};
use crate::error::Error;
use crate::frozen::Frozen;

/// The file, in CRIU's image directory.
pub const FILE: &str = "cryopod-rootfs.tar";
/// The annotation that overrides `rootfs.carry`: `on`, `off`.
const ANNOTATION: &str = "dev.cryopod.rootfs";
/// containerd's namespace of docker, which is a directory of its bundles.
const DOCKER: &str = "moby";
/// What nerdctl's annotations begin with.
const NERDCTL: &str = "nerdctl/";

/// A whiteout's name: this and the name of what is deleted.
const WHITEOUT: &str = ".wh.";
/// In a directory of which nothing below shows through.
const OPAQUE: &str = ".wh..wh..opq";
/// The extended attribute that is carried: a program's capabilities.
const CAPABILITY: &str = "security.capability";

/// Are this container's changes to be carried?
pub fn wanted(options: &Options, spec: &Spec, bundle: &Path) -> bool {
    match (spec.annotation(ANNOTATION), options.carry) {
        (Some("on"), _) | (None, Carry::Always) => true,
        (Some(other), _) => {
            if other != "off" {
                tracing::warn!("the annotation {ANNOTATION} is on or off, not {other:?}");
            }
            false
        }
        (None, Carry::Never) => false,
        (None, Carry::Auto) => {
            let mut above = bundle.parent().into_iter().flat_map(Path::file_name);
            above.any(|name| name == DOCKER) || spec.annotations(NERDCTL).next().is_some()
        }
    }
}

/// Packs the changes of the container whose first process is `init` into the image directory, with its cgroup frozen.
/// Nothing but a warning where the root is no overlay, as then nobody knows what has changed.
///
/// # Errors
/// [`Error::Failed`]: something in the container cannot be stopped, or has been mounted over the engine's root.
/// [`Error::Io`]: the layer cannot be read, or the disk is full. No file is left.
pub fn capture(
    options: &Options,
    host: &Host,
    container: &Container<'_>,
    images: &Path,
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
    let Some(upper) = upper else {
        tracing::warn!(
            "the container's root is no overlay of its own: its changes of files are not in the checkpoint"
        );
        return Ok(());
    };
    let _frozen = Frozen::of(host, container.init).map_err(failed)?;
    let partial = images.join(format!(".{FILE}.partial"));
    let done = upper
        .open()
        .and_then(|directory| capture::pack(&directory, &partial, options))
        .and_then(|()| std::fs::rename(&partial, images.join(FILE)));
    done.map_err(|source| {
        let _ = std::fs::remove_file(&partial);
        Error::Io {
            what: format!(
                "the container's changes of files cannot be packed from {} into {} (dev.cryopod.rootfs=off leaves them out)",
                upper.path().display(),
                images.display()
            ),
            source,
        }
    })
}

/// The container whose files are captured.
pub struct Container<'a> {
    /// Its first process.
    pub init: i32,
    /// Its bundle.
    pub bundle: &'a Path,
    /// The bundle's spec.
    pub spec: &'a Spec,
}

impl Container<'_> {
    /// Where the engine has its root.
    fn root(&self) -> Option<PathBuf> {
        let root = self.spec.json().pointer("/root/path")?.as_str()?;
        Some(self.bundle.join(root))
    }
}

/// Unpacks what a checkpoint carries over the root of a container that is about to be restored.
///
/// # Errors
/// [`Error::Io`] naming the entry. Nothing was written if the tar breaks its bounds, or names what is out of the root.
pub fn apply(options: &Options, images: &Path, bundle: &Path) -> Result<(), Error> {
    let path = images.join(FILE);
    // A stranger's link would have other files of the host unpacked.
    if !path.symlink_metadata().is_ok_and(|m| m.is_file()) {
        return Ok(());
    }
    let spec = Spec::of_bundle(bundle)?;
    if spec.annotation(ANNOTATION) == Some("off") {
        tracing::info!("{}: left aside, as the container says", path.display());
        return Ok(());
    }
    let root = spec.json().pointer("/root/path").and_then(|p| p.as_str());
    let Some(root) = root.map(|r| bundle.join(r)) else {
        return Ok(());
    };
    apply::unpack(&path, &root, options).map_err(Error::io(format!(
        "the files of the checkpoint ({}) cannot be put into {}",
        path.display(),
        root.display()
    )))
}

#[cfg(test)]
mod tests;
