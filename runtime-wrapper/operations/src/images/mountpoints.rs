//! Finds which of CRIU's archives holds the files of which directory of the container.
//!
//! CRIU archives a tmpfs as `tmpfs-dev-DEVICE.tar.gz.img`, and lists the mounts in `mountpoints-ID.img`.

use std::path::Path;

use cryopod_archive::criu::mounts::{CriuMount, fs_type};

/// Returns the mount that contains a path of the container: the longest match, and the last of those.
pub fn covering<'a>(mounts: &'a [CriuMount], path: &str) -> Option<&'a CriuMount> {
    mounts
        .iter()
        .filter(|m| Path::new(path).starts_with(&m.path))
        .max_by_key(|m| Path::new(&m.path).components().count())
}

/// Returns true if CRIU archives the mount's content.
pub fn is_archived(mount: &CriuMount) -> bool {
    let archived = matches!(fs_type(mount.fs_type), Some("devtmpfs" | "tmpfs"));
    archived && mount.root == "/" && !mount.external
}

#[cfg(test)]
mod tests {
    use super::*;
    use cryopod_archive::criu::mounts;
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
        let magic = [0x5456_4319_u32, 0x5556_3928];
        let mut all: Vec<u8> = magic.iter().flat_map(|m| m.to_le_bytes()).collect();
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
        let mounts = mounts::read("mountpoints-13.img", &text).unwrap();
        let over = |path: &str| {
            let m = covering(&mounts, path).unwrap();
            (m.device, is_archived(m), m.external)
        };
        assert_eq!(over("/dev/nvidia0"), (61, true, false));
        assert_eq!(over("/dev/dri/renderD128"), (61, true, false));
        assert_eq!(over("/dev/shm/x"), (65, true, false));
        assert_eq!(over("/dev/kfd"), (53, false, true));
        assert_eq!(over("/device"), (60, false, false));
        let e = mounts::read("mountpoints-14.img", &text[..20]);
        let e = e.unwrap_err().to_string();
        assert!(
            e.contains("mountpoints-14.img") && e.contains("ends in the middle"),
            "{e}"
        );
    }
}
