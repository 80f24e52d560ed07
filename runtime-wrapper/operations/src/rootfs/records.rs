//! Reads the entries of a tar of changes, within bounds: the tar may be a stranger's.
//!
//! Names that do not fit into a header come as GNU's long names, and a program's capabilities and [`LITERAL`] as PAX
//! records, as [`mod@super::capture`] writes them. Everything else in PAX (another size, another name) is refused, so that no two
//! readers can understand the tar differently.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use tar::{Archive, EntryType, Header, PaxExtensions};

use super::{CAPABILITY, LITERAL};
use crate::config::rootfs::RootfsOptions;
use crate::security::tar_end::EndCheck;

/// Longest name in bytes, as the kernel takes it.
const MAX_NAME: u64 = 4096;
const MAX_PAX: u64 = 64 << 10;

/// One entry of a tar.
pub struct TarRecord<'r> {
    pub path: PathBuf,
    /// Target, if it is a link.
    pub link: Option<PathBuf>,
    pub capability: Option<Vec<u8>>,
    /// No whiteout, whatever its name.
    pub literal: bool,
    pub header: Header,
    pub content: &'r mut dyn Read,
}

/// Extension records before an entry.
#[derive(Default)]
struct AheadRecords {
    path: Option<PathBuf>,
    link: Option<PathBuf>,
    capability: Option<Vec<u8>>,
    literal: bool,
}

/// Visits the entries of a tar in order.
///
/// # Errors
/// The tar has no end mark, too: an empty file would restore nothing, silently.
pub fn each(
    tar: &File,
    bounds: &RootfsOptions,
    visit: &mut dyn FnMut(&mut TarRecord<'_>) -> io::Result<()>,
) -> io::Result<()> {
    let mut reader = BufReader::with_capacity(32 << 10, tar);
    reader.rewind()?;
    let mut archive = Archive::new(EndCheck::new(reader));
    let (mut entries, mut bytes) = (0u64, 0u64);
    let mut ahead = AheadRecords::default();
    for entry in archive.entries_with_seek()?.raw(true) {
        let mut entry = entry?;
        let header = entry.header().clone();
        let size = header.entry_size()?;
        // A long name or a record belongs to the entry behind it: what was packed within the bounds is within them.
        let is_ahead = matches!(
            header.entry_type(),
            EntryType::GNULongName | EntryType::GNULongLink | EntryType::XHeader
        );
        if !is_ahead {
            entries += 1;
            bytes = bytes.saturating_add(size);
        }
        if entries > bounds.max_files {
            return Err(io::Error::other(format!(
                "more than {} files (rootfs.max_files in the configuration)",
                bounds.max_files
            )));
        }
        if bytes > bounds.max_bytes() {
            return Err(io::Error::other(format!(
                "more than {} GiB (rootfs.max_gib in the configuration)",
                bounds.max_gib
            )));
        }
        match header.entry_type() {
            EntryType::GNULongName => ahead.path = Some(name(&text(&mut entry, size, MAX_NAME)?)),
            EntryType::GNULongLink => ahead.link = Some(name(&text(&mut entry, size, MAX_NAME)?)),
            EntryType::XHeader => {
                pax(&text(&mut entry, size, MAX_PAX)?, &mut ahead)?;
            }
            EntryType::XGlobalHeader => {
                return Err(io::Error::other("a PAX record for all files"));
            }
            _ => {
                let AheadRecords {
                    path,
                    link,
                    capability,
                    literal,
                } = std::mem::take(&mut ahead);
                let path = path.unwrap_or_else(|| name(&header.path_bytes()));
                let link = link.or_else(|| header.link_name_bytes().map(|l| name(&l)));
                let mut record = TarRecord {
                    path,
                    link,
                    capability,
                    literal,
                    header,
                    content: &mut entry,
                };
                visit(&mut record).map_err(|e| {
                    io::Error::new(e.kind(), format!("/{}: {e}", record.path.display()))
                })?;
            }
        }
    }
    archive.into_inner().finish()
}

fn text(entry: &mut impl Read, size: u64, max: u64) -> io::Result<Vec<u8>> {
    if size > max {
        return Err(io::Error::other(format!(
            "a name or record of {size} bytes; at most {max} can be right"
        )));
    }
    let mut text = Vec::new();
    entry.read_to_end(&mut text)?;
    Ok(text)
}

/// The bytes up to a NUL.
fn name(bytes: &[u8]) -> PathBuf {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    Path::new(OsStr::from_bytes(&bytes[..end])).to_owned()
}

fn pax(record: &[u8], ahead: &mut AheadRecords) -> io::Result<()> {
    let key = format!("SCHILY.xattr.{CAPABILITY}");
    for extension in PaxExtensions::new(record) {
        let extension = extension?;
        match (extension.key_bytes(), extension.value_bytes()) {
            (name, value) if name == key.as_bytes() => ahead.capability = Some(value.to_vec()),
            (name, b"1") if name == LITERAL.as_bytes() => ahead.literal = true,
            (name, _) => {
                return Err(io::Error::other(format!(
                    "a PAX record of {:?}, which this build of cryopod does not write",
                    String::from_utf8_lossy(name)
                )));
            }
        }
    }
    Ok(())
}
