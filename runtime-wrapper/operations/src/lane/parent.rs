//! Which checkpoint a new one builds upon: chunks of GPU memory that are in that one are not stored again.
//!
//! The annotation `dev.cryopod.parent`, else `lane.parent`, names it, or says `auto`: the newest of this container
//! beside the image folder. Without either it is the one that the engine names with `--parent-path`, or what that
//! one builds upon in turn: a pre-dump has no GPU memory.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use cryopod_archive::lane::{Digest, Lane};
use cryopod_archive::names;
use cryopod_archive::seal::Seal;
use cryopod_cuda::lane::LaneParent;
use cryopod_host::spec::Spec;

use crate::argv::Invocation;
use crate::config::Config;
use crate::error::Error;

/// The annotation that overrides `lane.parent`.
pub const ANNOTATION: &str = "dev.cryopod.parent";
/// A checkpoint that would build upon so many others is made whole instead: a restore needs all of them.
const LONGEST: usize = 64;
/// Folders beside the image folder that are looked at.
const MAX_SIBLINGS: usize = 100_000;

/// The checkpoint before this one; `None`: this one is whole.
///
/// # Errors
/// [`Error::Failed`]: it is there and cannot be used. Nothing was touched.
pub fn choose(config: &Config, spec: &Spec, inv: &Invocation) -> Result<Option<LaneParent>, Error> {
    let images = std::path::absolute(inv.image_path()).map_err(Error::io("the image folder"))?;
    let wish = spec.annotation(ANNOTATION);
    let wish = wish.or(config.lane.parent.as_deref()).map(str::trim);
    let folder = match wish {
        Some("off") => None,
        Some("auto") => newest_beside(&images, &inv.id),
        Some(path) if Path::new(path).is_absolute() => {
            let found = present(Path::new(path));
            if let (Some(_), Some(folder)) = (spec.annotation(ANNOTATION), &found) {
                let allowed = within(config, &images, folder);
                allowed.map_err(|what| {
                    Error::Failed(format!(
                        "{ANNOTATION}: {path:?} {what}. Nothing was touched"
                    ))
                })?;
            }
            found
        }
        Some(other) => {
            return Err(Error::Failed(format!(
                "{ANNOTATION}: {other:?} is not one of auto, off, and no absolute path. Nothing was touched"
            )));
        }
        None => {
            let path = inv.flags.value("parent-path").filter(|p| !p.is_empty());
            path.and_then(|path| upwards(&images.join(path)))
        }
    };
    let Some(folder) = folder else {
        return Ok(None);
    };
    let unusable = |what: String| {
        Error::Failed(format!(
            "{}: this checkpoint cannot build upon that one: {what}. Nothing was touched; {ANNOTATION}=off makes a whole one",
            folder.display()
        ))
    };
    if images
        .canonicalize()
        .is_ok_and(|images| images == folder || folder.starts_with(&images))
    {
        return Err(unusable("it is the folder that would be written".into()));
    }
    let seal = Seal::open(&folder).map_err(|e| unusable(e.to_string()))?;
    let Some(facts) = seal.and_then(|seal| seal.gpu.lane) else {
        tracing::info!(
            "{}: no GPU memory to build upon: this checkpoint is whole",
            folder.display()
        );
        return Ok(None);
    };
    let digest = facts.digest.parse::<Digest>().map_err(unusable)?;
    let lane = Lane::open_with(&folder, Some(digest), &config.search());
    let lane = lane.map_err(|e| unusable(e.to_string()))?;
    let lane = lane.ok_or_else(|| unusable(format!("{} is missing", names::LANE_INDEX)))?;
    if lane.depth() + 1 >= LONGEST {
        tracing::info!("{LONGEST} checkpoints build upon each other: this one is whole");
        return Ok(None);
    }
    Ok(Some(LaneParent {
        folder,
        digest: facts.digest,
    }))
}

/// An annotation is the word of whoever made the container: it may name a checkpoint beside the new one, or where the
/// administrator keeps them, and no other folder of the host.
fn within(config: &Config, images: &Path, folder: &Path) -> Result<(), String> {
    let beside = images.parent().and_then(|p| p.canonicalize().ok());
    let listed = config.search();
    let mut allowed = listed.iter().filter_map(|p| p.canonicalize().ok());
    if folder.parent() == beside.as_deref() || allowed.any(|root| folder.starts_with(root)) {
        return Ok(());
    }
    Err("is neither beside the image folder nor below one of lane.parents of the configuration; name such a folder, or let the administrator list its parent there".into())
}

/// A folder that is not there yet is none: the first checkpoint has no parent.
fn present(path: &Path) -> Option<PathBuf> {
    let found = path.canonicalize().ok();
    if found.is_none() {
        tracing::warn!("{}: is not there: this checkpoint is whole", path.display());
    }
    found
}

/// The newest complete checkpoint of the container in the folders beside its image folder.
fn newest_beside(images: &Path, id: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(images.parent()?).ok()?;
    let mut found: Vec<(SystemTime, PathBuf)> = entries
        .flatten()
        .take(MAX_SIBLINGS)
        .filter(|entry| entry.path() != images)
        .filter_map(|entry| {
            let seal = entry.path().join(names::SEAL);
            let made = std::fs::symlink_metadata(seal).ok()?.modified().ok()?;
            Some((made, entry.path()))
        })
        .collect();
    found.sort();
    let of_this = |path: &PathBuf| {
        Seal::open(path)
            .ok()
            .flatten()
            .is_some_and(|seal| seal.container.id == id && seal.gpu.lane.is_some())
    };
    found
        .into_iter()
        .rev()
        .map(|(_, path)| path)
        .find(of_this)
        .and_then(|path| path.canonicalize().ok())
}

/// The folder, or the first one that CRIU's links lead to from it, that has GPU memory.
fn upwards(from: &Path) -> Option<PathBuf> {
    let mut at = from.canonicalize().ok()?;
    for _ in 0..LONGEST {
        if at.join(names::LANE_INDEX).exists() {
            return Some(at);
        }
        at = at.join(names::PARENT_LINK).canonicalize().ok()?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn an_annotation_names_no_other_folder_of_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["ckpt/1", "other/1", "listed/deep/1"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        let mut config = Config::default();
        let images = at("ckpt/2");
        let of = |config: &Config, folder: &str| {
            within(config, &images, &at(folder).canonicalize().unwrap())
        };
        assert!(of(&config, "ckpt/1").is_ok());
        assert!(of(&config, "other/1").is_err());
        assert!(of(&config, "listed/deep/1").is_err());
        config.lane.parents = vec![at("listed")];
        assert!(of(&config, "listed/deep/1").is_ok());
        assert!(of(&config, "other/1").is_err());
    }

    #[test]
    fn a_pre_dump_leads_to_what_it_builds_upon() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["0", "1", "2"] {
            std::fs::create_dir(at(name)).unwrap();
        }
        assert_eq!(upwards(&at("2")), None);
        symlink("../1", at("2/parent")).unwrap();
        symlink("../0", at("1/parent")).unwrap();
        std::fs::write(at("0").join(names::LANE_INDEX), "").unwrap();
        assert_eq!(upwards(&at("2")), Some(at("0").canonicalize().unwrap()));
        symlink(".", at("0/parent")).unwrap();
        std::fs::remove_file(at("0").join(names::LANE_INDEX)).unwrap();
        assert_eq!(upwards(&at("2")), None, "and ends");
        assert_eq!(upwards(&at("missing")), None);
    }
}
