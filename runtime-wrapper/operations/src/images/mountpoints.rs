//! Reads the mounts of a checkpoint from CRIU's `mountpoints-N.img`: just enough to know which archive holds the files
//! of which directory.
//!
//! The file is two magic numbers and then entries, each with its length in front: protobuf messages `mnt_entry` with
//! fstype = 1, root_dev = 3, root = 6, mountpoint = 7, ext_mount = 13, ext_key = 18 (CRIU's `images/mnt.proto`). A
//! tmpfs is archived as `tmpfs-dev-ROOT_DEV.tar.gz.img`.

use crate::error::Error;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// CRIU's magic numbers: of any image, and of this one.
const MAGIC: [u32; 2] = [0x5456_4319, 0x5556_3928];
const MAX_BYTES: u64 = 16 << 20;
/// CRIU's numbers of `devtmpfs` and `tmpfs`.
const ARCHIVED: [u64; 2] = [3, 5];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Mount point inside the container.
    pub path: PathBuf,
    /// CRIU's number of the file system's device.
    pub device: u64,
    /// CRIU archives its content.
    pub archived: bool,
    pub external: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum MountsError {
    #[error("{path}: cannot read the checkpoint's mounts: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path}: not a list of CRIU's mounts ({what}); the archive is damaged")]
    Invalid { path: PathBuf, what: String },
}

pub fn read(images: &Path) -> Result<Vec<Mount>, MountsError> {
    let unread = |path: &Path| {
        let path = path.to_owned();
        move |source| MountsError::Read { path, source }
    };
    let mut mounts = Vec::new();
    for entry in fs::read_dir(images).map_err(unread(images))? {
        let entry = entry.map_err(unread(images))?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !name.starts_with("mountpoints-") || !name.ends_with(".img") {
            continue;
        }
        let path = entry.path();
        let mut bytes = Vec::new();
        File::open(&path)
            .and_then(|f| f.take(MAX_BYTES + 1).read_to_end(&mut bytes))
            .map_err(unread(&path))?;
        let listed = parse(&bytes).map_err(|what| MountsError::Invalid { path, what })?;
        mounts.extend(listed);
    }
    Ok(mounts)
}

/// Returns the mount that contains a path of the container: the longest match, and the last of those.
pub fn covering<'a>(mounts: &'a [Mount], path: &str) -> Option<&'a Mount> {
    mounts
        .iter()
        .filter(|m| Path::new(path).starts_with(&m.path))
        .max_by_key(|m| m.path.components().count())
}

fn parse(bytes: &[u8]) -> Result<Vec<Mount>, String> {
    if bytes.len() as u64 > MAX_BYTES {
        return Err(format!("larger than {MAX_BYTES} bytes"));
    }
    let mut rest = bytes;
    for magic in MAGIC {
        if word(&mut rest)? != magic {
            return Err("another magic number".into());
        }
    }
    let mut mounts = Vec::new();
    while !rest.is_empty() {
        let size = word(&mut rest)? as usize;
        let entry = rest.get(..size).ok_or("an entry is cut off")?;
        rest = rest.get(size..).unwrap_or_default();
        mounts.push(mount(entry)?);
    }
    Ok(mounts)
}

fn word(rest: &mut &[u8]) -> Result<u32, String> {
    let (first, tail) = rest.split_first_chunk::<4>().ok_or("it is cut off")?;
    *rest = tail;
    Ok(u32::from_le_bytes(*first))
}

fn mount(mut entry: &[u8]) -> Result<Mount, String> {
    let (mut fstype, mut device, mut external) = (0, 0, false);
    let (mut root, mut path) = (String::new(), None);
    while !entry.is_empty() {
        let key = varint(&mut entry)?;
        match (key >> 3, key & 7) {
            (field, 0) => {
                let value = varint(&mut entry)?;
                match field {
                    1 => fstype = value,
                    3 => device = value,
                    13 => external |= value != 0,
                    _ => {}
                }
            }
            (field, 2) => {
                let size = usize::try_from(varint(&mut entry)?).map_err(|e| e.to_string())?;
                let value = entry.get(..size).ok_or("a field is cut off")?;
                entry = entry.get(size..).unwrap_or_default();
                let text = || String::from_utf8_lossy(value).into_owned();
                match field {
                    6 => root = text(),
                    7 => path = Some(text()),
                    18 => external |= size > 0,
                    _ => {}
                }
            }
            (_, 5) => entry = entry.get(4..).ok_or("a field is cut off")?,
            (_, 1) => entry = entry.get(8..).ok_or("a field is cut off")?,
            (field, kind) => return Err(format!("field {field} has the unknown type {kind}")),
        }
    }
    let path = path.ok_or("an entry without a mountpoint")?;
    Ok(Mount {
        // CRIU writes paths with or without a dot in front.
        path: Path::new("/").join(path.trim_start_matches('.').trim_start_matches('/')),
        device,
        archived: ARCHIVED.contains(&fstype) && root == "/" && !external,
        external,
    })
}

fn varint(rest: &mut &[u8]) -> Result<u64, String> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let (byte, tail) = rest.split_first().ok_or("a number is cut off")?;
        *rest = tail;
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err("a number is too long".into())
}

impl From<MountsError> for Error {
    fn from(error: MountsError) -> Self {
        Self::Failed(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An entry encoded independently: tags as CRIU's compiler writes them.
    fn entry(fstype: u8, device: u8, root: &str, path: &str, external: Option<u8>) -> Vec<u8> {
        let mut e = vec![0x08, fstype, 0x10, 0x8c, 0x01, 0x18, device, 0x20, 0x7a];
        for (tag, text) in [(0x32, root), (0x3a, path), (0x42, "src"), (0x4a, "")] {
            e.push(tag);
            e.push(u8::try_from(text.len()).unwrap());
            e.extend(text.as_bytes());
        }
        if let Some(v) = external {
            e.extend([0x68, v]);
        }
        let mut all = u32::try_from(e.len()).unwrap().to_le_bytes().to_vec();
        all.extend(e);
        all
    }

    fn file(entries: &[Vec<u8>]) -> Vec<u8> {
        let mut all: Vec<u8> = MAGIC.iter().flat_map(|m| m.to_le_bytes()).collect();
        all.extend(entries.concat());
        all
    }

    #[test]
    fn which_mount_covers_a_path() {
        let text = file(&[
            entry(5, 61, "/", "/dev", None),
            entry(5, 65, "/", "/dev/shm", None),
            entry(5, 53, "/kfd", "./dev/kfd", Some(1)),
            entry(17, 60, "/", "./", None),
        ]);
        let mounts = parse(&text).unwrap();
        let over = |path: &str| {
            let m = covering(&mounts, path).unwrap();
            (m.device, m.archived, m.external)
        };
        assert_eq!(over("/dev/nvidia0"), (61, true, false));
        assert_eq!(over("/dev/dri/renderD128"), (61, true, false));
        assert_eq!(over("/dev/shm/x"), (65, true, false));
        assert_eq!(over("/dev/kfd"), (53, false, true));
        assert_eq!(over("/device"), (60, false, false));
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("mountpoints-13.img"), &text).unwrap();
        fs::write(dir.path().join("inventory.img"), "x").unwrap();
        assert_eq!(read(dir.path()).unwrap(), mounts);
        fs::write(dir.path().join("mountpoints-14.img"), &text[..20]).unwrap();
        let e = read(dir.path()).unwrap_err().to_string();
        assert!(
            e.contains("mountpoints-14.img") && e.contains("cut off"),
            "{e}"
        );
    }

    proptest! {
        #[test]
        fn any_bytes(tail in proptest::collection::vec(any::<u8>(), 0..200), cut in 0usize..60) {
            let _ = parse(&file(&[tail]));
            let good = file(&[entry(5, 61, "/", "/dev", Some(0))]);
            let _ = parse(&good[..cut.min(good.len())]);
        }
    }
}
