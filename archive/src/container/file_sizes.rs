//! Compares the files of a container that an archive carries with those that CRIU saw open.
//!
//! An engine packs the files of a container that goes on running after CRIU's dump. CRIU restores no file that is open
//! and has grown or shrunk since (`File ... has bad size`). cryopod's own tar is of the moment of the dump, and a restore
//! unpacks it over the engine's.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::criu::{ImageError, open_files};
use crate::error::{Bad, Error};
use crate::format::limits::Limits;
use crate::format::names;
use crate::source::Source;

const BLOCK: usize = 512;
/// Longest name that is read, in bytes.
const MAX_NAME: u64 = 64 << 10;

/// The files that processes have open, and their sizes in the archive's tars.
#[derive(Debug, Default)]
pub struct FileSizes {
    /// By path, without the first `/`.
    saved: BTreeMap<String, u64>,
    packed: Mutex<PackedSizes>,
}

#[derive(Debug, Default)]
struct PackedSizes {
    by_engine: BTreeMap<String, u64>,
    by_cryopod: BTreeMap<String, u64>,
}

/// Returns true if [`FileSizes::of`] reads this file of an archive.
pub fn is_wanted(name: &str) -> bool {
    in_images(name).is_some_and(open_files::is_wanted)
}

fn in_images(name: &str) -> Option<&str> {
    name.strip_prefix(names::CHECKPOINT_DIR)?.strip_prefix('/')
}

impl FileSizes {
    /// `files`: those of the archive that [`is_wanted`].
    pub fn of(source: &Source, files: &BTreeMap<String, Vec<u8>>) -> Result<Self, Error> {
        let wrong = |e: ImageError| {
            let (name, reason) = (names::CHECKPOINT_DIR.to_owned(), e.to_string());
            Error::bad(source.path(), Bad::Content { name, reason })
        };
        let images = files.iter();
        let images =
            images.filter_map(|(name, text)| Some((in_images(name)?.to_owned(), text.clone())));
        Ok(Self {
            saved: open_files::sizes(&images.collect()).map_err(wrong)?,
            ..Self::default()
        })
    }

    /// Returns true if this file of the archive is a tar whose sizes count.
    pub fn counts(&self, name: &str) -> bool {
        !self.saved.is_empty() && self.tar(name).is_some()
    }

    /// Whether a tar is cryopod's own; `None`: it is none of the container's files.
    fn tar(&self, name: &str) -> Option<bool> {
        let of_containerd = name.strip_prefix(names::CONTAINERD_DIR);
        let of_containerd = of_containerd.and_then(|rest| rest.strip_prefix('/'));
        let of_engine = name == names::ROOTFS_DIFF || of_containerd == Some(names::CONTAINERD_RW);
        let of_cryopod = in_images(name) == Some(names::CARRIED_ROOTFS);
        (of_engine || of_cryopod).then_some(of_cryopod)
    }

    /// Reads a tar of the archive, plain or compressed with gzip, of `size` bytes. Returns how many there were.
    pub fn read(&self, name: &str, size: u64, reader: &mut dyn Read) -> io::Result<u64> {
        let Some(of_cryopod) = self.tar(name) else {
            return Ok(0);
        };
        let mut start = [0; 2];
        let mut raw = reader.take(size);
        let length = read_up_to(&mut raw, &mut start)?;
        let mut whole =
            io::Cursor::new(start.get(..length).unwrap_or_default().to_vec()).chain(raw);
        let found = match start {
            // gzip's best ratio is 1032.
            [0x1f, 0x8b] => {
                let gunzipped = flate2::read::MultiGzDecoder::new(&mut whole);
                sizes_in(&mut gunzipped.take(size.saturating_mul(1032)), &self.saved)
            }
            _ => sizes_in(&mut whole, &self.saved),
        };
        // A damaged tar is the restore's to report: here it says nothing.
        let mut packed = self.packed();
        match of_cryopod {
            true => packed.by_cryopod.extend(found),
            false => packed.by_engine.extend(found),
        }
        drop(packed);
        io::copy(&mut whole, &mut io::sink())?;
        Ok(size - whole.into_inner().1.limit())
    }

    fn packed(&self) -> MutexGuard<'_, PackedSizes> {
        self.packed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says which files a restore would find with another size.
    pub fn differences(&self) -> Vec<String> {
        let packed = self.packed();
        let in_archive = |path: &str| packed.by_cryopod.get(path).or(packed.by_engine.get(path));
        let differ = self.saved.iter().filter_map(|(path, saved)| {
            let packed = in_archive(path).filter(|packed| *packed != saved)?;
            Some(format!(
                "/{path}: {packed} bytes here, and {saved} when CRIU saved the process that has it open: no restore succeeds (`has bad size`); checkpoint again, without rootfs.carry = \"never\" and dev.cryopod.rootfs=off"
            ))
        });
        differ.collect()
    }
}

/// Returns the sizes of the regular files among `wanted` in a tar, as far as it can be read.
fn sizes_in(tar: &mut dyn Read, wanted: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    let (mut long_name, mut long_size) = (None, None);
    let mut header = [0; BLOCK];
    while matches!(read_up_to(tar, &mut header), Ok(BLOCK)) && header[0] != 0 {
        let Some(stated) = number(&header[124..136]) else {
            break;
        };
        let kind = header[156];
        let size = long_size
            .filter(|_| !matches!(kind, b'x' | b'L'))
            .unwrap_or(stated);
        let padded = size.div_ceil(BLOCK as u64).saturating_mul(BLOCK as u64);
        let mut content = tar.take(padded);
        match kind {
            b'L' | b'x' if size <= MAX_NAME => {
                let mut text = Vec::new();
                if content.read_to_end(&mut text).is_err() {
                    break;
                }
                text.truncate(usize::try_from(size).unwrap_or(0));
                match kind {
                    b'L' => long_name = Some(text_of(&text)),
                    _ => {
                        for (key, value) in records(&text) {
                            match key {
                                "path" => long_name = Some(value.to_owned()),
                                "size" => long_size = value.parse().ok(),
                                _ => {}
                            }
                        }
                    }
                }
                continue;
            }
            b'0' | 0 | b'7' => {
                let name = long_name.take().unwrap_or_else(|| name(&header));
                let name = name.trim_start_matches("./").trim_start_matches('/');
                if wanted.contains_key(name) {
                    found.insert(name.to_owned(), size);
                }
            }
            _ => {}
        }
        if kind != b'g' {
            (long_name, long_size) = (None, None);
        }
        if io::copy(&mut content, &mut io::sink()).is_err() {
            break;
        }
    }
    found
}

fn read_up_to(from: &mut dyn Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while let Some(rest) = buffer.get_mut(length..).filter(|rest| !rest.is_empty()) {
        match from.read(rest)? {
            0 => break,
            n => length += n,
        }
    }
    Ok(length)
}

/// A number in octal digits, or in base 256 with the first bit set.
fn number(field: &[u8]) -> Option<u64> {
    match field.split_first()? {
        (first, rest) if first & 0x80 != 0 => {
            let digits = rest.iter().rev().take(8).rev();
            Some(digits.fold(0, |all, digit| all << 8 | u64::from(*digit)))
        }
        _ => {
            let text = std::str::from_utf8(field).ok()?;
            let text = text.trim_matches(|c: char| c == '\0' || c.is_whitespace());
            u64::from_str_radix(text, 8).ok()
        }
    }
}

fn text_of(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(bytes.get(..end).unwrap_or_default()).into_owned()
}

fn name(header: &[u8; BLOCK]) -> String {
    let (name, prefix) = (text_of(&header[..100]), text_of(&header[345..500]));
    match &header[257..263] {
        b"ustar\0" if !prefix.is_empty() => format!("{prefix}/{name}"),
        _ => name,
    }
}

/// The records of a PAX header: `LENGTH KEY=VALUE` and a newline.
fn records(text: &[u8]) -> Vec<(&str, &str)> {
    let text = std::str::from_utf8(text).unwrap_or_default();
    let lines = text.lines().filter_map(|line| line.split_once(' '));
    lines
        .filter_map(|(_, record)| record.split_once('='))
        .collect()
}

/// Compares in one more pass over an archive. `files`: those of the archive that [`is_wanted`].
pub fn differences(
    source: &Source,
    files: &BTreeMap<String, Vec<u8>>,
    limits: &Limits,
) -> Result<Vec<String>, Error> {
    let sizes = FileSizes::of(source, files)?;
    if !sizes.saved.is_empty() {
        source.walk(limits, &|_| true, &mut |entry, reader| {
            if !sizes.counts(&entry.name) {
                return Ok(());
            }
            let read = sizes.read(&entry.name, entry.size, reader);
            read.map(drop)
                .map_err(|e| Error::from_io(source.path(), "read it", e))
        })?;
    }
    Ok(sizes.differences())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn tar(files: &[(&str, usize)]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        for (name, size) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(*size as u64);
            header.set_mode(0o644);
            tar.append_data(&mut header, name, &vec![1u8; *size][..])
                .unwrap();
        }
        tar.into_inner().unwrap()
    }

    fn expecting(all: &[(&str, u64)]) -> FileSizes {
        FileSizes {
            saved: all
                .iter()
                .map(|(name, size)| ((*name).to_owned(), *size))
                .collect(),
            ..FileSizes::default()
        }
    }

    #[test]
    fn a_file_that_has_grown() {
        let long = format!("{}/log", "d".repeat(150));
        let sizes = expecting(&[("var/log", 1000), ("same", 5), (&long, 3), ("of/image", 9)]);
        let packed = tar(&[("var/log", 1001), ("same", 5), (&long, 4), ("other", 600)]);
        assert!(sizes.counts("rootfs-diff.tar") && !sizes.counts("config.dump"));
        sizes
            .read("rootfs-diff.tar", packed.len() as u64, &mut &packed[..])
            .unwrap();
        let said = sizes.differences();
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(
            said[1].starts_with("/var/log: 1001 bytes here, and 1000 when CRIU saved"),
            "{said:?}"
        );
        // What cryopod has packed comes over it.
        let own = tar(&[("var/log", 1000), (&long, 3)]);
        sizes
            .read(
                "checkpoint/cryopod-rootfs.tar",
                own.len() as u64,
                &mut &own[..],
            )
            .unwrap();
        assert_eq!(sizes.differences(), [""; 0]);
    }

    #[test]
    fn compressed_and_cut() {
        let packed = tar(&[("a", 7), ("b", 70_000)]);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&packed).unwrap();
        let gzip = gzip.finish().unwrap();
        for packed in [&gzip[..], &packed[..], &packed[..1100]] {
            let sizes = expecting(&[("a", 8)]);
            let mut rest = packed;
            sizes
                .read("rootfs-diff.tar", packed.len() as u64, &mut rest)
                .unwrap();
            assert_eq!(sizes.differences().len(), 1, "{}", packed.len());
        }
    }
}
