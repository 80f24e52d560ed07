//! Gives each mount that gets the host's mounts a sharing group of its own, in CRIU's image of the mounts.
//!
//! CRIU puts the container's mounts of one master into one group, and makes all slaves by the source of the first
//! (`restore_one_sharing_group` in mount-v2.c). The kernel does so only from a mount that has the others' roots in it: on the host
//! that is the whole file system, in CRIU's own root each source alone. The group's number means nothing beyond the image.

use std::collections::BTreeSet;

use cryopod_archive::criu::image_files::ImageFile;
use cryopod_archive::criu::message::Message;

/// More than the kernel's peer groups have.
const FIRST: u64 = 1 << 30;

/// Returns the changed image. `None`: nothing is to be changed, or CRIU will say what is wrong with it.
pub fn apart(name: &str, content: &[u8]) -> Option<Vec<u8>> {
    let mut image = ImageFile::decode(name, content).ok()?;
    let peers = |mount: &_| number(mount, "shared_id");
    let inside: BTreeSet<u64> = image.messages.iter().map(peers).collect();
    let mut changed = false;
    for (at, mount) in (0..).zip(&mut image.messages) {
        let (master, peers) = (number(mount, "master_id"), peers(mount));
        if master == 0 || inside.contains(&master) {
            continue;
        }
        // Peers stay together.
        let own = if peers == 0 {
            FIRST + at
        } else {
            FIRST / 2 + peers
        };
        mount.set_number("master_id", own);
        changed = true;
    }
    changed.then(|| image.encode())
}

fn number(mount: &Message, field: &str) -> u64 {
    mount.number(field).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "mountpoints-1.img";

    /// An image with these sharing groups and masters (fields 10 and 11 of CRIU's `mnt_entry`).
    fn image(mounts: &[(u8, u8)]) -> Vec<u8> {
        let mut out = Vec::new();
        for magic in [0x5456_4319_u32, 0x5556_3928] {
            out.extend(magic.to_le_bytes());
        }
        for (shared, master) in mounts {
            let numbers = (1..=5).flat_map(|field| [field << 3, 1]);
            let texts = (6..=9).flat_map(|field| [field << 3 | 2, 0]);
            let mut message: Vec<u8> = numbers.chain(texts).collect();
            message.extend([10 << 3, *shared, 11 << 3, *master]);
            out.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            out.extend(message);
        }
        out
    }

    #[test]
    fn masters_outside_of_the_container() {
        // Two slaves of the host, two peers that are slaves, a slave of a mount inside, a private one.
        let mounts = image(&[(0, 3), (0, 3), (9, 3), (9, 3), (0, 9), (0, 0)]);
        let changed = apart(NAME, &mounts).unwrap();
        let changed = ImageFile::decode(NAME, &changed).unwrap();
        let masters = changed.messages.iter().map(|m| number(m, "master_id"));
        let now: Vec<u64> = masters.collect();
        assert!(now[0] != now[1] && now[0] != 3 && now[1] != 3);
        assert!(now[2] == now[3] && now[2] != now[0]);
        assert_eq!(now[4..], [9, 0]);
        assert_eq!(apart(NAME, &image(&[(0, 0), (9, 0), (0, 9)])), None);
        assert_eq!(apart(NAME, b"short"), None);
    }
}
