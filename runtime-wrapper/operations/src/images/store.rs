//! Moves a checkpoint's large files to a store, and finds them for a restore.
//!
//! Only the host's configuration names a store. A container or an archive says whether a store is used, and which
//! entry, but never where.

use std::fs::DirBuilder;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use cryopod_archive::format::names;
use cryopod_archive::metadata::Metadata;
use cryopod_archive::store::{self, About, Found, Reference, StoreError};
use cryopod_archive::vram::usual_threads;
use cryopod_host::spec::Spec;

use crate::config::Config;
use crate::config::restore::Rule;
use crate::config::store::{DEFAULT, StoreOptions, Use};
use crate::error::Error;
use crate::images::handover;
use crate::request::Request;

mod cleaning;
mod origin;

pub use cleaning::Cleaning;

/// The annotation that overrides `store.use`.
pub const ANNOTATION: &str = "dev.cryopod.store";
/// Longest chain of CRIU checkpoints that is followed.
const LONGEST: usize = 64;

/// Returns true if this container's checkpoint goes to the store.
pub fn wanted(options: &StoreOptions, spec: &Spec, images: &Path) -> Result<bool, Error> {
    let asked = spec.switch(ANNOTATION).map_err(|e| {
        Error::untouched(format!("{e}; the directory is the configuration's to name"))
    })?;
    Ok(asked.unwrap_or_else(|| match options.used() {
        Use::On => true,
        Use::Off => false,
        Use::Auto => origin::is_packed(spec, images),
    }))
}

/// Checks that the images that a dump builds upon lie where CRIU's own link leads.
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
            return Err(Error::untouched(format!(
                "{}: the memory of this checkpoint is in a store, and CRIU finds what another builds upon only beside it; leave --parent-path away (GPU memory can still build upon it: dev.cryopod.parent), or set {ANNOTATION}=off for containers whose checkpoints build upon each other",
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
pub fn put(request: &Request<'_>, images: &Path, metadata: &Metadata, limit: Duration) {
    let directory = request.config().store.path();
    if directory == Path::new(DEFAULT)
        && let Err(e) = make(directory)
    {
        tracing::warn!(
            "the large files stay in {}: the store {} cannot be made: {e}",
            images.display(),
            directory.display()
        );
        return;
    }
    let origin = origin::of(request);
    let about = About {
        container: &metadata.container.id,
        created: &metadata.created,
        threads: usual_threads(),
        until: Instant::now().checked_add(limit),
        origin: origin.as_ref(),
        handed: false,
    };
    told(images, directory, store::put(images, directory, &about));
}

/// Hands the checkpoint's large files to `cryopod export`. On failure they stay where they are, as for [`put`].
pub fn hand_over(images: &Path, to: &Path) {
    told(images, to, handover::put_into(to, images).map(Some));
}

fn told(images: &Path, directory: &Path, done: Result<Option<Reference>, StoreError>) {
    match done {
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

/// Makes the store, if it is missing.
pub fn make(store: &Path) -> std::io::Result<()> {
    if let Some(above) = store.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(above)?;
    }
    match DirBuilder::new().mode(0o700).create(store) {
        Err(e) if e.kind() != ErrorKind::AlreadyExists => Err(e),
        _ => Ok(()),
    }
}

/// Removes the entries of this host's own store that nothing refers to. Returns what was removed.
///
/// # Errors
/// [`Error::Failed`]: a place that may refer to entries cannot be searched. Nothing was removed.
pub fn clean(config: &Config) -> Result<Vec<Reference>, Error> {
    let store = config.store.path();
    if !config.store.cleans() || !store.exists() {
        return Ok(Vec::new());
    }
    let failed =
        |e: String| Error::Failed(format!("{}: nothing was removed: {e}", store.display()));
    let places = places(config).map_err(&failed)?;
    store::clean(store, &places, &config.store.used_in, config.store.grace())
        .map_err(|e| failed(e.to_string()))
}

/// The directories of the configuration with checkpoints that may need an entry.
pub fn places(config: &Config) -> Result<Vec<PathBuf>, String> {
    let allowed = config.restore.allow.iter().filter_map(Rule::directory);
    let parents = config.vram.parents.iter().map(PathBuf::as_path);
    let used_in = config.store.used_in.iter().map(PathBuf::as_path);
    let mut all: Vec<PathBuf> = Vec::new();
    for place in allowed.chain(parents).chain(used_in) {
        if !place.is_dir() {
            return Err(format!(
                "{} is not there, and checkpoints in it may need an entry",
                place.display()
            ));
        }
        all.push(place.to_owned());
    }
    all.extend(Some(config.cache.path.clone()).filter(|p| p.is_dir()));
    Ok(all)
}

/// Finds an image directory's entry in a configured store, or in the one that `cryopod import` hands over; `None`: it has
/// none. On error nothing was started.
pub fn find(
    config: &Config,
    id: &str,
    images: &Path,
    handed: Option<&Path>,
) -> Result<Option<Found>, Error> {
    let parent = images.join(names::PARENT_LINK);
    if parent.exists() {
        whole(parent)?;
    }
    let mut stores = config.store.directories();
    stores.extend(handed.map(Path::to_owned));
    store::find(images, &stores).map_err(|e| refused(id, &e.to_string()))
}

/// Returns the error for an image directory whose large files are in a store and whose metadata is missing.
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
        let images = Path::new("/srv/images");
        let asked = |options: &StoreOptions, spec: &Spec| wanted(options, spec, images).unwrap();
        let mut options = StoreOptions::default();
        assert!(!asked(&options, &none));
        assert!(asked(&options, &with("on")));
        assert_eq!(options.path(), Path::new(DEFAULT));
        options.path = Some("/srv/store".into());
        assert_eq!(options.path(), Path::new("/srv/store"));
        assert!(asked(&options, &none));
        assert!(!asked(&options, &with("off")));
        options.used = Some(Use::Off);
        assert!(!asked(&options, &none));
        assert!(asked(&options, &with("true")));
        for other in ["/etc", "../x", "srv", ""] {
            let error = wanted(&options, &with(other), images).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("dev.cryopod.store"), "{error}");
        }
    }

    #[test]
    fn where_an_engine_packs_by_itself_the_store_is_on() {
        let images = Path::new("/tmp/ctrd-checkpoint1234");
        let cri = json!({"annotations": {"io.kubernetes.cri.container-type": "container"}});
        let (cri, other) = (Spec::from_json(cri), Spec::from_json(json!({})));
        let mut options = StoreOptions::default();
        assert!(wanted(&options, &other, images).unwrap());
        assert!(!wanted(&options, &cri, images).unwrap());
        assert!(!wanted(&options, &other, Path::new("/tmp/x")).unwrap());
        options.used = Some(Use::Off);
        assert!(!wanted(&options, &other, images).unwrap());
        options.used = Some(Use::On);
        assert!(wanted(&options, &cri, images).unwrap());
    }

    #[test]
    fn a_place_that_is_not_there_stops_the_clean_up() {
        let dir = tempfile::tempdir().unwrap();
        let mut config = Config::default();
        config.store.path = Some(dir.path().to_owned());
        config.store.used_in = vec![dir.path().join("mounted")];
        assert_eq!(clean(&config).unwrap(), [], "a named store may be shared");
        config.store.clean = Some(true);
        let error = clean(&config).unwrap_err().to_string();
        assert!(error.contains("mounted is not there"), "{error}");
        std::fs::create_dir(dir.path().join("mounted")).unwrap();
        assert_eq!(clean(&config).unwrap(), []);
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
