//! Puts the files of an entry back into an image directory, which needs no store then.

use std::fs;
use std::io;
use std::path::Path;

use cryopod_host::files::{create_private, if_there, sync_directory};

use super::find::{Found, each};
use super::put::cannot_link;
use super::{StoreError, Stored};
use crate::format::names;

/// Puts the files back, and removes the reference. The caller has verified them.
///
/// At any time, even after a power cut, the image directory has the reference or all files. After it the store's entry may go.
pub fn gather(images: &Path, found: &Found, threads: usize) -> Result<(), StoreError> {
    each(threads, found.reference.files.iter(), |file| {
        one(images, found, file)
    })?;
    let synced = || sync_directory(images);
    synced().map_err(StoreError::io(images, "write it to disk"))?;
    let reference = images.join(names::STORE_REFERENCE);
    fs::remove_file(&reference).map_err(StoreError::io(&reference, "remove it"))?;
    synced().map_err(StoreError::io(images, "write it to disk"))
}

fn one(images: &Path, found: &Found, file: &Stored) -> Result<(), StoreError> {
    let (place, partial) = (
        images.join(&file.name),
        images.join(format!(".{}.partial", file.name)),
    );
    let mut source = found.open(file)?;
    let mut copied = || -> io::Result<()> {
        if_there(fs::remove_file(&partial))?;
        // A file that is there counts, as for a restore.
        if place.symlink_metadata().is_ok() {
            return Ok(());
        }
        match fs::hard_link(found.path(file), &place) {
            Err(e) if cannot_link(&e) => {}
            Err(e) => return Err(e),
            Ok(()) => return source.sync_all(),
        }
        let mut new = create_private(&partial)?;
        let bytes = io::copy(&mut source, &mut new)?;
        if bytes != file.bytes {
            return Err(io::Error::other(format!(
                "{bytes} bytes in place of {}",
                file.bytes
            )));
        }
        new.sync_all()?;
        fs::rename(&partial, &place)
    };
    copied().map_err(|e| {
        let _ = fs::remove_file(&partial);
        StoreError::io(&place, "copy the store's file there")(e)
    })
}
