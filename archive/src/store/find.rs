//! Finds the files of a reference.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Instant;

use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;

use super::origin::Origin;
use super::{Reference, StoreError, Stored};
use cryopod_host::files::own_directory;

use crate::format::names;

const READ_BYTES: usize = 1 << 20;

/// An entry of a store; its files exist and have the right sizes.
#[derive(Debug, Clone)]
pub struct Found {
    pub reference: Reference,
    pub entry: PathBuf,
}

/// Finds the store's entry of an image directory's reference; `None` if there is no reference. Fails with
/// [`StoreError`] if no store has the entry, or if the entry is incomplete.
pub fn find(images: &Path, stores: &[PathBuf]) -> Result<Option<Found>, StoreError> {
    match Reference::open(images)? {
        Some(reference) => {
            find_in(reference, &images.join(names::STORE_REFERENCE), stores).map(Some)
        }
        None => Ok(None),
    }
}

/// Like [`find`], for a reference that was read before; `path` only appears in errors. A handed reference is good for
/// stores named [`names::HANDOVER`] alone, and no other one is.
pub fn find_in(reference: Reference, path: &Path, stores: &[PathBuf]) -> Result<Found, StoreError> {
    let mut looked = Vec::new();
    for store in stores
        .iter()
        .filter(|s| s.ends_with(names::HANDOVER) == reference.handed)
    {
        let entry = store.join(&reference.id);
        let what = match (store.symlink_metadata(), entry.symlink_metadata()) {
            (Err(_), _) => "is not there",
            (_, Err(_)) => "has no such entry",
            // An administrator may link to a store, but nobody may replace an entry by a link.
            _ if !own_directory(&store.canonicalize().unwrap_or_default())
                || !own_directory(&entry) =>
            {
                "is not this user's alone"
            }
            _ => {
                let found = Found { reference, entry };
                for file in &found.reference.files {
                    found.open(file)?;
                }
                return Ok(found);
            }
        };
        looked.push(format!("{} {what}", store.display()));
    }
    if reference.handed {
        return Err(StoreError::Over { path: path.into() });
    }
    let looked = match looked.is_empty() {
        true => "no store is configured".into(),
        false => looked.join(", "),
    };
    Err(StoreError::Missing {
        path: path.to_owned(),
        what: reference.to_string(),
        was: match reference.store.is_empty() {
            true => "not said where".into(),
            false => format!("{} where it was made", reference.store),
        },
        id: reference.id,
        looked,
    })
}

impl Found {
    /// Has the entry stay until somebody removes it, whatever refers to it.
    pub fn keep(&self) -> Result<(), StoreError> {
        Origin::remove(&self.entry)
    }

    /// Returns where a file of the entry is.
    pub fn path(&self, file: &Stored) -> PathBuf {
        self.entry.join(&file.name)
    }

    /// Opens a file. Checks that it is a regular file of the recorded size.
    pub fn open(&self, file: &Stored) -> Result<File, StoreError> {
        let path = self.path(file);
        let gone = |e: nix::Error| StoreError::damaged(&path, io::Error::from(e).to_string());
        let directory = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let entry = open(&self.entry, directory, Mode::empty()).map_err(gone)?;
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let opened = openat(entry.as_fd(), file.name.as_str(), flags, Mode::empty());
        let opened = File::from(opened.map_err(gone)?);
        let meta = opened
            .metadata()
            .map_err(StoreError::io(&path, "read its size"))?;
        if !meta.is_file() {
            return Err(StoreError::damaged(&path, "not a regular file"));
        }
        if meta.len() != file.bytes {
            let reason = format!("{} bytes in place of {}", meta.len(), file.bytes);
            return Err(StoreError::damaged(&path, reason));
        }
        Ok(opened)
    }

    /// Reads the files whose digests the reference has, several at once, and compares. Fails with
    /// [`StoreError::Damaged`] for the first file that differs, or if the time is over.
    pub fn verify(&self, threads: usize, until: Option<Instant>) -> Result<(), StoreError> {
        let files = self.reference.files.iter().filter(|f| f.blake3.is_some());
        each(threads, files, |file| {
            let path = self.path(file);
            let digest = hash(&mut self.open(file)?, &path, until, &mut |_| Ok(()))?;
            match &file.blake3 {
                Some(stated) if digest != *stated => Err(StoreError::damaged(
                    &path,
                    format!("its digest is {digest} in place of {stated}"),
                )),
                _ => Ok(()),
            }
        })
    }
}

/// Hashes the rest of a file, in hexadecimal. Passes what it reads on to `then`.
pub(super) fn hash(
    file: &mut impl Read,
    path: &Path,
    until: Option<Instant>,
    then: &mut dyn FnMut(&[u8]) -> Result<(), StoreError>,
) -> Result<String, StoreError> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; READ_BYTES];
    loop {
        if until.is_some_and(|until| Instant::now() > until) {
            let slow = io::Error::from(io::ErrorKind::TimedOut);
            return Err(StoreError::io(path, "read it in time")(slow));
        }
        let n = match file.read(&mut buffer) {
            Ok(0) => return Ok(hasher.finalize().to_hex().to_string()),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => return Err(StoreError::io(path, "read it")(e)),
        };
        hasher.update(&buffer[..n]);
        then(&buffer[..n])?;
    }
}

/// Processes each item, on several threads; returns the first error.
pub(super) fn each<'a, T: Sync + 'a>(
    threads: usize,
    items: impl Iterator<Item = &'a T> + Send,
    work: impl Fn(&T) -> Result<(), StoreError> + Sync,
) -> Result<(), StoreError> {
    let state = Mutex::new((items, None));
    let lock = || state.lock().unwrap_or_else(PoisonError::into_inner);
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, 64) {
            scope.spawn(|| {
                loop {
                    let item = {
                        let mut state = lock();
                        match &state.1 {
                            Some(_) => None,
                            None => state.0.next(),
                        }
                    };
                    let Some(item) = item else { return };
                    if let Err(error) = work(item) {
                        lock().1.get_or_insert(error);
                    }
                }
            });
        }
    });
    match state.into_inner().unwrap_or_else(PoisonError::into_inner) {
        (_, Some(error)) => Err(error),
        _ => Ok(()),
    }
}
