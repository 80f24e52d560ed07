//! Moves the files of an image directory to a store.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Instant;

use super::clean::sweep_shared;
use super::find::{each, hash};
use super::origin::Origin;
use super::{DIGITS, MAX_FILES, Reference, StoreError, Stored, VERSION};
use crate::bytes::stream::open_regular;
use cryopod_host::files::{create_private, own_directory, replace, sync_directory, write_private};

use crate::bytes::staging::Staging;
use crate::bytes::write_back::WriteBack;
use crate::format::names;

/// Facts that a reference records for people.
#[derive(Debug, Clone, Copy)]
pub struct About<'a> {
    pub container: &'a str,
    /// RFC 3339.
    pub created: &'a str,
    pub threads: usize,
    pub until: Option<Instant>,
    /// Where the engine keeps the reference; `None`: nobody knows.
    pub origin: Option<&'a Origin>,
    /// [`Reference::handed`]. Then there is an entry even if there are no large files.
    pub handed: bool,
}

/// Moves the large files of a complete checkpoint into a new entry of a store, and leaves a reference. Returns `None`
/// if the checkpoint has no large files.
///
/// At any time, even if the process is killed, the image directory has either all of its files or the reference to an
/// entry with them. On one file system nothing is copied. After a [`StoreError`] the image directory is unchanged.
pub fn put(
    images: &Path,
    store: &Path,
    about: &About<'_>,
) -> Result<Option<Reference>, StoreError> {
    let mut files = large(images)?;
    if files.is_empty() && !about.handed {
        return Ok(None);
    }
    let real = store.canonicalize().map_err(|e| StoreError::Unusable {
        path: store.to_owned(),
        reason: format!("the store cannot be used: {e}; mount it, or make it: mkdir -m 0700"),
    })?;
    if !own_directory(&real) {
        return Err(StoreError::Unusable {
            path: store.to_owned(),
            reason: "a store must be a directory of this user (root) in which nobody else can write: chown root, chmod 0700".into(),
        });
    }
    sweep_shared(&real);
    let id = random()?;
    let entry = real.join(&id);
    let staging = Staging::directory(&entry, false)?;
    let linked = link(images, staging.path(), &files)?;
    if !linked {
        room(store, staging.path(), &files)?;
    }
    let done: Mutex<Vec<Stored>> = Mutex::default();
    each(about.threads, files.iter(), |file| {
        let mut file = file.clone();
        one(images, staging.path(), &mut file, linked, about)?;
        done.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(file);
        Ok(())
    })?;
    files = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    files.sort_by(|a, b| a.name.cmp(&b.name));
    let reference = Reference {
        version: VERSION,
        id,
        store: real.to_string_lossy().into_owned(),
        container: about.container.to_owned(),
        created: about.created.to_owned(),
        files,
        handed: about.handed,
    };
    let text = reference
        .check()
        .and_then(|()| serde_json::to_vec_pretty(&reference).map_err(|e| e.to_string()));
    let text = text.map_err(|reason| StoreError::Unusable {
        path: store.to_owned(),
        reason,
    })?;
    let path = staging.path().join(names::STORE_REFERENCE);
    write_private(&path, &text).map_err(StoreError::io(&path, "write it"))?;
    if let Some(origin) = about.origin {
        origin.write(staging.path())?;
    }
    // Until the directory refers to the entry, its lock tells `clean` that it is in use.
    let locked = staging.handle();
    let locked = locked.map_err(StoreError::io(&entry, "keep it locked"))?;
    staging.commit()?;
    // The entry is complete. From the next step on the directory refers to it and no longer needs its own files.
    let noted = note(images, &text);
    drop(locked);
    if noted.is_err() {
        let _ = fs::remove_file(images.join(names::STORE_REFERENCE_PARTIAL));
        let _ = fs::remove_file(images.join(names::STORE_REFERENCE));
        let _ = fs::remove_dir_all(&entry);
    }
    noted?;
    for file in &reference.files {
        let path = images.join(&file.name);
        if let Err(e) = fs::remove_file(&path) {
            tracing::warn!(
                "{}: is in the store, and cannot be removed: {e}",
                path.display()
            );
        }
    }
    Ok(Some(reference))
}

/// Lists the large files, without digests.
fn large(images: &Path) -> Result<Vec<Stored>, StoreError> {
    let list = StoreError::io;
    let mut files = Vec::new();
    for item in fs::read_dir(images).map_err(list(images, "list it"))? {
        let item = item.map_err(list(images, "list it"))?;
        let meta = item.metadata().map_err(list(images, "list it"))?;
        let name = item.file_name();
        let name = name
            .to_str()
            .filter(|n| meta.is_file() && names::is_large(n, meta.len()));
        if let Some(name) = name.filter(|_| files.len() < MAX_FILES) {
            files.push(Stored {
                name: name.to_owned(),
                bytes: meta.len(),
                blake3: None,
            });
        }
    }
    Ok(files)
}

/// Hard-links the files into the store. Returns `false` if they are on different file systems.
fn link(images: &Path, to: &Path, files: &[Stored]) -> Result<bool, StoreError> {
    for (n, file) in files.iter().enumerate() {
        let place = to.join(&file.name);
        match fs::hard_link(images.join(&file.name), &place) {
            Ok(()) => {}
            Err(e) if n == 0 && cannot_link(&e) => return Ok(false),
            Err(e) => return Err(StoreError::io(&place, "give a file its name there")(e)),
        }
    }
    Ok(true)
}

pub(super) fn cannot_link(e: &io::Error) -> bool {
    let codes = [
        libc::EXDEV,
        libc::EPERM,
        libc::EOPNOTSUPP,
        libc::ENOSYS,
        libc::EMLINK,
    ];
    e.raw_os_error().is_some_and(|code| codes.contains(&code))
}

fn room(store: &Path, at: &Path, files: &[Stored]) -> Result<(), StoreError> {
    let stat = nix::sys::statvfs::statvfs(at)
        .map_err(|e| StoreError::io(at, "ask for the free space")(e.into()))?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    let needed: u64 = files.iter().map(|f| f.bytes).sum();
    if needed > free {
        return Err(StoreError::Unusable {
            path: store.to_owned(),
            reason: format!(
                "{needed} bytes are needed in the store and {free} are free; remove entries that no checkpoint needs"
            ),
        });
    }
    Ok(())
}

/// Copies a file unless the store has it already. Hashes it unless it is a VRAM shard.
fn one(
    images: &Path,
    to: &Path,
    file: &mut Stored,
    linked: bool,
    about: &About<'_>,
) -> Result<(), StoreError> {
    let hashed = names::is_numbered(&file.name, names::PAGES) && !about.handed;
    if linked && !hashed {
        return Ok(());
    }
    let (from, place) = (images.join(&file.name), to.join(&file.name));
    let source = open_regular(&from)?;
    let wrap = |action| StoreError::io(&place, action);
    let mut copy = match linked {
        true => None,
        false => {
            let new = create_private(&place).map_err(wrap("create it"))?;
            let other = new.try_clone().map_err(wrap("open it"))?;
            Some((new, WriteBack::new(other).map_err(wrap("write it"))?))
        }
    };
    let mut read = 0;
    let mut limited = source.take(file.bytes.saturating_add(1));
    let digest = hash(&mut limited, &from, about.until, &mut |piece| {
        read += piece.len() as u64;
        match &mut copy {
            Some((_, out)) => out.write_all(piece).map_err(wrap("write it")),
            None => Ok(()),
        }
    })?;
    if read != file.bytes {
        let reason = format!("{read} bytes in place of {}", file.bytes);
        return Err(StoreError::damaged(&from, reason));
    }
    if let Some((new, mut out)) = copy {
        out.flush()
            .and_then(|()| new.sync_all())
            .map_err(wrap("write it to disk"))?;
    }
    file.blake3 = hashed.then_some(digest);
    Ok(())
}

fn random() -> Result<String, StoreError> {
    let source = Path::new("/dev/urandom");
    let mut random = [0; DIGITS / 2];
    File::open(source)
        .and_then(|mut f| f.read_exact(&mut random))
        .map_err(StoreError::io(source, "read it"))?;
    Ok(random.iter().map(|b| format!("{b:02x}")).collect())
}

/// Writes the reference into the image directory, atomically and durably.
fn note(images: &Path, text: &[u8]) -> Result<(), StoreError> {
    let partial = images.join(names::STORE_REFERENCE_PARTIAL);
    let path = images.join(names::STORE_REFERENCE);
    replace(&path, &partial, 0o600, text).map_err(StoreError::io(&path, "write it"))?;
    sync_directory(images).map_err(StoreError::io(images, "write it to disk"))
}
