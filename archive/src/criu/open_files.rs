//! Reads the sizes that the images give for the regular files of the container's root file system that processes have
//! open or mapped.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;

use super::image::{Bounds, ImageError, messages};
use super::proto::{FILES_MAGIC, MOUNTS_MAGIC};

const FILES: &str = "files.img";
const REMAPS: &str = "remap-fpath.img";
const REMAPS_MAGIC: u32 = 0x5913_3954;
const MOUNTS: &str = "mountpoints-";

#[derive(Clone, PartialEq, Message)]
struct Opened {
    #[prost(message, optional, tag = "3")]
    regular: Option<Regular>,
}

#[derive(Clone, PartialEq, Message)]
struct Regular {
    #[prost(uint32, tag = "1")]
    id: u32,
    #[prost(string, tag = "6")]
    name: String,
    #[prost(sint32, optional, tag = "7")]
    mount: Option<i32>,
    #[prost(uint64, optional, tag = "8")]
    size: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct MountPoint {
    #[prost(uint32, tag = "2")]
    id: u32,
    #[prost(string, tag = "7")]
    path: String,
}

#[derive(Clone, PartialEq, Message)]
struct Remap {
    #[prost(uint32, tag = "1")]
    id: u32,
    #[prost(uint32, tag = "2")]
    by: u32,
    /// 0: by a link that CRIU has made at the checkpoint.
    #[prost(uint32, optional, tag = "3")]
    kind: Option<u32>,
}

/// Returns true if [`sizes`] reads this file. `name` has no directories.
pub fn is_wanted(name: &str) -> bool {
    [FILES, REMAPS].contains(&name) || name.starts_with(MOUNTS) && name.ends_with(".img")
}

/// Returns the sizes by path, without the first `/`. CRIU restores none of these files and compares the size (`has bad
/// size`). Leaves out files of other mounts, and those that have been deleted or renamed. `files` maps names (without
/// directories) to contents.
pub fn sizes(files: &BTreeMap<String, Vec<u8>>) -> Result<BTreeMap<String, u64>, ImageError> {
    let mut bounds = Bounds::default();
    let Some(content) = files.get(FILES) else {
        return Ok(BTreeMap::new());
    };
    let mut roots = BTreeSet::new();
    let mut mounted = Vec::new();
    for (name, content) in super::with_prefix(files, MOUNTS) {
        let mounts: Vec<MountPoint> = messages(name, content, MOUNTS_MAGIC, &mut bounds)?;
        let is_root = |m: &MountPoint| plain(&m.path).is_empty();
        let others = mounts.iter().filter(|m| !is_root(m));
        mounted.extend(others.map(|m| plain(&m.path).to_owned()));
        roots.extend(
            mounts
                .iter()
                .filter(|m| is_root(m))
                .map(|m| i64::from(m.id)),
        );
    }
    let mut remapped = BTreeSet::new();
    if let Some(content) = files.get(REMAPS) {
        let remaps: Vec<Remap> = messages(REMAPS, content, REMAPS_MAGIC, &mut bounds)?;
        remapped.extend(remaps.into_iter().map(|r| r.id));
    }
    let opened: Vec<Opened> = messages(FILES, content, FILES_MAGIC, &mut bounds)?;
    let regular = opened.into_iter().filter_map(|o| o.regular);
    Ok(regular
        .filter(|r| !remapped.contains(&r.id))
        .filter(|r| r.mount.is_some_and(|id| roots.contains(&i64::from(id))))
        .filter(|r| {
            // What is mounted there is not in the archive.
            let path = std::path::Path::new(plain(&r.name));
            !mounted.iter().any(|at| path.starts_with(at))
        })
        .filter_map(|r| Some((plain(&r.name).to_owned(), r.size?)))
        .collect())
}

/// Returns the paths of the links that CRIU has made for files that were open and had lost that name (`link_remap.N`),
/// without the first `/`. CRIU removes them at a restore. `files` as for [`sizes`].
pub fn links(files: &BTreeMap<String, Vec<u8>>) -> Result<Vec<String>, ImageError> {
    let mut bounds = Bounds::default();
    let (Some(remaps), Some(opened)) = (files.get(REMAPS), files.get(FILES)) else {
        return Ok(Vec::new());
    };
    let remaps: Vec<Remap> = messages(REMAPS, remaps, REMAPS_MAGIC, &mut bounds)?;
    let linked = remaps.iter().filter(|r| r.kind.unwrap_or(0) == 0);
    let linked: BTreeSet<u32> = linked.map(|r| r.by).collect();
    let opened: Vec<Opened> = messages(FILES, opened, FILES_MAGIC, &mut bounds)?;
    let regular = opened.into_iter().filter_map(|o| o.regular);
    let regular = regular.filter(|r| linked.contains(&r.id));
    Ok(regular.map(|r| plain(&r.name).to_owned()).collect())
}

/// CRIU writes paths with or without a leading dot.
fn plain(path: &str) -> &str {
    path.trim_start_matches('.').trim_start_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(magic: u32, all: &[Vec<u8>]) -> Vec<u8> {
        let mut out: Vec<u8> = [0x5456_4319, magic]
            .iter()
            .flat_map(|m| m.to_le_bytes())
            .collect();
        for message in all {
            out.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            out.extend(message);
        }
        out
    }

    #[test]
    fn files_of_the_root() {
        let opened = |id, name: &str, mount, size| {
            let name = name.to_owned();
            let regular = Some(Regular {
                id,
                name,
                mount: Some(mount),
                size,
            });
            Opened { regular }.encode_to_vec()
        };
        let mount = |id, path: &str| {
            MountPoint {
                id,
                path: path.into(),
            }
            .encode_to_vec()
        };
        let files = BTreeMap::from([
            (
                "files.img".to_owned(),
                image(
                    FILES_MAGIC,
                    &[
                        opened(1, "/grows", 50, Some(7)),
                        opened(2, "/data/x", 51, Some(8)),
                        opened(3, "/gone", 50, Some(9)),
                        opened(4, "/tmp", 50, None),
                    ],
                ),
            ),
            (
                "mountpoints-12.img".to_owned(),
                image(MOUNTS_MAGIC, &[mount(50, "./"), mount(51, "./data")]),
            ),
            (
                "remap-fpath.img".to_owned(),
                image(
                    REMAPS_MAGIC,
                    &[Remap {
                        id: 3,
                        by: 2,
                        kind: None,
                    }
                    .encode_to_vec()],
                ),
            ),
        ]);
        assert!(files.keys().all(|name| is_wanted(name)));
        assert_eq!(
            sizes(&files).unwrap(),
            BTreeMap::from([("grows".to_owned(), 7)])
        );
        assert!(sizes(&BTreeMap::new()).unwrap().is_empty());
        assert_eq!(links(&files).unwrap(), ["data/x"]);
    }
}
