//! Lists and removes the entries of a store.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use cryopod_host::files::own_directory;

use super::origin::Origin;
use super::{Reference, StoreError, is_id};
use crate::bytes::staging;
use crate::format::names;

/// An entry: the large files of one checkpoint.
#[derive(Debug, Clone)]
pub struct StoreEntry {
    pub path: PathBuf,
    pub reference: Reference,
    /// When it was complete.
    pub made: SystemTime,
    /// Without it the entry is never removed by itself.
    pub origin: Option<Origin>,
}

/// Ends the names of entries whose removal has begun.
const REMOVED: &str = "removed";

/// Lists the entries of a store, the oldest first. Leaves out what is not readable as an entry.
pub fn list(store: &Path) -> Result<Vec<StoreEntry>, StoreError> {
    let items = fs::read_dir(store).map_err(StoreError::io(store, "list it"))?;
    let entry = |item: fs::DirEntry| {
        let path = item.path();
        let named = item.file_name().to_str().is_some_and(is_id) && own_directory(&path);
        let record = path.join(names::STORE_REFERENCE);
        let made = record.symlink_metadata().ok()?.modified().ok()?;
        Some(StoreEntry {
            reference: Reference::open(&path).ok().flatten().filter(|_| named)?,
            origin: Origin::of(&path),
            path,
            made,
        })
    };
    let mut entries: Vec<_> = items.flatten().filter_map(entry).collect();
    entries.sort_by_key(|e| e.made);
    Ok(entries)
}

/// Removes an entry. The checkpoint that refers to it, and those that build upon it, cannot be restored any more.
///
/// # Errors
/// [`StoreError::Io`]: it cannot be removed.
pub fn remove(entry: &StoreEntry) -> Result<(), StoreError> {
    let gone = || -> io::Result<()> {
        // Under a leftover's name, so that the next checkpoint removes what is left if this is interrupted.
        let name = format!(".{}{}{REMOVED}", entry.reference.id, staging::MARK);
        let renamed = entry.path.with_file_name(name);
        fs::rename(&entry.path, &renamed)?;
        fs::remove_dir_all(renamed)
    };
    gone().map_err(StoreError::io(&entry.path, "remove it"))
}

/// Returns true for a leftover of [`remove`].
pub(super) fn removed_name(name: &str) -> bool {
    name.strip_suffix(REMOVED)
        .is_some_and(|rest| rest.ends_with(staging::MARK))
}
