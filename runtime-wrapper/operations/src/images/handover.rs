//! Hands large image files directly from cryopod to the runtime and back, so that they need not go through an engine's
//! tar.
//!
//! podman writes an export file with one thread, and reads it twice at an import. For the memory of a GPU container
//! that is a waste: `cryopod export` and `import` run beside podman on the same host, and podman calls cryopod's
//! runtime. So the large files lie in a store of their own ([`names::HANDOVER`]), on the same file system:
//!
//! - **Export.** `cryopod export` creates it beside the image directory, and locks it. After a checkpoint the runtime
//!   puts the large files into it. It does not if nobody holds the lock, because then nobody would fetch them. `export`
//!   packs podman's file and the entry, and then puts the files back. If an export is killed, the next checkpoint,
//!   export or restore puts them back first.
//! - **Import.** `cryopod import` unpacks an archive, puts the large files into it, and gives podman a file of the rest. A
//!   link in [`DESK`] with the entry's random name leads to it. Archives come from strangers, but a reference alone
//!   gives no access: only root writes links there, and nobody can guess a name, and each is good once. What else
//!   `import` was asked for, the GPU map ([`MAP`]), is in the entry, and so has root's word, too. So has the list of the
//!   shards that stay in the archive ([`names::VRAM_PLACES`]).

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use cryopod_archive::format::names;
use cryopod_archive::store::{About, Reference, StoreError, find, gather, put};
use cryopod_archive::vram::usual_threads;
use cryopod_host::files::{if_there, own_directory, read_bounded};

/// The directory of the links to entries.
pub const DESK: &str = "/run/cryopod/away";
/// The file in an entry with the GPU map of this one restore.
const MAP: &str = "cryopod-gpu-map";
const MAX_MAP: u64 = 64 << 10;

/// A request for the large files of the next checkpoint, valid until it is dropped or its process ends.
#[derive(Debug)]
pub struct ExportRequest {
    images: PathBuf,
    store: PathBuf,
    _lock: Flock<File>,
}

impl ExportRequest {
    /// Asks the runtime for the large files of the next checkpoint. First puts back what a killed process left.
    ///
    /// # Errors
    /// [`StoreError::Io`] of `WouldBlock` if another process has asked for the same.
    pub fn new(images: &Path) -> Result<Self, StoreError> {
        let images = std::path::absolute(images).map_err(StoreError::io(images, "find it"))?;
        let store = images.with_file_name(names::HANDOVER);
        let busy = || {
            StoreError::io(
                &store,
                "lock it: another export of this container is running",
            )
        };
        for _ in 0..100 {
            make(&store)?;
            // In between, a runtime may remove the directory, because nobody has locked it.
            let lock = lock(&store)?.ok_or_else(|| busy()(io::ErrorKind::WouldBlock.into()))?;
            let (Ok(ours), Ok(there)) = (lock.metadata(), fs::symlink_metadata(&store)) else {
                continue;
            };
            if (ours.dev(), ours.ino()) == (there.dev(), there.ino()) {
                put_back(&images, &store)?;
                return Ok(Self {
                    images,
                    store,
                    _lock: lock,
                });
            }
        }
        Err(busy()(io::ErrorKind::WouldBlock.into()))
    }

    /// The store that the runtime will put the files into.
    pub fn store(&self) -> &Path {
        &self.store
    }
}

impl Drop for ExportRequest {
    fn drop(&mut self) {
        let done = put_back(&self.images, &self.store).and_then(|()| remove(&self.store));
        if let Err(error) = done {
            tracing::error!(
                "{error}; the files of the checkpoint that are there belong into its directory"
            );
        }
    }
}

/// Makes a directory that nobody else can write to.
fn make(directory: &Path) -> Result<(), StoreError> {
    let mut new = DirBuilder::new();
    let made = new.recursive(true).mode(0o700).create(directory);
    made.map_err(StoreError::io(directory, "make it"))?;
    if own_directory(directory) {
        return Ok(());
    }
    Err(StoreError::Unusable {
        path: directory.into(),
        reason: "it is not a directory of this user's alone".into(),
    })
}

/// Locks a directory; `None` if another process holds the lock.
fn lock(directory: &Path) -> Result<Option<Flock<File>>, StoreError> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW | libc::O_CLOEXEC)
        .open(directory)
        .map_err(StoreError::io(directory, "open it"))?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(None),
        Err((_, e)) => Err(StoreError::io(directory, "lock it")(e.into())),
    }
}

/// Returns the store beside an image directory, if there is one.
fn beside(images: &Path) -> Option<PathBuf> {
    let store = std::path::absolute(images).ok()?;
    Some(store.with_file_name(names::HANDOVER)).filter(|p| own_directory(p))
}

/// Returns the store in which `cryopod export` wants the large files of this image directory, if it does.
pub fn asked(images: &Path) -> Option<PathBuf> {
    beside(images).filter(|store| matches!(lock(store), Ok(None)))
}

/// Puts the large files into a store for handing over. The entry is the store's only one.
pub fn put_into(store: &Path, images: &Path) -> Result<Reference, StoreError> {
    let about = About {
        container: "",
        created: "",
        threads: usual_threads(),
        until: None,
        origin: None,
        handed: true,
    };
    // There is an entry even if it has no files.
    put(images, store, &about)?.ok_or_else(|| StoreError::Over { path: store.into() })
}

/// Puts the files of an image directory's own entry back.
fn put_back(images: &Path, store: &Path) -> Result<(), StoreError> {
    match find(images, &[store.to_owned()]) {
        Ok(Some(found)) => gather(images, &found, usual_threads()),
        // It refers to another store, or the entry was handed to somebody else.
        Ok(None) | Err(StoreError::Missing { .. } | StoreError::Over { .. }) => Ok(()),
        Err(e) => Err(e),
    }
}

fn remove(store: &Path) -> Result<(), StoreError> {
    let removed = if_there(fs::remove_dir_all(store)).map(drop);
    removed.map_err(StoreError::io(store, "remove it"))
}

/// Call before a checkpoint. Puts back what a killed export left: it belongs to the checkpoint that this one may
/// replace.
pub fn before_checkpoint(images: &Path) -> Result<(), StoreError> {
    let Some(store) = beside(images) else {
        return Ok(());
    };
    match lock(&store)? {
        Some(_nobody) => put_back(images, &store).and_then(|()| remove(&store)),
        None => Ok(()),
    }
}

/// What `cryopod import` hands to one restore.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct ImportGrant {
    pub map: Option<String>,
    /// The directory with the list of the shards that stay in the archive.
    pub places: Option<PathBuf>,
    /// The store with the entry.
    pub store: Option<PathBuf>,
}

/// Call before a restore. Puts back what a killed export left. Takes what `cryopod import` hands to this restore.
pub fn before_restore(images: &Path) -> Result<ImportGrant, StoreError> {
    if let Some(store) = beside(images) {
        put_back(images, &store)?;
        remove(&store)?;
    }
    redeem(images, Path::new(DESK))
}

fn redeem(images: &Path, desk: &Path) -> Result<ImportGrant, StoreError> {
    let Some(reference) = Reference::open(images)?.filter(|r| r.handed) else {
        return Ok(ImportGrant::default());
    };
    let link = desk.join(&reference.id);
    let entry = fs::read_link(&link).ok().filter(|_| own_directory(desk));
    let Some(entry) = entry else {
        return Ok(ImportGrant::default());
    };
    fs::remove_file(&link).map_err(StoreError::io(&link, "remove it"))?;
    let path = entry.join(MAP);
    let map = match read_bounded(&path, MAX_MAP) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => None,
        text => Some(text.and_then(|t| String::from_utf8(t).map_err(io::Error::other))),
    };
    Ok(ImportGrant {
        map: map.transpose().map_err(StoreError::io(&path, "read it"))?,
        store: entry.parent().map(Path::to_owned),
        places: entry.join(names::VRAM_PLACES).is_file().then_some(entry),
    })
}

/// The large files of an image directory, for one restore. Dropping it revokes that.
#[derive(Debug)]
pub struct Ticket {
    link: PathBuf,
    /// The entry.
    pub entry: PathBuf,
}

impl Ticket {
    /// Moves the large files of an image directory into a store in a directory on the same file system. The runtime
    /// finds them by what it returns.
    pub fn issue(images: &Path, directory: &Path) -> Result<Self, StoreError> {
        Self::issue_at(Path::new(DESK), images, directory)
    }

    fn issue_at(desk: &Path, images: &Path, directory: &Path) -> Result<Self, StoreError> {
        make(desk)?;
        let store = std::path::absolute(directory.join(names::HANDOVER))
            .map_err(StoreError::io(directory, "find it"))?;
        make(&store)?;
        let id = put_into(&store, images)?.id;
        let (link, entry) = (desk.join(&id), store.join(&id));
        std::os::unix::fs::symlink(&entry, &link).map_err(StoreError::io(&link, "make it"))?;
        Ok(Self { link, entry })
    }

    /// Asks for a GPU map for this restore.
    pub fn ask_for_map(&self, map: &str) -> Result<(), StoreError> {
        let path = self.entry.join(MAP);
        fs::write(&path, map).map_err(StoreError::io(&path, "write it"))
    }

    /// Whether a runtime has taken what it stands for.
    pub fn is_redeemed(&self) -> bool {
        fs::symlink_metadata(&self.link).is_err()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.link);
    }
}

/// Removes the links that lead below a directory that is given up because its owner was killed.
pub fn revoke(directory: &Path) {
    revoke_at(Path::new(DESK), directory);
}

fn revoke_at(desk: &Path, directory: &Path) {
    for item in fs::read_dir(desk).into_iter().flatten().flatten() {
        if fs::read_link(item.path()).is_ok_and(|to| to.starts_with(directory)) {
            let _ = fs::remove_file(item.path());
        }
    }
}

#[cfg(test)]
mod tests;
