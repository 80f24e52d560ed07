//! Reads and writes where the network namespace of a checkpoint comes from.
//!
//! `netns-ID.img` holds the settings of a namespace that CRIU makes, or the key of one that its caller hands to it.
//! Without the file CRIU makes an empty one (`--empty-ns net`).

use prost::Message;

use super::image::{Bounds, ImageError, messages};
use super::proto::{
    COMMON_MAGIC, IDS_MAGIC, INVENTORY_MAGIC, Ids, InventoryEntry, NETNS_MAGIC, NetnsEntry,
    PSTREE_MAGIC, PstreeEntry,
};
use crate::names::CRIU_INVENTORY;

/// The key under which runc and crun hand over the namespace that the spec names.
pub const KEY: &str = "extRootNetNS";

/// The network namespace of the first process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// Its image, which need not exist.
    pub file: String,
    pub from: From,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// CRIU's caller hands it over.
    Outside,
    /// CRIU makes it and sets it up.
    Images,
    /// CRIU makes it with nothing in it.
    Nothing,
}

/// Finds the network namespace of the first process; `None` if it is the host's. `open` returns the content of a file
/// of the image directory, or `None` if there is no such file.
///
/// # Errors
/// [`ImageError`]: an image is damaged or missing. Errors of `open` pass through unchanged.
pub fn of_first<E: std::convert::From<ImageError>>(
    mut open: impl FnMut(&str) -> Result<Option<Vec<u8>>, E>,
) -> Result<Option<Network>, E> {
    let mut bounds = Bounds::default();
    let mut needed = |file: &str| {
        let missing = || ImageError::Missing { file: file.into() };
        Ok::<_, E>(open(file)?.ok_or_else(missing)?)
    };
    let content = needed(CRIU_INVENTORY)?;
    let inventory: Vec<InventoryEntry> =
        messages(CRIU_INVENTORY, &content, INVENTORY_MAGIC, &mut bounds)?;
    let host = inventory.first().and_then(|i| i.root_ids.as_ref()?.net);
    let content = needed("pstree.img")?;
    let tree: Vec<PstreeEntry> = messages("pstree.img", &content, PSTREE_MAGIC, &mut bounds)?;
    let first = tree.first().map_or(0, |p| p.pid);
    let file = format!("ids-{first}.img");
    let ids: Vec<Ids> = messages(&file, &needed(&file)?, IDS_MAGIC, &mut bounds)?;
    let id = ids.first().and_then(|i| i.net);
    let Some(id) = id.filter(|id| Some(*id) != host) else {
        return Ok(None);
    };
    let file = format!("netns-{id}.img");
    let from = match open(&file)?.filter(|content| !content.is_empty()) {
        None => From::Nothing,
        Some(content) => {
            let all: Vec<NetnsEntry> = messages(&file, &content, NETNS_MAGIC, &mut bounds)?;
            let key = all.into_iter().next().and_then(|n| n.ext_key);
            match key.is_some_and(|k| !k.is_empty()) {
                true => From::Outside,
                false => From::Images,
            }
        }
    };
    Ok(Some(Network { file, from }))
}

/// Makes the image of a namespace that is handed over under this key, or with `None` of one without settings.
pub fn image(key: Option<&str>) -> Vec<u8> {
    let entry = NetnsEntry {
        ext_key: key.map(str::to_owned),
    };
    let mut image = Vec::new();
    for word in [COMMON_MAGIC, NETNS_MAGIC] {
        image.extend(word.to_le_bytes());
    }
    image.extend(
        u32::try_from(entry.encoded_len())
            .unwrap_or(0)
            .to_le_bytes(),
    );
    image.extend(entry.encode_to_vec());
    image
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn file(magic: u32, message: &impl Message) -> Vec<u8> {
        let mut all: Vec<u8> = [COMMON_MAGIC, magic]
            .iter()
            .flat_map(|m| m.to_le_bytes())
            .collect();
        all.extend(u32::try_from(message.encoded_len()).unwrap().to_le_bytes());
        all.extend(message.encode_to_vec());
        all
    }

    fn ids(net: u32) -> Ids {
        Ids {
            net: Some(net),
            ..Ids::default()
        }
    }

    #[test]
    fn where_it_comes_from() {
        let inventory = InventoryEntry {
            root_ids: Some(ids(2)),
            ..InventoryEntry::default()
        };
        let process = PstreeEntry {
            pid: 7,
            ..PstreeEntry::default()
        };
        let mut files = BTreeMap::from([
            ("inventory.img", file(INVENTORY_MAGIC, &inventory)),
            ("pstree.img", file(PSTREE_MAGIC, &process)),
            ("ids-7.img", file(IDS_MAGIC, &ids(10))),
        ]);
        let ask = |files: &BTreeMap<&str, Vec<u8>>| {
            of_first::<ImageError>(|name| Ok(files.get(name).cloned()))
        };
        let from = |from| {
            let file = "netns-10.img".to_owned();
            Ok(Some(Network { file, from }))
        };
        assert_eq!(ask(&files), from(From::Nothing));
        files.insert("netns-10.img", Vec::new());
        assert_eq!(ask(&files), from(From::Nothing));
        // The beginning of CRIU 4.2's own, for a namespace of podman's.
        let theirs = b"\x19CVTR7\x93U\x06\0\0\0\x1a\x04\x08\x06\x10\0".to_vec();
        files.insert("netns-10.img", theirs);
        assert_eq!(ask(&files), from(From::Images));
        files.insert("netns-10.img", image(None));
        assert_eq!(ask(&files), from(From::Images));
        // As CRIU 4.2 writes it for a pod's.
        let theirs = b"\x19CVTR7\x93U\x0e\0\0\0B\x0cextRootNetNS".to_vec();
        assert_eq!(image(Some(KEY)), theirs);
        files.insert("netns-10.img", theirs);
        assert_eq!(ask(&files), from(From::Outside));
        files.insert("netns-10.img", b"\x19CVTR7\x93U\x0e\0\0".to_vec());
        assert!(ask(&files).is_err());
        files.insert("ids-7.img", file(IDS_MAGIC, &ids(2)));
        assert_eq!(ask(&files), Ok(None));
        files.remove("pstree.img");
        assert!(ask(&files).unwrap_err().to_string().contains("pstree.img"));
    }
}
