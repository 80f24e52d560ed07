//! Finds what refers to the entries of a store: image directories, and the tars in containerd's content store.
//!
//! A new checkpoint moves: containerd's image directory, its content store, the engine's directory. Each has the reference
//! before the one before loses it. So a search in that order cannot miss it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use cryopod_host::containerd::is_image_directory;
use cryopod_host::destinations::clean;
use cryopod_host::processes::{named_by_a_process, opened_by_a_process};

use super::list::StoreEntry;
use super::origin::Origin;
use super::{MAX_BYTES, Reference, StoreError};
use crate::format::names;

const BLOCK: u64 = 512;
/// Most entries of a tar that are looked at.
const MAX_ENTRIES: usize = 1_000_000;
/// Most directories below one directory. A search that finds more ends with an error.
const MAX_DIRECTORIES: usize = 1_000_000;
/// docker has its checkpoints at `containers/ID/checkpoints/NAME`.
const DEPTH: usize = 4;
/// Longest time that a checkpoint passes through one of containerd's image directories.
const PASSING: Duration = Duration::from_secs(24 * 3600);

/// Where docker and containerd usually are. A checkpoint may come from one and be given to the other.
pub(super) const DOCKER: &str = "/var/lib/docker/containers";
const CONTENT: &str = "/var/lib/containerd/io.containerd.content.v1.content";

/// The places that refer to entries, by the entry's id.
#[derive(Debug, Default)]
pub struct Holders(BTreeMap<String, BTreeSet<Holder>>);

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Holder {
    /// The image directory, or the blob.
    pub path: PathBuf,
    /// The directory that was searched.
    pub below: PathBuf,
    /// Not where the checkpoint stays.
    pub passing: bool,
}

impl Holders {
    /// Searches the places that the entries' records name and the usual ones, then `others`.
    pub fn find(entries: &[StoreEntry], others: &[PathBuf]) -> Result<Self, StoreError> {
        let records = || entries.iter().filter_map(|e| e.origin.as_ref());
        let places = |of: fn(&Origin) -> Option<&PathBuf>| -> BTreeSet<&PathBuf> {
            records().filter_map(of).collect()
        };
        let mut found = Self::default();
        for directory in places(|o| o.temporary.as_ref()) {
            for path in listed(directory)? {
                // In /tmp anybody may make such a directory, and hold what is in the store, or make the search fail.
                if is_image_directory(&path) && is_own(&path) && !forgotten(&path) {
                    found.add(&path, directory, true)?;
                }
            }
        }
        let contents = places(|o| Some(&o.content.as_ref()?.path)).into_iter();
        let usual = PathBuf::from(CONTENT);
        for content in contents.chain([&usual]).collect::<BTreeSet<_>>() {
            for path in listed(&content.join("blobs/sha256"))? {
                found.blob(&path, content)?;
            }
        }
        // Containers have mounts below docker's directory, with files of their own.
        let own = places(|o| Some(&o.directory.as_ref()?.path)).into_iter();
        let usual = PathBuf::from(DOCKER);
        let own: BTreeSet<_> = own.chain([&usual]).filter(|d| d.is_dir()).collect();
        let own = own.into_iter().map(|d| (d, device(d)));
        let others_real: Vec<PathBuf> = others
            .iter()
            .filter_map(|d| d.canonicalize().ok())
            .collect();
        for (directory, device) in own.chain(others.iter().map(|d| (d, None))) {
            let mut walk = HolderWalk {
                root: directory,
                device,
                searched: &others_real,
                left: MAX_DIRECTORIES,
            };
            found.below(
                directory,
                device.map_or(MAX_DIRECTORIES, |_| DEPTH),
                &mut walk,
            )?;
        }
        Ok(found)
    }

    /// Returns what refers to an entry.
    pub fn of(&self, entry: &StoreEntry) -> impl Iterator<Item = &Holder> {
        self.0.get(&entry.reference.id).into_iter().flatten()
    }

    fn below(
        &mut self,
        directory: &Path,
        depth: usize,
        walk: &mut HolderWalk<'_>,
    ) -> Result<(), StoreError> {
        self.add(directory, walk.root, false)?;
        if depth == 0 {
            return Ok(());
        }
        for path in listed(directory)? {
            let about = match path.symlink_metadata() {
                Err(e) if gone(&e) || walk.device.is_some() => continue,
                about => about.map_err(StoreError::io(&path, "search it"))?,
            };
            match walk.device {
                None if about.is_symlink() => walk.check_link(&path)?,
                Some(device) if device != about.dev() => continue,
                _ => {}
            }
            if !about.is_dir() {
                continue;
            }
            let left = walk.left.checked_sub(1);
            walk.left = left.ok_or_else(|| too_many(walk.root))?;
            self.below(&path, depth - 1, walk)?;
        }
        Ok(())
    }

    fn add(&mut self, images: &Path, below: &Path, passing: bool) -> Result<(), StoreError> {
        match Reference::open(images) {
            Ok(Some(reference)) => self.insert(reference, images, below, passing),
            // Nobody can restore from a reference that cannot be read.
            Ok(None) | Err(StoreError::Reference { .. } | StoreError::Version { .. }) => {}
            Err(StoreError::Io { source, .. }) if gone(&source) => {}
            Err(e) => return Err(e),
        }
        Ok(())
    }

    fn insert(&mut self, reference: Reference, path: &Path, below: &Path, passing: bool) {
        let holder = Holder {
            path: path.to_owned(),
            below: below.to_owned(),
            passing,
        };
        self.0.entry(reference.id).or_default().insert(holder);
    }

    /// Looks for a reference in a blob, if that is a tar that is not compressed, as containerd's checkpoints are.
    fn blob(&mut self, path: &Path, content: &Path) -> Result<(), StoreError> {
        let read = || -> io::Result<Option<Vec<u8>>> {
            let file = match File::open(path) {
                Err(e) if gone(&e) => return Ok(None),
                other => other?,
            };
            if !file.metadata()?.is_file() {
                return Ok(None);
            }
            reference_in(&file)
        };
        let text = read().map_err(StoreError::io(path, "read it"))?;
        if let Some(reference) = text.and_then(|text| Reference::parse(&text, path).ok()) {
            self.insert(reference, path, content, true);
        }
        Ok(())
    }
}

struct HolderWalk<'a> {
    root: &'a Path,
    /// Stay on this device, in docker's depth.
    device: Option<u64>,
    /// All places that are searched wholly.
    searched: &'a [PathBuf],
    left: usize,
}

impl HolderWalk<'_> {
    /// Refuses a link to a directory, or to nothing, that is not searched by itself.
    fn check_link(&self, path: &Path) -> Result<(), StoreError> {
        // What a checkpoint builds upon is another checkpoint, with a place of its own.
        if path.ends_with(names::PARENT_LINK) {
            return Ok(());
        }
        let target = || -> io::Result<Option<PathBuf>> {
            match path.canonicalize() {
                Ok(real) => Ok(Some(real).filter(|real| real.is_dir())),
                // Perhaps of a disk that is not mounted now.
                Err(e) if gone(&e) => {
                    let parent = path.parent().unwrap_or(path).canonicalize()?;
                    Ok(Some(clean(&parent.join(fs::read_link(path)?))))
                }
                Err(e) => Err(e),
            }
        };
        let searched = |real: &Path| self.searched.iter().any(|place| real.starts_with(place));
        match target() {
            Err(e) if !gone(&e) => Err(e),
            Ok(Some(real)) if !searched(&real) => Err(io::Error::other(
                "a link to where a checkpoint may need an entry; name that directory under store.used_in, or remove the link",
            )),
            _ => Ok(()),
        }
        .map_err(StoreError::io(path, "search it"))
    }
}

fn device(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().map(|m| m.dev())
}

/// Returns true for an image directory that nobody works with any more: a killed containerd leaves it, and the stock shim
/// that of each restore. Not one that is all that is left of a container.
fn forgotten(path: &Path) -> bool {
    if path.join(names::ONLY_COPY).exists() {
        return false;
    }
    let made = path.symlink_metadata().and_then(|m| m.modified());
    // A clock that was set, or a machine that was suspended, ages what is in use.
    made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > PASSING))
        && !named_by_a_process(path.as_os_str().as_bytes())
        && !opened_by_a_process(path)
}

/// Whether it is a directory of this user's.
fn is_own(path: &Path) -> bool {
    let own = |m: fs::Metadata| m.is_dir() && m.uid() == nix::unistd::geteuid().as_raw();
    path.symlink_metadata().is_ok_and(own)
}

/// Removes the forgotten image directories with checkpoints of ours.
pub(super) fn remove_forgotten(entries: &[StoreEntry]) -> Result<(), StoreError> {
    let places = entries
        .iter()
        .filter_map(|e| e.origin.as_ref()?.temporary.as_ref());
    for directory in places.collect::<BTreeSet<_>>() {
        for path in listed(directory)? {
            let closed = |m: fs::Metadata| m.mode() & 0o077 == 0;
            let ours = [names::METADATA, names::STORE_REFERENCE];
            if is_image_directory(&path)
                && forgotten(&path)
                && is_own(&path)
                && path.symlink_metadata().is_ok_and(closed)
                && ours.iter().any(|name| path.join(name).exists())
            {
                let removed = fs::remove_dir_all(&path);
                tracing::info!("{}: left by containerd: {removed:?}", path.display());
            }
        }
    }
    Ok(())
}

fn too_many(path: &Path) -> StoreError {
    StoreError::io(path, "search it")(io::Error::other("too many directories"))
}

/// What was removed meanwhile refers to nothing.
fn gone(e: &io::Error) -> bool {
    let codes = [libc::ENOENT, libc::ENOTDIR, libc::ELOOP];
    e.raw_os_error().is_some_and(|code| codes.contains(&code))
}

/// The paths in a directory; none if there is no such directory.
fn listed(directory: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let list = || -> io::Result<Vec<PathBuf>> {
        let entries = match fs::read_dir(directory) {
            Err(e) if gone(&e) => return Ok(Vec::new()),
            other => other?,
        };
        entries.map(|entry| Ok(entry?.path())).collect()
    };
    list().map_err(StoreError::io(directory, "list it"))
}

/// Reads the reference in a tar, by its headers alone. Whatever is no tar has none.
fn reference_in(file: &File) -> io::Result<Option<Vec<u8>>> {
    let mut at = 0u64;
    let mut header = tar::Header::new_old();
    for _ in 0..MAX_ENTRIES {
        match file.read_exact_at(header.as_mut_bytes(), at) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            other => other?,
        }
        let sum: u32 = header.as_bytes().iter().enumerate().fold(0, |sum, (i, b)| {
            let byte = if (148..156).contains(&i) { b' ' } else { *b };
            sum + u32::from(byte)
        });
        let (Ok(stated), Ok(size)) = (header.cksum(), header.entry_size()) else {
            return Ok(None);
        };
        if stated != sum {
            return Ok(None);
        }
        at += BLOCK;
        let name = header.path_bytes();
        let name = name.strip_prefix(b"./").unwrap_or(&name);
        if name == names::STORE_REFERENCE.as_bytes() && size <= MAX_BYTES {
            let mut text = vec![0; usize::try_from(size).unwrap_or_default()];
            file.read_exact_at(&mut text, at)?;
            return Ok(Some(text));
        }
        let Some(next) = size
            .checked_next_multiple_of(BLOCK)
            .and_then(|n| at.checked_add(n))
        else {
            return Ok(None);
        };
        at = next;
    }
    // An image's layer, made to be like this: a checkpoint has some hundred files.
    Ok(None)
}
