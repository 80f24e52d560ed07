//! Chooses the parent of a new checkpoint: chunks of GPU memory that the parent has are not stored again.
//!
//! The annotation `dev.cryopod.parent`, else `vram.parent`, names it, or says `auto`: the newest of this container
//! beside the image directory, and in a place the newest of its name, or a whole one of the name that begins most like
//! it: replicas of a server hold the same weights. Without either it is the one that the engine names with
//! `--parent-path`, or that one's own parent: a pre-dump has no GPU memory.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use cryopod_archive::format::names;
use cryopod_archive::metadata::Metadata;
use cryopod_archive::vram::{ChunkDigest, Vram};
use cryopod_cuda::vram::VramParent;
use cryopod_host::spec::Spec;
use nix::fcntl::Flock;

use crate::config::Config;
use crate::config::vram::check_parent;
use crate::error::Error;
use crate::images::place::{self, copies, prune};
use crate::request::argv::Invocation;

/// The annotation that overrides `vram.parent`.
pub const ANNOTATION: &str = "dev.cryopod.parent";
/// A checkpoint with so many ancestors is made whole instead: a restore needs all of them.
const LONGEST: usize = 64;
/// The most candidates of which one is to be usable.
const TRIES: usize = 4;
/// The most directories beside the image directory that are searched.
const MAX_SIBLINGS: usize = 100_000;

/// The parent of a checkpoint. As long as this is there, no newer checkpoint of its name removes it.
#[derive(Debug)]
pub struct HeldParent {
    pub parent: VramParent,
    pub lock: Option<Flock<File>>,
}

/// Returns the parent of this checkpoint; `None`: this one is whole.
///
/// # Errors
/// [`Error::Failed`]: it is named, exists and cannot be used. Nothing was touched.
pub fn choose(config: &Config, spec: &Spec, inv: &Invocation) -> Result<Option<HeldParent>, Error> {
    let images = std::path::absolute(inv.image_path()).map_err(Error::io("the image directory"))?;
    let wish = spec.annotation(ANNOTATION);
    let wish = wish.or(config.vram.parent.as_deref()).map(str::trim);
    // What is in object storage already is not sent again.
    if let Some(parent) = copies::parent_of_partial(&images) {
        let parent = parent.filter(|_| wish != Some("off"));
        return Ok(first_usable(config, &images, parent));
    }
    let directory = match wish {
        Some("off") => None,
        Some("auto") => return Ok(automatic(config, &images, &inv.id)),
        Some(path) => {
            check_parent(path).map_err(|e| Error::untouched(format!("{ANNOTATION}: {e}")))?;
            let found = present(Path::new(path));
            if let (Some(_), Some(directory)) = (spec.annotation(ANNOTATION), &found) {
                let allowed = within(config, &images, directory);
                allowed
                    .map_err(|what| Error::untouched(format!("{ANNOTATION}: {path:?} {what}")))?;
            }
            found
        }
        None => {
            let path = inv.flags.value("parent-path").filter(|p| !p.is_empty());
            path.and_then(|path| upwards(&images.join(path)))
        }
    };
    let Some(directory) = directory else {
        return Ok(None);
    };
    usable(config, &images, &directory).map_err(|what| {
        Error::untouched(format!(
            "{}: this checkpoint cannot build upon that one: {what}; {ANNOTATION}=off makes a whole one",
            directory.display()
        ))
    })
}

/// Returns the first candidate that is not damaged, if it can be used. A damaged one is skipped with a warning.
fn automatic(config: &Config, images: &Path, id: &str) -> Option<HeldParent> {
    let candidates = match place::name_of_partial(images) {
        Some((place, name)) => newest_in_place(place, name),
        None => newest_beside(images, id),
    };
    first_usable(config, images, candidates)
}

/// The same of these candidates.
fn first_usable(
    config: &Config,
    images: &Path,
    candidates: impl IntoIterator<Item = PathBuf>,
) -> Option<HeldParent> {
    for directory in candidates {
        match usable(config, images, &directory) {
            // Not the next one where this has too many ancestors: all later ones would keep them.
            Ok(held) => return held,
            Err(what) => {
                let directory = directory.display();
                tracing::warn!("{directory}: this checkpoint does not build upon that one: {what}");
            }
        }
    }
    None
}

/// Holds a parent; `None` if it has no GPU memory, is being removed, or has too many ancestors.
fn usable(config: &Config, images: &Path, directory: &Path) -> Result<Option<HeldParent>, String> {
    if images
        .canonicalize()
        .is_ok_and(|images| images == directory || directory.starts_with(&images))
    {
        return Err("it is the directory that would be written".into());
    }
    let lock = match prune::hold(directory) {
        Ok(lock) => lock,
        Err(why) => {
            tracing::info!("{why}: this checkpoint is whole");
            return Ok(None);
        }
    };
    let metadata = Metadata::open(directory).map_err(|e| e.to_string())?;
    let Some(facts) = metadata.and_then(|metadata| metadata.gpu.vram) else {
        tracing::info!(
            "{}: no GPU memory to build upon: this checkpoint is whole",
            directory.display()
        );
        return Ok(None);
    };
    let digest = facts.digest.parse::<ChunkDigest>()?;
    let parents = Vram::check(directory, Some(digest), &config.search());
    let parents = parents.map_err(|e| e.to_string())?;
    let parents = parents.ok_or_else(|| format!("{} is missing", names::VRAM_INDEX))?;
    if let Some(damaged) = parents.iter().find(|parent| place::is_damaged(parent)) {
        return Err(format!("{} is damaged", damaged.display()));
    }
    if parents.len() + 1 >= LONGEST {
        tracing::info!("{LONGEST} checkpoints build upon each other: this one is whole");
        return Ok(None);
    }
    let parent = VramParent {
        directory: directory.to_owned(),
        digest: facts.digest,
    };
    Ok(Some(HeldParent { parent, lock }))
}

/// Refuses a directory that an annotation may not name. Whoever made the container wrote the annotation: it may name a
/// checkpoint beside the new one, or where the administrator keeps them, and no other directory of the host.
fn within(config: &Config, images: &Path, directory: &Path) -> Result<(), String> {
    let beside = images.parent().and_then(|p| p.canonicalize().ok());
    let listed = config.search();
    let mut allowed = listed.iter().filter_map(|p| p.canonicalize().ok());
    if directory.parent() == beside.as_deref() || allowed.any(|root| directory.starts_with(root)) {
        return Ok(());
    }
    Err("is neither beside the image directory nor below one of vram.parents of the configuration; name such a directory, or let the administrator list its parent there".into())
}

/// Returns `None` for a missing directory: the first checkpoint has no parent.
fn present(path: &Path) -> Option<PathBuf> {
    let found = path.canonicalize().ok();
    if found.is_none() {
        tracing::warn!("{}: is not there: this checkpoint is whole", path.display());
    }
    found
}

/// Returns the complete checkpoints of the container in the directories beside its image directory, the newest first.
fn newest_beside(images: &Path, id: &str) -> Vec<PathBuf> {
    let mut found = images.parent().map(complete_in).unwrap_or_default();
    found.retain(|(_, path)| path != images);
    found.sort();
    let newest_first = found.into_iter().rev().map(|(_, path)| path);
    with_vram(newest_first, |metadata| metadata.container.id == id)
}

/// Returns the complete checkpoints of the name in the place, the newest first. If there is none, those of other names
/// that build upon no others, so that many replicas need one: the names that begin most like it first.
fn newest_in_place(place: &Path, name: &str) -> Vec<PathBuf> {
    let mut own = complete_in(&place.join(name));
    own.sort();
    let own = with_vram(own.into_iter().rev().map(|(_, path)| path), |_| true);
    if !own.is_empty() {
        return own;
    }
    let entries = std::fs::read_dir(place).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .take(MAX_SIBLINGS)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| {
            let other = entry.file_name();
            let common = place::common_beginning(name, other.to_str()?)?;
            Some((common, entry.path()))
        })
        .flat_map(|(common, directory)| {
            let complete = complete_in(&directory).into_iter();
            complete.map(move |(made, path)| (common, made, path))
        })
        .take(MAX_SIBLINGS)
        .collect();
    found.sort();
    let best_first = found.into_iter().rev().map(|(_, _, path)| path);
    let is_whole = |metadata: &Metadata| {
        let vram = metadata.gpu.vram.as_ref();
        vram.is_some_and(|vram| vram.parent_digest.is_none())
    };
    with_vram(best_first, is_whole)
}

/// Returns the complete checkpoints in a directory, and when each was written.
fn complete_in(directory: &Path) -> Vec<(SystemTime, PathBuf)> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .take(MAX_SIBLINGS)
        // What is not complete begins so, too.
        .filter(|entry| !entry.file_name().as_encoded_bytes().starts_with(b"."))
        .filter(|entry| !place::is_damaged(&entry.path()))
        .filter_map(|entry| {
            let metadata = entry.path().join(names::METADATA);
            let made = std::fs::symlink_metadata(metadata).ok()?.modified().ok()?;
            Some((made, entry.path()))
        })
        .collect()
}

/// Returns as many of them as are tried.
fn with_vram(
    candidates: impl Iterator<Item = PathBuf>,
    fits: impl Fn(&Metadata) -> bool,
) -> Vec<PathBuf> {
    let has_vram = |path: &PathBuf| {
        let metadata = Metadata::open(path).ok().flatten();
        metadata.is_some_and(|metadata| metadata.gpu.vram.is_some() && fits(&metadata))
    };
    let found = candidates.filter(has_vram).take(TRIES);
    found.filter_map(|path| path.canonicalize().ok()).collect()
}

/// Returns the directory, or the first one along CRIU's links from it, that has GPU memory.
fn upwards(from: &Path) -> Option<PathBuf> {
    let mut at = from.canonicalize().ok()?;
    for _ in 0..LONGEST {
        if at.join(names::VRAM_INDEX).exists() {
            return Some(at);
        }
        at = at.join(names::PARENT_LINK).canonicalize().ok()?;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_archive::metadata::MetadataSlot;
    use cryopod_archive::vram::{self, VramFacts};
    use serde_json::json;
    use std::os::unix::fs::symlink;

    #[test]
    fn an_annotation_names_no_other_directory_of_the_host() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["ckpt/1", "other/1", "listed/deep/1"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        let mut config = Config::default();
        let images = at("ckpt/2");
        let of = |config: &Config, directory: &str| {
            within(config, &images, &at(directory).canonicalize().unwrap())
        };
        assert!(of(&config, "ckpt/1").is_ok());
        assert!(of(&config, "other/1").is_err());
        assert!(of(&config, "listed/deep/1").is_err());
        config.vram.parents = vec![at("listed")];
        assert!(of(&config, "listed/deep/1").is_ok());
        assert!(of(&config, "other/1").is_err());
    }

    #[test]
    fn a_place_gives_the_newest_of_the_name_or_a_whole_one_of_the_name_most_like_it() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().canonicalize().unwrap();
        let facts: VramFacts = serde_json::from_value(json!({
            "digest": "", "bytes": 0, "stored_bytes": 0, "chunk_bytes": 0, "shards": 0, "chunks": 0, "zero": 0,
            "raw": 0, "lz4": 0, "zstd": 0, "same": 0, "parent": 0,
        }))
        .unwrap();
        let make = |path: &str, age: u64, vram: bool| {
            let path = place.join(path);
            std::fs::create_dir_all(&path).unwrap();
            let mut metadata = Metadata {
                schema: Metadata::current_schema(),
                ..Metadata::default()
            };
            metadata.gpu.vram = vram.then(|| facts.clone());
            MetadataSlot::reserve(&path)
                .unwrap()
                .commit(&metadata)
                .unwrap();
            let file = File::options().write(true).open(path.join(names::METADATA));
            let made = SystemTime::now() - std::time::Duration::from_secs(age);
            file.unwrap().set_modified(made).unwrap();
        };
        let parent_of = |name: &str| {
            let images = place.join(name).join(".partial-000009");
            let (directory, name) = place::name_of_partial(&images).unwrap();
            let found = newest_in_place(directory, name).into_iter();
            let found = found.map(|path| path.strip_prefix(&place).unwrap().to_owned());
            let texts = found.map(|path| path.into_os_string().into_string().unwrap());
            texts.collect::<Vec<String>>()
        };
        assert!(parent_of("web-1").is_empty());
        make("worker/000001", 0, true);
        make("web-10/000001", 50, true);
        make("web-2/000001", 60, true);
        assert_eq!(parent_of("web-3"), ["web-10/000001", "web-2/000001"]);
        assert_eq!(parent_of("web-20"), ["web-2/000001", "web-10/000001"]);
        make("web-1/000001", 90, true);
        make("web-1/000002", 80, true);
        make("web-1/000003", 10, false);
        make("web-1/.damaged-000004", 5, true);
        make("web-1/.partial-000005", 5, true);
        assert_eq!(parent_of("web-1"), ["web-1/000002", "web-1/000001"]);
        std::fs::write(place.join("web-1/000002/.damaged"), "").unwrap();
        assert_eq!(parent_of("web-1"), ["web-1/000001"], "others need it still");
        assert_eq!(place::name_of_partial(&place.join("web-1/000002")), None);
    }

    #[test]
    fn a_chain_ends_and_the_next_builds_upon_its_successor() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().canonicalize().unwrap();
        let never = std::sync::atomic::AtomicBool::new(false);
        let options = vram::WriteOptions {
            chunk_bytes: vram::MIN_CHUNK,
            threads: 1,
            sync: false,
            ..vram::WriteOptions::default()
        };
        let mut whole = Vec::new();
        for number in 1..=LONGEST + 2 {
            let images = place.join("job/.partial-1");
            std::fs::create_dir_all(&images).unwrap();
            let parent = automatic(&Config::default(), &images, "job").map(|held| held.parent);
            let parent = parent.map(|parent| Vram::open(&parent.directory, None).unwrap().unwrap());
            let source = vram::MemorySource {
                id: "gpu",
                bytes: &[7; 4096],
            };
            let written = vram::write(&images, &[source], &options, parent.as_ref(), &never);
            let mut metadata = Metadata {
                schema: Metadata::current_schema(),
                ..Metadata::default()
            };
            metadata.gpu.vram = Some(written.unwrap().facts);
            let slot = MetadataSlot::reserve(&images).unwrap();
            slot.commit(&metadata).unwrap();
            std::fs::rename(&images, place.join(format!("job/{number:06}"))).unwrap();
            if parent.is_none() {
                whole.push(number);
            }
        }
        assert_eq!(whole, [1, LONGEST + 1]);
        let images = place.join("job/.partial-1");
        let parent = || automatic(&Config::default(), &images, "job").map(|held| held.parent);
        let newest = place.join(format!("job/{:06}", LONGEST + 2));
        assert_eq!(parent().unwrap().directory, newest);
        let damaged = place.join(format!("job/{:06}/.damaged", LONGEST + 1));
        std::fs::write(damaged, "").unwrap();
        assert!(parent().is_none(), "the newest builds upon a damaged one");
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
        std::fs::write(at("0").join(names::VRAM_INDEX), "").unwrap();
        assert_eq!(upwards(&at("2")), Some(at("0").canonicalize().unwrap()));
        symlink(".", at("0/parent")).unwrap();
        std::fs::remove_file(at("0").join(names::VRAM_INDEX)).unwrap();
        assert_eq!(upwards(&at("2")), None, "and ends");
        assert_eq!(upwards(&at("missing")), None);
    }
}
