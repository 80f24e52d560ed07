//! Prepares a checkpoint's images for a restore into an existing network namespace.
//!
//! CRIU restores into a given namespace only if the dump had one too. Then the image of the namespace has a key, with
//! which the runtime hands the namespace over. If the runtime had created the container's namespace, the image has no
//! key. So this module adds the key, only ever in the copy that containerd has unpacked for this one restore.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::Path;

use cryopod_archive::criu::network::{self, KEY};
use cryopod_host::files::{if_there, open_regular, read_bounded_from};

/// Largest image to read; these images are small.
const MAX_BYTES: u64 = 16 << 20;

fn read(images: &Path, name: &str) -> io::Result<Option<Vec<u8>>> {
    // What the namespace's own image holds does not matter: it is replaced.
    if name.starts_with("netns-") {
        return Ok(None);
    }
    open_regular(&images.join(name))
        .and_then(|file| read_bounded_from(file, MAX_BYTES))
        .map(Some)
        .map_err(|e| io::Error::new(e.kind(), format!("{name}: {e}")))
}

/// Marks the network namespace in the images as external. Returns `false`, and changes nothing, if they have none.
pub fn set_outer_network(images: &Path) -> io::Result<bool> {
    let Some(network) = network::of_first(|name| read(images, name))? else {
        return Ok(false);
    };
    let path = images.join(network.file);
    if_there(fs::remove_file(&path))?;
    File::create_new(path)?.write_all(&network::image(Some(KEY)))?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image of one entry, encoded independently of the code under test.
    fn image(dir: &Path, name: &str, entry: &[u8]) {
        let mut bytes = match name {
            "pstree.img" => b"\x19\x43\x56\x54\x30\x30\x27\x50".to_vec(),
            "ids-1.img" => b"\x19\x43\x56\x54\x30\x20\x43\x54".to_vec(),
            _ => b"\x16\x31\x31\x58".to_vec(),
        };
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
        assert!(told().contains("inventory.img"));
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
