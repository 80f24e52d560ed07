//! Prepares a checkpoint's images for a restore into an existing network namespace.
//!
//! CRIU restores into a given namespace only if the dump had one too. Then the image of the namespace has a key, with
//! which the runtime hands the namespace over. If the runtime had created the container's namespace, the image has no
//! key. So this module adds the key, only ever in the copy that containerd has unpacked for this one restore.

use std::fs::{self, File};
use std::io::{self, Read, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use containerd_shim::protos::protobuf::CodedInputStream;
use containerd_shim::protos::protobuf::rt::skip_field_for_tag;

/// The key with which runc and crun hand a network namespace to CRIU.
const KEY: &[u8] = b"extRootNetNS";
/// CRIU's common magic number, little-endian; the image's own magic follows.
const COMMON: [u8; 4] = 0x5456_4319_u32.to_le_bytes();
/// The inventory has only its own magic.
const INVENTORY: [u8; 4] = 0x5831_3116_u32.to_le_bytes();
/// Of `netns-N.img`.
const NETNS: [u8; 4] = 0x5593_3752_u32.to_le_bytes();
/// `ext_key` in CRIU's `netns_entry`: field 8, a string.
const TAG: u8 = 8 << 3 | 2;
/// Fields of CRIU's entries: `pstree_entry.pid`, `inventory_entry.root_ids`, `task_kobj_ids_entry.net_ns_id`.
const PID: u32 = 1;
const ROOT_IDS: u32 = 3;
const NET_NS_ID: u32 = 6;
/// Largest image to read; these images are small.
const MAX_BYTES: u64 = 16 << 20;

/// Returns the number of the container's own network namespace: that of its first process, if it is not CRIU's. `None`:
/// it has none of its own.
fn namespace(images: &Path) -> io::Result<Option<u64>> {
    let Some(Field::Number(pid)) = field(&first(images, "pstree.img")?, PID)? else {
        return Err(damaged("pstree.img"));
    };
    let ids = first(images, &format!("ids-{pid}.img"))?;
    let Some(Field::Number(own)) = field(&ids, NET_NS_ID)? else {
        return Ok(None);
    };
    let inventory = first(images, "inventory.img")?;
    let outer = match field(&inventory, ROOT_IDS)? {
        Some(Field::Bytes(ids)) => field(&ids, NET_NS_ID)?,
        _ => None,
    };
    Ok((outer != Some(Field::Number(own))).then_some(own))
}

fn damaged(name: &str) -> io::Error {
    let what = format!("{name} is none of CRIU's images; the checkpoint is damaged");
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn first(images: &Path, name: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{name}: {e}"));
    fs::OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK)
        .open(images.join(name))
        .and_then(|f| f.take(MAX_BYTES).read_to_end(&mut bytes))
        .map_err(named)?;
    let entry = || {
        let rest = match bytes.strip_prefix(&INVENTORY) {
            Some(rest) => rest,
            None => bytes.strip_prefix(&COMMON)?.get(NETNS.len()..)?,
        };
        let (size, rest) = rest.split_first_chunk::<4>()?;
        rest.get(..u32::from_le_bytes(*size) as usize)
    };
    entry().map(<[u8]>::to_vec).ok_or_else(|| damaged(name))
}

#[derive(Debug, PartialEq, Eq)]
enum Field {
    Number(u64),
    Bytes(Vec<u8>),
}

fn field(message: &[u8], number: u32) -> io::Result<Option<Field>> {
    let mut input = CodedInputStream::from_bytes(message);
    let mut found = None;
    while let Some(tag) = input.read_raw_tag_or_eof()? {
        match (tag >> 3 == number, tag & 7) {
            (true, 0) => found = Some(Field::Number(input.read_uint64()?)),
            (true, 2) => found = Some(Field::Bytes(input.read_bytes()?)),
            _ => skip_field_for_tag(tag, &mut input)?,
        }
    }
    Ok(found)
}

/// Marks the network namespace in the images as external. Returns `false`, and changes nothing, if they have none.
pub fn set_outer_network(images: &Path) -> io::Result<bool> {
    let Some(number) = namespace(images)? else {
        return Ok(false);
    };
    let mut image = [COMMON, NETNS].concat();
    image.extend(
        u32::try_from(KEY.len() + 2)
            .unwrap_or_default()
            .to_le_bytes(),
    );
    image.extend([TAG, u8::try_from(KEY.len()).unwrap_or_default()]);
    image.extend(KEY);
    let path = images.join(format!("netns-{number}.img"));
    match fs::remove_file(&path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    File::create_new(path)?.write_all(&image)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image of one entry, encoded independently of the code under test.
    fn image(dir: &Path, name: &str, entry: &[u8]) {
        let mut bytes = b"\x19\x43\x56\x54\x30\x30\x27\x50".to_vec();
        bytes.extend(u32::try_from(entry.len()).unwrap().to_le_bytes());
        bytes.extend(entry);
        fs::write(dir.join(name), bytes).unwrap();
    }

    fn checkpoint(dir: &Path, own: u8, outer: u8) {
        image(dir, "pstree.img", &[0x08, 1, 0x10, 0, 0x18, 1, 0x20, 1]);
        image(dir, "ids-1.img", &[0x08, 7, 0x28, 8, 0x30, own, 0x38, 9]);
        image(
            dir,
            "inventory.img",
            &[0x08, 2, 0x1a, 4, 0x28, 1, 0x30, outer],
        );
    }

    #[test]
    fn the_containers_namespace_gets_the_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("netns-10.img");
        checkpoint(dir.path(), 4, 4);
        assert!(!set_outer_network(dir.path()).unwrap());
        assert!(!path.exists());
        checkpoint(dir.path(), 10, 4);
        let new = b"\x19\x43\x56\x54\x52\x37\x93\x55\x0e\0\0\0\x42\x0cextRootNetNS";
        // CRIU 4.2 writes none.
        assert!(set_outer_network(dir.path()).unwrap());
        assert_eq!(fs::read(&path).unwrap(), new);
        let outside = dir.path().join("outside");
        fs::write(&outside, "kept").unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&outside, &path).unwrap();
        assert!(set_outer_network(dir.path()).unwrap());
        assert_eq!(fs::read(&path).unwrap(), new);
        assert_eq!(fs::read(&outside).unwrap(), b"kept");
    }

    #[test]
    fn a_damaged_image_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let told = || set_outer_network(dir.path()).unwrap_err().to_string();
        assert!(told().contains("pstree.img"));
        checkpoint(dir.path(), 10, 4);
        for name in ["ids-1.img", "inventory.img", "pstree.img"] {
            let whole = fs::read(dir.path().join(name)).unwrap();
            for bytes in [&whole[..3], &whole[..13], b"no magic number"] {
                fs::write(dir.path().join(name), bytes).unwrap();
                assert!(told().contains(name), "{}", told());
            }
            fs::write(dir.path().join(name), whole).unwrap();
        }
        image(dir.path(), "pstree.img", &[0x08]);
        told();
    }
}
