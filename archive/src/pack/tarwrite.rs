//! Writes tar headers that are the same for the same content: owner 0, time 0.

use std::io;

use tar::{EntryType, Header};

use crate::format::entry::{Entry, EntryKind};

pub(super) const BLOCK: u64 = 512;
/// Longest name that fits into the header itself.
const SHORT: usize = 100;

/// Returns the header of an entry, preceded by a GNU long name if needed.
pub(super) fn header(entry: &Entry) -> io::Result<Vec<u8>> {
    let mut name = entry.name.clone();
    let (kind, mode) = match entry.kind {
        EntryKind::File => (EntryType::Regular, entry.mode),
        EntryKind::Directory => {
            name.push('/');
            (EntryType::Directory, entry.mode | 0o700)
        }
        EntryKind::ParentLink { .. } => (EntryType::Symlink, 0o777),
    };
    let mut out = Vec::with_capacity(BLOCK as usize);
    if name.len() > SHORT {
        let mut long = blank(EntryType::GNULongName, 0o644, name.len() as u64 + 1);
        set_name(&mut long, b"././@LongLink");
        long.set_cksum();
        out.extend_from_slice(long.as_bytes());
        out.extend_from_slice(name.as_bytes());
        out.resize(
            out.len().next_multiple_of(BLOCK as usize)
                + if name.len().is_multiple_of(512) {
                    512
                } else {
                    0
                },
            0,
        );
    }
    let mut header = blank(kind, mode, entry.size);
    set_name(&mut header, &name.as_bytes()[..name.len().min(SHORT)]);
    if let EntryKind::ParentLink { target } = &entry.kind {
        header.set_link_name_literal(target)?;
    }
    header.set_cksum();
    out.extend_from_slice(header.as_bytes());
    Ok(out)
}

fn blank(kind: EntryType, mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(size);
    header
}

fn set_name(header: &mut Header, name: &[u8]) {
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
}

/// Returns the bytes from a file's end to the next block.
pub(super) fn padding(size: u64) -> u64 {
    size.next_multiple_of(BLOCK) - size
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::tarread::TarReader;
    use crate::format::limits::Limits;

    #[test]
    fn names_of_every_length_come_back() {
        for len in [1, 99, 100, 101, 254, 255, 256, 510, 511, 512, 513] {
            let name: String = (0..len)
                .map(|i| if i % 200 == 199 { '/' } else { 'a' })
                .collect();
            for kind in [EntryKind::File, EntryKind::Directory] {
                let entry = Entry {
                    name: name.clone(),
                    kind,
                    size: 0,
                    mode: 0o700,
                    layer: None,
                };
                let mut bytes = header(&entry).unwrap();
                assert_eq!(bytes.len() % 512, 0);
                bytes.resize(bytes.len() + 1024, 0);
                let mut reader = TarReader::new(&bytes[..], &Limits::default(), None);
                assert_eq!(reader.next().unwrap(), Some(entry));
                assert_eq!(reader.next().unwrap(), None);
            }
        }
        let huge = Entry::file("a", 20 << 30);
        let bytes = header(&huge).unwrap();
        let mut reader = TarReader::new(&bytes[..], &Limits::default(), None);
        assert_eq!(reader.next().unwrap(), Some(huge));
    }
}
