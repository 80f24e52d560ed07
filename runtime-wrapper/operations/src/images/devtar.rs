//! Rewrites the archived `/dev`: renumbers device nodes in a gzipped tar archive, and adds nodes.
//!
//! The archive is GNU tar's, with sparse files. It is copied block by block, each entry unchanged unless it is one of
//! the nodes. Names longer than a header come in an entry of their own before it (types `L` and `x`).

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use cryopod_host::files::create_private;
use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{EntryType, Header};

use crate::security::tar_end::{GzipMembers, cut_off, drain};

const BLOCK: usize = 512;
const MAX_EXTENSION: u64 = 1 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TarNode {
    /// Its path below the archived directory.
    pub path: PathBuf,
    /// The archived node whose mode, owner and times it takes. Where that is gone, one with the same number has another:
    /// libcuda removes a node whose name is another GPU's, and can make it anew only with `CAP_MKNOD`.
    pub model: PathBuf,
    /// Permission bits, owner and group, if the model is not in the archive (it is mounted). Without them a missing
    /// model is an error.
    pub otherwise: Option<(u32, u32, u32)>,
    pub major: u64,
    pub minor: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum TarError {
    #[error("{path}: {what}: {source}")]
    Io {
        path: PathBuf,
        what: &'static str,
        source: io::Error,
    },
    #[error(
        "{path}: the archived /dev has no device {model:?}, of which cryopod.json says that the container has it; the archive is damaged"
    )]
    NoModel { path: PathBuf, model: PathBuf },
}

/// Copies the archive with these nodes. After an error `to` may be incomplete.
pub fn rewrite(from: &Path, to: &Path, nodes: &[TarNode]) -> Result<(), TarError> {
    let io = |path: &Path, what| {
        let path = path.to_owned();
        move |source| TarError::Io { path, what, source }
    };
    let unread = "cannot read the archived /dev";
    let unwritten = "cannot write the changed /dev";
    let input = File::open(from).map_err(io(from, unread))?;
    let output = create_private(to).map_err(io(to, unwritten))?;
    let mut packer = GzEncoder::new(BufWriter::new(output), Compression::fast());
    let mut copy = Copy {
        input: GzipMembers::new(BufReader::new(input)),
        output: &mut packer,
        nodes,
        models: vec![None; nodes.len()],
    };
    copy.run().map_err(io(from, unread))?;
    let models = std::mem::take(&mut copy.models);
    for (node, model) in nodes.iter().zip(&models) {
        let is_twin = |(n, _): &(&TarNode, _)| (n.major, n.minor) == (node.major, node.minor);
        let of_twin = || {
            let mut twins = nodes.iter().zip(&models).filter(is_twin);
            twins.find_map(|(_, model)| model.clone())
        };
        let header = model.clone().or_else(|| fresh(node)).or_else(of_twin);
        let Some(mut header) = header else {
            return Err(TarError::NoModel {
                path: from.to_owned(),
                model: node.model.clone(),
            });
        };
        add(&mut packer, &mut header, node).map_err(io(to, unwritten))?;
    }
    packer
        .write_all(&[0; 2 * BLOCK])
        .and_then(|()| packer.finish()?.flush())
        .map_err(io(to, unwritten))
}

struct Copy<'a, R, W> {
    input: R,
    output: W,
    nodes: &'a [TarNode],
    /// The header of each node's model, once it has been seen.
    models: Vec<Option<Header>>,
}

impl<R: Read, W: Write> Copy<'_, R, W> {
    fn run(&mut self) -> io::Result<()> {
        // Extension headers that belong to the next entry, and the name that they give it.
        let mut ahead: Vec<u8> = Vec::new();
        let mut long_name: Option<PathBuf> = None;
        let mut header = Header::new_gnu();
        loop {
            self.input
                .read_exact(header.as_mut_bytes())
                .map_err(|e| match e.kind() {
                    io::ErrorKind::UnexpectedEof => cut_off(),
                    _ => e,
                })?;
            if header.as_bytes().iter().all(|b| *b == 0) {
                // What is rewritten has a checksum of its own: it would hide the damage.
                return drain(&mut self.input);
            }
            checked(&header)?;
            let kind = header.entry_type();
            if matches!(kind.as_byte(), b'L' | b'K' | b'x') {
                let size = header.entry_size()?;
                if size > MAX_EXTENSION {
                    return Err(invalid("a name is too long"));
                }
                ahead.extend(header.as_bytes());
                let start = ahead.len();
                let padded = size.next_multiple_of(BLOCK as u64);
                let got = (&mut self.input).take(padded).read_to_end(&mut ahead)?;
                if got as u64 != padded || ahead.len() as u64 > 4 * MAX_EXTENSION {
                    return Err(invalid("it is cut off"));
                }
                let content = ahead.get(start..).and_then(|c| c.get(..size as usize));
                if let Some(name) = content.and_then(|c| named(kind, c)) {
                    long_name = Some(name);
                }
                continue;
            }
            let name = match long_name.take() {
                Some(name) => name,
                None => header.path()?.into_owned(),
            };
            let name = name.strip_prefix(".").unwrap_or(&name).to_owned();
            if kind == EntryType::Char {
                for (node, model) in self.nodes.iter().zip(&mut self.models) {
                    if node.model == name {
                        *model = Some(header.clone());
                    }
                }
            }
            // Drops an entry with the name of a node: the node comes at the end.
            let mut sink = io::sink();
            let dropped = self.nodes.iter().any(|n| n.path == name);
            let out: &mut dyn Write = if dropped { &mut sink } else { &mut self.output };
            out.write_all(&std::mem::take(&mut ahead))?;
            out.write_all(header.as_bytes())?;
            content(&mut self.input, out, &header)?;
        }
    }
}

/// Copies what follows an entry's header: the rest of a sparse file's map, and the data.
fn content(input: &mut impl Read, out: &mut dyn Write, header: &Header) -> io::Result<()> {
    let sparse = header
        .as_gnu()
        .filter(|_| header.entry_type() == EntryType::GNUSparse);
    let mut more = sparse.is_some_and(tar::GnuHeader::is_extended);
    while more {
        let mut map = tar::GnuExtSparseHeader::new();
        input.read_exact(map.as_mut_bytes())?;
        more = map.is_extended();
        out.write_all(map.as_bytes())?;
    }
    let size = match header.entry_type() {
        // These have no data, whatever the header says.
        EntryType::Char | EntryType::Block | EntryType::Directory | EntryType::Fifo => 0,
        EntryType::Link | EntryType::Symlink => 0,
        _ => header.entry_size()?,
    };
    let padded = size
        .checked_next_multiple_of(BLOCK as u64)
        .ok_or_else(|| invalid("a size is too large"))?;
    match io::copy(&mut input.take(padded), out)? {
        copied if copied == padded => Ok(()),
        _ => Err(invalid("it is cut off")),
    }
}

fn fresh(node: &TarNode) -> Option<Header> {
    let (mode, uid, gid) = node.otherwise?;
    let mut header = Header::new_gnu();
    header.set_mode(mode);
    header.set_uid(uid.into());
    header.set_gid(gid.into());
    header.set_mtime(0);
    Some(header)
}

fn add(out: &mut impl Write, header: &mut Header, node: &TarNode) -> io::Result<()> {
    let number = |n: u64| u32::try_from(n).map_err(io::Error::other);
    header.set_path(Path::new(".").join(&node.path))?;
    header.set_entry_type(EntryType::Char);
    header.set_size(0);
    header.set_device_major(number(node.major)?)?;
    header.set_device_minor(number(node.minor)?)?;
    header.set_cksum();
    out.write_all(header.as_bytes())
}

fn checked(header: &Header) -> io::Result<()> {
    let bytes = header.as_bytes();
    // The sum of all bytes, with the eight of the checksum taken as blanks.
    let sum: u32 = bytes
        .iter()
        .enumerate()
        .map(|(i, b)| u32::from(if (148..156).contains(&i) { b' ' } else { *b }))
        .sum();
    if header.cksum()? == sum {
        Ok(())
    } else {
        Err(invalid("a header's sum is wrong"))
    }
}

/// Returns the name that an extension header gives to the next entry.
fn named(kind: EntryType, content: &[u8]) -> Option<PathBuf> {
    use std::os::unix::ffi::OsStrExt;
    let path = |bytes: &[u8]| PathBuf::from(std::ffi::OsStr::from_bytes(bytes));
    match kind.as_byte() {
        b'L' => Some(path(content.split(|b| *b == 0).next().unwrap_or_default())),
        b'x' => tar::PaxExtensions::new(content)
            .filter_map(Result::ok)
            .filter(|e| e.key_bytes() == b"path")
            .map(|e| path(e.value_bytes()))
            .last(),
        _ => None,
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

#[cfg(test)]
mod tests;
