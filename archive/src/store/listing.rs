//! Lists the files of an image directory with their digests, so that a restore finds what was lost or changed since.

use std::fs;
use std::io::{self, Read};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use cryopod_host::files::{if_there, open_regular, read_bounded, replace};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::find::{each, hash};
use super::{MAX_BYTES, StoreError, Stored};
use crate::format::names;

/// The version that this cryopod writes, and the newest that it reads. The first lists had none.
const VERSION: u64 = 1;

/// The files of an image directory.
#[derive(Debug, Serialize, Deserialize)]
pub struct Listing {
    #[serde(default)]
    version: u64,
    files: Vec<Stored>,
}

impl Listing {
    /// Lists an image directory's files in a file of its own there. The table of GPU memory has the digests of its chunks,
    /// so the shards are listed by their sizes alone.
    pub fn write(images: &Path, threads: usize, until: Option<Instant>) -> Result<(), StoreError> {
        let failed = |action| StoreError::io(images, action);
        let mut files = Vec::new();
        for entry in fs::read_dir(images).map_err(failed("list it"))? {
            let entry = entry.map_err(failed("list it"))?;
            let meta = entry.metadata().map_err(failed("list it"))?;
            let name = entry.file_name().into_string().ok();
            let name = name.filter(|name| meta.is_file() && is_listed(name));
            files.extend(name.map(|name| Stored {
                name,
                bytes: meta.len(),
                blake3: None,
            }));
        }
        let listed = Mutex::new(Vec::new());
        each(threads, files.iter(), |file| {
            let path = images.join(&file.name);
            let blake3 = match names::is_numbered(&file.name, names::VRAM_SHARD) {
                true => None,
                false => {
                    let mut opened = open_regular(&path).map_err(StoreError::io(&path, "open"))?;
                    Some(hash(&mut opened, &path, until, &mut |_| Ok(()))?)
                }
            };
            let mut listed = listed.lock().unwrap_or_else(PoisonError::into_inner);
            listed.push(Stored {
                blake3,
                ..file.clone()
            });
            Ok(())
        })?;
        let files = listed.into_inner().unwrap_or_else(PoisonError::into_inner);
        let version = VERSION;
        let text = serde_json::to_vec(&Self { version, files })
            .map_err(|e| failed("list it")(e.into()))?;
        let [path, partial] =
            [names::LISTING, names::LISTING_PARTIAL].map(|name| images.join(name));
        replace(&path, &partial, 0o600, &text).map_err(failed("write its list"))
    }

    /// Compares an image directory with its list, if it has one. Returns what is damaged.
    ///
    /// # Errors
    /// It cannot be read, or a newer cryopod wrote the list.
    pub fn damage(
        images: &Path,
        threads: usize,
        until: Option<Instant>,
    ) -> Result<Option<String>, StoreError> {
        let path = images.join(names::LISTING);
        let text = if_there(read_bounded(&path, MAX_BYTES));
        let Some(text) = text.map_err(StoreError::io(&path, "read it"))? else {
            return Ok(None);
        };
        let value = serde_json::from_slice::<Value>(&text).unwrap_or_default();
        if let Some(found) = value["version"].as_u64().filter(|found| *found > VERSION) {
            let reason =
                format!("version {found} of the list; this cryopod reads {VERSION}: update it");
            return Err(StoreError::Unusable { path, reason });
        }
        let Ok(listing) = Self::deserialize(value) else {
            return Ok(Some(format!("{}: no list", path.display())));
        };
        let compared = each(threads, listing.files.iter(), |file| {
            compare(images, file, until)
        });
        match compared {
            Err(StoreError::Damaged { path, reason }) => {
                Ok(Some(format!("{}: {reason}", path.display())))
            }
            // A disk that lost a sector.
            Err(e @ StoreError::Io { .. }) if e.is_unreadable() => Ok(Some(e.to_string())),
            compared => compared.map(|()| None),
        }
    }
}

/// Returns true for what a restore reads.
fn is_listed(name: &str) -> bool {
    let log = Path::new(name).extension().is_some_and(|e| e == "log");
    !name.starts_with('.') && !log && name != names::LISTING
}

fn compare(images: &Path, file: &Stored, until: Option<Instant>) -> Result<(), StoreError> {
    let path = images.join(&file.name);
    if !is_listed(&file.name) || file.name.contains('/') {
        return Err(StoreError::damaged(&path, "no file of a checkpoint"));
    }
    let mut opened = match open_regular(&path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(StoreError::damaged(&path, "it is missing"));
        }
        opened => opened.map_err(StoreError::io(&path, "open it"))?,
    };
    let meta = opened
        .metadata()
        .map_err(StoreError::io(&path, "read its size"))?;
    if meta.len() != file.bytes {
        let reason = format!("{} bytes in place of {}", meta.len(), file.bytes);
        return Err(StoreError::damaged(&path, reason));
    }
    let Some(stated) = &file.blake3 else {
        return Ok(());
    };
    let mut limited = (&mut opened).take(file.bytes);
    match hash(&mut limited, &path, until, &mut |_| Ok(()))? {
        digest if digest == *stated => Ok(()),
        digest => Err(StoreError::damaged(
            &path,
            format!("its digest is {digest} in place of {stated}"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("pages-1.img", "pages"),
            ("core-1.img", ""),
            ("vram-0.img", "chunks"),
            ("dump.log", "said"),
        ] {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn what_is_lost_or_changed_is_named() {
        type Damage = fn(&Path);
        let cases: [(&str, Damage); 6] = [
            ("pages-1.img", |d| {
                fs::write(d.join("pages-1.img"), "PAGES").unwrap();
            }),
            ("pages-1.img", |d| {
                fs::write(d.join("pages-1.img"), "page").unwrap();
            }),
            ("core-1.img", |d| {
                fs::remove_file(d.join("core-1.img")).unwrap();
            }),
            ("vram-0.img", |d| {
                fs::write(d.join("vram-0.img"), "chunk").unwrap();
            }),
            (names::LISTING, |d| {
                fs::write(d.join(names::LISTING), "{").unwrap();
            }),
            ("../x", |d| {
                let text = r#"{"files":[{"name":"../x","bytes":0}]}"#;
                fs::write(d.join(names::LISTING), text).unwrap();
            }),
        ];
        for (name, damage) in cases {
            let dir = checkpoint();
            assert_eq!(Listing::damage(dir.path(), 2, None).unwrap(), None);
            Listing::write(dir.path(), 2, None).unwrap();
            fs::remove_file(dir.path().join("dump.log")).unwrap();
            assert_eq!(Listing::damage(dir.path(), 2, None).unwrap(), None);
            damage(dir.path());
            let said = Listing::damage(dir.path(), 2, None).unwrap();
            assert!(said.as_ref().is_some_and(|s| s.contains(name)), "{said:?}");
        }
    }

    #[test]
    fn a_list_of_a_newer_version_is_no_damage() {
        let dir = checkpoint();
        let write = |text: &str| fs::write(dir.path().join(names::LISTING), text).unwrap();
        write(r#"{"files":[]}"#);
        assert_eq!(Listing::damage(dir.path(), 1, None).unwrap(), None);
        write(r#"{"version":2,"trees":[]}"#);
        let newer = Listing::damage(dir.path(), 1, None).unwrap_err();
        assert!(newer.to_string().contains("update it"), "{newer}");
    }

    #[test]
    fn no_time_is_no_damage() {
        let dir = checkpoint();
        Listing::write(dir.path(), 1, None).unwrap();
        assert!(Listing::damage(dir.path(), 1, Some(Instant::now())).is_err());
    }
}
