//! Gives each mount that gets the host's mounts a sharing group of its own, in CRIU's image of the mounts.
//!
//! CRIU puts the container's mounts of one master into one group, and makes all slaves by the source of the first
//! (`restore_one_sharing_group` in mount-v2.c). The kernel does so only from a mount that has the others' roots in it: on the host
//! that is the whole file system, in CRIU's own root each source alone. The group's number means nothing beyond the image.

use prost::bytes::Buf;
use prost::encoding::{
    DecodeContext, WireType, decode_key, decode_varint, encode_key, encode_varint, skip_field,
};
use std::collections::BTreeSet;

/// IMG_COMMON_MAGIC and the image's own.
const MAGIC: usize = 8;
/// The fields of `mnt_entry` (`images/mnt.proto`).
const SHARED_ID: u32 = 10;
const MASTER_ID: u32 = 11;
/// More than the kernel's peer groups have.
const FIRST: u64 = 1 << 30;

/// Returns the changed image. `None`: nothing is to be changed, or CRIU will say what is wrong with it.
pub fn apart(image: &[u8]) -> Option<Vec<u8>> {
    let mut rest = image.get(MAGIC..)?;
    let mut messages = Vec::new();
    while !rest.is_empty() {
        let (length, behind) = rest.split_first_chunk::<4>()?;
        let length = usize::try_from(u32::from_le_bytes(*length)).ok()?;
        messages.push(behind.get(..length)?);
        rest = behind.get(length..)?;
    }
    let ids = |field| {
        messages
            .iter()
            .map(move |m| number(m, field))
            .collect::<Option<Vec<u64>>>()
    };
    let (shared, masters) = (ids(SHARED_ID)?, ids(MASTER_ID)?);
    let inside: BTreeSet<u64> = shared.iter().copied().filter(|id| *id != 0).collect();
    let mut out = image.get(..MAGIC)?.to_vec();
    let mut changed = false;
    for ((message, shared), master) in messages.iter().zip(&shared).zip(&masters) {
        let mut message = message.to_vec();
        if *master != 0 && !inside.contains(master) {
            // Peers stay together.
            let at = u64::try_from(out.len()).ok()?;
            let own = if *shared == 0 {
                FIRST + at
            } else {
                FIRST / 2 + shared
            };
            // Of two, the last one counts.
            encode_key(MASTER_ID, WireType::Varint, &mut message);
            encode_varint(own, &mut message);
            changed = true;
        }
        out.extend(u32::try_from(message.len()).ok()?.to_le_bytes());
        out.extend(message);
    }
    changed.then_some(out)
}

/// The last value of a field; 0 if there is none.
fn number(message: &[u8], field: u32) -> Option<u64> {
    let (mut rest, mut found) = (message, 0);
    while rest.has_remaining() {
        let (name, wire) = decode_key(&mut rest).ok()?;
        if name == field && wire == WireType::Varint {
            found = decode_varint(&mut rest).ok()?;
        } else {
            skip_field(wire, name, &mut rest, DecodeContext::default()).ok()?;
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(mounts: &[(u64, u64)]) -> Vec<u8> {
        let mut out = vec![7; MAGIC];
        for (shared, master) in mounts {
            let mut message = Vec::new();
            for (field, value) in [(2, 5), (SHARED_ID, *shared), (MASTER_ID, *master)] {
                encode_key(field, WireType::Varint, &mut message);
                encode_varint(value, &mut message);
            }
            out.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            out.extend(message);
        }
        out
    }

    fn masters(image: &[u8]) -> Vec<u64> {
        let (mut rest, mut all) = (&image[MAGIC..], Vec::new());
        while let Some((length, behind)) = rest.split_first_chunk::<4>() {
            let length = u32::from_le_bytes(*length) as usize;
            all.push(number(&behind[..length], MASTER_ID).unwrap());
            rest = &behind[length..];
        }
        all
    }

    #[test]
    fn masters_outside_of_the_container() {
        // Two slaves of the host, two peers that are slaves, a slave of a mount inside, a private one.
        let changed = apart(&image(&[(0, 3), (0, 3), (9, 3), (9, 3), (0, 9), (0, 0)])).unwrap();
        let now = masters(&changed);
        assert!(now[0] != now[1] && now[0] != 3 && now[1] != 3);
        assert!(now[2] == now[3] && now[2] != now[0]);
        assert_eq!(now[4..], [9, 0]);
        assert_eq!(apart(&image(&[(0, 0), (9, 0), (0, 9)])), None);
        assert_eq!(apart(b"short"), None);
        assert_eq!(apart(&[&[0; 8][..], &[9, 0, 0, 0, 1]].concat()), None);
    }
}
