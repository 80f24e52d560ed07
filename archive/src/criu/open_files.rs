//! Reads the sizes that the images give for the regular files of the container's root file system that processes have
//! open or mapped.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::image_files::{ImageError, messages};
use super::message::Message;

const FILES: &str = "files.img";
const REMAPS: &str = "remap-fpath.img";
const MOUNTS: &str = "mountpoints-";

/// Returns true if [`sizes`] reads this file. `name` has no directories.
pub fn is_wanted(name: &str) -> bool {
    [FILES, REMAPS].contains(&name) || name.starts_with(MOUNTS) && name.ends_with(".img")
}

/// Returns the sizes by path, without the first `/`. CRIU restores none of these files and compares the size (`has bad
/// size`). Leaves out files of other mounts, and those that have been deleted or renamed. `files` maps names (without
/// directories) to contents.
pub fn sizes(files: &BTreeMap<String, Vec<u8>>) -> Result<BTreeMap<String, u64>, ImageError> {
    let Some(content) = files.get(FILES) else {
        return Ok(BTreeMap::new());
    };
    let mut roots = BTreeSet::new();
    let mut mounted = Vec::new();
    for (name, content) in super::with_prefix(files, MOUNTS) {
        for mount in messages(name, content)? {
            let mount = mount?;
            match plain(&mount.text("mountpoint").unwrap_or_default()) {
                "" => drop(roots.insert(mount.number("mnt_id"))),
                path => mounted.push(path.to_owned()),
            }
        }
    }
    let mut remapped = BTreeSet::new();
    if let Some(content) = files.get(REMAPS) {
        for remap in messages(REMAPS, content)? {
            remapped.insert(remap?.number("orig_id"));
        }
    }
    let mut sizes = BTreeMap::new();
    for file in regular(content)? {
        let file = file?;
        // The number of a mount is zigzag-encoded.
        let mount = file
            .number("mnt_id")
            .filter(|id| id & 1 == 0)
            .map(|id| id >> 1);
        let path = file.text("name").unwrap_or_default();
        let path = plain(&path);
        // What is mounted there is not in the archive.
        let is_outside = || mounted.iter().any(|at| Path::new(path).starts_with(at));
        if let (Some(size), true) = (
            file.number("size"),
            mount.is_some() && roots.contains(&mount),
        ) && !remapped.contains(&file.number("id"))
            && !is_outside()
        {
            sizes.insert(path.to_owned(), size);
        }
    }
    Ok(sizes)
}

/// Returns the open files that are regular.
fn regular(
    content: &[u8],
) -> Result<impl Iterator<Item = Result<Message, ImageError>>, ImageError> {
    Ok(messages(FILES, content)?.filter_map(|file| match file {
        Ok(file) => file.message("reg").cloned().map(Ok),
        Err(e) => Some(Err(e)),
    }))
}

/// Returns the paths of the links that CRIU has made for files that were open and had lost that name (`link_remap.N`),
/// without the first `/`. CRIU removes them at a restore. `files` as for [`sizes`].
pub fn links(files: &BTreeMap<String, Vec<u8>>) -> Result<Vec<String>, ImageError> {
    let (Some(remaps), Some(opened)) = (files.get(REMAPS), files.get(FILES)) else {
        return Ok(Vec::new());
    };
    let mut linked = BTreeSet::new();
    for remap in messages(REMAPS, remaps)? {
        let remap = remap?;
        // Type 0 is a link that CRIU has made at the checkpoint.
        if remap.number("remap_type").unwrap_or(0) == 0 {
            linked.insert(remap.number("remap_id"));
        }
    }
    let mut links = Vec::new();
    for file in regular(opened)? {
        let file = file?;
        if linked.contains(&file.number("id")) {
            links.push(plain(&file.text("name").unwrap_or_default()).to_owned());
        }
    }
    Ok(links)
}

/// CRIU writes paths with or without a leading dot.
fn plain(path: &str) -> &str {
    path.trim_start_matches('.').trim_start_matches('/')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::criu::image_files::making::{image, message};

    #[test]
    fn files_of_the_root() {
        let opened = |id, name: &str, mount: u64, size: Option<u64>| {
            let mut regular = message("reg_file_entry", &[("id", id), ("mnt_id", mount << 1)]);
            regular.set_text("name", name);
            size.inspect(|size| regular.set_number("size", *size));
            let mut file = message("file_entry", &[]);
            file.push("reg", regular);
            file
        };
        let mount = |id, path: &str| {
            let mut mount = message("mnt_entry", &[("mnt_id", id)]);
            mount.set_text("mountpoint", path);
            mount
        };
        let opened = [
            opened(1, "/grows", 50, Some(7)),
            opened(2, "/data/x", 51, Some(8)),
            opened(3, "/gone", 50, Some(9)),
            opened(4, "/tmp", 50, None),
        ];
        let mounts = [mount(50, "./"), mount(51, "./data")];
        let remap = message("remap_file_path_entry", &[("orig_id", 3), ("remap_id", 2)]);
        let files = BTreeMap::from(
            [
                ("files.img", &opened[..]),
                ("mountpoints-12.img", &mounts),
                ("remap-fpath.img", &[remap]),
            ]
            .map(|(name, messages)| (name.to_owned(), image(name, messages))),
        );
        assert!(files.keys().all(|name| is_wanted(name)));
        assert_eq!(
            sizes(&files).unwrap(),
            BTreeMap::from([("grows".to_owned(), 7)])
        );
        assert!(sizes(&BTreeMap::new()).unwrap().is_empty());
        assert_eq!(links(&files).unwrap(), ["data/x"]);
    }
}
