//! Reads and writes where the network namespace of a checkpoint comes from.
//!
//! `netns-ID.img` holds the settings of a namespace that CRIU makes, or the key of one that its caller hands to it.
//! Without the file CRIU makes an empty one (`--empty-ns net`).

use serde::{Deserialize, Serialize};

use super::image_files::{ImageError, ImageFile, first_message};
use crate::format::names::CRIU_INVENTORY;

/// The key under which runc and crun hand over the namespace that the spec names.
pub const KEY: &str = "extRootNetNS";

/// The network namespace of the first process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Its image, which need not exist.
    pub file: String,
    pub from: From,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
    let mut needed = |file: &str| {
        let content = open(file)?.ok_or_else(|| ImageError::missing(file))?;
        Ok::<_, E>(first_message(file, &content)?)
    };
    let inventory = needed(CRIU_INVENTORY)?;
    let host = inventory.and_then(|i| i.message("root_ids")?.number("net_ns_id"));
    let first = needed("pstree.img")?.and_then(|p| p.number("pid"));
    let ids = needed(&format!("ids-{}.img", first.unwrap_or(0)))?;
    let id = ids.and_then(|ids| ids.number("net_ns_id"));
    let Some(id) = id.filter(|id| Some(*id) != host) else {
        return Ok(None);
    };
    let file = format!("netns-{id}.img");
    let from = match open(&file)?.filter(|content| !content.is_empty()) {
        None => From::Nothing,
        Some(content) => {
            let key = first_message(&file, &content)?.and_then(|n| n.text("ext_key"));
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
    // An empty message.
    let empty = [0x5456_4319_u32, 0x5593_3752, 0].map(u32::to_le_bytes);
    let Ok(mut image) = ImageFile::decode("netns-1.img", &empty.concat()) else {
        return Vec::new();
    };
    for message in &mut image.messages {
        key.inspect(|key| message.set_text("ext_key", key));
    }
    image.encode()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::criu::image_files::making::{self, message};
    use crate::criu::message::Message;
    use std::collections::BTreeMap;

    fn ids(net: u64) -> Message {
        message("task_kobj_ids_entry", &[("net_ns_id", net)])
    }

    #[test]
    fn where_it_comes_from() {
        let mut inventory = message("inventory_entry", &[]);
        inventory.push("root_ids", ids(2));
        let process = message("pstree_entry", &[("pid", 7)]);
        let mut files = BTreeMap::from([
            (
                "inventory.img",
                making::image("inventory.img", &[inventory]),
            ),
            ("pstree.img", making::image("pstree.img", &[process])),
            ("ids-7.img", making::image("ids-7.img", &[ids(10)])),
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
        files.insert("ids-7.img", making::image("ids-7.img", &[ids(2)]));
        assert_eq!(ask(&files), Ok(None));
        files.remove("pstree.img");
        assert!(ask(&files).unwrap_err().to_string().contains("pstree.img"));
    }
}
