//! Moves a checkpoint's large files to a store, and finds them for a restore.
//!
//! Only the host's configuration names a store. A container or an archive says whether a store is used, and which
//! entry, but never where.

use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use cryopod_archive::metadata::Metadata;
use cryopod_archive::names;
use cryopod_archive::store::{self, About, Found};
use cryopod_archive::vram::usual_threads;
use cryopod_host::spec::Spec;

use crate::config::Config;
use crate::config::store::{Options, Use};
use crate::error::Error;
use crate::request::Request;

/// The annotation that overrides `store.use`.
pub const ANNOTATION: &str = "dev.cryopod.store";
/// Longest chain of CRIU checkpoints that is followed.
const LONGEST: usize = 64;

/// Returns the store for this container's checkpoint; `None`: none.
///
/// # Errors
/// [`Error::Failed`] names the annotation.
pub fn wanted<'a>(options: &'a Options, spec: &Spec) -> Result<Option<&'a Path>, Error> {
    let on = match spec.annotation(ANNOTATION).map(str::trim) {
        Some("on" | "true") => {
            if options.path.is_none() {
                tracing::warn!(
                    "{ANNOTATION}: no store is configured (store.path in {}): the checkpoint stays whole",
                    crate::config::PATH
                );
            }
            true
        }
        Some("off" | "false") => false,
        Some(other) => {
            return Err(Error::Failed(format!(
                "{ANNOTATION}: {other:?} is not one of on, off; the directory is the configuration's to name. Nothing was touched"
            )));
        }
        None => options.used == Use::On,
    };
    Ok(options.path.as_deref().filter(|_| on))
}

/// Checks that the images that a dump builds upon lie where CRIU's own link leads.
///
/// # Errors
/// [`Error::Failed`]: they are in a store.
pub fn parent_is_here(request: &Request<'_>) -> Result<(), Error> {
    let flags = &request.inv.flags;
    let parent = flags.value("parent-path").filter(|p| !p.is_empty());
    parent.map_or(Ok(()), |parent| {
        whole(below(&request.images, Path::new(parent)))
    })
}

/// Resolves a path relative to a directory that may not exist yet, so that the system cannot follow it.
fn below(directory: &Path, path: &Path) -> PathBuf {
    let there = directory.canonicalize();
    let mut at = there
        .or_else(|_| std::path::absolute(directory))
        .unwrap_or_default();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(at.pop()),
            part => at.push(part),
        }
    }
    at
}

fn whole(mut directory: PathBuf) -> Result<(), Error> {
    for _ in 0..LONGEST {
        if directory
            .join(names::STORE_REFERENCE)
            .symlink_metadata()
            .is_ok()
        {
            return Err(Error::Failed(format!(
                "{}: the memory of this checkpoint is in a store, and CRIU finds what another builds upon only beside it; leave --parent-path away (GPU memory can still build upon it: dev.cryopod.parent), or set {ANNOTATION}=off for containers whose checkpoints build upon each other. Nothing was touched",
                directory.display()
            )));
        }
        directory.push(names::PARENT_LINK);
        if !directory.exists() {
            break;
        }
    }
    Ok(())
}

/// Moves the checkpoint's large files into the store. On failure they stay where they are and a warning is logged; the
/// checkpoint is valid either way.
pub fn put(directory: &Path, images: &Path, metadata: &Metadata, limit: Duration) {
    let about = About {
        container: &metadata.container.id,
        created: &metadata.created,
        threads: usual_threads(),
        until: Instant::now().checked_add(limit),
    };
    match store::put(images, directory, &about) {
        Ok(Some(reference)) => tracing::info!(
            "{}: {reference} in entry {} of the store {}",
            images.display(),
            reference.id,
            directory.display()
        ),
        Ok(None) => {}
        Err(e) => tracing::warn!("the large files stay in {}: {e}", images.display()),
    }
}

/// Finds an image directory's entry in a store; `None`: it has none. On error nothing was started.
pub fn find(config: &Config, id: &str, images: &Path) -> Result<Option<Found>, Error> {
    let parent = images.join(names::PARENT_LINK);
    if parent.exists() {
        whole(parent)?;
    }
    store::find(images, &config.store.directories()).map_err(|e| refused(id, &e.to_string()))
}

pub fn without_metadata(stored: &Found, images: &Path) -> Error {
    Error::Failed(format!(
        "{}: has a reference to a store ({}) and no {}: the checkpoint is incomplete",
        images.display(),
        stored.reference,
        names::METADATA
    ))
}

/// Compares the digests of CRIU's images. The VRAM worker checks those of the VRAM files. On error nothing was started.
pub fn verify(request: &Request<'_>, stored: &Found, limit: Duration) -> Result<(), Error> {
    if request.config().store.verify == Some(false) {
        return Ok(());
    }
    let until = Instant::now().checked_add(limit);
    let verified = stored.verify(usual_threads(), until);
    verified.map_err(|e| refused(request.id(), &e.to_string()))
}

fn refused(id: &str, what: &str) -> Error {
    Error::Failed(format!(
        "restore of {id} refused, nothing was started and the checkpoint is untouched: {what}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_container_says_whether_and_never_where() {
        let with = |value: &str| Spec::from_json(json!({"annotations": {ANNOTATION: value}}));
        let none = Spec::from_json(json!({}));
        let mut options = Options::default();
        assert_eq!(wanted(&options, &none).unwrap(), None);
        assert_eq!(wanted(&options, &with("on")).unwrap(), None);
        options.path = Some("/srv/store".into());
        let store = Some(Path::new("/srv/store"));
        assert_eq!(wanted(&options, &none).unwrap(), store);
        assert_eq!(wanted(&options, &with("off")).unwrap(), None);
        options.used = Use::Off;
        assert_eq!(wanted(&options, &none).unwrap(), None);
        assert_eq!(wanted(&options, &with("true")).unwrap(), store);
        for other in ["/etc", "../x", "srv", ""] {
            let error = wanted(&options, &with(other)).unwrap_err().to_string();
            assert!(error.contains("dev.cryopod.store"), "{error}");
        }
    }

    #[test]
    fn criu_cannot_build_upon_what_is_in_a_store() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["0", "1"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        std::os::unix::fs::symlink("../0", at("1/parent")).unwrap();
        whole(at("1")).unwrap();
        assert_eq!(below(&at("none"), Path::new("../1")), at("1"));
        assert_eq!(below(&at("none"), Path::new("/x")), Path::new("/x"));
        std::fs::write(at("0").join(names::STORE_REFERENCE), "{}").unwrap();
        let error = whole(at("1")).unwrap_err().to_string();
        assert!(error.contains("leave --parent-path away"), "{error}");
    }
}
